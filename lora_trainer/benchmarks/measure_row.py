"""One row of `bench table`: its settings, and how it is measured, in a process of its own or in this one."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_trainer.benchmarks.bench_model import TINY, BenchModel, build_bench_model, refuse_uncompiled
from lora_trainer.benchmarks.measures import Row, by_section, time_row
from lora_trainer.benchmarks.peak_memory import (
    make_inputs,
    measure_context_gib,
    measure_step,
    predict_parts,
    time_with_peak,
)
from lora_trainer.benchmarks.reference_step import REFERENCE, add_reference_adapter, reference_step, use_adapter
from lora_trainer.config.layers import Layer, Resolved
from lora_trainer.config.schema import Config, MemorySection
from lora_trainer.core.errors import UserError, first_line, is_out_of_memory
from lora_trainer.core.io import write_json
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.memory_plan.estimate import GIB, usable_gib
from lora_trainer.models.memory.checkpointing import checkpointed_blocks
from lora_trainer.run.choices import OUTSIDE_GIB, cap_memory
from lora_trainer.run.settings import settle

if TYPE_CHECKING:
    from lora_trainer.benchmarks.table_rows import Spec
    from lora_trainer.training.micro_batch import MicroBatch

SIDES = ((64, 64), (56, 72), (72, 56), (48, 80), (80, 48), (40, 96), (96, 40), (52, 76))  # of 64: about one area each
CAP_GIB = 1  # that a process is held to, to see whether a cap works


@dataclass(frozen=True)
class RowSettings:
    """How all rows are measured. `tiny`: thin models and small images, for machines without a GPU."""

    warm_up: int = 10
    steps: int = 30
    tiny: bool = False


def measure_and_write(spec: Spec, how: RowSettings, path: str) -> None:
    """Measure a row and write it, with its error where it fails: the work of a process of its own."""
    quieten_libraries()
    try:
        row = measure_row(spec, how)
    except UserError as error:
        failed = " ".join(f"{problem.message} {problem.fix}" for problem in error.problems)
        row = Row(spec.name, spec.family, figures={"failed": failed})
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the row says
        kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
        row = Row(spec.name, spec.family, figures={"failed": f"{kind}: {first_line(error)}"})
    write_json(Path(path), row.to_json())


def measure_row(spec: Spec, how: RowSettings) -> Row:
    """Build, warm up, time. Raises UserError, and whatever the libraries do where memory runs out."""
    resolved = settings_of(spec, how, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        model = build_bench_model(resolved, Path(folder), tiny=how.tiny, shapes=spec.shapes)
        refuse_uncompiled(model)
        inputs = make_inputs(model)
    if spec.shapes > 1:
        inputs = [[reshape(micro, number % spec.shapes) for micro in micros] for number, micros in enumerate(inputs)]
    graphs = count_compilations()
    if spec.way == "example":
        row = measure_example(spec.name, model, inputs, how)
    else:
        row = measure_step(spec.name, model, inputs, how.steps, how.warm_up)
    return row.with_figures(
        limit_gib=None if spec.cap_gib is None else usable_gib(spec.cap_gib),
        context_gib=measure_context_gib(model.device),
        precision=model.precision,
        checkpointed=checkpointed_blocks(model.context.denoiser),
        micro=max(len(micro.t) for micro in inputs[0]),
        compilations=count_compilations() - graphs or None,
    )


def measure_example(name: str, model: BenchModel, inputs: list[list[MicroBatch]], how: RowSettings) -> Row:
    """The step as diffusers' example does it: autocast, LoRA in fp32, cached inputs."""
    parameters = add_reference_adapter(model.context.denoiser)
    use_adapter(model.context.denoiser, REFERENCE)
    way = reference_step(model, parameters, inputs, None)
    timings, peak = time_with_peak(model.context, way, how.steps, how.warm_up)
    row, tflop = time_row(name, model.name, timings.seconds), predict_parts(model, inputs[0]).parts.tflop
    figures = {"reserved_gib": peak.reserved_gib, "tflop": tflop, "tflops": tflop / row["seconds_median"]}
    return replace(row, peak_gib=peak.gib, figures=figures)


def reshape(micro: MicroBatch, number: int) -> MicroBatch:
    """The same samples with latents of another form and about as many places."""
    height, width = (side * micro.latents.shape[-1] // 64 // 8 * 8 for side in SIDES[number % len(SIDES)])
    shape = (*micro.latents.shape[:2], max(8, height), max(8, width))
    draw, device = torch.Generator().manual_seed(number), micro.latents.device
    latents, noise = (torch.randn(shape, generator=draw).to(device) for _ in range(2))
    return replace(micro, latents=latents, noise=noise, added=noise, copied=None)


def count_compilations() -> int:
    """Graphs that torch.compile made in this process until now."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


# ---- settings


def settings_of(spec: Spec, how: RowSettings, device: torch.device) -> Resolved:
    """The row's settings. Without a GPU nothing is capped, and images of thin models are small."""
    values: dict[str, Any] = {"model.family": spec.family, **spec.settings}
    if device.type == "cuda":
        if spec.cap_gib is not None:
            values["memory.limit_gib"] = spec.cap_gib
        return settle_settings(values)
    if values.get("memory.weight_dtype", "bf16") == "bf16":
        values["memory.weight_dtype"] = "fp32"  # at such sizes a CPU is slower with less
    if how.tiny:
        values["data.resolution"] //= TINY
    return settle_settings(values)


def settle_settings(values: Mapping[str, Any]) -> Resolved:
    return settle([], [Layer("bench table", by_section(values))], builtin_if_none=False)


def prove_cap(path: str) -> None:
    """Hold this process to 1 GiB, as a run with a limit is, and take two; write whether that was refused."""
    holds, failed = False, None
    try:
        cap_memory(Config(memory=MemorySection(limit_gib=CAP_GIB + OUTSIDE_GIB)), torch.device("cuda", 0))
        torch.empty(2 * CAP_GIB * GIB, dtype=torch.uint8, device="cuda")
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the row says
        holds = is_out_of_memory(error)
        failed = None if holds else first_line(error)
    write_json(Path(path), {"holds": holds, "failed": failed})
