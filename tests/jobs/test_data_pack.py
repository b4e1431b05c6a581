"""The data of a job as an archive in pieces, and its copy on another machine."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from lora_trainer.config.schema import Config
from lora_trainer.core.errors import TrainingFailed, UsageError
from lora_trainer.data.moved import data_below, original_place
from lora_trainer.jobs import data_pack
from lora_trainer.jobs.data_pack import DataFiles, DataPack, copied, files_of, pack
from lora_trainer.run.inputs import list_data
from tests.recipes.recipe import draw_images

NAMES = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=40).filter(
        lambda name: name not in (".", "..") and len(name.encode()) < 200
    ),
    min_size=1,
    max_size=3,
).map("/".join)


def config_of(*sources: object) -> Config:
    return Config.model_validate({"data": {"sources": list(sources)}})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def pack_of(data: DataFiles) -> DataPack:
    return pack(data, lambda piece: piece)


@settings_of_hypothesis(max_examples=25, deadline=None)
@given(files=st.dictionaries(NAMES, st.binary(max_size=3000), max_size=6), piece=st.integers(1, 5000))
def test_a_copy_has_the_very_files_whatever_their_names_and_the_size_of_pieces(files, piece):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_pack, "PIECE_BYTES", piece)
        root, sizes = Path(name).resolve() / "images", dict[Path, int]()
        root.mkdir()
        for below, content in files.items():
            path = root / below
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # a file where another name needs a folder
            sizes[path] = len(content)
        packed = pack_of(DataFiles(sizes, (root,)))
        assert all(0 < len(each) <= piece for each in packed.pieces)
        assert sum(map(len, packed.pieces)) == packed.size
        scratch = root.parent / "scratch"
        with copied(packed, packed.pieces, scratch) as folder:
            assert contents(folder / root.relative_to("/")) == contents(root)
            assert folder == scratch / packed.key
        assert pack_of(DataFiles(sizes, (root,))).key == packed.key


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A kohya folder with a table, masks inside, a linked folder and files that are not read."""
    root = tmp_path / "10_robot"
    draw_images(root, 4)
    shutil.copytree(root, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").glob("*.png"):
        path.write_bytes(path.read_bytes() + b"\0")  # other contents, or they would be copies
    (root / "more").symlink_to(tmp_path / "elsewhere")
    (root / "image_0.txt").unlink()
    (root / "metadata.jsonl").write_text('{"file_name": "image_0.png", "text": "a robot in a table"}\n')
    shutil.copytree(root, root / "masks", ignore=shutil.ignore_patterns("more", "*.txt", "*.jsonl"))
    (root / "lora.toml").write_text("[lora]\nrank = 4\n")
    (root / ".hidden").write_text("no")
    return root


def test_a_copy_is_read_as_the_original_place(dataset, tmp_path):
    """The same hash, order, repeats, captions and masks; notes and findings name the place in the settings."""
    (dataset / "orphan.txt").write_text("no image")
    config = config_of({"path": str(dataset), "masks": str(dataset / "masks")})
    manifest, findings = list_data(config)
    data = files_of(config)
    assert {path.name for path in data.sizes} >= {"lora.toml", "metadata.jsonl", "image_1.png", "image_1.txt"}
    assert ".hidden" not in {path.name for path in data.sizes}
    packed = pack_of(data)
    shutil.rmtree(dataset)
    with copied(packed, packed.pieces, tmp_path / "scratch") as folder, data_below(folder):
        there, found = list_data(config)
        assert all(sample.path.is_relative_to(folder) for sample in there.samples)
        assert [original_place(sample.path) for sample in there.samples] == [each.path for each in manifest.samples]
        assert [each.facts for each in there.samples] == [each.facts for each in manifest.samples]
        assert there.data_hash == manifest.data_hash
        assert there.notes == manifest.notes
        assert [(each.code, each.message) for each in found] == [(each.code, each.message) for each in findings]
        assert findings
        (folder / dataset.relative_to("/") / "image_1.txt").unlink()
        assert list_data(config)[0].data_hash != manifest.data_hash, "it is the copy that is read"
        shutil.rmtree(folder)
        with pytest.raises(UsageError, match=f"There is no folder or file {dataset}"):
            list_data(config)


def test_a_second_job_uses_the_copy_and_reads_no_piece(dataset, tmp_path):
    packed = pack_of(files_of(config_of(str(dataset))))
    with copied(packed, packed.pieces, tmp_path / "scratch"):
        pass
    with copied(packed, iter(lambda: 1 / 0, None), tmp_path / "scratch") as folder:
        assert contents(folder)


def test_a_copy_that_nobody_uses_is_removed_after_a_day_when_another_is_made(dataset, tmp_path):
    scratch = tmp_path / "scratch"
    first = pack_of(files_of(config_of(str(dataset))))
    (dataset / "image_1.txt").write_text("changed")
    second = pack_of(files_of(config_of(str(dataset))))
    (dataset / "image_1.txt").write_text("changed again")
    third = pack_of(files_of(config_of(str(dataset))))
    unfinished = scratch / f".{first.key[:16]}.abcd.part"
    with copied(first, first.pieces, scratch):
        pass
    unfinished.mkdir()
    (scratch / "somebody's").mkdir()
    old = time.time() - data_pack.KEPT_SECONDS - 60
    for path in (scratch / first.key, unfinished, scratch / "somebody's"):
        os.utime(path, (old, old))
    with copied(second, second.pieces, scratch) as used:
        assert not (scratch / first.key).exists()
        assert not unfinished.exists()
        assert (scratch / "somebody's").exists()
        with copied(third, third.pieces, scratch):
            assert contents(used)


def hostile(change: Callable[[tarfile.TarFile, tarfile.TarInfo], object]) -> bytes:
    """An archive with one good file and one that `change` adds."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        good = tarfile.TarInfo("images/a.png")
        good.size = 1
        archive.addfile(good, io.BytesIO(b"a"))
        change(archive, tarfile.TarInfo("images/b.png"))
    return buffer.getvalue()


def named(name: str, **values: Any) -> Callable[[tarfile.TarFile, tarfile.TarInfo], object]:
    def change(archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        member.name = name
        for key, value in values.items():
            setattr(member, key, value)
        archive.addfile(member, io.BytesIO(b"\0" * member.size))

    return change


@pytest.mark.parametrize(
    "change",
    [
        named("/outside.png"),
        named("../outside.png"),
        named("images/../../outside.png"),
        named("images/./b.png"),
        named("images//b.png"),
        named("images/a.png"),
        named("images/a.png/b.png"),
        named("images/link", type=tarfile.SYMTYPE, linkname="/etc"),
        named("images/link", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        named("images/pipe", type=tarfile.FIFOTYPE),
        named("images/device", type=tarfile.CHRTYPE),
        named("images/folder", type=tarfile.DIRTYPE),
        named("images/sparse", type=tarfile.GNUTYPE_SPARSE),
        named("images/sparse", pax_headers={"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**50)}),
    ],
)
def test_hostile_members_are_refused_and_leave_nothing(change, tmp_path):
    archive = hostile(change)
    packed = DataPack(hashlib.sha256(archive).hexdigest(), len(archive), 2, (), (archive,))
    scratch = tmp_path / "inner" / "scratch"
    with pytest.raises(UsageError, match="The packed data is damaged"), copied(packed, [archive], scratch):
        pass
    assert not contents_but_claims(scratch)
    assert not (tmp_path / "inner" / "outside.png").exists()


@pytest.mark.parametrize("folder", ["../outside", "/outside", "images/../../../outside"])
def test_a_folder_outside_is_refused_and_leaves_nothing(folder, dataset, tmp_path):
    packed = replace(pack_of(files_of(config_of(str(dataset)))), folders=(folder,))
    scratch = tmp_path / "inner" / "scratch"
    with pytest.raises(UsageError, match="The packed data is damaged"), copied(packed, packed.pieces, scratch):
        pass
    assert not contents_but_claims(scratch)
    assert not list(tmp_path.rglob("outside"))


def contents_but_claims(scratch: Path) -> list[str]:
    return [path.name for path in scratch.iterdir() if path.name not in ("users", "building")]


def damaged(pieces: tuple[bytes, ...]) -> Mapping[str, tuple[bytes, ...]]:
    whole = b"".join(pieces)
    middle = len(whole) // 2
    return {
        "cut off": (whole[:middle],),
        "a flipped bit": (whole[:middle], bytes([whole[middle] ^ 1]), whole[middle + 1 :]),
        "more at the end": (whole, b"x" * 2000),
        "nothing": (),
    }


@pytest.mark.parametrize("kind", ["cut off", "a flipped bit", "more at the end", "nothing"])
def test_a_damaged_archive_is_refused_and_leaves_nothing(kind, dataset, tmp_path):
    packed = pack_of(files_of(config_of(str(dataset))))
    with (
        pytest.raises(UsageError, match="The packed data is"),
        copied(packed, damaged(packed.pieces)[kind], tmp_path / "scratch"),
    ):
        pass
    assert not contents_but_claims(tmp_path / "scratch")


def test_a_full_disk_leaves_nothing_half_written_and_the_next_try_succeeds(dataset, tmp_path, monkeypatch):
    packed = pack_of(files_of(config_of(str(dataset))))
    copy = shutil.copyfileobj

    def full(source: Any, target: Any, size: int) -> None:
        copy(source, target, size)
        if target.name.endswith("image_2.png"):
            raise OSError(28, "No space left on device", target.name)

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with (
        pytest.raises(TrainingFailed, match=r"cannot be copied to .*: no space left on device"),
        copied(packed, packed.pieces, tmp_path / "scratch"),
    ):
        pass
    assert not contents_but_claims(tmp_path / "scratch")
    monkeypatch.undo()
    with copied(packed, packed.pieces, tmp_path / "scratch") as folder:
        assert contents(folder)


def test_an_error_of_the_job_is_not_taken_for_one_of_the_copy(dataset, tmp_path):
    packed = pack_of(files_of(config_of(str(dataset))))
    with pytest.raises(OSError, match="of the job"), copied(packed, packed.pieces, tmp_path / "scratch"):
        raise OSError(28, "of the job")


def test_the_folder_of_copies_must_be_the_users_own(dataset, tmp_path):
    packed = pack_of(files_of(config_of(str(dataset))))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "scratch").symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="belongs to another user"), copied(packed, [], tmp_path / "scratch"):
        pass


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda root: (root / "image_9.png").symlink_to("nowhere.png"), "No such file"),
        (lambda root: os.mkfifo(root / "image_9.png"), "is a pipe or a device"),
        (shutil.rmtree, "is not there"),
    ],
)
def test_what_cannot_be_copied_is_named(break_it, reason, tmp_path):
    root = draw_images(tmp_path / "cat", 2)
    break_it(root)
    with pytest.raises(OSError, match=reason):
        files_of(config_of(str(root)))


def test_sources_that_name_files_elsewhere_or_lie_on_a_server_are_not_copied(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("file_name,text\n../a.png,a\n")
    for source, reason in ((str(table), "is no folder"), ("https://host/cats.tar", "is on a server")):
        with pytest.raises(OSError, match=reason):
            files_of(config_of(source))
    with pytest.raises(OSError, match="built-in"):
        files_of(config_of())


@pytest.mark.parametrize("change", [lambda content: content + b"more", lambda content: content[:-10]])
def test_a_file_that_changes_while_it_is_packed_is_an_error(change, dataset):
    data = files_of(config_of(str(dataset)))
    image = dataset / "image_1.png"
    image.write_bytes(change(image.read_bytes()))
    with pytest.raises(OSError, match=r"grew|unexpected end"):
        pack_of(data)
