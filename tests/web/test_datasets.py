"""`/api/datasets`: images with captions and crops, edits with their undo, copies, and what no request may reach."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import tarfile
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.responses import Response
from starlette.testclient import TestClient

from lora_trainer.core.errors import UserError
from lora_trainer.core.hardware import this_machine
from lora_trainer.web import caption_journal, dataset_index
from lora_trainer.web.dataset_reader import write_index
from tests.conftest import needs_links
from tests.web.site import app_of, problems_of, site

CAPTIONS = {"a": "sks, cat, red", "b": "dog", "c": None, "d": "a tall tree\n a second line"}
SIZES = {"a": (600, 600), "b": (900, 600), "c": (512, 1024), "d": (700, 500)}


def write_images(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, caption) in enumerate(CAPTIONS.items()):
        Image.new("RGB", SIZES[name], (40 * number, 90, 10)).save(folder / f"{name}.png")
        if caption is not None:
            (folder / f"{name}.txt").write_text(caption, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's folders: `datasets/own` may be edited, `images` is somebody's, `secret` is outside."""
    folder = tmp_path_factory.mktemp("site")
    write_images(folder / "datasets" / "own")
    write_images(folder / "images")
    write_images(folder / "secret")
    return folder


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[TestClient]:
    client = site(place / "runs", place / "images")
    yield client
    end = time.monotonic() + 300.0
    while (
        any(row["status"] == "running" for row in client.get("/api/tasks").json()["tasks"]) and time.monotonic() < end
    ):
        time.sleep(0.05)
    while app_of(client).state.server.tasks.children._own and time.monotonic() < end:  # ended, and to be waited for
        client.get("/api/tasks")


@pytest.fixture
def own(place: Path, client: TestClient) -> Iterator[Path]:
    """The dataset that may be edited, as it was at first."""
    folder = place / "datasets" / "own"
    yield folder
    while client.post("/api/datasets/undo", json={"path": str(folder)}).status_code == 200:
        pass
    for name, caption in CAPTIONS.items():
        if caption is not None:
            (folder / f"{name}.txt").write_text(caption, encoding="utf-8")
    (folder / "c.txt").unlink(missing_ok=True)


class ReadingHere(dataset_index.IndexReading):
    """A reading in this process, which starts at once; one test has the real one."""

    def read(self) -> dict[str, Any]:
        try:
            write_index(self.request, lambda done, total: None)
        except UserError as error:
            return {"problems": [(each.code, each.message, each.fix) for each in error.problems]}
        return {"problems": []}


@pytest.fixture(autouse=True)
def _reading_here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.function is not test_images_with_captions_buckets_and_crops:
        monkeypatch.setattr(dataset_index, "IndexReading", ReadingHere)


def images_of(client: TestClient, path: Path, **asked: Any) -> dict[str, Any]:
    """The document of a dataset once its list is there."""
    end = time.monotonic() + 300.0
    while True:
        answer = client.get("/api/datasets/images", params={"path": str(path), **asked})
        document: dict[str, Any] = answer.json()
        if answer.status_code == 200 and document["reading"] is None:
            return document
        assert answer.status_code in (200, 202), document
        assert time.monotonic() < end, document


def captions_of(client: TestClient, path: Path) -> dict[str, str]:
    return {row["name"]: row["caption"] for row in images_of(client, path)["rows"]}


def save(client: TestClient, path: Path, **captions: tuple[str, str | None]) -> Response:
    """Save captions of images by their names without ending: (before, caption)."""
    changes = [{"name": f"{name}.png", "before": old, "caption": new} for name, (old, new) in captions.items()]
    found: Any = client.post("/api/datasets/captions", json={"path": str(path), "changes": changes})
    return found  # type: ignore[no-any-return]


def edit(client: TestClient, path: Path, document: dict[str, Any], **more: Any) -> Any:
    return client.post("/api/datasets/edit", json={"path": str(path), "edit": document, **more}).json()


def test_images_with_captions_buckets_and_crops(client: TestClient, place: Path) -> None:
    found = images_of(client, place / "images")
    rows = {row["name"]: row for row in found["rows"]}
    assert (found["total"], found["resolution"], found["is_editable"]) == (4, 512, False)
    assert rows["a.png"] | {"content": ""} == {
        "name": "a.png",
        "caption": "sks, cat, red",
        "origin": "text",
        "caption_file": "a.txt",
        "content": "",
        "width": 600,
        "height": 600,
        "bucket": "512x512",
        "crop": [0.0, 0.0, 1.0, 1.0],
        "repeats": 1.0,
        "is_reg": False,
        "has_mask": False,
        "controls": 0,
        "findings": [],
    }
    assert rows["d.png"]["caption"] == "a tall tree\na second line"
    left, top, width, height = rows["b.png"]["crop"]
    across, down = (int(side) for side in rows["b.png"]["bucket"].split("x"))
    assert width * 900 / (height * 600) == pytest.approx(across / down, rel=0.01)  # what is kept has the bucket's shape
    assert (left, top) == (pytest.approx((1 - width) / 2, abs=0.01), pytest.approx((1 - height) / 2, abs=0.01))
    assert [each["code"] for each in rows["c.png"]["findings"]] == ["missing_caption"]
    assert {"tag": "cat", "count": 1} in found["tags"]
    assert sum(each["count"] for each in found["buckets"]) == 4
    assert images_of(client, place / "images", family="sdxl")["resolution"] == 1024
    assert images_of(client, place / "images", resolution=256)["rows"][0]["bucket"] == "256x256"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"search": "CAT"}, ["a.png"]),
        ({"search": "b.p"}, ["b.png"]),
        ({"tag": "red"}, ["a.png"]),
        ({"tag": "re"}, []),
        ({"finding": "missing_caption"}, ["c.png"]),
        ({"finding": "any", "search": "sks"}, []),
        ({"bucket": "512x512"}, ["a.png"]),
        ({"sort": "long", "limit": 1}, ["d.png"]),
        ({"sort": "name", "offset": 2, "limit": 1}, ["c.png"]),
        ({"offset": 3}, ["d.png"]),
        ({"search": "%"}, []),
    ],
)
def test_filters_and_pages(client: TestClient, place: Path, asked: dict[str, Any], names: list[str]) -> None:
    found = images_of(client, place / "images", **asked)
    assert [row["name"] for row in found["rows"]] == names
    if "limit" not in asked and "offset" not in asked:
        assert found["total"] == len(names)
        listed = client.get("/api/datasets/names", params={"path": str(place / "images"), **asked}).json()
        assert listed["names"] == names


def test_nothing_is_read_again_by_who_scrolls(client: TestClient, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images_of(client, place / "images")

    def no_reading(*arguments: object) -> None:
        raise AssertionError("it is read again")

    monkeypatch.setattr(dataset_index, "IndexReading", no_reading)
    monkeypatch.setattr(dataset_index, "LOOKED_SECONDS", 0.0)
    for offset in (0, 1, 3, 100):
        assert images_of(client, place / "images", offset=offset)["count"] == 4


def test_thumbnails_are_kept_by_content(client: TestClient, place: Path) -> None:
    row = images_of(client, place / "images")["rows"][1]
    asked = {"path": str(place / "images"), "name": row["name"], "width": "64", "content": row["content"]}
    answer = client.get("/api/datasets/image", params=asked)
    with Image.open(io.BytesIO(answer.content)) as image:
        assert (image.format, image.width) == ("WEBP", 64)
    assert "immutable" in answer.headers["cache-control"]
    wrong = client.get("/api/datasets/image", params={**asked, "content": "0" * 64})
    assert wrong.headers["cache-control"] == "private, no-cache"
    whole = client.get("/api/datasets/image", params={"path": asked["path"], "name": row["name"]})
    assert whole.content == (place / "images" / row["name"]).read_bytes()
    assert whole.headers["content-type"] == "image/png"


def test_captions_are_saved_and_taken_back(client: TestClient, own: Path) -> None:
    captions_of(client, own)
    answer = save(client, own, a=("sks, cat, red", "sks, cat, blue"), c=("", "new <b>one</b>"))
    assert answer.json()["changed"] == 2  # type: ignore[attr-defined]
    assert (own / "a.txt").read_bytes() == b"sks, cat, blue\n"
    assert (own / "c.txt").read_bytes() == b"new <b>one</b>\n"
    found = images_of(client, own)
    assert found["undo"] == "Captions of 2 images"
    assert found["findings"] == []
    assert {each["tag"] for each in found["tags"]} >= {"blue", "new <b>one</b>"}
    assert "red" not in {each["tag"] for each in found["tags"]}
    assert client.post("/api/datasets/undo", json={"path": str(own)}).json()["redo"] == "Captions of 2 images"
    assert (own / "a.txt").read_bytes() == b"sks, cat, red"
    assert not (own / "c.txt").exists()
    found = images_of(client, own)
    assert [each["code"] for each in found["findings"]] == ["missing_caption"]
    assert (found["undo"], found["redo"]) == (None, "Captions of 2 images")
    client.post("/api/datasets/redo", json={"path": str(own)})
    assert captions_of(client, own)["c.png"] == "new <b>one</b>"
    save(client, own, b=("dog", "wolf"))
    assert client.post("/api/datasets/redo", json={"path": str(own)}).status_code == 409  # there is another future now
    assert sorted(os.listdir(own)) == sorted(
        [*(f"{name}.png" for name in CAPTIONS), *(f"{name}.txt" for name in CAPTIONS)]
    )


def test_two_pages_never_overwrite_each_other(client: TestClient, own: Path) -> None:
    captions_of(client, own)
    assert save(client, own, a=("sks, cat, red", "of the first")).status_code == 200
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    answer = save(client, own, b=("dog", "wolf"), a=("sks, cat, red", "of the second"))
    assert answer.status_code == 409
    assert "of the first" in problems_of(json.loads(answer.body if hasattr(answer, "body") else answer.content))[0]
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before
    (own / "b.txt").write_text("of another program", encoding="utf-8")
    assert save(client, own, b=("dog", "wolf")).status_code == 409
    assert captions_of(client, own)["b.png"] == "of another program"
    (own / "a.txt").write_text("of another program", encoding="utf-8")
    assert client.post("/api/datasets/undo", json={"path": str(own)}).status_code == 409
    (own / "a.txt").write_text("of the first\n", encoding="utf-8")
    assert client.post("/api/datasets/undo", json={"path": str(own)}).status_code == 200


@pytest.mark.parametrize(
    ("document", "after"),
    [
        ({"do": "replace", "find": "cat", "put": "lion"}, {"a.png": "sks, lion, red"}),
        ({"do": "replace", "find": "CAT", "put": "x"}, {}),
        ({"do": "replace", "find": "CAT", "put": "x", "match_case": False}, {"a.png": "sks, x, red"}),
        ({"do": "replace", "find": "(", "put": "x"}, {}),
        ({"do": "replace", "find": "ca", "put": "x", "whole_tag": True}, {}),
        ({"do": "replace", "find": "cat", "whole_tag": True}, {"a.png": "sks, red"}),
        ({"do": "replace", "find": "tree", "put": "\\1"}, {"d.png": "a tall \\1\na second line"}),
        (
            {"do": "add_tag", "tag": "cat"},
            {"b.png": "dog, cat", "c.png": "cat", "d.png": "a tall tree, cat\na second line, cat"},
        ),
        ({"do": "remove_tag", "tag": "dog"}, {"b.png": ""}),
        (
            {"do": "trigger_word", "word": "sks"},
            {"b.png": "sks, dog", "c.png": "sks", "d.png": "sks, a tall tree\nsks, a second line"},
        ),
        ({"do": "sort_tags", "keep": 1}, {}),
        ({"do": "sort_tags"}, {"a.png": "cat, red, sks"}),
        ({"do": "dedupe_tags"}, {}),
    ],
)
def test_many_captions_at_once(client: TestClient, own: Path, document: dict[str, Any], after: dict[str, str]) -> None:
    before = captions_of(client, own)
    files = {path.name: path.read_bytes() for path in own.iterdir()}
    tried = edit(client, own, document, dry_run=True)
    assert tried["count"] == len(after)
    assert {each["name"]: each["after"] for each in tried["examples"]} == after
    assert {path.name: path.read_bytes() for path in own.iterdir()} == files
    assert edit(client, own, document)["changed"] == len(after)
    assert captions_of(client, own) == before | after
    if after:
        client.post("/api/datasets/undo", json={"path": str(own)})
    assert {path.name: path.read_bytes() for path in own.iterdir()} == files


def test_an_edit_is_of_a_selection_or_of_what_filters_leave(client: TestClient, own: Path) -> None:
    captions_of(client, own)
    add = {"do": "add_tag", "tag": "x"}
    assert edit(client, own, add, names=["a.png", "gone.png"], dry_run=True)["count"] == 1
    assert edit(client, own, add, names=[], dry_run=True)["count"] == 0
    assert edit(client, own, add, search="dog", dry_run=True)["count"] == 1
    assert edit(client, own, add, finding="missing_caption")["changed"] == 1
    assert (own / "c.txt").read_text("utf-8") == "x\n"


def test_a_full_disk_leaves_the_captions_whole(client: TestClient, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions_of(client, own)
    files = {path.name: path.read_bytes() for path in own.iterdir()}
    real, calls = caption_journal.rename_over, []

    def full(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(caption_journal, "rename_over", full)
    answer = save(client, own, a=("sks, cat, red", "one"), b=("dog", "two"), c=("", "three"))
    assert answer.status_code == 507
    monkeypatch.undo()
    monkeypatch.setattr(
        caption_journal.os, "fsync", lambda number: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
    )
    assert save(client, own, a=("sks, cat, red", "one")).status_code == 507
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in own.iterdir()} == files
    assert images_of(client, own)["undo"] is None


def test_a_caption_that_another_program_saves_meanwhile_is_not_overwritten(
    client: TestClient, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions_of(client, own)
    real = caption_journal.written_beside

    def late(change: caption_journal.CaptionChange, **more: Any) -> str:
        if change.image == "a.png":
            change.file.write_text("theirs", encoding="utf-8")
        return real(change, **more)

    monkeypatch.setattr(caption_journal, "written_beside", late)
    answer = save(client, own, a=("sks, cat, red", "one"), b=("dog", "two"))
    assert answer.status_code == 409
    monkeypatch.undo()
    assert (own / "a.txt").read_text(encoding="utf-8") == "theirs"
    assert (own / "b.txt").read_text(encoding="utf-8") == "dog"
    assert images_of(client, own)["undo"] is None


def test_what_cannot_be_put_back_stays_in_the_journal(
    client: TestClient, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions_of(client, own)
    real, calls = caption_journal.rename_over, []

    def broken(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(caption_journal, "rename_over", broken)
    assert save(client, own, a=("sks, cat, red", "one"), b=("dog", "two")).status_code == 500
    monkeypatch.undo()
    assert (own / "b.txt").read_text(encoding="utf-8") == "two\n"
    assert client.post("/api/datasets/undo", json={"path": str(own)}).status_code == 200
    assert (own / "b.txt").read_text(encoding="utf-8") == "dog"
    assert not list(own.glob(".*"))


def test_a_folder_that_changes_is_read_again(client: TestClient, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert images_of(client, own)["count"] == 4
    monkeypatch.setattr(dataset_index, "LOOKED_SECONDS", 0.0)
    (own / "in").mkdir()
    Image.new("RGB", (600, 600)).save(own / "in" / "e.png")
    try:
        found = images_of(client, own)
        assert (found["count"], found["rows"][-1]["name"]) == (5, "in/e.png")
        (own / "in" / "e.txt").write_text("new", encoding="utf-8")
        assert captions_of(client, own)["in/e.png"] == "new"
        (own / "in" / "e.txt").write_text("newer text", encoding="utf-8")
        assert captions_of(client, own)["in/e.png"] == "newer text"
    finally:
        for path in (own / "in").iterdir():
            path.unlink()
        (own / "in").rmdir()


def wait_for_task(client: TestClient, row: dict[str, Any]) -> dict[str, Any]:
    end = time.monotonic() + 300.0
    while (found := client.get(f"/api/tasks/{row['id']}").json())["status"] == "running":
        assert time.monotonic() < end
        time.sleep(0.05)
    result: dict[str, Any] = found
    return result


def test_a_tar_becomes_a_folder_that_may_be_edited(client: TestClient, place: Path) -> None:
    shard = place / "images" / "shard.tar"
    with tarfile.open(shard, "w") as tar:
        for name in ("a", "b"):
            tar.add(place / "images" / f"{name}.png", f"x/{name}.png")
            tar.add(place / "images" / f"{name}.txt", f"x/{name}.txt")
    try:
        rows = images_of(client, shard)["rows"]
        assert [(row["name"], row["caption"], row["origin"]) for row in rows] == [
            ("x/a.png", "sks, cat, red", "shard"),
            ("x/b.png", "dog", "shard"),
        ]
        member = client.get("/api/datasets/image", params={"path": str(shard), "name": "x/b.png"})
        assert member.content == (place / "images" / "b.png").read_bytes()
        assert save(client, shard, a=("sks, cat, red", "x")).status_code == 403
        started = client.post("/api/datasets/copy", json={"path": str(shard), "name": "copy"})
        found = wait_for_task(client, started.json())
        assert found["status"] == "done", found["log"]
        copy = place / "datasets" / "copy"
        assert found["document"]["captions"] == 2
        assert (copy / "x" / "a.txt").read_text("utf-8") == "sks, cat, red\n"
        assert (copy / "x" / "b.png").read_bytes() == (place / "images" / "b.png").read_bytes()
        assert images_of(client, copy)["is_editable"] is True
        again = client.post("/api/datasets/copy", json={"path": str(shard), "name": "copy"})
        assert again.status_code == 409
    finally:
        shard.unlink()


def test_a_check_puts_its_findings_at_the_images(client: TestClient, own: Path) -> None:
    """By a document that `check --json` writes."""
    captions_of(client, own)
    folder = app_of(client).state.server.tasks.folder / "900"
    folder.mkdir(parents=True)
    finding = {"code": "blurred", "severity": "warning", "message": "is blurred.", "fix": "Replace it."}
    general = {"code": "too_few", "severity": "warning", "message": "There are 4 images.", "fix": "Add some."}
    old = {"code": "missing_caption", "severity": "error", "message": "has no caption.", "fix": ""}
    files = [{"path": str(own / "b.png"), "findings": [finding, old]}, {"path": str(own / "a.png"), "findings": []}]
    document = {"score": 0.5, "passed": False, "gate": 0.8, "samples": 4, "files": files, "findings": [general]}
    (folder / "document.json").write_text(json.dumps(document), encoding="utf-8")
    shown = {"kind": "check", "title": "Check", "about": {"dataset": str(own)}}
    task = {"name": "900", "arguments": ["check"], "about": shown}
    task |= {"pid": 1, "created": -100.0, "started": time.time() + 5.0, "machine": this_machine()}
    (folder / "process.json").write_text(json.dumps(task), encoding="utf-8")
    (folder / "end.json").write_text(json.dumps({"exit_code": 3, "ended": time.time()}), encoding="utf-8")
    try:
        found = images_of(client, own, finding="blurred")
        assert [row["name"] for row in found["rows"]] == ["b.png"]
        assert [(each["code"], each["is_old"]) for each in found["rows"][0]["findings"]] == [("blurred", False)]
        assert {each["code"]: each["images"] for each in found["findings"]} == {
            "missing_caption": 1,
            "blurred": 1,
            "too_few": 0,
        }
        assert (found["check"]["score"], found["check"]["passed"]) == (0.5, False)
        os.utime(own / "b.txt", (time.time() + 60, time.time() + 60))
        assert images_of(client, own, finding="blurred")["rows"][0]["findings"][0]["is_old"] is True
    finally:
        client.delete("/api/tasks/900")


@pytest.mark.parametrize(
    ("asked", "family", "resolution", "settings"),
    [
        ({}, "sd15", 512, ["model.family=sd15"]),
        ({"family": "sdxl"}, "sdxl", 1024, ["model.family=sdxl"]),
        ({"family": "sdxl", "resolution": 768}, "sdxl", 768, ["model.family=sdxl", "data.resolution=768"]),
        ({"family": "builtin"}, "builtin", 128, ["data.resolution=128"]),
    ],
)
def test_a_check_is_for_what_is_chosen(
    client: TestClient,
    own: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    family: str,
    resolution: int,
    settings: list[str],
) -> None:
    captions_of(client, own)
    started = []

    def start(kind: str, title: str, arguments: list[str], about: dict[str, Any]) -> dict[str, Any]:
        started.append((arguments, about))
        return {}

    monkeypatch.setattr(app_of(client).state.server.tasks, "start", start)
    assert client.post("/api/datasets/check", json={"path": str(own), **asked}).status_code == 202
    [(arguments, about)] = started
    assert [each for each in arguments if "." in each and "=" in each] == settings
    assert (about["family"], about["resolution"]) == (family, resolution)
    seen = images_of(client, own, **asked)
    assert (seen["family"], seen["resolution"]) == (family, resolution)


def test_the_list_names_what_is_here(client: TestClient, place: Path) -> None:
    found = client.get("/api/datasets").json()
    row = next(each for each in found["datasets"] if each["name"] == "own")
    assert (row["images"], row["first"], row["path"]) == (4, "a.png", str(place / "datasets" / "own"))
    assert found["builtin"]["images"] == 24
    assert "sdxl" in {each["name"] for each in found["families"]}


@pytest.mark.parametrize("name", ["../secret", "a/b", "..", ".hidden", "", "a\0b", "x" * 300, "/tmp/x"])
def test_copies_have_plain_names(client: TestClient, place: Path, name: str) -> None:
    answer = client.post("/api/datasets/copy", json={"path": str(place / "images"), "name": name})
    assert answer.status_code == 422
    assert client.post("/api/datasets/clean", json={"path": str(place / "images"), "name": name}).status_code == 422


ANY_NAMES = {
    "IMG_1.PNG": "img_1.Txt",
    f"{unicodedata.normalize('NFD', 'été')}.png": "été.txt",
    "x.jfif": "x.JFIF.caption",
}


def test_an_edit_is_written_into_the_file_that_was_read(client: TestClient, place: Path) -> None:
    folder = place / "datasets" / "any"
    folder.mkdir()
    try:
        for number, (image, caption) in enumerate(ANY_NAMES.items()):
            Image.new("RGB", (600, 600), (90, 40 * number, 10)).save(folder / image, "JPEG")
            (folder / caption).write_text(f"number {number}", encoding="utf-8")
        Image.new("L", (600, 600), 200).save(folder / "img_1-MaskLabel.png")
        before = sorted(os.listdir(folder))
        rows = {row["name"]: row for row in images_of(client, folder)["rows"]}
        assert {name: row["caption_file"] for name, row in rows.items()} == ANY_NAMES
        assert [name for name, row in rows.items() if row["has_mask"]] == ["IMG_1.PNG"]
        edit(client, folder, {"do": "add_tag", "tag": "new"})
        assert sorted(os.listdir(folder)) == before
        texts = {(folder / caption).read_text("utf-8") for caption in ANY_NAMES.values()}
        assert texts == {f"number {number}, new\n" for number in range(3)}
        assert set(captions_of(client, folder).values()) == {f"number {number}, new" for number in range(3)}
    finally:
        shutil.rmtree(folder)


def test_a_caption_in_json_is_shown_and_copied_as_text(client: TestClient, place: Path) -> None:
    folder = place / "datasets" / "described"
    folder.mkdir()
    try:
        Image.new("RGB", (600, 600), "teal").save(folder / "a.png")
        (folder / "a.json").write_text('{"tags": ["red", "cat"], "id": 7}', encoding="utf-8")
        (row,) = images_of(client, folder)["rows"]
        assert (row["caption"], row["caption_file"]) == ("red, cat", "a.json")
        assert save(client, folder, a=("red, cat", "a dog")).status_code == 409  # type: ignore[attr-defined]
        assert sorted(os.listdir(folder)) == ["a.json", "a.png"]
        started = client.post("/api/datasets/copy", json={"path": str(folder), "name": "as text"})
        assert wait_for_task(client, started.json())["status"] == "done"
        copy = place / "datasets" / "as text"
        assert (copy / "a.txt").read_text("utf-8") == "red, cat\n"
        assert save(client, copy, a=("red, cat", "a dog")).status_code == 200  # type: ignore[attr-defined]
    finally:
        shutil.rmtree(folder)


def test_what_is_outside_is_neither_read_nor_written(client: TestClient, place: Path) -> None:
    secret = str(place / "secret")
    for path in (secret, f"{place}/images/../secret", "/etc", "\0", "~nobody-here/x", "https://host/x.tar", ""):
        for answer in (
            client.get("/api/datasets/images", params={"path": path}),
            client.get("/api/datasets/names", params={"path": path}),
            client.get("/api/datasets/image", params={"path": path, "name": "a.png"}),
            client.post("/api/datasets/check", json={"path": path}),
            client.post("/api/datasets/copy", json={"path": path, "name": "fine"}),
            client.post("/api/datasets/read", json={"path": path}),
        ):
            assert answer.status_code in (403, 422), (path, answer.url)
            assert problems_of(answer.json())
    images = str(place / "images")
    while client.get("/api/datasets/names", params={"path": images}).status_code == 409:  # still being read
        time.sleep(0.05)
    for name in ("../secret/a.png", "/etc/passwd", "a.txt", ".hidden", "\ud800", "a.png\0"):
        asked = {"path": images, "name": name.encode("utf-8", "replace").decode()}
        answer = client.get("/api/datasets/image", params=asked)
        assert answer.status_code == 404, answer.json()
    model = client.post("/api/datasets/caption", json={"path": str(place / "datasets" / "own"), "model": secret})
    assert model.status_code == 403


def test_only_copies_are_written(client: TestClient, place: Path) -> None:
    images = place / "images"
    before = {path.name: path.read_bytes() for path in images.iterdir()}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("captions", {"changes": [{"name": "a.png", "caption": "x", "before": "sks, cat, red"}]}),
        ("edit", {"edit": {"do": "add_tag", "tag": "x"}}),
        ("undo", {}),
        ("redo", {}),
        ("caption", {"model": str(images)}),
    ]
    for route, body in bodies:
        for path in (images, place / "datasets", place / "runs" / ".ui"):
            answer = client.post(f"/api/datasets/{route}", json={"path": str(path), **body})
            assert answer.status_code == 403, (route, path, answer.json())
            assert "copy" in answer.json()["problems"][0]["fix"]
    assert {path.name: path.read_bytes() for path in images.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a.png", "caption": "x\0y", "before": "sks, cat, red"},
        {"name": "a.png", "caption": "\x1b[31m", "before": "sks, cat, red"},
        {"name": "a.png", "caption": "\ud800", "before": "sks, cat, red"},
        {"name": "a.png", "caption": "x" * (1 << 20), "before": "sks, cat, red"},
        {"name": "a.png", "caption": "x"},
        {"name": "a.png", "caption": 3, "before": "sks, cat, red"},
        {"name": "gone.png", "caption": "x", "before": ""},
        {"name": "../secret/a.png", "caption": "x", "before": "sks, cat, red"},
        {"name": "a.txt", "caption": "x", "before": ""},
        {"name": "a.png", "caption": "x", "before": "sks, cat, red", "file": "/tmp/x"},
    ],
)
def test_hostile_captions_are_refused(client: TestClient, own: Path, place: Path, change: dict[str, Any]) -> None:
    captions_of(client, own)
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    good = {"name": "b.png", "caption": "wolf", "before": "dog"}
    body = json.dumps({"path": str(own), "changes": [good, change]})
    answer = client.post("/api/datasets/captions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (404, 422)
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before
    assert (place / "secret" / "a.txt").read_text("utf-8") == "sks, cat, red"


@needs_links
def test_links_out_of_the_roots_show_and_change_nothing(
    client: TestClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_index, "LOOKED_SECONDS", 0.0)
    folder, secret = place / "datasets" / "links", place / "secret"
    folder.mkdir()
    (secret / "words.txt").write_text("SECRET words", encoding="utf-8")
    Image.new("RGB", (600, 600), "teal").save(folder / "plain.png")
    os.symlink(secret / "words.txt", folder / "plain.txt")
    os.symlink(secret / "a.png", folder / "linked.png")
    os.symlink(secret, folder / "inside")
    found = images_of(client, folder)
    assert [(row["name"], row["caption"]) for row in found["rows"]] == [("plain.png", "")]
    assert found["left_out"] == 5
    assert "SECRET" not in json.dumps(found)
    assert save(client, folder, plain=("", "mine")).status_code == 409
    assert save(client, folder, plain=("SECRET words", "mine")).status_code == 409
    assert (secret / "words.txt").read_text("utf-8") == "SECRET words"
    for route, more in (("check", {}), ("clean", {"name": "x"}), ("caption", {"model": str(folder)})):
        assert client.post(f"/api/datasets/{route}", json={"path": str(folder), **more}).status_code == 409
    (folder / "inside").unlink()
    (folder / "linked.png").unlink()
    os.symlink(place / "images", folder / "theirs")  # that may be read, and not written
    theirs = sorted(os.listdir(place / "images"))
    client.post("/api/datasets/read", json={"path": str(folder)})
    assert images_of(client, folder, search="theirs/a")["total"] == 1
    assert save(client, folder, **{"theirs/a": ("sks, cat, red", "mine")}).status_code == 403
    captioned = client.post("/api/datasets/caption", json={"path": str(folder), "model": str(folder)})
    assert captioned.status_code == 409
    assert sorted(os.listdir(place / "images")) == theirs
    (folder / "theirs").unlink()
    (folder / "plain.txt").unlink()
    os.symlink(secret, place / "datasets" / "elsewhere")
    answer = client.get("/api/datasets/images", params={"path": str(place / "datasets" / "elsewhere")})
    assert answer.status_code == 403
    assert "elsewhere" not in {each["name"] for each in client.get("/api/datasets").json()["datasets"]}
    (folder / "metadata.jsonl").write_text('{"file_name": "../../secret/b.png", "text": "x"}\n', encoding="utf-8")
    assert [row["name"] for row in images_of(client, folder)["rows"]] == ["plain.png"]
    toml = place / "images" / "theirs.toml"
    toml.write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{secret}'\n", encoding="utf-8")
    for route in ("check", "clean"):
        answer = client.post(
            f"/api/datasets/{route}", json={"path": str(toml), "name": "x"} if route == "clean" else {"path": str(toml)}
        )
        assert answer.status_code == 422
        assert "outside" in problems_of(answer.json())[0]
    toml.unlink()
