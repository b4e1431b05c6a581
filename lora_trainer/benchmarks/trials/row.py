"""One row of the table, in a process of its own: what is lost where it crashes or runs out of memory is that row."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.benchmarks.subject import TINY, BenchSubject, subject_as_asked
from lora_trainer.benchmarks.trials.expected import Expected, expected_of, model_of
from lora_trainer.benchmarks.trials.memory import context_gib, fragmentation_of, on_cpu
from lora_trainer.benchmarks.trials.specs import Spec, TableRow
from lora_trainer.benchmarks.trials.steps import Steps, inputs_of, own_way, take_steps
from lora_trainer.benchmarks.usual import USUAL, add_usual_adapter, use_adapter, usual_step
from lora_trainer.config.layers import Layer, Resolved
from lora_trainer.core.errors import UserError, first_line, is_out_of_memory
from lora_trainer.core.io import write_json
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.memory_plan.estimate import GIB, choose_fit, refuse_what_does_not_fit, usable_gib
from lora_trainer.models.memory.block_swap import swappable_blocks
from lora_trainer.models.memory.checkpointing import checkpointable_blocks, checkpointed_blocks
from lora_trainer.run.plans.plan import make_demand
from lora_trainer.run.settings import settle

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch

SIDES = ((64, 64), (56, 72), (72, 56), (48, 80), (80, 48), (40, 96), (96, 40), (52, 76))  # of 64: about one area each


@dataclass(frozen=True)
class Asking:
    """How all rows are measured. `tiny`: thin models and small images, for machines without a GPU."""

    warm_up: int = 10
    steps: int = 30
    tiny: bool = False


def settings_of(spec: Spec, asking: Asking, gpu: torch.device) -> Resolved:
    """The row's settings. Without a GPU, what the planner would choose for the full model on a GPU of that size."""
    values: dict[str, Any] = {"model.family": spec.family, **spec.settings}
    if spec.cap_gib is not None:
        values["memory.limit_gib"] = spec.cap_gib
    resolved = laid(values)
    if gpu.type == "cuda":
        return resolved
    if spec.cap_gib is not None:
        values |= planned_settings(resolved, spec.cap_gib, tiny=asking.tiny)
        del values["memory.limit_gib"]
    if values.get("memory.weight_dtype", "bf16") == "bf16":
        values["memory.weight_dtype"] = "fp32"  # at such sizes a CPU is slower with less
    if asking.tiny:
        values["data.resolution"] = values["data.resolution"] // TINY
    return laid(values)


def laid(values: Mapping[str, Any]) -> Resolved:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return settle([], [Layer("bench table", sections)], builtin_if_none=False)


def planned_settings(resolved: Resolved, cap_gib: float, *, tiny: bool) -> dict[str, Any]:
    """The planner's choice for the published model under a limit, as settings: of a thin one, the same share of blocks.

    Raises UsageError where nothing fits.
    """
    demand = make_demand(resolved, *model_of(resolved, tiny=False), cap_gib)
    fit = choose_fit(demand)
    refuse_what_does_not_fit(demand, fit)
    checkpointed, swapped = fit.checkpointed or 0, fit.swapped or 0
    if tiny:
        family, thin = model_of(resolved, tiny=True)
        with torch.device("meta"):
            denoiser = family.denoiser.make(thin.denoiser)
        checkpointed = share_of(checkpointed, demand.memory_model.blocks, len(checkpointable_blocks(denoiser)))
        swapped = share_of(swapped, demand.memory_model.swappable, len(swappable_blocks(denoiser)))
    return {
        "memory.weight_dtype": fit.precision,
        "memory.gradient_checkpointing": checkpointed,
        "memory.blocks_to_swap": swapped,
        "train.max_micro_batch_size": fit.micro,
    }


def share_of(count: int, whole: int, own: int) -> int:
    """As many of `own` blocks as `count` is of the whole model's; none only of none."""
    return -(-count * own // whole) if count else 0


def measured_row(spec: Spec, asking: Asking) -> TableRow:
    """Build, warm up, time. Raises UserError, and whatever the libraries do where memory runs out."""
    gpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = settings_of(spec, asking, gpu)
    with tempfile.TemporaryDirectory() as folder:
        subject = subject_as_asked(resolved, Path(folder), tiny=asking.tiny, shapes=spec.shapes)
    context = subject.context
    inputs = inputs_of(subject)
    if spec.shapes > 1:
        inputs = [[shaped(micro, number % spec.shapes) for micro in micros] for number, micros in enumerate(inputs)]
    expected = None if asking.tiny else expected_of(resolved, subject, inputs[0])
    before = compilations()
    steps = take_steps(way_of(spec, subject, inputs), context.device, asking.warm_up, asking.steps)
    made = compilations() - before
    if context.device.type == "cpu" and spec.way == "ours":
        _, held = on_cpu(context, inputs[0])
        steps = replace(steps, held=held)
    return row_from(spec, subject, inputs, steps, expected, made)


def way_of(spec: Spec, subject: BenchSubject, inputs: list[list[MicroBatch]]) -> Callable[[int], Tensor]:
    """The trainer's own step, or the step as diffusers' example does it: autocast, LoRA in fp32, cached inputs."""
    if spec.way == "ours":
        return own_way(subject.context, inputs)
    parameters = add_usual_adapter(subject.context.denoiser)
    use_adapter(subject.context.denoiser, USUAL)
    usual, nothing = usual_step(subject, parameters, inputs, None), torch.zeros(())

    def step(number: int) -> Tensor:
        usual(number % len(inputs))
        return nothing

    return step


def shaped(micro: MicroBatch, number: int) -> MicroBatch:
    """The same samples with latents of another form and about as many places."""
    height, width = (side * micro.latents.shape[-1] // 64 // 8 * 8 for side in SIDES[number % len(SIDES)])
    shape = (*micro.latents.shape[:2], max(8, height), max(8, width))
    draw, device = torch.Generator().manual_seed(number), micro.latents.device
    latents, noise = (torch.randn(shape, generator=draw).to(device) for _ in range(2))
    return replace(micro, latents=latents, noise=noise, added=noise, copied=None)


def compilations() -> int:
    """Graphs that torch.compile made in this process until now."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def row_from(
    spec: Spec,
    subject: BenchSubject,
    inputs: list[list[MicroBatch]],
    steps: Steps,
    expected: Expected | None,
    compiled: int,
) -> TableRow:
    low, high = steps.tenths
    held, samples = steps.held, sum(len(micro.t) for micro in inputs[0])
    predicted = None if expected is None or spec.way != "ours" else expected.live / GIB
    error = held.gib / predicted - 1 if held.gib is not None and predicted else None
    fragmentation = None
    if expected is not None and held.allocated is not None and held.reserved is not None:
        fragmentation = fragmentation_of(held.reserved, held.allocated, expected.weights)
    return TableRow(
        name=spec.name,
        model=subject.name,
        seconds_median=steps.median,
        seconds_p10=low,
        seconds_p90=high,
        samples_per_second=samples / steps.median,
        tflop=None if expected is None else expected.parts.tflop,
        peak_gib=held.gib,
        reserved_gib=None if held.reserved is None else held.reserved / GIB,
        predicted_gib=predicted,
        limit_gib=None if spec.cap_gib is None else usable_gib(spec.cap_gib),
        error=error,
        fragmentation=fragmentation,
        context_gib=context_gib(subject.context.device),
        retries=None if held.allocated is None else held.retries,
        precision=subject.precision,
        checkpointed=checkpointed_blocks(subject.context.denoiser),
        micro=max(len(micro.t) for micro in inputs[0]),
        warm_up_seconds=steps.warming,
        compilations=compiled or None,
        losses=steps.losses if spec.way == "ours" else (),
    )


def child(spec: Spec, asking: Asking, path: str) -> None:
    """Measure a row and write it, with its error where it fails."""
    quieten_libraries()
    try:
        row = measured_row(spec, asking)
    except UserError as error:
        row = TableRow(spec.name, spec.family, failed=" ".join(f"{p.message} {p.fix}" for p in error.problems))
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the row says
        word = "out of memory: " if is_out_of_memory(error) else f"{type(error).__name__}: "
        row = TableRow(spec.name, spec.family, failed=word + first_line(error))
    write_json(Path(path), asdict(row))
