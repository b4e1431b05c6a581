"""Names and limits that several sections share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from lora_trainer.config.tables import one_of

FamilyName = Annotated[str, one_of("model.family")]
Blocks = Annotated[
    StrictBool | Literal["auto"] | Annotated[int, Field(ge=0)], Field(union_mode="left_to_right")
]  # all, none, as few as needed, a number: 1 is one block and not `true`
Flavor = Literal["base", "turbo"]  # of models with the same architecture
Precision = Literal["bf16", "fp16", "fp32", "fp8", "int8", "nf4"]
OptimizerName = Annotated[str, one_of("optimizer.name")]
SchedulerName = Literal["constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "one_cycle"]
AdapterName = Annotated[str, one_of("lora.type")]
LossName = Annotated[str, one_of("loss.type")]
WeightingName = Annotated[str, one_of("loss.weighting")]
ExportDtype = Literal["fp16", "bf16", "fp32"]
ExportWeightsName = Literal["best", "last"]
LoraCheckName = Literal["full", "lite", "off"]
AttentionName = Literal[
    "auto", "fastest", "sdpa", "flash", "efficient", "cudnn", "math", "xformers", "flash2", "flash3"
]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CheckpointingMode = Literal["full", "selective"]
CropName = Literal["center", "random"]
TimestepSamplingName = Literal["uniform", "logit_normal", "mode"]
OnNonfiniteName = Literal["skip", "rollback", "stop"]

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Side = Annotated[int, Field(ge=32, le=4096)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
