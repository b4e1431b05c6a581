"""What the trainer knows of a model family: facts and functions, nothing else.

The seam law: outside `models/`, latents are `[B, C, h, w]` and always scaled. Packing,
position ids, time ids, latent scale and shift stay in the family's own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from lora_trainer.core.errors import Problem, UsageError

if TYPE_CHECKING:  # facts are read without torch
    import torch
    from torch import Tensor, nn

    from lora_trainer.diffusion.process import Process
    from lora_trainer.models.storage.store import Narrow

USUAL_FAMILY = "sd15"  # the built-in base's, and what is assumed where no model is named
Caption = str | tuple[tuple[str, float], ...]  # text, or pieces of it with the weight of each
PREDICTIONS = ("epsilon", "v_prediction")  # of models with a noise schedule


@dataclass(frozen=True)
class ModelFacts:
    """What a model's config files say, read without torch."""

    path: Path
    family: str
    resolution: int  # the model's own, pixels
    latent_channels: int
    downscale: int  # pixels per latent along a side
    pixel_step: int  # sides of pictures must be multiples of this
    prediction: str  # "epsilon", "v_prediction" or "flow"
    caption_tokens: int  # the text encoder's limit, with start and end


@dataclass(frozen=True)
class Architecture:
    """What memory and time hang on, without weights: facts and the denoiser's config."""

    facts: ModelFacts
    denoiser: Mapping[str, Any]


def public_architecture(name: str) -> Architecture:
    """The published model of a family, for planning and measuring where there is no folder; or `small`, 30 M weights."""
    text = (files("lora_trainer.models") / "architectures" / f"{name}.json").read_text(encoding="utf-8")
    document = json.loads(text)
    facts = ModelFacts(path=Path(name), **{"family": name, **document["facts"]})
    return Architecture(facts, document["denoiser"])


@dataclass(frozen=True)
class Encoders:
    """The frozen encoders, as two functions and the names of their weights.

    `encode_image`: pixels [B, 3, H, W] in [-1, 1] -> (mean, spread), each [B, C, h, w],
    of the scaled latents' posterior. `encode_text`: B captions, as text or as pieces with
    weights -> tensors with B first.
    """

    encode_image: Callable[[Tensor], tuple[Tensor, Tensor]]
    encode_text: Callable[[Sequence[Caption]], dict[str, Tensor]]
    image_key: str  # changes when the autoencoder's weights, config or precision change
    text_key: str  # likewise for text encoders and tokenizers


class LoadDenoiser(Protocol):
    """Loads the denoiser of a folder, frozen, on a device; `narrow` stores each layer in fewer bits as it comes."""

    def __call__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None, /
    ) -> nn.Module: ...


@dataclass(frozen=True)
class Family:
    """A model family as a bundle of callables.

    `lora_targets` maps `attention` and `attention+ff` to patterns of module names.
    `make_denoiser` builds from a config on torch's current default device (`meta` costs
    nothing), with random weights; `thin` makes of a config one with the same kinds of
    blocks and a few percent of the weights, as `thinness` says in words. `cond_shapes` gives, for a denoiser's config, the shapes
    of what `encode_text` returns for one caption. `base_names` are what LoRA files call the
    base: `ss_base_model_version` and `modelspec.architecture`. Families that are not
    `trained` can be planned and measured only.
    """

    name: str
    describe: Callable[[Path], ModelFacts]
    encoder_keys: Callable[[Path, torch.dtype], tuple[str, str]]
    load_encoders: Callable[[Path, torch.dtype, torch.device], Encoders]
    load_denoiser: LoadDenoiser
    make_process: Callable[[Path], Process]
    predict: Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]
    make_pipeline: Callable[[Path, torch.dtype, torch.device], Any]
    lora_targets: Mapping[str, tuple[str, ...]]
    denoiser_prefix: str  # "unet" or "transformer": the component's name in diffusers files
    kohya_prefixes: Mapping[str, str]  # component -> beginning of its keys in kohya's files
    make_denoiser: Callable[[Mapping[str, Any]], nn.Module]
    cond_shapes: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]]
    thin: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    thinness: str
    base_names: Callable[[ModelFacts], tuple[str, str]]
    trained: bool = True


def planned_family(
    name: str,
    *,
    predict: Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor],
    lora_targets: Mapping[str, tuple[str, ...]],
    make_denoiser: Callable[[Mapping[str, Any]], nn.Module],
    cond_shapes: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]],
    thin: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    thinness: str,
) -> Family:
    """A transformer that is known by its form alone; whatever needs its files raises UsageError."""

    def refuse(*_: object) -> NoReturn:
        raise UsageError(
            Problem(
                f"Models of {name} cannot be trained yet: they can be planned and measured, a later version trains them.",
                f"lora-trainer plan --set model.family={name}; lora-trainer bench step --set model.family={name}",
            )
        )

    return Family(
        name=name,
        describe=refuse,
        encoder_keys=refuse,
        load_encoders=refuse,
        load_denoiser=refuse,
        make_process=refuse,
        predict=predict,
        make_pipeline=refuse,
        lora_targets=lora_targets,
        denoiser_prefix="transformer",
        kohya_prefixes={},
        make_denoiser=make_denoiser,
        cond_shapes=cond_shapes,
        thin=thin,
        thinness=thinness,
        base_names=refuse,
        trained=False,
    )
