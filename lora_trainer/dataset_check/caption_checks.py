"""Checks of captions, one by one and as a whole."""

from __future__ import annotations

import functools
import itertools
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lora_trainer.core.findings import Finding, counted
from lora_trainer.data.captions import TRIGGER, canonical_text, has_trigger, lacks_trigger, rules_of
from lora_trainer.dataset_check.caption_patterns import (
    CODES,
    LITERAL_SYNTAX,
    WITHOUT_TRIGGER,
    WITHOUT_WEIGHTING,
    WITHOUT_WILDCARDS,
    CaptionPattern,
    left_behind,
)
from lora_trainer.dataset_check.doubts import DOUBTFUL, MIXED_UP, NOT_KNOWN

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample
    from lora_trainer.dataset_check.context import CheckContext

CAPTION_CODES = frozenset(
    {
        "missing_caption", "empty_caption", "unreadable_caption", "two_captions", "orphan_caption",
        "shared_caption", "no_caption_column", "mixed_columns", "several_captions", "hidden_characters", "bad_metadata", "bad_weight", "unusual_weight",
        "absent_image",
        DOUBTFUL, MIXED_UP, NOT_KNOWN,
    }
)  # fmt: skip
NOT_ASCII = re.compile(r"\S*[\x80-\uffff]\S*")
# Of Latin-1 and of Windows-1252, which has other letters for the bytes from 0x80 to 0x9f.
OLD_BYTES = {chr(byte): byte for byte in range(256)}
OLD_BYTES |= {bytes([byte]).decode("cp1252"): byte for byte in range(256) if byte not in b"\x81\x8d\x8f\x90\x9d"}
OLD_CONTROLS = re.compile("[\x80-\x9f]")
FEWEST_CAPTIONS = 5  # fewer show no habit
OFTEN = 0.5  # share of the captions
SHORT, LONG = 2, 12  # words
# Keys beside each other, in either direction, on keyboards of English, German and French.
KEY_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "qwertzuiop", "yxcvbnm", "azertyuiop", "qsdfghjklm", "wxcvbn")
FEWEST_KEYS, SHORTEST_NOISE = 3, 4  # keys of one run, letters of a word of nothing but runs
RUNS = sorted(
    {
        row[start:end]
        for keys in KEY_ROWS
        for row in (keys, keys[::-1])
        for start in range(len(row))
        for end in range(start + FEWEST_KEYS, len(row) + 1)
    },
    key=len,
    reverse=True,
)
# Possessive: a long caption takes no longer for all the ways in which runs can be divided.
NOISE = re.compile(rf"(?=\w{{{SHORTEST_NOISE}}})(?:{'|'.join(RUNS)}|(\w)\1{{2,}})++")
LETTERS = re.compile(r"[^\W\d_]+")
# Letters of random words follow each other as they hardly ever do in words: bits of a pair, at most, on average.
RANDOM_PAIRS = -5.6
FEWEST_RANDOM, SHORTEST_WORD = 6, 3  # letters; of all words, and of a word that counts
TOKENS_PER_LETTER = 0.75  # more, and a word is read letter by letter or byte by byte
MANY_IMAGES = 40  # as many show a style or several things, whose captions should differ
FEW_DIFFERENT = 0.2  # different captions per image


def check_captions(context: CheckContext) -> list[Finding]:
    """Caption findings of the listing, captions that the model would not read whole, and what they have in common."""
    found = [finding for finding in context.read_findings if finding.code in CAPTION_CODES]
    for sample in context.samples:
        found += _of_one(sample, context)
    return found + _of_all([sample for sample in context.samples if not sample.regularization], context)


def _of_one(sample: Sample, context: CheckContext) -> list[Finding]:
    found = []
    trained = canonical_text(sample, context.rules)
    places, rest = _without_learned_tokens(trained, context)
    if context.caption_limit is not None and len(rest) + places > context.caption_limit - 2:
        # A token has one letter at least: only longer captions need counting.
        tokens = estimate_tokens(rest) + places
        if tokens > context.caption_limit:
            new = f", {places} of them learned" if places else ""
            message = f"has a caption of about {tokens} tokens{new}; the model reads {context.caption_limit}."
            found.append(Finding("long_caption", "note", message, "Shorten it; what matters first.", path=sample.path))
    for pattern in _patterns(sample, context):
        message = f"has a caption {pattern.message} ({_cut(sample.caption)})."
        found.append(Finding(pattern.code, pattern.severity, message, pattern.fix, path=sample.path))
    fix = "Write what it shows. If this is the word to learn: --set captions.trigger_word=WORD."
    if any(each.code in CODES for each in found):
        pass  # not also that its letters are no words
    elif is_meaningless(sample, context):
        message = f"has a caption without a word ({_cut(sample.caption)})."
        found.append(Finding("meaningless_caption", "warning", message, fix, path=sample.path))
    elif is_random(sample, context):
        message = f"has a caption of random letters ({_cut(sample.caption)})."
        found.append(Finding("random_caption", "warning", message, fix, path=sample.path))
    if context.count_tokens and not sample.caption.isascii() and is_unread(rest, context.count_tokens):
        message = f"has a caption in letters that the text encoder hardly reads ({_cut(sample.caption)})."
        found.append(Finding("unread_caption", "warning", message, "Translate it to English.", path=sample.path))
    if not sample.caption.isascii() and (shown := garbled(sample.caption)):
        message = f"has a caption with letters that were read in a wrong encoding ({shown})."
        found.append(Finding("garbled_caption", "warning", message, "Write it again as UTF-8.", path=sample.path))
    return found


def _patterns(sample: Sample, context: CheckContext) -> list[CaptionPattern]:
    """What programs left in a caption that was written for its image, beside the words that it is to teach."""
    if not sample.own_caption:
        return []
    text = sample.caption
    for word in (*_words_to_learn(sample, context), TRIGGER):
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", " ", text, flags=re.IGNORECASE)
    found = left_behind(text.strip(" ,.;"))
    rules = rules_of(sample, context.rules) if sample.source < len(context.rules) else None
    possible = [LITERAL_SYNTAX] if any(mark in sample.caption.lower() for mark in LITERAL_SYNTAX.marks) else []
    if rules is None or not rules.prompt_weighting:
        possible += WITHOUT_WEIGHTING
    if rules is None or not rules.wildcards:
        possible.append(WITHOUT_WILDCARDS)
    if rules is None or not rules.trigger_word:
        possible.append(WITHOUT_TRIGGER)
    _, rest = _without_learned_tokens(sample.caption, context)  # which may be written like a placeholder
    literal = [each for each in possible if each.finds(rest)]
    return literal if found is None else [found, *literal]


def _without_learned_tokens(text: str, context: CheckContext) -> tuple[int, str]:
    """The number of learned tokens in a text, one for each embedding, and the text without them."""
    found = 0
    for word in context.learned_tokens:
        text, times = re.subn(re.escape(word), " ", text, flags=re.IGNORECASE)
        found += times
    return found * context.num_vectors, text


def is_meaningless(sample: Sample, context: CheckContext) -> bool:
    """Whether a caption that was written for its image is only signs or emoji, or only keys that lie beside each other.

    A trigger word or a learned token has a meaning, whatever its letters. So have a number and rare words such as `sks`.
    """
    caption = sample.caption
    if not _must_have_words(sample, context):
        return False
    if not caption.isascii():
        return not any(map(str.isalnum, caption))
    words = LETTERS.findall(caption.lower())
    return all(map(NOISE.fullmatch, words)) if words else not any(map(str.isdigit, caption))


def _must_have_words(sample: Sample, context: CheckContext) -> bool:
    """Whether a caption was written for its image, and has neither trigger word nor learned token."""
    if not sample.own_caption or not sample.caption:
        return False
    known = _words_to_learn(sample, context)
    return not any(has_trigger(sample.caption, word) for word in (*known, TRIGGER))


def _words_to_learn(sample: Sample, context: CheckContext) -> list[str]:
    """The learned tokens, and the trigger word where there is one."""
    trigger = rules_of(sample, context.rules).trigger_word if sample.source < len(context.rules) else None
    return [*context.learned_tokens, *([trigger] if trigger else [])]


def is_random(sample: Sample, context: CheckContext) -> bool:
    """Whether a caption has no known word, and letters that follow each other as in no language.

    The mean of log2 P(letter | letter before) over its words, P from the known words, is about -4.2 for English, German
    or Finnish and about -6.7 for random letters.
    """
    if not context.known_words or not sample.caption.isascii() or not _must_have_words(sample, context):
        return False
    words = [word for word in LETTERS.findall(sample.caption.lower()) if len(word) >= SHORTEST_WORD]
    if sum(map(len, words)) < FEWEST_RANDOM or not context.known_words.isdisjoint(words):
        return False
    bits = pair_bits(context.known_words)
    pairs = [bits[pair] for word in words for pair in itertools.pairwise(f" {word} ")]
    return sum(pairs) / len(pairs) <= RANDOM_PAIRS


@functools.lru_cache(maxsize=1)
def pair_bits(words: frozenset[str]) -> dict[tuple[str, str], float]:
    """log2 of the probability of a letter after another one, or after or before a space, in these words; smoothed by 1/2."""
    seen = Counter(pair for word in words if len(word) >= SHORTEST_WORD for pair in itertools.pairwise(f" {word} "))
    letters = " " + string.ascii_lowercase
    after = {one: sum(seen[one, other] for other in letters) + len(letters) / 2 for one in letters}
    return {(one, other): math.log2((seen[one, other] + 0.5) / after[one]) for one in letters for other in letters}


def is_unread(caption: str, count_tokens: Callable[[str], int]) -> bool:
    """Whether most letters of a caption are in words that the text encoder reads letter by letter or byte by byte.

    As CLIP reads Cyrillic, Greek, Korean or most of Chinese, but not `café` or `Straße`.
    """
    words = LETTERS.findall(caption)
    foreign = (word for word in words if not word.isascii())
    unread = sum(len(word) for word in foreign if count_tokens(word) > TOKENS_PER_LETTER * len(word))
    return 2 * unread > sum(map(len, words))


def garbled(caption: str) -> str:
    """The first word of a text that was UTF-8 and was read as something else, or lost letters; empty when there is none."""
    if "\ufffd" in caption:
        place = caption.index("\ufffd")
        return caption[max(0, place - 8) : place + 8]
    for word in NOT_ASCII.findall(caption):
        if (right := _fix_garbled_word(word)) != word:
            return f"{word} for {right}"
        if OLD_CONTROLS.search(word):  # as a quotation mark of Windows-1252 that was read as Latin-1
            return str(word)
    return ""


def fix_garbled(caption: str) -> str:
    """The text with every word fixed that was UTF-8 and was read as Windows-1252 or Latin-1; lost letters stay lost."""
    return NOT_ASCII.sub(lambda match: _fix_garbled_word(match[0]), caption)


def _fix_garbled_word(word: str) -> str:
    try:
        right = bytes(OLD_BYTES[letter] for letter in word).decode("utf-8")
    except (KeyError, UnicodeError):
        return word
    return right if len(right) < len(word) else word


def _of_all(samples: Sequence[Sample], context: CheckContext) -> list[Finding]:
    found = _triggers(samples, context) + _check_learned_tokens(samples, context)
    samples = [sample for sample in samples if sample.caption]  # each of the others has a finding of its own
    captions = Counter(sample.caption for sample in samples)
    if len(samples) > 1 and len(captions) == 1:
        message = f"All {len(samples)} images have the same caption."
        fix = "One subject is learned so, with its surroundings; describe each image to keep these apart."
        if len(samples) < MANY_IMAGES or not samples[0].own_caption:
            return [*found, Finding("same_caption", "note", message, fix)]
        fix = "Describe each image: without that a style is learned with everything that the images show."
        return [*found, Finding("same_caption", "warning", message, fix)]
    if len(samples) < FEWEST_CAPTIONS:
        return found
    caption, times = captions.most_common(1)[0]
    if times > OFTEN * len(samples):
        message = f"{times} of {len(samples)} images have the same caption ({_cut(caption)})."
        fix = "Describe each image; what captions do not name is learned as part of the subject."
        found.append(Finding("repeated_caption", "note", message, fix))
    elif len(captions) < FEW_DIFFERENT * len(samples):
        message = f"{len(samples)} images have only {counted(len(captions), 'distinct caption')}."
        found.append(Finding("few_captions", "note", message, "Describe each image."))
    words = [len(sample.caption.split()) for sample in samples]
    short, long = (sum(count <= SHORT for count in words), sum(count >= LONG for count in words))
    if min(short, long) > 0.1 * len(samples):
        message = f"{counted(short, 'caption has', 'captions have')} {SHORT} words at most, and {long} {'has' if long == 1 else 'have'} {LONG} or more."
        fix = "Describe all images in about the same detail."
        found.append(Finding("uneven_captions", "note", message, fix))
    return found


def _check_learned_tokens(samples: Sequence[Sample], context: CheckContext) -> list[Finding]:
    """Learned tokens that no caption contains, so that they would learn nothing, or that only some contain."""
    texts = [canonical_text(sample, context.rules).lower() for sample in samples] if context.learned_tokens else []
    holding = {word: sum(word.lower() in text for text in texts) for word in context.learned_tokens}
    some = [
        Finding(
            "word_in_some",
            "note",
            f"{times} of {len(texts)} captions contain the learned token {word!r}; the others do not train it.",
            f"Write it into all captions of its subject, or --set captions.trigger_word={word}.",
        )
        for word, times in holding.items()
        if 0 < times < len(texts)
    ]
    return some + [
        Finding(
            "unused_word",
            "warning",
            f"No caption contains the learned token {word!r}: it would learn nothing.",
            f"Write it into the captions, or --set captions.trigger_word={word} to put it in front of each.",
        )
        for word, times in holding.items()
        if not times
    ]


def _triggers(samples: Sequence[Sample], context: CheckContext) -> list[Finding]:
    """One note for all captions whose missing trigger is put in front. Where there is no caption, its own note says so."""
    lacking = [sample for sample in samples if sample.caption and lacks_trigger(sample, context.rules)]
    if not lacking:
        return []
    trigger, first = context.rules[lacking[0].source].trigger_word, _cut(lacking[0].caption)
    message = (
        f"{len(lacking)} of {len(samples)} captions lack the trigger {trigger!r} (first: {first}); it is put in front."
    )
    return [Finding("missing_trigger", "note", message, f"Write {TRIGGER} where it belongs.")]


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")


def estimate_tokens(caption: str) -> int:
    """About how many tokens a CLIP tokenizer makes of a caption, with start and end.

    Words of up to eight letters are mostly one token, longer ones one more for each five
    letters; letters outside Latin are about one each.
    """
    words = re.findall(r"\w+|[^\w\s]", caption)
    return 2 + sum(1 + max(0, len(word) - 4) // 5 if word.isascii() else len(word) for word in words)
