"""The profiler's trace as a small summary: operators by their own time, operations, and bytes moved. No torch.

An operator's own time is that without the operators that it calls. On a GPU it is the time of the kernels that it
launched. Operations come from the shapes of matmuls, convolutions and attention; bytes are estimated from the inputs.
"""

from __future__ import annotations

import ast
import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from lora_trainer.monitor.profile_files import BETWEEN_STEPS

MOST_ROWS, MOST_SHAPES = 30, 3
RANGE, CPU, KERNELS, COPIES = "user_annotation", "cpu_op", ("kernel", "gpu_memset"), ("gpu_memcpy",)
# The operators that do most arithmetic; all others move data, or only describe it.
COMPUTING = re.compile(r"(^|::|_)(mm|addmm|bmm|baddbmm|int_mm|scaled_mm)(_|$)|conv|attention|attn|gemm|cutlass")
DESCRIBING = frozenset(
    f"aten::{name}"
    for name in (
        "view reshape t transpose permute expand as_strided slice select unsqueeze squeeze detach alias unbind split "
        "split_with_sizes chunk narrow flatten unflatten _unsafe_view _reshape_alias view_as expand_as empty empty_like "
        "empty_strided resize_ result_type item _local_scalar_dense as_strided_ detach_ is_nonzero numpy_T "
        "linear matmul to _to_copy contiguous"  # which call what does the work, where there is any
    ).split()
)
SIZES = {
    "float": 4,
    "int": 4,
    "double": 8,
    "long int": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}  # bytes of a value, by the profiler's names
FUSED_ATTENTION = re.compile(r"aten::_scaled_dot_product_(flash|efficient|cudnn|fused|flash_attention_for_cpu)")


@dataclass(slots=True)
class TraceEvent:
    """An operator, a named range, or a GPU's kernel or copy; times in microseconds. A kernel has its operator's number."""

    name: str
    category: str
    thread: Any
    start: float
    length: float
    number: int | None
    inputs: Mapping[str, Any]
    own: float = 0.0
    parent: TraceEvent | None = None
    is_between: bool = False  # inside a validation, a checkpoint or sample images
    is_counted: bool = False  # its operations are, or those of an operator that it is part of
    is_leaf: bool = True  # no operator inside it moves data
    operations: float = 0.0


@dataclass
class OperatorTime:
    """All calls of an operator. Microseconds are its own, also by the shapes of its inputs."""

    kind: str  # `compute`, `memory` or `overhead`
    calls: int = 0
    own: float = 0.0
    operations: float = 0.0
    bytes: float = 0.0
    shapes: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def _event(values: dict[str, Any]) -> Any:
    """An object of the file: events become small at once, so that a large trace fits into memory."""
    if "ph" not in values:
        return values
    category, inputs = values.get("cat"), values.get("args") or {}
    if values["ph"] != "X" or category not in (RANGE, CPU, *KERNELS, *COPIES):
        return None
    number = inputs.get("External id")
    kept = {key: inputs[key] for key in ("Input Dims", "Input type", "Concrete Inputs") if key in inputs}
    return TraceEvent(values["name"], category, values["tid"], values["ts"], values["dur"], number, kept)


def summarize(trace: Path) -> dict[str, Any]:
    """The summary of the steps in a trace, each number for one of them; empty where it has no step.

    Raises OSError, EOFError, zlib.error, ValueError, KeyError or TypeError where the file is damaged.
    """
    with gzip.open(trace, "rt", encoding="utf-8", errors="replace") as file:
        document = json.load(file, object_hook=_event)
    events = [event for event in document["traceEvents"] if isinstance(event, TraceEvent)]
    on_device = [event for event in events if event.category in (*KERNELS, *COPIES)]
    on_cpu = [event for event in events if event.category in (RANGE, CPU)]
    _nest(on_cpu)
    on_cpu = [event for event in on_cpu if not event.is_between]
    recorded = [event for event in on_cpu if event.name.startswith("ProfilerStep")]
    if not recorded:
        return {}
    per_step = 1e-6 / len(recorded)
    launched, times = _launched(on_cpu, on_device)
    rows: dict[str, OperatorTime] = {}
    for event in on_cpu:
        if event.category == CPU:
            row = rows.setdefault(event.name, OperatorTime(_kind(event.name)))
            own = times.get(event.number, 0.0) if on_device else event.own
            if event.parent is None or event.parent.name != event.name:  # some call themselves once
                row.calls += 1
            row.own, row.operations = row.own + own, row.operations + event.operations
            shapes = [shape for shape in event.inputs.get("Input Dims", ()) if _is_shape(shape)]
            row.shapes[", ".join("x".join(map(str, shape)) for shape in shapes)] += own
            if row.kind == "memory" and event.is_leaf:
                row.bytes += _bytes(event)
    kinds = defaultdict[str, float](float)
    for row in rows.values():
        kinds[row.kind] += row.own * per_step
    kernels = sorted((event for event in launched if event.category in KERNELS), key=attrgetter("start"))
    covered, end = 0.0, -math.inf  # kernels of several streams run beside each other
    for kernel in kernels:
        covered += max(0.0, kernel.start + kernel.length - max(end, kernel.start))
        end = max(end, kernel.start + kernel.length)
    if on_device:  # what no matmul, convolution or attention launched: compiled kernels too
        kinds["memory"] = max(0.0, sum(event.length for event in kernels) * per_step - kinds["compute"])
    ranges = [event for event in on_cpu if event.category == RANGE]
    waiting = sum(event.own for event in ranges if event.name == "data")
    outside = (sum(event.own for event in ranges) - waiting) * per_step
    if not on_device:  # on a CPU the operators' own overhead is part of the step
        outside += kinds["overhead"]
    return {
        "recorded": len(recorded),
        "seconds": sum(event.length for event in recorded) * per_step,
        "compute_seconds": kinds["compute"],
        "memory_seconds": kinds["memory"],
        "outside_seconds": outside,
        "waiting_seconds": waiting * per_step,
        "kernel_seconds": covered * per_step if on_device else None,
        "copy_seconds": sum(event.length for event in launched if event.category in COPIES) * per_step,
        "kernels": len(kernels) / len(recorded) if on_device else None,
        "calls": sum(row.calls for row in rows.values() if row.kind != "overhead") / len(recorded),
        "flop": sum(row.operations for row in rows.values()) / len(recorded),
        "bytes": sum(row.bytes for row in rows.values()) / len(recorded),
        "operators": _largest(rows, len(recorded)),
    }


def _nest(events: Sequence[TraceEvent]) -> None:
    """Set what follows from an event's place inside of others: its own time, operations, and flags."""
    threads = defaultdict[Any, list[TraceEvent]](list)
    for event in events:
        threads[event.thread].append(event)
    for of_thread in threads.values():
        stack: list[TraceEvent] = []
        for event in sorted(of_thread, key=lambda each: (each.start, -each.length)):
            middle = event.start + event.length / 2  # ends are rounded
            while stack and stack[-1].start + stack[-1].length <= middle:
                stack.pop()
            event.own, event.is_between = event.length, event.name in BETWEEN_STEPS
            if stack:
                event.parent = stack[-1]
                event.parent.own -= event.length
                event.is_between |= event.parent.is_between
                event.is_counted = event.parent.is_counted
                event.parent.is_leaf &= _kind(event.name) == "overhead"
            _count(event)
            stack.append(event)


def _count(event: TraceEvent) -> None:
    """Give an operator its operations; those of a convolution move to the operator below that does the work."""
    parent = event.parent
    if parent is not None and parent.operations and "conv" in parent.name and "conv" in event.name:
        event.operations, parent.operations = parent.operations, 0.0
    elif not event.is_counted and event.category == CPU:
        values = list[Any]()
        for written in event.inputs.get("Concrete Inputs", ()) if "conv" in event.name else ():
            values.append(None)
            with suppress(ValueError, SyntaxError):  # `[1, 1]`, `False`; empty for a tensor
                values[-1] = ast.literal_eval(written)
        event.operations = operations_of(event.name, event.inputs.get("Input Dims", ()), values)
        event.is_counted = event.operations > 0


def _launched(
    on_cpu: Iterable[TraceEvent], on_device: Iterable[TraceEvent]
) -> tuple[list[TraceEvent], dict[int | None, float]]:
    """What the GPU did in the steps, and the time of each operator's kernels by the operator's number."""
    own = {event.number for event in on_cpu if event.number is not None}
    times = defaultdict[int | None, float](float)
    launched = [event for event in on_device if event.number is None or event.number in own]
    for event in launched:
        times[event.number] += event.length
    return launched, times


def _largest(rows: Mapping[str, OperatorTime], steps: int) -> list[dict[str, Any]]:
    """The operators with the most time of their own, each with the shapes that take most of it."""
    ordered = sorted(rows.items(), key=lambda entry: -entry[1].own)
    return [
        {
            "name": name,
            "kind": row.kind,
            "calls": round(row.calls / steps, 2),
            "seconds": round(1e-6 * row.own / steps, 9),
            "flop": round(row.operations / steps),
            "bytes": round(row.bytes / steps),
            "shapes": {
                shapes: round(1e-6 * own / steps, 9)
                for shapes, own in sorted(row.shapes.items(), key=lambda entry: -entry[1])[:MOST_SHAPES]
            },
        }
        for name, row in ordered[:MOST_ROWS]
    ]


def _kind(name: str) -> str:
    """`compute`, `memory`, or `overhead` for what only describes data or calls others."""
    is_computing, moves_data = COMPUTING.search(name), name.startswith("aten::") and name not in DESCRIBING
    if is_computing and (moves_data or "Backward" not in name):
        return "compute"
    return "memory" if moves_data else "overhead"


def operations_of(name: str, shapes: Sequence[tuple[int, ...]], values: Sequence[Any]) -> float:
    """Operations (a multiplication and an addition are two) of a call with inputs of these shapes; 0 for another kind.

    `values` are the inputs that are no tensors, at their positions. An attention's backward pass computes its scores
    again: five matmuls for the two of the forward pass.
    """
    matmul = name.removeprefix("aten::").strip("_")
    if matmul in ("addmm", "baddbmm"):
        matmul, shapes = matmul.removeprefix("add").removeprefix("badd"), shapes[1:]
    if matmul in ("mm", "bmm", "int_mm", "scaled_mm") and len(shapes) > 1 and shapes[0] and shapes[1]:
        return 2.0 * math.prod(shapes[0]) * shapes[1][-1]
    if name == "aten::convolution" and len(values) > 6:
        inputs, weight = shapes[:2]
        spots = inputs[2:] if values[6] else _convolved(inputs[2:], weight[2:], values[3:6])
        return 2.0 * math.prod(weight) * inputs[0] * math.prod(spots)
    if name == "aten::convolution_backward" and len(values) > 10:
        gradient, inputs, weight = shapes[:3]
        spots = inputs[2:] if values[7] else gradient[2:]
        of_input, of_weight, _ = values[10]
        passes = len([wanted for wanted in (of_input, of_weight) if wanted])
        return 2.0 * math.prod(weight) * gradient[0] * math.prod(spots) * passes
    if FUSED_ATTENTION.match(name):
        backward = name.endswith("_backward")
        query, key, value = shapes[1:4] if backward else shapes[:3]
        forward = 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        return 2.5 * forward if backward else forward
    return 0.0


def _convolved(sides: Sequence[int], kernel: Sequence[int], values: Sequence[Any]) -> list[int]:
    """The sides of a convolution's output; `values` are stride, padding and dilation."""
    stride, padding, dilation = ([int(each) for each in value] for value in values)
    return [
        (side + 2 * padding[axis % len(padding)] - dilation[axis % len(dilation)] * (kernel[axis] - 1) - 1)
        // stride[axis % len(stride)]
        + 1
        for axis, side in enumerate(sides)
    ]


def _bytes(event: TraceEvent) -> float:
    """Bytes read and written, as an estimate: the inputs, and the largest of them for the result."""
    shapes, kinds = event.inputs.get("Input Dims", ()), event.inputs.get("Input type", ())
    sizes = [
        math.prod(shape) * SIZES.get(kind, 0) for shape, kind in zip(shapes, kinds, strict=False) if _is_shape(shape)
    ]
    return float(sum(sizes) + max(sizes, default=0))


def _is_shape(value: Any) -> bool:
    """Whether it is the shape of a tensor; a list of tensors has a list of shapes."""
    return bool(value) and all(isinstance(side, int) for side in value)
