"""Masks that sources list."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.config.schema import SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Mask
from tests.data.conftest import Draw


def gray(path: Path, width: int, height: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (width, height), 200).save(path)
    return path


def test_a_folder_of_masks(tmp_path: Path, draw: Draw) -> None:
    for seed, name in enumerate(["a.png", "in/b.jpg", "c.png", "d.png", "e.png"]):
        draw(tmp_path / "set" / name, 60, 40, seed=seed)
    gray(tmp_path / "masks" / "a.png", 60, 40)
    gray(tmp_path / "masks" / "in" / "b.png", 31, 20)  # half the size, a side rounded up
    gray(tmp_path / "masks" / "c.png", 40, 60)
    (tmp_path / "masks" / "d.png").write_bytes(b"no image")
    manifest, findings = read_manifest([SourceSection(path=str(tmp_path / "set"), masks=str(tmp_path / "masks"))])
    masks = {sample.path.stem: sample.mask for sample in manifest.samples}
    content = hashlib.sha256((tmp_path / "masks" / "a.png").read_bytes()).hexdigest()
    assert masks["a"] == Mask(tmp_path / "masks" / "a.png", content)
    assert masks["b"] is not None
    assert masks["c"] is masks["d"] is masks["e"] is None
    assert sorted((finding.path.stem, finding.code, finding.severity) for finding in findings if finding.path) == [
        ("c", "mask_differs", "error"),
        ("d", "unreadable_mask", "error"),
        ("e", "missing_mask", "warning"),
    ]
    before = manifest.data_hash
    gray(tmp_path / "masks" / "a.png", 30, 20)
    sources = [SourceSection(path=str(tmp_path / "set"), masks=str(tmp_path / "masks"))]
    assert read_manifest(sources)[0].data_hash != before


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_a_mask_never_belongs_to_two_images(tmp_path: Path, draw: Draw, kind: str) -> None:
    names = ["one/1.png", "two/1.png", "two/2.png", "1.png"]
    for seed, name in enumerate(names):
        draw(tmp_path / "set" / name, 60, 40, seed=seed, caption=None if kind == "table" else "a cat")
    for name in ("1.png", "2.png", "two/1.png"):
        gray(tmp_path / "masks" / name, 60, 40)
    data = tmp_path / "set"
    if kind == "table":
        data = data / "table.jsonl"
        data.write_text("".join(json.dumps({"file_name": name, "text": "a"}) + "\n" for name in names), "utf-8")
    manifest, findings = read_manifest([SourceSection(path=str(data), masks=str(tmp_path / "masks"))])
    below = [
        None if sample.mask is None or sample.mask.path is None else sample.mask.path.relative_to(tmp_path / "masks")
        for sample in sorted(
            manifest.samples, key=lambda sample: names.index(sample.path.relative_to(tmp_path / "set").as_posix())
        )
    ]
    assert below == [None, Path("two/1.png"), Path("2.png"), Path("1.png")]
    assert [(finding.code, finding.path) for finding in findings] == [
        ("missing_mask", tmp_path / "set" / "one" / "1.png")
    ]


def test_masks_next_to_the_images_and_inside_the_folder(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", 60, 40, seed=1)
    gray(tmp_path / "a-masklabel.png", 60, 40)
    manifest, _ = read_manifest([SourceSection(path=str(tmp_path), masks=str(tmp_path))])
    assert [(s.path.name, s.mask and s.mask.path) for s in manifest.samples] == [
        ("a.png", tmp_path / "a-masklabel.png")
    ]
    unmasked, findings = read_manifest([tmp_path])
    assert [(sample.path.name, sample.mask) for sample in unmasked.samples] == [("a.png", None)]
    assert any("1 masks" in note for note in unmasked.notes)
    assert findings == ()
    (tmp_path / "a-masklabel.png").rename(gray(tmp_path / "masks" / "a.png", 60, 40))
    inside, _ = read_manifest([SourceSection(path=str(tmp_path), masks=str(tmp_path / "masks"))])
    assert [sample.path.name for sample in inside.samples] == ["a.png"]
    with pytest.raises(UsageError, match="holds no mask"):
        read_manifest([SourceSection(path=str(tmp_path), masks=str(gray(tmp_path / "m" / "x.png", 4, 4).parent))])


def test_transparency_as_the_mask(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "plain.png", seed=1)
    draw(tmp_path / "clear.png", seed=2)
    image = Image.open(tmp_path / "clear.png")
    image.putalpha(128)
    image.save(tmp_path / "clear.png")
    manifest, findings = read_manifest([SourceSection(path=str(tmp_path), masks="alpha")])
    assert {sample.path.name: sample.mask for sample in manifest.samples} == {
        "clear.png": Mask(None),
        "plain.png": None,
    }
    assert [(finding.code, finding.path) for finding in findings] == [("missing_mask", tmp_path / "plain.png")]


def test_masks_of_images_in_a_tar(tmp_path: Path, draw: Draw) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(draw(tmp_path / "made" / "a.png", 60, 40, seed=1), "in/a.png")
        tar.add(draw(tmp_path / "made" / "b.png", 60, 40, seed=2), "in/b.png")
    gray(tmp_path / "masks" / "in" / "a.png", 60, 40)
    gray(tmp_path / "masks" / "b-masklabel.png", 30, 20)
    section = SourceSection(path=str(tmp_path / "x.tar"), masks=str(tmp_path / "masks"), default_caption="a thing")
    samples = read_manifest([section])[0].samples
    assert [sample.mask and sample.mask.path and sample.mask.path.name for sample in samples] == [
        "a.png",
        "b-masklabel.png",
    ]


def test_masks_named_with_the_ending_of_their_image(tmp_path: Path, draw: Draw) -> None:
    """Those of no image are named."""
    for seed, name in enumerate(["a.jpg", "in/b.png", "c.png", "c.jpg"]):
        draw(tmp_path / "set" / name, 60, 40, seed=seed)
    for name in ("a.jpg.png", "in/b.png.png", "c.png.png", "C.JPG-masklabel.png", "zebra.png"):
        gray(tmp_path / "masks" / name, 60, 40)
    section = SourceSection(path=str(tmp_path / "set"), masks=str(tmp_path / "masks"))
    manifest, findings = read_manifest([section])
    assert {each.path.name: each.mask and each.mask.path and each.mask.path.name for each in manifest.samples} == {
        "a.jpg": "a.jpg.png",
        "b.png": "b.png.png",
        "c.png": "c.png.png",
        "c.jpg": "C.JPG-masklabel.png",
    }
    of_masks = [finding for finding in findings if "mask" in finding.code]
    assert [(finding.code, finding.severity) for finding in of_masks] == [("orphan_mask", "note")]
    assert "zebra.png" in of_masks[0].message
    draw(tmp_path / "beside" / "d.jpg", 60, 40, seed=8)
    gray(tmp_path / "beside" / "d.jpg-masklabel.png", 60, 40)
    beside = SourceSection(path=str(tmp_path / "beside"), masks=str(tmp_path / "beside"))
    (sample,) = read_manifest([beside])[0].samples
    assert sample.mask == Mask(
        tmp_path / "beside" / "d.jpg-masklabel.png",
        hashlib.sha256((tmp_path / "beside" / "d.jpg-masklabel.png").read_bytes()).hexdigest(),
    )


def test_a_mask_without_the_turn_of_its_image_is_named(tmp_path: Path, draw: Draw) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = draw(tmp_path / "set" / "a.jpg", 60, 40)
    Image.open(path).save(path, exif=exif)
    gray(tmp_path / "masks" / "a.png", 60, 40)
    section = SourceSection(path=str(tmp_path / "set"), masks=str(tmp_path / "masks"))
    (finding,) = read_manifest([section])[1]
    assert (finding.code, finding.severity) == ("mask_differs", "error")
    assert "EXIF" in finding.fix
    gray(tmp_path / "masks" / "a.png", 40, 60)
    assert read_manifest([section])[1] == ()


def test_a_folder_of_masks_of_several_sources_has_no_orphans_but_those_of_none(tmp_path: Path, draw: Draw) -> None:
    for seed, name in enumerate("ab"):
        draw(tmp_path / name / f"{name}.png", 60, 40, seed=seed)
        gray(tmp_path / "masks" / f"{name}.png", 60, 40)
    options = {"masks": str(tmp_path / "masks"), "control_images": (str(tmp_path / "masks"),)}
    sections = [SourceSection(path=str(tmp_path / name), **options) for name in "ab"]
    assert read_manifest(sections)[1] == ()
    gray(tmp_path / "masks" / "zebra.png", 60, 40)
    findings = read_manifest(sections)[1]
    assert [(finding.code, "zebra.png" in finding.message) for finding in findings] == [
        ("orphan_mask", True),
        ("orphan_control", True),
    ]
