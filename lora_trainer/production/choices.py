"""What the hardware decides, each with its reason: device, precision, micro batch, attention, checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_trainer.config.contradictions import from_user
from lora_trainer.config.layers import Resolved
from lora_trainer.config.schema import Config
from lora_trainer.core.hardware import cpu_supports_bf16, cuda_memory_gib

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGEST_GUESSED_MICRO = 4
ENCODER_DTYPE = torch.float32  # encoders run once and their output is kept: exactness matters more than speed
LARGEST_SHARE = 0.9  # of the card, so that the driver and other programs never make it spill


@dataclass(frozen=True)
class Choice:
    """A value and why."""

    value: str
    reason: str


@dataclass(frozen=True)
class Choices:
    """What this machine made of the settings."""

    device: torch.device
    dtype: torch.dtype
    encoder_dtype: torch.dtype
    precision: Choice
    micro: int
    micro_reason: str

    @property
    def lines(self) -> tuple[str, ...]:
        return (
            f"precision {self.precision.value}: {self.precision.reason}",
            f"micro batch {self.micro}: {self.micro_reason}",
        )


def choose(resolved: Resolved, device: torch.device, world: int) -> Choices:
    """Decide for a device. Never refuses: what a card cannot do falls back and says so."""
    config = resolved.config
    asked = asked_by_user(resolved, "memory.base_precision")
    precision = choose_precision(config.memory.base_precision, device, asked=asked)
    dtype = DTYPES[precision.value]
    micro, reason = choose_micro(config, world)
    return Choices(device, dtype, ENCODER_DTYPE, precision, micro, reason)


def asked_by_user(resolved: Resolved, name: str) -> bool:
    """Whether a setting comes from the user's file or flags rather than from defaults and presets."""
    return from_user(resolved.origin[name])


def choose_precision(wanted: str, device: torch.device, *, asked: bool) -> Choice:
    """The wanted precision where the device is good at it."""
    if device.type == "cpu":
        if wanted == "fp32" or asked:
            return Choice(wanted, "asked for")
        units = "has" if cpu_supports_bf16() else "has no"
        return Choice(
            "fp32", f"{wanted} is for GPUs; on a processor (which {units} bf16 units) fp32 is the safe choice"
        )
    if wanted == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return Choice("fp16", "this card has no bf16 units; with a loss scaler")
    return Choice(wanted, "asked for" if asked else "the preset's")


def choose_micro(config: Config, world: int) -> tuple[int, str]:
    """Samples per forward pass. A rule of thumb until memory is predicted from the model itself."""
    per_process = -(-config.batch.effective // world)
    if config.batch.max_micro is not None:
        return min(config.batch.max_micro, per_process), "batch.max_micro"
    if per_process <= LARGEST_GUESSED_MICRO:
        return per_process, "the whole step at once"
    return LARGEST_GUESSED_MICRO, "rule of thumb; set batch.max_micro to change it"


def cap_memory(config: Config, device: torch.device) -> None:
    """Hold the process under the tier's limit and under 90 % of the card, so that nothing spills to system memory."""
    card = cuda_memory_gib()
    if device.type == "cuda" and card is not None:
        limit = config.memory.limit_gib or card
        torch.cuda.set_per_process_memory_fraction(min(LARGEST_SHARE, limit / card), device)


def card_gib(config: Config) -> float | None:
    """The memory that may be used: the tier's limit or the card's, whichever is smaller; None without a card."""
    card = cuda_memory_gib()
    limit = config.memory.limit_gib
    return card if card is None or limit is None else min(card, limit)
