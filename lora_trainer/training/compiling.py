"""Compile blocks as the settings say; which errors of compiled blocks an eager step gets around."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.core.compilations import keep_compilations
from lora_trainer.core.errors import Problem, TrainingFailed, UserError, first_line, is_out_of_memory
from lora_trainer.models.compiled import (
    MOST_COMPILATIONS,
    MOST_OF_A_CLASS,
    MOST_SHAPES,
    WITH_GRAPHS,
    Compiled,
    compile_blocks,
    is_compiler_error,
    why_not,
)
from lora_trainer.training.step import OomDuringAllReduce, OomDuringUpdate

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lora_trainer.config.schema import Config
    from lora_trainer.training.denoiser_layout import Layout

WITHOUT = "training continues without compiling (compile.enabled=false does so from the start)"


def compile_if_enabled(
    denoiser: nn.Module, config: Config, layout: Layout, device: torch.device
) -> tuple[Compiled | None, tuple[str, ...]]:
    """Compile the denoiser's blocks where the settings ask for it and it works here; and notes for the log."""
    if not layout.compiled:
        return None, ()
    if (reason := why_not(denoiser, device)) is not None:
        return None, (f"not compiled: {reason}",)
    settings, notes = config.compile, list[str]()
    if (lost := keep_compilations()) is not None:
        notes.append(lost)
    mode: str = settings.mode
    if mode in WITH_GRAPHS and layout.swapped:
        mode = {"reduce-overhead": "default"}.get(mode, "max-autotune-no-cudagraphs")
        notes.append(
            f"compile.mode is {mode}: CUDA graphs need weights that stay in place, and some blocks are swapped"
        )
    dynamic = layout.shapes > MOST_SHAPES if settings.dynamic == "auto" else settings.dynamic
    import torch._inductor.config as inductor  # loaded only where something is compiled

    inductor.deterministic = config.train.deterministic  # no kernel that timing chose
    inductor.fallback_random = config.lora.has_dropout  # the dropout masks that eager draws
    compiled = compile_blocks(denoiser, mode=mode, dynamic=dynamic, fullgraph=settings.fullgraph)
    if not dynamic and (layout.shapes > MOST_COMPILATIONS or layout.shapes * compiled.forms > MOST_OF_A_CLASS):
        notes.append(
            f"{layout.shapes} sizes of micro-batch are more than torch compiles one by one: at the last of them blocks "
            "run uncompiled (compile.dynamic=true compiles once for all)"
        )
    return compiled, (compiled.line, *notes)


def can_retry_without_compiling(error: Exception) -> bool:
    """Whether the step can be repeated without compiling, and may work then."""
    if isinstance(error, OomDuringUpdate | OomDuringAllReduce | UserError) or is_out_of_memory(error):
        return False
    return is_compiler_error(error)


def refuse_graph_break(error: Exception, compiled: Compiled) -> None:
    """Raise TrainingFailed for a graph break where `compile.fullgraph` forbids them."""
    if compiled.fullgraph and type(error).__name__ in ("Unsupported", "FailOnRecompileLimitHit"):
        message = f"compile.fullgraph: a block cannot be compiled whole ({first_line(error)})."
        raise TrainingFailed(Problem("block_not_compiled", message, "Set compile.fullgraph=false.")) from error
