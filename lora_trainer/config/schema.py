"""Every setting: its name, type, limits, default and meaning.

The config is frozen and refuses unknown keys. Descriptions are what `--help` and the
documentation show.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

FamilyName = Literal["sd15", "sd2", "sdxl", "sd3", "flux"]
Precision = Literal["bf16", "fp16", "fp32", "fp8", "int8", "nf4"]
OptimizerName = Literal["adamw", "adamw8bit", "paged_adamw8bit", "adafactor", "lion", "prodigy", "schedule_free"]
ScheduleName = Literal["constant", "linear", "cosine", "restarts", "polynomial", "one_cycle"]
LossName = Literal["squared", "huber"]
ReleaseName = Literal["best", "last"]
AttentionName = Literal[
    "auto", "fastest", "sdpa", "flash", "efficient", "cudnn", "math", "xformers", "flash2", "flash3"
]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Recompute = Literal["all", "cheap"]
CropName = Literal["centre", "random"]
NotFiniteName = Literal["skip", "restore", "stop"]

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Side = Annotated[int, Field(ge=32, le=4096)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    path: str | None = Field(None, description="diffusers folder; empty means the built-in base")
    family: FamilyName | None = Field(
        None,
        description="model family; detected from the files when empty. `sd3` and `flux` can be planned and measured, not yet trained",
    )


class CaptionsSection(Section):
    """How captions are changed before training. All of it works with cached text-encoder outputs."""

    extension: str | None = Field(
        None, description="ending of caption files, such as `.caption`; empty means whatever is there"
    )
    separator: Annotated[str, Field(min_length=1)] = Field(",", description="what stands between tags")
    shuffle: bool = Field(False, description="tags in another order each time")
    keep_tokens: CountOrZero = Field(0, description="tags at the front that are neither shuffled nor dropped")
    keep_separator: str | None = Field(
        None, description="text in the caption that ends the tags kept at the front, such as `|||`"
    )
    prefix: str = Field("", description="text before every caption")
    suffix: str = Field("", description="text behind every caption")
    wildcards: bool = Field(False, description="`{red|blue}` means one of them each time; so does one of several lines")
    weighted_words: bool = Field(False, description="`(word:1.3)` weighs what the text encoder says of the word")
    trigger: str | None = Field(
        None, description="word that is learned: it replaces `[trigger]` and stands first if missing"
    )
    tag_dropout: Share = Field(0.0, description="share of tags left out each time")
    dropout: Share = Field(0.0, description="share of samples trained with the empty caption")
    dropout_every_epochs: CountOrZero = Field(
        0, description="every so many epochs all captions are empty; 0 means never"
    )
    variants: Annotated[int, Field(ge=1, le=256)] = Field(
        8, description="texts cached of each caption where shuffle, wildcards or tag dropout change it"
    )


class SourceSection(Section):
    """One folder or file of pictures, with what differs from `[data]` and `[captions]`."""

    path: Annotated[str, Field(min_length=1)] = Field(description="folder or file")
    repeats: Positive | None = Field(
        None, description="times each picture is seen in an epoch, over what folder names say; 0.5 sees half of them"
    )
    weight: NotNegative = Field(1.0, description="factor on the loss of its pictures")
    regularisation: bool = Field(
        False, description="prior preservation: as many of these as of the others are seen in an epoch"
    )
    caption: str | None = Field(None, description="caption of pictures that have none")
    captions_file: str | None = Field(None, description="one file with all captions: JSONL, JSON, CSV, Parquet or text")
    masks: str | None = Field(
        None, description="where the loss counts: `alpha`, or a folder of grey pictures with the same names"
    )
    resolutions: tuple[Side, ...] | None = Field(None, description="in place of `data.resolutions`")
    flip: bool | None = Field(None, description="in place of `data.flip`")
    colour_variants: CountOrZero | None = Field(None, description="in place of `data.colour_variants`")
    crop: CropName | None = Field(None, description="in place of `data.crop`")
    captions: CaptionsSection | None = Field(None, description="in place of all of `[captions]`")


def as_source(value: object) -> object:
    """A bare path is a source with nothing else said of it."""
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[SourceSection, BeforeValidator(as_source)]


class DataSection(Section):
    sources: tuple[Source, ...] = Field(
        (), description="folders or files, or tables `[[data.sources]]`; empty means the built-in data set"
    )
    resolution: Side | None = Field(
        None, description="side in pixels of a square of the trained area; empty means the model's own"
    )
    resolutions: tuple[Side, ...] = Field(
        (), description="several sides trained in one run, each picture at each in turn; empty means `data.resolution`"
    )
    resolution_ceiling: Count | None = Field(None, description="highest resolution that the tier allows")
    allow_missing_captions: bool = Field(False, description="train pictures without a caption on the empty one")
    allow_upscale: bool = Field(False, description="accept pictures far smaller than they are trained at")
    no_upscale: bool = Field(False, description="never enlarge a picture: a small one gets a smaller bucket")
    max_aspect: Annotated[float, Field(ge=1.0, le=8.0)] = Field(
        2.0, description="longest side over shortest of a bucket"
    )
    bucket_step: Count | None = Field(
        None, description="sides of buckets are multiples of this many pixels; empty means the model's own step"
    )
    bucket_min: Side | None = Field(None, description="shortest side of a bucket in pixels; empty means no limit")
    bucket_max: Side | None = Field(None, description="longest side of a bucket in pixels; empty means no limit")
    crop: CropName = Field("centre", description="which part is cut out; `random` caches `data.crop_variants` places")
    crop_variants: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="places cached of each picture by `random`"
    )
    flip: bool = Field(False, description="every other time the picture is mirrored; both are cached")
    colour_variants: CountOrZero = Field(
        0, description="further versions of each picture with brightness, contrast, saturation and hue a little changed"
    )
    held_out: Annotated[float, Field(ge=0.0, le=0.5)] = Field(0.1, description="share of pictures kept for validation")
    held_out_seed: CountOrZero = Field(0, description="another number keeps other pictures")


class CacheSection(Section):
    folder: str | None = Field(None, description="where caches live; empty means the user's cache folder")
    batch: Count = Field(4, description="pictures encoded at once")
    limit_gb: Positive = Field(50.0, description="size on disk above which the least recently used entries leave")
    latents: bool = Field(True, description="false reads and encodes pictures while training, for want of disk")
    workers: CountOrZero | None = Field(
        None, description="threads that decode pictures; empty means one for each processor, at most 8"
    )


class LoraSection(Section):
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(16, description="rank of each update")
    alpha: Positive | None = Field(None, description="scale is alpha / rank; empty means alpha = rank")
    rank_stabilised: bool = Field(
        False, description="scale by alpha / sqrt(rank), so that larger ranks learn as fast (arXiv:2312.03732)"
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="dropout inside the LoRA")
    targets: str | tuple[str, ...] = Field(
        "attention", description="`attention`, `attention+ff`, or patterns of module names such as `*.attn2.to_k`"
    )


class BatchSection(Section):
    effective: Count = Field(1, description="samples in one optimizer step, over all processes")
    max_micro: Count | None = Field(
        None,
        description="most samples in one forward pass; empty means as many as fit the card, on a processor at most 4",
    )
    find_micro: bool = Field(
        False, description="before training, try how many samples fit in one forward pass, in place of predicting it"
    )


class MemorySection(Section):
    limit_gib: Positive | None = Field(None, description="memory of the card, GPU memory that the run must fit")
    checkpointing: Literal["none", "all", "auto"] | CountOrZero = Field(
        "auto",
        description="gradient checkpointing: `none`, `all`, a number of blocks, or `auto`, as few as fit the card",
    )
    base_precision: Precision = Field(
        "bf16",
        description="precision of the frozen base and of the forward pass; `fp8` and `int8` store in 8 bits and `nf4` in 4, and compute in bf16 or fp16",
    )
    int8_products: bool = Field(
        False, description="multiply in int8 as well where the base is stored so: quicker on GeForce cards"
    )
    recompute: Recompute = Field(
        "all",
        description="what a checkpointed block computes again: `all`, or `cheap`, all but attention and matrix products",
    )
    streaming: Literal["none", "auto"] | Count = Field(
        "auto",
        description="frozen blocks that visit the card one after the other: `none`, a number, or `auto`, as few as must",
    )
    offload_activations: bool = Field(
        False, description="what the backward pass needs waits in system memory meanwhile"
    )
    expandable_segments: bool = Field(
        True, description="let the card's memory pool grow in place, against fragmentation"
    )
    compile: bool | Literal["auto"] = Field(
        False, description="compile the blocks of the denoiser; `auto` on a card, in runs of 1,500 steps or more"
    )
    compile_mode: CompileMode = Field("default", description="torch.compile's own modes")
    compile_dynamic: bool | Literal["auto"] = Field(
        "auto", description="one compilation for all sizes; `auto` compiles each size while they are few"
    )
    compile_fullgraph: bool = Field(False, description="an error in place of a graph break")
    attention: AttentionName = Field(
        "auto",
        description="attention implementation; `auto` probes and explains, `fastest` times all that work on this run's sizes",
    )
    grow_after_steps: CountOrZero = Field(
        1000,
        description="good steps after which a run that was out of memory tries larger micro batches again; 0 never does",
    )


class HardwareSection(Section):
    """How the card and the processor compute."""

    tf32: bool = Field(True, description="fp32 products in TF32 on cards that have it; bf16 and fp16 are not concerned")
    cudnn_benchmark: bool | Literal["auto"] = Field(
        "auto", description="let cuDNN time its convolutions for each size; `auto` where sizes are few"
    )
    channels_last: bool | Literal["auto"] = Field(
        "auto", description="memory order of pictures that convolutions like; `auto` for a U-Net on a card"
    )
    threads: Count | None = Field(None, description="threads of a processor's computations; empty means all, at most 8")
    kernels: bool = Field(
        False, description="own Triton kernel for the update of adapted layers, on a card where it runs; unproven"
    )


class OptimSection(Section):
    name: OptimizerName = Field(
        "adamw", description="optimizer; `lion` wants a third to a tenth of AdamW's rate, `prodigy` finds its own"
    )
    learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = Field(
        1e-4, description="peak learning rate; for `prodigy` a factor on the rate that it finds, 1.0 unless set"
    )
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="decay of the mean of the gradients")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.999, description="decay of the mean of their squares")
    weight_decay: NotNegative = Field(
        0.01, description="decoupled weight decay; none on biases, norms, DoRA magnitudes and trained tokens"
    )
    clip_norm: NotNegative = Field(1.0, description="largest norm of the gradient; 0 means no clipping")
    clip_value: Positive | None = Field(
        None, description="largest value of a gradient's entry, in place of `clip_norm`; 0.5 is usual"
    )


class ScheduleSection(Section):
    name: ScheduleName = Field("constant", description="learning rate over the steps")
    warmup_steps: CountOrZero | None = Field(
        None, description="steps of warm-up; empty means 3 % of the steps, 10 % for `one_cycle`"
    )
    cycles: Count = Field(3, description="waves of `restarts`")
    power: Positive = Field(2.0, description="exponent of `polynomial`; 1 is `linear`")


class NoiseSection(Section):
    offset: Share = Field(0.0, description="noise offset: strength of a constant added per channel")
    multires_iterations: Annotated[int, Field(ge=0, le=16)] = Field(
        0, description="multi-resolution noise: coarser levels added"
    )
    multires_discount: Share = Field(0.3, description="weight of each coarser level")
    input_perturbation: Share = Field(
        0.0, description="strength of more noise in the input that the target lacks (arXiv:2301.11706); 0.1 is usual"
    )
    zero_terminal_snr: bool = Field(
        False, description="last timestep without any signal (arXiv:2305.08891); for models that predict velocity"
    )


class LossSection(Section):
    kind: LossName = Field("squared", description="error of a sample; `huber` is ruled less by large errors")
    huber_delta: Positive = Field(0.1, description="error from which `huber` grows by its size, not its square")
    min_snr_gamma: Positive | None = Field(None, description="min-SNR weighting (arXiv:2303.09556); 5 is usual")
    prior_weight: NotNegative = Field(1.0, description="factor on the loss of regularisation pictures")
    unmasked_weight: Share = Field(0.0, description="what a masked picture's loss counts where its mask is black")


class TrainSection(Section):
    max_steps: Count | None = Field(None, description="optimizer steps")
    max_epochs: Count | None = Field(None, description="passes over the data")
    exposures: Count = Field(100, description="times each picture is seen when neither steps nor epochs are given")
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None, description="average of the trained weights, which is what is validated and exported; 0.999 is usual"
    )
    max_hours: Positive | None = Field(None, description="stop after this time, with everything saved")
    deterministic: bool = Field(
        False,
        description="the same bits each time on a card, too: slower, and a run ends where an operation cannot (a processor gives them anyway)",
    )
    grace_seconds: Positive = Field(
        30.0,
        description="time from a signal to the end of saving; a step that takes more than half of it is given up",
    )
    process_timeout_minutes: Positive = Field(
        30.0, description="time after the last word of another process of the run when that one counts as lost"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(42, description="the run's seed")


class ControlSection(Section):
    """What a run may change by itself. All of it is off unless asked for, but `not_finite`."""

    not_finite: NotFiniteName = Field(
        "skip",
        description="for a loss or gradient that is NaN or infinite: `skip` the step, `restore` the last checkpoint and lower the rate, or `stop`",
    )
    most_not_finite: Count = Field(10, description="such steps in a row, or returns to a checkpoint, that end the run")
    spike: Positive | None = Field(
        None, description="say when a gradient is so many times its usual size, and of which pictures; 10 is a start"
    )
    plateau: bool = Field(False, description="lower the rate where the held-out loss stands still")
    plateau_window: Annotated[int, Field(ge=2)] = Field(10, description="validations that are looked at for that")
    plateau_spread: Positive = Field(0.001, description="difference between them under which they stand still")
    plateau_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="factor on the rate then")
    jump: bool = Field(False, description="clip gradients harder after the smoothed loss has jumped")
    jump_ratio: Annotated[float, Field(gt=1.0)] = Field(1.5, description="growth that counts as a jump")
    jump_clip: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="factor on the clipping then")
    early_stopping: bool = Field(False, description="stop where the held-out loss gets no lower; the best is released")
    patience: Count = Field(10, description="validations in a row without a lower loss that end the run")
    min_change: NotNegative = Field(0.0, description="how much lower counts as lower")


class CheckpointSection(Section):
    every_steps: Count = Field(500, description="steps between checkpoints")
    every_epochs: Count | None = Field(None, description="epochs between checkpoints, beside `every_steps`; 5 is usual")
    weights_every_steps: CountOrZero = Field(
        0, description="steps between LoRA files that are kept for good, in the folder `weights`; 0 means none"
    )
    wait_minutes: NotNegative = Field(
        60.0, description="how long a run waits, paused, for room on a full disk before it ends"
    )
    keep_last: Count = Field(2, description="newest checkpoints kept")
    release: ReleaseName = Field(
        "best", description="weights that are exported: of the lowest held-out loss, or the last"
    )


class ValidateSection(Section):
    every_steps: CountOrZero = Field(100, description="steps between held-out losses; 0 means only at the end")


class SampleSection(Section):
    every_steps: CountOrZero = Field(500, description="steps between pictures; 0 means none while training")
    prompts: tuple[str, ...] = Field((), description="prompts; empty means captions of the data")
    count: Count = Field(2, description="pictures when prompts come from the data")
    steps: Count = Field(25, description="sampler steps")
    guidance: NotNegative = Field(7.5, description="classifier-free guidance scale")


class GatesSection(Section):
    dataset: Share = Field(0.8, description="score below which a data set is refused by `produce`")
    lora: Share = Field(0.9, description="score below which a LoRA is refused by `produce`")


class RunSection(Section):
    output: Annotated[str, Field(min_length=1)] = Field("runs", description="folder that holds runs")
    name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="name of the run and of its files; made from the data when empty"
    )
    offline: bool = Field(False, description="make no network request at all")


class Config(Section):
    """All settings of a run. Field names are the config's key names: `optim.learning_rate`.

    Dump with `by_alias=True`.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    captions: CaptionsSection = CaptionsSection()
    cache: CacheSection = CacheSection()
    lora: LoraSection = LoraSection()
    batch: BatchSection = BatchSection()
    memory: MemorySection = MemorySection()
    hardware: HardwareSection = HardwareSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    noise: NoiseSection = NoiseSection()
    loss: LossSection = LossSection()
    train: TrainSection = TrainSection()
    control: ControlSection = ControlSection()
    checkpoint: CheckpointSection = CheckpointSection()
    # `validate` is a method of pydantic's base class, so only the key has that name.
    validation: ValidateSection = Field(ValidateSection(), alias="validate")
    sample: SampleSection = SampleSection()
    gates: GatesSection = GatesSection()
    run: RunSection = RunSection()
