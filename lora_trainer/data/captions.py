"""Captions as they are trained: from what was written to the texts that are cached. No torch.

In this order, as kohya's scripts where they have the same:

1. one of several lines (`wildcards`), 2. `prefix` and `suffix`, 3. one of each `{a|b|c}`
(`wildcards`), 4. `trigger` in place of `[trigger]`, in front where it is missing,
5. tags split at `separator`, those kept set aside, 6. `shuffle`, 7. `tag_dropout`.

All of it is a function of the written caption, the options and the number of the variant,
never of a run's seed: runs of other seeds share the cached texts. Which variant a sample is
trained on, and whether on the empty caption, is decided when it is read, by position.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from lora_trainer.core.randomness import position_turn, position_uniform
from lora_trainer.data.prompt_weights import plain
from lora_trainer.data.wildcards import Pick, filled

if TYPE_CHECKING:
    from lora_trainer.config.schema import CaptionsSection
    from lora_trainer.data.sample import Sample

TRIGGER = "[trigger]"
OPENING, CLOSING = "([", ")]"


@dataclass(frozen=True)
class Texts:
    """What becomes of a written caption.

    `canonical` has the first of all choices, all of its tags in their order, no weights: it is
    used to generate images and to measure validation losses. `variants` are trained in turn; one
    where nothing varies.
    """

    canonical: str
    variants: tuple[str, ...]


def make_texts(written: str, rules: CaptionsSection) -> Texts:
    """The texts of one caption."""
    whole = _first(written, rules)
    variants = [whole]
    if rules.wildcards or rules.shuffle or rules.tag_dropout:
        variants = _variants(written, rules)
    if len(set(variants)) == 1:
        variants = variants[:1]
    return Texts(plain(whole) if rules.prompt_weighting else whole, tuple(variants))


def canonical_text(sample: Sample, rules: Sequence[CaptionsSection]) -> str:
    """A written caption as it is counted and measured; as it is where no rules are known."""
    if sample.source >= len(rules):
        return sample.caption
    own = rules_of(sample, rules)
    whole = _first(sample.caption, own)
    return plain(whole) if own.prompt_weighting else whole


def _first(written: str, rules: CaptionsSection) -> str:
    """The first of all choices, with nothing shuffled or dropped."""
    return _whole(_filled(written, rules, lambda count, place: 0), rules)


def has_trigger(text: str, trigger: str | None) -> bool:
    """Whether a text contains the trigger as a word of its own, in any case; true without a trigger."""
    if not trigger:
        return True
    return _pattern(trigger).search(text) is not None


def without_trigger(text: str, trigger: str) -> str:
    """The text without the trigger, and without the comma or the double space that it leaves."""
    parts = (" ".join(part.split()) for part in _pattern(trigger).sub("", text).split(","))
    return ", ".join(part for part in parts if part)


@lru_cache(maxsize=64)
def _pattern(trigger: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(trigger)}(?!\w)", re.IGNORECASE)


def _filled(written: str, rules: CaptionsSection, pick: Pick) -> str:
    """One line, prefix, suffix, wildcards, and the trigger in its place."""
    text = written
    if rules.wildcards:
        lines = [line.strip() for line in written.splitlines() if line.strip()]
        text = lines[pick(len(lines), -1)] if lines else ""
    text = _joined(_joined(rules.prefix, text), rules.suffix)
    if rules.wildcards:
        text = filled(text, pick)
    return text.replace(TRIGGER, rules.trigger_word) if rules.trigger_word else text


def _joined(before: str, after: str) -> str:
    """Both with a space between them, where neither is empty or brings one."""
    space = "" if not before or not after or before[-1].isspace() or after[0].isspace() else " "
    return before + space + after


@dataclass(frozen=True)
class _Tags:
    """Tags kept at the front, those that are shuffled and dropped, and those kept at the end."""

    front: list[str]
    free: list[str]
    back: list[str]

    def text(self, rules: CaptionsSection, free: Sequence[str] | None = None) -> str:
        """Joined, with other tags in place of the free ones."""
        separator = rules.separator if rules.separator[-1].isspace() else f"{rules.separator} "
        return separator.join([*self.front, *(self.free if free is None else free), *self.back])


def _tags(text: str, rules: CaptionsSection) -> _Tags:
    """The tags of a text, the trigger put in front where it is missing."""
    missing = [rules.trigger_word] if rules.trigger_word and not has_trigger(text, rules.trigger_word) else []
    keep = rules.keep_tokens_separator
    if keep and keep in text:
        front, free, back = (_split(part, rules) for part in [*text.split(keep, 2), ""][:3])
    else:
        tags = _split(text, rules)
        front, free, back = tags[: rules.keep_tokens], tags[rules.keep_tokens :], []
    return _Tags([*missing, *front], free, back)


def _split(text: str, rules: CaptionsSection) -> list[str]:
    """A text split at its separators, but not inside of prompt-weighting brackets."""
    found = text.split(rules.separator)
    if rules.prompt_weighting:
        whole: list[str] = []
        depth = 0
        for part in found:
            if depth > 0:
                whole[-1] += rules.separator + part
            else:
                whole.append(part)
            bare = re.sub(r"\\.", "", part)
            depth = max(
                0, depth + sum(bare.count(each) for each in OPENING) - sum(bare.count(each) for each in CLOSING)
            )
        found = whole
    return [tag for tag in map(str.strip, found) if tag]


def _whole(text: str, rules: CaptionsSection) -> str:
    """A text with nothing shuffled or dropped: as it is, but for the trigger and the keep separator."""
    if rules.keep_tokens_separator and rules.keep_tokens_separator in text:
        return _tags(text, rules).text(rules)
    if has_trigger(text, rules.trigger_word):
        return text
    assert rules.trigger_word is not None
    return _Tags([rules.trigger_word], [text] if text else [], []).text(rules)


def _variants(written: str, rules: CaptionsSection) -> list[str]:
    """All texts that are trained; random draws depend on the caption and the number of the text."""
    name = hashlib.sha256(written.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    splits = rules.shuffle or rules.tag_dropout
    found: list[str] = []
    tags: _Tags | None = None
    for number in range(rules.variants):
        if rules.wildcards or tags is None:
            text = _filled(written, rules, partial(_picked, name, number))
            if not splits:
                found.append(_whole(text, rules))
                continue
            tags = _tags(text, rules)
        found.append(tags.text(rules, _free(tags.free, name, rules, number)))
    return found


def _picked(name: str, number: int, count: int, place: int) -> int:
    """Which of so many choices a text takes: all are taken once before one is taken again."""
    turn, spot = divmod(number, count)
    return _orders(count, turn + 1, name, "wildcard", place)[turn][spot]


def _free(tags: Sequence[str], name: str, rules: CaptionsSection, number: int) -> list[str]:
    """The free tags of one of the texts, shuffled and dropped."""
    count = len(tags)
    order: Sequence[int] = range(count)
    if rules.shuffle and count:
        order = _orders(count, rules.variants, name, "shuffle")[number]
    if not rules.tag_dropout:
        return [tags[place] for place in order]
    missing, trigger = _missing(count, name, rules.variants, rules.tag_dropout), rules.trigger_word
    return [
        tags[place]
        for place in order
        if number not in missing[place] or (trigger and has_trigger(tags[place], trigger))
    ]


@lru_cache(maxsize=64)
def _missing(count: int, name: str, variants: int, share: float) -> list[list[int]]:
    """The variants that drop each of so many tags: its share of them, on average where that is no whole number."""
    orders = _orders(variants, count, name, "tag_dropout")
    shares = _hash_values(count, name, "tag_share")
    return [order[: int(variants * share + word / 2**32)] for order, word in zip(orders, shares, strict=True)]


@lru_cache(maxsize=64)
def _orders(count: int, rounds: int, *position: int | str) -> list[list[int]]:
    """The numbers below `count` in so many orders that the position draws; more rounds leave the first ones as they are."""
    values = _hash_values(count * rounds, *position)
    numbers = range(count)
    return [
        sorted(numbers, key=values[first : first + count].__getitem__) for first in range(0, len(values), count or 1)
    ]


def _hash_values(count: int, *position: int | str) -> tuple[int, ...]:
    """Numbers below 2^32 that the position draws: one hash for all, as captions are many."""
    text = "\x1f".join(map(str, position)).encode("utf-8", "surrogatepass")
    return struct.unpack(f">{count}I", hashlib.shake_128(text).digest(4 * count))


def settled(samples: Sequence[Sample], rules: Sequence[CaptionsSection]) -> tuple[Sample, ...]:
    """The samples with canonical captions and their variants; `rules` are in the order of the data's sources.

    Regularization images show the model's own idea of a class, so they get no trigger.
    """
    known: dict[tuple[str, int, bool], Texts] = {}
    found = []
    for sample in samples:
        key = (sample.caption, sample.source, sample.regularization)
        if key not in known:
            known[key] = make_texts(sample.caption, rules_of(sample, rules))
        texts = known[key]
        weighted = rules[sample.source].prompt_weighting
        found.append(
            replace(sample, caption=texts.canonical, variants=texts.variants, weighted=weighted, written=sample.caption)
        )
    return tuple(found)


def canonical(sample: Sample) -> Sample:
    """A settled sample as it is measured and never trained: with its canonical caption alone."""
    return replace(sample, variants=(), weighted=False)


def lacks_trigger(sample: Sample, rules: Sequence[CaptionsSection]) -> bool:
    """Whether the trigger must be put in front of a written caption, which lacks it."""
    if sample.source >= len(rules):
        return False
    own = rules_of(sample, rules)
    return bool(own.trigger_word) and not has_trigger(
        _filled(sample.caption, own, lambda count, place: 0), own.trigger_word
    )


def most_choices(sample: Sample, rules: Sequence[CaptionsSection]) -> int:
    """The most choices that a written caption has in one place; 1 without wildcards."""
    counts = [1]

    def first(count: int, place: int) -> int:
        counts.append(count)
        return 0

    _filled(sample.caption, rules_of(sample, rules), first)
    return max(counts)


def rules_of(sample: Sample, rules: Sequence[CaptionsSection]) -> CaptionsSection:
    """The caption settings of a sample's source."""
    found = rules[sample.source]
    return found.model_copy(update={"trigger_word": None}) if sample.regularization and found.trigger_word else found


def variant_taken(sample: Sample, seen_before: int, seed: int, views: int = 1) -> int:
    """Which of its variants a sample is trained on after so many uses: each in turn, so all are used equally often.

    With `views` versions of the image in turn beside it, each variant meets each of them.
    """
    count = len(sample.texts)
    return position_turn(count, seen_before + seen_before // math.lcm(count, views), seed, "caption", sample.id)


def drops_caption(rules: CaptionsSection, seed: int, step: int, epoch: int, place: tuple[str, int]) -> bool:
    """Whether a sample is trained on the empty caption. `place` is its id and occurrence in the step; all count from 0."""
    every = rules.dropout_every_n_epochs
    if every > 0 and (epoch + 1) % every == 0:
        return True
    return rules.dropout > 0.0 and position_uniform(seed, "caption_dropout", step, *place) < rules.dropout
