"""Folders and tables with the settings of a source."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.core.findings import Finding
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Manifest
from lora_trainer.data.steps import Lengths, make_groups, step_arithmetic
from tests.data.conftest import Draw


def source(path: Path, **settings: Any) -> SourceSection:
    return SourceSection(path=str(path), **settings)


def captions_of(manifest: Manifest) -> dict[str, str]:
    return {sample.path.name: sample.caption for sample in manifest.samples}


def codes(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings]


def test_settings_of_a_source_apply_to_its_images(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "10_cat" / "a.png", seed=1, caption=None)
    draw(tmp_path / "10_cat" / "b.png", seed=2, caption="its own")
    draw(tmp_path / "dogs" / "5_dog" / "c.png", seed=3, caption=None)
    manifest, findings = read_manifest(
        [
            source(tmp_path / "10_cat", repeats=0.5, loss_weight=2.0, default_caption="a tom"),
            source(tmp_path / "dogs", is_reg=True),
        ]
    )
    assert findings == ()
    read = [(s.path.name, s.caption, s.repeats, s.weight, s.source, s.regularization) for s in manifest.samples]
    assert read == [
        ("a.png", "a tom", 0.5, 2.0, 0, False),
        ("b.png", "its own", 0.5, 2.0, 0, False),
        ("c.png", "dog", 5, 1.0, 1, True),
    ]


def test_regularization_is_trained_as_often_as_the_rest_and_all_of_it_in_time(tmp_path: Path, draw: Draw) -> None:
    for number in range(2):
        draw(tmp_path / "2_sks dog" / f"{number}.png", seed=number, caption=None)
    for number in range(10):
        draw(tmp_path / "class" / f"{number}.png", seed=10 + number, caption=None)
    sources = [source(tmp_path / "2_sks dog"), source(tmp_path / "class", is_reg=True, default_caption="a dog")]
    samples = read_manifest(sources)[0].samples
    prior = [group for group in make_groups(samples, seed=1) if samples[group.indices[0]].regularization]
    assert [group.seen for group in prior] == [4]
    seen = {prior[0].place(epoch, number)[0] for epoch in range(3) for number in range(4)}
    assert len(seen) == 10
    steps = step_arithmetic(samples, 1, Lengths(max_epochs=3))
    assert (steps.images, steps.passes, steps.regularization, steps.total) == (2, 8, 4, 24)
    assert "2 images x 2 repeats + 4 regularization / effective" in steps.line
    with pytest.raises(UsageError, match="All data is regularization"):
        read_manifest(sources[1:])


def test_a_table_with_another_name_is_suggested(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", seed=1, caption=None)
    (tmp_path / "data.csv").write_text("image,caption\na.png,a cat\n", encoding="utf-8")
    fix = read_manifest([tmp_path])[1][0].fix
    assert fix.startswith("data.csv is here: name it as captions_file")
    assert read_manifest([source(tmp_path, captions_file=str(tmp_path / "data.csv"))])[1] == ()


def test_the_caption_extension(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", seed=1, caption="text")
    draw(tmp_path / "b.png", seed=2, caption="text")
    (tmp_path / "a.tags").write_text("tags", encoding="utf-8")
    manifest, findings = read_manifest([tmp_path], captions=CaptionsSection(extension="tags"))
    assert captions_of(manifest) == {"a.png": "tags", "b.png": ""}
    assert codes(findings) == [("missing_caption", "error")]
    assert "b.txt" in findings[0].message
    assert "b.tags" in findings[0].message
    own = source(tmp_path, captions=CaptionsSection(extension=".txt"))
    assert captions_of(read_manifest([own], captions=CaptionsSection(extension="tags"))[0])["a.png"] == "text"


def test_caption_lines_are_separate_only_when_one_is_chosen(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", caption="one  cat\n\n two cats \n")
    assert captions_of(read_manifest([tmp_path])[0]) == {"a.png": "one cat two cats"}
    chosen = read_manifest([tmp_path], captions=CaptionsSection(wildcards=True))[0]
    assert captions_of(chosen) == {"a.png": "one cat\ntwo cats"}


TABLES = {
    "all.jsonl": '{"file_name": "a.png", "text": "first, cat"}\n{"file_name": "in/b.png", "caption": "second"}\n',
    "all.csv": 'file_name,prompt\na.png,"first, cat"\nin/b.png,second\n',
    "all.tsv": "image\tcaption\na.png\tfirst, cat\nin/b.png\tsecond\n",
    "rows.json": '[{"file_name": "a.png", "text": "first, cat"}, {"file_name": "in/b.png", "text": "second"}]',
    "kohya.json": '{"/elsewhere/a": {"caption": "first", "tags": "cat"}, "in/b": {"tags": ["second"]}}',
    "plain.json": '{"a.png": "first, cat", "in\\\\b.png": "second"}',
    "tabs.txt": "a.png\tfirst, cat\nin/b.png\tsecond\n",
    "bars.txt": "a.png|first, cat\nb.png | second\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_captions_in_one_file(tmp_path: Path, draw: Draw, name: str) -> None:
    draw(tmp_path / "set" / "a.png", seed=1, caption="of its own")
    draw(tmp_path / "set" / "in" / "b.png", seed=2, caption=None)
    draw(tmp_path / "set" / "in" / "c.png", seed=3, caption="kept")
    (tmp_path / name).write_text(TABLES[name], encoding="utf-8")
    manifest, findings = read_manifest([source(tmp_path / "set", captions_file=str(tmp_path / name))])
    assert captions_of(manifest) == {"a.png": "first, cat", "b.png": "second", "c.png": "kept"}
    # One of its rows has `text`, and one has `caption`.
    assert codes(findings) == ([("mixed_columns", "note")] if name == "all.jsonl" else [])
    assert any("2 of 3" in note for note in manifest.notes)


def test_a_captions_file_keeps_weights_that_it_does_not_set(tmp_path: Path, draw: Draw) -> None:
    rows = []
    for seed, (name, weight) in enumerate({"a": 0.5, "b": 2.0, "c": 3.0}.items()):
        draw(tmp_path / f"{name}.png", seed=seed, caption=None)
        rows.append({"file_name": f"{name}.png", "text": "old", "weight": weight})
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "new.csv").write_text("file_name,text,weight\na.png,new,\nb.png,new,4\n", "utf-8")
    (tmp_path / "new.txt").write_text("a.png|new\nb.png|new\n", "utf-8")

    def weights(name: str) -> dict[str, float]:
        manifest = read_manifest([source(tmp_path, captions_file=str(tmp_path / name), loss_weight=10.0)])[0]
        assert captions_of(manifest) == {"a.png": "new", "b.png": "new", "c.png": "old"}
        return {sample.path.stem: sample.weight for sample in manifest.samples}

    assert weights("new.txt") == {"a": 5.0, "b": 20.0, "c": 30.0}
    assert weights("new.csv") == {"a": 5.0, "b": 40.0, "c": 30.0}


@pytest.mark.parametrize("extension", ["metadata.jsonl", "captions.jsonl"])
def test_several_rows_of_one_image_are_reported(tmp_path: Path, draw: Draw, extension: str) -> None:
    for seed, name in enumerate("ab"):
        draw(tmp_path / f"{name}.png", seed=seed, caption=None)
    texts = [("a", "first"), ("a", "second"), ("b", "same"), ("a", "third"), ("b", "same")]
    rows = [json.dumps({"file_name": f"{name}.png", "text": text}) for name, text in texts]
    (tmp_path / extension).write_text("\n".join(rows), "utf-8")
    settings = {} if extension == "metadata.jsonl" else {"captions_file": str(tmp_path / extension)}
    manifest, findings = read_manifest([source(tmp_path, **settings)])
    assert captions_of(manifest) == {"a.png": "third", "b.png": "same"}
    assert [(finding.code, finding.path) for finding in findings] == [("two_captions", tmp_path / extension)]
    assert findings[0].message.startswith("2 lines are not used")


def test_a_captions_file_of_other_images_is_a_mistake(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "set" / "a.png")
    (tmp_path / "all.csv").write_text("file_name,text\nzebra.png,striped\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"names zebra\.png, the data has a\.png"):
        read_manifest([source(tmp_path / "set", captions_file=str(tmp_path / "all.csv"))])


def test_a_table_as_data(tmp_path: Path, draw: Draw) -> None:
    for seed, name in enumerate(["a.png", "in/b.png", "c.png"]):
        draw(tmp_path / name, seed=seed, caption="beside")
    rows = [{"file_name": "in/b.png", "text": "second", "weight": 3}, {"file_name": "a.png"}, {"file_name": "no.png"}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    manifest, findings = read_manifest([tmp_path / "some.jsonl"])
    assert [(s.path.name, s.caption, s.weight) for s in manifest.samples] == [
        ("b.png", "second", 3.0),
        ("a.png", "beside", 1.0),
    ]
    assert codes(findings)[-1] == ("unreadable", "error")
    (tmp_path / "web.csv").write_text("file_name,text\nhttps://x.example/a.png,far\n", encoding="utf-8")
    with pytest.raises(UsageError, match="by their address"):
        read_manifest([tmp_path / "web.csv"])


def test_metadata_csv_in_splits(tmp_path: Path, draw: Draw) -> None:
    for seed, name in enumerate(["train/a.png", "test/a.png"]):
        draw(tmp_path / name, seed=seed, caption=None)
        text = f"file_name,caption,weight\na.png,{name},{seed + 0.5}\n"
        (tmp_path / name).with_name("metadata.csv").write_text(text, encoding="utf-8")
    samples = read_manifest([tmp_path])[0].samples
    assert [(s.caption, s.weight) for s in samples] == [("test/a.png", 1.5), ("train/a.png", 0.5)]


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ', "null", '[{"text": "no name"}]'])
def test_an_invalid_table_is_one_finding(tmp_path: Path, draw: Draw, text: str) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "table.json").write_text(text, encoding="utf-8")
    _, findings = read_manifest([source(tmp_path, captions_file=str(tmp_path / "table.json"))])
    assert codes(findings) == [("bad_metadata", "error")] * 2


def test_a_caption_file_too_large_or_no_file_is_a_finding(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", seed=1, caption=None)
    draw(tmp_path / "b.png", seed=2, caption=None)
    with open(tmp_path / "a.txt", "wb") as file:
        file.truncate(1 << 30)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "b.txt")  # never listed, so never opened
    _, findings = read_manifest([tmp_path])
    assert sorted(codes(findings)) == [("missing_caption", "error"), ("unreadable_caption", "error")]


def test_the_same_folder_twice_only_with_other_settings(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png")
    with pytest.raises(UsageError, match="twice"):
        read_manifest([source(tmp_path, repeats=2), source(tmp_path, loss_weight=3)])
    manifest, findings = read_manifest([source(tmp_path, resolutions=(512,)), source(tmp_path, resolutions=(768,))])
    assert [(sample.path.name, sample.source) for sample in manifest.samples] == [("a.png", 0), ("a.png", 1)]
    assert findings == ()
    assert any("2 sources" in note for note in manifest.notes)


def test_order_does_not_depend_on_the_file_system(tmp_path: Path, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate(["b/x.png", "a.png", "a/z.png", "c.png"]):
        draw(tmp_path / name, seed=seed)
    before = read_manifest([tmp_path])[0]
    scandir = os.scandir

    class Reversed:
        def __init__(self, path: str) -> None:
            with scandir(path) as entries:
                self.entries = list(entries)[::-1]

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self.entries

        def __exit__(self, *error: object) -> None:
            return None

    monkeypatch.setattr(os, "scandir", Reversed)
    assert read_manifest([tmp_path])[0].samples == before.samples


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names are Unicode there")
def test_a_name_that_is_not_utf_8(tmp_path: Path, draw: Draw) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/3_caf\xe9"))
    draw(folder / "a.png", caption=None)
    manifest, findings = read_manifest([tmp_path])
    (sample,) = manifest.samples
    assert sample.path.is_file()
    assert sample.caption.encode("utf-8").decode("utf-8").startswith("caf")
    assert findings == ()
    assert len(manifest.data_hash) == 64


def test_all_problems_are_reported_together(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "good" / "a.png")
    (tmp_path / "empty").mkdir()
    sources = [
        source(tmp_path / "good", masks=str(tmp_path / "nowhere"), captions_file=str(tmp_path / "none.csv")),
        source(tmp_path / "empty"),
        source(tmp_path / "gone-{00..03}.tar"),
    ]
    with pytest.raises(UsageError) as caught:
        read_manifest(sources)
    assert len(caught.value.problems) == 4


CSV_ROWS = [
    ("file_name,text\na.png,a red bag, 4k,sunny\n", "a red bag, 4k,sunny", 1),
    ('file_name,score,caption\na.png,7,"a ""red"" bag", 4k\n', 'a "red" bag, 4k', 1),
    ('file_name, text\na.png, "a red bag, 4k"\n', "a red bag, 4k", 0),
    ("file_name;text\na.png;a red bag; sunny\n", "a red bag; sunny", 1),
    ("file_name\ttext\r\na.png\ta red bag\t\r\n", "a red bag", 0),
    ("file_name,text\ra.png,a red bag,,\r", "a red bag", 0),
    ("file_name,text,weight\na.png,a red bag,1,,\n", "a red bag", 0),
]


@pytest.mark.parametrize(("text", "caption", "notes"), CSV_ROWS)
def test_captions_of_csv_are_whole_with_and_without_quotes(
    tmp_path: Path, draw: Draw, text: str, caption: str, notes: int
) -> None:
    draw(tmp_path / "a.png", caption=None)
    (tmp_path / "metadata.csv").write_bytes(text.encode())
    manifest, findings = read_manifest([tmp_path])
    assert captions_of(manifest) == {"a.png": caption}
    assert findings == ()
    assert len(manifest.notes) == notes


@pytest.mark.parametrize("names", ["file_name,text,score", "text,file_name", "file_name,text,tags"])
def test_a_row_of_csv_with_too_many_cells_is_a_bad_line(tmp_path: Path, draw: Draw, names: str) -> None:
    draw(tmp_path / "a.png", caption=None)
    count = names.count(",") + 1
    good = ",".join("a.png" if name == "file_name" else "1" for name in names.split(","))
    (tmp_path / "metadata.csv").write_text(f"{names}\n{good}\n{'a.png,' * count}x\n", "utf-8")
    manifest, findings = read_manifest([tmp_path])
    assert captions_of(manifest) == {"a.png": "1"}
    several = [("mixed_columns", "note")] if "text,tags" in names else []
    assert codes(findings) == [("bad_metadata", "error"), *several]
    assert "line 3" in findings[0].message
    assert findings[0].path == tmp_path / "metadata.csv"


def read_folders(root: Path, draw: Draw, *names: str, **settings: Any) -> tuple[Manifest, tuple[Finding, ...]]:
    """A source of one image in each folder, none with a caption of its own."""
    for seed, name in enumerate(names):
        draw(root / name, seed=seed, caption=None)
    return read_manifest([source(root, **settings)], allow_missing_captions=True)


def repeats_of(manifest: Manifest, root: Path) -> dict[str, tuple[float, str]]:
    return {each.path.parent.relative_to(root).as_posix(): (each.repeats, each.caption) for each in manifest.samples}


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (("100_PANA", "101_PANA", "102CANON"), "note"),
        (("001_albatross", "200_wren"), "note"),
        (("2024_holiday", "512_crops"), "note"),
        (("1_raw", "2_edited", "3_final"), "warning"),
    ],
)
def test_numbers_of_folders_that_are_no_repeats(
    tmp_path: Path, draw: Draw, folders: tuple[str, ...], found: str
) -> None:
    manifest, findings = read_folders(tmp_path, draw, *(f"{name}/{name}.png" for name in folders))
    assert repeats_of(manifest, tmp_path) == dict.fromkeys(folders, (1, ""))
    assert [each for each in codes(findings) if each[0] != "missing_caption"] == [("numbered_folder", found)]


def test_what_is_taken_from_kohya_folders_is_one_line(tmp_path: Path, draw: Draw) -> None:
    manifest, findings = read_folders(tmp_path, draw, "10_sks cat/a.png", "10_sks cat/in/b.png", "1_dog/c.png")
    assert repeats_of(manifest, tmp_path) == {
        "10_sks cat": (10, "sks cat"),
        "10_sks cat/in": (10, "sks cat"),
        "1_dog": (1, "dog"),
    }
    assert findings == ()
    (note,) = manifest.notes
    assert all(each in note for each in ("10_sks cat", "10 repeats", '"sks cat"', "1_dog", '"dog"'))
    assert codes(read_folders(tmp_path, draw, "more/d.png")[1])[0] == ("mixed_folders", "warning")


def test_folders_beside_the_images_are_no_samples_or_are_named(tmp_path: Path, draw: Draw) -> None:
    """Masks, control images and regularization images, inside and beside kohya's folders, and one folder too high."""
    names = ["img/10_cat/a.png", "img/10_cat/b.jpg", "img/masks/a.png", "img/10_cat/Depth/b.jpg.png", "reg/1_cat/x.png"]
    manifest, findings = read_folders(tmp_path, draw, *names)
    assert repeats_of(manifest, tmp_path) == {"img/10_cat": (10, "cat")}
    assert codes(findings) == [("side_folder", "warning")] * 2 + [("reg_folder", "warning")]
    draw(tmp_path / "img" / "masks" / "other.png", seed=9)
    manifest, findings = read_manifest([tmp_path])
    assert {sample.path.parent.name for sample in manifest.samples} == {"10_cat", "masks"}
    assert ("side_folder", "warning") in codes(findings)
    reg = read_manifest([source(tmp_path / "img"), source(tmp_path / "reg", is_reg=True)])[0]
    assert [each.path.name for each in reg.samples if each.regularization] == ["x.png"]


def test_images_with_captions_are_trained_whatever_their_folder_is_named(tmp_path: Path, draw: Draw) -> None:
    """Groups of an experiment, expressions. Folders of ordinary words are trained without captions, too."""
    groups = ("smiling", "normal", "control")
    for seed, (group, number) in enumerate((group, number) for group in (*groups, "Depth") for number in (1, 2)):
        draw(tmp_path / "own" / group / f"{number}.png", seed=seed, caption=f"a face, {group}")
    manifest, findings = read_manifest([tmp_path / "own"])
    assert len(manifest.samples) == 8
    assert codes(findings) == [("side_folder", "warning")] * 3
    for seed, group in enumerate((*groups, "masks")):
        draw(tmp_path / "bare" / group / "1.png", seed=seed, caption=None)
    manifest, findings = read_manifest([tmp_path / "bare"], allow_missing_captions=True)
    assert [sample.path.parent.name for sample in manifest.samples] == ["control", "normal", "smiling"]
    assert [each for each in codes(findings) if each[0] == "side_folder"] == [("side_folder", "warning")] * 3
    # A table has captions, too, and only that of an image counts.
    (tmp_path / "bare" / "metadata.csv").write_text("file_name,text\nmasks/1.png,a carnival mask\n", "utf-8")
    manifest, findings = read_manifest([tmp_path / "bare"], allow_missing_captions=True)
    assert "a carnival mask" in [sample.caption for sample in manifest.samples]
    # The masks of images that an ordinary word names are none.
    for seed, group in enumerate(("normal", "masks")):
        draw(tmp_path / "two" / group / "1.png", seed=seed, caption=None)
    manifest, findings = read_manifest([tmp_path / "two"], allow_missing_captions=True)
    assert [sample.path.parent.name for sample in manifest.samples] == ["normal"]


def test_control_images_beside_the_images_are_no_samples(tmp_path: Path, draw: Draw) -> None:
    names = ("a.png", "a-condlabel.png", "a-masklabel.png")
    manifest, findings = read_folders(tmp_path, draw, *names)
    assert [sample.path.name for sample in manifest.samples] == ["a.png"]
    assert codes(findings) == [("missing_caption", "note")]
    assert len(manifest.notes) == 2
    paired = source(tmp_path, control_images=(f"{tmp_path}/*-condlabel",), default_caption="a")
    (sample,) = read_manifest([paired])[0].samples
    assert [control.path.name for control in sample.controls] == ["a-condlabel.png"]


def test_parts_of_a_split_that_are_trained_together_are_named(tmp_path: Path, draw: Draw) -> None:
    names = ("train/a.png", "val/b.png", "Test/c.png")
    manifest, findings = read_folders(tmp_path, draw, *names, default_caption="a thing")
    assert len(manifest.samples) == 3
    assert codes(findings) == [("split_folders", "warning")]
    assert str(tmp_path / "train") in findings[0].fix
    assert read_manifest([source(tmp_path / "train", default_caption="a thing")])[1] == ()
    for name in ("train-00.tar", "test-00.tar"):
        (tmp_path / "shards").mkdir(exist_ok=True)
        with tarfile.open(tmp_path / "shards" / name, "w") as tar:
            tar.add(tmp_path / "train" / "a.png", "a.png")
    assert codes(read_manifest([source(tmp_path / "shards", default_caption="a thing")])[1]) == [
        ("split_folders", "warning")
    ]


def test_what_other_programs_leave_beside_images_is_counted(tmp_path: Path, draw: Draw) -> None:
    for name in ("._a.png", "._b.png", "Thumbs.db", "a.CR2", "b.heic", ".c.jpg.icloud", ".d.txt.icloud"):
        (tmp_path / name).write_bytes(b"x")
    draw(tmp_path / "A.JPG", seed=1, caption="a thing")
    manifest, findings = read_manifest([tmp_path])
    assert [sample.path.name for sample in manifest.samples] == ["A.JPG"]
    # A raw file beside the JPEG of its name is no image that is missing.
    assert codes(findings) == [("not_downloaded", "warning"), ("foreign_format", "warning")]
    assert findings[1].path == tmp_path / "b.heic"
    assert "c.jpg" in findings[0].message
    (note,) = manifest.notes
    assert all(each in note for each in ("2 ._", "1 .db", "1 .cr2", "1 .heic"))
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / ".c.jpg.icloud").write_bytes(b"x")
    with pytest.raises(UsageError, match="iCloud"):
        read_manifest([tmp_path / "away"])


@pytest.mark.parametrize("name", ["@eaDir", "#recycle", "__MACOSX", "lost+found"])
def test_what_a_system_keeps_in_a_folder_is_not_trained(tmp_path: Path, draw: Draw, name: str) -> None:
    draw(tmp_path / "cat.png", seed=1, caption="a cat")
    draw(tmp_path / name / "cat.png" / "thumbnail.png", seed=2, caption="a thumbnail")
    draw(tmp_path / "kept" / "@eaDir of mine" / "dog.png", seed=3, caption="a dog")
    manifest, findings = read_manifest([source(tmp_path)])
    assert captions_of(manifest) == {"cat.png": "a cat", "dog.png": "a dog"}
    assert findings == ()
