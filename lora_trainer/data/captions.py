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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lora_trainer.config.schema import CaptionsSection
from lora_trainer.core.randomness import position_turn, position_uniform
from lora_trainer.data.sample import Sample
from lora_trainer.data.weighted_words import plain
from lora_trainer.data.wildcards import Pick, filled

TRIGGER = "[trigger]"
OPENING, CLOSING = "([", ")]"
# Decided when a text is read, so neither is in a cache's key nor must stay the same in a resumed run.
READ_TIME = ("dropout", "dropout_every_epochs")
CHANGE_TEXTS = tuple(name for name in CaptionsSection.model_fields if name not in (*READ_TIME, "extension"))


@dataclass(frozen=True)
class Texts:
    """What becomes of a written caption.

    `canonical` has the first of all choices, its tags in their order, none left out, no
    weights: pictures are drawn with it and held-out losses measured. `variants` are what is
    trained, in turn; one where nothing varies.
    """

    canonical: str
    variants: tuple[str, ...]


def make_texts(written: str, rules: CaptionsSection) -> Texts:
    """The texts of one caption."""
    canonical = _whole(_filled(written, rules, lambda count, place: 0), rules)
    variants = [canonical]
    if rules.wildcards or rules.shuffle or rules.tag_dropout:
        name = hashlib.sha256(written.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        variants = [_variant(written, name, rules, number) for number in range(rules.variants)]
    if len(set(variants)) == 1:
        variants = variants[:1]
    if rules.weighted_words:
        canonical = plain(canonical)
    return Texts(canonical, tuple(variants))


def has_trigger(text: str, trigger: str | None) -> bool:
    """Whether a word stands in a text as a word of its own, large letters or small; true without one."""
    if not trigger:
        return True
    return _pattern(trigger).search(text) is not None


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
    return text.replace(TRIGGER, rules.trigger) if rules.trigger else text


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

    def text(self, rules: CaptionsSection) -> str:
        separator = rules.separator
        return (separator if separator[-1].isspace() else f"{separator} ").join([*self.front, *self.free, *self.back])


def _tags(text: str, rules: CaptionsSection) -> _Tags:
    """The tags of a text, the trigger put in front where it is missing."""
    missing = [rules.trigger] if rules.trigger and not has_trigger(text, rules.trigger) else []
    keep = rules.keep_separator
    if keep and keep in text:
        front, free, back = (_split(part, rules) for part in [*text.split(keep, 2), ""][:3])
    else:
        tags = _split(text, rules)
        front, free, back = tags[: rules.keep_tokens], tags[rules.keep_tokens :], []
    return _Tags([*missing, *front], free, back)


def _split(text: str, rules: CaptionsSection) -> list[str]:
    """A text at its separators, but not inside of the brackets of weighted words."""
    found = text.split(rules.separator)
    if rules.weighted_words:
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
    if rules.keep_separator and rules.keep_separator in text:
        return _tags(text, rules).text(rules)
    if has_trigger(text, rules.trigger):
        return text
    assert rules.trigger is not None
    return _Tags([rules.trigger], [text] if text else [], []).text(rules)


def _variant(written: str, name: str, rules: CaptionsSection, number: int) -> str:
    """One of the texts that are trained. `name` stands for the caption in what is drawn."""

    def pick(count: int, place: int) -> int:
        turn, spot = divmod(number, count)  # all are taken once before one is taken again
        return _order(count, name, "wildcard", place, turn)[spot]

    text = _filled(written, rules, pick)
    if not (rules.shuffle or rules.tag_dropout):
        return _whole(text, rules)
    tags = _tags(text, rules)
    free = tags.free
    if rules.shuffle:
        free = [free[index] for index in _order(len(free), name, "shuffle", number)]
    if rules.tag_dropout:
        free = [
            tag
            for tag in free
            if number not in _missing_from(tag, name, rules.variants, rules.tag_dropout)
            or (rules.trigger and has_trigger(tag, rules.trigger))
        ]
    return replace(tags, free=free).text(rules)


@lru_cache(maxsize=4096)
def _missing_from(tag: str, name: str, variants: int, share: float) -> frozenset[int]:
    """The variants that leave a tag out: exactly its share of them, on average where that is no whole number."""
    count = math.floor(variants * share + _key(8, name, "tag_share", tag) / 2**64)
    return frozenset(_order(variants, name, "tag_dropout", tag)[:count])


def _order(count: int, *position: int | str) -> list[int]:
    """The numbers below `count` in an order that the position draws: one hash, as captions are many and short."""
    key = _key(16 + 2 * count, *position)
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        key, other = divmod(key, last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def _key(size: int, *position: int | str) -> int:
    """A number of so many bytes."""
    text = "\x1f".join(map(str, position)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.shake_128(text).digest(size), "big")


def settled(samples: Sequence[Sample], rules: Sequence[CaptionsSection]) -> tuple[Sample, ...]:
    """The samples with canonical captions and their variants; `rules` stand in the order of the data's sources.

    Regularisation pictures show the model's own idea of a class, so they get no trigger.
    """
    known: dict[tuple[str, int, bool], Texts] = {}
    found = []
    for sample in samples:
        key = (sample.caption, sample.source, sample.regularisation)
        if key not in known:
            known[key] = make_texts(sample.caption, rules_of(sample, rules))
        texts = known[key]
        weighted = rules[sample.source].weighted_words
        found.append(replace(sample, caption=texts.canonical, variants=texts.variants, weighted=weighted))
    return tuple(found)


def canonical(sample: Sample) -> Sample:
    """A settled sample as it is measured and never trained: with its canonical caption alone."""
    return replace(sample, variants=(), weighted=False)


def lacks_trigger(sample: Sample, rules: Sequence[CaptionsSection]) -> bool:
    """Whether the trigger must be put in front of a written caption: it stands nowhere in it."""
    own = rules_of(sample, rules)
    return bool(own.trigger) and not has_trigger(_filled(sample.caption, own, lambda count, place: 0), own.trigger)


def rules_of(sample: Sample, rules: Sequence[CaptionsSection]) -> CaptionsSection:
    """What holds for a sample's caption."""
    found = rules[sample.source]
    return found.model_copy(update={"trigger": None}) if sample.regularisation and found.trigger else found


def variant_taken(sample: Sample, visit: int, seed: int, views: int = 1) -> int:
    """Which of its variants a sample is trained on at a visit: each in turn, so that all are used equally often.

    With `views` versions of the picture in turn beside it, each variant meets each of them.
    """
    count = len(sample.texts)
    return position_turn(count, visit + visit // math.lcm(count, views), seed, "caption", sample.id)


def drops_caption(rules: CaptionsSection, seed: int, step: int, epoch: int, place: tuple[str, int]) -> bool:
    """Whether a sample is trained on the empty caption. `place` is its id and occurrence in the step; all count from 0."""
    every = rules.dropout_every_epochs
    if every > 0 and (epoch + 1) % every == 0:
        return True
    return rules.dropout > 0.0 and position_uniform(seed, "caption_dropout", step, *place) < rules.dropout
