"""Whole production runs. `ProductionTrainer` is the way in from Python; importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_trainer.run.trainer import ProductionTrainer as ProductionTrainer

__all__ = ["ProductionTrainer"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: `--help` reads settings only, and must not wait for images and models."""
    if name == "ProductionTrainer":
        from lora_trainer.run.trainer import ProductionTrainer

        return ProductionTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
