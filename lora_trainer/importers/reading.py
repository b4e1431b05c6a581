"""The result of an import: each key of the original with what became of it, and our settings.

`mapped` keys mean the same here. `changed` keys train something else, or differently, which is
explained. `ignored` keys do not affect what is learned. `unknown` keys are in none of our tables.
`default` lines are keys that the original does not set and whose default differs from ours.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from lora_trainer.config.toml import shown
from lora_trainer.core.errors import Problem

SECRET = re.compile(r"(huggingface|hf|hub|access|api|auth)_?(token|key)|secret|password", re.IGNORECASE)
Verdict = Literal["mapped", "changed", "ignored", "unknown", "default"]
SOURCES = "data.sources"


@dataclass(frozen=True)
class Line:
    """One key of the original, its value, and what became of it."""

    key: str
    value: Any
    verdict: Verdict
    settings: Mapping[str, Any]
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "value": self.value,
            "verdict": self.verdict,
            "settings": dict(self.settings),
            "why": self.why,
        }


@dataclass(frozen=True)
class Took:
    """What a value means here: settings by `section.key`, and how the meaning differs.

    `verdict` None means the rule's own.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Around:
    """What a rule may read besides its value: all keys with defaults filled in, and the original's folder."""

    keys: Mapping[str, Any]
    folder: Path

    def __getitem__(self, key: str) -> Any:
        value = self.keys.get(key)
        return None if is_empty(value) else value


@dataclass(frozen=True)
class KeyRule:
    """How to read a key. The documentation shows `verdict`, `ours` and `why`.

    `read` raises ValueError with the kind of value that it expects ("a whole number").
    """

    verdict: Verdict
    ours: tuple[str, ...]
    why: str
    read: Callable[[Any, Around], Took]


@dataclass
class Reading:
    """An import in progress. `origin` names for each setting what set it."""

    tool: str
    path: Path
    lines: list[Line] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def owner(self) -> str:
        """`kohya's`, `diffusers'`."""
        return self.tool + ("'" if self.tool.endswith("s") else "'s")

    def take(self, key: str, value: Any, rule: KeyRule, around: Around, *, default: bool = False) -> None:
        """Read one key by its rule; a value of the wrong kind becomes a problem."""
        if is_empty(value):
            self.lines.append(Line(key, value, "ignored", {}, "not set"))
            return
        try:
            took = rule.read(value, around)
        except ValueError as error:
            message = f"{self.path}: {key} = {shown(value)} is not {error}."
            self.problems.append(Problem("setting_invalid", message, "Correct it in that file, or remove it."))
            return
        verdict = took.verdict or rule.verdict
        why = took.why or ("" if verdict == "mapped" else rule.why)
        if default:
            if not took.settings and verdict == "ignored":
                return
            why = f"{self.owner} default{f': {why}' if why else ''}"
            verdict = "default" if took.settings else verdict  # a default that is not used here is a change
        self.put(Line(key, value, verdict, took.settings, why))

    def put(self, line: Line) -> None:
        """Add a line and its settings; sources are appended, any other setting is overwritten."""
        if SECRET.search(line.key) and not is_empty(line.value):
            line = replace(line, value="(hidden)")
        self.lines.append(line)
        for name, value in line.settings.items():
            self.settings[name] = [*self.settings.get(name, []), *value] if name == SOURCES else value
            self.origin[name] = (
                f"{self.owner} default ({line.key.strip('()')})" if line.verdict == "default" else line.key
            )

    def take_all(
        self,
        keys: Mapping[str, Any],
        rules: Mapping[str, KeyRule],
        defaults: Mapping[str, Any],
        names: Mapping[str, str] | None = None,
        around: Around | None = None,
    ) -> None:
        """Read every key in the order of the rules, then defaults of unset keys, then unknown keys.

        `names` maps keys to a second name for rules; `around` replaces what rules may read.
        """
        filled = {**defaults, **{key: value for key, value in keys.items() if not is_empty(value)}}
        filled.update({name: filled[key] for key, name in (names or {}).items() if key in filled})
        around = around or Around(filled, self.path.parent)
        for key, rule in rules.items():
            if key in keys:
                self.take(key, keys[key], rule, around)
            if is_empty(keys.get(key)) and key in defaults:
                self.take(key, defaults[key], rule, around, default=True)
        for key, value in keys.items():
            if key not in rules and value == {}:
                self.lines.append(Line(key, value, "ignored", {}, "not set"))
            elif key not in rules:
                self.put(Line(key, value, "unknown", {}, f"{self.tool} may know it; this program does not"))


def pairs(written: Any) -> dict[str, str]:
    """`weight_decay=0.1 betas=0.9,0.99`, as text or as a list, as a table."""
    words = written.split() if isinstance(written, str) else written if isinstance(written, list) else []
    return {key: value for key, equals, value in (str(word).partition("=") for word in words) if equals}


def is_empty(value: Any) -> bool:
    """Whether the value means that the key is not set."""
    return value is None or (isinstance(value, str) and value.strip() in ("", "None"))


def found_upwards(folder: Path, written: str) -> Path | None:
    """A file that the original names: in its folder, one above it, or the current folder; else None."""
    own = folder.resolve()
    for base in (own, *own.parents, Path.cwd()):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # not a file name, or an unknown home folder
            if (found := base / Path(written).expanduser()).is_file():
                return found
    return None


def located(folder: Path, written: str) -> str:
    """A path of the original as an absolute path.

    Relative ones are searched in the file's folder and the two above it, since programs are
    started from the root of their checkout; if not found, they are relative to the file's folder.
    """
    if "\0" in written:
        raise ValueError("a path")
    path = Path(written)
    with contextlib.suppress(RuntimeError):  # an unknown home folder
        path = path.expanduser()
    if path.is_absolute() or PureWindowsPath(written).is_absolute():
        return str(path)
    for base in (folder, *folder.resolve().parents[:2]):
        with contextlib.suppress(OSError):  # a name that is too long for the disk
            if (base / path).exists():
                return str((base / path).resolve())
    return str((folder / path).resolve())
