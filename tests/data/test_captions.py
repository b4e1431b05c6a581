"""Training captions: the effect of every option, and what none of them may break."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.schema import CaptionsSection
from lora_trainer.data.captions import (
    drops_caption,
    has_trigger,
    make_texts,
    most_choices,
    settled,
    variant_taken,
    without_trigger,
)
from lora_trainer.data.prompt_weights import parse_weights, plain, spoken
from lora_trainer.data.sample import Sample
from lora_trainer.data.wildcards import filled

WORDS = st.text("abcxyz ", min_size=1, max_size=8).map(str.strip).filter(bool)
TAGS = st.lists(WORDS, min_size=1, max_size=9, unique=True)


def rules(**settings: object) -> CaptionsSection:
    return CaptionsSection.model_validate(settings)


def tags_of(text: str) -> list[str]:
    return [tag for tag in text.split(", ") if tag]


@given(st.text(max_size=40))
def test_without_options_a_caption_is_unchanged(written: str) -> None:
    texts = make_texts(written, rules())
    assert (texts.canonical, texts.variants) == (written, (written,))


@given(TAGS, st.integers(0, 4), st.integers(1, 16))
def test_a_shuffled_caption_keeps_its_tags_and_the_first_stay_first(tags: list[str], keep: int, count: int) -> None:
    texts = make_texts(", ".join(tags), rules(shuffle=True, keep_tokens=keep, variants=count))
    assert texts.canonical == ", ".join(tags)
    assert len(texts.variants) in (1, count)
    for variant in texts.variants:
        assert sorted(tags_of(variant)) == sorted(tags)
        assert tags_of(variant)[:keep] == tags[:keep]


@given(st.text("ab, {}|\n(:1)", max_size=30), st.integers(1, 12))
def test_the_canonical_text_is_deterministic_and_more_variants_keep_the_first(written: str, count: int) -> None:
    still = make_texts(written, rules(wildcards=True, variants=2)).canonical
    few = make_texts(written, rules(wildcards=True, shuffle=True, variants=count))
    more = make_texts(written, rules(wildcards=True, shuffle=True, variants=count + 4))
    dropped = make_texts(written, rules(wildcards=True, shuffle=True, tag_dropout=0.5, variants=count))
    assert few.canonical == more.canonical == dropped.canonical == still
    assert few.variants == more.variants[: len(few.variants)]


def test_many_variants_reach_every_order() -> None:
    texts = make_texts("a, b, c", rules(shuffle=True, variants=128))
    assert len(set(texts.variants)) == 6
    assert make_texts("alone", rules(shuffle=True)).variants == ("alone",)


@given(TAGS, st.sampled_from([0.125, 0.25, 0.5, 0.875]), st.integers(0, 3))
def test_each_tag_is_missing_in_its_share_of_the_variants(tags: list[str], share: float, keep: int) -> None:
    settings = rules(tag_dropout=share, keep_tokens=keep, variants=8)
    texts = make_texts(", ".join(tags), settings)
    assert texts.canonical == ", ".join(tags)
    variants = texts.variants * (8 // len(texts.variants))
    for place, tag in enumerate(tags):
        missing = sum(tag not in tags_of(variant) for variant in variants)
        assert missing == (0 if place < keep else 8 * share)
    for variant in variants:
        assert [tag for tag in tags if tag in tags_of(variant)] == tags_of(variant)


@given(TAGS, st.text("{}|[]()\\, abc\n", max_size=30))
def test_the_trigger_is_always_there(tags: list[str], rough: str) -> None:
    for written in (", ".join(tags), ", ".join(["photo of [trigger]", *tags]), ", ".join([*tags, "SKS"]), rough, ""):
        texts = make_texts(
            written, rules(trigger_word="sks", shuffle=True, tag_dropout=0.75, wildcards=True, variants=8)
        )
        assert all(has_trigger(text, "sks") for text in (texts.canonical, *texts.variants))


def test_the_position_of_the_trigger_word() -> None:
    settings = rules(trigger_word="sks")
    assert make_texts("a [trigger] cat", settings).canonical == "a sks cat"
    assert make_texts("a sks cat", settings).canonical == "a sks cat"
    assert make_texts("a sksx cat", settings).canonical == "sks, a sksx cat"
    assert make_texts("", settings).canonical == "sks"
    kept = make_texts("one, two, three", rules(trigger_word="sks", shuffle=True, keep_tokens=1)).variants
    assert all(tags_of(variant)[:2] == ["sks", "one"] for variant in kept)


def test_kept_parts_are_marked_by_a_separator() -> None:
    settings = rules(shuffle=True, tag_dropout=0.5, keep_tokens_separator="|||")
    texts = make_texts("cat, tom ||| red, blue, green ||| best", settings)
    assert texts.canonical == "cat, tom, red, blue, green, best"
    assert all(tags_of(variant)[:2] == ["cat", "tom"] and tags_of(variant)[-1] == "best" for variant in texts.variants)
    assert make_texts("cat ||| red", rules(keep_tokens_separator="|||")).variants == ("cat, red",)


def test_prefix_and_suffix_come_before_tags_are_counted() -> None:
    settings = rules(prefix="photo of", suffix=", sharp", keep_tokens=1, shuffle=True)
    texts = make_texts("cat, red, blue", settings)
    assert texts.canonical == "photo of cat, red, blue , sharp"
    assert all(variant.startswith("photo of cat, ") for variant in texts.variants)
    assert make_texts("", rules(prefix="photo")).canonical == "photo"


def test_another_separator() -> None:
    variants = make_texts("a b; c d; e", rules(separator=";", shuffle=True)).variants
    assert all(sorted(variant.split("; ")) == ["a b", "c d", "e"] for variant in variants)
    assert sorted(make_texts("a b c", rules(separator=" ", shuffle=True)).variants[0].split(" ")) == ["a", "b", "c"]


@given(st.lists(WORDS, min_size=2, max_size=5, unique=True), st.integers(2, 24))
def test_every_choice_of_a_wildcard_is_taken_equally_often(choices: list[str], count: int) -> None:
    texts = make_texts(f"one {{{'|'.join(choices)}}} thing", rules(wildcards=True, variants=count))
    assert texts.canonical == f"one {choices[0]} thing"
    taken = Counter(variant.removeprefix("one ").removesuffix(" thing") for variant in texts.variants)
    assert set(taken) <= set(choices)
    assert max(taken.values()) - min(taken[choice] for choice in choices) <= 1


@pytest.mark.parametrize(
    ("written", "possible"),
    [
        ("{a|b}", {"a", "b"}),
        ("{a|{b|c}} d", {"a d", "b d", "c d"}),
        ("{a|}", {"a", ""}),
        ("{a}", {"a"}),
        ("{}", {"{}"}),
        ("{{a|b}}", {"{a|b}"}),
        (r"\{a|b\} {c\|d|e}", {"{a|b} c|d", "{a|b} e"}),
        ("{a|b", {"{a|b"}),
        ("a|b}", {"a|b}"}),
    ],
)
def test_wildcards(written: str, possible: set[str]) -> None:
    seen = {
        filled(written, lambda count, place, turn=turn: turn % count if place % 2 else turn // 2 % count)
        for turn in range(16)
    }  # type: ignore[misc]
    assert seen == possible


@given(st.text(r"ab{}|\ ", max_size=20))
def test_any_text_can_be_filled(text: str) -> None:
    result = filled(text, lambda count, place: count - 1)
    assert len(result) <= len(text)
    if not set(text) & set("{}\\"):
        assert result == text


def test_choices_are_counted() -> None:
    def most(written: str, **settings: object) -> int:
        return most_choices(Sample(Path("a.png"), written, 8, 8, "0" * 64), (rules(**settings),))

    assert most("a {b|c|d} {e|f}", wildcards=True) == 3
    assert most("a\nb", wildcards=True) == 2
    assert most("a {b|c}") == most("a", wildcards=True) == 1


def test_one_of_several_lines() -> None:
    texts = make_texts("a cat\n\na dog\n", rules(wildcards=True, prefix="photo of"))
    assert texts.canonical == "photo of a cat"
    assert set(texts.variants) == {"photo of a cat", "photo of a dog"}
    assert make_texts("a cat\na dog", rules()).variants == ("a cat\na dog",)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("plain words", [("plain words", 1.0)]),
        ("a (cat) here", [("a ", 1.0), ("cat", 1.1), (" here", 1.0)]),
        ("((cat))", [("cat", 1.21)]),
        ("[cat]", [("cat", 1 / 1.1)]),
        ("(cat:1.3)", [("cat", 1.3)]),
        ("(cat : 0.5 )", [("cat ", 0.5)]),
        ("(a (b:2) c:1.5)", [("a ", 1.5), ("b", 3.0), (" c", 1.5)]),
        (r"cat \(animal\)", [("cat (animal)", 1.0)]),
        (r"back\\slash \[x\]", [("back\\slash [x]", 1.0)]),
        ("(open", [("open", 1.1)]),
        ("shut) :1.3) [", [("shut) :1.3) ", 1.0)]),
        ("(1:2:1.5)", [("1:2", 1.5)]),
        ("", [("", 1.0)]),
    ],
)
def test_prompt_weighting(text: str, pieces: list[tuple[str, float]]) -> None:
    read = parse_weights(text)
    assert [part for part, _ in read] == [part for part, _ in pieces]
    assert [weight for _, weight in read] == pytest.approx([weight for _, weight in pieces])
    assert plain(text) == "".join(part for part, _ in pieces)
    assert isinstance(spoken(text), str) == all(weight == 1.0 for _, weight in pieces)


@given(st.text(r"ab ()[]:.12\,", max_size=20))
def test_any_text_has_chunks(text: str) -> None:
    pieces = parse_weights(text)
    assert pieces
    assert len("".join(part for part, _ in pieces)) <= len(text)


def test_tags_are_not_split_inside_of_weights() -> None:
    settings = rules(prompt_weighting=True, shuffle=True)
    texts = make_texts("(red, blue:1.3), cat, \\(x, [a, b]", settings)
    assert texts.canonical == "red, blue, cat, (x, a, b"
    for variant in texts.variants:
        assert "(red, blue:1.3)" in variant
        assert "[a, b]" in variant
    assert make_texts("(cat:1.3)", rules()).canonical == "(cat:1.3)"
    assert make_texts("(cat:1.3)", rules(prompt_weighting=True)).variants == ("(cat:1.3)",)


@given(st.lists(TAGS.map(", ".join), min_size=1, max_size=4))
def test_caption_settings_follow_the_source_and_regularization_has_no_trigger_word(captions: list[str]) -> None:
    sources = (rules(shuffle=True, trigger_word="sks"), rules())
    samples = [
        Sample(Path(f"{index}.png"), caption, 8, 8, f"{index:064d}", source=source, regularization=preserve)
        for index, caption in enumerate(captions)
        for source in (0, 1)
        for preserve in (False, True)
    ]
    for before, after in zip(samples, settled(samples, sources), strict=True):
        if before.source == 1:
            assert after.texts == (before.caption,)
        elif before.regularization:
            assert not has_trigger(after.caption, "sks")
        else:
            assert has_trigger(after.caption, "sks")
        assert make_texts(before.caption, sources[1]).canonical == before.caption


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**40), st.integers(0, 200))
def test_caption_variants_are_used_equally_with_every_image_variant(
    count: int, views: int, seed: int, first: int
) -> None:
    sample = Sample(Path("a.png"), "x", 8, 8, "f" * 64, variants=tuple(map(str, range(count))))
    visits = [variant_taken(sample, seen_before, seed, views) for seen_before in range(first + 3 * count * views)]
    used = Counter(visits)
    assert max(used.values()) - min(used[each] for each in range(count)) <= 1 + views
    met = {(variant, seen_before % views) for seen_before, variant in enumerate(visits)}
    assert len(met) == count * views


def test_caption_dropout_by_rate_and_by_epoch() -> None:
    every = rules(dropout_every_n_epochs=3)
    assert [drops_caption(every, 0, 0, epoch, ("id", 0)) for epoch in range(6)] == [False, False, True] * 2
    half = [drops_caption(rules(dropout=0.5), 7, step, 0, ("id", 0)) for step in range(2000)]
    assert abs(sum(half) - 1000) < 120
    assert not any(drops_caption(rules(), 7, step, 0, ("id", 0)) for step in range(50))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a photo of sks dog", "a photo of dog"),
        ("sks", ""),
        ("SKS, 1girl, smile", "1girl, smile"),
        ("smile, sks , hat", "smile, hat"),
        ("sksx and sks", "sksx and"),
    ],
)
def test_a_caption_without_its_trigger_word(text: str, left: str) -> None:
    assert without_trigger(text, "sks") == left
