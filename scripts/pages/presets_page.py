"""Write the evidence of the presets' values into docs/presets.md, from the files in presets/."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from lora_trainer.config.presets import BASES, FAMILIES, GOALS, TIERS, presets
from lora_trainer.config.toml import shown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "presets.md"
HEADING = "## Evidence"
TITLES = {GOALS: "Training presets", TIERS: "VRAM presets", BASES: "Base presets", FAMILIES: "Family presets"}
INTRODUCTION = f"""{HEADING}
Each value of a preset has its evidence, which `presets show` and `--explain` print beside it:

- *measured*: on the built-in base model, with three seeds and two datasets (one where it says so), and the 95 % interval of the paired
  difference above 0
- *published*: by whom
- *untested*: neither; a choice

COUNTS

A preset file keeps its evidence in the table `[evidence]`; `python scripts/write_docs.py` writes this section from them.
"""


def presets_page(page: str) -> str:
    """The page with its last section written anew."""
    return page.partition(HEADING)[0] + evidence_section()


def evidence_section() -> str:
    """A table for each kind of preset; presets that share a value and its evidence share a row."""
    kinds = [clause.partition(":")[0] for preset in presets().values() for clause in preset.evidence.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("measured", "published", "untested"))
    parts = [INTRODUCTION.replace("COUNTS", f"Of {len(kinds)} values today: {counts}.")]
    for kind, title in TITLES.items():
        rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for preset in presets().values():
            if preset.kind == kind:
                for name, clause in preset.evidence.items():
                    section, _, key = name.partition(".")
                    rows[name, shown(preset.values[section][key]), clause].append(f"`{preset.name}`")
        lines = [
            f"| `{name}` | `{value}` | {', '.join(names)} | {clause} |"
            for (name, value, clause), names in sorted(rows.items())
        ]
        parts.append(
            "\n".join([f"### {title}", "| setting | value | presets | evidence |", "|---|---|---|---|", *lines, ""])
        )
    return "\n".join(parts)
