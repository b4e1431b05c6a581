"""JSON with captions, beside images, in tars and in tables; columns of other names; files that are not read."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.findings import Finding
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Manifest
from tests.data.conftest import Draw, noise_image

PLACES = ["folder", "tar", "image", "table"]
# What a JSON beside `a.png` holds, and the caption that is trained.
HELD: list[tuple[object, str]] = [
    ({"caption": "a red cat", "caption_short": "x"}, "a red cat"),
    ({"text": "a red cat", "url": "x"}, "a red cat"),
    ({"prompt": "a red cat"}, "a red cat"),
    ({"tags": "red, cat"}, "red, cat"),
    ({"tags": ["red", "cat"], "id": 3}, "red, cat"),
    ({"caption": None, "text": "", "tags": ["red", "cat"]}, "red, cat"),
    ({"caption": ["a red cat", "a cat in red"]}, "a red cat"),
    (["a red cat", "a cat in red"], "a red cat"),
    ("a red cat", "a red cat"),
]


def codes(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings]


def place_of(kind: str, folder: Path) -> Path:
    """The images of a folder with what is beside them, as a source of a kind."""
    if kind == "image":
        return folder / "a.png"
    if kind == "tar":
        with tarfile.open(folder.with_suffix(".tar"), "w") as tar:
            for each in sorted(folder.iterdir()):
                tar.add(each, each.name)
        return folder.with_suffix(".tar")
    if kind == "table":
        rows = [json.dumps({"file_name": f"{folder.name}/{each.name}"}) for each in sorted(folder.glob("*.png"))]
        folder.with_suffix(".jsonl").write_text("\n".join(rows), encoding="utf-8")
        return folder.with_suffix(".jsonl")
    return folder


def read(place: Path, **captions: Any) -> tuple[Manifest, tuple[Finding, ...]]:
    return read_manifest([place], captions=CaptionsSection(**captions))


@pytest.fixture
def folder(tmp_path: Path, draw: Draw) -> Path:
    draw(tmp_path / "set" / "a.png", caption=None)
    return tmp_path / "set"


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("extension", [None, ".json"])
@pytest.mark.parametrize(("held", "caption"), HELD)
def test_json_beside_an_image_is_its_caption(
    folder: Path, kind: str, extension: str | None, held: object, caption: str
) -> None:
    (folder / "a.json").write_text(json.dumps(held), encoding="utf-8")
    manifest, findings = read(place_of(kind, folder), extension=extension)
    assert [sample.caption for sample in manifest.samples] == [caption]
    assert findings == ()


@pytest.mark.parametrize("held", [{"caption": ["one", "two"]}, ["one", "two"]])
def test_one_of_several_captions_is_chosen_where_that_is_set(folder: Path, held: object) -> None:
    (folder / "a.json").write_text(json.dumps(held), encoding="utf-8")
    assert [sample.caption for sample in read(folder, wildcards=True)[0].samples] == ["one\ntwo"]
    first = read(folder)[0]
    assert [sample.caption for sample in first.samples] == ["one"]
    assert [note for note in first.notes if "captions.wildcards" in note]


@pytest.mark.parametrize("kind", PLACES)
def test_a_text_comes_before_the_json_whose_weight_counts(folder: Path, kind: str) -> None:
    (folder / "a.txt").write_text("of the text", encoding="utf-8")
    (folder / "a.png.json").write_text('{"caption": "of the JSON", "weight": 2}', encoding="utf-8")
    manifest, findings = read(place_of(kind, folder))
    assert [(sample.caption, sample.weight) for sample in manifest.samples] == [("of the text", 2.0)]
    assert findings == ()


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("data", [b'{"caption": "a', b"[1, 2]", b"7", b"[" * 90_000, b'{"caption": "caf\xe9"}'])
def test_damaged_json_is_an_error_that_names_it(folder: Path, kind: str, data: bytes) -> None:
    (folder / "a.json").write_bytes(data)
    _, findings = read(place_of(kind, folder))
    assert codes(findings) == [("bad_metadata", "error")]
    assert "a.json" in findings[0].message
    (folder / "a.txt").write_text("a text", encoding="utf-8")
    assert codes(read(place_of(kind, folder))[1]) == [("bad_metadata", "note")]


def as_it_is(folder: Path) -> SourceSection:
    return SourceSection(path=str(folder))


def with_default(folder: Path) -> SourceSection:
    return SourceSection(path=str(folder), default_caption="a cat")


def with_captions_file(folder: Path) -> SourceSection:
    (folder.parent / "all.csv").write_text("file_name,text\na.png,a cat\n", encoding="utf-8")
    return SourceSection(path=str(folder), captions_file=str(folder.parent / "all.csv"))


def of_kohya(folder: Path) -> SourceSection:
    return SourceSection(path=str(folder.rename(folder.with_name("2_a cat"))))


def with_empty_default(folder: Path) -> SourceSection:
    return SourceSection(path=str(folder), default_caption="")


DAMAGED = [
    # The file beside the image, what sets the captions, the caption, the code and its severity.
    ("a.json", b"[[1, 2], [3, 4]]", as_it_is, "", ("bad_metadata", "error")),
    ("a.json", b"[[1, 2], [3, 4]]", with_default, "a cat", ("bad_metadata", "note")),
    ("a.json", b"[[1, 2], [3, 4]]", with_captions_file, "a cat", ("bad_metadata", "note")),
    ("a.json", b"[[1, 2], [3, 4]]", of_kohya, "a cat", ("bad_metadata", "note")),
    ("a.json", b"[[1, 2], [3, 4]]", with_empty_default, "", ("bad_metadata", "error")),
    ("a.json", b"{" + b" " * (1 << 20) + b"}", with_captions_file, "a cat", ("bad_metadata", "note")),
    ("a.txt", b"caf\xff\x81", with_captions_file, "a cat", ("unreadable_caption", "note")),
    ("a.txt", b"caf\xff\x81", with_default, "a cat", ("unreadable_caption", "error")),
    ("a.txt", b"caf\xff\x81", of_kohya, "a cat", ("unreadable_caption", "error")),
]


@pytest.mark.parametrize(("name", "data", "section", "caption", "code"), DAMAGED)
def test_a_damaged_file_that_is_not_the_caption_is_a_note(
    folder: Path,
    name: str,
    data: bytes,
    section: Callable[[Path], SourceSection],
    caption: str,
    code: tuple[str, str],
) -> None:
    (folder / name).write_bytes(data)
    manifest, findings = read_manifest([section(folder)])
    assert [sample.caption for sample in manifest.samples] == [caption]
    assert codes(findings) == [code]


def test_a_damaged_json_is_an_error_where_json_is_set(folder: Path) -> None:
    (folder / "a.json").write_bytes(b"[[1, 2], [3, 4]]")
    found = read_manifest([with_default(folder)], captions=CaptionsSection(extension=".json"))[1]
    assert codes(found) == [("bad_metadata", "error")]


@pytest.mark.parametrize("kind", PLACES)
def test_json_without_a_caption_is_named_with_its_keys(folder: Path, kind: str) -> None:
    (folder / "a.json").write_text('{"id": 7, "description": "a red cat"}', encoding="utf-8")
    place = place_of(kind, folder)
    manifest, findings = read(place)
    assert codes(findings) == [("missing_caption", "error")]
    assert "a.json has id, description" in findings[0].fix
    assert [note for note in manifest.notes if "1 JSON beside images without" in note]
    described, findings = read(place, column="description")
    assert [sample.caption for sample in described.samples] == ["a red cat"]
    assert findings == ()


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_json_is_no_caption_where_another_extension_is_set(folder: Path, kind: str) -> None:
    (folder / "a.json").write_text('{"caption": "a red cat", "weight": 3}', encoding="utf-8")
    manifest, findings = read(place_of(kind, folder), extension=".txt")
    assert [(sample.caption, sample.weight) for sample in manifest.samples] == [("", 3.0)]
    assert codes(findings) == [("missing_caption", "error")]
    assert "a.json" in findings[0].message


def test_a_table_comes_before_json_that_no_setting_names(folder: Path) -> None:
    (folder / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "of the table"}', encoding="utf-8")
    (folder / "a.json").write_text('{"caption": "of the JSON", "weight": 2}', encoding="utf-8")
    manifest, findings = read(folder)
    assert [(sample.caption, sample.weight) for sample in manifest.samples] == [("of the table", 2.0)]
    assert findings == ()
    assert [sample.caption for sample in read(folder, extension=".json")[0].samples] == ["of the JSON"]


@pytest.mark.parametrize(("name", "extension"), [("a.txt", None), ("a.json", ".json")])
@pytest.mark.parametrize(
    ("listed", "found"), [("of the file", []), ("of  the file\n", []), ("other", ["two_captions"])]
)
def test_a_caption_beside_the_image_and_another_in_the_table_are_named(
    folder: Path, name: str, extension: str | None, listed: str, found: list[str]
) -> None:
    held = "of the file" if name == "a.txt" else '{"caption": "of the file"}'
    (folder / name).write_text(held, encoding="utf-8")
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": listed}), encoding="utf-8")
    manifest, findings = read(folder, extension=extension)
    assert [sample.caption for sample in manifest.samples] == ["of the file"]
    assert codes(findings) == [(code, "note") for code in found]
    assert all(finding.path == folder / "a.png" and name in finding.message for finding in findings)


def test_a_text_is_no_caption_where_json_is_set(folder: Path) -> None:
    (folder / "a.txt").write_text("a red cat", encoding="utf-8")
    manifest, findings = read(folder, extension="json")
    assert [sample.caption for sample in manifest.samples] == [""]
    assert codes(findings) == [("missing_caption", "error")]
    assert "a.txt" in findings[0].message


TABLES = {
    "metadata.jsonl": '{"file_name": "a.png", "description": "a red cat", "score": 2}',
    "metadata.csv": "file_name,description,score\na.png,a red cat,2\n",
    "rows.json": '{"a.png": {"description": "a red cat", "score": 2}}',
    "metadata.parquet": "",
    "images.parquet": "",
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_with_another_column_names_it_and_the_setting(folder: Path, name: str) -> None:
    path = folder / name
    if name.endswith(".parquet"):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        row: dict[str, Any] = {"file_name": "a.png", "description": "a red cat", "score": "2"}
        if name == "images.parquet":
            row["image"] = (folder / "a.png").read_bytes()
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(TABLES[name], encoding="utf-8")
    place = path if name == "images.parquet" else folder
    captions_file = str(path) if name == "rows.json" else None

    def read_by(column: str | None) -> tuple[Manifest, tuple[Finding, ...]]:
        section = SourceSection(path=str(place), captions_file=captions_file)
        return read_manifest([section], captions=CaptionsSection(column=column))

    findings = read_by(None)[1]
    assert sorted(codes(findings)) == [("missing_caption", "error"), ("no_caption_column", "note")]
    (column,) = (each for each in findings if each.code == "no_caption_column")
    assert "description, score" in column.message
    assert "captions.column" in column.fix
    manifest, findings = read_by("description")
    assert [sample.caption for sample in manifest.samples] == ["a red cat"]
    assert findings == ()
    assert ("no_caption_column", "error") in codes(read_by("nothing")[1])


def test_a_column_without_any_table_is_noted(folder: Path) -> None:
    def notes(column: str | None) -> tuple[str, ...]:
        return read_manifest([SourceSection(path=str(folder))], captions=CaptionsSection(column=column))[0].notes

    (folder / "a.txt").write_text("a red cat", encoding="utf-8")
    assert [note for note in notes("text") if "captions.column=text" in note] == list(notes("text"))
    assert len(notes("text")) == 1
    assert notes(None) == ()
    (folder / "metadata.csv").write_text("file_name,text\na.png,a red cat\n", encoding="utf-8")
    assert not any("captions.column" in note for note in notes("text"))


def test_a_table_with_other_columns_beside_its_captions_is_fine(folder: Path) -> None:
    (folder / "metadata.csv").write_text("file_name,text,score\na.png,a red cat,2\n", encoding="utf-8")
    assert read(folder)[1] == ()
    (folder / "metadata.csv").write_text("file_name,weight\na.png,2\n", encoding="utf-8")
    assert codes(read(folder)[1]) == [("missing_caption", "error")]


JPEG_NAMES = ["a.jfif", "b.jpe", "c.pjpeg", "d.PJP"]


@pytest.mark.parametrize("kind", ["folder", "tar", "table", "metadata"])
def test_every_name_of_jpeg_files_and_plain_pixels_are_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for seed, name in enumerate([*JPEG_NAMES, "e.ppm", "f.pgm"]):
        image = noise_image(64, 64, seed)
        image.convert("L" if name == "f.pgm" else "RGB").save(folder / name, "PPM" if seed > 3 else "JPEG")
        (folder / name).with_suffix(".txt").write_text(f"of {name}", encoding="utf-8")
    place = place_of(kind, folder)
    if kind in ("table", "metadata"):
        place = folder / "metadata.jsonl" if kind == "metadata" else folder / "rows.jsonl"
        rows = [
            {"file_name": each.name, "text": f"of {each.name}"} for each in folder.iterdir() if each.suffix != ".txt"
        ]
        place.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        place = folder if kind == "metadata" else place
    manifest, findings = read(place)
    assert sorted(sample.caption for sample in manifest.samples) == [
        f"of {name}" for name in [*JPEG_NAMES, "e.ppm", "f.pgm"]
    ]
    assert findings == ()


def test_pixels_of_plain_formats_are_those_of_the_png(tmp_path: Path) -> None:
    from lora_trainer.data.images.images import load_rgb

    image = noise_image(64, 48, 1)
    image.save(tmp_path / "a.ppm")
    assert load_rgb(tmp_path / "a.ppm").tobytes() == image.tobytes()
    (tmp_path / "cut.ppm").write_bytes((tmp_path / "a.ppm").read_bytes()[:500])
    (tmp_path / "huge.ppm").write_bytes(b"P6 99999 99999 255\n")
    found = read_manifest([tmp_path], allow_missing_captions=True)[1]
    assert ("too_large", "error") in codes(found)


def test_what_is_not_read_is_counted_by_its_kind_in_one_note(tmp_path: Path, draw: Draw) -> None:
    for number in range(3):
        draw(tmp_path / f"{number}.png", seed=number)
    for name in ["a.mp4", "in/b.MP4", "c.jp2", "notes", "0.npz", "1.caption"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    manifest, findings = read(tmp_path, extension=".txt")
    (note,) = (note for note in manifest.notes if "not read" in note)
    assert note.endswith("6 files are not read: 1 .caption, 1 .jp2, 2 .mp4, 1 .npz, 1 without an ending.")
    assert codes(findings) == [("foreign_format", "warning")]


def test_files_that_the_program_reads_elsewhere_are_not_counted(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}', encoding="utf-8")
    for name in ("fixed.json", "lora.toml"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert read(tmp_path)[0].notes == ()


def test_a_tar_is_read_like_the_folder_that_it_was_made_of(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for seed, name in enumerate(["a.jfif", "B.JPG", "c.ppm", "d.png"]):
        file = io.BytesIO()
        noise_image(64, 64, seed).save(file, "PPM" if name == "c.ppm" else "JPEG" if "j" in name.lower() else "PNG")
        (folder / name).write_bytes(file.getvalue())
    (folder / "a.json").write_text('{"tags": ["x", "y"], "weight": 0.5}', encoding="utf-8")
    (folder / "b.txt").write_text("of b", encoding="utf-8")
    (folder / "c.ppm.caption").write_text("of c", encoding="utf-8")
    (folder / "d.json").write_text('{"caption": "of d"}', encoding="utf-8")
    rows = [
        [(each.path.name, each.caption, each.weight) for each in read(place_of(kind, folder))[0].samples]
        for kind in ("folder", "tar")
    ]
    assert sorted(rows[0]) == sorted(rows[1])
    assert sorted(rows[0]) == [
        ("B.JPG", "of b", 1.0),
        ("a.jfif", "x, y", 0.5),
        ("c.ppm", "of c", 1.0),
        ("d.png", "of d", 1.0),
    ]
