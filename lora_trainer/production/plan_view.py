"""A plan for people: memory part by part against the card, what was chosen and why, steps, disk, least time."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lora_trainer.production.memory import LARGEST_SHARE, shortage
from lora_trainer.production.plan import CARD_TFLOPS, Plan

WIDTH = 40  # characters of a bar that fills the card
COLOURS = {"weights": "blue", "adapter": "cyan", "optimizer": "magenta", "activations": "green", "overhead": "yellow"}
LEAST_SHOWN = 0.5  # characters


def show_plan(plan: Plan, console: Console) -> None:
    """All of it."""
    demand, fit = plan.demand, plan.fit
    title = f"{plan.family} ({plan.model}), {demand.resolution} px, LoRA rank {demand.rank}, {demand.optimizer}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(bars(plan))
    for line in lines(plan):
        console.print(Text(line), soft_wrap=True)
    for sentence in plan.advice:
        console.print(Text(f"- {sentence}"), soft_wrap=True)
    if not fit.fits:
        console.print(Text("does not fit: " + shortage(demand, fit), style="bold red"), soft_wrap=True)


def bars(plan: Plan) -> Table:
    """A bar for each part, drawn to the card's size, each beginning where the one above ends."""
    parts, limit = plan.fit.parts, plan.demand.limit_gib
    scale = WIDTH / max(parts.peak, limit or 0.0)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    start = 0.0
    for name, colour in COLOURS.items():
        size = getattr(parts, name)
        table.add_row(name, f"{size:.2f} GiB", _bar(start, size, scale, colour))
        start += size
    table.add_row("peak", f"{parts.peak:.2f} GiB", "")
    if limit is not None:
        table.add_row("margin", f"{limit - parts.peak:.2f} GiB", _bar(start, limit - parts.peak, scale, "dim", "░"))
    return table


def _bar(start: float, size: float, scale: float, colour: str, block: str = "█") -> Text:
    """At least half a character of a part that is there at all."""
    first = round(start * scale)
    width = max(round((start + size) * scale) - first, 1 if size * scale > LEAST_SHOWN else 0)
    return Text(" " * first + (block * width or ("▏" if size > 0 else "")), style=colour)


def lines(plan: Plan) -> list[str]:
    """What was chosen with its reasons, steps, least time, disk."""
    demand, fit = plan.demand, plan.fit
    card = "no limit" if demand.limit_gib is None else f"{demand.limit_gib:g} GiB, {LARGEST_SHARE:.0%} of it to use"
    seconds = ", ".join(f"{card} {fit.parts.tflop / rate:.3g} s" for card, rate in CARD_TFLOPS.items())
    steps = "unknown without data" if plan.steps is None else f"{plan.steps:,}"
    return [
        f"card: {card}; predicted from: {demand.gauge.source}",
        f"micro batch {fit.micro} x {fit.accumulation}: {fit.reasons[0]}",
        f"gradient checkpointing {fit.checkpointed} of {fit.blocks} blocks: {fit.reasons[1]}",
        f"weights {fit.precision}: {fit.reasons[2]}",
        f"steps: {steps}; {fit.parts.tflop:.1f} TFLOP each, so at least {seconds}",
        *(f"{name}: {phase.peak_gib:.2f} GiB, {phase.placement}" for name, phase in plan.phases.items()),
        f"disk: {plan.disk_gib:.2f} GiB for caches, checkpoints and the LoRA",
    ]
