"""Names and limits that several sections share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from lora_trainer.config.tables import one_of

FamilyName = Annotated[str, one_of("model.family")]
Blocks = Annotated[
    StrictBool | Literal["auto"] | Annotated[int, Field(ge=0)], Field(union_mode="left_to_right")
]  # all, none, as few as needed, a number: 1 is one block and not `true`
# Of models with the same architecture.
Flavor = Literal["base", "turbo", "distilled", "dev", "kontext", "edit", "edit-2509", "edit-2511"]
PredictionType = Literal["epsilon", "v_prediction"]  # as in diffusers, of models with a noise schedule
Precision = Literal["bf16", "fp16", "fp32", "fp8", "int8", "nf4"]
OptimizerName = Annotated[str, one_of("optimizer.name")]
SchedulerName = Literal["constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "one_cycle"]
AdapterName = Annotated[str, one_of("lora.type")]
InitialWeightsName = Literal[
    "default", "gaussian", "svd_down", "pissa", "pissa_niter_4", "pissa_niter_16", "olora"
]  # peft's names, and `svd_down`
LossName = Annotated[str, one_of("loss.type")]
TrackerName = Annotated[str, one_of("run.trackers")]
WeightingName = Annotated[str, one_of("loss.weighting")]
ExportDtype = Literal["fp16", "bf16", "fp32"]
LatentsDtype = Literal["fp32", "bf16", "fp16"]
ExportWeightsName = Literal["best", "last"]
LoraCheckName = Literal["auto", "full", "lite", "off"]
UnresolvedName = Literal["refuse", "accept"]
CompareName = Literal["off", "strengths", "checkpoints", "both"]
AttentionName = Literal[
    "auto", "fastest", "sdpa", "flash", "efficient", "cudnn", "math", "xformers", "flash2", "flash3"
]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CheckpointingMode = Literal["full", "selective"]
FsdpStrategy = Literal["full_shard", "shard_grad_op"]  # as transformers and accelerate name them
CompressionName = Literal["fp16", "bf16"]  # of gradients, as DDP's hooks `fp16_compress` and `bf16_compress`
CropName = Literal["center", "random"]
TimestepSamplingName = Literal["uniform", "logit_normal", "mode"]
OnNonfiniteName = Literal["skip", "rollback", "stop"]
EarlyStoppingMetricName = Literal["loss", "agreement"]

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
DeviceName = Annotated[str, Field(pattern=r"^(auto|cpu|cuda:\d+)$")]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Side = Annotated[int, Field(ge=32, le=4096)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# What a setting means for a resumed run. `fixed`: it cannot change, since a checkpoint's weights, optimizer state, samples
# and noise depend on it. `fixed in effect`: what it leads to is compared: the hashes of weights and data, the training
# resolution, the precision. The others may change: `changes training` is noted in the record, since training from there on
# differs from what it would have been; `changes rounding` changes only that; with `changes nothing` the weights are the same
# to the bit.
OnResume = Literal["fixed", "fixed in effect", "changes training", "changes rounding", "changes nothing"]


# What another setting must be so that a field acts: one of these values, or
ON = "on"  # neither empty, false, 0 nor "off"
NOT_0 = "not 0"  # anything but 0: empty lets the run choose
EMPTY = "empty"  # not set
READS = "reads"  # a name whose entry in its table lists the field among its `reads`
Wanted = tuple[str | float, ...] | str

Value = TypeVar("Value")


class PathKind(NamedTuple):
    """That a setting names a file or folder, or with `has_hub` the id of a hub. `words` are values that are no path."""

    has_hub: bool = False
    words: tuple[str, ...] = ()


PATH, PATH_OR_HUB = PathKind(), PathKind(has_hub=True)


def setting(
    default: Value,
    on_resume: OnResume,
    description: str,
    needs: Mapping[str, Wanted] | None = None,
    *,
    path: PathKind | None = None,
) -> Value:
    """A field of a section: its default, what it means for a resumed run, what it is, and what it needs.

    `needs` names the settings of which one must be as it says, else the field does nothing (`config/needs.py`). `path` says that it
    names files (`config/paths.py`).
    """
    extra: Any = {"on_resume": on_resume, "needs": {**(needs or {})}, "path": path}
    return Field(default, description=description, json_schema_extra=extra)
