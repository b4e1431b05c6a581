"""Write `docs/import.md`, the tables of all keys that `lora-trainer import` knows, from the code.

    python scripts/write_import_docs.py

A test holds the file equal to what this writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.config.imports import (
    aitoolkit_keys,
    diffusers_flags,
    kohya,
    kohya_dataset,
    kohya_gui,
    onetrainer_concepts,
    onetrainer_keys,
    simpletuner_keys,
)
from lora_trainer.config.imports.reading import Rule
from lora_trainer.config.toml import shown
from lora_trainer.core.io import write_text

PAGE = Path(__file__).resolve().parents[1] / "docs" / "import.md"

INTRODUCTION = """# Configs of other trainers

Written by `scripts/write_import_docs.py` from `lora_trainer/config/imports`; edit that, not this page.

```
lora-trainer import kohya.toml --output cat.toml
lora-trainer train --config cat.toml
```

The kind of file is told by what stands in it. Every key is listed, in this order: keys that are not known; keys that
change in meaning (how); defaults of the other trainer that differ from ours, written out so that the run is the same;
keys that are ignored (why); keys that mean the same here. `--json` gives all of it as one document. The TOML names
behind each setting the key that it comes from. An existing file is never overwritten.

A setting below is named `source.flip` where each dataset has its own. The listing names where it stands in the TOML:
`data.flip` where all datasets agree, else `data.sources[1].flip`. What another key overrides is said to be overridden.

Relative paths are looked for from the file's folder and the two above it, since these programs are started from the root
of their checkout. A value that is out of range here is left out and said; settings that contradict each other here
(a schedule beside a schedule-free optimizer) give way and are said. Values of keys that hold passwords are not shown.

Only plain values are read: a YAML tag that would make an object is refused, and so are files above 4 MB and aliases
that multiply beyond 100,000 values. One thing no import can carry over: all layers of a part's LoRA have one rank here.

How times of flow matching are drawn (docs/flow.md) is carried over where it is the same here. Programs that take the n-th
of their scheduler's timesteps count from noise, so the mean of their logits changes its sign.
Scripts for SD3 whose loss is of clean latents count a time by its square; that is said, and `sigma_sqrt` undoes it exactly.
What only diffusion has (min-SNR, noise offset, multi-resolution noise, zero terminal SNR) is left out of configs for flows.

`--data dataset.toml` reads a kohya dataset TOML without any import, and refuses keys that it does not know.
"""
TABLES: tuple[tuple[str, str, Mapping[str, Rule], Mapping[str, Any]], ...] = (
    ("kohya config", "`train_network.py --config_file`: section names mean nothing.", kohya.RULES, kohya.DEFAULTS),
    (
        "kohya dataset TOML",
        "A subset beats its dataset, which beats general. What all subsets share is said once; the rest in sources.",
        kohya_dataset.RULES,
        kohya_dataset.DEFAULTS,
    ),
    ("kohya GUI", "The JSON that kohya's GUI saves.", kohya_gui.MORE_RULES, kohya_gui.DEFAULTS),
    ("ai-toolkit", "The first process of a job.", aitoolkit_keys.RULES, aitoolkit_keys.DEFAULTS),
    (
        "ai-toolkit datasets",
        "Each of `datasets`.",
        aitoolkit_keys.DATASET_RULES,
        aitoolkit_keys.DATASET_DEFAULTS,
    ),
    (
        "SimpleTuner",
        "`config.json`, with or without dashes before the keys, and the file that `data_backend_config` names.",
        simpletuner_keys.RULES,
        simpletuner_keys.DEFAULTS,
    ),
    (
        "SimpleTuner datasets",
        "`multidatabackend.json`. `repeats: 0` means seen once, which is 1 here.",
        simpletuner_keys.BACKEND_RULES,
        simpletuner_keys.BACKEND_DEFAULTS,
    ),
    ("OneTrainer", "Its JSON; nested keys have dots.", onetrainer_keys.RULES, onetrainer_keys.DEFAULTS),
    (
        "OneTrainer concepts",
        "Inline or in the file that `concept_file_name` names.",
        onetrainer_concepts.CONCEPT_RULES,
        onetrainer_concepts.CONCEPT_DEFAULTS,
    ),
    (
        "diffusers flags",
        "A shell script or command of diffusers' LoRA scripts.",
        diffusers_flags.RULES,
        diffusers_flags.OF_ALL,
    ),
)


def import_page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_part(*table) for table in TABLES)])


def _part(title: str, text: str, rules: Mapping[str, Rule], defaults: Mapping[str, Any]) -> str:
    rows = [_row(key, rule, defaults.get(key)) for key, rule in rules.items() if rule.verdict != "ignored"]
    ignored: dict[str, list[str]] = {}
    for key, rule in rules.items():
        if rule.verdict == "ignored":
            ignored.setdefault(rule.why, []).append(f"`{key}`")
    lines = [f"- {why}: {', '.join(keys)}" for why, keys in ignored.items()]
    table = ["| key | becomes | how it differs | its default |", "|---|---|---|---|", *rows]
    return "\n".join([f"## {title}\n", f"{text}\n", *table, "\nIgnored:\n", *lines, ""])


def _row(key: str, rule: Rule, default: Any) -> str:
    becomes = ", ".join(f"`{name}`" for name in rule.ours) or "–"
    why = rule.why if rule.verdict == "changed" else ""
    return f"| `{key}` | {becomes} | {why} | {'' if default is None else f'`{shown(default)}`'} |"


if __name__ == "__main__":
    write_text(PAGE, import_page())
