"""Which micro-batch size, gradient checkpointing, weight dtype and block swap fit a GPU. No torch.

In this order: the largest micro-batch that fits; if not even one sample does, as few checkpointed blocks as needed;
then weights in 8 bits, and in 4; then as few swapped blocks as needed. All of them train the same except for rounding;
each further one is slower.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.memory_plan.profiles import MemoryModel, Sizes
from lora_trainer.models.memory.phases import count_of
from lora_trainer.models.memory.texts import NO_TEXTS, TextSizes
from lora_trainer.optim.optimizers import OPTIMIZERS, optimizer_state_on_gpu
from lora_trainer.optim.state_size import ROUNDED_AT_ONCE

if TYPE_CHECKING:
    from lora_trainer.config.schema import Blocks

GIB = 2**30
# Nothing of this was measured on a GPU yet: docs/memory.md.
CONTEXT_GIB = 0.7  # the CUDA context, libraries and workspaces
FRAGMENTATION = 0.05  # of the memory that a step allocates and frees
GATHERED = 1.5  # of the weights that are whole for a moment with `memory.fsdp`
ROUNDING = 1e-6  # GiB, for phases that fill what is free
LARGEST_SHARE = 0.9  # of the GPU, so that the driver and other programs never make it spill
NARROWER = ("fp8", "nf4")  # dtypes for the base model where the wanted one does not fit
WHOLE_STEP = "the whole step at once"
WHOLE_BUCKET = "all samples of a step that have one size"
SMALLER_RANKS = (64, 32, 16, 8, 4)
STEP_DOWN = 64  # pixels
MOST_MICRO = 64  # samples, of the largest micro-batch that is looked for


def no_other_phases(demand: Demand, fit: MemoryPlan) -> Mapping[str, float]:
    """Training alone."""
    return {}


@dataclass(frozen=True)
class Demand:
    """The demands of settings and model on a GPU. `samples` are those of a step in one process.

    `precisions` are the ones to try, best first. `encoder` is for images that are encoded while training, one by
    one: bytes of the VAE, and its bytes per pixel. `texts` are the trained text encoders.

    `guided`: each sample takes one more forward pass, without gradients, before the others: it needs more time, and less
    memory than they do.

    `streaming` is a number of swapped blocks, or `auto`; `recompute` is the checkpointing mode;
    `offloaded`: activations are offloaded. `controls` are the control images of a sample, and `control_tokens`
    the tokens that each adds to the text. `others` returns the peaks in GiB of a run's phases besides training.
    """

    memory_model: MemoryModel
    rank: int
    resolution: int
    downscale: int
    pixel_step: int
    samples: int
    max_micro: int | None
    checkpointing: Blocks
    precisions: tuple[str, ...]
    optimizer: str
    averaged: bool
    limit_gib: float | None
    in_bucket: int | None = None  # the most samples of a step in one bucket, where the data is known
    encoder: tuple[int, int] = (0, 0)
    several: bool = False  # `data.resolutions` is set
    streaming: Literal["auto"] | int = 0
    recompute: str = "full"
    offloaded: bool = False
    texts: TextSizes = NO_TEXTS
    controls: int = 0
    control_tokens: int = 0
    rounded: bool = False  # bf16 weights alone, without masters (`optimizer.stochastic_rounding`)
    frozen: int = 0  # values of `model.training_adapter`
    guided: bool = False  # `loss.guidance_target`
    preserved: float = 0.0  # share of the steps with `loss.output_preservation_weight`
    shards: int = 1  # processes that share the base model's weights (`memory.fsdp`)
    regathered: bool = True  # for the backward pass, in place of gathered blocks that wait for it
    others: Callable[[Demand, MemoryPlan], Mapping[str, float]] = field(default=no_other_phases, compare=False)

    @property
    def area(self) -> int:
        """Values of one channel of a sample's latents; buckets are never larger."""
        return max(self.resolution, self.pixel_step) ** 2 // self.downscale**2

    @property
    def denoised_area(self) -> int:
        """The same with the control images, which are further tokens: a step takes what an image of this area would."""
        read = self.controls * self.control_tokens * (self.pixel_step // self.downscale) ** 2
        return self.area * (1 + self.controls) + read

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all trained parameters."""
        return [*self.memory_model.shapes(self.rank), *self.texts.shapes]

    @property
    def swapped(self) -> int:
        """Blocks swapped by a number in the settings."""
        return 0 if isinstance(self.streaming, str) else min(self.streaming, self.memory_model.swappable)

    def at(self, side: int) -> str:
        """The setting for a resolution."""
        return f"data.resolutions=[{side}]" if self.several else f"data.resolution={side}"


@dataclass(frozen=True)
class Parts:
    """GPU memory at the peak of a step, in GiB, and the operations of a step, in TFLOP."""

    weights: float
    adapter: float
    optimizer: float
    activations: float
    overhead: float
    tflop: float

    @property
    def peak(self) -> float:
        return self.weights + self.adapter + self.optimizer + self.activations + self.overhead


@dataclass(frozen=True)
class MemoryPlan:
    """What was chosen for training, why, and the memory that it takes."""

    micro: int
    accumulation: int
    checkpointed: int
    blocks: int
    precision: str
    parts: Parts
    fits: bool
    reasons: tuple[str, str, str, str]  # of micro-batch, checkpointing, precision and block swap
    swapped: int = 0
    swappable: int = 0


def parts_of(
    demand: Demand, micro: int, checkpointed: int, precision: str, swapped: int | None = None, runs: int = 1
) -> Parts:
    """The peak of a step, in a backward pass or in the update; `swapped` blocks, by default those that are set.

    Several `runs` with these settings on one base model hold its weights once, and each its own parameters, gradients
    and optimizer state; `micro` is then the size of a pass, which some or all of them share (`training/run_group.py`).
    """
    blocks_swapped = demand.swapped if swapped is None else swapped
    sizes = Sizes(
        demand.rank,
        micro,
        demand.denoised_area,
        checkpointed,
        demand.recompute,
        blocks_swapped,
        demand.offloaded,
    )
    found = demand.memory_model.footprint(sizes, precision)
    shapes, texts, itemsize = demand.shapes * runs, demand.texts, 4 if precision == "fp32" else 2
    numbers = sum(map(math.prod, shapes))
    masters = 4 * numbers
    copies = runs * found.copies + itemsize * sum(map(math.prod, texts.shapes))
    own = copies if precision == "fp32" or demand.rounded else copies + masters
    summed = itemsize * numbers if demand.rounded else masters  # gradients that the optimizer gets
    widened = 8 * min(numbers, ROUNDED_AT_ONCE) if demand.rounded else 0
    state = optimizer_state_on_gpu(demand.optimizer, shapes) + (masters if demand.averaged else 0)
    samples = runs * demand.samples
    earlier = summed if samples > micro or demand.preserved else 0  # gradients of earlier micro-batches
    recomputed = checkpointed > 0
    adapter = own + earlier + runs * found.gradients
    activations = found.activations + itemsize * texts.kept(micro, checkpointed=recomputed)
    if own + summed + widened > adapter + activations:  # the update: all gradients, no activations
        adapter, activations = own + summed + widened, 0
    autoencoder, encoding = demand.encoder[0], demand.encoder[1] * demand.area * demand.downscale**2
    activations += encoding  # at the same time as the step
    overhead = CONTEXT_GIB * GIB + FRAGMENTATION * (adapter + state + activations)
    flops: float = found.flops
    if demand.guided or demand.preserved:
        plain = demand.memory_model.footprint(replace(sizes, checkpointed=0, recompute="full"), precision).flops
        forward = plain / 2  # frozen weights need no gradients of their own
        flops += demand.preserved * (flops + forward) + demand.guided * forward
    flops = flops * samples / micro + texts.flops(samples, checkpointed=recomputed)
    base = weights_on_gpu(demand, precision) if demand.shards > 1 else found.weights
    held = base + autoencoder + itemsize * (sum(texts.held.values()) + demand.frozen)
    return Parts(
        weights=held / GIB,
        adapter=adapter / GIB,
        optimizer=state / GIB,
        activations=activations / GIB,
        overhead=overhead / GIB,
        tflop=flops / 1e12,
    )


@dataclass(frozen=True)
class RunsTogether:
    """So many `runs` with equal settings on one base model, of which as many share a pass as fit; 0 where not even one does."""

    runs: int
    in_a_pass: int
    parts: Parts


def runs_together(demand: Demand, fit: MemoryPlan, most: int) -> list[RunsTogether]:
    """The memory of 1, 2, 4, ... and `most` runs on one base model, with a plan's choices for one of them."""
    found = []
    for runs in sorted({2**power for power in range(most.bit_length())} | {most}):
        passes = [
            parts_of(demand, count * fit.micro, fit.checkpointed, fit.precision, fit.swapped, runs)
            for count in range(1, runs + 1)
        ]
        shared = bisect_left(passes, True, key=lambda parts: not fits(demand, parts))
        found.append(RunsTogether(runs, shared, passes[max(1, shared) - 1]))
    return found


def weights_on_gpu(demand: Demand, precision: str) -> int:
    """Bytes of the base model in one process while it trains, all at once or divided among processes.

    Divided: its part of everything, and whole what no block has, the block that computes and the one that is gathered; these
    are there twice for the moment in which one buffer is copied to its tensors. Swapping all blocks leaves the same.
    """
    model = demand.memory_model
    whole = model.weights(precision)
    if demand.shards == 1:
        return whole
    if not demand.regathered:
        return whole + whole // demand.shards
    gathered = model.footprint(
        Sizes(demand.rank, 1, demand.denoised_area, model.blocks, swapped=model.swappable), precision
    )
    return whole // demand.shards + round(GATHERED * gathered.weights)


def weights_fit(demand: Demand, precision: str) -> bool:
    """Whether the base model alone fits; true where blocks are swapped."""
    share = LARGEST_SHARE * (math.inf if demand.limit_gib is None else demand.limit_gib)
    return bool(demand.swapped) or weights_on_gpu(demand, precision) <= share * GIB


def fits(demand: Demand, parts: Parts) -> bool:
    return demand.limit_gib is None or parts.peak <= LARGEST_SHARE * demand.limit_gib


def too_large(demand: Demand, fit: MemoryPlan) -> dict[str, float]:
    """The phases besides training that do not fit, with their peaks in GiB."""
    if demand.limit_gib is None:
        return {}
    most = LARGEST_SHARE * demand.limit_gib + ROUNDING
    return {name: peak for name, peak in demand.others(demand, fit).items() if peak > most}


def all_fits(demand: Demand) -> bool:
    """Whether some plan for training fits, and the run's other phases with it."""
    fit = choose_fit(demand)
    return fit.fits and not too_large(demand, fit)


def usable_gib(limit_gib: float) -> float:
    """GiB of a GPU that torch's allocator may fill."""
    return LARGEST_SHARE * limit_gib - CONTEXT_GIB


def choose_fit(demand: Demand) -> MemoryPlan:
    """The fastest plan that fits; where none does, the one that needs least memory, with `fits` false."""
    tried = smallest = None
    for tried in candidate_plans(demand):
        if tried.fits:
            return tried
        if smallest is None or tried.parts.peak < smallest.parts.peak:
            smallest = tried
    assert smallest is not None
    return smallest


def largest_micro(demand: Demand, fit: MemoryPlan) -> int | None:
    """The largest micro-batch, up to MOST_MICRO, that fits with a plan's other choices, however many samples a step has.

    None where the plan itself does not fit, and without a memory profile: each size would be traced for seconds.
    """
    if demand.memory_model.traced or demand.limit_gib is None or not fit.fits:
        return None
    sizes = range(fit.micro + 1, MOST_MICRO + 1)

    def is_too_large(micro: int) -> bool:
        at_once = replace(demand, samples=micro)
        return not fits(demand, parts_of(at_once, micro, fit.checkpointed, fit.precision, fit.swapped))

    return fit.micro + bisect_left(sizes, True, key=is_too_large)


def candidate_plans(demand: Demand) -> Iterator[MemoryPlan]:
    """Plans for training, the fastest first; of each precision the last one needs least memory."""
    most = min(demand.samples, demand.max_micro or demand.samples, demand.in_bucket or demand.samples)
    for precision in demand.precisions:
        if demand.checkpointing != "auto":
            yield from _micro_batches(demand, most, precision)
            continue
        wide = _micro_batches(demand, most, precision)
        if weights_fit(demand, precision):
            first = next(wide)
            yield first
            if first.fits:
                continue
        smallest = _plan(demand, 1, demand.memory_model.blocks, precision, "even all of them are too few")
        if not smallest.fits:  # nor does any plan between; a trace of one would take seconds
            yield smallest
            continue
        if most == 1 or _plan(demand, 1, 0, precision, "not needed").fits:
            yield from wide
        yield _few_blocks(demand, precision)
    if demand.streaming == "auto" and demand.memory_model.swappable:
        yield _few_swapped(demand, demand.precisions[-1])


def _micro_batches(demand: Demand, most: int, precision: str) -> Iterator[MemoryPlan]:
    """Micro-batches from the largest down, checkpointed as set. Sizes that need as many passes are skipped."""
    checkpointed = _requested_blocks(demand)
    why = "as set" if demand.checkpointing != "auto" else "not needed"
    passes = 0
    divided = demand.in_bucket or demand.samples
    for largest in range(most, 0, -1):
        if math.ceil(divided / largest) == passes:
            continue
        passes = math.ceil(divided / largest)
        micro = math.ceil(divided / passes)
        if micro > most:
            micro = largest
        yield _plan(demand, micro, checkpointed, precision, why)


def _few_blocks(demand: Demand, precision: str) -> MemoryPlan:
    """One sample at a time with as few checkpointed blocks as fit; all of them where none fits."""
    most, stride = demand.memory_model.blocks, demand.memory_model.stride
    blocks = range(most - (most - 1) // stride * stride, most + 1, stride)  # the last is all of them
    found = bisect_left(blocks, True, key=lambda count: fits(demand, parts_of(demand, 1, count, precision)))
    if found == len(blocks):
        return _plan(demand, 1, most, precision, "even all of them are too few")
    return _plan(demand, 1, blocks[found], precision, "as few as fit; one sample does not fit without")


def _few_swapped(demand: Demand, precision: str) -> MemoryPlan:
    """One sample at a time, all blocks checkpointed unless set, with as few swapped blocks as fit; all where none fits."""
    checkpointed = demand.memory_model.blocks if demand.checkpointing == "auto" else _requested_blocks(demand)
    counts = range(1, demand.memory_model.swappable + 1)
    found = bisect_left(
        counts, True, key=lambda count: fits(demand, parts_of(demand, 1, checkpointed, precision, count))
    )
    count, why = (counts[found], "as few as fit") if found < len(counts) else (counts[-1], "even all of them")
    whole = "all of them, as block swap is slower" if demand.checkpointing == "auto" else "as set"
    return _plan(demand, 1, checkpointed, precision, whole, count, why)


def _requested_blocks(demand: Demand) -> int:
    return count_of(demand.checkpointing, demand.memory_model.blocks)


def _plan(
    demand: Demand,
    micro: int,
    checkpointed: int,
    precision: str,
    why: str,
    swapped: int | None = None,
    why_swapped: str = "as set",
) -> MemoryPlan:
    swapped = demand.swapped if swapped is None else swapped
    parts = parts_of(demand, micro, checkpointed, precision, swapped)
    first = demand.precisions[0]
    if demand.limit_gib is None:
        whole = "no GPU's limit applies"
    else:
        whole = f"the largest that fits {demand.limit_gib:g} GiB"
    if micro == demand.samples:
        whole = WHOLE_STEP
    elif micro == demand.max_micro:
        whole = "train.max_micro_batch_size"
    elif micro == demand.in_bucket:
        whole = WHOLE_BUCKET
    return MemoryPlan(
        micro=micro,
        accumulation=math.ceil(demand.samples / micro),
        checkpointed=checkpointed,
        blocks=demand.memory_model.blocks,
        precision=precision,
        parts=parts,
        fits=fits(demand, parts),
        reasons=(
            whole,
            why,
            "as set" if precision == first else _why_not(demand, precision),
            why_swapped if swapped or demand.streaming != "auto" else "not needed",
        ),
        swapped=swapped,
        swappable=demand.memory_model.swappable,
    )


def _why_not(demand: Demand, precision: str) -> str:
    """Why the wider precision before it was rejected."""
    precision = demand.precisions[demand.precisions.index(precision) - 1]
    if demand.checkpointing == "auto":
        return f"{precision} does not fit even with all blocks checkpointed"
    count = count_of(demand.checkpointing, demand.memory_model.blocks)
    return f"{precision} does not fit with {count} blocks checkpointed, as set"


def refuse_what_does_not_fit(demand: Demand, fit: MemoryPlan) -> None:
    """Raise UsageError with both numbers and the settings that would fit."""
    if not fit.fits:
        raise UsageError(Problem("does_not_fit", shortage(demand, fit), " ".join(what_would_fit(demand))))


def shortage(demand: Demand, fit: MemoryPlan) -> str:
    """A sentence with the peak and the limit."""
    limit = demand.limit_gib or math.inf
    return (
        f"Training needs {fit.parts.peak:.1f} GiB at its peak, with {fit.precision} weights, {fit.checkpointed} of "
        f"{fit.blocks} blocks checkpointed and {fit.swapped} of {fit.swappable} swapped; {to_use(limit)}."
    )


def to_use(limit_gib: float) -> str:
    """`a GPU of 8 GiB has 7.2 to use`; with two digits below 1."""
    share = LARGEST_SHARE * limit_gib
    return f"a GPU of {limit_gib:g} GiB has {share:.{1 if share >= 1.0 else 2}f} to use"


def what_would_fit(demand: Demand) -> list[str]:
    """Sentences with settings that make the demand fit, mildest first; with the GPU size that would do, where none does."""
    options = milder(demand)
    fitting = (assignment for assignment, changed in options if all_fits(changed))
    found = list(islice(fitting, 1))
    if found and " " not in found[0]:  # a second one only where both are single settings, with different names
        name = found[0].partition("=")[0]
        others = (
            option
            for option, changed in options
            if (" " not in option and option.partition("=")[0] != name) and all_fits(changed)
        )
        found += islice(others, 1)
    relaxed = replace(demand, precisions=tuple(dict.fromkeys((*demand.precisions, *NARROWER))), streaming="auto")
    smallest = choose_fit(relaxed)
    needed = max(smallest.parts.peak, *too_large(relaxed, smallest).values(), 0.0)
    gpu = math.ceil(needed / LARGEST_SHARE)
    return [f"It would fit with --set {assignment}." for assignment in found] or [f"It would fit a GPU of {gpu} GiB."]


def milder(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """Single changes, then some together, as (settings, demand), mildest first."""
    yield from cheap_changes(demand)
    for rank in SMALLER_RANKS:
        if rank < demand.rank:
            yield f"lora.rank={rank}", replace(demand, rank=rank)
    sides = range(demand.resolution - STEP_DOWN, demand.pixel_step * 4 - 1, -STEP_DOWN)
    for side in sides:
        yield demand.at(side), replace(demand, resolution=side)
    small = replace(demand, checkpointing="auto", precisions=("fp8",), recompute="full")
    for side in sides:
        both = replace(small, resolution=side, rank=min(demand.rank, SMALLER_RANKS[-2]))
        yield f"memory.weight_dtype=fp8 --set lora.rank={both.rank} --set {demand.at(side)}", both


def cheap_changes(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """Changes that make a step slower or less exact, and leave the LoRA's size and the resolution."""
    free = replace(demand, checkpointing="auto")
    if demand.checkpointing != "auto":
        yield "memory.gradient_checkpointing=auto", free
    if demand.recompute != "full":
        yield "memory.checkpointing_mode=full", replace(demand, recompute="full")
    small = replace(free, precisions=("fp8",), recompute="full")
    if not set(demand.precisions) & {"fp8", "int8", "nf4"}:
        yield "memory.weight_dtype=fp8", replace(demand, precisions=("fp8",))
        if demand.checkpointing != "auto":
            yield "memory.weight_dtype=fp8 --set memory.gradient_checkpointing=auto", small
    if demand.precisions[-1] != "nf4":
        yield "memory.weight_dtype=nf4", replace(demand, precisions=("nf4",))
    if demand.streaming != "auto":
        yield "memory.blocks_to_swap=auto", replace(demand, streaming="auto")
    if (demand.max_micro or 0) > 1:
        yield "train.max_micro_batch_size=1", replace(demand, max_micro=1)
    if not OPTIMIZERS[demand.optimizer].has_8_bit_state:
        yield "optimizer.name=adamw8bit", replace(demand, optimizer="adamw8bit")
