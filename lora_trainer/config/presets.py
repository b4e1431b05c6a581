"""Presets: plain TOML files of settings and the evidence for each, in four kinds.

VRAM presets ("tiers") fit a run to the GPU's memory, training presets ("goals") set quality and
speed, base presets ("bases") what well-known models of a family were made for, family presets set what
a model family needs. Of the first three kinds no two have a setting in common, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.config.layers import Layer, file_layer
from lora_trainer.config.toml import read_toml
from lora_trainer.core.errors import Problem, nearest

AUTO, CHOSEN = "auto", "preset "
TIERS, GOALS, BASES, FAMILIES = "tiers", "goals", "bases", "families"
# A run takes one of each of these kinds.
CHOICES = {TIERS: "VRAM preset", GOALS: "training preset", BASES: "base preset"}

# A GPU reports less than its name says: a 16 GB T4 14.56 GiB, a 24 GB A10 21.98 GiB. An 11 GB
# GPU (10.91 GiB) must not pass for 12 GB.
_REPORTED_SHARE = 0.91


@dataclass(frozen=True)
class Preset:
    """One file: `kind` is its folder, `description` its first line, a comment, `family` that of a base preset's models.

    `model_names` is a regular expression for the names of models that a base preset is for; case does not matter.

    `evidence` has a clause for each `section.key` that it sets, such as `published: kohya's docs/train_network.md`:
    `measured` is on the built-in base model with three seeds and two datasets (one where it says so), the 95 % interval of
    the paired difference above 0; `published` names who; `untested` is the rest.
    """

    name: str
    kind: str
    description: str
    values: Mapping[str, Any]
    evidence: Mapping[str, str]
    family: str = ""
    model_names: str = ""


@dataclass(frozen=True)
class ChosenPresets:
    """The layers of the selected presets, notes for the user, and problems."""

    layers: tuple[Layer, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def preset_folder() -> Path:
    """Where the preset files are: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "presets_data"
    return inside if inside.is_dir() else package.parent / "presets"


@cache
def presets() -> dict[str, Preset]:
    """Every preset by name: VRAM presets by size, then training presets, base presets and family presets."""
    found = [_read(path) for path in sorted(preset_folder().rglob("*.toml"))]
    kinds = [*CHOICES, FAMILIES]
    found.sort(key=lambda preset: (kinds.index(preset.kind), tier_gb(preset.name) or 0))
    return {preset.name: preset for preset in found}


def _read(path: Path) -> Preset:
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    layer, (kind, *family) = file_layer(path.stem, path), path.relative_to(preset_folder()).parts[:-1]
    description = first_line.lstrip("# ").strip()
    if kind != BASES:
        return Preset(path.stem, kind, description, layer.values, layer.evidence)
    names = read_toml(path)["recognized"]["names"]
    return Preset(path.stem, kind, description, layer.values, layer.evidence, "".join(family), names)


def preset_layer(name: str, origin: str) -> Layer:
    """A preset's settings with their evidence, as a layer of that name."""
    return Layer(origin, presets()[name].values, presets()[name].evidence)


def selectable() -> list[str]:
    """The names that --preset takes, without `auto`."""
    return [name for name, preset in presets().items() if preset.kind != FAMILIES]


def tier_gb(name: str) -> int | None:
    """12 for `12gb`."""
    number = name.removesuffix("gb")
    return int(number) if name.endswith("gb") and number.isdigit() else None


def family_layers(family: str, *, builtin: bool) -> list[Layer]:
    """The layer of the family, and over it that of the built-in miniature.

    An option of a preset that the family does not support is dropped later (config/options.py).
    """
    names = [family, "builtin"] if builtin else [family]
    known = presets()
    return [preset_layer(name, f"family preset {name}") for name in names if name in known]


def preset_layers(requested: Sequence[str], memory_gib: float | None = None) -> ChosenPresets:
    """Layers for the values of --preset, each of which may name several presets with commas.

    `memory_gib` is what the CUDA GPU reports, None without one; only `auto` uses it.
    """
    names = [name.strip() for part in requested for name in part.split(",") if name.strip()]
    names = list(dict.fromkeys(names))
    problems = [
        Problem("unknown_preset", f"There is no preset named {name}.", nearest(name, [*selectable(), AUTO]))
        for name in names
        if name != AUTO and name not in selectable()
    ]
    known = [name for name in names if name == AUTO or name in selectable()]
    for kind, word in CHOICES.items():
        same = [name for name in known if (TIERS if name == AUTO else presets()[name].kind) == kind]
        if len(same) > 1:
            message = f"--preset names {len(same)} {word}s: {' and '.join(same)}."
            others = " and a ".join(other for other in CHOICES.values() if other != word)
            problems.append(
                Problem("presets_exclude_each_other", message, f"Keep one; a {word} can be combined with a {others}.")
            )
    layers, notes = [], []
    for name in known:
        if name == AUTO:
            layer, note = auto_layer(memory_gib)
            layers.append(layer)
            notes.append(note)
        else:
            layers.append(preset_layer(name, CHOSEN + name))
    return ChosenPresets(tuple(layers), tuple(notes), tuple(problems))


def refuse_other_family(layers: Sequence[Layer], family: str) -> list[Problem]:
    """A problem for each base preset among the layers that is for models of another family."""
    chosen = [preset for layer in layers if (preset := presets().get(layer.name.removeprefix(CHOSEN)))]
    return [
        Problem(
            "preset_of_other_family",
            f"--preset {each.name} is for models of the family {each.family}, and this one is of {family}.",
            f"Name such a model with --model, in `plan` set --set model.family={each.family}, or remove {each.name}.",
        )
        for each in chosen
        if each.kind == BASES and each.family != family
    ]


def auto_layer(memory_gib: float | None) -> tuple[Layer, str]:
    """The VRAM preset for the GPU, and a sentence about the choice."""
    tiers = sorted(size for name in selectable() if (size := tier_gb(name)) is not None)
    if memory_gib is None:
        note = "preset auto: no GPU found; using 12gb without its memory limit"
        return _without_limit("12gb"), note
    found = f"preset auto: the GPU reports {memory_gib:.1f} GiB"
    if memory_gib > tiers[-1]:
        name = f"{tiers[-1]}gb"
        return _without_limit(name), f"{found}; using {name} without its memory limit"
    fitting = [size for size in tiers if memory_gib >= _REPORTED_SHARE * size]
    name = f"{fitting[-1] if fitting else tiers[0]}gb"
    smaller = "" if fitting else ", the smallest VRAM preset, though the GPU has less"
    return preset_layer(name, f"preset auto ({name})"), f"{found}; using {name}{smaller}"


def _without_limit(name: str) -> Layer:
    layer = preset_layer(name, f"preset auto ({name})")
    memory = {key: value for key, value in layer.values["memory"].items() if key != "limit_gib"}
    return replace(layer, values={**layer.values, "memory": memory})
