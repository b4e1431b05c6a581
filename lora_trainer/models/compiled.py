"""Compile the denoiser's repeated blocks in place: the adapter inside each region, the checkpoint around it.

A region is a form of block: a class and the shapes of its weights, which are inputs of the compiled code, so that all
blocks of a form share one compilation for each size of micro-batch. Without gradients (validation losses, images)
blocks run uncompiled: a second compilation of each would cost more than it saves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lora_trainer.core.errors import first_line
from lora_trainer.core.findings import counted
from lora_trainer.models.memory.checkpointing import repeated_kinds

MOST_SHAPES = 8  # of micro-batches with a compilation of their own; with more there is one for all
MOST_COMPILATIONS = 4 * MOST_SHAPES  # of one form: a first block needs no gradient of its input, memory may run out
MOST_OF_A_CLASS = 1024
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that record CUDA graphs, which hold addresses of weights
COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/")


@dataclass
class Compiled:
    """The compiled blocks of one denoiser. `on` is whether they are used: the loop turns it off where they fail."""

    mode: str
    dynamic: bool
    fullgraph: bool
    kinds: dict[str, int] = field(default_factory=dict)  # class -> blocks
    forms: int = 0
    on: bool = True
    last_count: Count | None = None
    compiled_before: bool = False  # a graph of these blocks, for one size
    seconds: float = 0.0  # spent compiling them, as far as `news` counted it

    @property
    def blocks(self) -> int:
        return sum(self.kinds.values())

    @property
    def line(self) -> str:
        """One line for the log, before anything is compiled."""
        kinds = " and ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        sizes = "one compilation for all sizes" if self.dynamic else "each size for itself"
        return f"compiled: {kinds} in {counted(self.forms, 'form')}, {sizes}, mode {self.mode}"

    def run(self, region: Callable[..., Any], block: nn.Module, *arguments: Any, **named: Any) -> Any:
        """A block's forward pass, by its region where gradients are wanted."""
        if self.on and torch.is_grad_enabled():
            return region(block, *map(in_order, arguments), **named)
        return type(block).forward(block, *arguments, **named)

    def begin_step(self) -> None:
        """Mark a step for CUDA graphs: earlier outputs are no longer needed."""
        if self.on and self.mode in WITH_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()

    def news(self) -> str | None:
        """What was compiled since the last call; None where nothing was."""
        now, before = count(), self.last_count or Count()
        self.last_count = now
        if now.graphs == before.graphs:
            return None
        reused = f", {now.reused - before.reused} of them read from the cache" if now.reused > before.reused else ""
        again = "again, for another size: " if self.compiled_before else ""
        self.compiled_before = True
        self.seconds += now.seconds - before.seconds
        breaks = now.breaks - before.breaks
        broken = f"{counted(breaks, 'graph break')}, the first: {now.first_break}" if breaks else "no graph break"
        graphs = counted(now.graphs - before.graphs, "graph")
        return f"compiled {again}{graphs}{reused} in {now.seconds - before.seconds:.0f} s, {broken}"

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block nothing is compiled or runs compiled."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


def in_order(value: Any) -> Any:
    """A sequence [B, N, C] in the order of its sides, on a CPU.

    U-Nets give their first transformer block of a level a transposed view, and torch 2.13's compiler vectorises the
    gradient of a layer norm of such a one wrongly (docs/tried.md).
    """
    strided = isinstance(value, torch.Tensor) and value.dim() == 3 and value.device.type == "cpu"
    return value.contiguous() if strided else value


@dataclass(frozen=True)
class Count:
    """What this process has compiled so far."""

    graphs: int = 0
    reused: int = 0  # of them, from the cache on the disk
    breaks: int = 0
    first_break: str = ""
    seconds: float = 0.0


def count() -> Count:
    """Read from torch's own counters."""
    from torch._dynamo.utils import counters, cumulative_time_spent_ns

    breaks = counters["graph_break"]
    return Count(
        graphs=counters["stats"]["unique_graphs"],
        reused=counters["aot_autograd"]["autograd_cache_hit"],
        breaks=sum(breaks.values()),
        first_break=next(iter(breaks), "").strip().partition("\n")[0],
        seconds=cumulative_time_spent_ns["entire_frame_compile"] / 1e9,
    )


def repeated_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a denoiser."""
    names = repeated_kinds(denoiser)
    return [module for module in denoiser.modules() if type(module).__name__ in names]


def form_of(block: nn.Module) -> Hashable:
    """Blocks of one form can share a compilation."""
    return type(block), tuple((name, tuple(value.shape)) for name, value in block.named_parameters())


def compile_blocks(denoiser: nn.Module, *, mode: str, dynamic: bool, fullgraph: bool) -> Compiled:
    """Compile each repeated block at its first call; call this when the adapter is injected and weights are stored.

    Hooks on a block stay outside its region, so that weights which they load are there when it runs.
    """
    import torch._dynamo

    limits: Any = torch._dynamo.config
    options: dict[str, Any] = {}
    limits.recompile_limit = max(limits.recompile_limit, MOST_COMPILATIONS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MOST_OF_A_CLASS)
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True  # a block only searches the compilations of its own form
    if any(layer._forward_hooks for block in repeated_blocks(denoiser) for layer in [*block.modules()][1:]):
        # Else a block whose layers have no hook would run the code of one whose layers do, and the reverse.
        limits.skip_nnmodule_hook_guards = False
    compiled = Compiled(mode, dynamic, fullgraph, last_count=count())
    regions: dict[Hashable, Callable[..., Any]] = {}
    for block in repeated_blocks(denoiser):
        kind, form = type(block), form_of(block)
        if form not in regions:
            regions[form] = torch.compile(kind.forward, mode=mode, dynamic=dynamic, fullgraph=fullgraph, **options)
        block.forward = partial(compiled.run, regions[form], block)
        compiled.kinds[kind.__name__] = compiled.kinds.get(kind.__name__, 0) + 1
    compiled.forms = len(regions)
    return compiled


def why_not(denoiser: nn.Module, device: torch.device) -> str | None:
    """Why compiling cannot work, as far as that shows beforehand, with the fix; None where it may."""
    if not repeated_blocks(denoiser):
        return "this model has no repeated blocks that are known"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "there is no Triton that works on this GPU (Linux: pip install triton)"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return f"{first_line(error)}; a CPU needs a C++ compiler (g++, clang or MSVC)"
    return None


def is_compiler_error(error: BaseException) -> bool:
    """Whether an error came from the compiler or from compiled code, by its traceback."""
    trace = error.__traceback__
    while trace is not None:
        if any(part in trace.tb_frame.f_code.co_filename.replace("\\", "/") for part in COMPILERS):
            return True
        trace = trace.tb_next
    return False


def compiler_message(error: BaseException) -> str:
    """The line of a compiler's error that names the cause: torch puts its own text and commands around it."""
    text = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]
    _, ran, output = text.partition("\nOutput:\n")  # of a C++ compiler
    lines = [line.strip() for line in (output if ran else text).splitlines()]
    lines = [line for line in lines if line and not line.endswith(" raised:")]
    if not lines:
        return first_line(error)
    if ran:
        found = next((line for line in lines if "error" in line.lower()), lines[-1])
    else:
        found = lines[-1] if lines[0].endswith(":") else lines[0]  # Triton's: a place, the code, and then the message
    return found.rstrip(".")
