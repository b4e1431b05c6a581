"""The plan of every tier, goal and family as one page of Markdown: what the presets promise."""

from __future__ import annotations

from collections.abc import Iterator

from lora_trainer.config.layers import Layer
from lora_trainer.config.presets import GOALS, TIERS, preset_layers, presets
from lora_trainer.memory_plan.profiles import stored_families
from lora_trainer.run.plans.plan import Plan, make_plan
from lora_trainer.run.settings import settle

INTRODUCTION = """# What every preset fits

This page shows the predicted memory of every VRAM preset with every training preset, for each model family.

```
lora-trainer plan --all
```

The command wrote this page, and a test compares it with the code. Each row is one of either kind of preset on a family's published
model, predicted without a GPU as [memory.md](memory.md) describes. Sizes are in GiB; at most 90 % of a GPU are used. Families whose
memory is not stored are traced when you plan them by name, and are not listed here.
"""
HEADER = (
    "| preset | px | rank | micro-batch | blocks checkpointed | blocks swapped | weights | weights GiB | adapter | optimizer "
    "| activations | overhead | peak | margin | TFLOP a step |\n" + "|---" * 15 + "|\n"
)


def every_plan() -> Iterator[tuple[str, str, str, Plan]]:
    """(family, tier, goal, plan) of every combination, of the families whose memory is stored."""
    by_kind = {kind: [name for name, preset in presets().items() if preset.kind == kind] for kind in (TIERS, GOALS)}
    for family in stored_families():
        for tier in by_kind[TIERS]:
            for goal in by_kind[GOALS]:
                model = Layer("--set", {"model": {"family": family}})
                resolved = settle(preset_layers([tier, goal]).layers, [model], builtin_if_none=False)
                yield family, tier, goal, make_plan(resolved)


def plans_page() -> str:
    """The whole page."""
    parts, last = [INTRODUCTION], ""
    for family, tier, goal, plan in every_plan():
        if family != last:
            parts.append(f"\n## {family}\n\n{HEADER}")
            last = family
        parts.append(_row(f"`{tier}` `{goal}`", plan))
    return "".join(parts)


def _row(name: str, plan: Plan) -> str:
    demand, fit, parts = plan.demand, plan.fit, plan.fit.parts
    sizes = (parts.weights, parts.adapter, parts.optimizer, parts.activations, parts.overhead, parts.peak)
    cells = (
        name,
        str(demand.resolution),
        str(demand.rank),
        f"{fit.micro} x {fit.accumulation}",
        f"{fit.checkpointed} of {fit.blocks}",
        str(fit.swapped),
        fit.precision if plan.fits is not False else f"{fit.precision}, does not fit: {' '.join(plan.advice)}",
        *(f"{size:.2f}" for size in (*sizes, (demand.limit_gib or 0.0) - parts.peak)),
        f"{parts.tflop:.1f}",
    )
    return f"| {' | '.join(cells)} |\n"
