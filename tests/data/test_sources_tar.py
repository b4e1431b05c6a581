"""WebDataset tars, read in place."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.images.images import BrokenImageError, load_rgb
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sources.found import SourceReading, SourceRequest
from lora_trainer.data.sources.tar import read_tar
from tests.data.conftest import Draw, noise_image


def image(seed: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    noise_image(24, 16, seed).save(out, kind)
    return out.getvalue()


def write_tar(path: Path, members: dict[str, bytes], style: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=style) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def one_shard(path: Path, first: int = 0) -> Path:
    text = json.dumps({"caption": "from json", "weight": 2, "width": 24}).encode()
    members = {f"{first:05}.png": image(first), f"{first:05}.txt": b"a cat\n", f"{first:05}.cls": b"3"}
    members |= {f"{first + 1:05}.jpg": image(first + 1, "JPEG"), f"{first + 1:05}.json": text}
    return write_tar(path, members)


def test_members_of_one_key_are_a_sample(tmp_path: Path) -> None:
    path = one_shard(tmp_path / "data.tar")
    before = path.read_bytes()
    manifest, findings = read_manifest([path])
    assert findings == ()
    first, second = manifest.samples
    assert (first.path, first.caption, first.weight) == (path / "00000.png", "a cat", 1.0)
    assert (second.path, second.caption, second.weight) == (path / "00001.jpg", "from json", 2.0)
    assert load_rgb(first.path, first.span).tobytes() == noise_image(24, 16, 0).tobytes()
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [path]


def test_shards_by_range_by_folder_and_side_by_side_with_images(tmp_path: Path, draw: Draw) -> None:
    for number in range(3):
        one_shard(tmp_path / f"data-{number:03}.tar", 2 * number)
    ranged, _ = read_manifest([tmp_path / "data-{000..002}.tar"])
    whole, _ = read_manifest([tmp_path])
    assert ranged.samples == whole.samples
    assert [sample.path.parent.name for sample in whole.samples][::2] == [f"data-{n:03}.tar" for n in range(3)]
    some, _ = read_manifest([tmp_path / "data-{002,000}.tar"])
    assert [sample.path.parent.name for sample in some.samples][::2] == ["data-002.tar", "data-000.tar"]
    draw(tmp_path / "z.png", seed=99)
    assert len(read_manifest([tmp_path])[0].samples) == 7
    with pytest.raises(UsageError, match="2 of 5 files"):
        read_manifest([tmp_path / "data-{000..004}.tar"])
    with pytest.raises(UsageError, match="twice"):
        read_manifest([tmp_path / "data-{000..001}.tar", tmp_path / "data-001.tar"])
    with pytest.raises(UsageError, match="are the most"):
        read_manifest([tmp_path / "data-{000..999999}.tar"])


def test_compressed_tars_are_refused_with_the_fix(tmp_path: Path) -> None:
    plain = one_shard(tmp_path / "plain.tar")
    for name in ("a.tar.gz", "b.tar"):
        (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(UsageError) as caught:
        read_manifest([tmp_path / "a.tar.gz", tmp_path / "b.tar"])
    assert len(caught.value.problems) == 2
    assert all("compressed" in problem.message and "npack" in problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize("damage", ["cut in an image", "cut in a header", "overwritten header", "overwritten image"])
def test_members_before_the_damage_are_used(tmp_path: Path, damage: str) -> None:
    path = write_tar(tmp_path / "data.tar", {f"{n}.png": image(n) for n in range(3)})
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        last = tar.getmembers()[2]
    if damage == "cut in an image":
        del data[last.offset_data + 100 :]
    elif damage == "cut in a header":
        del data[last.offset + 200 :]
    elif damage == "overwritten header":
        data[last.offset : last.offset + 512] = b"\xaa" * 512
    else:
        data[last.offset_data : last.offset_data + 64] = b"\xaa" * 64
    path.write_bytes(data)
    manifest, findings = read_manifest([path], allow_missing_captions=True)
    errors = [(finding.code, finding.path) for finding in findings if finding.severity != "note"]
    assert [sample.path.name for sample in manifest.samples] == ["0.png", "1.png"]
    assert errors == [("unreadable", path / "2.png") if damage == "overwritten image" else ("damaged_tar", path)]


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 100, b"\0" * 1024])
def test_a_file_that_is_no_tar_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_manifest([tmp_path / "x.tar"])
    assert len(caught.value.problems) == 1


def test_hostile_members_are_only_names(tmp_path: Path) -> None:
    path = tmp_path / "in" / "bad.tar"
    path.parent.mkdir()
    names = ["../../escaped.png", "/etc/absolute.png", "a/./b/../line\nbreak.png", "\udce9.png", "x" * 300 + ".png"]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for seed, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size = len(data := image(seed))
            tar.addfile(member, io.BytesIO(data))
        for kind, name in ((tarfile.SYMTYPE, "link.png"), (tarfile.FIFOTYPE, "pipe.png"), (tarfile.CHRTYPE, "dev.png")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    manifest, findings = read_manifest([path], allow_missing_captions=True)
    assert len(manifest.samples) == 5
    assert all(path in sample.path.parents and ".." not in sample.path.parts for sample in manifest.samples)
    assert {finding.severity for finding in findings} == {"note"}
    assert any("3 links" in note for note in manifest.notes)
    assert sorted(tmp_path.rglob("*")) == [path.parent, path]


def test_keys_with_dots_and_images_that_belong_to_another(tmp_path: Path) -> None:
    members = {"1.jpg": image(1, "JPEG"), "1.mask.png": image(2), "1.txt": b"one"}
    members |= {"my.photo.a.png": image(3), "my.photo.a.txt": b"a", "my.photo.b.png": image(4), "my.txt": b"all"}
    members |= {"two.png": image(5), "two.webp": image(6, "WEBP"), "two.caption": b"two"}
    manifest, findings = read_manifest([write_tar(tmp_path / "x.tar", members)])
    assert {sample.path.name: sample.caption for sample in manifest.samples} == {
        "1.jpg": "one", "my.photo.a.png": "a", "my.photo.b.png": "all", "two.png": "two",
    }  # fmt: skip
    assert [finding.code for finding in findings] == ["two_images"]
    assert [note for note in manifest.notes if "1 images beside another of their key" in note]
    tags = read_manifest(
        [tmp_path / "x.tar"], captions=CaptionsSection(extension="caption"), allow_missing_captions=True
    )
    assert [sample.caption for sample in tags[0].samples] == ["", "", "", "two"]


def test_texts_of_a_tar_that_cannot_be_used(tmp_path: Path) -> None:
    members = {"a.png": image(1), "a.txt": b"caf\xe9", "b.png": image(2), "b.json": b"[" * 90_000}
    members |= {"c.png": image(3), "c.txt": b"x" * (1 << 20) + b"x", "d.png": image(4), "d.json": b'{"weight": -1}'}
    _, findings = read_manifest([write_tar(tmp_path / "x.tar", members)], allow_missing_captions=True)
    errors = sorted(
        (finding.path.name, finding.code) for finding in findings if finding.severity == "error" and finding.path
    )
    assert errors == [
        ("a.png", "unreadable_caption"),
        ("b.png", "bad_metadata"),
        ("c.png", "unreadable_caption"),
        ("d.png", "bad_weight"),
    ]


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize(
    "size", [b"\xff" * 12, b"\xff" * 11 + b"\x00", b"\x80" + b"\x00" * 5 + b"\xff" * 6, b"77777777777\0"]
)
def test_impossible_member_sizes_end_the_reading(tmp_path: Path, kind: bytes, size: bytes) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.png": image(1), "b.png": image(2)})
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        place = tar.getmembers()[1].offset
    header = data[place : place + 512]
    header[124:136], header[156:157], header[148:156] = size, kind, b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    data[place : place + 512] = header
    path.write_bytes(data)
    manifest, findings = read_manifest([path], allow_missing_captions=True)
    assert [sample.path.name for sample in manifest.samples] == ["a.png"]
    assert [finding.code for finding in findings if finding.severity != "note"] == ["damaged_tar"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes")
def test_a_pipe_named_as_a_source_is_not_opened(tmp_path: Path) -> None:
    for name in ("x.tar", "x.png", "x.parquet", "x.csv"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError) as caught:
        read_manifest([tmp_path / name for name in ("x.tar", "x.png", "x.parquet", "x.csv")])
    assert len(caught.value.problems) == 4


@settings(max_examples=60)
@given(st.integers(0, 5_000), st.binary(min_size=1, max_size=40))
def test_any_corruption_leads_only_to_findings(
    tmp_path_factory: pytest.TempPathFactory, place: int, junk: bytes
) -> None:
    path = one_shard(tmp_path_factory.mktemp("fuzz") / "x.tar")
    data = bytearray(path.read_bytes())
    data[place : place + len(junk)] = junk
    path.write_bytes(data)
    reading = SourceReading()
    request = SourceRequest(0, SourceSection(path=str(path)), CaptionsSection())
    for found in read_tar(path, request, reading):
        assert found.span is not None
        assert found.span.offset + found.span.size <= len(data)
        with contextlib.suppress(BrokenImageError):
            load_rgb(found.path, found.span)


def test_images_of_a_tar_that_share_a_caption_are_named(tmp_path: Path) -> None:
    """Pairs of an edit and masks: both would be samples of one caption."""
    members = {"1.input.png": image(1), "1.output.png": image(2), "1.txt": b"pair", "2.image.png": image(3)}
    members |= {"2.mask.png": image(4), "2.json": b'{"caption": "masked"}', "3.a.png": image(5), "3.txt": b"alone"}
    members |= {"4.CR2": b"x", "4.png": image(6), "4.txt": b"four"}
    manifest, findings = read_manifest([write_tar(tmp_path / "x.tar", members)])
    assert len(manifest.samples) == 6
    aside = {"in/1.png": image(1), "in/1.txt": b"one", "in/1-masklabel.png": image(2), "masks/1.png": image(3)}
    beside, named = read_manifest(
        [write_tar(tmp_path / "aside.tar", aside | {"reg/9.png": image(4), "reg/9.txt": b"x"})]
    )
    assert [sample.path.name for sample in beside.samples] == ["1.png"]
    assert sorted(finding.code for finding in named) == ["reg_folder", "side_folder"]
    # No source can be a folder in a tar.
    assert not any(str(tmp_path / "aside.tar") in finding.fix for finding in named)
    aside |= {"masks/1.txt": b"a carnival mask", "normal/1.png": image(5)}
    trained, named = read_manifest([write_tar(tmp_path / "trained.tar", aside)], allow_missing_captions=True)
    assert sorted(sample.path.parent.name for sample in trained.samples) == ["in", "masks", "normal"]
    assert [each.code for each in named if each.code != "missing_caption"] == ["side_folder"] * 2
    assert {(finding.code, finding.severity, finding.path and finding.path.name) for finding in findings} == {
        ("shared_caption", "warning", name) for name in ("1.input.png", "1.output.png", "2.image.png", "2.mask.png")
    }
