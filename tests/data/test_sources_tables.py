"""Tables as other programs write them: which of several columns is used, and what is named of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.core.findings import LONGEST_LINE, LONGEST_WORD, Finding
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Manifest
from tests.data.conftest import Draw, noise_image

# Tables that name sub/a.png with the caption "a red cat".
WRITTEN = {
    "excel.csv": 'sep=;\nfile_name;text\nsub/a.png;"a red cat"\n',
    "excel-lines.csv": "sep=,\r\nFile_Name,Text\r\nsub/a.png,a red cat\r\n",
    "mac.csv": "file_name,text\rsub/a.png,a red cat\r",
    "mac.jsonl": '{"file_name": "x.png", "text": "x"}\r{"file_name": "sub/a.png", "text": "a red cat"}\r',
    "windows.csv": "\ufeffFile Name,TEXT\nsub\\a.png,a red cat\n",
    "drive.csv": "file_name,text\nC:\\data\\cats\\sub\\a.png,a red cat\n",
    "drive-alone.jsonl": json.dumps({"Image": "D:/elsewhere/sub/a.png", "Caption": "a red cat"}),
    "home.jsonl": json.dumps({"image_path": "/nowhere/at/all/sub/a.png", "Prompt": "a red cat"}),
}


def codes(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings]


def captions_of(manifest: Manifest) -> dict[str, str]:
    return {sample.path.name: sample.caption for sample in manifest.samples}


@pytest.fixture
def folder(tmp_path: Path, draw: Draw) -> Path:
    draw(tmp_path / "sub" / "a.png", caption=None)
    draw(tmp_path / "x.png", seed=1, caption="x")
    return tmp_path


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("place", ["table", "folder", "captions_file"])
def test_tables_of_other_programs_are_read(folder: Path, name: str, place: str) -> None:
    path = folder / (f"metadata{Path(name).suffix}" if place == "folder" else name)
    path.write_bytes(WRITTEN[name].encode("utf-8"))
    source = SourceSection(path=str(path if place == "table" else folder))
    if place == "captions_file":
        source = SourceSection(path=str(folder), captions_file=str(path))
    manifest, findings = read_manifest([source])
    assert captions_of(manifest)["a.png"] == "a red cat"
    assert findings == ()


@pytest.mark.parametrize("name", ["C:\\data\\b.png", "https://host/sub/a.png"])
def test_an_absolute_path_leads_to_no_image_of_another_name(folder: Path, name: str) -> None:
    (folder / "metadata.csv").write_text(f"file_name,text\n{name},a red cat\n", "utf-8")
    assert codes(read_manifest([folder])[1]) == [("absent_image", "warning"), ("missing_caption", "error")]


@pytest.mark.parametrize("place", ["metadata.jsonl", "table.jsonl", "captions.jsonl"])
def test_absolute_paths_of_elsewhere_that_end_at_one_image_lead_to_none(folder: Path, draw: Draw, place: str) -> None:
    """Each meant an image of its own. An image that is named itself keeps its caption, and a single path leads to its image."""
    draw(folder / "b.png", seed=2, caption=None)
    draw(folder / "c.png", seed=3, caption=None)
    path = folder / place

    def read(*names: str) -> tuple[set[tuple[str, str]], set[str]]:
        path.write_text("".join(json.dumps({"file_name": each, "text": each}) + "\n" for each in names), "utf-8")
        source = SourceSection(path=str(path if place == "table.jsonl" else folder))
        if place == "captions.jsonl":
            source = SourceSection(path=str(folder), captions_file=str(path))
        manifest, findings = read_manifest([source], allow_missing_captions=True)
        captions = {(each.path.name, str(each.caption)) for each in manifest.samples}
        return captions - {("x.png", "x"), ("a.png", ""), ("b.png", ""), ("c.png", "")}, {
            each.code for each in findings
        }

    one, other = "C:\\old\\cats\\b.png", "C:\\old\\dogs\\b.png"
    captions, found = read(one, other, "c.png")
    assert captions == {("c.png", "c.png")}
    assert ("unreadable" if place == "table.jsonl" else "absent_image") in found
    assert read(one, other, "b.png")[0] == {("b.png", "b.png")}
    assert read("b.png", one)[0] == {("b.png", "b.png")}
    assert read(other, other)[0] == {("b.png", other)}
    # As many folders as no disk has.
    deep = "/" + "f/" * 8000 + "b.png"
    assert read(deep)[0] == {("b.png", deep)}


def rows_of(name: str, rows: list[dict[str, Any]], folder: Path) -> Path:
    """A table of these rows: JSONL, Parquet that names images, or Parquet that holds them."""
    if name == "rows.jsonl":
        (folder / name).write_text("\n".join(map(json.dumps, rows)), "utf-8")
        return folder / name
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    if name == "images.parquet":
        image = (folder / "x.png").read_bytes()
        rows = [{"Image": {"bytes": image, "path": row["file_name"]}} | row for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "images.parquet"])
def test_columns_that_are_mixed_row_by_row_are_named(
    folder: Path, name: str, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(folder / "cache"))
    names = [draw(folder / f"{number}.png", seed=number, caption=None).name for number in range(3)]
    rows = [
        {"file_name": names[0], "text": "a text", "caption": None},
        {"file_name": names[1], "text": "", "caption": "a caption"},
        {"file_name": names[2], "text": "a text", "caption": "a caption"},
    ]
    path = rows_of(name, rows, folder)
    manifest, findings = read_manifest([path])
    assert [sample.caption for sample in manifest.samples] == ["a text", "a caption", "a text"]
    assert codes(findings) == [("mixed_columns", "note")]
    assert "text is used 2 times" in findings[0].message
    assert "caption is not used 1 time" in findings[0].message
    chosen = read_manifest([path], captions=CaptionsSection(column="Caption"), allow_missing_captions=True)[0]
    assert [sample.caption for sample in chosen.samples] == ["", "a caption", "a caption"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "images.parquet"])
def test_unknown_columns_are_named_where_a_caption_is_missing(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(folder / "cache"))
    path = rows_of(name, [{"file_name": "sub/a.png", "blip": "a red cat"}], folder)
    findings = read_manifest([path])[1]
    assert codes(findings) == [("no_caption_column", "note"), ("missing_caption", "error")]
    assert all("blip" in f"{each.message} {each.fix}" and "captions.column" in each.fix for each in findings)
    named = read_manifest([path], captions=CaptionsSection(column="blip"))[0]
    assert [sample.caption for sample in named.samples] == ["a red cat"]


def test_a_text_beside_an_image_of_a_table_is_named_where_it_differs(folder: Path) -> None:
    table = rows_of(
        "rows.jsonl", [{"file_name": "x.png", "text": " x\n"}, {"file_name": "sub/a.png", "text": "y"}], folder
    )
    assert read_manifest([table])[1] == ()
    (folder / "sub" / "a.txt").write_text("another", "utf-8")
    manifest, findings = read_manifest([table])
    assert captions_of(manifest) == {"x.png": "x", "a.png": "y"}
    assert [(each.code, each.severity, each.path) for each in findings] == [
        ("two_captions", "note", folder / "sub" / "a.png")
    ]


def test_keys_of_json_beside_images_that_are_mixed_are_named(folder: Path) -> None:
    """As gallery-dl writes for Pixiv: what the artist wrote as `caption`, and tags."""
    (folder / "sub" / "a.json").write_text('{"caption": "Thank you!", "tags": ["cat", "red"]}', "utf-8")
    manifest, findings = read_manifest([folder])
    assert captions_of(manifest)["a.png"] == "Thank you!"
    assert [(each.code, each.path) for each in findings] == [("mixed_columns", folder / "sub" / "a.png")]
    manifest, findings = read_manifest([folder], captions=CaptionsSection(column="tags"))
    assert captions_of(manifest)["a.png"] == "cat, red"
    assert findings == ()


def test_tags_in_groups_are_named(folder: Path) -> None:
    """As e621 gives them."""
    (folder / "sub" / "a.json").write_text('{"tags": {"general": ["cat"], "species": ["felid"]}, "id": 3}', "utf-8")
    findings = read_manifest([folder])[1]
    assert codes(findings) == [("missing_caption", "error")]
    assert "general, species" in findings[0].fix


@pytest.mark.parametrize(("wildcards", "found"), [(False, [("several_captions", "warning")]), (True, [])])
def test_a_list_of_tags_that_is_read_as_captions_is_named(
    folder: Path, wildcards: bool, found: list[tuple[str, str]]
) -> None:
    (folder / "sub" / "a.json").write_text('["1girl", "solo", "long hair", "smile"]', "utf-8")
    assert codes(read_manifest([folder], captions=CaptionsSection(wildcards=wildcards))[1]) == found


def test_a_damaged_json_beside_an_image_is_named(folder: Path) -> None:
    (folder / "sub" / "a.json").write_text("{", "utf-8")
    finding = read_manifest([folder])[1][0]
    assert (finding.code, finding.path) == ("bad_metadata", folder / "sub" / "a.png")
    assert "a.json" in finding.message


def test_a_table_of_addresses_says_why_it_is_not_read(folder: Path) -> None:
    """As LAION's tables are."""
    (folder / "laion.csv").write_text("URL,TEXT\nhttps://host/a.png,a red cat\n", "utf-8")
    with pytest.raises(UsageError) as refused:
        read_manifest([folder / "laion.csv"])
    assert "URL,TEXT" in refused.value.problems[0].message


def test_what_is_quoted_of_a_file_is_short(tmp_path: Path) -> None:
    image = noise_image(8, 8, 0).tobytes().hex() * 600
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": image, "text": "a"}), "utf-8")
    findings = read_manifest([tmp_path / "rows.jsonl"], allow_missing_captions=True)[1]
    assert len(image) > 200_000
    assert all(len(f"{each.message}{each.fix}") < LONGEST_WORD + LONGEST_LINE for each in findings)
