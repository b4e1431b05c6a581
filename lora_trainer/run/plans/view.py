"""A plan for people: memory part by part against the GPU, what was chosen and why, steps, disk, least time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from lora_trainer.memory_plan.estimate import GIB, LARGEST_SHARE
from lora_trainer.monitor.system import system_memory
from lora_trainer.run.printed import show

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.run.plans.plan import Plan

LEAST_HOST_GIB = 0.5
WIDTH = 40  # characters of a bar that fills the GPU
COLORS = {"weights": "blue", "adapter": "cyan", "optimizer": "magenta", "activations": "green", "overhead": "yellow"}
NO_DATA = "not known without images: name them with --data"
PUBLISHED = "cache, validate, draw: computed from the size of this model's weights; the rest as in published models of its family"
FULL, EIGHTHS = "█", ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def show_plan(plan: Plan, console: Console, runs: int = 0) -> None:
    """All of it; with `runs` on one base model also how many of them fit."""
    demand = plan.demand
    title = (
        f"{plan.family} ({plan.model}), {demand.resolution} px, {plan.adapter} rank {demand.rank}, {demand.optimizer}"
    )
    show(console, Text(title, style="bold"))
    show(console, bars(plan))
    for line in lines(plan):
        show(console, Text(line))
    if plan.settings:
        show(console, settings(plan))
    else:
        show(console, Text("What each single setting would buy must be traced for this model: plan --what-if"))
    if runs:
        show(console, together(plan, runs))
    for sentence in plan.advice:
        show(console, Text(f"- {sentence}"))
    for sentence in plan.shortages:
        show(console, Text(f"does not fit: {sentence}", style="bold red"))


def bars(plan: Plan) -> Table:
    """A bar for each part, drawn to the GPU's size, each beginning where the one above ends."""
    parts, limit = plan.fit.parts, plan.demand.limit_gib
    scale = WIDTH / max(parts.peak, limit or 0.0)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    start = 0.0
    for name, color in COLORS.items():
        size = getattr(parts, name)
        table.add_row(name, f"{size:.2f} GiB", _bar(start, size, scale, color))
        start += size
    table.add_row("a step", f"{parts.peak:.2f} GiB", "")
    if limit is not None:
        table.add_row("margin", f"{limit - parts.peak:.2f} GiB", _bar(start, limit - parts.peak, scale, "dim", "░"))
    return table


def settings(plan: Plan) -> Table:
    """Which setting buys what: the peak and the operations of a step after each change by itself."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="")
    for name, justify in (("one setting changed", "left"), ("peak", "right"), ("", "right"), ("operations", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("", no_wrap=True)
    before = plan.fit.parts
    for each in plan.settings:
        table.add_row(
            each.setting,
            f"{each.parts.peak:.2f} GiB",
            f"{each.parts.peak - before.peak:+.2f}",
            f"{each.parts.tflop / before.tflop - 1:+.0%}",
            "" if each.fits else "does not fit",
        )
    return table


def together(plan: Plan, most: int) -> Table:
    """The memory of several such runs on one base model, how many share a pass, and how many are worth it."""
    found = plan.together(most)
    best = max((each.in_a_pass for each in found), default=0)
    advice = f"--together {best}: more runs would not share a pass of this size."
    if best < 2:
        advice = "One run fills this GPU by itself. Runs share a pass with a smaller train.max_micro_batch_size."
    elif best == most:
        advice = f"--together {best}: all of them share a pass."
    table = Table(box=None, pad_edge=False, header_style="", caption=advice, caption_justify="left")
    for name in ("runs on one base", "in a pass", "peak", "of each"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        peak = each.parts.peak
        shared = str(each.in_a_pass) if each.in_a_pass else "does not fit"
        table.add_row(str(each.runs), shared, f"{peak:.2f} GiB", f"{peak / each.runs:.2f} GiB")
    return table


def _bar(start: float, size: float, scale: float, color: str, block: str = FULL) -> Text:
    """As long as the part is large, in eighths of a character; at least one of a part that is there at all."""
    first = int(start * scale)
    whole, eighths = divmod(max(round(size * scale * 8), 1), 8) if size > 0 else (0, 0)
    return Text(" " * first + block * whole + (EIGHTHS[eighths] if block == FULL else ""), style=color)


def lines(plan: Plan) -> list[str]:
    """What was chosen with its reasons, steps, least time, disk."""
    demand, fit = plan.demand, plan.fit
    gpu = "no limit" if demand.limit_gib is None else f"{demand.limit_gib:g} GiB, {LARGEST_SHARE:.0%} of it to use"
    steps = NO_DATA if plan.steps is None else f"{plan.steps:,}"
    flop = fit.parts.tflop
    least = [
        f"steps: {steps}; {operations(flop)} each, so each takes at least, in {plan.computed}: {_times(plan, flop)}"
    ]
    if plan.steps is not None:
        least.append(f"the whole run takes at least {_times(plan, flop * plan.steps)}")
    hosted = f"; up to {plan.host.most:.1f} GiB of host memory" if plan.host.most else ""
    return [
        f"GPU: {gpu}; predicted from: {demand.memory_model.source}",
        f"micro-batch size: {fit.micro} (gradient accumulation steps: {fit.accumulation}): {fit.reasons[0]}",
        f"gradient checkpointing: {fit.checkpointed} of {fit.blocks} blocks: {fit.reasons[1]}",
        f"weights {fit.precision}: {fit.reasons[2]}",
        f"swapped {fit.swapped} of {fit.swappable} blocks: {fit.reasons[3]}{hosted}",
        *least,
        *(f"{name}: {phase.peak_gib:.2f} GiB, {phase.placement}" for name, phase in plan.phases.items()),
        most_line(plan),
        *host_lines(plan, system_memory()[0] / GIB),
        *([PUBLISHED] if demand.memory_model.traced else []),
        f"disk: {plan.disk_gib:.2f} GiB for caches, checkpoints and the LoRA",
    ]


def most_line(plan: Plan) -> str:
    """The peak of the whole run, which is not the training's in every run."""
    name, phase = max(plan.phases.items(), key=lambda pair: pair[1].peak_gib)
    return f"peak of the run: {phase.peak_gib:.2f} GiB ({name})"


def host_lines(plan: Plan, total: float) -> list[str]:
    """Host memory of the phase that holds most of it, against this machine's; nothing where it is next to nothing."""
    name, most = max(((name, phase.host_gib) for name, phase in plan.phases.items()), key=lambda pair: pair[1])
    if most < LEAST_HOST_GIB:
        return []
    where = "" if plan.demand.limit_gib is not None else ", without a GPU"
    line = f"host memory{where}: up to {most:.1f} GiB ({name}) beside the program's own; this machine has {total:.1f}"
    return [line if most < total else f"{line}, which is too little for it"]


def _times(plan: Plan, tflop: float) -> str:
    """How long each GPU needs for so many operations, at the least."""
    return ", ".join(f"{duration(time)} ({gpu})" for gpu, time in plan.least(tflop).items())


def operations(tflop: float) -> str:
    """`7.6 TFLOP`, `12 GFLOP`, `340 MFLOP`: in a unit that leaves at least one digit before the point."""
    for unit, size in (("TFLOP", 1.0), ("GFLOP", 1e-3)):
        if tflop >= size:
            return f"{_short(tflop / size)} {unit}"
    return f"{_short(tflop / 1e-6)} MFLOP"


def duration(seconds: float) -> str:
    """`2.1 h`, `4.0 min`, `35 s`, `9.7 ms`, `8.6 µs`."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds / 1e-6)} µs"


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{number:,.0f}"
