"""What a run saves, measures, generates and refuses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lora_trainer.config.schema.types import (
    Count,
    CountOrZero,
    ExportDtype,
    ExportWeightsName,
    LoraCheckName,
    NotNegative,
    Section,
    Share,
)


class CheckpointSection(Section):
    """Checkpoints to resume from, and the LoRA files."""

    every_n_steps: Count = Field(500, description="steps between checkpoints")
    every_n_epochs: Count | None = Field(
        None, description="epochs between checkpoints, in addition to `every_n_steps`; 5 is usual"
    )
    export_every_n_steps: CountOrZero = Field(
        0, description="steps between LoRA files kept in the folder `weights`; 0 means none"
    )
    wait_minutes: NotNegative = Field(
        60.0, description="how long a run waits, paused, for space on a full disk before it stops"
    )
    keep_last: Count = Field(2, description="newest checkpoints to keep")
    export_weights: ExportWeightsName = Field(
        "best", description="weights to export: `best` has the lowest validation loss, `last` is the last step"
    )
    export_dtype: ExportDtype = Field(
        "fp16", description="precision of LoRA files; `fp32` keeps all bits and doubles their size"
    )


class ValidationSection(Section):
    """The validation loss: on images that are not trained, at fixed noise."""

    every_n_steps: CountOrZero = Field(100, description="steps between validations; 0 validates only at the end")
    split: Annotated[float, Field(ge=0.0, le=0.5)] = Field(0.1, description="share of images kept for validation")
    split_seed: CountOrZero = Field(0, description="another number keeps other images")


class SampleSection(Section):
    """Images generated during training and at its end."""

    every_n_steps: CountOrZero = Field(500, description="steps between sample images; 0 means none while training")
    prompts: tuple[str, ...] = Field((), description="prompts; empty means captions of the dataset")
    count: Count = Field(2, description="number of prompts taken from the dataset")
    num_inference_steps: Count | None = Field(None, description="sampler steps; empty means the model's usual number")
    guidance_scale: NotNegative = Field(
        7.5, description="guidance scale: classifier-free, or the value given to a distilled model that takes one"
    )
    negative_prompt: str = Field("", description="negative prompt, where guidance is classifier-free")
    strengths: tuple[Annotated[float, Field(ge=-4.0, le=4.0)], ...] = Field(
        (1.0,), description="LoRA strengths to generate beside the base model without it"
    )
    num_images_per_prompt: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="images of each prompt, with seeds that count up from `train.seed`"
    )


class GatesSection(Section):
    """When a dataset or a LoRA is refused."""

    dataset: Share = Field(0.8, description="score below which `produce` refuses a dataset")
    lora: Share = Field(0.9, description="score below which `produce` refuses a LoRA; 0 refuses none")
    lora_check: LoraCheckName = Field(
        "full",
        description="how much of the LoRA is measured at the end: `lite` takes a quarter of the forward passes and one image with and without the LoRA, `off` neither scores it nor generates images",
    )


class RunSection(Section):
    """Name and place of the run."""

    output: Annotated[str, Field(min_length=1)] = Field("runs", description="folder of runs")
    name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="name of the run and its files; derived from the dataset when empty"
    )
    offline: bool = Field(False, description="make no network request")
