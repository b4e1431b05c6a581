"""What the trainer knows of a model family: facts and functions, nothing else.

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

USUAL_FAMILY = "sd15"  # the built-in base's, and what is assumed where no model is named
Caption = str | tuple[tuple[str, float], ...]  # text, or pieces of it with the weight of each
PIECE = 75  # tokens of a caption that CLIP reads at once, beside start and end
PREDICTIONS = ("epsilon", "v_prediction")  # of models with a noise schedule


@dataclass(frozen=True)
class ModelFacts:
    """What a model's config files say, read without torch."""

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
    """What memory and time hang on, without weights: facts and the denoiser's config."""

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
    of the scaled latents' posterior. `encode_text`: B captions, as text or as pieces with
    weights -> tensors with B first.
    """

    encode_image: Callable[[Tensor], tuple[Tensor, Tensor]]
    encode_text: Callable[[Sequence[Caption]], dict[str, Tensor]]
    image_key: str  # changes when the VAE's weights, config or precision change
    text_key: str  # likewise for text encoders and tokenizers


@dataclass(frozen=True)
class TextOptions:
    """How captions become conditioning, where that is not the model's own way.

    `clip_skip` counts CLIP's layers from the end, 1 the last. `clip_tokens` are read in pieces of 75. `without` names
    text encoders that are left out.
    """

    clip_skip: int | None = None
    clip_tokens: int = 75
    t5_tokens: int | None = None
    without: tuple[str, ...] = ()

    @property
    def pieces(self) -> int:
        """How many pieces CLIP reads a caption in."""
        return self.clip_tokens // PIECE

    @property
    def key(self) -> str:
        """What the options add to the name of what encoders say: nothing where they are the model's own way."""
        if self == PLAIN:
            return ""
        said = ",".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))
        return f"-{sha256(said.encode()).hexdigest()[:16]}"

    def longest(self, own: int) -> int:
        """The longest caption in tokens, start and end among them, where the model's own way reads `own`."""
        longest = self.t5_tokens or (min(own, PIECE + 2) if self.without else own)
        return longest if self.pieces == 1 else max(longest, PIECE * self.pieces + 2)


PLAIN = TextOptions()


def refuse_options(folder: Path, options: TextOptions) -> None:
    """For families that read captions in one way. Raises UsageError for options."""
    raise UsageError(Problem(f"{folder} reads captions in one way only.", "Remove the settings of [text_encoder]."))


@dataclass(frozen=True)
class SamplingDefaults:
    """How a model is drawn with: the sampler steps that are usual, whether a guidance scale means anything to it, and
    whether it can be told what not to draw."""

    steps: int = 25
    guided: bool = True
    negative: bool = True


def usual_sampling(folder: Path) -> SamplingDefaults:
    """Of models with classifier-free guidance (arXiv:2207.12598)."""
    return SamplingDefaults()


def prompt_embeds(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The arguments of most pipelines for what `encode_text` gave of the prompts, and of what shall not be drawn."""
    told: dict[str, Any] = {f"{'pooled_' if name == 'pooled' else ''}prompt_embeds": cond[name] for name in cond}
    for name, value in (negative or {}).items():
        told[f"negative_{'pooled_' if name == 'pooled' else ''}prompt_embeds"] = value
    return told


@dataclass(frozen=True)
class TextParts:
    """Text encoders in memory and their tokenizers, both by the component's name: `text_encoder`, `text_encoder_2`.

    `place` is where they compute, for encoders whose layers visit a GPU: their weights do not say it. `width` is that of
    the text which the denoiser takes, where it may be wider than what the encoders say; 0 where it is not.
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
    """Loads a folder's text encoders, frozen, on a device, but for those of `without` that it works without.

    Without `dtype` they keep the file's own precision, and on a CPU stay mapped: to be held, not asked.
    """

    def __call__(
        self, folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
    ) -> TextParts: ...


class LoadEncoders(Protocol):
    """Loads a folder's encoders, frozen, on a device: VAE and text encoders each when they are first asked."""

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
    """Loads the denoiser of a folder, frozen, on a device; `narrow` stores each layer in fewer bits as it comes."""

    def __call__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None, /
    ) -> nn.Module: ...


@dataclass(frozen=True)
class Family:
    """A model family as a bundle of callables.

    `load_texts` and `encode_text` are what `load_encoders` is made of (`encoders.encoders_from`): the second keeps gradients, so
    that text encoders can be trained, and draws with those of a pipeline. `text_targets` are the patterns of modules
    that a LoRA on each text encoder may change; those without stay as they are. `layout` pairs names of diffusers with
    those of the original code, and is empty where LoRA files of all programs use diffusers' own; `also` are names that LoRA
    files are read by and never written.
    Large ones among the text encoders are `cached_texts`: what they say is cached and they leave memory, unless they are trained.
    `joined_text` of (what `encode_text` gives without them, what it gave with all before) is the first with what they said
    of the same captions; None where there are none. The others, of CLIP, are `word_texts`: they can learn new words.
    `check_text` raises UsageError for options that the text encoders of a folder cannot follow; `spare_texts` are
    encoders that the model works without.
    `lora_targets` maps `attention` and `attention+ff` to patterns of module names.
    `make_denoiser` builds from a config on torch's current default device (`meta` costs
    nothing), with random weights; `thin` makes of a config one with the same kinds of
    blocks and a few percent of the weights, as `thinness` says in words. `cond_shapes` gives, for a denoiser's config, the shapes
    of what `encode_text` returns for one caption. `base_names` are what LoRA files call the
    base: `ss_base_model_version` and `modelspec.architecture`. `make_pipeline` leaves text encoders
    that no LoRA is on as they are stored (`evaluation/placing.py` widens them). `sampling_defaults` says how a folder's model is drawn with, and
    `prompted` what of `encode_text` its pipeline is called with. `lora_readers` are the programs that were seen to read the
    family's LoRA files whole, each with the style of their names, and `passed_over` the modules that they leave out then.
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
        """The rate of each text encoder that is trained, by component, of `text_encoder.learning_rates`.

        Raises UsageError for one that cannot be trained.
        """
        names = tuple(self.text_targets)
        if any(rates[len(names) :]):
            told = f"text_encoder.learning_rates holds {counted(len(rates), 'rate')}, and of the text encoders of {self.name} "
            if not names:
                why = "none can be trained: no LoRA is trained on a language model, where diffusers reads none."
                raise UsageError(Problem(told + why, "Leave text_encoder.learning_rates empty."))
            from lora_trainer.config.toml import shown

            fix = f"Give at most {counted(len(names), 'rate')}: --set 'text_encoder.learning_rates={shown(rates[: len(names)])}'"
            raise UsageError(Problem(f"{told}these can be trained: {', '.join(names)}.", fix))
        trained = {name: rate for name, rate in zip(names, rates, strict=False) if rate}
        if left_out := [name for name in trained if name in self.text.without]:
            message = f"text_encoder.learning_rates has a rate for {left_out[0]}, which model.without_t5 leaves out."
            raise UsageError(Problem(message, "Set its rate to 0, or remove model.without_t5."))
        return trained

    @property
    def word_texts(self) -> tuple[str, ...]:
        """Its CLIP text encoders, which new words can be added to."""
        return tuple(name for name in self.text_targets if name not in self.cached_texts)

    def left_in_cache(self, changed: Collection[str]) -> tuple[str, ...]:
        """Of `cached_texts` those that nobody needs once captions are read, where `changed` encoders are trained."""
        return tuple(name for name in self.cached_texts if name not in changed)

    def encode_captions(
        self, parts: TextParts, captions: Sequence[Caption], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The conditioning of B captions, with gradients, by the encoders of `parts` as they are now.

        `known` is what `encode_text` gave for these captions with all encoders, where some are not among the parts.
        """
        said = self.encode_text(parts, captions, self.text)
        whole = all(name in parts.encoders for name in self.cached_texts)
        return said if self.joined_text is None or whole else self.joined_text(said, known)

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
