"""`/api/datasets`: the images and captions of a dataset a page at a time, its findings, and the work on a copy of it.

A dataset that a user has elsewhere is only read. What may be edited lies in the folder of the server's datasets, and
`editable` is the only way to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import FileResponse

from lora_trainer.builtin import DATA_FOLDER
from lora_trainer.core.errors import Problem
from lora_trainer.core.io import user_cache_folder
from lora_trainer.data.images.images import BrokenImageError, header_of
from lora_trainer.data.images.remote import is_url
from lora_trainer.data.images.spans import content_of, open_bytes
from lora_trainer.data.sample import Span
from lora_trainer.data.sources.beside import CAPTION_ENDINGS
from lora_trainer.data.sources.names import ending_of, is_image, masks_beside
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import USUAL_FAMILY
from lora_trainer.models.published import public_architecture
from lora_trainer.report.read import mapping, sequence
from lora_trainer.run_folder.record import RECORD, Record
from lora_trainer.web.asked_settings import texts_in
from lora_trainer.web.dataset_index import BUILTIN, DatasetIndex, WantedImages
from lora_trainer.web.run_list import Stamp, stamp_of
from lora_trainer.web.safety import JSON, Refusal, allowed
from lora_trainer.web.served_files import WIDTHS, image_type_of, inside, small_copy
from lora_trainer.web.server_state import ServerState, State

WAITED_SECONDS = 1.5  # for a list that is not there; then the page shows how far it is
MOST_ROWS, MOST_NAMES = 500, 200_000
MOST_COUNTED = 20_000  # entries of one folder in the list of datasets
MOST_WHOLE = 256_000_000  # bytes of an image of a shard
A_YEAR = 31_536_000
LONGEST_NAME = 200  # bytes of a file's name: captions and masks have longer ones
WRONG_IN_NAMES = re.compile(r'[<>:"|?*\\]')  # on Windows
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # there, too
CHECKED, COPIED, CLEANED, CAPTIONED = "check", "copy", "clean", "caption"  # kinds of tasks

router = APIRouter(prefix="/api/datasets", default_response_class=JSON)
PathText = Annotated[str, Field(min_length=1, max_length=4096)]


class SizesOf(BaseModel):
    """A dataset, and the sizes that its images are seen at."""

    model_config = ConfigDict(extra="forbid")
    path: PathText
    family: str | None = Field(None, max_length=40)
    resolution: Annotated[int, Field(ge=16, le=8192)] | None = None

    def family_for(self, path: Path) -> str:
        """The family that the buckets are of. Raises Refusal for one that there is not."""
        family = self.family or (BUILTIN if path == DATA_FOLDER else USUAL_FAMILY)
        if family != BUILTIN and family not in FAMILIES:
            raise Refusal(
                422, Problem("family_unknown", f"{family} is no family of models.", "GET /api/datasets lists them.")
            )
        return family


class Filter(SizesOf):
    """Which images of which dataset, and the sizes that they are seen at."""

    search: str = Field("", max_length=1000)
    tag: str = Field("", max_length=1000)
    finding: str = Field("", max_length=100)
    bucket: str = Field("", max_length=40)

    def wanted(self, names: list[str] | None = None) -> WantedImages:
        chosen = None if names is None else tuple(names)
        return WantedImages(self.search.strip(), self.tag.strip(), self.finding, self.bucket, chosen)


class ImageRows(Filter):
    """A part of the images, in an order."""

    offset: int = Field(0, ge=0)
    limit: int = Field(100, ge=0, le=MOST_ROWS)
    sort: Literal["order", "name", "newest", "short", "long", "small", "large"] = "order"


class ImageNames(ImageRows):
    """The same for their names alone."""

    limit: int = Field(MOST_NAMES, ge=0, le=MOST_NAMES)


class Named(BaseModel):
    """A dataset."""

    model_config = ConfigDict(extra="forbid")
    path: PathText


def editable(path: str | Path, state: ServerState) -> Path:
    """The folder of a dataset that may be changed: one in the folder of the server's datasets, links followed.

    Raises Refusal for any other, which is only read.
    """
    real, root = allowed(path, state.roots), os.path.realpath(state.datasets)
    parts = real.relative_to(root).parts if real.is_relative_to(root) else ()
    if not parts or any(part.startswith(".") for part in parts):
        message = f"{real.name} is only shown: nothing is written into a folder outside of {state.datasets}."
        raise Refusal(403, Problem("folder_only_shown", message, "Make a copy, and edit that."))
    if not real.is_dir():
        raise Refusal(
            404,
            Problem("dataset_missing", f"There is no dataset {real.name} in {state.datasets}.", "Make a copy first."),
        )
    return real


def is_editable(path: Path, state: ServerState) -> bool:
    try:
        return bool(editable(path, state))
    except Refusal:
        return False


def refuse_wrong_name(name: str) -> str:
    """The name of a file or folder in its usual form. Raises Refusal for one that some system cannot have, or that hides."""
    name = unicodedata.normalize("NFC", name)
    wrong = not name or name.startswith(".") or name.endswith((".", " ")) or not name.isprintable()
    if wrong or WRONG_IN_NAMES.search(name) or RESERVED.fullmatch(name):
        shown = name.encode("unicode_escape").decode()[:200]
        fix = 'Use letters, digits, spaces, points, hyphens; no point in front, none of < > : " | ? * \\ and no name of a device.'
        raise Refusal(
            422, Problem("name_invalid", f"{shown or 'Nothing'} is not a name that every system can have.", fix)
        )
    if len(name.encode()) > LONGEST_NAME:
        raise Refusal(
            422, Problem("name_too_long", f"{name[:60]}… is too long a name.", f"Use at most {LONGEST_NAME} bytes.")
        )
    return name


def new_place(name: str, state: ServerState) -> Path:
    """Where a new dataset of this name will be. Raises Refusal where one is, or will be once a task has ended."""
    place = state.datasets / refuse_wrong_name(name)
    running = (row for row in state.tasks.rows() if row["status"] == "running")
    if os.path.lexists(place) or any(row["about"].get("target") == str(place) for row in running):
        raise Refusal(409, Problem("name_taken", f"There is a dataset {name} already.", "Choose another name."))
    return place


def readable(path: str, state: ServerState) -> Path:
    """The place of a dataset that may be read. Raises Refusal."""
    if is_url(path) or path.startswith(("http://", "https://")):
        raise Refusal(422, Problem("image_not_shown", "Images on a server are not shown here.", "Download the shards."))
    return allowed(path, state.roots)


def index_of(path: Path, state: ServerState) -> DatasetIndex:
    return state.indexes.of(path, state.roots)


# The list


@router.get("")
def list_datasets(state: State) -> Response:
    """The datasets that may be edited, those that runs were trained on, and the built-in one."""
    own = []
    if state.datasets.is_dir():
        with os.scandir(state.datasets) as entries:
            folders = [
                entry for entry in entries if not entry.name.startswith(".") and is_editable(Path(entry.path), state)
            ]
        for entry in sorted(folders, key=lambda entry: -entry.stat().st_mtime):
            found = counted_images(Path(entry.path))
            own.append({"name": entry.name, "path": entry.path, "changed": entry.stat().st_mtime, **found})
    paths = {each["path"] for each in own}
    used = [each for each in used_by_runs(state) if each["path"] not in paths and each["path"] != str(DATA_FOLDER)]
    families = [{"name": name, "resolution": public_architecture(name).facts.resolution} for name in FAMILIES]
    return JSON(
        {
            "folder": str(state.datasets),
            "datasets": own,
            "used": used,
            "builtin": {"name": "pomo", "path": str(DATA_FOLDER), **counted_images(DATA_FOLDER)},
            "families": [{"name": BUILTIN, "resolution": None}, *families],
            "family": USUAL_FAMILY,
        }
    )


def counted_images(folder: Path, most: int = MOST_COUNTED) -> dict[str, Any]:
    """How many images a folder has, the first, and how many have a mask beside them; of a large one at least so many."""
    count, masks, seen, first = 0, 0, 0, None
    waiting = [folder]
    while waiting and seen < most:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                found = [entry for _, entry in zip(range(most), entries, strict=False)]
        except OSError:
            continue
        seen += len(found)
        found = [entry for entry in found if not entry.name.startswith(".")]
        beside = {mask for several in masks_beside([entry.name for entry in found]).values() for mask in several}
        masks += len(beside)
        for entry in found:
            if is_image(entry.name):
                if entry.name not in beside:
                    count += 1
                    first = min(first or entry.path, entry.path)
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
    name = None if first is None else os.path.relpath(first, folder).replace(os.sep, "/")
    return {"images": count, "masks": masks, "is_more": bool(waiting) or seen >= most, "first": name}


kept_sources: dict[Path, tuple[Stamp, tuple[str, ...]]] = {}  # of runs, by their folders


def used_by_runs(state: ServerState) -> list[dict[str, Any]]:
    """The datasets of runs, the newest run first, as far as they may be read and are still there."""
    found: dict[str, dict[str, Any]] = {}
    for row in state.runs.rows():
        for path in sources_of_run(Path(row["folder"])):
            if path not in found:
                try:
                    there = os.path.exists(readable(path, state))
                except Refusal:
                    continue
                found[path] = {"name": Path(path).name, "path": path, "runs": 0, "run": row["id"], "is_there": there}
            found[path]["runs"] += 1
    return [each for each in found.values() if each["is_there"]]


def sources_of_run(folder: Path) -> tuple[str, ...]:
    stamp = stamp_of(folder / RECORD)
    if folder not in kept_sources or kept_sources[folder][0] != stamp:
        record = Record.read(folder)
        sources = None if record is None else record.setting("data.sources")
        paths = [each if isinstance(each, str) else mapping(each).get("path") for each in sequence(sources)]
        kept_sources[folder] = stamp, tuple(texts_in(paths))
    return kept_sources[folder][1]


# Images and captions


@router.get("/images")
def list_images(asked: Annotated[ImageRows, Query()], state: State) -> Response:
    """A page of images with captions, crops and findings, and what the dataset is as a whole.

    202 and `reading` where its list is not there yet; `is_empty` where nothing is in it yet. `version` rises with every
    change.
    """
    path = readable(asked.path, state)
    index, family = index_of(path, state), asked.family_for(path)
    # Captions may come before the images that they belong to.
    if is_editable(path, state) and all(
        name.startswith(".") or ending_of(name) in CAPTION_ENDINGS for name in os.listdir(path)
    ):
        return JSON({"path": str(path), "is_empty": True})
    index.settle(WAITED_SECONDS)
    with index.lock:
        reading = None if index.reading is None else {"done": index.reading.done, "total": index.reading.total}
        if not index.is_there:
            return JSON({"path": str(path), "reading": reading}, 202)
        check = newest_check(path, index, state)
        framed = index.framed(family, asked.resolution)
        fits = index.fits(framed)
        rows = index.fresh(index.select(asked.wanted(), fits, asked.sort, (asked.limit, asked.offset)))
        findings = index.findings_of([row["id"] for row in rows])
        shown = [shown_row(row, findings.get(row["id"], []), path, check) for row in rows]
        document = {"path": str(path), "name": path.name, "reading": reading, "version": index.version}
        document |= {"is_editable": is_editable(path, state), "family": family, "offset": asked.offset}
        document |= {"total": index.count(asked.wanted(), fits), "check": check, **index.summary(framed, fits)}
        return JSON({**document, **journal_state(path, state), "rows": shown})


def newest_check(path: Path, index: DatasetIndex, state: ServerState) -> dict[str, Any] | None:
    """What the newest check found, with its findings put into the list; None before the first one."""
    row = state.tasks.newest(CHECKED, {"dataset": str(path)})
    if row is None:
        return None
    kept = index.fact("check")
    if index.fact("task") != row["id"] or not kept:
        document = mapping(state.tasks.document(row["id"]))
        index.take_findings(row["id"], document)
        facts = {key: document.get(key) for key in ("score", "passed", "gate", "samples")}
        kept = json.dumps({**facts, "refusals": document.get("refusals") or []})
        index.set_fact("check", kept)
    found: dict[str, Any] = json.loads(kept)
    return {"task": row["id"], "started": row["started"], "ended": row["ended"], "about": row["about"], **found}


def shown_row(
    row: Mapping[str, Any], findings: list[dict[str, Any]], path: Path, check: Mapping[str, Any] | None
) -> dict[str, Any]:
    """An image as the page has it. Findings of a check from before its caption or itself was changed are old."""
    newest = max((int(row[key].partition(":")[0]) for key in ("caption_stamp", "image_stamp") if row[key]), default=0)
    is_old = check is not None and newest / 1e9 > check["started"]
    keys = ("name", "caption", "origin", "width", "height", "bucket", "repeats")
    return {
        **{key: row[key] for key in keys},
        "caption_file": row["caption_file"]
        and os.path.basename(row["caption_file"]).decode("utf-8", "backslashreplace"),
        "crop": row["crop"] and json.loads(row["crop"]),
        "is_reg": bool(row["is_reg"]),
        "has_mask": row["mask"] is not None,
        "controls": len(json.loads(row["controls"])),
        "content": row["content"],
        "findings": [
            {**each, "task": each["task"] or None, "is_old": bool(each["task"]) and is_old} for each in findings
        ],
    }


def journal_state(path: Path, state: ServerState) -> dict[str, str | None]:
    """The titles of what can be taken back and made again."""
    journal = state.indexes.journal(path)
    found = {"undo": journal.next(undone=False), "redo": journal.next(undone=True)}
    return {key: None if step is None else step.title for key, step in found.items()}


@router.get("/names")
def list_names(asked: Annotated[ImageNames, Query()], state: State) -> Response:
    """The names of the images that a page's filters leave, for a selection."""
    path = readable(asked.path, state)
    index, family = index_of(path, state), asked.family_for(path)
    index.settle(WAITED_SECONDS)
    with index.lock:
        refuse_unread(index)
        fits = index.fits(index.framed(family, asked.resolution))
        return JSON({"names": index.names(asked.wanted(), fits, asked.sort, (asked.limit, asked.offset))})


def refuse_unread(index: DatasetIndex) -> None:
    """Raise Refusal while the list of a dataset is not there."""
    if not index.is_there:
        raise Refusal(409, Problem("still_reading", "The images are still being read.", "Try again in a moment."))


class OneImage(Named):
    """One image; `width` asks for a smaller copy, `what` for its mask, `content` says that it may be kept."""

    name: str = Field(min_length=1, max_length=4096)
    width: int | None = Field(None, ge=WIDTHS[0], le=WIDTHS[1])
    what: Literal["image", "mask"] = "image"
    content: str = Field("", max_length=64)


@router.get("/image")
def show_image(asked: Annotated[OneImage, Query()], state: State) -> Response:
    """The bytes of an image, of its mask, or of a smaller copy. A mask with transparency is sent as what training uses of it."""
    path = readable(asked.path, state)
    index = index_of(path, state)
    with index.lock:
        # The first image of a folder is shown before anybody opens it.
        if not index.is_there and path.is_dir() and is_image(asked.name):
            row: dict[str, Any] = {
                "path": os.fsencode(inside(path, asked.name)),
                "span_file": None,
                "mask": None,
                "content": None,
            }
        else:
            refuse_unread(index)
            row = index.row(asked.name)
    span, roots = None, state.roots
    if asked.what == "mask":
        if row["mask"] is None:
            raise Refusal(404, Problem("mask_missing", f"{asked.name[:200]} has no mask.", "Draw one."))
        place = Path(os.fsdecode(row["mask"]))
    elif row["span_file"] is None:
        place = Path(os.fsdecode(row["path"]))
    else:
        place = Path(os.fsdecode(row["span_file"]))
        span = Span(place, row["span_offset"], row["span_size"])
        roots = (*roots, user_cache_folder())  # where the images of a Parquet file are unpacked
    try:
        real = allowed(place, roots)
        span = span and Span(real, span.offset, span.size)
        is_mask, width = asked.what == "mask", asked.width
        with contextlib.suppress(BrokenImageError):
            if width is None and is_mask and header_of(real).has_alpha:
                width = WIDTHS[
                    1
                ]  # a browser would show the transparency that is the mask; as large as the page draws on
        if width is None:
            return whole_image(real, span, state)
        content = None if is_mask else row["content"]
        if content is None or content != asked.content:
            content = content_of(real, span)
        answer = FileResponse(small_copy(real, span, content, width, state.own / "thumbnails", is_mask=is_mask))
    except OSError:
        raise Refusal(
            404, Problem("image_unreadable", f"{asked.name[:200]} cannot be read.", "Load the page again.")
        ) from None
    kept = f"private, max-age={A_YEAR}, immutable" if content == asked.content else "private, no-cache"
    answer.headers["cache-control"] = kept
    return answer


def whole_image(place: Path, span: Span | None, state: ServerState) -> Response:
    """An image as it is, where browsers show its kind; else a large copy. Raises OSError, and Refusal for no image."""
    with open_bytes(place, span) as file:
        kind = image_type_of(file.read(16))
        if kind is not None and span is not None and span.size <= MOST_WHOLE:
            file.seek(0)
            return Response(file.read(), media_type=kind, headers={"cache-control": "private, no-cache"})
    if kind is not None and span is None:
        return FileResponse(place, media_type=kind, headers={"cache-control": "private, no-cache"})
    return FileResponse(small_copy(place, span, content_of(place, span), WIDTHS[1], state.own / "thumbnails"))
