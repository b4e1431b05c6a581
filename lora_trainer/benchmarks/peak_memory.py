"""What a step holds at its peak: measured, and as the memory plan has it.

On a GPU the numbers are the allocator's own. On a CPU the storages of the real step are counted as the plan counts
those of its trace, from the operator that makes each until it is freed; what lies outside of tensors cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.benchmarks.bench_model import BenchModel, thin_architecture
from lora_trainer.benchmarks.interleaved import Timings, Way, time_in_turn
from lora_trainer.benchmarks.measures import FIRST, Row, time_row
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.estimate import GIB, Parts, parts_of
from lora_trainer.memory_plan.trace import Counted
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory.block_swap import swapped_count
from lora_trainer.models.memory.checkpointing import checkpointed_blocks
from lora_trainer.optim.state_size import ROUNDING
from lora_trainer.run.plans.plan import architecture_of, make_demand
from lora_trainer.training.step import StepSettings, train_step

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.models.family import Architecture, Family
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.step import StepContext

LEARNING_RATE = 1e-4  # large enough that the losses follow the weights
INPUTS = 8  # different steps' inputs, taken in turn


@dataclass
class PeakMemory:
    """Bytes at the peak, weights included: live, and reserved by a GPU's allocator; None where they are not counted.

    `retries` is how often the allocator had to give memory back before it got some.
    """

    live: int | None = None
    reserved: int | None = None
    retries: int | None = None

    @property
    def gib(self) -> float | None:
        return None if self.live is None else self.live / GIB

    @property
    def reserved_gib(self) -> float | None:
        return None if self.reserved is None else self.reserved / GIB


@contextmanager
def measure_peak(context: StepContext, *, others: int = 0, own_optimizer: bool = True) -> Iterator[PeakMemory]:
    """The peak inside the block. On a GPU the bytes that `others` hold are not counted.

    On a CPU the model's own tensors count from the start, with its optimizer's state unless the block uses another
    one; compiled steps cannot be counted.
    """
    peak, device = PeakMemory(), context.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = count_retries(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.live = torch.cuda.max_memory_allocated(device) - others
        peak.reserved = torch.cuda.max_memory_reserved(device)
        peak.retries = count_retries(device) - before
        return
    if context.compiled is not None:
        yield peak
        return
    account = Counted()
    frozen, adapter = own_tensors(context)
    for tensor in (*frozen, *adapter, *(optimizer_state(context) if own_optimizer else ())):
        account.follow(tensor)
    with account:
        yield peak
    peak.live = account.most


def count_retries(device: torch.device) -> int:
    """How often the allocator had to give memory back since the process began."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def own_tensors(context: StepContext) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that exist before the first step: the frozen ones, and the adapter's."""
    adapter: list[Tensor] = [*context.adapter.copies.values(), *context.adapter.masters.values()]
    mine = {id(tensor) for tensor in adapter}
    frozen = [each for each in (*context.denoiser.parameters(), *context.denoiser.buffers()) if id(each) not in mine]
    return frozen, adapter


def optimizer_state(context: StepContext) -> list[Tensor]:
    """What the optimizer keeps by now."""
    return [each for kept in context.optimizer.state.values() for each in kept.values() if isinstance(each, Tensor)]


def count_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Of their storages on a device, each once and in the allocator's steps."""
    own = [tensor.untyped_storage() for tensor in tensors if tensor.device == device]
    sizes = {storage._cdata: storage.nbytes() for storage in own}
    return sum(-(-size // ROUNDING) * ROUNDING for size in sizes.values())


# ---- the trainer's step


def make_inputs(model: BenchModel, count: int = INPUTS) -> list[list[MicroBatch]]:
    """The micro-batches of some steps, made before anything is timed."""
    return [model.micros(number) for number in range(count)]


def find_largest(inputs: Sequence[list[MicroBatch]]) -> list[MicroBatch]:
    """The step with the largest micro-batch, which holds most."""
    return max(inputs, key=lambda micros: max(micro.latents.numel() for micro in micros))


def trainer_step(context: StepContext, inputs: Sequence[list[MicroBatch]], learning_rate: float = LEARNING_RATE) -> Way:
    """The trainer's step by its number, on the inputs in turn: the loss [], left on the device."""

    def step(number: int) -> Tensor:
        micros = inputs[number % len(inputs)]
        samples = sum(len(micro.latents) for micro in micros) * context.world
        return train_step(context, micros, samples, StepSettings(learning_rate)).loss

    return step


# ---- parts


@dataclass(frozen=True, kw_only=True)
class PeakParts:
    """Bytes that a step holds at its peak, cut as they can be measured.

    `adapter`: its copies and masters, which stay. `passing`: activations and gradients, which are freed.
    """

    weights: int
    adapter: int
    optimizer: int
    passing: int

    @property
    def live(self) -> int:
        """What the allocator holds at the peak."""
        return self.weights + self.adapter + self.optimizer + self.passing


def measure_parts(context: StepContext, micros: list[MicroBatch]) -> tuple[PeakParts, PeakMemory]:
    """The parts while a step is taken, after one that makes the optimizer's state."""
    device, way = context.device, trainer_step(context, [micros])
    frozen, adapter = own_tensors(context)
    way(0)
    free_memory(device)
    weights, own, state = (count_bytes(each, device) for each in (frozen, adapter, optimizer_state(context)))
    ready = 0  # on a GPU: inputs that lie ready, the workspaces of libraries
    if device.type == "cuda":
        ready = max(0, torch.cuda.memory_allocated(device) - weights - own - state)
    with measure_peak(context, others=ready) as peak:
        way(1)
    passing = (peak.live or 0) - weights - own - state
    return PeakParts(weights=weights, adapter=own, optimizer=state, passing=passing), peak


@dataclass(frozen=True, kw_only=True)
class PredictedParts(PeakParts):
    """What the plan says of them; `parts` is its own table."""

    parts: Parts


def find_architecture(resolved: Resolved, *, tiny: bool) -> tuple[Family, Architecture]:
    """The denoiser that is measured, as the plan knows it."""
    family, architecture = architecture_of(resolved.config, FAMILIES)
    return family, thin_architecture(architecture) if tiny else architecture


def predict_parts(model: BenchModel, micros: Sequence[MicroBatch]) -> PredictedParts:
    """The plan of the step that these micro-batches make."""
    largest = max(micros, key=lambda micro: math.prod(micro.latents.shape))
    demand = make_demand(model.resolved, model.family, model.architecture, None, precision=model.precision)
    height, width = largest.latents.shape[-2:]
    side = math.sqrt(height * width) * demand.downscale
    demand = replace(demand, resolution=round(side), samples=sum(len(micro.t) for micro in micros))
    if model.device.type != "cuda":
        demand = replace(demand, offloaded=False)  # nothing moves there
    denoiser = model.context.denoiser
    swapped = swapped_count(denoiser)
    parts = parts_of(demand, len(largest.t), checkpointed_blocks(denoiser), model.precision, swapped)

    numbers = sum(map(math.prod, demand.shapes))
    adapter = 4 * numbers  # the masters; in fp32 they are the layers' own
    if model.precision != "fp32":
        adapter += numbers * model.context.dtype.itemsize
    return PredictedParts(
        weights=round(parts.weights * GIB),
        adapter=adapter,
        optimizer=round(parts.optimizer * GIB),
        passing=round((parts.adapter + parts.activations) * GIB) - adapter,
        parts=parts,
    )


def time_with_peak(context: StepContext, way: Way, steps: int, warm_up: int) -> tuple[Timings, PeakMemory]:
    """One way, timed; on a GPU with its peak. On a CPU counting takes time, so that nothing is counted."""
    free_memory(context.device)
    if context.device.type == "cpu":
        return time_in_turn({"": way}, steps, context.device, warm_up=warm_up)[""], PeakMemory()
    with measure_peak(context) as peak:
        timings = time_in_turn({"": way}, steps, context.device, warm_up=warm_up)[""]
    return timings, peak


def measure_step(name: str, model: BenchModel, inputs: Sequence[list[MicroBatch]], steps: int, warm_up: int) -> Row:
    """The trainer's step, timed, with its losses, its peak and what the plan says of them."""
    context, largest = model.context, find_largest(inputs)
    predicted = predict_parts(model, largest)
    timings, peak = time_with_peak(context, trainer_step(context, inputs), steps, warm_up)
    if context.device.type == "cpu":
        one_more = trainer_step(context, [largest])
        with measure_peak(context) as peak:
            one_more(0)
    gib, tflop = predicted.live / GIB, predicted.parts.tflop
    row = time_row(name, model.name, timings.seconds)
    return replace(row, peak_gib=peak.gib).with_figures(
        samples_per_second=sum(len(micro.t) for micro in inputs[0]) / row["seconds_median"],
        tflop=tflop,
        tflops=tflop / row["seconds_median"],
        reserved_gib=peak.reserved_gib,
        predicted_gib=gib,
        error=None if peak.gib is None else peak.gib / gib - 1,
        fragmentation=measure_fragmentation(peak, predicted.weights),
        retries=peak.retries,
        warm_up_seconds=timings.warm_up_seconds,
        losses=[float(loss) for loss in timings.results[:FIRST]],
    )


def measure_fragmentation(peak: PeakMemory, weights: int) -> float | None:
    """What the allocator reserved beyond the live bytes, over those that are no weights, as the plan has it."""
    if peak.reserved is None or peak.live is None:
        return None
    return max(0.0, (peak.reserved - peak.live) / (peak.live - weights))


def measure_context_gib(device: torch.device) -> float | None:
    """GiB of the GPU that are taken and not torch's; other programs' are among it. None without a GPU that says it."""
    if device.type != "cuda":
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # some virtual GPUs do not say
        return None
    return max(0.0, (total - free - torch.cuda.memory_reserved(device)) / GIB)
