"""The diagnosis of stated numbers and of a stated trace: which bound, in which order, and which advice."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.monitor.idle import IdleSetup, causes_of
from lora_trainer.report.bottleneck import Advice, OperatorFacts, TimeFacts, advise, find_bounds
from lora_trainer.report.operators import operations_of, summarize

# A GPU of 100 TFLOP/s and 1000 GB/s in steps of 1 s, nearly all of it large matmuls.
BUSY = OperatorFacts(
    seconds=1.0,
    compute=0.85,
    memory=0.1,
    outside=0.4,
    waiting=0.0,
    calls=2000,
    flop=50e12,
    bytes=60e9,
    matmul_tflops=100.0,
    copy_gb_per_second=1000.0,
    kernels=0.95,
    launched=2000,
)
LAUNCHING = replace(BUSY, kernels=0.4, compute=0.3)
GPU = TimeFacts(1.0, 0.0, operators=BUSY, on_gpu=True, steps=1000)
CPU = replace(GPU, on_gpu=False, operators=replace(BUSY, kernels=None, launched=None, outside=0.05))
SWAPPED = replace(GPU, setup=IdleSetup(swapped=12))


def names(facts: TimeFacts) -> list[str]:
    return [bound.name for bound in find_bounds(facts)]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (GPU, ["compute-bound"]),
        (CPU, ["compute-bound"]),
        (replace(GPU, operators=replace(BUSY, compute=0.3, memory=0.6)), ["memory-bound"]),
        (replace(GPU, operators=LAUNCHING), ["launch-bound", "compute-bound"]),
        (replace(GPU, operators=replace(BUSY, kernels=0.8)), ["compute-bound", "launch-bound"]),
        (replace(SWAPPED, operators=replace(LAUNCHING, copies=0.5)), ["copy-bound", "compute-bound"]),
        (replace(SWAPPED, operators=replace(LAUNCHING, copies=0.1)), ["launch-bound", "compute-bound"]),
        (replace(GPU, operators=replace(BUSY, flop=1e12, bytes=1e9)), ["small operators"]),
        (replace(CPU, operators=replace(BUSY, kernels=None, outside=0.6)), ["overhead-bound", "compute-bound"]),
        (replace(GPU, waiting=0.6), ["data-bound", "compute-bound"]),
        (replace(GPU, waiting=0.04), ["compute-bound", "data-bound"]),  # 1 % is allowed with cached latents,
        (replace(GPU, waiting=0.04, setup=IdleSetup(cached=False)), ["compute-bound"]),  # 5 % without
        (replace(GPU, waiting=0.009, prepare_seconds=0.9), ["compute-bound"]),  # the CPU prepares it meanwhile
        (
            replace(GPU, between={"validation": 0.5, "checkpoint": 0.06}),
            ["validation-bound", "compute-bound", "checkpoint-bound"],
        ),
        (replace(GPU, between={"validation": 0.09, "checkpoint": 0.04, "samples": 0.09}), ["compute-bound"]),
        (replace(GPU, phases={"optimizer": 0.3, "ema": 0.1}), ["compute-bound", "optimizer-bound"]),
        (replace(GPU, first=0.2), ["compute-bound", "one-off costs"]),
        (replace(GPU, operators=None), []),
    ],
)
def test_bounds(facts: TimeFacts, expected: list[str]) -> None:
    assert names(facts) == expected


def test_on_a_cpu_the_thread_that_prepares_data_computes_on_the_same_cores() -> None:
    assert set(names(replace(CPU, waiting=0.009, prepare_seconds=0.9))) == {"data-bound", "compute-bound"}


def settings(facts: TimeFacts) -> list[tuple[str, str]]:
    return [(each.command, each.setting) for each in advise(facts, find_bounds(facts))]


def test_advice_is_given_where_its_condition_holds() -> None:
    starved = replace(GPU, waiting=0.6, operators=None)
    assert settings(replace(starved, setup=IdleSetup(cached=False))) == [("train", "cache.latents=true")]
    assert settings(starved) == [("bench loader", "")]

    launching = replace(GPU, operators=LAUNCHING)
    assert settings(launching)[0] == ("bench step", "compile.enabled=true")
    split = IdleSetup(compiled=True, micro=1, samples=4)
    assert settings(replace(launching, setup=split)) == [("bench step", "train.max_micro_batch_size=4")]
    fits = replace(split, largest_micro=2)
    assert settings(replace(launching, setup=fits)) == [("bench step", "train.max_micro_batch_size=2")]
    whole = replace(split, micro=4)
    assert settings(replace(launching, setup=whole)) == [("bench step", "train.effective_batch_size=8")]

    computing = replace(GPU, setup=IdleSetup(compiled=True, weight_dtype="fp32"))
    assert settings(computing) == [("bench step", "memory.weight_dtype=bf16")]
    assert settings(replace(CPU, threads=2, cpus=4)) == [("bench step", "hardware.threads=4")]
    assert settings(replace(CPU, threads=4, cpus=4)) == []

    often = replace(GPU, operators=None, between={"validation": 0.5}, settings={"validation.every_n_steps": 100})
    assert settings(often) == [("train", "validation.every_n_steps=300")]
    assert settings(replace(often, steps=100)) == []  # only at the end


@pytest.mark.parametrize("setup", [IdleSetup(), IdleSetup(compiled=True, micro=1, samples=4, largest_micro=2)])
def test_a_profile_and_an_idle_gpu_have_the_same_advice(setup: IdleSetup) -> None:
    (seen,) = causes_of({"gpu_utilization": 0.4, "main_thread": 0.97}, setup)
    (advice, *_) = advise(
        replace(GPU, operators=LAUNCHING, setup=setup), find_bounds(replace(GPU, operators=LAUNCHING))
    )
    assert advice == Advice(seen.to_do, "bench step", seen.setting)


def test_every_sentence_has_its_numbers() -> None:
    (data, computing) = find_bounds(replace(GPU, waiting=0.6, prepare_seconds=1.5))
    assert data.why == "a step waits 600 ms of 1 s for its data; preparing it takes 1.5 s in a thread of its own"
    assert data.share == pytest.approx(0.6)
    assert computing.why == (
        "matmuls, convolutions and attention take 89 % of the operators' time, at 58.8 TFLOP/s, 59 % of the 100 that a "
        "large matmul reaches here"
    )


def event(name: str, category: str, start: float, length: float, number: int, thread: int = 1, **inputs: Any) -> Any:
    values = {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": length}
    return {**values, "args": {"External id": number, **inputs}}


MATMUL: dict[str, Any] = {"Input Dims": [[4, 8], [8, 16]], "Input type": ["float", "float"]}
SUM: dict[str, Any] = {"Input Dims": [[4, 16], [4, 16], []], "Input type": ["float", "float", "Scalar"]}
TRACE = [
    event("ProfilerStep#1", "user_annotation", 0, 100, 1),
    event("data", "user_annotation", 0, 10, 2),
    event("forward", "user_annotation", 10, 50, 3),
    event("aten::linear", "cpu_op", 12, 30, 4),
    event("aten::mm", "cpu_op", 15, 20, 5, **MATMUL),
    event("aten::add", "cpu_op", 45, 10, 6, **SUM),
    event("aten::mm", "cpu_op", 62, 8, 7, thread=2, **MATMUL),  # the backward pass has its own thread
    event("ProfilerStep#2", "user_annotation", 100, 100, 8),
    event("validation", "user_annotation", 150, 40, 9),
    event("aten::mm", "cpu_op", 155, 30, 10, **MATMUL),
    {"ph": "f", "id": 1, "tid": 1, "ts": 62, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"},
]
KERNELS = [
    event("sgemm", "kernel", 40, 30, 5, thread=7),
    event("add", "kernel", 60, 20, 6, thread=8),  # 10 of them beside the one before
    event("Memcpy HtoD", "gpu_memcpy", 90, 10, 6, thread=9),
    event("sgemm", "kernel", 180, 30, 10, thread=7),  # of the validation
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.json.gz"


def test_a_trace_of_a_cpu_is_summed_up(trace: Path) -> None:
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
    found = summarize(trace)
    micro = {name: round(value * 2e6) for name, value in found.items() if name.endswith("_seconds") and value}
    # Outside: 100 of the steps' own, 10 of `forward`, 10 of `linear`.
    assert micro == {"compute_seconds": 28, "memory_seconds": 10, "outside_seconds": 120, "waiting_seconds": 10}
    assert found["flop"] == 2 * 4 * 8 * 16
    assert found["bytes"] == 3 * 4 * 16 * 4 / 2
    assert (found["recorded"], found["calls"], found["kernels"]) == (2, 1.5, None)
    assert {row["name"] for row in found["operators"]} == {"aten::mm", "aten::add", "aten::linear"}


def test_a_trace_of_a_gpu_has_the_time_of_its_kernels(trace: Path) -> None:
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [*TRACE, *KERNELS]}).encode()))
    found = summarize(trace)
    micro = {name: round(found[f"{name}_seconds"] * 2e6) for name in ("compute", "memory", "kernel", "copy")}
    assert micro == {"compute": 30, "memory": 20, "kernel": 40, "copy": 10}
    assert found["kernels"] == 1


def test_operations_of_shapes() -> None:
    assert operations_of("aten::mm", [(4, 8), (8, 16)], []) == 2 * 4 * 8 * 16
    assert operations_of("aten::addmm", [(16,), (4, 8), (8, 16)], []) == 2 * 4 * 8 * 16
    assert operations_of("aten::bmm", [(2, 4, 8), (2, 8, 16)], []) == 2 * 2 * 4 * 8 * 16
    shapes = [(2, 4, 32, 32), (8, 4, 3, 3), (8,)]
    values = [None, None, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1]
    forward = 2 * 2 * 8 * 4 * 9 * 16 * 16
    assert operations_of("aten::convolution", shapes, values) == forward
    backward = [(2, 8, 16, 16), *shapes[:2]]
    masks = [None, None, None, [8], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]]
    assert operations_of("aten::convolution_backward", backward, masks) == forward
    heads = [(2, 4, 16, 8)] * 3
    attention = 2 * 2 * 4 * 16 * 16 * (8 + 8)
    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert operations_of(fused, heads, []) == attention
    assert operations_of(f"{fused}_backward", [heads[0], *heads], []) == 2.5 * attention
    assert operations_of("aten::add", [(4, 8), (4, 8)], []) == 0
