"""`presets`, `presets show NAME…` and `--explain`: settings as tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from lora_trainer.config.layers import DEFAULT, Resolved, flattened, resolve
from lora_trainer.config.presets import AUTO, BASES, FAMILIES, GOALS, TIERS, preset_layer, preset_layers, presets
from lora_trainer.config.schema import Config
from lora_trainer.config.toml import shown
from lora_trainer.core.errors import Problem, UsageError, nearest
from lora_trainer.monitor.console import Console
from lora_trainer.run.printed import show

_KINDS = {
    TIERS: "VRAM presets: fit a run to the GPU's memory (choose one)",
    GOALS: "training presets: quality and speed (choose one, with or without a VRAM preset)",
    BASES: "base presets: captions and sample prompts of well-known models (choose one, with or without the others)",
    FAMILIES: "family presets: applied automatically, below the others",
}


def presets_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """List the presets, or show what some of them set. Raises UsageError."""
    if arguments.action not in (None, "show"):
        unknown.append(
            Problem(
                "unexpected_argument", f"Unknown argument {arguments.action}.", f"Use: presets show {arguments.action}"
            )
        )
    elif arguments.action == "show" and not arguments.names:
        unknown.append(
            Problem(
                "argument_missing", "presets show needs a name.", "For example: lora-trainer presets show 12gb quality"
            )
        )
    if unknown:
        raise UsageError(unknown)
    return show_presets(arguments.names) if arguments.action else list_presets()


def list_presets() -> int:
    """Print every preset with its description."""
    console = Console(highlight=False)
    for kind, title in _KINDS.items():
        console.print(Text(title, style="bold"))
        for preset in presets().values():
            if preset.kind == kind:
                show(console, Text(f"  {preset.name:<13}{preset.description}"))
        if kind == TIERS:
            show(console, Text(f"  {AUTO:<13}The VRAM preset for this GPU."))
    console.print("Use: lora-trainer train --preset 12gb --preset quality", soft_wrap=True)
    return 0


def show_presets(names: Sequence[str], memory_gib: float | None = None) -> int:
    """Print the merged settings of the presets, each with the preset that set it and its evidence.

    Raises UsageError for unknown names, or two presets of one kind.
    """
    requested = [name for part in names for name in part.split(",") if name.strip()]
    families = [name for name in requested if name in presets() and presets()[name].kind == FAMILIES]
    chosen = preset_layers([name for name in requested if name not in families], memory_gib)
    if chosen.problems:
        raise UsageError([_with_families(problem, requested) for problem in chosen.problems])
    layers = [preset_layer(name, f"family preset {name}") for name in families]
    resolved = resolve([*layers, *chosen.layers])
    for note in chosen.notes:
        Console(stderr=True, highlight=False).print(note, soft_wrap=True)
    _print_table(resolved, only_set=True)
    return 0


def _with_families(problem: Problem, requested: Sequence[str]) -> Problem:
    """An unknown name may be a misspelt family, which can be shown but not chosen."""
    for name in requested:
        if problem.message == f"There is no preset named {name.strip()}.":
            return Problem(problem.code, problem.message, nearest(name.strip(), [*presets(), AUTO]))
    return problem


def explain(resolved: Resolved, *, as_json: bool = False) -> None:
    """Print every setting, its value, where it came from and a preset's evidence, as a table or as JSON."""
    if as_json:
        values = resolved.config.model_dump(mode="json")
        settings = {
            name: {"value": values[name.partition(".")[0]][name.partition(".")[2]], "from": origin}
            | ({"evidence": clause} if (clause := resolved.evidence.get(name)) else {})
            for name, origin in resolved.origin.items()
        }
        sys.stdout.write(json.dumps({"settings": settings}, indent=2) + "\n")
        return
    _print_table(resolved, only_set=False)


def _print_table(resolved: Resolved, *, only_set: bool) -> None:
    defaults: Mapping[str, object] = flattened(Config())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("setting", "value", "from", "evidence"):
        table.add_column(
            title, overflow="fold", no_wrap=title == "setting"
        )  # a name is whole on a narrow terminal, too
    section = ""
    for name, value in flattened(resolved.config).items():
        origin = resolved.origin[name]
        if only_set and origin == DEFAULT:
            continue
        if section and section != name.partition(".")[0]:
            table.add_section()
        section = name.partition(".")[0]
        changed = value != defaults[name]
        mark = "* " if changed else "  "
        style = "bold green" if changed else ("" if origin != DEFAULT else "dim")
        lines = shown(value)
        if name == "data.sources" and "{" in lines:  # tables: one per line
            lines = "\n".join(map(shown, value))
        cells = (mark + name, lines, origin, resolved.evidence.get(name, ""))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    console = Console(highlight=False)
    show(console, table)
    console.print("* differs from the default")
