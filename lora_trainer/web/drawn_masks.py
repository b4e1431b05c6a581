"""`/api/datasets/mask`: masks drawn in the page, beside the images of a dataset that may be edited.

A mask says which parts of an image count in training. It is decoded, checked and written again by another process; training
uses it where the source says so: `GET /api/datasets/source` has the settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from lora_trainer.core.errors import Problem
from lora_trainer.core.io import atomic_path, flush_folder
from lora_trainer.data.images.images import BrokenImageError
from lora_trainer.data.images.scan import HEADER_SECONDS, lost, read_headers
from lora_trainer.data.images.workers import Task, run_tasks
from lora_trainer.data.sources.names import MASK_LABEL, masks_beside
from lora_trainer.web.dataset_index import DatasetIndex
from lora_trainer.web.dataset_reader import MOST_SUM, number_of_name
from lora_trainer.web.dataset_work import opened_index
from lora_trainer.web.datasets import Named, OneImage, refuse_unread, show_image
from lora_trainer.web.safety import JSON, Refusal
from lora_trainer.web.served_files import MOST_PIXELS, decoding
from lora_trainer.web.server_state import ServerState, State
from lora_trainer.web.uploads import MOST_UPLOADED, read_to_end, received

PIXELS_A_SECOND = 1_000_000

router = APIRouter(prefix="/api/datasets", default_response_class=JSON)


class MaskOf(Named):
    """The mask of one image."""

    name: str = Field(min_length=1, max_length=4096)


@router.get("/mask")
def show_mask(asked: Annotated[MaskOf, Query()], state: State) -> Response:
    """The bytes of an image's mask."""
    return show_image(OneImage(path=asked.path, name=asked.name, what="mask"), state)


@router.put("/mask")
async def put_mask(request: Request, asked: Annotated[MaskOf, Query()], state: State) -> Response:
    """Save a mask beside its image, in place of an earlier one. The body is a gray PNG of the image's size; white counts."""
    try:
        index, row, image = await run_in_threadpool(image_to_mask, asked, state)
        async with received(request, image.parent, "The mask", MOST_UPLOADED, state.receiving) as temporary:
            found = await run_in_threadpool(take_mask, temporary, image)
    except Refusal as refusal:
        if refusal.status != 408:
            await read_to_end(request)
        raise
    return JSON({**found, **await run_in_threadpool(took_mask, index, row, image, found["file"])})


@router.delete("/mask")
def delete_mask(asked: Annotated[MaskOf, Query()], state: State) -> Response:
    """Remove the mask of an image: all of it counts again."""
    index, row, image = image_to_mask(asked, state)
    if not masks_of(image):
        raise Refusal(
            404, Problem("mask_missing", f"{asked.name[:200]} has no mask beside it.", "Load the page again.")
        )
    return JSON(took_mask(index, row, image, None))


def image_to_mask(asked: MaskOf, state: ServerState) -> tuple[DatasetIndex, Mapping[str, Any], Path]:
    """The list, the row and the file of an image that may get a mask. Raises Refusal."""
    folder, index = opened_index(asked.path, state)
    with index.lock:
        refuse_unread(index)
        row = index.row(asked.name)
        is_shared = row["stem"] in index.shared("stem")
    image = Path(os.fsdecode(row["path"]))
    if row["span_file"] is not None:
        fix = "Make a copy of the dataset: it has plain files."
        raise Refusal(409, Problem("read_only_shard", f"{asked.name[:200]} lies in a shard, which is only read.", fix))
    if not Path(os.path.realpath(image.parent)).is_relative_to(folder):
        raise Refusal(
            403,
            Problem("leads_out_of_data", f"{image.parent} leads out of the dataset.", "Make a copy of the dataset."),
        )
    if is_shared:
        message = f"{asked.name[:200]} and another image would share a mask: they differ in their endings alone."
        raise Refusal(409, Problem("mask_shared", message, "Rename one of them."))
    return index, row, image


def take_mask(drawn: Path, image: Path) -> dict[str, Any]:
    """Write a mask beside its image, whole or not at all. Raises Refusal for one that does not fit it, and OSError."""
    facts = read_headers([(image, None)])[0]
    if isinstance(facts, BrokenImageError):
        raise Refusal(409, Problem(facts.code, f"{image.name} {facts.message}", facts.fix))
    pixels = facts.width * facts.height
    if pixels > MOST_PIXELS:
        raise Refusal(409, Problem("image_too_large", f"{image.name} is too large to draw on.", "Scale it down."))
    with atomic_path(image.with_name(f"{image.stem}{MASK_LABEL}.png")) as target, decoding:
        task = Task([str(image), str(drawn), str(target)], pixels, HEADER_SECONDS + pixels / PIXELS_A_SECOND)
        found = next(result for _, result in run_tasks("mask", [task]))
        if isinstance(found, str):
            found = {"broken": [lost(found).code, lost(found).message, lost(found).fix]}
        if "broken" in found:
            raise Refusal(422, Problem("mask_unreadable", f"The mask {found['broken'][1]}", found["broken"][2]))
        if "errno" in found:
            raise OSError(found["errno"], os.strerror(found["errno"]))
    return {"file": f"{image.stem}{MASK_LABEL}.png", "width": facts.width, "height": facts.height, **found}


def masks_of(image: Path) -> list[Path]:
    """All masks beside an image: their endings and the case of their names may differ."""
    return [image.with_name(name) for name in masks_beside(os.listdir(image.parent)).get(image.name, ())]


def took_mask(index: DatasetIndex, row: Mapping[str, Any], image: Path, kept: str | None) -> dict[str, Any]:
    """Remove the masks of an image but for the file `kept`, and put that into the list of images."""
    old = [path for path in masks_of(image) if path.name != kept]
    for path in old:
        path.unlink(missing_ok=True)
    flush_folder(image.parent)
    before = None if row["mask"] is None else os.fsdecode(row["mask"])
    place = None if kept is None else str(image.with_name(kept))
    with index.lock:
        with index.file:
            mask = None if place is None else os.fsencode(place)
            index.file.execute("UPDATE images SET mask = ? WHERE path = ?", (mask, row["path"]))
            # The names in its folder are known to be other ones: nothing is read again.
            number = -sum(number_of_name(path.name) for path in old)
            if place is not None and before != place:
                number += number_of_name(os.path.basename(place))
            values = (number % (MOST_SUM + 1), MOST_SUM, os.fsencode(image.parent))
            index.file.execute("UPDATE stamps SET names = (names + ?) & ? WHERE path = ?", values)
        index.changed(here=True)
        return {"has_mask": place is not None, "version": index.version}
