"""What a run keeps, measures, draws and refuses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lora_trainer.config.schema.types import (
    Count,
    CountOrZero,
    LoraCheckName,
    NotNegative,
    ReleaseName,
    Section,
    Share,
)


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
    steps: Count | None = Field(None, description="sampler steps; empty means what is usual for the model")
    guidance: NotNegative = Field(
        7.5, description="guidance scale: classifier-free, or what a distilled model is told, where it knows any"
    )
    negative: str = Field("", description="what pictures shall not show, where guidance is classifier-free")
    strengths: tuple[Annotated[float, Field(ge=-4.0, le=4.0)], ...] = Field(
        (1.0,), description="strengths of the LoRA that are drawn beside the untouched base"
    )
    seeds: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="pictures of each prompt, with seeds that count up from `train.seed`"
    )


class GatesSection(Section):
    dataset: Share = Field(0.8, description="score below which a data set is refused by `produce`")
    lora: Share = Field(0.9, description="score below which a LoRA is refused by `produce`; 0 refuses none")
    lora_check: LoraCheckName = Field(
        "full",
        description="how much of the LoRA is measured at the end: `lite` takes a quarter of the forward passes and one "
        "image with and without the LoRA, `off` neither scores it nor makes images",
    )


class RunSection(Section):
    output: Annotated[str, Field(min_length=1)] = Field("runs", description="folder that holds runs")
    name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="name of the run and of its files; made from the data when empty"
    )
    offline: bool = Field(False, description="make no network request at all")
