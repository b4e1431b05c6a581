"""What holds a run back, decided from the numbers of its profile, and what to try. Pure functions; no torch.

Every sentence is based on a number of the run. What an idle GPU shows from outside (`monitor/idle.py`) has the same
limits and the same advice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lora_trainer.monitor.idle import BUSY, CauseName, IdleSetup, fix_of
from lora_trainer.monitor.slowness import LEAST_WAIT, waiting_limit

BESIDE = 0.25  # of a step's time: on a CPU, the time of the thread that prepares data, which computes on the same cores
OUTSIDE = 0.3  # of a step's time, on a CPU: Python's and PyTorch's own between the operators
TOO_SMALL = 0.1  # of the operators' time, below which what they do takes next to nothing
BETWEEN = {"validation": 0.1, "checkpoint": 0.05, "samples": 0.1}  # of the training's time
DOING = {"validation": "validating", "checkpoint": "saving checkpoints", "samples": "generating images"}
UPDATING, SUMMING, FIRST = 0.25, 0.15, 0.1
PARTS_OF_UPDATE = ("clip", "optimizer", "ema")


@dataclass(frozen=True)
class OperatorFacts:
    """What the profiler recorded of a step, in seconds, and the device's measured rates; None where not known.

    `compute` is the time of matmuls, convolutions and attention, `memory` that of operators that move data more than
    they compute. `outside` is Python's and PyTorch's own time on the CPU, which on a CPU is part of the step.
    `kernels` is the time in which a GPU computed, `launched` how many kernels, `copies` the time of copies from and to it.
    """

    seconds: float
    compute: float
    memory: float
    outside: float
    waiting: float
    calls: float
    flop: float
    bytes: float
    matmul_tflops: float | None = None
    copy_gb_per_second: float | None = None
    kernels: float | None = None
    launched: float | None = None
    copies: float = 0.0

    @property
    def active(self) -> float:
        return max(self.seconds - self.waiting, 1e-9)

    @property
    def idle(self) -> float:
        """The share of a step in which nothing computes, besides the wait for data."""
        if self.kernels is None:
            return min(1.0, self.outside / self.active)
        return max(0.0, 1.0 - self.kernels / self.active)

    @property
    def is_held_up(self) -> bool:
        """Whether that is much. A GPU is idle from the same share on at which its utilization is too low."""
        return self.idle >= (OUTSIDE if self.kernels is None else 1.0 - BUSY)

    @property
    def least(self) -> float | None:
        """Seconds that the same operations and bytes take at the device's rates."""
        if not self.matmul_tflops or not self.copy_gb_per_second:
            return None
        return self.flop / self.matmul_tflops / 1e12 + self.bytes / self.copy_gb_per_second / 1e9


@dataclass(frozen=True)
class TimeFacts:
    """Where the time of a run of so many `steps` went. Shares are from 0 to 1.

    `waiting` and `phases` are shares of a step, `between` and `first` of the training: `first` is what the first steps
    took beyond the usual time. `settings` are the run's, as `section.key`.
    """

    step_seconds: float
    waiting: float
    phases: Mapping[str, float] = field(default_factory=dict)
    between: Mapping[str, float] = field(default_factory=dict)
    first: float = 0.0
    prepare_seconds: float | None = None  # to prepare the data of a step, in a thread of its own
    operators: OperatorFacts | None = None
    on_gpu: bool = False
    steps: int = 0
    cpus: int | None = None
    threads: int | None = None
    setup: IdleSetup = field(default_factory=IdleSetup)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """What holds the run back, the share of the training's time that it takes, and why."""

    name: str
    share: float
    why: str


@dataclass(frozen=True)
class Advice:
    """What to try: `bench` measures `setting` beside the run's settings, `train` is a new run with it."""

    text: str
    command: str = ""  # `train`, `bench step`, `bench loader`, `bench attention`
    setting: str = ""


def find_bounds(facts: TimeFacts) -> tuple[Bound, ...]:
    """Everything that holds the run back, the largest first."""
    in_steps = max(0.0, 1.0 - sum(facts.between.values()))
    computing = 1.0 - facts.waiting  # of a step, without what has a bound of its own
    bounds = _bounds_of_data(facts, in_steps)
    for name, least in BETWEEN.items():
        share = facts.between.get(name, 0.0)
        if share >= least:
            bounds.append(Bound(f"{name}-bound", share, f"{DOING[name]} takes {percent(share)} of the training's time"))
    if facts.first >= FIRST:
        why = f"the first steps took {percent(facts.first)} of the training's time beyond the usual time of a step"
        bounds.append(Bound("one-off costs", facts.first, why))
    updating = sum(facts.phases.get(name, 0.0) for name in PARTS_OF_UPDATE)
    if updating >= UPDATING:
        computing -= updating
        why = f"clipping and update take {percent(updating)} of a step"
        bounds.append(Bound("optimizer-bound", updating * in_steps, why))
    summing = facts.phases.get("all_reduce", 0.0)
    if summing >= SUMMING:
        why = f"summing the gradients of all processes takes {percent(summing)} of a step"
        bounds.append(Bound("communication-bound", summing * in_steps, why))
    if facts.operators is not None:
        bounds += _bounds_of_operators(facts.operators, facts.setup, max(0.0, in_steps * computing))
    return tuple(sorted(bounds, key=lambda bound: -bound.share))


def _bounds_of_data(facts: TimeFacts, in_steps: float) -> list[Bound]:
    """Steps that wait for their data; on a CPU also those whose data takes the time that they compute with."""
    step, prepared = facts.step_seconds, facts.prepare_seconds or 0.0
    waited = facts.waiting * step
    why = f"a step waits {milliseconds(waited)} of {milliseconds(step)} for its data"
    if prepared:
        why += f"; preparing it takes {milliseconds(prepared)} in a thread of its own"
    if waited > LEAST_WAIT and facts.waiting > waiting_limit(cached=facts.setup.cached):
        return [Bound("data-bound", facts.waiting * in_steps, why)]
    beside = min(1.0, prepared / step)
    if facts.on_gpu or beside < BESIDE:
        return []
    share = beside / max(facts.cpus or 1, 1) * in_steps
    return [Bound("data-bound", share, f"{why}, which computes on the steps' CPUs")]


def _bounds_of_operators(operators: OperatorFacts, setup: IdleSetup, rest: float) -> list[Bound]:
    """What the computing itself is held back by; `rest` is its share of the training's time."""
    bounds, working = list[Bound](), max(operators.compute + operators.memory, 1e-9)
    call_time = f"{1e6 * working / max(operators.calls, 1):.0f} µs"
    if operators.is_held_up:
        bounds.append(_bound_of_idle(operators, setup, rest * operators.idle, call_time))
        rest *= 1.0 - operators.idle
    if operators.least is not None and operators.least / working < TOO_SMALL:
        why = (
            f"the operators take {milliseconds(working)} a step for what takes {milliseconds(operators.least)} at the "
            f"device's rates: {operators.calls:,.0f} calls on small tensors, {call_time} each"
        )
        return [*bounds, Bound("small operators", rest, why)]
    share = operators.compute / working
    if share >= 0.5:
        why = f"matmuls, convolutions and attention take {percent(share)} of the operators' time"
        if operators.matmul_tflops and operators.compute > 0:
            reached = operators.flop / operators.compute / 1e12
            why += (
                f", at {reached:.3g} TFLOP/s, {percent(reached / operators.matmul_tflops)} of the "
                f"{operators.matmul_tflops:.3g} that a large matmul reaches here"
            )
        return [*bounds, Bound("compute-bound", rest * share, why)]
    why = f"operators that move data more than they compute take {percent(1 - share)} of the operators' time"
    if operators.copy_gb_per_second and operators.memory > 0:
        reached = operators.bytes / operators.memory / 1e9
        why += f", at about {reached:.3g} GB/s; a copy reaches {operators.copy_gb_per_second:.3g} here"
    return [*bounds, Bound("memory-bound", rest * (1 - share), why)]


def _bound_of_idle(operators: OperatorFacts, setup: IdleSetup, share: float, call_time: str) -> Bound:
    """Why nothing computes in so much of a step."""
    if operators.kernels is None:
        why = (
            f"{percent(operators.idle)} of a step is Python's and PyTorch's own time between {operators.calls:,.0f} "
            f"operators, each of {call_time} on average"
        )
        return Bound("overhead-bound", share, why)
    computes = f"the GPU computes in {percent(1 - operators.idle)} of a step"
    if setup.swapped and operators.copies > operators.idle * operators.active / 2:
        copying = milliseconds(operators.copies)
        return Bound("copy-bound", share, f"{computes} and waits for swapped blocks: copying takes {copying} a step")
    why = f"{computes} and waits for the CPU, which launches {operators.launched or 0.0:,.0f} kernels a step"
    return Bound("launch-bound", share, why)


# What is tried against some bounds, where a condition holds, in this order; besides the advice of `fix_of`.
RULES: tuple[tuple[tuple[str, ...], Callable[[TimeFacts], object], Advice], ...] = (
    (
        ("one-off costs",),
        lambda facts: facts.setup.compiled,
        Advice(
            "Do not compile a run this short: compiling took longer than it saves.",
            "bench step",
            "compile.enabled=false",
        ),
    ),
    (
        ("optimizer-bound",),
        lambda facts: facts.settings.get("optimizer.name") != "adamw",
        Advice("Compare with AdamW, whose update is one fused operator.", "bench step", "optimizer.name=adamw"),
    ),
    (
        ("compute-bound",),
        lambda facts: facts.on_gpu and facts.setup.weight_dtype == "fp32",
        Advice("Compute in bf16.", "bench step", "memory.weight_dtype=bf16"),
    ),
    (
        ("compute-bound",),
        lambda facts: (
            facts.on_gpu and facts.setup.weight_dtype == "fp32" and facts.settings.get("hardware.tf32") is False
        ),
        Advice("Let fp32 matmuls use TF32.", "bench step", "hardware.tf32=true"),
    ),
    (
        ("compute-bound",),
        lambda facts: facts.settings.get("memory.gradient_checkpointing") not in (None, False, 0, "auto"),
        Advice(
            "Recompute nothing, if the memory allows: gradient checkpointing repeats the forward pass.",
            "bench step",
            "memory.gradient_checkpointing=false",
        ),
    ),
    (
        ("compute-bound", "memory-bound", "small operators"),
        lambda facts: facts.on_gpu and not facts.setup.compiled,
        Advice("Compile the blocks: fewer and larger kernels.", "bench step", "compile.enabled=true"),
    ),
    (
        ("memory-bound",),
        lambda facts: facts.on_gpu and facts.settings.get("hardware.channels_last") is False,
        Advice(
            "Store convolutions channels-last, so that nothing is transposed around them.",
            "bench step",
            "hardware.channels_last=true",
        ),
    ),
    (
        ("compute-bound", "memory-bound"),
        lambda facts: facts.on_gpu and facts.settings.get("hardware.attention_backend") in ("math", "sdpa"),
        Advice("Time the attention backends that work here, and use the fastest.", "bench attention"),
    ),
)
# The cause with the same fix, and the command that tries its setting, or where it names none, measures.
CAUSES: dict[str, tuple[CauseName, str, str]] = {
    "data-bound": ("data", "train", "bench loader"),
    "launch-bound": ("launches", "bench step", ""),
    "copy-bound": ("block_swap", "bench step", ""),
}
LESS_OFTEN = {
    "validation-bound": ("Validate less often.", "validation.every_n_steps"),
    "checkpoint-bound": ("Save checkpoints less often, or to a faster disk.", "checkpoint.every_n_steps"),
    "samples-bound": ("Generate images less often.", "sample.every_n_steps"),
}


def advise(facts: TimeFacts, bounds: Sequence[Bound]) -> tuple[Advice, ...]:
    """What to try against each bound, where its condition holds; the most useful first."""
    advice: list[Advice] = []
    for name in [bound.name for bound in bounds]:
        if name in CAUSES:
            cause, command, without_setting = CAUSES[name]
            text, setting = fix_of(cause, facts.setup)
            advice.append(Advice(text, command if setting else without_setting, setting))
        advice += [step for names, is_useful, step in RULES if name in names and is_useful(facts)]
        if name in ("overhead-bound", "small operators"):  # where compiling is no answer, or not the only one
            text, setting = fix_of("launches", replace(facts.setup, compiled=True))
            advice.append(Advice(text, "bench step", setting))
        if name in LESS_OFTEN:
            text, setting = LESS_OFTEN[name]
            every = facts.settings.get(setting) or 0
            if 0 < every < facts.steps:  # else it changes nothing in this run
                advice.append(Advice(text, "train", f"{setting}={3 * every}"))
        if name == "compute-bound" and not facts.on_gpu:
            threads, most = facts.threads or 0, min(facts.cpus or 0, 8)
            if 0 < threads < most:
                text = f"Use more than {threads} of this machine's {facts.cpus} CPUs."
                advice.append(Advice(text, "bench step", f"hardware.threads={most}"))
    return tuple(dict.fromkeys(advice))


def percent(share: float) -> str:
    """`62 %`, `0.4 %`: one digit after the point below 10."""
    digits = 0 if share >= 0.0995 else 1
    return f"{100 * share:.{digits}f} %"


def milliseconds(seconds: float) -> str:
    """`0.4 ms`, `168 ms`, `12.5 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
