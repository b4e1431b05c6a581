"""Tar shards on a web server or in a bucket: listed by their headers, read by ranges, and what goes wrong there."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import TrainingFailed, UsageError
from lora_trainer.core.io import user_cache_folder
from lora_trainer.data.buckets import Bucket, fit_to
from lora_trainer.data.images import remote
from lora_trainer.data.images.decode import measure_images
from lora_trainer.data.images.images import load_rgb
from lora_trainer.data.images.jobs import read_seen
from lora_trainer.data.images.pixels import read_pixels
from lora_trainer.data.images.remote import RemoteError, RemoteFile, read_range
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Manifest
from lora_trainer.data.views import View
from tests.data.conftest import noise_image
from tests.data.range_server import Served, busy_at_first, drop_connections, refuse_access, serving
from tests.data.test_sources_tar import image, one_shard, write_tar


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(remote, "_kept", type(remote._kept)())
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as served:
        yield served


def manifest_of(address: str, **settings: object) -> Manifest:
    manifest, findings = read_manifest([SourceSection.model_validate({"path": address, **settings})])
    assert findings == ()
    return manifest


def refusal(address: str) -> str:
    with pytest.raises(UsageError) as refused:
        read_manifest([SourceSection(path=address)])
    return str(refused.value)


def test_remote_shards_are_the_same_samples_as_on_this_disk(server: Served) -> None:
    for number in range(3):
        one_shard(server.folder / f"data-{number:03}.tar", first=10 * number)
    here = read_manifest([server.folder / "data-{000..002}.tar"])[0]
    there = manifest_of(f"{server.address}/data-{{000..002}}.tar?key=secret")
    assert there.data_hash == here.data_hash
    assert [(each.content, each.caption, each.weight) for each in there.samples] == [
        (each.content, each.caption, each.weight) for each in here.samples
    ]
    assert "secret" not in str(there.samples[0].path)
    assert there.samples[0].path.name == "00000.png"
    first = there.samples[0]
    assert load_rgb(first.path, first.span).tobytes() == noise_image(24, 16, 0).tobytes()


def test_what_is_known_is_not_fetched_again(server: Served) -> None:
    one_shard(server.folder / "a.tar")
    address = f"{server.address}/a.tar"
    before = manifest_of(address)
    measure_images(before.samples)  # measured when they were read
    fetched = len(server.requests)
    assert manifest_of(address) == before
    assert measure_images(before.samples)[0].broken is None
    assert [size for _, _, size in server.requests[fetched:]] == [1], "its version alone"
    one_shard(server.folder / "a.tar", first=5)
    assert [each.path.name for each in manifest_of(address).samples] == ["00005.png", "00006.jpg"]


def test_members_that_are_not_needed_are_not_read(server: Served) -> None:
    large = os.urandom(3_000_000)
    members = {"0.npy": large, "0.png": image(0), "0.txt": b"a cat", "1.npy": large, "1.png": image(1), "1.txt": b"b"}
    write_tar(server.folder / "a.tar", members)
    assert [each.caption for each in manifest_of(f"{server.address}/a.tar").samples] == ["a cat", "b"]
    assert server.sent < 300_000


@pytest.mark.parametrize(
    "index",
    [
        "# shards\na.tar\nmore/b.tar\n",
        '["a.tar", "more/b.tar"]',
        '{"shardlist": [{"url": "a.tar", "nsamples": 2}, {"url": "more/b.tar"}]}',
    ],
)
def test_an_index_names_the_shards(index: str, server: Served) -> None:
    (server.folder / "more").mkdir()
    one_shard(server.folder / "a.tar")
    one_shard(server.folder / "more" / "b.tar", first=10)
    name = "index.json" if index.startswith(("[", "{")) else "index.txt"
    (server.folder / name).write_text(index)
    assert len(manifest_of(f"{server.address}/{name}").samples) == 4


def test_an_index_on_this_disk_names_shards_here_and_there(server: Served, tmp_path: Path) -> None:
    one_shard(server.folder / "a.tar")
    one_shard(tmp_path / "b.tar", first=10)
    (tmp_path / "all.txt").write_text(f"b.tar\n{server.address}/a.tar\n")
    names = [each.path.name for each in manifest_of(str(tmp_path / "all.txt")).samples]
    assert names == ["00010.png", "00011.jpg", "00000.png", "00001.jpg"]


def test_an_index_cannot_lead_elsewhere(server: Served) -> None:
    (server.folder / "index.txt").write_text("http://169.254.169.254/latest/a.tar\n")
    assert "on another server" in refusal(f"{server.address}/index.txt")
    (server.folder / "index.txt").write_text("../../../../a.tar\n")
    assert "/a.tar cannot be read: it is not there" in refusal(f"{server.address}/index.txt")


def test_failing_connections_are_tried_again(server: Served) -> None:
    one_shard(server.folder / "a.tar")
    expected = read_manifest([server.folder / "a.tar"])[0].data_hash
    server.trouble = drop_connections(every=2)
    assert manifest_of(f"{server.address}/a.tar").data_hash == expected
    server.requests.clear()
    server.trouble = busy_at_first(3)
    assert manifest_of(f"{server.address}/a.tar?again").data_hash == expected


def test_a_server_that_does_not_serve_is_a_clear_message(server: Served) -> None:
    one_shard(server.folder / "a.tar")
    server.trouble = drop_connections(every=1)
    assert "cannot be read: the connection failed" in refusal(f"{server.address}/a.tar")
    server.trouble = busy_at_first(10**9)
    assert "the server is busy (HTTP 503)" in refusal(f"{server.address}/a.tar")
    server.trouble = lambda handler, number: False
    server.ranges = False
    message = refusal(f"{server.address}/a.tar")
    assert "whole files alone" in message
    assert "range requests" in message
    assert "(2 of 3 shards cannot be read)" in refusal(f"{server.address}/{{a,b,c}}.tar").replace("3 of 3", "2 of 3")
    assert "is no tar" in refusal(f"{server.address}/a.zip")
    assert "the connection failed" in refusal("http://127.0.0.1:9/a.tar")


def test_offline_fetches_nothing(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    one_shard(server.folder / "a.tar")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "offline nothing is fetched" in refusal(f"{server.address}/a.tar")
    assert server.requests == []
    assert len(manifest_of((server.folder / "a.tar").as_uri()).samples) == 2, "a mounted bucket is no network"


def test_a_truncated_shard_is_used_up_to_its_damage(server: Served) -> None:
    whole = one_shard(server.folder / "whole.tar").read_bytes()
    with tarfile.open(server.folder / "whole.tar") as tar:
        last = tar.getmembers()[-2]
    (server.folder / "a.tar").write_bytes(whole[: last.offset_data + last.size // 2])
    manifest, findings = read_manifest([SourceSection(path=f"{server.address}/a.tar")])
    assert [each.path.name for each in manifest.samples] == ["00000.png"]
    assert [(each.code, "ends inside of '00001.jpg'" in each.message) for each in findings] == [("damaged_tar", True)]
    (server.folder / "empty.tar").write_bytes(b"")
    assert "it is empty" in refusal(f"{server.address}/empty.tar")


def test_hostile_shards(server: Served, tmp_path: Path) -> None:
    members = {"../../evil.png": image(0), "/etc/x.png": image(1), "a/../../b.txt": b"no image", "x.png.txt": b"c"}
    write_tar(server.folder / "names.tar", members)
    manifest, _ = read_manifest([SourceSection(path=f"{server.address}/names.tar")], allow_missing_captions=True)
    assert [each.path.as_posix().rpartition("names.tar/")[2] for each in manifest.samples] == ["evil.png", "etc/x.png"]
    assert not list(tmp_path.rglob("evil*"))
    huge = tarfile.TarInfo("0.png")
    huge.size = 10**13
    (server.folder / "huge.tar").write_bytes(huge.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    findings = damage(f"{server.address}/huge.tar")
    assert "ends inside of '0.png'" in findings
    (server.folder / "zip.tar").write_bytes(b"\x1f\x8b\x08" + bytes(4096))
    assert "is compressed (gzip)" in refusal(f"{server.address}/zip.tar")
    assert "damaged" in damage_of_bytes(server, os.urandom(4096))


def damage(address: str) -> str:
    with pytest.raises(UsageError) as refused:
        read_manifest([SourceSection(path=address)])
    return str(refused.value)


def damage_of_bytes(server: Served, data: bytes) -> str:
    (server.folder / "noise.tar").write_bytes(data)
    return damage(f"{server.address}/noise.tar")


def test_a_huge_member_is_read_piece_by_piece(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_trainer.data.images.spans.READ_WHOLE", 1000)
    write_tar(server.folder / "a.tar", {"0.png": image(0), "0.txt": b"a cat"})
    (sample,) = manifest_of(f"{server.address}/a.tar").samples
    assert load_rgb(sample.path, sample.span).tobytes() == noise_image(24, 16, 0).tobytes()
    write_tar(server.folder / "zeros.tar", {"0.png": bytes(20_000_000), "0.txt": b"a cat"})
    _, findings = read_manifest([SourceSection(path=f"{server.address}/{{a,zeros}}.tar")])
    assert [each.code for each in findings] == ["unreadable"]


def test_a_shard_that_changes_or_vanishes_is_named(server: Served) -> None:
    one_shard(server.folder / "a.tar")
    (sample, other) = manifest_of(f"{server.address}/a.tar").samples
    one_shard(server.folder / "a.tar", first=7)
    with pytest.raises(RemoteError, match="has changed since it was listed"):
        load_rgb(sample.path, sample.span)
    (server.folder / "a.tar").unlink()
    with pytest.raises(RemoteError, match="it is not there"):
        load_rgb(other.path, other.span)


def test_a_server_that_goes_away_breaks_no_image(server: Served) -> None:
    """Left out as broken, they would be missing from the training without a word."""
    one_shard(server.folder / "a.tar")
    (sample, _) = manifest_of(f"{server.address}/a.tar").samples
    one_shard(server.folder / "b.tar", first=3)
    server.trouble = refuse_access  # after it was listed
    assert "b.tar cannot be read: the server refuses access (HTTP 403)" in refusal(f"{server.address}/b.tar")
    assert sample.span is not None
    seen = read_seen((str(sample.span.file), sample.span.offset, sample.span.size, sample.content))
    assert seen == {"remote": ["the server refuses access (HTTP 403)", remote.WITH_ACCESS]}
    with pytest.raises(TrainingFailed, match=r"a.tar cannot be read: the server refuses access"):
        read_pixels(sample, View(fit_to(24, 16, Bucket(16, 16))))


def test_a_server_that_tells_no_version_is_listed_anew_each_time(server: Served) -> None:
    server.tags = False
    one_shard(server.folder / "a.tar")
    before = manifest_of(f"{server.address}/a.tar").samples
    data = (server.folder / "a.tar").read_bytes()
    (server.folder / "a.tar").write_bytes(data.replace(b"a cat\n", b"a dog\n"))
    after = manifest_of(f"{server.address}/a.tar").samples
    assert [before[0].caption, after[0].caption] == ["a cat", "a dog"]


def test_another_caption_ending_is_listed_anew(server: Served) -> None:
    write_tar(server.folder / "a.tar", {"0.png": image(0), "0.txt": b"a text", "0.tags": b"some tags"})
    assert manifest_of(f"{server.address}/a.tar").samples[0].caption == "a text"
    of_tags = manifest_of(f"{server.address}/a.tar", captions=CaptionsSection(extension=".tags"))
    assert of_tags.samples[0].caption == "some tags"


def test_a_bucket_is_read_by_fsspec(server: Served, tmp_path: Path) -> None:
    one_shard(tmp_path / "a-000.tar")
    one_shard(tmp_path / "a-001.tar", first=10)
    here = read_manifest([tmp_path / "a-{000..001}.tar"])[0]
    address = f"{tmp_path.as_uri()}/a-{{000..001}}.tar"
    assert manifest_of(address).data_hash == here.data_hash
    (sample, *_) = manifest_of(address).samples
    assert load_rgb(sample.path, sample.span).size == (24, 16)
    assert "it is not there" in refusal(f"{tmp_path.as_uri()}/b.tar")
    if find_spec("s3fs") is None:
        assert "pip install 'lora-trainer[remote]'" in refusal("s3://bucket/a.tar")
    assert "cannot be read" in refusal("nothing://bucket/a.tar")


def test_a_shard_that_is_named_twice_is_one_problem(server: Served) -> None:
    one_shard(server.folder / "a.tar")
    with pytest.raises(UsageError, match=r"http:/127.0.0.1:\d+/a.tar is named as data twice"):
        read_manifest([SourceSection(path=f"{server.address}/a.tar")] * 2)


def test_a_pointer_from_elsewhere_is_refused(server: Served, tmp_path: Path) -> None:
    """A dataset must not make this program read an address that nobody named."""
    one_shard(server.folder / "a.tar")
    manifest_of(f"{server.address}/a.tar")
    for path in (user_cache_folder() / "remote").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (pointer,) = tmp_path.glob("*.remote")
    assert "is no list of a shard" in refusal(str(pointer))


def test_ranges_are_checked(server: Served) -> None:
    (server.folder / "a.bin").write_bytes(bytes(range(256)) * 100)
    file = remote.look_up(f"{server.address}/a.bin")
    assert file.size == 25600
    assert read_range(file, 250, 10) == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])
    with pytest.raises(RemoteError, match="changed since it was listed"):
        read_range(RemoteFile(file.url, 25601, file.etag), 0, 10)
    assert user_cache_folder().name == "cache"
