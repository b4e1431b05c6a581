"""Write `docs/import.md`, the tables of all keys that `lora-trainer import` knows, from the code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.toml import shown
from lora_trainer.importers import (
    aitoolkit,
    diffusers_flags,
    kohya,
    kohya_dataset,
    kohya_gui,
    musubi,
    musubi_dataset,
    onetrainer,
    onetrainer_concepts,
    simpletuner,
)

if TYPE_CHECKING:
    from lora_trainer.importers.reading import KeyRule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "import.md"

INTRODUCTION = """# Configs of other trainers

`lora-trainer import` converts the config of another trainer, and this page lists every key that it knows.

```
lora-trainer import kohya.toml --output cat.toml
lora-trainer train --config cat.toml
```

Written by `scripts/write_docs.py` from `lora_trainer/importers`; edit that, not this page.

The command recognizes the kind of file by its content. It lists every key, in this order: unknown keys; keys whose
meaning changes (how); defaults of the other trainer that differ from ours, written out so that the run is the same;
ignored keys (why), which change what is learned by rounding at most; keys that mean the same here. `--json` prints all of it as one document. In the TOML a comment behind
each setting names the key that it comes from. An existing file is never overwritten.

A setting is called `source.flip` below where each dataset has its own. The command prints its place in the TOML:
`data.flip` where all datasets agree, else `data.sources[1].flip`. It names keys that another key overrides.

Relative paths are looked up from the file's folder and the two above it, because these programs are started from the root
of their checkout. A value that is out of range here is skipped and reported; so are settings that contradict each other
here (a schedule with a schedule-free optimizer). Values of keys that hold passwords are not shown.

Only plain values are read: YAML tags that create objects are refused, and so are files above 4 MB and aliases that expand
beyond 100,000 values. Ranks and alphas of blocks and of convolutions become patterns (`lora.rank_pattern`) with every `lora.type` that
follows them ([adapters.md](adapters.md)), and the factor of a LoKr is `lora.lokr_factor`.

Timestep sampling of flow matching (docs/flow.md) is imported where it is the same here. Programs that take the n-th of
their scheduler's timesteps count from noise, so the mean of their logits changes its sign. SD3 scripts that compute the
loss on clean latents weight a timestep by its square; the command reports it, and `sigma_sqrt` undoes it exactly. Options
that only diffusion has (min-SNR, noise offset, multi-resolution noise, zero terminal SNR) are skipped for flow models.

`--data dataset.toml` reads a dataset TOML of kohya or musubi-tuner without any import, and refuses unknown keys.
"""
TABLES: tuple[tuple[str, str, Mapping[str, KeyRule], Mapping[str, Any]], ...] = (
    ("kohya config", "`train_network.py --config_file`: section names mean nothing.", kohya.RULES, kohya.DEFAULTS),
    (
        "kohya dataset TOML",
        "A subset overrides its dataset, which overrides general. Values that all subsets share are written once, the rest in sources.",
        {**kohya_dataset.DATASET_RULES, **kohya_dataset.SUBSET_RULES},
        kohya_dataset.DEFAULTS,
    ),
    (
        "musubi-tuner dataset TOML",
        "These keys beside those of kohya's dataset TOML, in `[[datasets]]` themselves.",
        {**musubi_dataset.RULES, "resolution": kohya_dataset.RULES["resolution"]},
        musubi_dataset.DEFAULTS,
    ),
    (
        "musubi-tuner",
        "A command of its `*_train_network.py`, with the TOML of `--config_file`, or that TOML. Video models are refused.",
        musubi.RULES,
        {**musubi.DEFAULTS, "discrete_flow_shift": 1.0},
    ),
    ("kohya GUI", "The JSON that kohya's GUI saves.", kohya_gui.MORE_RULES, kohya_gui.DEFAULTS),
    ("ai-toolkit", "The first process of a job.", aitoolkit.RULES, aitoolkit.DEFAULTS),
    (
        "ai-toolkit datasets",
        "Each of `datasets`.",
        aitoolkit.DATASET_RULES,
        aitoolkit.DATASET_DEFAULTS,
    ),
    (
        "SimpleTuner",
        "`config.json`, with or without dashes before the keys, and the file that `data_backend_config` names.",
        simpletuner.RULES,
        simpletuner.DEFAULTS,
    ),
    (
        "SimpleTuner datasets",
        "`multidatabackend.json`. `repeats: 0` means once, which is 1 here.",
        simpletuner.BACKEND_RULES,
        simpletuner.BACKEND_DEFAULTS,
    ),
    ("OneTrainer", "Its JSON; nested keys have dots.", onetrainer.RULES, onetrainer.DEFAULTS),
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


def _part(title: str, text: str, rules: Mapping[str, KeyRule], defaults: Mapping[str, Any]) -> str:
    rows = [_row(key, rule, defaults.get(key)) for key, rule in rules.items() if rule.verdict != "ignored"]
    ignored: dict[str, list[str]] = {}
    for key, rule in rules.items():
        if rule.verdict == "ignored":
            ignored.setdefault(rule.why, []).append(f"`{key}`")
    lines = [f"- {why}: {', '.join(keys)}" for why, keys in ignored.items()]
    table = ["| key | becomes | how it differs | its default |", "|---|---|---|---|", *rows]
    return "\n".join([f"## {title}\n", f"{text}\n", *table, "\nIgnored:\n", *lines, ""])


def _row(key: str, rule: KeyRule, default: Any) -> str:
    becomes = ", ".join(f"`{name}`" for name in rule.ours) or "–"
    why = rule.why if rule.verdict == "changed" else ""
    return f"| `{key}` | {becomes} | {why} | {'' if default is None else f'`{shown(default)}`'} |"
