"""Images and captions that are sent to a dataset, and masks that are drawn there: what is kept, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import struct
import time
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from starlette.types import Message

from lora_trainer import web
from lora_trainer.config.layers import Layer
from lora_trainer.core import io as core_io
from lora_trainer.core.errors import UserError
from lora_trainer.data.images.images import IMAGE_ENDINGS
from lora_trainer.run.inputs import list_data
from lora_trainer.run.settings import settle
from lora_trainer.web import dataset_index, uploads
from lora_trainer.web.dataset_reader import write_index
from lora_trainer.web.safety import token_of
from tests.conftest import needs_links
from tests.web.site import ADDRESS, app_of, problems_of, site

OURS = {"origin": ADDRESS, "sec-fetch-site": "same-origin"}


def image_bytes(kind: str = "PNG", size: tuple[int, int] = (320, 240), **more: Any) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(file, kind, **more)
    return file.getvalue()


def bomb(width: int = 13_000, height: int = 13_000) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 1000)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PNG, JPEG = image_bytes(), image_bytes("JPEG")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A server's folders: the dataset `own`, with one image, may be edited; `images` is somebody's."""
    for folder in (tmp_path / "datasets" / "own", tmp_path / "images"):
        folder.mkdir(parents=True)
        (folder / "first.png").write_bytes(image_bytes(size=(300, 200)))
        (folder / "first.txt").write_text("a first image", encoding="utf-8")
    return tmp_path


@pytest.fixture
def own(place: Path) -> Path:
    return place / "datasets" / "own"


@pytest.fixture
def client(place: Path) -> TestClient:
    return site(place / "runs", place / "images")


@pytest.fixture(autouse=True)
def _reading_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of images is made in this process."""

    class Here(dataset_index.IndexReading):
        def read(self) -> dict[str, Any]:
            try:
                write_index(self.request, lambda done, total: None)
            except UserError as error:
                return {"problems": [(each.code, each.message, each.fix) for each in error.problems]}
            return {"problems": []}

    monkeypatch.setattr(dataset_index, "IndexReading", Here)


def put(
    client: TestClient, path: Path | str, name: str, body: Any, kind: str = "image/png", what: str = "file", **more: Any
) -> Any:
    asked, headers = {"path": str(path), "name": name}, {"content-type": kind, **more}
    return client.put(f"/api/datasets/{what}", params=asked, content=body, headers=headers)


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder, hidden files too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def images_of(client: TestClient, path: Path) -> dict[str, Any]:
    """The document of a dataset once its list is there."""
    end = time.monotonic() + 300.0
    while True:
        document: dict[str, Any] = client.get("/api/datasets/images", params={"path": str(path)}).json()
        if "rows" in document and document["reading"] is None:
            return document
        assert time.monotonic() < end, document


def names_of(client: TestClient, path: Path) -> list[str]:
    return [row["name"] for row in images_of(client, path)["rows"]]


def test_files_are_kept_as_they_were_sent(client: TestClient, own: Path) -> None:
    assert names_of(client, own) == ["first.png"]
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = image_bytes("JPEG", exif=exif)
    answer = put(client, own, "10_sks cat/turned.jpg", turned, "image/jpeg")
    assert (answer.status_code, answer.json()["name"]) == (201, "10_sks cat/turned.jpg")
    assert (answer.json()["width"], answer.json()["height"]) == (240, 320)  # as it is seen
    caption = "a señor\r\non a line\n".encode("utf-16")
    assert put(client, own, "10_sks cat/turned.txt", caption, "text/plain").json()["kind"] == "caption"
    found = files(own)
    assert (found["10_sks cat/turned.jpg"], found["10_sks cat/turned.txt"]) == (turned, caption)
    assert len(found) == 4
    client.post("/api/datasets/read", json={"path": str(own)})
    assert names_of(client, own) == ["10_sks cat/turned.jpg", "first.png"]


def test_the_same_again_is_fine_and_another_is_refused(client: TestClient, own: Path) -> None:
    assert put(client, own, "a.png", PNG).status_code == 201
    again = put(client, own, "a.png", PNG)
    assert (again.status_code, again.json()["is_new"]) == (200, False)
    before = files(own)
    other = image_bytes(size=(64, 64))
    for name in ("a.png", "A.png", "a.jpg", "A.webp", "first.jpeg"):  # one caption and one mask would be of two images
        answer = put(client, own, name, other)
        assert answer.status_code == 409, name
        assert problems_of(answer.json())
    assert put(client, own, "first.txt", b"other words", "text/plain").status_code == 409
    assert put(client, own, "first.txt", b"a first image", "text/plain").status_code == 200
    assert files(own) == before


def test_an_image_with_the_ending_of_another_format_gets_its_own(client: TestClient, own: Path) -> None:
    answer = put(client, own, "cat.jpg", PNG, "image/jpeg").json()
    assert (answer["name"], answer["renamed_from"]) == ("cat.png", "cat.jpg")
    assert files(own)["cat.png"] == PNG
    assert put(client, own, "dog.JPEG", JPEG, "application/octet-stream").json()["name"] == "dog.JPEG"
    assert put(client, own, "owl.webp", image_bytes("WEBP"), "image/webp").json()["name"] == "owl.webp"


WRONG_IMAGES = [
    (b"", "empty"),
    (b"<!doctype html><script>alert(1)</script>", "not an image"),
    (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "not an image"),
    (PNG[: len(PNG) // 2], "cannot be read"),
    (JPEG[: len(JPEG) // 2], "cannot be read"),
    (bomb(), "pixels"),
    (bomb(11_000, 11_000), "pixels"),
    (bomb(100_000, 1), "cannot be read"),
    (b"%PDF-1.7", "not an image"),
]


def test_what_is_no_whole_image_is_refused_and_leaves_nothing(client: TestClient, own: Path) -> None:
    before = files(own)
    for body, word in WRONG_IMAGES:
        for name in ("cat.png", "new folder/cat.png"):
            answer = put(client, own, name, body)
            assert answer.status_code == 422, body[:20]
            assert word in problems_of(answer.json())[0]
            assert problems_of(answer.json())[0].startswith("cat.png ")
    assert files(own) == before
    assert not (own / "new folder").exists()


HOSTILE_NAMES = [
    *(
        "../cat.png",
        "/etc/cat.png",
        "a/../cat.png",
        "a/b/cat.png",
        "./cat.png",
        "a//cat.png",
        "..\\cat.png",
        "C:cat.png",
    ),
    *(".cat.png", ".hidden/cat.png", "cat\0.png", "cat\n.png", "cat\u202egnp.png", "cat\x7f.png", "\ufffe.png"),
    *(
        "con.png",
        "LPT1.tar.png",
        "aux/cat.png",
        "cat?.png",
        "cat .",
        "cat.png ",
        "x" * 201 + ".png",
        "é" * 120 + ".png",
    ),
    *("lora.toml", "cat.html", "cat.svg", "cat.png.exe", "cat.heic", "metadata.jsonl", "cat", "train.parquet"),
]


def test_hostile_names_are_refused(client: TestClient, place: Path, own: Path) -> None:
    before = files(place)
    for name in HOSTILE_NAMES:
        answer = put(client, own, name, PNG)
        assert answer.status_code == 422, name
        assert problems_of(answer.json())
    assert files(place) == before


def test_only_datasets_of_the_server_are_written(client: TestClient, place: Path, own: Path) -> None:
    before = files(place / "images"), files(place / "datasets")
    for path in (
        place / "images",
        place / "datasets",
        place,
        "/etc",
        f"{own}/../../images",
        place / "datasets" / "gone",
    ):
        assert put(client, path, "cat.png", PNG).status_code in (403, 404), path
        assert put(client, path, "first.png", PNG, what="mask").status_code in (403, 404), path
        asked = {"path": str(path), "name": "first.png"}
        assert client.delete("/api/datasets/mask", params=asked).status_code in (403, 404), path
    assert (files(place / "images"), files(place / "datasets")) == before


@needs_links
def test_links_lead_nowhere(client: TestClient, place: Path, own: Path) -> None:
    before = files(place / "images")
    os.symlink(place / "images", own / "out")
    os.symlink(place / "images" / "first.png", own / "cat.png")
    os.symlink(place / "images" / "nothing.png", own / "dog.png")
    os.symlink(place / "images" / "first.txt", own / "first-masklabel.png")
    assert put(client, own, "out/cat.png", PNG).status_code == 403
    assert put(client, own, "cat.png", before["first.png"]).status_code == 409
    assert put(client, own, "dog.png", PNG).status_code == 409
    names_of(client, own)
    assert put(client, own, "out/first.png", mask(), what="mask").status_code in (403, 404)
    assert put(client, own, "first.png", mask(), what="mask").status_code == 200
    assert files(place / "images") == before
    assert not (own / "first-masklabel.png").is_symlink()


FOREIGN: list[tuple[dict[str, str], int]] = [
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://127.0.0.1:8000"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"host": "evil.example", "origin": "http://evil.example"}, 421),
    ({"content-type": "text/html"}, 415),
    ({"content-type": "application/json"}, 415),
    ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ({"content-type": "multipart/form-data; boundary=x"}, 415),
    ({"content-type": ""}, 415),
    ({"content-length": str((64 << 20) + 1)}, 413),
    ({"content-length": "-1"}, 413),
]


def test_foreign_requests_write_nothing(client: TestClient, own: Path) -> None:
    names_of(client, own)
    before = files(own)
    for headers, status in FOREIGN:
        for what in ("file", "mask"):
            sent = {**OURS, "content-type": "image/png", **headers}
            answer = put(client, own, "first.png", PNG, what=what, **sent)
            assert answer.status_code == status, (headers, what)
            assert problems_of(answer.json())
    assert files(own) == before


def test_only_these_routes_take_files(client: TestClient, own: Path) -> None:
    asked, headers = {"path": str(own), "name": "a.png"}, {"content-type": "image/png"}
    for method, route in (
        ("POST", "file"),
        ("DELETE", "file"),
        ("PUT", "file/"),
        ("PUT", "captions"),
        ("DELETE", "mask"),
    ):
        answer = client.request(method, f"/api/datasets/{route}", params=asked, content=PNG, headers=headers)
        assert answer.status_code == 415, (method, route)


def test_another_address_needs_the_token(place: Path, own: Path) -> None:
    token, text = token_of(place / "token")
    client = site(place / "runs", token=token)
    client.base_url = client.base_url.copy_with(host="192.168.1.5")
    before = files(own)
    for sent in ({}, {"authorization": "Bearer wrong"}):
        assert put(client, own, "a.png", PNG, **sent).status_code == 401
        assert put(client, own, "first.png", mask(), what="mask", **sent).status_code == 401
    assert files(own) == before
    assert put(client, own, "a.png", PNG, authorization=f"Bearer {text}").status_code == 201


def test_a_body_without_length_is_bounded(client: TestClient, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_UPLOADED", 100_000)
    before = files(own)

    def parts() -> Iterator[bytes]:
        yield from [PNG, *([b"\0" * 20_000] * 10)]

    answer = put(client, own, "a.png", parts())
    assert answer.status_code == 413
    assert put(client, own, "a.txt", b"x" * (1 << 20), "text/plain").status_code == 413
    assert files(own) == before
    assert put(client, own, "a.png", iter([PNG[:100], PNG[100:]])).status_code == 201


def test_a_file_that_does_not_come_is_let_go(client: TestClient, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "STALLED_SECONDS", 0.05)
    before, answers, parts = (
        files(own),
        list[Message](),
        [{"type": "http.request", "body": PNG[:50], "more_body": True}],
    )

    async def receive() -> Message:
        while not parts:
            await asyncio.sleep(1.0)
        return parts.pop()

    async def send(message: Message) -> None:
        answers.append(message)

    sent = {"host": "localhost", "content-type": "image/png", "content-length": str(len(PNG)), **OURS}
    query = urlencode({"path": str(own), "name": "a.png"}).encode()
    headers = [(name.encode(), value.encode()) for name, value in {**sent, "origin": "http://localhost"}.items()]
    scope = {"type": "http", "method": "PUT", "path": "/api/datasets/file", "query_string": query, "headers": headers}
    asyncio.run(app_of(client)({**scope, "server": ("localhost", 80), "scheme": "http"}, receive, send))
    assert answers[0]["status"] == 408
    assert files(own) == before


def test_what_a_killed_server_left_is_removed(client: TestClient, own: Path) -> None:
    left, new = own / ".upload.abcd1234.part", own / ".upload.efgh5678.part"
    for path in (left, new):
        path.write_bytes(PNG[:100])
    os.utime(left, (0, 0))
    assert put(client, own, "a.png", PNG).status_code == 201
    assert not left.exists()
    assert new.exists()  # another server may be writing it


def test_a_full_disk_leaves_nothing(client: TestClient, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names_of(client, own)
    before = files(own)
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*arguments: Any) -> None:
        raise full

    def all_refused() -> None:
        for name, body, what in (("a.png", PNG, "file"), ("in/a.png", PNG, "file"), ("first.png", mask(), "mask")):
            answer = put(client, own, name, body, what=what)
            assert answer.status_code == 507
            assert "full" in problems_of(answer.json())[0]
        assert files(own) == before
        assert not (own / "in").exists()

    monkeypatch.setattr(uploads, "SPARE_DISK", 1 << 60)
    all_refused()
    monkeypatch.undo()
    monkeypatch.setattr(core_io, "flush_file", refuse)
    monkeypatch.setattr(uploads, "flush_file", refuse)
    all_refused()
    monkeypatch.undo()
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    assert put(client, own, "in/a.png", PNG).status_code == 507
    assert files(own) == before
    assert not (own / "in").exists()


def test_captions_are_texts(client: TestClient, own: Path) -> None:
    before = files(own)
    for body in (b"\xff\xfa\x00", b"a\0b", b"\x1b[31m", "x".encode("utf-16") + b"\0"):
        assert put(client, own, "cat.txt", body, "text/plain").status_code == 422
    assert files(own) == before


def test_a_new_dataset_is_an_empty_folder(client: TestClient, place: Path) -> None:
    made = client.post("/api/datasets/new", json={"name": "my cat"})
    assert (made.status_code, made.json()) == (201, {"path": str(place / "datasets" / "my cat"), "name": "my cat"})
    assert client.post("/api/datasets/new", json={"name": "my cat"}).status_code == 409
    for name in ("", ".x", "a/b", "..", "NUL", "a.", "a\0", "x" * 300):
        assert client.post("/api/datasets/new", json={"name": name}).status_code == 422, name
    empty = client.get("/api/datasets/images", params={"path": str(place / "datasets" / "my cat")})
    assert (empty.status_code, empty.json()["is_empty"]) == (200, True)
    assert put(client, place / "datasets" / "my cat", "a.png", PNG).status_code == 201
    assert names_of(client, place / "datasets" / "my cat") == ["a.png"]


# Masks


def mask(size: tuple[int, int] = (300, 200), mode: str = "L", level: int = 255, kind: str = "PNG") -> bytes:
    drawn = Image.new("L", size)
    drawn.paste(level, (0, 0, size[0] // 2, size[1]))
    file = io.BytesIO()
    drawn.convert(mode).save(file, kind)
    return file.getvalue()


def row_of(client: TestClient, path: Path) -> dict[str, Any]:
    found = images_of(client, path)
    return {**found["rows"][0], "version": found["version"]}


def test_a_mask_is_saved_as_gray_png(client: TestClient, own: Path) -> None:
    assert row_of(client, own)["has_mask"] is False
    for mode in ("RGB", "RGBA", "LA", "1", "P"):
        assert put(client, own, "first.png", mask(mode=mode), what="mask").status_code == 200, mode
    mode = "L"
    answer = put(client, own, "first.png", mask(mode=mode), what="mask")
    assert answer.status_code == 200, answer.json()
    assert (answer.json()["file"], answer.json()["white"]) == ("first-masklabel.png", pytest.approx(0.5))
    with Image.open(own / "first-masklabel.png") as saved:
        assert (saved.format, saved.mode, saved.size) == ("PNG", "L", (300, 200))
        assert (saved.getpixel((10, 10)), saved.getpixel((290, 10))) == (255, 0)
    row = row_of(client, own)
    assert (row["has_mask"], row["version"]) == (True, answer.json()["version"])  # nothing was read again
    asked = {"path": str(own), "name": "first.png"}
    assert client.get("/api/datasets/mask", params=asked).content == (own / "first-masklabel.png").read_bytes()


def test_a_mask_replaces_and_is_removed(client: TestClient, own: Path) -> None:
    (own / "first-masklabel.jpg").write_bytes(mask(kind="JPEG"))
    assert row_of(client, own)["has_mask"] is True
    assert put(client, own, "first.png", mask(level=128), what="mask").status_code == 200
    assert sorted(files(own)) == ["first-masklabel.png", "first.png", "first.txt"]
    asked = {"path": str(own), "name": "first.png"}
    assert client.delete("/api/datasets/mask", params=asked).json()["has_mask"] is False
    assert client.delete("/api/datasets/mask", params=asked).status_code == 404
    assert client.get("/api/datasets/mask", params=asked).status_code == 404
    assert sorted(files(own)) == ["first.png", "first.txt"]
    assert row_of(client, own)["has_mask"] is False


def test_masks_that_do_not_fit_are_refused(client: TestClient, own: Path) -> None:
    names_of(client, own)
    put(client, own, "first.png", mask(), what="mask")
    before = files(own)
    red = io.BytesIO()
    Image.merge("RGB", (Image.linear_gradient("L").resize((300, 200)), *[Image.new("L", (300, 200))] * 2)).save(
        red, "PNG"
    )
    wrong = [
        (mask((200, 300)), "200×300"),
        (mask((150, 100)), "150×100"),
        (mask(kind="JPEG"), "not a PNG"),
        (image_bytes(size=(300, 200))[:200], "cannot be read"),
        (mask(level=0), "black"),
        (mask(level=7), "classes"),
        (red.getvalue(), "colors"),
        (b"<html></html>", "not an image"),
        (b"", "empty"),
        (bomb(), "13000"),
        (bomb(300, 200), "cannot be read"),
    ]
    for body, word in wrong:
        answer = put(client, own, "first.png", body, what="mask")
        assert answer.status_code == 422, word
        assert word in problems_of(answer.json())[0]
    assert files(own) == before


def test_masks_with_colors_or_transparency_mean_what_they_do_in_a_folder(client: TestClient, own: Path) -> None:
    names_of(client, own)
    shown = Image.new("L", (300, 200))
    shown.paste(255, (0, 0, 150, 200))
    drawn, cut_out = Image.new("RGBA", (300, 200), (255, 255, 255, 0)), Image.new("RGB", (300, 200), (200, 0, 90))
    drawn.paste((255, 255, 255, 255), (0, 0, 150, 200))
    cut_out.putalpha(shown)
    deep = Image.fromarray(np.asarray(shown).astype(np.uint16) * 257)
    for image in (drawn, cut_out, deep, shown.convert("RGB")):
        file = io.BytesIO()
        image.save(file, "PNG")
        answer = put(client, own, "first.png", file.getvalue(), what="mask")
        assert (answer.status_code, answer.json()["white"]) == (200, pytest.approx(0.5))
        with Image.open(own / "first-masklabel.png") as saved:
            assert (saved.mode, saved.tobytes()) == ("L", shown.tobytes())


def test_a_mask_with_transparency_is_shown_as_it_counts(client: TestClient, own: Path) -> None:
    """A browser would lay the file itself on nothing: a cut-out would be drawn on as if its colors counted."""
    shown = Image.new("L", (300, 200))
    shown.paste(255, (0, 0, 150, 200))
    cut_out = Image.new("RGB", (300, 200), (40, 0, 20))
    cut_out.putalpha(shown)
    cut_out.save(own / "first-masklabel.png")
    names_of(client, own)
    asked = {"path": str(own), "name": "first.png"}
    for route, more in (("mask", {}), ("image", {"what": "mask"}), ("image", {"what": "mask", "width": 300})):
        body = client.get(f"/api/datasets/{route}", params={**asked, **more}).content
        with Image.open(io.BytesIO(body)) as found:
            assert found.convert("L").tobytes() == shown.tobytes(), (route, more)


def test_masks_are_of_images_that_are_there(client: TestClient, own: Path) -> None:
    names_of(client, own)
    assert put(client, own, "gone.png", mask(), what="mask").status_code == 404
    assert put(client, own, "../own/first.png", mask(), what="mask").status_code == 404
    (own / "first.webp").write_bytes(image_bytes("WEBP"))
    client.post("/api/datasets/read", json={"path": str(own)})
    assert put(client, own, "first.png", mask(), what="mask").status_code == 409


def test_a_new_run_uses_the_masks(client: TestClient, own: Path) -> None:
    """What `source` answers is what `POST /api/runs` takes; the listing of a training reads the mask from it."""
    put(client, own, "in/second.png", PNG)
    asked = {"path": str(own)}
    plain = client.get("/api/datasets/source", params=asked).json()
    assert plain == {"masks": 0, "images": 2, "data": [str(own)], "settings": {}}
    client.post("/api/datasets/read", json=asked)
    names_of(client, own)
    assert put(client, own, "in/second.png", mask((320, 240)), what="mask").status_code == 200
    found = client.get("/api/datasets/source", params=asked).json()
    assert (found["masks"], found["images"], found["data"]) == (1, 2, [])
    layer = Layer("page", {"data": {"sources": found["settings"]["data.sources"]}})
    manifest, findings = list_data(settle([], [layer], say=lambda line: None).config)
    masks = {each.path.name: each.mask and each.mask.path for each in manifest.samples}
    assert masks == {"first.png": None, "second.png": own / "in" / "second-masklabel.png"}
    assert {each.code for each in findings} == {"missing_mask", "missing_caption"}
    assert client.get("/api/datasets/source", params={"path": "/etc"}).status_code == 403


def test_the_page_sends_what_the_server_reads() -> None:
    script = (Path(web.__file__).parent / "page" / "upload.js").read_text("utf-8")
    listed = re.findall(r'"(\.\w+)"', script.split("const IMAGES", 1)[1].split("];", 1)[0])
    assert sorted(listed) == sorted({*IMAGE_ENDINGS, ".avif"})  # whether this Pillow has it or not


def test_an_image_in_another_unicode_form_is_the_same_name(client: TestClient, own: Path) -> None:
    assert put(client, own, "été.png", PNG).status_code == 201
    (own / "été.png").rename(own / unicodedata.normalize("NFD", "été.png"))
    assert put(client, own, "été.jpg", JPEG).status_code == 409
    assert put(client, own, "photo.jfif", JPEG).json()["name"] == "photo.jfif"
