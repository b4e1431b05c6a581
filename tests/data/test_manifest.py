from __future__ import annotations

import json
import os
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.manifest import read_manifest
from tests.data.conftest import Draw


def captions_of(*sources: Path, allow: bool = False) -> dict[str, str]:
    manifest, _ = read_manifest(sources, allow_missing_captions=allow)
    return {sample.path.name: sample.caption for sample in manifest.samples}


def test_plain_folders_are_read_recursively_and_in_order(tmp_path: Path, draw: Draw) -> None:
    for seed, name in enumerate(["b.png", "a.PNG", "in/c.JPG", "in/deep/d.webp", "a/z.bmp"]):
        draw(tmp_path / name, seed=seed)
    draw(tmp_path / ".hidden.png")
    draw(tmp_path / ".thumbs" / "e.png")
    manifest, findings = read_manifest([tmp_path])
    relative = [sample.path.relative_to(tmp_path).as_posix() for sample in manifest.samples]
    assert relative == ["a.PNG", "a/z.bmp", "b.png", "in/c.JPG", "in/deep/d.webp"]
    assert findings == ()


def test_captions_next_to_the_image(tmp_path: Path, draw: Draw) -> None:
    for seed, name in enumerate("abcd"):
        draw(tmp_path / f"{name}.png", seed=seed, caption=None)
    (tmp_path / "a.txt").write_text("from  text\n", encoding="utf-8-sig")
    (tmp_path / "b.caption").write_text("from caption", encoding="utf-8")
    (tmp_path / "c.txt").write_text("preferred", encoding="utf-8")
    (tmp_path / "c.caption").write_text("not this", encoding="utf-8")
    (tmp_path / "d.txt").write_text("wide é", encoding="utf-16")
    manifest, findings = read_manifest([tmp_path])
    assert [sample.caption for sample in manifest.samples] == ["from text", "from caption", "preferred", "wide é"]
    assert [(finding.code, finding.severity) for finding in findings] == [("two_captions", "note")]


@pytest.mark.parametrize(
    ("text", "caption", "noted"),
    [
        ("1girl\nsolo\nlong hair\n", "1girl solo long hair", True),
        ("a cat\r\na dog", "a cat a dog", True),
        ("1girl,\nsolo,\nlong hair", "1girl, solo, long hair", False),
        ("A cat sits.\n\nIt is black.\n", "A cat sits. It is black.", False),
        ("a cat\n", "a cat", False),
    ],
)
def test_lines_that_are_joined_are_noted_once(tmp_path: Path, draw: Draw, text: str, caption: str, noted: bool) -> None:
    for seed in range(2):
        draw(tmp_path / f"{seed}.png", seed=seed, caption=None)
        (tmp_path / f"{seed}.txt").write_bytes(text.encode())
    manifest, findings = read_manifest([tmp_path])
    assert [sample.caption for sample in manifest.samples] == [caption] * 2
    assert findings == ()
    assert len([note for note in manifest.notes if "captions.wildcards" in note]) == noted
    section = SourceSection(path=str(tmp_path), captions=CaptionsSection(wildcards=True))
    assert not [note for note in read_manifest([section])[0].notes if "captions.wildcards" in note]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_unicode_names(tmp_path: Path, draw: Draw, form: str) -> None:
    name = unicodedata.normalize(form, "Käse 猫 🐈")
    draw(tmp_path / f"{name}.png", caption=None)
    line = {"file_name": unicodedata.normalize("NFC", f"{name}.png"), "text": "ein Käse"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line), encoding="utf-8")
    assert captions_of(tmp_path) == {f"{name}.png": "ein Käse"}


def test_kohya_folders_give_repeats_and_captions(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "10_sks cat" / "a.png", seed=1, caption=None)
    draw(tmp_path / "10_sks cat" / "b.png", seed=2, caption="its own")
    draw(tmp_path / "3_dog" / "more" / "c.png", seed=3, caption=None)
    draw(tmp_path / "loose" / "d.png", seed=4)
    draw(tmp_path / "0_left out" / "e.png", seed=5)
    draw(tmp_path / "2024_holiday" / "f.png", seed=6)
    manifest, findings = read_manifest([tmp_path])
    read = {sample.path.name: (sample.caption, sample.repeats) for sample in manifest.samples}
    assert read == {
        "a.png": ("sks cat", 10),
        "b.png": ("its own", 10),
        "c.png": ("dog", 3),
        "d.png": ("a thing", 1),
        "f.png": ("a thing", 1),
    }
    named = {finding.code: finding for finding in findings}
    assert {code: finding.severity for code, finding in named.items()} == {
        "numbered_folder": "note",
        "mixed_folders": "warning",
    }
    assert "2024_holiday" in named["numbered_folder"].message
    assert "loose" in named["mixed_folders"].message
    assert any("0 repeats" in note for note in manifest.notes)


def test_an_image_folder_with_metadata(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "train" / "a.png", seed=1, caption=None)
    draw(tmp_path / "train" / "in" / "b.png", seed=2, caption=None)
    rows = [
        '{"file_name": "a.png", "text": "first", "score": 3}',
        "",
        '{"file_name": "in/b.png", "text": "second"}',
        '{"file_name": "gone.png", "text": "third"}',
        "{broken",
        '{"text": "no name"}',
    ]
    (tmp_path / "train" / "metadata.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert captions_of(tmp_path) == {"a.png": "first", "b.png": "second"}
    _, findings = read_manifest([tmp_path])
    assert {(finding.code, finding.severity) for finding in findings} == {
        ("bad_metadata", "error"),
        ("absent_image", "warning"),
    }
    assert "line 5" in next(finding.message for finding in findings if finding.code == "bad_metadata")


def test_weights_of_metadata(tmp_path: Path, draw: Draw) -> None:
    values = {"a": 2, "b": 0.5, "c": 0, "d": -1, "e": float("nan"), "f": float("inf"), "g": "2", "h": True, "i": None}
    values |= {"j": 10**400, "k": -(10**309)}
    for name in values:
        draw(tmp_path / f"{name}.png", seed=ord(name), caption=f"the letter {name}")
    rows = [
        json.dumps({"file_name": f"{name}.png"} | ({"weight": weight} if name != "i" else {}))
        for name, weight in values.items()
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows), encoding="utf-8")
    manifest, findings = read_manifest([tmp_path])
    weights = {sample.path.stem: sample.weight for sample in manifest.samples}
    assert weights == {"a": 2.0, "b": 0.5, "c": 0.0} | dict.fromkeys("defghijk", 1.0)
    assert [(finding.code, finding.severity, finding.path.stem) for finding in findings if finding.path] == [
        ("unusual_weight", "warning", "c"),
        *(("bad_weight", "error", name) for name in "defghjk"),
    ]
    assert all(len(finding.message) < 80 for finding in findings)
    assert len(manifest.notes) == 1
    unweighted = replace(manifest, samples=tuple(replace(sample, weight=1.0) for sample in manifest.samples))
    assert manifest.data_hash != unweighted.data_hash


def test_weights_that_may_count_something_else_are_named(tmp_path: Path, draw: Draw) -> None:
    for source, weights in {"kilograms": (69, 10.5, 10), "usual": (1, 0.5, 10), "ones": (1, 1, None)}.items():
        rows = []
        for seed, weight in enumerate(weights):
            path = draw(tmp_path / source / f"{seed}.png", seed=seed, caption="a thing")
            rows.append(json.dumps({"file_name": path.name, "weight": weight}))
        (tmp_path / source / "metadata.jsonl").write_text("\n".join(rows), encoding="utf-8")
    notes = {}
    for source in ("kilograms", "usual", "ones"):
        section = SourceSection(path=str(tmp_path / source), loss_weight=0.01)
        manifest, findings = read_manifest([section])
        notes[source] = len(manifest.notes)
        if source == "kilograms":
            assert [(each.code, each.severity, each.path) for each in findings] == [
                ("unusual_weight", "warning", tmp_path / source / "0.png"),
                ("unusual_weight", "warning", tmp_path / source / "1.png"),
            ]
            assert "from 10 to 69" in manifest.notes[0]
        else:
            assert findings == ()
    assert notes == {"kilograms": 1, "usual": 1, "ones": 0}
    both = read_manifest([tmp_path / "kilograms", tmp_path / "usual"])[0]
    assert len(both.notes) == 2


def test_a_single_image(tmp_path: Path, draw: Draw) -> None:
    path = draw(tmp_path / "one.png", 30, 20)
    manifest, _ = read_manifest([path])
    (sample,) = manifest.samples
    assert (sample.path, sample.width, sample.height, sample.caption) == (path, 30, 20, "a thing")


def test_missing_and_empty_captions(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", seed=1, caption=None)
    draw(tmp_path / "b.png", seed=2, caption=" \n")
    _, findings = read_manifest([tmp_path])
    assert [(f.code, f.severity) for f in findings] == [("missing_caption", "error"), ("empty_caption", "error")]
    manifest, findings = read_manifest([tmp_path], allow_missing_captions=True)
    assert [sample.caption for sample in manifest.samples] == ["", ""]
    assert {finding.severity for finding in findings} == {"note"}


def test_a_caption_that_is_not_text(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png", caption=None)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    _, findings = read_manifest([tmp_path])
    assert [(finding.code, finding.severity) for finding in findings] == [("unreadable_caption", "error")]


def test_all_unreadable_images_are_reported_together(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "good.png")
    for name in ("x.png", "y.jpg"):
        (tmp_path / name).write_bytes(b"nonsense")
    manifest, findings = read_manifest([tmp_path])
    assert len(manifest.samples) == 1
    assert [(f.path.name if f.path else "", f.code) for f in findings] == [
        ("x.png", "unreadable"),
        ("y.jpg", "unreadable"),
    ]


def test_unused_files_are_named(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "phone.HEIC").write_bytes(b"x")
    (tmp_path / "lost.txt").write_text("a caption", encoding="utf-8")
    _, findings = read_manifest([tmp_path])
    assert {(finding.code, finding.severity) for finding in findings} == {
        ("foreign_format", "warning"),
        ("orphan_caption", "note"),
    }


def test_all_problems_of_sources_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.md").write_text("x", encoding="utf-8")
    (tmp_path / "file.zip").write_bytes(b"x")
    with pytest.raises(UsageError) as caught:
        read_manifest([tmp_path / "empty", tmp_path / "absent", tmp_path / "file.zip"])
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert ".png" in text
    assert "1 .md" in text
    assert str(tmp_path / "absent") in text
    with pytest.raises(UsageError, match="There is no data"):
        read_manifest([])


def test_the_same_source_twice_is_refused(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "in" / "a.png")
    with pytest.raises(UsageError, match="twice"):
        read_manifest([tmp_path, tmp_path / "in" / ".."])
    with pytest.raises(UsageError, match="contains the other"):
        read_manifest([tmp_path / "in", tmp_path])


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_linked_folders_are_followed_once(tmp_path: Path, draw: Draw) -> None:
    outside = tmp_path / "outside"
    draw(outside / "b.png", seed=1)
    draw(tmp_path / "set" / "a.png", seed=2)
    (tmp_path / "set" / "loop").symlink_to(tmp_path / "set", target_is_directory=True)
    (tmp_path / "set" / "link").symlink_to(outside, target_is_directory=True)
    assert sorted(captions_of(tmp_path / "set")) == ["a.png", "b.png"]


def test_the_hash_depends_only_on_content_caption_and_repeats(tmp_path: Path, draw: Draw) -> None:
    first = draw(tmp_path / "one" / "a.png", seed=1)
    draw(tmp_path / "one" / "b.png", seed=2)
    draw(tmp_path / "two" / "z.png", seed=2)
    draw(tmp_path / "two" / "renamed.png", seed=1)

    def hash_of(folder: str) -> str:
        return read_manifest([tmp_path / folder])[0].data_hash

    before = hash_of("one")
    assert before == hash_of("two")
    first.with_suffix(".txt").write_text("another", encoding="utf-8")
    changed = hash_of("one")
    assert changed != before
    Image.new("RGB", (64, 64)).save(first)
    assert hash_of("one") not in (before, changed)
    (tmp_path / "two").rename(tmp_path / "2_two")
    assert hash_of("2_two") != before


def test_nothing_is_written_beside_the_data(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png")
    before = sorted(tmp_path.rglob("*"))
    read_manifest([tmp_path])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_link_that_leads_nowhere_and_a_pipe_are_named(tmp_path: Path, draw: Draw) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(tmp_path / "pipe.png")
    manifest, findings = read_manifest([tmp_path])
    assert len(manifest.samples) == 1
    found = [(f.path.name if f.path else "", f.code) for f in findings]
    assert found == [("gone.png", "unreadable"), ("pipe.png", "unreadable")]
