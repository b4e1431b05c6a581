"""The packages of attention backends outside of torch. No torch."""

from __future__ import annotations

from lora_trainer.core.errors import Problem
from lora_trainer.core.imports import why_unusable

FROM = {
    "xformers": "pip install xformers",
    "flash2": "pip install flash-attn --no-build-isolation",
    "flash3": "the folder hopper of FlashAttention's sources",
}
DISTRIBUTIONS = {"xformers": "xformers", "flash2": "flash-attn", "flash3": "flash-attn-3"}
MODULES = {"xformers": "xformers", "flash2": "flash_attn", "flash3": "flash_attn_interface"}


def lacking(name: str) -> Problem | None:
    """The problem of a backend whose package is not installed or does not load, or None. The package is imported."""
    module = MODULES.get(name)
    if module is None or (reason := why_unusable(module)) is None:
        return None
    return Problem(
        "library_missing",
        f"hardware.attention_backend={name}: {name} {reason} ({FROM[name]}).",
        "Install it, or set hardware.attention_backend=auto.",
    )
