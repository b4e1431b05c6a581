"""Captions of a run: rules per source, their description, and the prompts from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.schema import CaptionsSection, Config
from lora_trainer.data.captions import settled
from lora_trainer.data.sample import Sample
from lora_trainer.run.inputs import Inputs, read_inputs
from lora_trainer.run.messages import caption_lines, show_captions
from lora_trainer.run.plans.plan import planned_data
from lora_trainer.run.sampling import sample_rows, triggers
from tests.recipes.recipe import draw_images


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A source with the run's rules, one with its own, and one of regularization images."""
    root = tmp_path_factory.mktemp("sources")
    for name, written in {"plain": "ring, red, big", "own": "(ring:1.4), {red|blue}", "class": "a ring"}.items():
        folder = draw_images(root / name, count=6)
        for index, text in enumerate(sorted(folder.glob("*.txt"))):
            text.write_text(f"{written}, number {index}", encoding="utf-8")
            image = text.with_suffix(".png")
            image.write_bytes(image.read_bytes() + name.encode())  # other content in each folder
    own = {"wildcards": True, "prompt_weighting": True, "variants": 4, "suffix": "{1|2|3|4|5}"}
    sources = [
        str(root / "plain"),
        {"path": str(root / "own"), "captions": own},
        {"path": str(root / "class"), "is_reg": True},
    ]
    values = {
        "data": {"sources": sources, "resolution": 64, "allow_small_images": True},
        "captions": {"trigger_word": "zobo", "shuffle": True, "dropout": 0.1},
        "sample": {"prompts": ["[trigger] at sea"]},
    }
    return resolve([Layer("a test", values)]).config


@pytest.fixture(scope="module")
def inputs(config: Config) -> Inputs:
    return read_inputs(config)


def test_each_source_has_its_own_rules(inputs: Inputs) -> None:
    plain, own, kept = ([sample for sample in inputs.train if sample.source == source] for source in range(3))
    assert all(sample.caption.startswith("zobo, ring, red, big") for sample in plain)
    assert all(len(sample.texts) == 8 and all("zobo" in text for text in sample.texts) for sample in plain)
    assert all(sample.caption.startswith("ring, red, number") for sample in own)
    assert all(sample.weighted and len(sample.texts) == 4 for sample in own)
    assert all(text.startswith(("(ring:1.4), red", "(ring:1.4), blue")) for sample in own for text in sample.texts)
    assert kept
    assert all(sample.caption.startswith("a ring") and "zobo" not in "".join(sample.texts) for sample in kept)
    assert all(sample.texts == (sample.caption,) for sample in inputs.validation)
    assert {sample.caption for sample in inputs.manifest.samples} >= {"ring, red, big, number 0"}  # as written


def test_the_description_of_captions(config: Config, inputs: Inputs) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        show_captions(config, inputs, console, 4)
    lines = captured.get()
    assert "captions, for example, empty 10% of the time:" in lines
    first = inputs.train[0]
    texts = list(dict.fromkeys(first.texts))
    assert f"image_0.png: canonical 'zobo, ring, red, big, number 0', trained on {len(texts)} texts:" in lines
    assert all(f"    {text!r}" in lines for text in texts[:2])
    assert f"    … and {len(texts) - 2} more" in lines
    varied = [sample for sample in inputs.train if len(sample.texts) > 1]
    count = len({text for sample in varied for text in sample.texts})
    size = count * 4 * 77 * 128 / 1e6  # the text encoder of the built-in model is 128 wide
    assert f"texts for each of {len(varied)} captions: {count} texts, {size:.1f} MB" in lines
    assert "captions.variants=4 is fewer than the 5 choices of own/image_0.png" in lines


def test_the_shown_caption_is_the_trained_one() -> None:
    plain = Sample(Path("a.png"), "a cat", 8, 8, "0")
    assert caption_lines(plain) == ["a.png: trained on 'a cat'"]
    rules = CaptionsSection(wildcards=True, prompt_weighting=True, shuffle=True, keep_tokens=9, variants=8)
    (sample,) = settled([replace(plain, caption="a (cat:1.2), {red|blue}")], [rules])
    head, *texts = caption_lines(sample)
    assert head == "a.png: canonical 'a cat, red', trained on 2 texts:"
    assert sorted(texts) == ["  'a (cat:1.2), blue'", "  'a (cat:1.2), red'"]
    rules = CaptionsSection(trigger_word="sks", shuffle=True, keep_tokens=1, tag_dropout=1.0)
    (sample,) = settled([replace(plain, caption="cat, red, big")], [rules])
    assert caption_lines(sample) == ["a.png: canonical 'sks, cat, red, big', trained on 1 text:", "  'sks, cat'"]


def test_a_plan_counts_the_same_texts(config: Config, inputs: Inputs) -> None:
    planned = {sample.path: sample.texts for sample in planned_data(config, inputs.facts)[0]}
    trained = {sample.path: sample.texts for sample in inputs.train}
    both = planned.keys() & trained.keys()  # the split knows copies when images are inspected, not in a plan
    assert len(both) > 9
    assert {path: planned[path] for path in both} == {path: trained[path] for path in both}


def test_trigger_words_of_sources_are_known_when_the_run_has_none(config: Config, inputs: Inputs) -> None:
    plain, own, kept = config.data.sources
    sources = (
        plain,
        *(own.model_copy(update={"captions": CaptionsSection(trigger_word=word)}) for word in ("sks", "zobo", "sks")),
        kept.model_copy(update={"captions": CaptionsSection(trigger_word="none")}),
    )
    several = config.model_copy(
        update={
            "data": config.data.model_copy(update={"sources": sources}),
            "captions": config.captions.model_copy(update={"trigger_word": None}),
        }
    )
    assert triggers(several) == ("sks", "zobo")
    assert [row.prompt for row in sample_rows(several, inputs, [0])] == ["sks at sea"]
    assert triggers(several.model_copy(update={"captions": CaptionsSection(trigger_word="zobo")})) == ("zobo", "sks")
    assert triggers(several.model_copy(update={"data": config.data, "captions": CaptionsSection()})) == ()


def test_the_trigger_word_is_inserted_into_prompts(config: Config, inputs: Inputs) -> None:
    assert [row.prompt for row in sample_rows(config, inputs, [0])] == ["zobo at sea"]
    unasked = config.model_copy(update={"sample": config.sample.model_copy(update={"prompts": (), "count": 99})})
    assert {row.prompt for row in sample_rows(unasked, inputs, [0])} == {
        sample.caption for sample in (*inputs.train, *inputs.validation) if not sample.regularization
    }
