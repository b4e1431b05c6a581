"""What a run should reach on its machine, what was seen of it, and why its GPU was idle."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from typing import Any

from lora_trainer.monitor.idle import (
    AIM,
    BUSY,
    FULL_MEMORY,
    IdleCause,
    IdleSetup,
    causes_of,
    clocks_of,
    larger_micro,
    means_of,
)
from lora_trainer.monitor.slowness import waiting_limit
from lora_trainer.report.chart import short
from lora_trainer.report.figures import waiting_share
from lora_trainer.report.read import RunReport, number, text

SECONDS_STALLED = 1.0
IN_A_PROFILE = ("elsewhere", "data", "block_swap", "launches", "unknown")  # causes that a profile measures itself


@dataclass(frozen=True)
class Target:
    """`met` is None where nothing was seen; `about` says why, or what to do."""

    name: str
    aim: str
    seen: str
    met: bool | None
    about: str = ""


def targets_of(run: RunReport) -> list[Target]:
    """Those that were seen; on a CPU neither a GPU's, nor that the CPU has time to spare.

    A GPU whose utilization was not measured is named, with the reason.
    """
    seen, targets = {name: number(value) for name, value in seen_of(run).items()}, list[Target]()
    if run.on_gpu:
        busy = compare_share("GPU utilization", seen.get("gpu_utilization"), over=BUSY)
        about = why_not_measured(run) if busy.met is None else ""
        targets.append(replace(busy, aim=f"{busy.aim}, better {AIM:.0%}", about=about))
        memory = compare_share("GPU memory, of what is allowed", seen.get("memory"), over=FULL_MEMORY)
        targets.append(replace(memory, about=larger_micro(setup_of(run)) if memory.met is False else ""))
        targets.append(compare_share("CPU utilization", seen.get("cpu"), under=0.8))
    limit = waiting_limit(cached=caches_latents(run))
    targets.append(compare_share("system memory (RAM)", seen.get("system_memory"), under=0.85))
    targets.append(compare_share("I/O wait", seen.get("io_wait"), under=0.1))
    targets.append(compare_share("steps wait for data", waiting_share(run), under=limit))
    if (stall := run.checkpoint_stall) is not None:
        milliseconds, is_short = f"{short(1000 * stall)} ms", stall < SECONDS_STALLED
        targets.append(Target("a checkpoint stops the steps", "under 1 s", milliseconds, is_short))
    return [target for target in targets if target.met is not None or target.about]


def why_not_measured(run: RunReport) -> str:
    """Why a run on a GPU has no GPU utilization."""
    if recorded := text(run.record.seen.get("gpu_not_measured")):
        return recorded
    every = number(run.record.setting("run.system_every_seconds"))
    if every is None:
        return "It was trained by an earlier version, which recorded no system.jsonl."
    if every == 0:
        return "run.system_every_seconds=0 measures nothing."
    return f"No interval of run.system_every_seconds={every:g} was full."


def caches_latents(run: RunReport) -> bool:
    """Whether the run's latents are cached, as they are by default."""
    return run.record.setting("cache.latents") is not False


def seen_of(run: RunReport) -> dict[str, Any]:
    """What was measured of the machine: as recorded, and from system.jsonl, which an unfinished run has too."""
    return {**means_of(run.system), **run.record.seen}


def setup_of(run: RunReport) -> IdleSetup:
    """The settings that explain an idle GPU, as recorded; defaults where the record has none, as before its end."""
    recorded = run.record.setup
    default = IdleSetup(cached=caches_latents(run))  # a damaged record has values of other kinds
    kinds = {field.name: type(getattr(default, field.name) or 0) for field in fields(IdleSetup)}
    known = [name for name, kind in kinds.items() if isinstance(recorded.get(name), kind)]
    return replace(default, **{name: recorded[name] for name in known})


def idle_causes(run: RunReport, *, profiled: bool = False) -> list[tuple[IdleCause, str]]:
    """Why the run's GPU was idle, the likeliest first, each with a command for the run's folder: it measures whether the setting helps.

    Of a run with a profile only what the profile does not measure.
    """
    seen = {name: number(value) for name, value in seen_of(run).items()}
    measured = {name: value for name, value in seen.items() if value is not None}
    causes = list[tuple[IdleCause, str]]()
    for cause in causes_of(measured, setup_of(run), clocks_of(run.system)):
        words = list[str]()
        if cause.name == "unknown":
            words = ["lora-trainer", "train", "--config", "config.toml", "--name", f"{run.name}-profile", "--profile"]
        elif cause.setting:
            words = ["lora-trainer", "bench", "step", "--config", "config.toml", "--compare", cause.setting]
        if not profiled or cause.name not in IN_A_PROFILE:
            causes.append((cause, shlex.join(words)))
    return causes


def compare_share(name: str, seen: float | None, *, over: float = 0.0, under: float = 0.0) -> Target:
    """A target for a share from 0 to 1, which is to be `over` one value, or `under` it."""
    aim = f"over {over:.0%}" if over else f"under {under:.0%}"
    if seen is None:
        return Target(name, aim, "", None)
    return Target(name, aim, f"{100 * seen:.1f} %", seen > over if over else seen < under)
