"""Every setting: its name, type, limits, default and meaning.

The config is frozen and refuses unknown keys. `--help` and the documentation show
the descriptions.
"""

from __future__ import annotations

from lora_trainer.config.schema.inputs import (
    CacheSection,
    CaptionsSection,
    DataSection,
    ModelSection,
    Source,
    SourceSection,
    TextEncoderSection,
    TextualInversionSection,
)
from lora_trainer.config.schema.learning import (
    FlowSection,
    LoraSection,
    LossSection,
    LrSchedulerSection,
    NoiseSection,
    OptimizerSection,
    SafeguardsSection,
    TrainSection,
)
from lora_trainer.config.schema.machine import CompileSection, HardwareSection, MemorySection
from lora_trainer.config.schema.results import (
    CheckpointSection,
    GatesSection,
    ProfileSection,
    RunSection,
    SampleSection,
    ValidationSection,
)
from lora_trainer.config.schema.types import (
    AttentionName,
    Blocks,
    CheckpointingMode,
    CompileMode,
    Count,
    CountOrZero,
    CropName,
    EarlyStoppingMetricName,
    ExportWeightsName,
    FamilyName,
    FsdpStrategy,
    LoraCheckName,
    LossName,
    NotNegative,
    OnNonfiniteName,
    OptimizerName,
    Positive,
    Precision,
    SchedulerName,
    Section,
    Share,
    Side,
    TimestepSamplingName,
    TrackerName,
    WeightingName,
)

__all__ = [
    "AttentionName",
    "Blocks",
    "CacheSection",
    "CaptionsSection",
    "CheckpointSection",
    "CheckpointingMode",
    "CompileMode",
    "CompileSection",
    "Config",
    "Count",
    "CountOrZero",
    "CropName",
    "DataSection",
    "EarlyStoppingMetricName",
    "ExportWeightsName",
    "FamilyName",
    "FlowSection",
    "FsdpStrategy",
    "GatesSection",
    "HardwareSection",
    "LoraCheckName",
    "LoraSection",
    "LossName",
    "LossSection",
    "LrSchedulerSection",
    "MemorySection",
    "ModelSection",
    "NoiseSection",
    "NotNegative",
    "OnNonfiniteName",
    "OptimizerName",
    "OptimizerSection",
    "Positive",
    "Precision",
    "ProfileSection",
    "RunSection",
    "SafeguardsSection",
    "SampleSection",
    "SchedulerName",
    "Section",
    "Share",
    "Side",
    "Source",
    "SourceSection",
    "TextEncoderSection",
    "TextualInversionSection",
    "TimestepSamplingName",
    "TrackerName",
    "TrainSection",
    "ValidationSection",
    "WeightingName",
]


class Config(Section):
    """All settings of a run. Field names are the config's key names: `optimizer.learning_rate`."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    captions: CaptionsSection = CaptionsSection()
    text_encoder: TextEncoderSection = TextEncoderSection()
    textual_inversion: TextualInversionSection = TextualInversionSection()
    cache: CacheSection = CacheSection()
    lora: LoraSection = LoraSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    lr_scheduler: LrSchedulerSection = LrSchedulerSection()
    noise: NoiseSection = NoiseSection()
    flow: FlowSection = FlowSection()
    loss: LossSection = LossSection()
    safeguards: SafeguardsSection = SafeguardsSection()
    memory: MemorySection = MemorySection()
    compile: CompileSection = CompileSection()
    hardware: HardwareSection = HardwareSection()
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidationSection = ValidationSection()
    sample: SampleSection = SampleSection()
    gates: GatesSection = GatesSection()
    profile: ProfileSection = ProfileSection()
    run: RunSection = RunSection()

    @property
    def trains_text(self) -> bool:
        """Whether text encoders or learned tokens are trained: captions are then encoded in each step."""
        return any(self.text_encoder.learning_rates) or bool(self.textual_inversion.placeholder_tokens)
