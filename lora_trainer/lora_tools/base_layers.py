"""The layers of a base model, in one file of the original layout or in a diffusers folder, by the names that LoRA files use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, UsageError, known_as
from lora_trainer.core.findings import counted
from lora_trainer.core.tensorfile import is_gguf
from lora_trainer.lora_format.reading import some
from lora_trainer.lora_format.weights import AdapterWeights, check_keys, module_name
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import check_part, named_parts, places_of_weights
from lora_trainer.models.places import Place, stored_weights
from lora_trainer.models.quantization.stored_forms import WeightReader
from lora_trainer.models.single.lay_out import places_of_parts
from lora_trainer.models.single.recognize import recognize
from lora_trainer.models.single.stored import USE_BASE

WEIGHT = ".weight"
# Last parts of modules whose weights have two sides and are no linear layers.
EMBEDDINGS = ("token_embedding", "position_embedding", "embed_tokens", "shared", "relative_attention_bias")
SHOWN = 5  # layers that do not fit, of many


@dataclass(frozen=True)
class BaseLayers:
    """A base model. `weights` are the places of linear layers and convolutions by module (`unet.conv_in`), with their `shapes`;
    `rest` those of its other weights that a LoRA does not change, by component and name.
    """

    path: Path
    family: str
    weights: Mapping[str, Place]
    shapes: Mapping[str, tuple[int, ...]]
    rest: Mapping[str, Place]

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """A function that reads one of its weights in fp32, a layer's in the layer's shape."""
        with ExitStack() as stack:
            reader = WeightReader({**self.weights, **self.rest}, stack, torch.device("cpu"), copy=True)

            def read(name: str) -> Tensor:
                weight = reader.read(name, torch.float32)
                return weight.reshape(self.shapes.get(name, weight.shape))

            yield read

    @property
    def components(self) -> set[str]:
        """The parts that it has: `unet` or `transformer`, `text_encoder`, …"""
        return {name.partition(".")[0] for name in self.weights}


def read_base(path: Path, flag: str) -> BaseLayers:
    """A base model's layers, by headers alone. Raises UsageError for what is none; `flag` is how the user named it."""
    if not path.exists():
        raise UsageError(
            Problem(
                "model_missing",
                f"{flag}: there is no model at {path}.",
                "Name a .safetensors file or a diffusers folder.",
            )
        )
    if path.is_dir():
        family = detect_family(path, flag)
        wanted = (FAMILIES[family].denoiser.component, *_text_encoders(family))
        names = named_parts(path, wanted)
        for name in names:
            check_part(path / name)
        parts: dict[str, Mapping[str, Place]] = {name: places_of_weights(path / name) for name in names}
    else:
        with known_as({USE_BASE: f"{flag} is a checkpoint or a folder in diffusers' layout."}):
            checkpoint = recognize(path)
        family = checkpoint.family
        wanted = (FAMILIES[family].denoiser.component, *_text_encoders(family))
        parts = {name: places for name, places in places_of_parts(checkpoint).items() if name in wanted}
    weights, shapes, rest = dict[str, Place](), dict[str, tuple[int, ...]](), dict[str, Place]()
    for component, places in parts.items():
        entries = stored_weights(places)
        for name, place in places.items():
            module, shape = name.removesuffix(WEIGHT), tuple(entries[name]["shape"])
            is_layer = name.endswith(WEIGHT) and len(shape) in (2, 4) and module.rpartition(".")[2] not in EMBEDDINGS
            if is_layer:
                weights[module_name(component, module)] = place
                shapes[module_name(component, module)] = shape
            else:
                rest[f"{component}.{name}"] = place
    return BaseLayers(path, family, weights, shapes, rest)


def read_base_of(name: str, weights: AdapterWeights, path: Path) -> BaseLayers:
    """The base model of a LoRA (`name` in messages), named with --model. Raises UsageError for one that it does not fit."""
    base = read_base(path, "--model")
    if problems := misfits_of(name, weights, base):
        raise UsageError(problems)
    return base


def _text_encoders(family: str) -> tuple[str, ...]:
    """The text encoders that LoRA files of a family may have layers of."""
    return tuple(FAMILIES[family].text.targets)


def misfits_of(name: str, weights: AdapterWeights, base: BaseLayers) -> list[Problem]:
    """Why a LoRA (`name` in messages) is not for a base model: another family, layers that it lacks or has in other sizes."""
    family = FAMILIES[base.family]
    if weights.family not in (None, base.family, family.lora_files.like):
        message = f"{name} was trained on another model family: {weights.family}; {base.path.name} is {base.family}."
        return [Problem("lora_of_other_family", message, "Name a base model of its family.")]
    others = sorted({module.partition(".")[0] for module in weights.modules} - base.components)
    if others:
        message = f"{name} changes {', '.join(others)}, which {base.path.name} does not hold."
        return [
            Problem(
                "lora_of_other_model",
                message,
                "Name a base model that holds them: a whole checkpoint, or a diffusers folder.",
            )
        ]
    problems = check_keys(weights, base.shapes)
    if not problems:
        return []
    shown: Sequence[Problem] = problems[:SHOWN]
    more = f" and {counted(len(problems) - SHOWN, 'more layer')}" if len(problems) > SHOWN else ""
    listed = " ".join(problem.message for problem in shown)
    message = f"{base.path.name} is no base model of {name}: {listed}{more and ' (' + more.strip() + ')'}"
    return [
        Problem(
            "lora_of_other_model", message, "Name the base model that it was trained on, or one of the same layers."
        )
    ]


def refuse_unwritable(base: BaseLayers, modules: Sequence[str]) -> list[Problem]:
    """Why a LoRA cannot be written into a base model's own types."""
    if base.path.is_file() and is_gguf(base.path):
        message = (
            f"{base.path.name} is a GGUF file, whose blocks a changed weight would have to be quantized into again."
        )
        return [
            Problem("base_is_quantized", message, "Name the checkpoint that it was made from, in fp16, bf16 or fp32.")
        ]
    packed = [name for name in modules if name in base.weights and base.weights[name].scaled is not None]
    if packed:
        message = f"{base.path.name} stores {counted(len(packed), 'layer')} of the LoRA in 8 bits with scales ({some(packed)})."
        return [
            Problem(
                "base_is_quantized",
                message,
                "Name the checkpoint in fp16, bf16 or fp32: 8 bits would round most of a LoRA away.",
            )
        ]
    return []
