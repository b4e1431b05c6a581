"""What the trigger word does: captions without it and new scenes are drawn to look at, and change no part of the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.evaluation.evidence import RealImages
from lora_trainer.evaluation.lora_check import LoraGate, check_lora
from lora_trainer.evaluation.trigger_prompts import MOST_COMPARED, SCENES, trigger_prompts
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.lora_format.writing import write_lora
from lora_trainer.models.families import FAMILIES
from tests.lora_format.tiny import facts, random_lora

FAMILY = FAMILIES["sd15"]
CAPTIONS = ("a red zobo", "a blue zobo", "zobo, green", "a box", "Zobo on a box", "a zobo in a box")


@pytest.fixture(scope="module")
def images() -> list[EncodedSample]:
    generator = torch.Generator().manual_seed(3)
    return [
        EncodedSample(
            f"s{place}",
            torch.randn(4, 8, 8, generator=generator),
            {"embeds": torch.randn(77, 32, generator=generator)},
            torch.zeros(6),
            caption,
        )
        for place, caption in enumerate(CAPTIONS)
    ]


def test_captions_lose_the_word_and_scenes_have_it(images: list[EncodedSample]) -> None:
    found = trigger_prompts(images, (3, 0, 0, 4, 2), "zobo")
    assert found.compared == [0, 4], "the first whose captions have it, each once"
    assert [each.text for each in found.samples[:2]] == ["a red", "on a box"]
    assert [each.text for each in found.samples[2:]] == [scene.format("zobo") for scene in SCENES]
    assert not any(each.cond for each in found.samples), "their text embeddings are those of other captions"
    assert trigger_prompts(images, (0, 1), "").samples == ()
    assert trigger_prompts(images, (0, 1), "fungo").compared == []


def test_they_are_drawn_beside_the_verdict_and_change_none_of_its_parts(
    base: Path, images: list[EncodedSample], tmp_path: Path
) -> None:
    unet = FAMILY.denoiser.load(base, torch.float32, torch.device("cpu"))
    lora = write_lora(tmp_path, "zobo", random_lora(unet, size=0.1), facts())[0]
    gate = LoraGate(prompts=("", "a red circle"))
    plain = check_lora(lora, base, FAMILY, RealImages(images), gate)
    with_trigger = check_lora(lora, base, FAMILY, RealImages(images), replace(gate, trigger="zobo"))
    assert with_trigger.to_json()["parts"] == plain.to_json()["parts"]
    kinds = [each.kind for each in with_trigger.shown]
    assert kinds.count("trigger") == MOST_COMPARED
    assert kinds.count("scene") == len(SCENES)
    assert "typical" not in kinds
    for each in with_trigger.shown[:MOST_COMPARED]:
        assert "zobo" in each.prompt.lower()
        assert each.base is not None
        assert each.untriggered is not None
        drawn = [each.base, each.untriggered, each.lora]
        assert not any(torch.equal(drawn[one], drawn[other]) for one, other in ((0, 1), (1, 2), (0, 2)))


def test_a_quick_check_draws_none(base: Path, images: list[EncodedSample], tmp_path: Path) -> None:
    unet = FAMILY.denoiser.load(base, torch.float32, torch.device("cpu"))
    lora = write_lora(tmp_path, "zobo", random_lora(unet, size=0.1), facts())[0]
    gate = LoraGate(check="lite", prompts=("", "a red circle"), trigger="zobo")
    assert not {"trigger", "scene"} & {
        each.kind for each in check_lora(lora, base, FAMILY, RealImages(images), gate).shown
    }
