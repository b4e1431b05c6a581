"""musubi-tuner's dataset TOML: folders and tables of images with their control images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.schema import SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.manifest import read_manifest
from lora_trainer.importers.data_files import data_file_settings, nested
from lora_trainer.importers.imported import import_file


def draw(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (number % 256, number // 256 * 40, 90)).save(path)


def written(folder: Path, text: str) -> Path:
    path = folder / "dataset.toml"
    path.write_text(f"[general]\nresolution = [64, 64]\ncaption_extension = '.txt'\n{text}", encoding="utf-8")
    return path


def sources(path: Path) -> tuple[SourceSection, ...]:
    return resolve([Layer("d", nested(data_file_settings(path, [])))]).config.data.sources


def controls_of(path: Path) -> list[tuple[str, list[str]]]:
    """What the dataset's reader pairs: the name of each image and of its control images in their order."""
    manifest, _ = read_manifest(list(sources(path)))
    return sorted((each.path.name, [control.path.name for control in each.controls]) for each in manifest.samples)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    for number, name in enumerate(("cat", "cat_2")):
        draw(tmp_path / "after" / f"{name}.png", number)
        (tmp_path / "after" / f"{name}.txt").write_text(f"a {name}", encoding="utf-8")
    return tmp_path


def test_a_control_directory_holds_an_image_of_each_name(pairs: Path) -> None:
    for number, name in enumerate(("cat", "cat_2")):
        draw(pairs / "before" / f"{name}.png", 500 + number)
    path = written(pairs, "[[datasets]]\nimage_directory = 'after'\ncontrol_directory = 'before'\nnum_repeats = 3\n")
    (source,) = sources(path)
    assert (source.path, source.control_images, source.repeats) == (str(pairs / "after"), (str(pairs / "before"),), 3)
    assert controls_of(path) == [("cat.png", ["cat.png"]), ("cat_2.png", ["cat_2.png"])]


@pytest.mark.parametrize("label", ["_{}", "_{:04}"])
def test_numbered_control_images_are_read_in_their_order(pairs: Path, label: str) -> None:
    for name in ("cat", "cat_2"):
        for number in range(3):
            draw(pairs / "before" / f"{name}{label.format(number)}.png", 300 + 10 * number + len(name))
    path = written(pairs, "[[datasets]]\nimage_directory = 'after'\ncontrol_directory = 'before'\n")
    assert sources(path)[0].control_images == tuple(f"{pairs}/before/*{label.format(number)}" for number in range(3))
    expected = [
        (f"{name}.png", [f"{name}{label.format(number)}.png" for number in range(3)]) for name in ("cat", "cat_2")
    ]
    assert controls_of(path) == expected


@pytest.mark.parametrize("keys", [["control_path"], ["control_path_1", "control_path_0"]])
def test_a_table_names_images_captions_and_control_images(pairs: Path, keys: list[str]) -> None:
    lines = []
    for number, name in enumerate(("cat", "cat_2")):
        places = {key: f"before/{name}-{key}.png" for key in keys}
        for place in places.values():
            draw(pairs / place, 700 + 100 * number + len(place))
        lines.append(json.dumps({"image_path": f"after/{name}.png", "caption": f"make {name}", **places}))
    (pairs / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    path = written(pairs, "[[datasets]]\nimage_jsonl_file = 'pairs.jsonl'\ncache_directory = 'cache'\n")
    (source,) = sources(path)
    assert source.control_columns == tuple(sorted(keys))
    found = dict(controls_of(path))
    assert found["cat.png"] == [f"cat-{key}.png" for key in sorted(keys)]


def test_an_import_lists_what_is_done_otherwise(pairs: Path) -> None:
    draw(pairs / "before" / "cat.png", 900)
    more = "control_resolution = [1024, 1024]\nno_resize_control = false\nodd = 1\n"
    path = written(pairs, f"[[datasets]]\nimage_directory = 'after'\ncontrol_directory = 'before'\n{more}")
    imported = import_file(path)
    verdicts = {line.key.rpartition(".")[2]: line.verdict for line in imported.lines}
    assert verdicts["control_directory"] == "mapped"
    assert (verdicts["control_resolution"], verdicts["no_resize_control"]) == ("changed", "ignored")
    assert verdicts["odd"] == "unknown"
    assert imported.config.data.resolution == 64
    assert imported.config.validation.split == 0
    assert any(line.why.startswith("musubi-tuner's default") for line in imported.lines)


def test_videos_are_refused(pairs: Path) -> None:
    images = "[[datasets]]\nimage_directory = 'after'\n"
    path = written(pairs, f"{images}[[datasets]]\nvideo_directory = 'clips'\ntarget_frames = [1, 25]\n")
    with pytest.raises(UsageError, match=r"datasets\[1\] is of videos, which are not trained"):
        data_file_settings(path, [])
