"""Checks of a run that a live process is training."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from lora_trainer.core.disk import size_words
from lora_trainer.core.findings import counted
from lora_trainer.doctor.lines import Lines, first_fault, ok, warning
from lora_trainer.doctor.run_facts import RunFacts, recent
from lora_trainer.monitor.idle import BUSY, RECENT_ROWS, causes_of, clocks_of, means_of, slow_data
from lora_trainer.monitor.memory import LARGEST_SYSTEM_SHARE
from lora_trainer.monitor.progress_line import clock_time
from lora_trainer.monitor.slowness import waiting_limit
from lora_trainer.report.read import number, text
from lora_trainer.report.targets import setup_of, why_not_measured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_trainer.doctor.facts import MachineFacts
    from lora_trainer.run_folder.progress import WrittenProgress

QUIET_STEPS, QUIET_SECONDS = 150, 300.0  # metrics are written every 50 steps or sooner
QUIET_PHASE_SECONDS = 3600.0  # of checking a dataset, or of the verdict, which report little
SLOWER = 2.0
GIB = 2**30
HARMLESS = ("resumed", "signal", "request")


def during_lines(run: RunFacts, live: WrittenProgress, facts: MachineFacts) -> Lines:
    """Everything about a run that is training now; `live` is what it wrote last of its progress."""
    yield from progress(run, live)
    yield from sign_of_life(run, live)
    yield from its_process(run, live, facts)
    yield from speed(run)
    yield from gpu_use(run)
    yield from room_left(run)
    yield from events_so_far(run)


def progress(run: RunFacts, live: WrittenProgress) -> Lines:
    """Step, loss, speed, and the time that is left."""
    step, total = live.progress.step, live.progress.total
    if not run.rows:
        yield ok("progress", f"{live.progress.phase}, before the first step")
        return
    seconds, losses = recent(run.rows, "seconds"), recent(run.rows, "loss")
    pace = median(seconds) if seconds else 0.0
    found = f"step {step:,}"
    if total:
        found += f" of {total:,} ({step / total:.0%})"
    if losses:
        found += f", loss {losses[-1]:.4f}"
    if pace:
        found += f", {1 / pace:.1f}it/s" if pace < 1 else f", {pace:.1f}s/it"
    if pace and total:
        found += f", ETA {clock_time((total - step) * pace)}"
    is_finite = run.rows[-1].get("loss", 0.0) is not None
    if not is_finite:
        found += "; the last loss is not finite"
    fix = "see the events below; lower optimizer.learning_rate, or use bf16 in place of fp16"
    yield first_fault("progress", found, (not is_finite, "warning", "a finite loss", fix))


def sign_of_life(run: RunFacts, live: WrittenProgress) -> Lines:
    """How long ago the run last reported its progress: while it trains every few steps, in another phase more rarely."""
    phase, silent = live.progress.phase, live.silent_seconds
    allowed = max(QUIET_SECONDS, QUIET_STEPS * (run.usual_seconds or 0.0))
    if phase != "training":
        allowed = max(allowed, QUIET_PHASE_SECONDS)
    found = f"{phase}; the last progress was reported {clock_time(silent)} ago"
    process = f" (process {live.pid})" if live.is_of_this_machine else ""
    then = "continue with --resume" if run.report.record.keeps_state else "start it again with another --name"
    fix = f"look at its CPU and GPU use; if both idle it hangs: stop it{process} with SIGTERM and {then}"
    yield first_fault("sign of life", found, (silent > allowed, "warning", f"one within {clock_time(allowed)}", fix))


def its_process(run: RunFacts, live: WrittenProgress, facts: MachineFacts) -> Lines:
    """The process, and the system's memory beside it."""
    process = f"{live.pid}"
    if not live.is_of_this_machine:
        process += ", on another machine"
    else:
        if run.process_cpus is not None:
            process += f", {run.process_cpus:.1f} CPUs"
        if run.process_memory is not None:
            process += f", {run.process_memory / GIB:.1f} GiB of memory"
    yield ok("process", process)
    limit = max(facts.memory_limit, 1)
    share = 1.0 - facts.system.memory_available / limit
    found, fix = f"{share:.0%} of {limit / GIB:.1f} GiB are in use", "close other programs: the system may end the run"
    is_full = share > LARGEST_SYSTEM_SHARE
    yield first_fault("system memory", found, (is_full, "warning", f"under {LARGEST_SYSTEM_SHARE:.0%}", fix))


def speed(run: RunFacts) -> Lines:
    """The last steps against the usual ones, and how long they wait for data."""
    seconds, waited = recent(run.rows, "seconds"), recent(run.rows, "data_seconds")
    if not seconds:
        return
    now, usual = median(seconds[-10:]), run.usual_seconds
    found = f"{now:.2f} s a step"
    is_slow = usual is not None and now > SLOWER * usual > 0
    if is_slow:
        found += f", usually {usual:.2f} s"
    fix = "check for other processes and for a throttled GPU"
    yield first_fault("speed", found, (is_slow, "warning", "the usual time", fix))
    share, setup = sum(waited) / max(sum(seconds), 1e-9), setup_of(run.report)
    limit = waiting_limit(cached=setup.cached)
    if share > limit:
        cause = slow_data(share, setup)
        yield warning("data", cause.what, f"under {limit:.0%}", cause.to_do)
    else:
        yield ok("data", f"steps wait {share:.1%} of their time for data")


def gpu_use(run: RunFacts) -> Lines:
    """The load of the run's own GPUs, as it measured them in its latest rows of system.jsonl, and why they are idle."""
    if not run.report.on_gpu:
        return
    rows = run.report.system[-RECENT_ROWS:]
    means = means_of(rows)
    if "gpu_utilization" not in means:
        yield ok("GPU", f"not measured: {why_not_measured(run.report)}")
        return
    seconds = sum(number(row.get("seconds")) or 0.0 for row in rows)
    found = f"{means['gpu_utilization']:.0%} in use in the last {clock_time(seconds)}"
    if "gpu_memory" in means:
        found += f", memory {means['gpu_memory']:.0%}"
    if "gpu_celsius_most" in means:
        found += f", up to {means['gpu_celsius_most']:.0f} degrees"
    causes = causes_of(means, setup_of(run.report), clocks_of(rows))
    if causes:
        fix = f"{causes[0].to_do} lora-trainer report shows the settings to try"
        yield warning("GPU", f"{found}: {causes[0].what}", f"over {BUSY:.0%}", fix)
    else:
        yield ok("GPU", found)


def room_left(run: RunFacts) -> Lines:
    """The disk against what the run will still write."""
    if run.room is None:
        yield ok("disk", "what the run will write is known after its first checkpoint")
        return
    found = f"{size_words(run.room.free)} free, {size_words(run.room.needed)} to be written"
    full = run.room.problem is not None
    yield first_fault(
        "disk",
        found,
        (full, "error", "room for all of it", "free space there: the run pauses where the disk is full"),
        (run.room.scarce, "warning", "more room than that", "free space there"),
    )


def events_so_far(run: RunFacts) -> Lines:
    """What the run reported beside its steps: the last one of each kind."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for event in run.events:
        by_kind.setdefault(text(event.get("kind")), []).append(event)
    reported = {kind: events for kind, events in by_kind.items() if kind not in HARMLESS}
    for kind, events in reported.items():
        last = events[-1]
        found = f"{counted(len(events), 'event')}, the last at step {last.get('step')}: {text(last.get('message'))}"
        yield warning(f"event {kind}", found, "none", "docs/watching.md explains it")
    if not reported:
        yield ok("events", "none")
