"""What a run saves, measures, generates and refuses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lora_trainer.config.schema.types import (
    EMPTY,
    NOT_0,
    ON,
    PATH,
    PATH_OR_HUB,
    READS,
    CompareName,
    Count,
    CountOrZero,
    ExportDtype,
    ExportWeightsName,
    LoraCheckName,
    NotNegative,
    PathKind,
    Positive,
    Section,
    Share,
    TrackerName,
    UnresolvedName,
    setting,
)

OF_VALIDATION = {"validation.split": NOT_0}  # images that are kept for it


class CheckpointSection(Section):
    """Checkpoints to resume from, and the LoRA files."""

    # Where a run rolls back to depends on both intervals.
    every_n_steps: Count = setting(500, "changes training", "steps between checkpoints")
    every_n_epochs: Count | None = setting(
        None,
        "changes training",
        "epochs between checkpoints, in addition to `every_n_steps`; empty means none, since epochs are short with few images",
    )
    export_every_n_steps: CountOrZero = setting(
        0, "changes nothing", "steps between LoRA files kept in the folder `weights`; 0 means none"
    )
    export_every_n_epochs: CountOrZero = setting(
        0, "changes nothing", "epochs between LoRA files there, in addition; 0 means none"
    )
    export_keep_last: CountOrZero = setting(
        0,
        "changes nothing",
        "newest LoRA files to keep there; 0 keeps all",
        needs={"checkpoint.export_every_n_steps": ON, "checkpoint.export_every_n_epochs": ON},
    )
    wait_minutes: NotNegative = setting(
        60.0, "changes nothing", "how long a run waits, paused, for space on a full disk before it stops"
    )
    keep_last: Count = setting(2, "changes nothing", "newest checkpoints to keep")
    keep_every: CountOrZero = setting(
        0, "changes nothing", "also keep every n-th checkpoint of its interval for good: 1 keeps all, 0 none"
    )
    keep_best: CountOrZero = setting(
        0,
        "changes nothing",
        "also keep so many checkpoints with the lowest validation loss at their step; 0 keeps none",
        needs={"validation.every_n_steps": ON},
    )
    save_state: bool = setting(
        True,
        "changes nothing",
        "false writes checkpoints of the weights alone, which take a third of the space with AdamW; a run cannot be resumed from them",
    )
    scratch: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "changes nothing",
        "fast folder, such as `/dev/shm` or one on NVMe, that checkpoints are written to first; they are copied to the run's folder in the background; `auto` measures `/dev/shm`, the system's folder of temporary files and the run's folder, and takes the fastest",
        path=PathKind(words=("auto",)),
    )
    scratch_limit_gb: Positive = setting(
        4.0,
        "changes nothing",
        "space that a run may take in `scratch`; what does not fit is written to the run's folder",
        needs={"checkpoint.scratch": ON},
    )
    export_weights: ExportWeightsName = setting(
        "best", "changes training", "weights to export: `best` has the lowest validation loss, `last` is the last step"
    )
    export_dtype: ExportDtype = setting(
        "fp16", "changes rounding", "precision of LoRA files; `fp32` keeps all bits and doubles their size"
    )


class ValidationSection(Section):
    """The validation loss: on images that are not trained, at fixed noise."""

    # Which step is the best, and what the safeguards do, depends on when it is measured.
    every_n_steps: CountOrZero = setting(
        100,
        "changes training",
        "steps between validations; 0 validates only at the end",
        needs=OF_VALIDATION | {"validation.every_n_steps": (0,)},
    )
    split: Annotated[float, Field(ge=0.0, le=0.5)] | None = setting(
        None,
        "fixed",
        "share of images kept for validation, 0 for none; empty means 12 to 16 images of 40 or more (0.1), none of fewer",
    )
    agreement: bool = setting(
        True,
        "changes nothing",
        "also measure how often images fit their own captions better than others', where four validation images have different ones; about 3 % of the training",
        needs=OF_VALIDATION,
    )
    split_seed: CountOrZero = setting(0, "fixed", "another number keeps other images", needs=OF_VALIDATION)


class SampleSection(Section):
    """Images generated during training and at its end."""

    every_n_steps: CountOrZero = setting(
        500, "changes nothing", "steps between sample images; 0 means none while training"
    )
    prompts: tuple[str, ...] = setting((), "changes nothing", "prompts; empty means captions of the dataset")
    prompt_prefix: str = setting(
        "",
        "changes nothing",
        "tags before every prompt, such as `masterpiece, best quality`; those that it has are not repeated",
    )
    control_images: tuple[str, ...] = setting(
        (),
        "changes nothing",
        "control images of `sample.prompts` for edit models: those of the first prompt, then those of the second, as many for each as the model is trained with; empty means the dataset's",
        path=PATH,
    )
    count: Count = setting(
        2, "changes nothing", "number of prompts taken from the dataset", needs={"sample.prompts": EMPTY}
    )
    num_inference_steps: Count | None = setting(
        None, "changes nothing", "sampler steps; empty means the model's usual number"
    )
    guidance_scale: NotNegative = setting(
        7.5,
        "changes nothing",
        "guidance scale: classifier-free, or the value given to a distilled model that takes one",
    )
    negative_prompt: str = setting("", "changes nothing", "negative prompt, where guidance is classifier-free")
    strengths: tuple[Annotated[float, Field(ge=-4.0, le=4.0)], ...] = setting(
        (1.0,), "changes nothing", "LoRA strengths to generate beside the base model without it"
    )
    num_images_per_prompt: Annotated[int, Field(ge=1, le=64)] = setting(
        1, "changes nothing", "images of each prompt, with seeds that count up from `train.seed`"
    )


class GatesSection(Section):
    """When a dataset or a LoRA is refused."""

    dataset: Share = setting(0.8, "changes nothing", "score below which `produce` refuses a dataset; 0 refuses none")
    captions: bool = setting(
        True,
        "changes nothing",
        "`produce` compares captions with your images before a new run, by `gates.encoder` or a base model that is small or fits the GPU",
    )
    lora: Share = setting(
        0.9,
        "changes nothing",
        "score below which `produce` refuses a LoRA; 0 refuses none, and 48 samples without a fault show 0.96",
    )
    lora_check: LoraCheckName = setting(
        "auto",
        "changes nothing",
        "how much of the LoRA is measured at the end: `full` samples until each part is decided, `lite` takes 8 samples in 8 steps and one image with and without the LoRA, `off` neither scores it nor generates images; `auto` is `lite` in `train` and `full` where the gates are enforced",
    )
    encoder: str | None = setting(
        None,
        "changes nothing",
        "image encoder that compares samples with the dataset beside the judge's own patterns: a folder of transformers such as DINOv2, CLIP or SigLIP in `.safetensors`, or a hub id such as `facebook/dinov2-base`",
        path=PATH_OR_HUB,
    )
    unresolved: UnresolvedName = setting(
        "refuse",
        "changes nothing",
        "what `produce` and `batch` do with a LoRA of which a part was measured and not decided, or whose samples could not be compared with images: `refuse` it (exit code 4), or `accept` it",
    )
    compare: CompareName = setting(
        "off",
        "changes nothing",
        "what the LoRA is compared with by its score at the end, to advise which one to use: its other `strengths` (0.4 to 1.4), the run's kept `checkpoints`, `both`, or `off`",
    )


class ProfileSection(Section):
    """A profile of some steps: where their time goes (docs/profile.md)."""

    enabled: bool = setting(
        False, "changes nothing", "profile steps of the run into its folder `profile`, as `--profile` does"
    )
    wait: CountOrZero = setting(
        2, "changes nothing", "steps before the profiler starts, in each repetition", needs={"profile.enabled": ON}
    )
    warmup: Count = setting(
        2, "changes nothing", "steps that the profiler then runs without recording", needs={"profile.enabled": ON}
    )
    active: Count = setting(6, "changes nothing", "steps that it then records", needs={"profile.enabled": ON})
    repeat: Count = setting(
        1, "changes nothing", "how often that is done; each has its own trace", needs={"profile.enabled": ON}
    )
    details: bool = setting(
        False,
        "changes nothing",
        "also record memory and sample Python stacks; `--profile long` sets it, with 10, 10 and 20 steps",
        needs={"profile.enabled": ON},
    )


class RunSection(Section):
    """Name and place of the run, its trackers, and commands at its end."""

    output: Annotated[str, Field(min_length=1)] = setting("runs", "changes nothing", "folder of runs", path=PATH)
    name: Annotated[str, Field(min_length=1)] | None = setting(
        None, "changes nothing", "name of the run and its files; derived from the dataset when empty"
    )
    priority: int = setting(0, "changes nothing", "in a batch, jobs with a higher number begin first")
    offline: bool = setting(False, "changes nothing", "make no network request")
    system_every_seconds: NotNegative = setting(
        10.0, "changes nothing", "interval of the measurements of GPU, CPU, memory and disks; 0 measures nothing"
    )
    trackers: tuple[TrackerName, ...] = setting(
        ("tensorboard",),
        "changes nothing",
        "what shows the run while it trains, beside the JSON lines of its folder: `tensorboard`, `wandb`, `trackio`; see docs/trackers.md",
    )
    tracker_project: Annotated[str, Field(min_length=1)] = setting(
        "lora-trainer", "changes nothing", "project that W&B and trackio show the run in", needs={"run.trackers": READS}
    )
    log_artifacts: bool = setting(
        True,
        "changes nothing",
        "give W&B the LoRA files, the report and the samples at the end of the run",
        needs={"run.trackers": READS},
    )
    tracker_wait_seconds: Positive = setting(
        60.0,
        "changes nothing",
        "how long the end of a run waits for trackers to send what they have",
        needs={"run.trackers": ON},
    )
    copy_to: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "changes nothing",
        "copy the finished LoRA for another program: `comfyui`, `forge` (A1111 too), or a folder; never over another file",
        path=PathKind(words=("comfyui", "forge")),
    )
    on_finish: str | None = setting(
        None,
        "changes nothing",
        "command to run when the run ended with exit code 0, without a shell; its environment has `LORA_TRAINER_RUN`, `_STATUS`, `_SCORE`, `_REASON`, `_EXIT_CODE` and `_RECORD`",
    )
    on_failure: str | None = setting(
        None, "changes nothing", "the same for a run that was refused, failed, or was stopped by a signal"
    )
    command_seconds: Positive = setting(
        60.0,
        "changes nothing",
        "how long `on_finish` and `on_failure` may take before they are ended",
        needs={"run.on_finish": ON, "run.on_failure": ON},
    )
