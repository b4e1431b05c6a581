"""A model family: facts and functions, nothing else.

The seam law: outside `models/`, latents are `[B, C, h, w]` and always scaled. Packing,
position ids, time ids, latent scale and shift stay in the family's own file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from lora_trainer.core.conditioning import EditCaption, controls_of
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted

if TYPE_CHECKING:  # facts are read without torch
    import torch
    from torch import Tensor, nn

    from lora_trainer.diffusion.process import Process
    from lora_trainer.lora_format.layouts import Layout
    from lora_trainer.models.quantization.store import Narrow
    from lora_trainer.models.single.stored import Part, SingleFile, Stored

USUAL_FAMILY = "sd15"  # of the built-in base model, and the default where no model is named
Caption = str | tuple[tuple[str, float], ...]  # text, or its parts with the weight of each
Prompt = Caption | EditCaption  # what text encoders read
CHUNK = 75  # tokens of a caption that CLIP reads at once, without start and end
MOST_CONTROLS = 16  # control images of any edit model, and more than any has
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
    distilled_from: str = ""  # what to train in its place; empty where it is no model distilled for few steps
    variant: str = ""  # which of the family's models: `medium`, `schnell`; empty where there is one kind
    largest_side: int | None = None  # pixels; None where images may be as large as they are
    named: str = ""  # what people call the model, where that is not its folder
    whole: bool = True  # false where its configs alone are here
    most_controls: int = 0  # control images of a sample, which an edit model reads beside the caption
    control_tokens: int = 0  # of a square control image, where the text encoder reads it with the caption; else 0
    form: str = ""  # in which quantized form a checkpoint is stored, for people; empty where in none
    title: str = ""  # what a checkpoint's metadata calls the model
    prediction_by: str = ""  # what in a checkpoint shows the prediction type, for people

    @property
    def name(self) -> str:
        """What files and lines call the model: an id of a hub, or the last part of a path."""
        return self.named or self.path.name


@dataclass(frozen=True)
class Architecture:
    """What memory and time depend on, without weights: facts and the denoiser's config."""

    facts: ModelFacts
    denoiser: Mapping[str, Any]


@dataclass(frozen=True)
class Encoders:
    """The frozen encoders, as two functions and the names of their weights.

    `encode_image`: pixels [B, 3, H, W] in [-1, 1] -> (mean, spread), each [B, C, h, w],
    of the scaled latents' posterior. `encode_text`: B captions, as text, as weighted
    parts or with control images -> tensors with B first.
    """

    encode_image: Callable[[Tensor], tuple[Tensor, Tensor]]
    encode_text: Callable[[Sequence[Prompt]], dict[str, Tensor]]
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
    raise UsageError(
        Problem(
            "setting_not_for_model",
            f"{folder} reads captions in one way only.",
            "Remove the settings of [text_encoder].",
        )
    )


def refuse_clip_options(model: str, options: TextOptions) -> None:
    """Raise UsageError for CLIP's options: a `model` with this name has no CLIP."""
    rejected = {"clip_skip": options.clip_skip, "max_tokens": options.clip_tokens if options.chunks > 1 else None}
    problems = [
        Problem(
            "setting_not_for_model", f"text_encoder.{name}={value}: {model} has no CLIP text encoder.", "Remove it."
        )
        for name, value in rejected.items()
        if value is not None
    ]
    if problems:
        raise UsageError(problems)


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
    that of the denoiser's text input, where it may be wider than the embeddings; 0 where it is not. `image_processor`
    prepares control images for an encoder that reads them with captions; None where none does.
    """

    encoders: Mapping[str, nn.Module]
    tokenizers: Mapping[str, Any]
    place: torch.device | None = None
    width: int = 0
    image_processor: Any = None

    @property
    def device(self) -> torch.device:
        """Where the captions' tokens must be."""
        if self.place is not None:
            return self.place
        return next(iter(next(iter(self.encoders.values())).parameters())).device


JoinText = Callable[[Mapping[str, "Tensor"], Mapping[str, "Tensor"]], dict[str, "Tensor"]]
EncodeText = Callable[[TextParts, Sequence[Caption], TextOptions], dict[str, "Tensor"]]
EncodeEdits = Callable[[TextParts, Sequence[EditCaption], TextOptions], dict[str, "Tensor"]]
LoadImageEncoder = Callable[[Path, "torch.dtype", "torch.device"], Callable[["Tensor"], tuple["Tensor", "Tensor"]]]
LoadEncoders = Callable[[Path, "torch.dtype", "torch.device", TextOptions], Encoders]
EncoderKeys = Callable[[Path, "torch.dtype", TextOptions], tuple[str, str]]


class LoadTexts(Protocol):
    """Loads a folder's text encoders, frozen, on a device, but for those of `without` that it can do without.

    Without `dtype` they keep the file's own precision, and on a CPU stay mapped: to be offloaded, not run as they are.
    """

    def __call__(
        self, folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
    ) -> TextParts: ...


class LoadDenoiser(Protocol):
    """Loads the denoiser of a folder, frozen, on a device; `narrow` quantizes each layer as it is loaded."""

    def __call__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None, /
    ) -> nn.Module: ...


@dataclass(frozen=True)
class DenoiserSpec:
    """The denoiser: what training, the memory plan and benchmarks need of it.

    `component` is its name in a folder, a pipeline and diffusers' LoRA files: `unet` or `transformer`. `load` takes a
    folder. `make` takes a config and builds on torch's current default device (`meta` costs nothing), with random
    weights. `make_process` takes a folder and returns its noise schedule or flow. `predict` takes the denoiser, noisy
    latents [B, C, h, w], t [B], text embeddings and sizes [B, 6], and returns the prediction [B, C, h, w]. Of an edit model
    the embeddings have the latents of control images beside them (`core/conditioning.py`), each [B, C, h, w] of its own size.
    `lora_targets` maps `attention` and `attention+ff` to patterns of module names. `thin` takes a config and returns
    one of the same kinds of blocks with a few percent of the weights, as `thinness` describes. `unread` takes the
    denoiser and returns the modules whose output nothing reads, besides those that attention itself shows.
    """

    component: str
    load: LoadDenoiser
    make: Callable[[Mapping[str, Any]], nn.Module]
    make_process: Callable[[Path], Process]
    predict: Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]
    lora_targets: Mapping[str, tuple[str, ...]]
    thin: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    thinness: str
    unread: Callable[[nn.Module], Collection[str]] = lambda denoiser: ()


@dataclass(frozen=True)
class EncoderSpec:
    """VAE and text encoders as the caches read them (`encoders.encoders_from`).

    `load` takes a folder, a dtype, a device and text options, and returns `Encoders` that load each kind when it is
    first used. `keys` takes the same without the device, and returns the names of the image and the text encoders'
    weights without loading them.
    """

    load: LoadEncoders
    keys: EncoderKeys


@dataclass(frozen=True)
class TextSpec:
    """The text encoders: how captions are read, trained and cached.

    `load` takes a folder, and `encode` the loaded parts, B captions and text options; it returns tensors with B first
    and keeps gradients, so that text encoders can be trained, and runs those of a pipeline too. `shapes` takes a
    denoiser's config and text options, and returns the shapes of these tensors for one caption. `targets` are the
    patterns of modules for a LoRA on each text encoder; encoders without patterns are not trained. `check` takes a
    folder and text options, and raises UsageError for options that its encoders cannot follow. `optional` are encoders
    that the model can do without. `cached` are the large ones: their embeddings are cached and they leave memory, unless
    they are trained. `join` adds their cached embeddings (second argument) to those of the other encoders (first); None
    where there are none. `encode_edits` is `encode` for captions with control images, equally many and of equal sizes;
    None where no model's text encoder reads them.
    """

    load: LoadTexts
    encode: EncodeText
    shapes: Callable[[Mapping[str, Any], TextOptions], Mapping[str, tuple[int, ...]]]
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Path, TextOptions], None] = refuse_options
    optional: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()
    join: JoinText | None = None
    encode_edits: EncodeEdits | None = None
    options: TextOptions = PLAIN  # of this run

    @property
    def clips(self) -> tuple[str, ...]:
        """The CLIP text encoders, which textual inversion can train tokens of."""
        return tuple(name for name in self.targets if name not in self.cached)

    def cond_shapes(
        self, config: Mapping[str, Any], facts: ModelFacts | None = None, controls: int = 0
    ) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the text embeddings of one caption, for a denoiser's config; with so many control images, where the
        text encoder reads them."""
        if facts is None or not facts.control_tokens * controls:
            return self.shapes(config, self.options)
        longer = (self.options.t5_tokens or facts.caption_tokens) + facts.control_tokens * controls
        return self.shapes(config, replace(self.options, t5_tokens=longer))

    def encode_prompts(self, parts: TextParts, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """The text embeddings of B captions; of those with control images, all of them have equally many."""
        if self.encode_edits is not None and any(isinstance(each, EditCaption) for each in prompts):
            return self.encode_edits(parts, cast("Sequence[EditCaption]", prompts), self.options)
        return self.encode(parts, cast("Sequence[Caption]", prompts), self.options)

    def left_in_cache(self, changed: Collection[str]) -> tuple[str, ...]:
        """Those of `cached` that are not needed once captions are cached, where `changed` encoders are trained."""
        return tuple(name for name in self.cached if name not in changed)

    def encode_captions(
        self, parts: TextParts, captions: Sequence[Caption], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The text embeddings of B captions, with gradients, by the encoders of `parts` as they are now.

        `known` are the embeddings of these captions by all encoders, where some are not among the parts.
        """
        encoded = self.encode(parts, captions, self.options)
        whole = all(name in parts.encoders for name in self.cached)
        return {**(encoded if self.join is None or whole else self.join(encoded, known)), **controls_of(known)}


@dataclass(frozen=True)
class PipelineSpec:
    """diffusers' pipeline, which generates images.

    `class_name` is its name in `model_index.json`, `edit_class_names` those of the family's edit models. `make` takes a
    folder, a dtype and a device, and leaves text encoders without a LoRA in their stored precision
    (`evaluation/placing.py` widens them). `sampling_defaults` takes a folder. `prompted` takes the text embeddings of
    prompts and of negative prompts, and returns the pipeline's arguments. `with_controls` takes the pipeline, the width
    and height of images and their control images, each as scaled latents [B, C, h, w], and returns what else is passed.
    `guidance` is the name of its argument for the guidance scale. `refused` are classes of models made from the
    family's, which cannot be trained, and what each is.
    """

    class_name: str
    make: Callable[[Path, torch.dtype, torch.device], Any]
    sampling_defaults: Callable[[Path], SamplingDefaults] = usual_sampling
    prompted: Callable[[Mapping[str, Tensor], Mapping[str, Tensor] | None], dict[str, Any]] = prompt_embeds
    edit_class_names: tuple[str, ...] = ()
    with_controls: Callable[[Any, tuple[int, int], Sequence[Tensor]], dict[str, Any]] = (
        lambda pipeline, size, controls: {}  # of a pipeline that edits nothing
    )
    guidance: str = "guidance_scale"
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def edits_images(self) -> bool:
        """Whether any model of the family reads control images."""
        return self.with_controls is not type(self).with_controls


@dataclass(frozen=True)
class LoraFileSpec:
    """The names in LoRA files, and which programs read them.

    `base_names` takes a model's facts and returns `ss_base_model_version` and `modelspec.architecture`. `prefixes` are
    the beginnings of each component's keys in kohya's format. `layout` pairs names of diffusers with those of the
    original code, and is empty where LoRA files of all programs use diffusers' own; `also` are names that are read in
    LoRA files and never written. `like` is a family whose names and shapes these are: a file that nothing identifies is of that
    one, and is read for both. `readers` are the programs that were seen to read such files whole, as `PROGRAM: STYLE`
    with a style of `export.inspection`, and `passed_over` the beginnings of modules, as
    patterns, that a program skips then. `needs_beside` are beginnings of modules without any of which a program reads none of the
    denoiser's by kohya's names.
    """

    base_names: Callable[[ModelFacts], tuple[str, str]]
    prefixes: Mapping[str, str]
    layout: Layout = ()
    also: Layout = ()
    like: str = ""
    readers: tuple[str, ...] = ()
    passed_over: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs_beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TextKind:
    """A kind of text encoder in single files: `fits` tells it by its tensors, and `lay_out` is its config and places."""

    title: str  # for people
    fits: Callable[[Stored], bool]
    lay_out: Callable[[Stored], Part]


@dataclass(frozen=True)
class CheckpointSpec:
    """The family in a single file, which has the names of its first code.

    `mark` is a tensor that every such file has; of families with the same one it is the first that `fits`. `read` takes
    the file and returns it with its flavor, as far as keys or the file's name tell it; it raises UsageError for models
    that cannot be trained. `denoiser` is the denoiser's config and where each of its weights lies. `beside` are other
    parts among its tensors, by component. `values` are endings of the tensors whose values `read` looks at.
    `text_kinds` are kinds of text encoders that no other family has.
    """

    mark: str
    denoiser: Callable[[Stored], Part]
    fits: Callable[[Stored], bool] = lambda stored: True
    read: Callable[[SingleFile], SingleFile] = lambda found: found
    beside: Mapping[str, Callable[[Stored], Part]] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    text_kinds: Mapping[str, TextKind] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A model family: its parts by who reads them.

    `read_facts` takes a folder, and raises UsageError where a part is missing, damaged or of another kind. `recognizes`
    takes a folder with the family's pipeline, and is for families that share one. `checkpoint` is None where no single
    file is read.
    """

    name: str
    read_facts: Callable[[Path], ModelFacts]
    denoiser: DenoiserSpec
    encoders: EncoderSpec
    text: TextSpec
    pipeline: PipelineSpec
    lora_files: LoraFileSpec
    recognizes: Callable[[Path], bool] = lambda folder: True
    loras: tuple[tuple[str, float], ...] = ()  # files merged into the base model of this run, and the factor on each
    checkpoint: CheckpointSpec | None = None

    def reading(self, options: TextOptions) -> Family:
        """The same family, whose encoders read captions by these options wherever they are loaded."""
        return replace(self, text=replace(self.text, options=options))

    def describe(self, folder: Path) -> ModelFacts:
        """The folder's facts.

        Raises UsageError as `read_facts` does, and for text options that the folder's encoders cannot follow.
        """
        facts, options = self.read_facts(folder), self.text.options
        if options == PLAIN:
            return facts
        self.text.check(folder, options)
        return replace(facts, caption_tokens=options.longest(facts.caption_tokens))

    def load_encoders(self, folder: Path, dtype: torch.dtype, device: torch.device) -> Encoders:
        """The folder's encoders, frozen, on the device: VAE and text encoders each when they are first used."""
        return self.encoders.load(folder, dtype, device, self.text.options)

    def encoder_keys(self, folder: Path, dtype: torch.dtype) -> tuple[str, str]:
        """Names of the image and the text encoders' weights, without loading them."""
        return self.encoders.keys(folder, dtype, self.text.options)

    def text_rates(self, rates: Sequence[float]) -> dict[str, float]:
        """The learning rate of each trained text encoder, by component, from `text_encoder.learning_rates`.

        Raises UsageError for one that cannot be trained.
        """
        names = tuple(self.text.targets)
        if any(rates[len(names) :]):
            message = f"text_encoder.learning_rates holds {counted(len(rates), 'rate')}, and of the text encoders of {self.name} "
            if not names:
                why = "none can be trained: no LoRA is trained on a language model, where diffusers reads none."
                raise UsageError(
                    Problem("model_unsupported", message + why, "Leave text_encoder.learning_rates empty.")
                )
            from lora_trainer.config.toml import shown

            fix = f"Set at most {counted(len(names), 'rate')}: --set 'text_encoder.learning_rates={shown(rates[: len(names)])}'"
            raise UsageError(Problem("model_unsupported", f"{message}these can be trained: {', '.join(names)}.", fix))
        trained = {name: rate for name, rate in zip(names, rates, strict=False) if rate}
        if skipped := [name for name in trained if name in self.text.options.without]:
            message = f"text_encoder.learning_rates has a rate for {skipped[0]}, which model.without_t5 skips."
            raise UsageError(
                Problem("rate_of_skipped_encoder", message, "Set its rate to 0, or remove model.without_t5.")
            )
        return trained
