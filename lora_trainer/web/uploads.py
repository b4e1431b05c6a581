"""`/api/datasets/file`: images and captions that come into a dataset that may be edited, a file in each request.

A file is written under a hidden name as it comes. It gets its own name only once another process has decoded it in full, or
it was read as a caption; whatever is wrong leaves nothing behind. Bytes are kept as they were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from lora_trainer.core.bounded import TextError, read_text
from lora_trainer.core.errors import Problem
from lora_trainer.core.io import flush_file, flush_folder, remove_abandoned, sha256_file
from lora_trainer.data.images.decode import measure_images
from lora_trainer.data.images.images import ENDINGS_OF_FORMAT, IMAGE_ENDINGS, BrokenImageError
from lora_trainer.data.images.jobs import Facts
from lora_trainer.data.images.scan import read_headers
from lora_trainer.data.sample import Sample
from lora_trainer.data.sources.beside import CAPTION_ENDINGS
from lora_trainer.data.sources.folder import FOREIGN_IMAGES
from lora_trainer.data.sources.names import ending_of, folded, is_image, stem_of
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES
from lora_trainer.web.caption_edits import refuse_wrong_text
from lora_trainer.web.dataset_work import NAME
from lora_trainer.web.datasets import (
    LONGEST_NAME,
    Named,
    counted_images,
    editable,
    new_place,
    readable,
    refuse_wrong_name,
)
from lora_trainer.web.safety import JSON, Refusal
from lora_trainer.web.served_files import MOST_PIXELS, decoding
from lora_trainer.web.server_state import State

MOST_UPLOADED = 64 << 20  # bytes of one file
SPARE_DISK = 256_000_000  # bytes that stay free
WRITTEN_AT_ONCE = 1 << 20
LONGEST_SECONDS = 3600.0  # for one file
STALLED_SECONDS = 60.0  # without a byte of it
MOST_LOOKED_AT = 200_000  # files that are looked through for masks
placing = threading.Lock()  # held while a file gets its name

router = APIRouter(prefix="/api/datasets", default_response_class=JSON)


class NewDataset(BaseModel):
    """The name of a dataset to be made."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern=NAME)


class NewFile(Named):
    """A file of a dataset: its name, or a folder and its name."""

    name: str = Field(min_length=1, max_length=2 * LONGEST_NAME)


@router.post("/new", status_code=201)
def new_dataset(sent: NewDataset, state: State) -> Response:
    """Make an empty dataset that may be edited; its files are sent to it."""
    place = new_place(sent.name, state)
    place.mkdir(parents=True)
    return JSON({"path": str(place), "name": place.name}, 201)


@router.get("/source")
def show_source(asked: Annotated[Named, Query()], state: State) -> Response:
    """How a new run names the dataset, so that masks beside its images count: `data` and `settings` of `POST /api/runs`."""
    path = readable(asked.path, state)
    found = counted_images(path, MOST_LOOKED_AT) if path.is_dir() else {"masks": 0, "images": 0}
    masks = found["masks"]
    settings = {"data.sources": [{"path": str(path), "masks": str(path)}]} if masks else {}
    return JSON({"masks": masks, "images": found["images"], "data": [] if masks else [str(path)], "settings": settings})


@router.put("/file", status_code=201)
async def put_file(request: Request, asked: Annotated[NewFile, Query()], state: State) -> Response:
    """Add an image or a caption, whose bytes are the body. 409 where there is another file of that name; the same again is fine.

    An image whose ending is that of another format gets the right one: `name` in the answer is what it is called.
    """
    folder = target = Path()
    try:
        folder = await run_in_threadpool(editable, asked.path, state)
        target = folder.joinpath(*parts_of(asked.name))
        is_caption = ending_of(target.name) in CAPTION_ENDINGS
        most = MOST_CAPTION_BYTES - 1 if is_caption else MOST_UPLOADED
        async with received(request, folder, target.name, most, state.receiving) as temporary:
            found = await run_in_threadpool(take_caption if is_caption else take_image, temporary, target, folder)
    except Refusal as refusal:
        if refusal.status != 408:
            await read_to_end(request)
        raise
    return JSON(found, 201 if found["is_new"] else 200)


def parts_of(name: str) -> list[str]:
    """The parts of a file's name in a dataset: its own, behind that of a folder at most. Raises Refusal."""
    parts = [refuse_wrong_name(part) for part in name.split("/")]
    ending = ending_of(parts[-1])
    if len(parts) > 2:
        raise Refusal(
            422, Problem("name_twice", f"{name[:200]} lies in more than one folder.", "Name one folder, or none.")
        )
    if ending not in (*IMAGE_ENDINGS, *CAPTION_ENDINGS):
        read = f"{' '.join(IMAGE_ENDINGS)} for images, {' '.join(CAPTION_ENDINGS)} for captions"
        fix = "Convert it to PNG or JPEG." if ending in FOREIGN_IMAGES else f"What is read: {read}."
        raise Refusal(422, Problem("not_an_image", f"{parts[-1][:200]} is neither an image nor a caption.", fix))
    return parts


@contextlib.asynccontextmanager
async def received(
    request: Request, folder: Path, name: str, most: int, receiving: asyncio.Semaphore
) -> AsyncIterator[Path]:
    """The body of a request as a hidden file of `folder`, which is removed in the end unless it was renamed.

    Raises Refusal for one of more than `most` bytes, that ends too early or does not come, or that the disk has no room for;
    and OSError.
    """
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise too_large(name, most)
    async with receiving:
        await run_in_threadpool(remove_abandoned, folder, 2 * LONGEST_SECONDS)  # of a server that was killed
        refuse_full_disk(folder, int(length))
        descriptor, temporary = tempfile.mkstemp(prefix=".upload.", suffix=".part", dir=folder)
        try:
            with open(descriptor, "wb") as file:
                size, waiting = 0, bytearray()
                async for part in body_of(request, LONGEST_SECONDS):
                    size += len(part)
                    if size > most:
                        raise too_large(name, most)
                    waiting += part
                    if len(waiting) >= WRITTEN_AT_ONCE:
                        refuse_full_disk(folder, len(waiting))
                        await run_in_threadpool(file.write, bytes(waiting))
                        waiting.clear()
                file.write(waiting)
            yield Path(temporary)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


async def body_of(request: Request, seconds: float) -> AsyncIterator[bytes]:
    """The parts of a body as they come. Raises Refusal where the sender leaves, stalls, or takes longer than `seconds`."""
    parts, end = aiter(request.stream()), time.monotonic() + seconds
    while True:
        try:
            async with asyncio.timeout(min(STALLED_SECONDS, end - time.monotonic())):
                part = await anext(parts, None)
        except TimeoutError:
            raise Refusal(408, Problem("upload_too_slow", "The file did not come in time.", "Send it again.")) from None
        except ClientDisconnect:
            raise Refusal(
                400, Problem("upload_cut_off", "The file was not sent to its end.", "Send it again.")
            ) from None
        if part is None:
            return
        yield part


def too_large(name: str, most: int) -> Refusal:
    fix = "Shorten it." if most < MOST_UPLOADED else "Scale it down, or save it as JPEG or WebP."
    return Refusal(413, Problem("file_too_large", f"{name} is larger than {most + 1023 >> 20} MiB.", fix))


def refuse_full_disk(folder: Path, size: int) -> None:
    """Raise Refusal where so many more bytes would fill the disk."""
    if shutil.disk_usage(folder).free < size + SPARE_DISK:
        message = f"The disk of {folder.name} is full: {SPARE_DISK // 10**6} MB stay free for runs."
        raise Refusal(507, Problem("disk_full", message, "Free some space, and send it again."))


async def read_to_end(request: Request) -> None:
    """Read what is left of a body that was refused, within limits: a browser that still sends would not see the answer."""
    left = MOST_UPLOADED
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > left:
        return
    with contextlib.suppress(Refusal, RuntimeError):
        async for part in body_of(request, STALLED_SECONDS):
            left -= len(part)
            if left < 0:
                return


def take_image(temporary: Path, target: Path, folder: Path) -> dict[str, Any]:
    """Give an image its name once it was decoded; what it is. Raises Refusal and OSError, and leaves nothing then."""
    facts = decoded(temporary, target.name)
    endings = ENDINGS_OF_FORMAT[facts.format]
    place = target if ending_of(target.name) in endings else target.with_name(stem_of(target.name) + endings[0])
    found = {"kind": "image", "width": facts.width, "height": facts.height}
    if place != target:
        found["renamed_from"] = target.name
    return {**put_at(temporary, place, folder, facts.content), **found}


def decoded(path: Path, name: str) -> Facts:
    """The facts of an image that was decoded in full, by another process. Raises Refusal where it cannot be trained on."""
    facts = read_headers([(path, None)])[0]
    if isinstance(facts, BrokenImageError):
        raise Refusal(422, Problem(facts.code, f"{name} {facts.message}", facts.fix))
    if facts.width * facts.height > MOST_PIXELS:
        message = (
            f"{name} has {facts.width}×{facts.height} pixels; at most {MOST_PIXELS // 10**6} million are taken here."
        )
        raise Refusal(422, Problem("image_too_large", message, "Scale it down, or copy it into the folder by hand."))
    with decoding:
        broken = measure_images([Sample(path, "", facts.width, facts.height, facts.content)])[0].broken
    if broken is not None:
        raise Refusal(422, Problem("image_unreadable", f"{name} {broken[1]}", broken[2]))
    return facts


def take_caption(temporary: Path, target: Path, folder: Path) -> dict[str, Any]:
    """Give a caption its name once it was read. Raises Refusal and OSError, and leaves nothing then."""
    try:
        refuse_wrong_text(read_text(temporary, MOST_CAPTION_BYTES), target.stem)
    except TextError as error:
        raise Refusal(
            422, Problem("file_unreadable", f"{target.name} {error}.", "Save it as a short UTF-8 text.")
        ) from None
    return {**put_at(temporary, target, folder, sha256_file(temporary)), "kind": "caption"}


def put_at(temporary: Path, target: Path, folder: Path, content: str) -> dict[str, Any]:
    """Rename a file to `target` in the dataset `folder`, never over another one. `content` is the sha256 of its bytes.

    Raises Refusal where there is another file of that name, or an image whose caption would be the same; and OSError.
    """
    shown = target.relative_to(folder).as_posix()
    with placing:
        if not Path(os.path.realpath(target.parent)).is_relative_to(folder):
            raise Refusal(
                403,
                Problem("leads_out_of_data", f"{target.parent.name} leads out of the dataset.", "Use another folder."),
            )
        makes_folder = not target.parent.exists()
        if not makes_folder and not target.parent.is_dir():
            raise Refusal(
                409, Problem("path_is_file", f"{target.parent.name} is a file of the dataset.", "Use another folder.")
            )
        if not makes_folder and refuse_taken(target, content):
            return {"name": shown, "is_new": False}
        flush_file(temporary)
        os.chmod(temporary, 0o644)
        try:
            target.parent.mkdir(exist_ok=True)
            try:
                os.link(temporary, target)  # never over another file
            except FileExistsError:
                raise Refusal(
                    409, Problem("file_came_meanwhile", f"{shown} came meanwhile.", "Send it again.")
                ) from None
            except OSError:  # a disk without links
                os.rename(temporary, target)
            flush_folder(target.parent)
        except BaseException:
            if makes_folder:
                with contextlib.suppress(OSError):
                    target.parent.rmdir()
            raise
    return {"name": shown, "is_new": True}


def refuse_taken(target: Path, content: str) -> bool:
    """Whether the very file is there. Raises Refusal for another of its name, or an image that would share its caption."""
    if os.path.lexists(target):
        if target.is_file() and not target.is_symlink() and sha256_file(target) == content:
            return True
        message = f"There is another {target.name} in the dataset."
        raise Refusal(409, Problem("name_taken", message, "Send it under another name, or remove the other one."))
    same = (folded(target.name), folded(stem_of(target.name)))
    for name in os.listdir(target.parent):
        is_same = folded(name) == same[0]  # many disks do not tell Cat from cat
        if is_same or (is_image(target.name) and is_image(name) and folded(stem_of(name)) == same[1]):
            message = f"{target.name} and {name}, which is in the dataset, would share one name, caption and mask."
            raise Refusal(409, Problem("name_shared", message, "Send it under another name, or remove the other one."))
    return False
