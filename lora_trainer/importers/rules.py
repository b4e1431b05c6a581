"""Rules that read a key, and kinds of values. Each kind raises ValueError naming what it expects."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.importers.reading import Around, KeyRule, Took, located

Kind = Callable[[Any], Any]
MOST_PROMPT_BYTES = 1 << 20  # of a file of prompts
OFF: tuple[Any, ...] = (False, 0, 0.0, "0", "false", "none", [], {})


def whole(value: Any) -> int:
    found = number(value)
    if not found.is_integer():
        raise ValueError("a whole number")
    return int(found)


def number(value: Any) -> float:
    """Also from text, since some of these files quote numbers."""
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        raise ValueError("a number") from None
    if not math.isfinite(found):
        raise ValueError("a number")
    return found


def truth(value: Any) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
    found = words.get(str(value).strip().lower())
    if found is None:
        raise ValueError("true or false")
    return found


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text")
    return value


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return list(value)
    raise ValueError("a list of text")


def side(value: Any) -> int:
    """The side of a square of the same area: 512, "512", "512,768", "512x768", [512, 768]."""
    parts = re.split(r"[,x×]", value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    sides = [whole(part) for part in parts]
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError("one or two sides in pixels")
    return round(math.sqrt(sides[0] * sides[-1]))


def same(ours: str, kind: Kind) -> KeyRule:
    """The same setting under another name."""
    return KeyRule("mapped", (ours,), "", lambda value, around: Took({ours: kind(value)}))


def changed(ours: str, kind: Kind, why: str) -> KeyRule:
    """Almost the same setting; `why` says how it differs."""
    return KeyRule("changed", (ours,), why, lambda value, around: Took({ours: kind(value)}))


def unless_off(ours: str, kind: Kind, why: str = "") -> KeyRule:
    """A setting, or several, that 0 or false turns off; `why` says how it differs when it is on."""

    def read(value: Any, around: Around) -> Took:
        if not is_on(value):
            return Took({}, "off", "ignored")
        return Took(dict.fromkeys(ours.split(), kind(value)))

    return KeyRule("changed" if why else "mapped", tuple(ours.split()), why, read)


def switch(ours: str, setting: Any, why: str = "") -> KeyRule:
    """A switch that sets `setting` when it is on and nothing when it is off; `why` says how it differs when it is on."""

    def read(value: Any, around: Around) -> Took:
        return Took({ours: setting}) if truth(value) else Took({}, "off", "ignored")

    return KeyRule("changed" if why else "mapped", (ours,), why, read)


def only_with(key: str, word: str, ours: str, kind: Kind) -> KeyRule:
    """A key that counts only if another key has a certain value."""

    def read(value: Any, around: Around) -> Took:
        if word not in str(around[key]).lower():
            return Took({}, f"means nothing without {key} = {word}", "ignored")
        return Took({ours: kind(value)})

    return by(read, ours)


def lacking(why: str, off: tuple[Any, ...] = ()) -> KeyRule:
    """A key that affects training and does not exist here; nothing is lost if it is off, or one of the values `off`."""

    def read(value: Any, around: Around) -> Took:
        if _plain(value) in map(_plain, off) if off else not is_on(value):
            return Took({}, "off, or what is done here", "ignored")
        return Took({})

    return KeyRule("changed", (), why, read)


def lost_if(is_lost: Callable[[Any, Around], bool], why: str, otherwise: str = "as here") -> KeyRule:
    """A key that affects training and does not exist here, where `is_lost` holds for its value and the other keys."""

    def read(value: Any, around: Around) -> Took:
        return Took({}) if is_lost(value, around) else Took({}, otherwise, "ignored")

    return by(read, "", why, changes=True)


def _plain(value: Any) -> float | str:
    """A number, whether it is quoted or not, else the text in lower case."""
    try:
        return number(value)
    except ValueError:
        return str(value).strip().lower()


def nothing(why: str) -> KeyRule:
    """A key that does not affect what is learned."""
    return KeyRule("ignored", (), why, lambda value, around: Took({}))


@cache
def _unused_tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("unused_keys.toml").read_text(encoding="utf-8"))


def unused_keys(program: str) -> dict[str, KeyRule]:
    """The rules of a program's keys that set nothing here, `nothing` and `lacking` of `unused_keys.toml`."""
    rules: dict[str, KeyRule] = {}
    reasons = _unused_tables()["reasons"]
    for row in _unused_tables()[program]:
        written = row["nothing"] if "nothing" in row else row["lacking"]
        why = reasons.get(written, written)
        rule = nothing(why) if "nothing" in row else lacking(why, tuple(row.get("off", ())))
        parts = [f"{part}." for part in row.get("under", ())] or [""]
        rules.update({f"{part}{name}": rule for part in parts for name in row["names"].split()})
    return rules


def part_of(key: str, ours: str = "") -> KeyRule:
    """A key that is read together with another."""
    why = f"read together with {key}"
    return KeyRule("mapped", (ours,) if ours else (), why, lambda value, around: Took({}, why))


def by(read: Callable[[Any, Around], Took], ours: str, why: str = "", *, changes: bool = False) -> KeyRule:
    """A key with its own function."""
    return KeyRule("changed" if changes else "mapped", tuple(ours.split()), why, read)


def path_to(ours: str) -> KeyRule:
    """A path, resolved against the file's folder."""
    return KeyRule("mapped", (ours,), "", lambda value, around: Took({ours: located(around.folder, text(value))}))


def other_file(ours: str) -> KeyRule:
    """A key that names another file, which is read with this one."""
    return KeyRule(
        "mapped",
        (ours,),
        "",
        lambda value, around: Took({}, f"{ours}, read from {located(around.folder, text(value))}"),
    )


def is_on(value: Any) -> bool:
    return (value.strip().lower() if isinstance(value, str) else value) not in OFF


def count(around: Around, key: str, otherwise: int = 1) -> int:
    """A whole number of another key, else `otherwise`; a wrong value is reported for that key."""
    try:
        return max(1, whole(around[key]))
    except ValueError:
        return otherwise


def lookup(words: Mapping[str, Any], value: Any, what: str) -> Any:
    """The entry of a word, ignoring case."""
    found = {word.lower(): entry for word, entry in words.items()}.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"{what} among {', '.join(words)}")
    return found
