"""A model family: facts and functions, nothing else.

The seam law: outside `models/`, latents are `[B, C, h, w]` and always scaled. Packing,
position ids, time ids, latent scale and shift stay in the family's own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.export.layout import Layout

if TYPE_CHECKING:  # facts are read without torch
    import torch
    from torch import Tensor, nn

    from lora_trainer.diffusion.process import Process
    from lora_trainer.models.quantization.store import Narrow

USUAL_FAMILY = "sd15"  # of the built-in base model, and the default where no model is named
Caption = str | tuple[tuple[str, float], ...]  # text, or its parts with the weight of each
CHUNK = 75  # tokens of a caption that CLIP reads at once, without start and end
PREDICTIONS = ("epsilon", "v_prediction")  # of models with a noise schedule


@dataclass(frozen=True)
class ModelFacts:
    """Facts from a model's config files, read without torch."""

    path: Path
    family: str
    resolution: int  # the model's own, pixels
    latent_channels: int
    downscale: int  # pixels per latent along a side
    pixel_step: int  # sides of images must be multiples of this
    prediction: str  # "epsilon", "v_prediction" or "flow"
    caption_tokens: int  # the text encoder's limit, with start and end
    variant: str = ""  # which of the family's models: `medium`, `schnell`; empty where there is one kind
    largest_side: int | None = None  # pixels; None where images may be as large as they are
    named: str = ""  # what people call the model, where that is not its folder
    whole: bool = True  # false where its configs alone are here

    @property
    def name(self) -> str:
        """What files and lines call the model: an id of a hub, or the last part of a path."""
        return self.named or self.path.name


@dataclass(frozen=True)
class Architecture:
    """What memory and time depend on, without weights: facts and the denoiser's config."""

    facts: ModelFacts
    denoiser: Mapping[str, Any]


def public_architecture(name: str) -> Architecture:
    """The published model of a family, for planning and measuring where there is no folder; or `small`, 30 M weights.

    Its path is the file that describes it: whatever lies where the command was started, it is no folder of a model.
    """
    file = files("lora_trainer.models") / "architectures" / f"{name}.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    facts = ModelFacts(path=Path(str(file)), named=name, **{"family": name, **document["facts"]})
    return Architecture(facts, document["denoiser"])


def public_forms(name: str) -> list[dict[str, Any]]:
    """Configs of the denoisers of all published models of a family, as far as their layers' shapes differ."""
    text = (files("lora_trainer.models") / "architectures" / f"{name}.json").read_text(encoding="utf-8")
    document = json.loads(text)
    return [document["denoiser"], *({**document["denoiser"], **other} for other in document.get("others", ()))]


@dataclass(frozen=True)
class Encoders:
    """The frozen encoders, as two functions and the names of their weights.

    `encode_image`: pixels [B, 3, H, W] in [-1, 1] -> (mean, spread), each [B, C, h, w],
    of the scaled latents' posterior. `encode_text`: B captions, as text or as weighted
    parts -> tensors with B first.
    """

    encode_image: Callable[[Tensor], tuple[Tensor, Tensor]]
    encode_text: Callable[[Sequence[Caption]], dict[str, Tensor]]
    image_key: str  # changes when the VAE's weights, config or precision change
    text_key: str  # likewise for text encoders and tokenizers


@dataclass(frozen=True)
class TextOptions:
    """Options of text encoding that differ from the model's defaults.

    `clip_skip` counts CLIP's layers from the end, 1 the last. `clip_tokens` are read in chunks of 75. `without` names
    text encoders that are not used.
    """

    clip_skip: int | None = None
    clip_tokens: int = 75
    t5_tokens: int | None = None
    without: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        """How many chunks CLIP reads a caption in."""
        return self.clip_tokens // CHUNK

    @property
    def key(self) -> str:
        """The options' part of the key of text embeddings: nothing where they are the defaults."""
        if self == PLAIN:
            return ""
        values = ",".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))
        return f"-{sha256(values.encode()).hexdigest()[:16]}"

    def longest(self, own: int) -> int:
        """The longest caption in tokens, start and end among them, where the model's default is `own`."""
        longest = self.t5_tokens or (min(own, CHUNK + 2) if self.without else own)
        return longest if self.chunks == 1 else max(longest, CHUNK * self.chunks + 2)


PLAIN = TextOptions()


def refuse_options(folder: Path, options: TextOptions) -> None:
    """For families without text options. Raises UsageError for any."""
    raise UsageError(Problem(f"{folder} reads captions in one way only.", "Remove the settings of [text_encoder]."))


@dataclass(frozen=True)
class SamplingDefaults:
    """How images are generated with a model: its usual steps, whether it uses a guidance scale, and whether it
    uses a negative prompt."""

    steps: int = 25
    guided: bool = True
    negative: bool = True


def usual_sampling(folder: Path) -> SamplingDefaults:
    """Of models with classifier-free guidance (arXiv:2207.12598)."""
    return SamplingDefaults()


def prompt_embeds(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The arguments of most pipelines for the text embeddings of prompts and of negative prompts."""
    arguments: dict[str, Any] = {f"{'pooled_' if name == 'pooled' else ''}prompt_embeds": cond[name] for name in cond}
    for name, value in (negative or {}).items():
        arguments[f"negative_{'pooled_' if name == 'pooled' else ''}prompt_embeds"] = value
    return arguments


@dataclass(frozen=True)
class TextParts:
    """Text encoders in memory and their tokenizers, both by the component's name: `text_encoder`, `text_encoder_2`.

    `place` is the device they compute on, for encoders with offloaded layers: their weights do not say it. `width` is
    that of the denoiser's text input, where it may be wider than the embeddings; 0 where it is not.
    """

    encoders: Mapping[str, nn.Module]
    tokenizers: Mapping[str, Any]
    place: torch.device | None = None
    width: int = 0

    @property
    def device(self) -> torch.device:
        """Where the captions' tokens must be."""
        if self.place is not None:
            return self.place
        return next(iter(next(iter(self.encoders.values())).parameters())).device


JoinText = Callable[[Mapping[str, "Tensor"], Mapping[str, "Tensor"]], dict[str, "Tensor"]]
EncodeText = Callable[[TextParts, Sequence[Caption], TextOptions], dict[str, "Tensor"]]
LoadImageEncoder = Callable[[Path, "torch.dtype", "torch.device"], Callable[["Tensor"], tuple["Tensor", "Tensor"]]]


class LoadTexts(Protocol):
    """Loads a folder's text encoders, frozen, on a device, but for those of `without` that it can do without.

    Without `dtype` they keep the file's own precision, and on a CPU stay mapped: to be offloaded, not run as they are.
    """

    def __call__(
        self, folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
    ) -> TextParts: ...


class LoadEncoders(Protocol):
    """Loads a folder's encoders, frozen, on a device: VAE and text encoders each when they are first used."""

    def __call__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, text: TextOptions = PLAIN, /
    ) -> Encoders: ...


class EncoderKeys(Protocol):
    """Names of the image and the text encoders' weights, without loading them."""

    def __call__(self, folder: Path, dtype: torch.dtype, text: TextOptions = PLAIN, /) -> tuple[str, str]: ...


class CondShapes(Protocol):
    """Shapes of what `encode_text` returns for one caption, for a denoiser's config."""

    def __call__(self, config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> Mapping[str, tuple[int, ...]]: ...


class LoadDenoiser(Protocol):
    """Loads the denoiser of a folder, frozen, on a device; `narrow` quantizes each layer as it is loaded."""

    def __call__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None, /
    ) -> nn.Module: ...


@dataclass(frozen=True)
class Family:
    """A model family as a bundle of callables.

    `load_texts` and `encode_text` are the parts of `load_encoders` (`encoders.encoders_from`): the second keeps
    gradients, so that text encoders can be trained, and runs those of a pipeline too. `text_targets` are the patterns of
    modules for a LoRA on each text encoder; encoders without patterns are not trained. `layout` pairs names of diffusers
    with those of the original code, and is empty where LoRA files of all programs use diffusers' own; `also` are names
    that are read in LoRA files and never written.
    `cached_texts` are the large text encoders: their embeddings are cached and they leave memory, unless they are trained.
    `joined_text` adds their cached embeddings (second argument) to those of the other encoders (first); None where there
    are none. The others, of CLIP, are `word_texts`: textual inversion can train tokens of theirs.
    `check_text` raises UsageError for options that the text encoders of a folder cannot follow; `spare_texts` are
    encoders that the model can do without.
    `lora_targets` maps `attention` and `attention+ff` to patterns of module names.
    `make_denoiser` builds from a config on torch's current default device (`meta` costs nothing), with random weights;
    `thin` reduces a config to the same kinds of blocks with a few percent of the weights, as `thinness` describes.
    `cond_shapes` gives, for a denoiser's config, the shapes of `encode_text`'s tensors for one caption. `base_names` are
    the base model's names in LoRA files: `ss_base_model_version` and `modelspec.architecture`. `make_pipeline` leaves
    text encoders without a LoRA in their stored precision (`evaluation/placing.py` widens them). `sampling_defaults`
    are a folder's defaults for generating images, and `prompted` the pipeline's arguments from `encode_text`.
    `lora_readers` are the programs that were seen to read the family's LoRA files whole, each with the style of their
    names, and `passed_over` the modules that they skip then.
    """

    name: str
    describe: Callable[[Path], ModelFacts]
    encoder_keys: EncoderKeys
    load_encoders: LoadEncoders
    load_texts: LoadTexts
    encode_text: EncodeText
    load_denoiser: LoadDenoiser
    make_process: Callable[[Path], Process]
    predict: Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]
    make_pipeline: Callable[[Path, torch.dtype, torch.device], Any]
    lora_targets: Mapping[str, tuple[str, ...]]
    denoiser_prefix: str  # "unet" or "transformer": the component's name in diffusers files
    kohya_prefixes: Mapping[str, str]  # component -> beginning of its keys in kohya's files
    make_denoiser: Callable[[Mapping[str, Any]], nn.Module]
    cond_shapes: CondShapes
    thin: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    thinness: str
    base_names: Callable[[ModelFacts], tuple[str, str]]
    text_targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layout: Layout = ()
    also: Layout = ()
    check_text: Callable[[Path, TextOptions], None] = refuse_options
    spare_texts: tuple[str, ...] = ()
    sampling_defaults: Callable[[Path], SamplingDefaults] = usual_sampling
    prompted: Callable[[Mapping[str, Tensor], Mapping[str, Tensor] | None], dict[str, Any]] = prompt_embeds
    text: TextOptions = PLAIN
    joined_text: JoinText | None = None
    cached_texts: tuple[str, ...] = ()
    lora_readers: tuple[str, ...] = ()  # `PROGRAM: STYLE`, a style of `export.inspection`
    passed_over: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # program -> beginnings of modules

    def text_rates(self, rates: Sequence[float]) -> dict[str, float]:
        """The learning rate of each trained text encoder, by component, from `text_encoder.learning_rates`.

        Raises UsageError for one that cannot be trained.
        """
        names = tuple(self.text_targets)
        if any(rates[len(names) :]):
            message = f"text_encoder.learning_rates holds {counted(len(rates), 'rate')}, and of the text encoders of {self.name} "
            if not names:
                why = "none can be trained: no LoRA is trained on a language model, where diffusers reads none."
                raise UsageError(Problem(message + why, "Leave text_encoder.learning_rates empty."))
            from lora_trainer.config.toml import shown

            fix = f"Set at most {counted(len(names), 'rate')}: --set 'text_encoder.learning_rates={shown(rates[: len(names)])}'"
            raise UsageError(Problem(f"{message}these can be trained: {', '.join(names)}.", fix))
        trained = {name: rate for name, rate in zip(names, rates, strict=False) if rate}
        if skipped := [name for name in trained if name in self.text.without]:
            message = f"text_encoder.learning_rates has a rate for {skipped[0]}, which model.without_t5 skips."
            raise UsageError(Problem(message, "Set its rate to 0, or remove model.without_t5."))
        return trained

    @property
    def word_texts(self) -> tuple[str, ...]:
        """Its CLIP text encoders, which textual inversion can train tokens of."""
        return tuple(name for name in self.text_targets if name not in self.cached_texts)

    def left_in_cache(self, changed: Collection[str]) -> tuple[str, ...]:
        """Those of `cached_texts` that are not needed once captions are cached, where `changed` encoders are trained."""
        return tuple(name for name in self.cached_texts if name not in changed)

    def encode_captions(
        self, parts: TextParts, captions: Sequence[Caption], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The text embeddings of B captions, with gradients, by the encoders of `parts` as they are now.

        `known` are the embeddings of these captions by all encoders, where some are not among the parts.
        """
        encoded = self.encode_text(parts, captions, self.text)
        whole = all(name in parts.encoders for name in self.cached_texts)
        return encoded if self.joined_text is None or whole else self.joined_text(encoded, known)

    def reading(self, text: TextOptions) -> Family:
        """The same family, whose encoders read captions by these options wherever they are loaded.

        Its `describe` raises UsageError for options that a folder's encoders cannot follow.
        """
        if text == self.text:
            return self

        def describe(folder: Path) -> ModelFacts:
            facts = self.describe(folder)
            self.check_text(folder, text)
            return replace(facts, caption_tokens=text.longest(facts.caption_tokens))

        def keys(folder: Path, dtype: torch.dtype, _: TextOptions = PLAIN, /) -> tuple[str, str]:
            return self.encoder_keys(folder, dtype, text)

        def load(folder: Path, dtype: torch.dtype, device: torch.device, _: TextOptions = PLAIN, /) -> Encoders:
            return self.load_encoders(folder, dtype, device, text)

        def shapes(config: Mapping[str, Any], _: TextOptions = PLAIN, /) -> Mapping[str, tuple[int, ...]]:
            return self.cond_shapes(config, text)

        return replace(self, text=text, describe=describe, encoder_keys=keys, load_encoders=load, cond_shapes=shapes)
