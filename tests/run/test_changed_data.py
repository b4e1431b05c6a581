"""`images.csv`: which images and captions differ from those that a run was started with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.config.schema import Config
from lora_trainer.data.sample import Sample
from lora_trainer.run.changed_data import changed_images, write_images
from lora_trainer.run.start import STARTED_FROM, differing

SAMPLES = [Sample(Path(f"set/{name}.png"), f"of {name}", 64, 64, name * 64) for name in "abcdef"]


def changed(place: int, **values: object) -> list[Sample]:
    return [replace(each, **values) if number == place else each for number, each in enumerate(SAMPLES)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (SAMPLES, ""),
        ([replace(each, path=Path("elsewhere") / each.path.name) for each in SAMPLES], ""),
        (changed(1, caption="of a \udce9"), "b.png (caption)"),
        (changed(2, content="0" * 64), "c.png (image)"),
        (changed(2, weight=0.5), "c.png (repeats, weight or mask)"),
        (SAMPLES[1:], "a.png (gone)"),
        ([*SAMPLES, replace(SAMPLES[0], path=Path("set/g.png"), content="9" * 64)], "g.png (new)"),
        (
            [replace(each, caption="another") for each in SAMPLES],
            "a.png (caption), b.png (caption), c.png (caption) and 3 more",
        ),
    ],
)
def test_what_has_changed_is_named(now: list[Sample], named: str, tmp_path: Path) -> None:
    write_images(tmp_path, SAMPLES)
    assert changed_images(tmp_path, now) == named


def test_without_a_list_nothing_is_named(tmp_path: Path) -> None:
    assert changed_images(tmp_path, SAMPLES) == ""
    (tmp_path / "images.csv").write_bytes(b"\xff\x00")
    assert changed_images(tmp_path, SAMPLES) == ""


def test_a_lora_to_start_from_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        f'[lora]\nnetwork_weights = "{tmp_path / "a.safetensors"}"\n', encoding="utf-8"
    )
    for name, there in (("a", False), ("b", True)):
        config = Config.model_validate({"lora": {"network_weights": str(tmp_path / f"{name}.safetensors")}})
        message = differing(STARTED_FROM, "0", "1", tmp_path, config).message
        assert str(tmp_path / f"{name}.safetensors") in message
        assert ("→" in message) == there
        assert str(tmp_path / "a.safetensors") in message
