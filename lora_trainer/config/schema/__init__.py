"""Every setting: its name, type, limits, default and meaning.

The config is frozen and refuses unknown keys. Descriptions are what `--help` and the
documentation show.
"""

from __future__ import annotations

from pydantic import Field

from lora_trainer.config.schema.inputs import (
    CacheSection,
    CaptionsSection,
    DataSection,
    ModelSection,
    Source,
    SourceSection,
    TextSection,
)
from lora_trainer.config.schema.learning import (
    BatchSection,
    ControlSection,
    FlowSection,
    LoraSection,
    LossSection,
    NoiseSection,
    OptimSection,
    ScheduleSection,
    TrainSection,
)
from lora_trainer.config.schema.machine import HardwareSection, MemorySection
from lora_trainer.config.schema.results import (
    CheckpointSection,
    GatesSection,
    RunSection,
    SampleSection,
    ValidateSection,
)
from lora_trainer.config.schema.types import (
    AttentionName,
    CompileMode,
    Count,
    CountOrZero,
    CropName,
    FamilyName,
    LoraCheckName,
    LossName,
    NotFiniteName,
    NotNegative,
    OptimizerName,
    Positive,
    Precision,
    Recompute,
    ReleaseName,
    ScheduleName,
    Section,
    Share,
    Side,
    TimestepsName,
)

__all__ = [
    "AttentionName",
    "BatchSection",
    "CacheSection",
    "CaptionsSection",
    "CheckpointSection",
    "CompileMode",
    "Config",
    "ControlSection",
    "Count",
    "CountOrZero",
    "CropName",
    "DataSection",
    "FamilyName",
    "FlowSection",
    "GatesSection",
    "HardwareSection",
    "LoraCheckName",
    "LoraSection",
    "LossName",
    "LossSection",
    "MemorySection",
    "ModelSection",
    "NoiseSection",
    "NotFiniteName",
    "NotNegative",
    "OptimSection",
    "OptimizerName",
    "Positive",
    "Precision",
    "Recompute",
    "ReleaseName",
    "RunSection",
    "SampleSection",
    "ScheduleName",
    "ScheduleSection",
    "Section",
    "Share",
    "Side",
    "Source",
    "SourceSection",
    "TextSection",
    "TimestepsName",
    "TrainSection",
    "ValidateSection",
]


class Config(Section):
    """All settings of a run. Field names are the config's key names: `optim.learning_rate`.

    Dump with `by_alias=True`.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    captions: CaptionsSection = CaptionsSection()
    text: TextSection = TextSection()
    cache: CacheSection = CacheSection()
    lora: LoraSection = LoraSection()
    batch: BatchSection = BatchSection()
    memory: MemorySection = MemorySection()
    hardware: HardwareSection = HardwareSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    noise: NoiseSection = NoiseSection()
    flow: FlowSection = FlowSection()
    loss: LossSection = LossSection()
    train: TrainSection = TrainSection()
    control: ControlSection = ControlSection()
    checkpoint: CheckpointSection = CheckpointSection()
    # `validate` is a method of pydantic's base class, so only the key has that name.
    validation: ValidateSection = Field(ValidateSection(), alias="validate")
    sample: SampleSection = SampleSection()
    gates: GatesSection = GatesSection()
    run: RunSection = RunSection()
