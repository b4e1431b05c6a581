"""`check --clean-copy`: the copy is better, lists the changes, and the original is unchanged."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Manifest
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DataReport, DatasetGate, check_dataset
from lora_trainer.dataset_check.fix import FixedCopy, write_fixed
from tests.data.drawings import drawing, photo

FRAMING = Framing((128,), 16)


def section(source: Path | SourceSection) -> SourceSection:
    return source if isinstance(source, SourceSection) else SourceSection(path=str(source))


def judged(*sources: Path | SourceSection) -> tuple[Manifest, DataReport]:
    manifest, found = read_manifest([section(source) for source in sources])
    return manifest, check_dataset(manifest, found, DatasetGate([FRAMING] * len(sources), caption_limit=77))


def fixed(target: Path, *sources: Path | SourceSection) -> FixedCopy:
    manifest, report = judged(*sources)
    return write_fixed(report, manifest, [section(each) for each in sources], [FRAMING] * len(sources), target)


def moved(copy: FixedCopy, *sources: Path | SourceSection) -> list[SourceSection]:
    """The sources as `check` judges the copy."""
    changes = [{"path": str(root), "captions_file": None} for root in copy.roots]
    return [section(source).model_copy(update=change) for source, change in zip(sources, changes, strict=True)]


def rows_of(*sources: Path | SourceSection) -> list[tuple[str, str, float, float]]:
    """The samples that are trained."""
    return [(each.content, each.caption, each.repeats, each.weight) for each in judged(*sources)[0].samples]


def state(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def done_of(copy: FixedCopy) -> dict[str, tuple[str | None, str]]:
    return {each.path.name: (each.copy, "; ".join(each.done)) for each in copy.files}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    folder = tmp_path / "good"
    for number in range(8):
        place = folder / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        (photo if number % 2 else drawing)(160, 128, number).save(place)
        place.with_suffix(".txt").write_text(f"thing {number}\n", encoding="utf-8")
    return folder


@pytest.fixture
def bad(good: Path) -> Path:
    """The good dataset with one of every kind of fault."""
    (good / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    drawing(160, 128, 20).save(good / "lonely.png")
    shutil.copy(good / "1.png", good / "copy.png")
    photo(160, 128, 3).resize((200, 160)).save(good / "larger.png")
    drawing(160, 128, 21).save(good / "misnamed.png", "JPEG")
    frames = [drawing(160, 128, seed) for seed in (22, 23)]
    frames[0].save(good / "moving.gif", save_all=True, append_images=frames[1:])
    boxed = Image.new("RGB", (320, 300), "black")
    boxed.paste(photo(320, 240, 24), (0, 30))
    boxed.save(good / "boxed.jpg", quality=95)
    for name in ("copy", "larger", "misnamed", "moving", "boxed"):
        (good / f"{name}.txt").write_text(f"a thing  called\n {name} ", encoding="utf-8")
    drawing(160, 128, 25).save(good / "latin.png")
    (good / "latin.txt").write_bytes("ein Käfer".encode("cp1252"))
    drawing(160, 128, 26).save(good / "moji.png")
    (good / "moji.txt").write_text("ein KÃ¤fer", encoding="utf-8")
    (good / "orphan.txt").write_text("nobody", encoding="utf-8")
    return good


def test_a_good_dataset_is_copied_byte_for_byte(good: Path, tmp_path: Path) -> None:
    copy = fixed(tmp_path / "copy", good)
    assert all(each.done == () for each in copy.files)
    for path in good.iterdir():
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()
    assert judged(tmp_path / "copy")[1].score == 1.0


def test_every_fault_is_fixed_or_skipped(bad: Path, tmp_path: Path) -> None:
    before, report = state(bad), judged(bad)[1]
    copy = fixed(tmp_path / "copy", bad)
    assert state(bad) == before
    done = done_of(copy)
    assert done["broken.png"][0] is None
    assert done["lonely.png"] == (None, "skipped: has no caption.")
    assert done["copy.png"] == (None, "skipped: is a copy of 1.png.")
    assert done["3.png"] == (None, "skipped: looks the same as larger.png.")
    assert done["orphan.txt"][0] is None
    assert done["misnamed.png"] == ("misnamed.jpg", "renamed to misnamed.jpg")
    assert done["moving.gif"][0] == "moving.png"
    assert done["boxed.jpg"] == ("boxed.png", "border cut off: 320×238 left")
    folder = tmp_path / "copy"
    assert (folder / "misnamed.jpg").read_bytes() == (bad / "misnamed.png").read_bytes()
    assert (folder / "misnamed.txt").read_bytes() == (bad / "misnamed.txt").read_bytes()
    assert (folder / "latin.txt").read_text("utf-8") == "ein Käfer"
    assert (folder / "moji.txt").read_text("utf-8") == "ein Käfer"
    after = judged(folder)[1]
    assert after.findings == ()
    assert after.score == 1.0 > report.score
    record = json.loads((folder / "fixed.json").read_text("utf-8"))
    assert {Path(row["path"]).name: row["copy"] for row in record["files"]} == {
        name: place for name, (place, _) in done.items()
    }


def test_among_exact_copies_the_one_with_a_caption_is_kept(good: Path, tmp_path: Path) -> None:
    shutil.copy(good / "1.png", good / "0-first.png")
    manifest, findings = read_manifest([good], allow_missing_captions=True)
    report = check_dataset(manifest, findings, DatasetGate([FRAMING]))
    copy = write_fixed(report, manifest, [SourceSection(path=str(good))], [FRAMING], tmp_path / "copy")
    assert done_of(copy)["0-first.png"] == (None, "skipped: is a copy of 1.png.")
    assert (tmp_path / "copy" / "1.txt").is_file()


def test_files_that_are_no_samples_are_skipped_with_a_reason(good: Path, tmp_path: Path) -> None:
    (good / "text.png").write_text("no image", encoding="utf-8")
    action = done_of(fixed(tmp_path / "copy", good))["text.png"]
    assert action == (None, "skipped: is not an image in a known format.")


def test_folders_with_repeats_and_metadata_survive(good: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(good, data / "10_sks dog", ignore=shutil.ignore_patterns("[4-7].*", "3.txt"))
    (data / "plain").mkdir()
    rows = []
    for number in (4, 5, 6):
        shutil.copy(good / f"{number}.png", data / "plain")
        rows.append({"file_name": f"{number}.png", "text": f"of metadata {number}", "weight": number / 4, "other": 1})
    (data / "plain" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    fixed(tmp_path / "copy", data)

    def rows_of(folder: Path) -> list[tuple[str, str, float, float, str]]:
        return [
            (str(each.path.relative_to(folder)), each.caption, each.repeats, each.weight, each.content)
            for each in judged(folder)[0].samples
        ]

    assert rows_of(tmp_path / "copy") == rows_of(data)
    assert not (tmp_path / "copy" / "10_sks dog" / "3.txt").exists()


def test_several_sources_and_tars(good: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "more.tar", "w") as tar:
        for number in range(10, 16):
            drawing(160, 128, number).save(tmp_path / f"{number}.png")
            (tmp_path / f"{number}.txt").write_text(f"of the tar {number}", encoding="utf-8")
            tar.add(tmp_path / f"{number}.png", f"in/{number}.png")
            tar.add(tmp_path / f"{number}.txt", f"in/{number}.txt")
    copy = fixed(tmp_path / "copy", good, tmp_path / "more.tar")
    assert copy.roots == (tmp_path / "copy" / "good", tmp_path / "copy" / "more")
    before = judged(good, tmp_path / "more.tar")[0]
    after = judged(*copy.roots)[0]
    assert [(each.content, each.caption) for each in after.samples] == [
        (each.content, each.caption) for each in before.samples
    ]


def test_captions_of_the_set_extension_with_all_their_lines(good: Path, tmp_path: Path) -> None:
    for number in range(8):
        text = f"first {number}\r\nsecond  {number}\n" + ("un cafÃ©\n" if number == 1 else "")
        (good / f"{number}.caption").write_bytes(text.encode("utf-8"))
    captions = CaptionsSection(extension=".caption", wildcards=True)
    source = SourceSection(path=str(good), captions=captions)
    copy = fixed(tmp_path / "copy", source)
    assert {each.name for each in good.glob("*.caption")} == {each.name for each in copy.folder.glob("*.caption")}
    assert (copy.folder / "0.caption").read_bytes() == b"first 0\r\nsecond  0\n"
    assert not list(copy.folder.glob("*.txt"))
    after = judged(*moved(copy, source))
    assert after[1].score == 1.0
    assert [each.caption for each in after[0].samples][:2] == ["first 0\nsecond 0", "first 1\nsecond 1\nun café"]


def test_alternatives_survive_without_a_setting(good: Path, tmp_path: Path) -> None:
    (good / "0.txt").write_text("one\nother\n", encoding="utf-8")
    (good / "1.txt").write_bytes("un café\nl'été\n".encode("cp1252"))
    fixed(tmp_path / "copy", good)
    assert (tmp_path / "copy" / "0.txt").read_text("utf-8") == "one\nother\n"
    assert (tmp_path / "copy" / "1.txt").read_text("utf-8") == "un café\nl'été\n"


def test_the_loss_weight_of_a_row_is_kept(good: Path, tmp_path: Path) -> None:
    rows = [{"file_name": f"{number}.png", "weight": 0.5 if number else 1} for number in range(8)]
    (good / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = SourceSection(path=str(good), loss_weight=0.25)
    copy = fixed(tmp_path / "copy", source)
    assert [each[3] for each in rows_of(source)] == [0.25] + [0.125] * 7
    assert rows_of(*moved(copy, source)) == rows_of(source)


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_the_rows_of_a_table_stay_rows(good: Path, tmp_path: Path, ending: str) -> None:
    """Several rows for one image are several samples; rows without text use the caption file."""
    shutil.copy(good / "1.png", good / "copy.png")
    lines = [(f"good/{name}.png", text) for name in (*range(8), "copy") for text in (f"of {name}", f"a {name}")]
    lines.append(("good/2.png", ""))
    table = tmp_path / f"rows{ending}"
    if ending == ".csv":
        table.write_text("file_name,text\n" + "".join(f"{name},{text or 'thing 2'}\n" for name, text in lines))
    else:
        rows = [{"file_name": name} | ({"text": text, "weight": 0.5} if text else {}) for name, text in lines]
        table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    before = rows_of(table)
    assert len(before) == 19
    copy = fixed(tmp_path / "copy", table)
    assert copy.roots == (tmp_path / "copy" / "metadata.jsonl",)
    assert done_of(copy)["copy.png"] == (None, "skipped: is a copy of 1.png.")
    assert rows_of(*copy.roots) == before[:16] + before[18:]
    assert judged(*copy.roots)[1].score == 1.0


def test_two_sources_of_one_folder_with_different_captions_are_separate(good: Path, tmp_path: Path) -> None:
    rows = [{"file_name": f"{number}.png", "text": f"other {number}"} for number in range(8)]
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    again = SourceSection(path=str(good), captions_file=str(tmp_path / "other.jsonl"))
    copy = fixed(tmp_path / "copy", good, again)
    assert copy.roots == (tmp_path / "copy" / "good", tmp_path / "copy" / "2" / "good")
    assert rows_of(*moved(copy, good, again)) == rows_of(good, again)


def test_a_range_of_tars_is_one_source(good: Path, tmp_path: Path) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"part-{shard}.tar", "w") as tar:
            for number in range(4 * shard, 4 * shard + 4):
                for ending in (".png", ".txt"):
                    tar.add(good / f"{number}{ending}", f"{number}{ending}")
    tars = tmp_path / "part-{0..1}.tar"
    copy = fixed(tmp_path / "copy", tars)
    assert rows_of(*copy.roots) == rows_of(tars)


def test_the_copy_must_not_contain_images_that_a_table_names(good: Path, tmp_path: Path) -> None:
    table = tmp_path / "tables" / "rows.jsonl"
    table.parent.mkdir()
    table.write_text("".join(json.dumps({"file_name": f"../good/{n}.png", "text": "a"}) + "\n" for n in range(8)))
    with pytest.raises(UsageError, match="holds images of the data"):
        fixed(good, table)


def test_five_different_images_are_kept(good: Path, tmp_path: Path) -> None:
    """Fewer would score less than the copies cost."""
    for number in range(5, 8):
        photo(160, 128, 1).resize((160 + 8 * number, 128 + 6 * number)).save(good / f"{number}.png")
    for number in (3, 4):
        (good / f"{number}.png").unlink()
        (good / f"{number}.txt").unlink()
    fixed(tmp_path / "copy", good)
    assert len(judged(tmp_path / "copy")[0].samples) == 5
    assert judged(tmp_path / "copy")[1].score >= judged(good)[1].score


def test_a_target_that_is_not_empty_or_inside_the_data_is_refused(good: Path, tmp_path: Path) -> None:
    before = state(tmp_path)
    for place in (good / "copy", good, tmp_path, good.parent / "good" / ".." / "good" / "deep"):
        with pytest.raises(UsageError, match="in the data or around it"):
            fixed(place, good)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="not an empty folder"):
        fixed(tmp_path / "full", good)
    (tmp_path / "full" / "file").unlink()
    assert state(tmp_path) == before
    fixed(tmp_path / "full", good)
    assert len(judged(tmp_path / "full")[0].samples) == 8


def test_nothing_remains_when_the_disk_is_full(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(UsageError, match="no space left on device"):
        fixed(tmp_path / "copy", good)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good"]


def test_an_empty_result_is_reported(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    drawing(160, 128, 1).save(tmp_path / "data" / "lonely.png")
    with pytest.raises(UsageError, match="No image of the data would be left"):
        fixed(tmp_path / "copy", tmp_path / "data")
