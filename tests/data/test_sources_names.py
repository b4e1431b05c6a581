"""One rule of names for captions, masks, control images and tables, whatever the case and the Unicode form."""

from __future__ import annotations

import io
import json
import os
import tarfile
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer.config.schema import SourceSection
from lora_trainer.core.findings import Finding
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Manifest
from lora_trainer.data.sources.metadata import FilesBelow
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DatasetGate, check_dataset
from lora_trainer.dataset_check.fix import write_fixed
from lora_trainer.run.captioning import find_wanted
from tests.data.conftest import Draw, noise_image

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "été 0") for form in ("NFC", "NFD"))
ALIKE = [
    ("IMG_1.PNG", "img_1.txt"),
    ("IMG_2.png", "IMG_2.Txt"),
    ("IMG_3.png", "IMG_3.png.TXT"),
    ("IMG_4.jpeg", "img_4.JPEG.caption"),
    (f"{DECOMPOSED}.png", f"{COMPOSED}.txt"),
    (f"{COMPOSED}.png", f"{DECOMPOSED}.txt"),
    (f"{DECOMPOSED.upper()}.png", f"{COMPOSED}.caption"),
]


def source(path: Path, **settings: Any) -> SourceSection:
    return SourceSection(path=str(path), **settings)


def captions_of(manifest: Manifest) -> dict[str, str]:
    return {sample.path.name: sample.caption for sample in manifest.samples}


def codes(findings: tuple[Finding, ...]) -> list[tuple[str, str, str]]:
    return sorted((each.path.name if each.path else "", each.code, each.severity) for each in findings)


@pytest.fixture
def any_case(tmp_path: Path) -> None:
    """Skips on a disk that does not tell Cat from cat."""
    (tmp_path / "case").touch()
    if (tmp_path / "CASE").exists():
        pytest.skip("the disk does not tell upper from lower case")
    (tmp_path / "case").unlink()


def pack(path: Path, folder: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for each in sorted(folder.iterdir()):
            tar.add(each, each.name)
    return path


@pytest.mark.parametrize(("image", "caption"), ALIKE)
def test_a_caption_belongs_to_the_image_whatever_case_and_form_its_name_has(
    tmp_path: Path, draw: Draw, image: str, caption: str
) -> None:
    folder = tmp_path / "set"
    draw(folder / image, seed=1, caption=None)
    draw(folder / "other.png", seed=2)
    (folder / caption).write_text("its own", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"file_name": f"set/{image}"}), encoding="utf-8")
    for place in (folder, pack(tmp_path / "x.tar", folder), folder / image, tmp_path / "rows.jsonl"):
        manifest, findings = read_manifest([place])
        assert captions_of(manifest)[image] == "its own", place
        assert findings == ()
    wanted, existing, _ = find_wanted([folder], None)
    assert (wanted, existing) == ([], 2)


def test_the_exact_name_comes_before_all_others(tmp_path: Path, draw: Draw, any_case: None) -> None:
    draw(tmp_path / "a.png", seed=1, caption="small")
    draw(tmp_path / "A.png", seed=2, caption="large")
    draw(tmp_path / "b.png", seed=3, caption="of b alone")
    draw(tmp_path / "B.png", seed=4, caption=None)
    manifest, findings = read_manifest([tmp_path])
    assert captions_of(manifest) == {"a.png": "small", "A.png": "large", "b.png": "of b alone", "B.png": ""}
    assert codes(findings) == [("B.png", "missing_caption", "error")]


def test_captions_that_could_be_meant_otherwise_are_named(tmp_path: Path, draw: Draw, any_case: None) -> None:
    draw(tmp_path / "TIE.PNG", seed=1, caption=None)
    for name in ("Tie", "tie"):
        (tmp_path / f"{name}.txt").write_text(f"of {name}", encoding="utf-8")
    draw(tmp_path / "near.png", seed=2, caption="nearest")
    (tmp_path / "Near.caption").write_text("not this", encoding="utf-8")
    draw(tmp_path / "00.png", seed=3, caption="of both")
    draw(tmp_path / "00.jpg", seed=4, caption="of both")
    manifest, findings = read_manifest([tmp_path])
    assert captions_of(manifest) == {
        "TIE.PNG": "of Tie",
        "near.png": "nearest",
        "00.png": "of both",
        "00.jpg": "of both",
    }
    assert codes(findings) == [
        ("00.jpg", "shared_caption", "warning"),
        ("00.png", "shared_caption", "warning"),
        ("TIE.PNG", "two_captions", "warning"),
        ("near.png", "two_captions", "note"),
    ]


def test_a_caption_of_its_own_comes_before_a_shared_one(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "00.png", seed=1, caption=None)
    draw(tmp_path / "00.jpg", seed=2, caption=None)
    for name in ("00.png.txt", "00.jpg.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    manifest, findings = read_manifest([tmp_path])
    assert captions_of(manifest) == {"00.png": "00.png.txt", "00.jpg": "00.jpg.txt"}
    assert findings == ()
    copy = cleaned(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")
    assert sorted(captions_of(copy).values()) == ["00.jpg.txt", "00.png.txt"]


def cleaned(folder: Path, target: Path) -> Manifest:
    """The manifest of a dataset's cleaned copy."""
    manifest, findings = read_manifest([folder])
    framing = Framing((64,), 8)
    report = check_dataset(manifest, findings, DatasetGate([framing], allow_upscale=True))
    write_fixed(report, manifest, [source(folder)], [framing], target)
    return read_manifest([target])[0]


def test_a_cleaned_copy_has_the_caption_that_was_read(tmp_path: Path, draw: Draw) -> None:
    folder = tmp_path / "set"
    for seed, (image, caption) in enumerate(ALIKE[:5]):
        draw(folder / image, seed=seed, caption=None)
        (folder / caption).write_text(f"number {seed}\n", encoding="utf-8")
    assert captions_of(cleaned(folder, tmp_path / "copy")) == {ALIKE[each][0]: f"number {each}" for each in range(5)}


@pytest.mark.parametrize("kind", ["masks", "control_images"])
def test_masks_and_control_images_by_the_same_rule(tmp_path: Path, draw: Draw, kind: str) -> None:
    names = {"IMG_1.PNG": "img_1.png", f"{DECOMPOSED}.png": f"{COMPOSED}.png", "In/b.png": "in/B.png"}
    for seed, (image, partner) in enumerate(names.items()):
        draw(tmp_path / "set" / image, seed=seed)
        (tmp_path / "others" / partner).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (64, 64), 100 + seed).save(tmp_path / "others" / partner)
    settings: Any = str(tmp_path / "others") if kind == "masks" else (str(tmp_path / "others"),)
    manifest, findings = read_manifest([source(tmp_path / "set", **{kind: settings})])
    found = {}
    for sample in manifest.samples:
        partner = sample.mask.path if sample.mask is not None else sample.controls[0].path
        assert partner is not None
        found[sample.path.relative_to(tmp_path / "set").as_posix()] = partner.relative_to(
            tmp_path / "others"
        ).as_posix()
    assert found == names
    assert findings == ()


def test_masks_that_could_be_meant_otherwise_are_named(tmp_path: Path, draw: Draw) -> None:
    for seed, name in enumerate(["a.png", "00.png", "00.jpg"]):
        draw(tmp_path / "set" / name, seed=seed, caption="x")
    (tmp_path / "masks").mkdir()
    for name in ("a.png", "a.webp", "00.png"):
        Image.new("L", (64, 64), 200).save(tmp_path / "masks" / name)
    manifest, findings = read_manifest([source(tmp_path / "set", masks=str(tmp_path / "masks"))])
    assert [each.mask is not None for each in manifest.samples] == [True] * 3
    assert [each for each in codes(findings) if "mask" in each[1]] == [
        ("00.jpg", "shared_mask", "warning"),
        ("00.png", "shared_mask", "warning"),
        ("a.png", "two_masks", "warning"),
    ]


def test_an_image_of_the_source_is_no_mask_of_another(tmp_path: Path, draw: Draw) -> None:
    for seed, name in enumerate(["00.png", "00.jpg", "1.png"]):
        draw(tmp_path / name, seed=seed, caption="x")
    Image.new("L", (64, 64), 200).save(tmp_path / "1-MaskLabel.png")
    manifest, _ = read_manifest([source(tmp_path, masks=str(tmp_path))])
    assert {each.path.name: each.mask and each.mask.path and each.mask.path.name for each in manifest.samples} == {
        "00.png": None,
        "00.jpg": None,
        "1.png": "1-MaskLabel.png",
    }


@pytest.mark.parametrize("table", ["metadata.jsonl", "Metadata.csv", "metadata.parquet", "captions_file", "data"])
def test_tables_name_images_by_the_same_rule(tmp_path: Path, draw: Draw, table: str) -> None:
    names = {"IMG_1.PNG": "img_1.png", f"{DECOMPOSED}.png": f"{COMPOSED}.png", "in/b.png": "In/B.png", "c.png": "c.png"}
    for seed, image in enumerate(names):
        draw(tmp_path / image, seed=seed, caption=None)
    rows = [{"file_name": name, "text": f"of {image}"} for image, name in names.items()]
    path = tmp_path / (table if "." in table else "rows.jsonl")
    if path.suffix == ".csv":
        path.write_text("file_name,text\n" + "".join(f"{row['file_name']},{row['text']}\n" for row in rows), "utf-8")
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = {"captions_file": str(path)} if table == "captions_file" else {}
    manifest, findings = read_manifest([source(path if table == "data" else tmp_path, **settings)])
    found = {each.path.relative_to(tmp_path).as_posix(): each.caption for each in manifest.samples}
    assert found == {image: f"of {image}" for image in names}
    assert findings == ()


def test_the_row_with_the_exact_name_comes_before_the_others(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", caption=None)
    rows = [{"file_name": "a.png", "text": "exact"}, {"file_name": "A.PNG", "text": "another"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    manifest, findings = read_manifest([tmp_path])
    assert captions_of(manifest) == {"a.png": "exact"}
    assert codes(findings) == [("metadata.jsonl", "two_captions", "note")]


def test_control_images_of_columns_by_the_same_rule(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", seed=1, caption=None)
    draw(tmp_path / "before" / f"{DECOMPOSED}.png", seed=2, caption=None)
    row = {"file_name": "a.png", "text": "x", "source": f"before/{COMPOSED}.PNG"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    manifest, findings = read_manifest([source(tmp_path / "rows.jsonl", control_columns=("source",))])
    assert [each.path.name for each in manifest.samples[0].controls] == [f"{DECOMPOSED}.png"]
    assert findings == ()


def test_only_folders_on_the_way_to_a_missing_file_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_case: None
) -> None:
    there = tmp_path / "data" / f"{DECOMPOSED}-Before" / "A.png"
    for path in (there, tmp_path / "data" / "other" / "deep" / "b.png"):
        path.parent.mkdir(parents=True)
        path.touch()
    listed: list[Path] = []

    def recorded(true: Callable[[Any], Any], place: Any) -> Any:
        listed.append(Path(place))
        return true(place)

    monkeypatch.setattr(os, "listdir", partial(recorded, os.listdir))
    monkeypatch.setattr(os, "scandir", partial(recorded, os.scandir))
    root = tmp_path / "data"
    files = FilesBelow(root)
    for name in ("missing.png", "another.png", "../outside.png", str(tmp_path / "absolute.png")):
        assert files.find(root, name) == Path(os.path.normpath(root / name))
    assert listed == [root]
    for name in (f"{COMPOSED}-before/a.PNG", f"{COMPOSED}-BEFORE\\a.png"):
        assert files.find(root, name) == there
    assert files.find(root / "other", f"../{COMPOSED}-before/a.png") == there
    assert files.find(root, "other/deep/c.png") == root / "other" / "deep" / "c.png"
    assert listed == [root, there.parent, root / "other", root / "other" / "deep"]


def test_captions_without_an_image_and_members_that_are_not_read_are_named_in_a_tar(tmp_path: Path) -> None:
    file = io.BytesIO()
    noise_image(64, 64, 1).save(file, "PNG")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, data in {
            "a.png": file.getvalue(),
            "a.txt": b"x",
            "b.txt": b"y",
            "a.cls": b"1",
            "c.mp4": b"z",
            "v1.0/README": b"r",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    manifest, findings = read_manifest([tmp_path / "x.tar"])
    assert codes(findings) == [("b.txt", "orphan_caption", "note")]
    assert [note for note in manifest.notes if "1 .cls, 1 .mp4, 1 without an ending" in note]


CUT_NAMES = [
    # The images, the rows of the table, and the captions.
    (["logo_v1.png", "logo_v2.png"], ["logo_v1.2,red", "logo_v2,blue"], ["", "blue"]),
    (["logo_v1.png", "logo_v2.png"], ["logo_v1.0,red", "logo_v2,blue"], ["", "blue"]),
    (["v1.2.png", "v1.png"], ["v1.2,red", "v1,blue"], ["red", "blue"]),
    (["1.png", "2.png"], ["1.0,red", "2.0,blue"], ["red", "blue"]),
    (["1.0.png", "1.png"], ["1.0,red", "1,blue"], ["red", "blue"]),
    (["a.png", "b.png"], ["a.png,red", "a.jpg,blue", "b.heic,green"], ["red", "green"]),
    (["A.png", "b.png"], ["a.png,red", "A.jpg,blue", "b,green"], ["red", "green"]),
    (["a.png", "b.png"], ["a,red", "a.heic,blue", "b.JPG,green"], ["red", "green"]),
]


@pytest.mark.parametrize(("images", "rows", "captions"), CUT_NAMES)
def test_only_endings_are_cut_off_names_and_whole_names_come_first(
    tmp_path: Path, draw: Draw, images: list[str], rows: list[str], captions: list[str]
) -> None:
    for seed, name in enumerate(images):
        draw(tmp_path / "set" / name, seed=seed, caption=None)
    (tmp_path / "all.csv").write_text("\n".join(["file_name,text", *rows]), "utf-8")
    section = SourceSection(path=str(tmp_path / "set"), captions_file=str(tmp_path / "all.csv"))
    samples = read_manifest([section], allow_missing_captions=True)[0].samples
    assert {each.path.name: each.caption for each in samples} == dict(zip(images, captions, strict=True))
