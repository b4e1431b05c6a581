"""Texts in UTF-16 and with characters that show nothing, in every place where captions and settings are read."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.config.toml import read_toml
from lora_trainer.core.bounded import TextError, decode
from lora_trainer.core.errors import UsageError
from lora_trainer.core.findings import Finding
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Sample
from lora_trainer.data.sources.texts import hidden_characters, tidy
from lora_trainer.importers.imported import import_file

UNMARKED = ("utf-16-le", "utf-16-be")
TEXTS = (
    "a red cat", "1girl, solo, café", "a", "ab\r\n", '{"caption": "a cat"}', "a cat 🙂", "красный кот на траве", "γάτα και σκύλος",
    "ねこ と いぬ", "赤い猫 と 犬", "一只红色的猫, best", "한국어 고양이", "قطة سوداء", "高い山、青い空\n", "中 文",
)  # fmt: skip


@pytest.mark.parametrize("encoding", [*UNMARKED, "utf-16", "utf-32", "utf-8", "utf-8-sig"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_encoding_that_can_be_recognized_is_read(text: str, encoding: str) -> None:
    assert decode(text.encode(encoding)).rstrip("\0") == text


@pytest.mark.parametrize(
    "data",
    [
        b"a red\0cat",
        b"bered\0cats",  # as UTF-16: three Chinese letters and two others
        b"cat\0dog\0",
        b"\0abcabc",
        "a red cat".encode("utf-16-le") + b"\n",  # a line end of one byte, by another program
        b"a cat\n" + "a dog\n".encode("utf-16-le"),
        "a red cat".encode("utf-32-le"),
        b"PK\3\4\0\0\0\0\x14\0",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    ],
)
def test_zero_bytes_that_are_no_utf16_are_refused(data: bytes) -> None:
    with pytest.raises(TextError):
        decode(data)


def scene() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (32, 24), "red").save(out, "PNG")
    return out.getvalue()


Place = Callable[[Path, str, str], SourceSection]


def beside(folder: Path, caption: str, encoding: str) -> SourceSection:
    (folder / "a.txt").write_bytes(caption.encode(encoding))
    return SourceSection(path=str(folder))


def other_ending(folder: Path, caption: str, encoding: str) -> SourceSection:
    (folder / "a.tags").write_bytes(caption.encode(encoding))
    return SourceSection(path=str(folder), captions=CaptionsSection(extension=".tags"))


def in_a_tar(folder: Path, caption: str, encoding: str) -> SourceSection:
    (folder / "a.png").unlink()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, data in (("a.png", scene()), ("a.txt", caption.encode(encoding))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return SourceSection(path=str(folder / "a.tar"))


def in_jsonl(folder: Path, caption: str, encoding: str) -> SourceSection:
    row = json.dumps({"file_name": "a.png", "text": caption}) + "\n"
    (folder / "metadata.jsonl").write_bytes(row.encode(encoding))
    return SourceSection(path=str(folder))


def in_csv(folder: Path, caption: str, encoding: str) -> SourceSection:
    table = folder.with_suffix(".csv")
    table.write_bytes(f'file_name,text\na.png,"{caption}"\n'.encode(encoding))
    return SourceSection(path=str(folder), captions_file=str(table))


BESIDE = (beside, other_ending, in_a_tar)
PLACES = (*BESIDE, in_jsonl, in_csv)


def read(folder: Path, place: Place, caption: str, encoding: str = "utf-8") -> tuple[Sample, list[Finding]]:
    folder.mkdir(exist_ok=True)
    (folder / "a.png").write_bytes(scene())
    manifest, findings = read_manifest([place(folder, caption, encoding)])
    (sample,) = manifest.samples
    return sample, list(findings)


@pytest.mark.parametrize("encoding", UNMARKED)
@pytest.mark.parametrize("place", PLACES)
def test_a_caption_in_utf16_is_trained_as_it_reads(place: Place, encoding: str, tmp_path: Path) -> None:
    sample, findings = read(tmp_path / "data", place, "a red cat", encoding)
    assert (sample.caption, findings) == ("a red cat", [])


@pytest.mark.parametrize("place", BESIDE)
def test_a_caption_with_zero_bytes_inside_is_refused(place: Place, tmp_path: Path) -> None:
    _, findings = read(tmp_path / "data", place, "a red\0cat")
    assert [(each.code, each.severity) for each in findings] == [("unreadable_caption", "error")]


HIDDEN = {
    "a red cat\0\0": "a red cat",
    "a red cat\0\0\n": "a red cat",
    "a \u200bred\u200b cat": "a red cat",
    "Hin\u00adter\u00adhof": "Hinterhof",
    "a red\ufeff cat": "a red cat",
    "\ufeff\ufeffa red cat": "a red cat",  # two marks: the first is that of the file
    "a \u202ered\u202c cat": "a red cat",
    "a\u200e cat\u2060": "a cat",
    "a red\u200d cat": "a red cat",
    "a\x1b[31m cat\x07": "a[31m cat",
    "a cat\U000e0041": "a cat",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("written", HIDDEN)
def test_characters_that_show_nothing_are_left_out_and_named(place: Place, written: str, tmp_path: Path) -> None:
    if place is in_csv and "\0" in written:
        pytest.skip("no CSV has zero bytes")
    sample, findings = read(tmp_path / "data", place, written)
    assert sample.caption == HIDDEN[written]
    named = [(each.code, each.severity, each.path) for each in findings]
    assert named == [("hidden_characters", "note", sample.path)]


@pytest.mark.parametrize("written", ["\u200b", "\0\0", "\u00ad\u2060", "\ufeff\u200b \u200d"])
def test_a_caption_that_shows_nothing_is_empty(written: str, tmp_path: Path) -> None:
    sample, findings = read(tmp_path / "data", beside, written)
    assert sample.caption == ""
    assert [(each.code, each.severity) for each in findings] == [("empty_caption", "error")]


@pytest.mark.parametrize(
    "text",
    [
        "👩‍🚀 an astronaut", "👨‍👩‍👧‍👦", "❤️‍🔥", "🏴󠁧󠁢󠁥󠁮󠁧󠁿 flag", "🏳️‍🌈", "گربه‌ای که می‌خوابد", "क्‍षेत्र", "ශ්‍රී ලංකා",
        "แมว\u200bดำ", "\u200fחתול (cat)\u200f שחור", "\u2067قطة\u2069 cat", "naïve café", "한국어", "a\tcat",
    ],
)  # fmt: skip
def test_characters_that_a_script_or_an_emoji_needs_stay(text: str) -> None:
    assert hidden_characters(text) == []
    assert tidy(text, keep_lines=False) == " ".join(text.split())


def test_lines_of_wildcards_stay_apart(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(scene())
    (tmp_path / "a.txt").write_bytes("a cat\n\u200b\na dog\u200b\n".encode("utf-16-le"))
    source = SourceSection(path=str(tmp_path), captions=CaptionsSection(wildcards=True))
    manifest, _ = read_manifest([source])
    assert manifest.samples[0].caption == "a cat\na dog"


@pytest.mark.parametrize("encoding", [*UNMARKED, "utf-16", "utf-8-sig"])
def test_a_config_in_utf16_is_read(encoding: str, tmp_path: Path) -> None:
    """As PowerShell's `>` writes it."""
    path = tmp_path / "a.toml"
    path.write_bytes('[captions]\ntrigger_word = "zobo"\n'.encode(encoding))
    assert read_toml(path) == {"captions": {"trigger_word": "zobo"}}


def test_a_config_with_zero_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b'[captions]\ntrigger_word = "zo\0bo"\n')
    with pytest.raises(UsageError):
        read_toml(path)


@pytest.mark.parametrize("encoding", [*UNMARKED, "utf-16", "utf-8"])
def test_a_file_of_prompts_in_utf16_is_imported(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("a red cat --w 512\na dog\n".encode(encoding))
    config = tmp_path / "kohya.toml"
    config.write_bytes('network_module = "networks.lora"\nsample_prompts = "prompts.txt"\n'.encode(encoding))
    assert import_file(config).settings["sample.prompts"] == ["a red cat", "a dog"]
