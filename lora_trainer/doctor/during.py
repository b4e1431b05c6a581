"""Checks of a run that a live process is training."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from lora_trainer.core.disk import size_words
from lora_trainer.core.findings import counted
from lora_trainer.doctor.lines import Lines, error, ok, warning
from lora_trainer.doctor.run_facts import RunFacts, recent
from lora_trainer.monitor.idle import BUSY, RECENT_ROWS, causes_of, clocks_of, means_of, slow_data
from lora_trainer.monitor.memory import LARGEST_SYSTEM_SHARE
from lora_trainer.monitor.progress_line import clock_time
from lora_trainer.monitor.slowness import waiting_limit
from lora_trainer.report.read import number, text
from lora_trainer.report.targets import setup_of, why_not_measured

if TYPE_CHECKING:
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
    seconds = recent(run.rows, "seconds")
    pace = median(seconds) if seconds else 0.0
    left = "" if not total or not pace else f", ETA {clock_time((total - step) * pace)}"
    rate = "" if not pace else f", {1 / pace:.1f}it/s" if pace < 1 else f", {pace:.1f}s/it"
    of = f" of {total:,} ({step / total:.0%})" if total else ""
    losses = recent(run.rows, "loss")
    found = f"step {step:,}{of}{f', loss {losses[-1]:.4f}' if losses else ''}{rate}{left}"
    if "loss" in run.rows[-1] and run.rows[-1]["loss"] is None:
        fix = "see the events below; lower optimizer.learning_rate, or use bf16 in place of fp16"
        yield warning("progress", f"{found}; the last loss is not finite", "a finite loss", fix)
    else:
        yield ok("progress", found)


def sign_of_life(run: RunFacts, live: WrittenProgress) -> Lines:
    """How long ago the run last reported its progress: while it trains every few steps, in another phase more rarely."""
    phase, silent = live.progress.phase, live.silent_seconds
    allowed = max(QUIET_SECONDS, QUIET_STEPS * (run.usual_seconds or 0.0))
    if phase != "training":
        allowed = max(allowed, QUIET_PHASE_SECONDS)
    found = f"{phase}; the last progress was reported {clock_time(silent)} ago"
    if silent > allowed:
        who = f" (process {live.pid})" if live.is_of_this_machine else ""
        then = "continue with --resume" if run.report.record.keeps_state else "start it again with another --name"
        fix = f"look at its CPU and GPU use; if both idle it hangs: stop it{who} with SIGTERM and {then}"
        yield warning("sign of life", found, f"one within {clock_time(allowed)}", fix)
    else:
        yield ok("sign of life", found)


def its_process(run: RunFacts, live: WrittenProgress, facts: MachineFacts) -> Lines:
    """The process, and the system's memory beside it."""
    if not live.is_of_this_machine:
        yield ok("process", f"{live.pid}, on another machine")
    else:
        cpus = "" if run.process_cpus is None else f", {run.process_cpus:.1f} CPUs"
        memory = "" if run.process_memory is None else f", {run.process_memory / GIB:.1f} GiB of memory"
        yield ok("process", f"{live.pid}{cpus}{memory}")
    limit = max(facts.memory_limit, 1)
    share = 1.0 - facts.system.memory_available / limit
    found = f"{share:.0%} of {limit / GIB:.1f} GiB are in use"
    if share > LARGEST_SYSTEM_SHARE:
        fix = "close other programs: the system may end the run"
        yield warning("system memory", found, f"under {LARGEST_SYSTEM_SHARE:.0%}", fix)
    else:
        yield ok("system memory", found)


def speed(run: RunFacts) -> Lines:
    """The last steps against the usual ones, and how long they wait for data."""
    seconds, waited = recent(run.rows, "seconds"), recent(run.rows, "data_seconds")
    if not seconds:
        return
    now, usual = median(seconds[-10:]), run.usual_seconds or 0.0
    if usual and now > SLOWER * usual:
        found = f"{now:.2f} s a step, usually {usual:.2f} s"
        yield warning("speed", found, "the usual time", "check for other processes and for a throttled GPU")
    else:
        yield ok("speed", f"{now:.2f} s a step")
    share = sum(waited) / max(sum(seconds), 1e-9)
    setup = setup_of(run.report)
    limit = waiting_limit(cached=setup.cached)
    if share > limit:
        cause = slow_data(share, setup)
        yield warning("data", cause.what, f"under {limit:.0%}", cause.to_do)
    else:
        yield ok("data", f"steps wait {share:.1%} of their time for data")


def gpu_use(run: RunFacts) -> Lines:
    """The load of the run's own GPUs, as it measured them in its latest rows of system.jsonl, and why they are idle."""
    if not text(run.report.record.hardware.get("device")).startswith("cuda"):
        return
    rows = run.report.system[-RECENT_ROWS:]
    means = means_of(rows)
    if "gpu_utilization" not in means:
        yield ok("GPU", f"not measured: {why_not_measured(run.report)}")
        return
    over = sum(number(row.get("seconds")) or 0.0 for row in rows)
    found = f"{means['gpu_utilization']:.0%} in use in the last {clock_time(over)}"
    found += f", memory {means['gpu_memory']:.0%}" if "gpu_memory" in means else ""
    found += f", up to {means['gpu_celsius_most']:.0f} degrees" if "gpu_celsius_most" in means else ""
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
    if run.room.problem is not None:
        yield error("disk", found, "room for all of it", "free space there: the run pauses where the disk is full")
    elif run.room.scarce:
        yield warning("disk", found, "more room than that", "free space there")
    else:
        yield ok("disk", found)


def events_so_far(run: RunFacts) -> Lines:
    """What the run reported beside its steps: the last one of each kind."""
    reported = [event for event in run.events if text(event.get("kind")) not in HARMLESS]
    counts = Counter(text(event.get("kind")) for event in reported)
    for kind, count in counts.items():
        last = next(event for event in reversed(reported) if text(event.get("kind")) == kind)
        found = f"{counted(count, 'event')}, the last at step {last.get('step')}: {text(last.get('message'))}"
        yield warning(f"event {kind}", found, "none", "docs/watching.md explains it")
    if not reported:
        yield ok("events", "none")
