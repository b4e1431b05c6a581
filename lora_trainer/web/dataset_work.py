"""What changes datasets: captions, edits of many of them, undo; copies, checks and captions by a model as tasks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from lora_trainer.builtin import DATA_FOLDER
from lora_trainer.core.bounded import TextError, decode
from lora_trainer.core.errors import Problem
from lora_trainer.data.sources.beside import JSON_ENDING
from lora_trainer.data.sources.names import ending_of
from lora_trainer.data.sources.texts import tidy
from lora_trainer.web.caption_edits import TITLES, BulkEdit, edited, refuse_wrong_text
from lora_trainer.web.caption_journal import CaptionChange, bytes_of
from lora_trainer.web.dataset_index import BUILTIN, DatasetIndex, stamp_or_none
from lora_trainer.web.dataset_reader import MOST_SUM, number_of_name
from lora_trainer.web.datasets import (
    CAPTIONED,
    CHECKED,
    CLEANED,
    COPIED,
    WAITED_SECONDS,
    Filter,
    Named,
    SizesOf,
    editable,
    index_of,
    journal_state,
    new_place,
    readable,
    refuse_unread,
)
from lora_trainer.web.safety import JSON, Refusal, allowed
from lora_trainer.web.server_state import ServerState, State

MOST_CHANGES = 10_000  # captions that a request sends
MOST_EXAMPLES = 5
NAME = r"^[\w][\w .-]{0,79}$"

router = APIRouter(prefix="/api/datasets", default_response_class=JSON)
PathText = Annotated[str, Field(min_length=1, max_length=4096)]


class CaptionOf(BaseModel):
    """A caption, and what it was when it was read. Without a caption its file is removed."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=4096)
    caption: str | None
    before: str


class Captions(Named):
    """Captions of a dataset."""

    changes: list[CaptionOf] = Field(min_length=1, max_length=MOST_CHANGES)


class Edit(Filter):
    """An edit of the named images' captions, or of those of all that the filters leave; `dry_run` only counts."""

    edit: BulkEdit
    names: list[str] | None = Field(None, max_length=200_000)
    dry_run: bool = False


class NewCopy(Named):
    """A dataset, and the name of its copy among those that may be edited."""

    name: str = Field(pattern=NAME)


class Check(SizesOf):
    """A dataset, and what it is checked for."""


class AutoCaption(Named):
    """A dataset whose images without a caption get one by a model of this machine."""

    model: PathText
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.35


# Captions


@router.post("/captions")
def write_captions_of(sent: Captions, state: State) -> Response:
    """Write captions, all or none; refused (409) where one on the disk is not what it was when the page read it."""
    path, index = opened_index(sent.path, state)
    with index.lock:
        refuse_unread(index)
        shared, changes = SharedNames(index), list[CaptionChange]()
        twice = [name for name, count in Counter(each.name for each in sent.changes).items() if count > 1]
        if twice:
            raise Refusal(
                422, Problem("name_twice", f"{twice[0][:200]} is named twice.", "Send one caption for each image.")
            )
        for each in sent.changes:
            row = index.row(each.name)
            refuse_wrong_text(each.caption or "", each.name)
            place = caption_place(row, shared)
            data = bytes_of(place)
            now = row["caption"] if data is None else text_of(data)
            if row["origin"] == "text" and data is None:
                now = ""
            if tidy(each.before, keep_lines=True) != now:
                message = (
                    f"The caption of {each.name[:200]} was changed by somebody else meanwhile: {now[:500] or '(empty)'}"
                )
                raise Refusal(
                    409,
                    Problem("caption_changed_meanwhile", message, "Nothing was written. Look at it, and save again."),
                )
            changes.append(CaptionChange(each.name, place, data, data_of(each.caption)))
        changes = [each for each in changes if each.before != each.after]
        title = f"Caption of {changes[0].image}" if len(changes) == 1 else f"Captions of {len(changes)} images"
        if changes:
            state.indexes.journal(path).write(title, changes)
            take_changes(index, changes)
        return JSON(answer_of_edit(path, index, changes, state))


@router.post("/edit")
def edit_captions(sent: Edit, state: State) -> Response:
    """Change many captions at once. With `dry_run` how many it would change, and the first of them; nothing is written."""
    path = readable(sent.path, state) if sent.dry_run else editable(sent.path, state)
    family, index = sent.family_for(path), index_of(path, state)
    index.settle(WAITED_SECONDS)
    with index.lock:
        refuse_unread(index)
        fits = index.fits(index.framed(family, sent.resolution))
        shared, changes, examples, count = SharedNames(index), list[CaptionChange](), list[dict[str, str]](), 0
        for row in index.each(sent.wanted(sent.names), fits):
            after = edited(row["caption"], sent.edit)
            if after == row["caption"]:
                continue
            count += 1
            if len(examples) < MOST_EXAMPLES:
                examples.append({"name": row["name"], "before": row["caption"], "after": after})
            if sent.dry_run:
                continue
            place = caption_place(row, shared)
            data = bytes_of(place)
            if data is not None and (now := text_of(data)) != row["caption"]:
                after = edited(now, sent.edit)  # somebody else changed it: their text is what is edited
            refuse_wrong_text(after, row["name"])
            if data != data_of(after):
                changes.append(CaptionChange(row["name"], place, data, data_of(after)))
        if sent.dry_run:
            return JSON({"count": count, "examples": examples})
        if changes:
            state.indexes.journal(path).write(f"{TITLES[sent.edit.do]} ({len(changes)})", changes)
            take_changes(index, changes)
        return JSON({**answer_of_edit(path, index, changes, state), "examples": examples})


@router.post("/undo")
def undo(sent: Named, state: State) -> Response:
    """Take the newest change of captions back."""
    return go_in_journal(sent, state, back=True)


@router.post("/redo")
def redo(sent: Named, state: State) -> Response:
    """Make the change again that was taken back last."""
    return go_in_journal(sent, state, back=False)


def go_in_journal(sent: Named, state: ServerState, *, back: bool) -> Response:
    path, index = opened_index(sent.path, state)
    with index.lock:
        refuse_unread(index)
        step, changes = state.indexes.journal(path).go(back=back)
        take_changes(index, changes)
        return JSON({**answer_of_edit(path, index, changes, state), "title": step.title})


def opened_index(path: str, state: ServerState) -> tuple[Path, DatasetIndex]:
    """A dataset that may be edited, with its list. Raises Refusal."""
    real = editable(path, state)
    index = index_of(real, state)
    index.settle(WAITED_SECONDS)
    return real, index


class SharedNames:
    """What more than one image would use as its caption's file."""

    def __init__(self, index: DatasetIndex) -> None:
        self.files, self.stems = index.shared("caption_file"), index.shared("stem")


def caption_place(row: Mapping[str, Any], shared: SharedNames) -> Path:
    """The file of an image's caption: that which is read, else its name with .txt. Raises Refusal where there is none."""
    if row["span_file"] is not None:
        fix = "Make a copy of the dataset: it has plain files."
        raise Refusal(409, Problem("read_only_shard", f"{row['name']} lies in a shard, which is only read.", fix))
    image = Path(os.fsdecode(row["path"]))
    if row["caption_file"] is not None:
        place = Path(os.fsdecode(row["caption_file"]))
        if ending_of(place.name) == JSON_ENDING:
            fix = "Make a copy of the dataset: it has captions as text."
            raise Refusal(
                409,
                Problem(
                    "read_only_shard", f"The caption of {row['name']} is in {place.name}, which is only read.", fix
                ),
            )
        if row["caption_file"] in shared.files:
            message = f"{row['name']} and another image share the caption {place.name}."
            raise Refusal(409, Problem("caption_shared", message, "Rename one of them."))
    else:
        place = image.with_name(f"{image.name}.txt") if row["stem"] in shared.stems else image.with_suffix(".txt")
    if place.is_symlink():
        raise Refusal(409, Problem("path_is_link", f"{place.name} is a link.", "Replace it by a file."))
    return place


def text_of(data: bytes) -> str:
    """A caption's bytes as the list has them; nothing for what is no text."""
    try:
        return tidy(decode(data), keep_lines=True)
    except TextError:
        return ""


def data_of(caption: str | None) -> bytes | None:
    """What is written for a caption: a text that ends its line, an empty file for an empty one."""
    if caption is None:
        return None
    text = tidy(caption, keep_lines=True)
    return f"{text}\n".encode() if text else b""


def take_changes(index: DatasetIndex, changes: Iterable[CaptionChange]) -> None:
    """Put what was written into the list of images."""
    with index.file:
        for each in changes:
            try:
                row = index.row(each.image)
            except Refusal:  # an undo of an image that is gone
                continue
            if (each.before is None) != (each.after is None):  # its folder's names are known to be other ones
                number = number_of_name(each.file.name)
                values = (number if each.before is None else -number, MOST_SUM, os.fsencode(each.file.parent))
                index.file.execute("UPDATE stamps SET names = (names + ?) & ? WHERE path = ?", values)
            row["caption_file"] = os.fsencode(each.file)
            index.set_caption(
                row, None if each.after is None else text_of(each.after), stamp_or_none(row["caption_file"]) or ""
            )
    index.changed(here=True)


def answer_of_edit(
    path: Path, index: DatasetIndex, changes: Sequence[CaptionChange], state: ServerState
) -> dict[str, Any]:
    return {"changed": len(changes), "version": index.version, **journal_state(path, state)}


# Tasks


def refuse_links(path: Path, state: ServerState) -> None:
    """Raise Refusal for a dataset that leads out of what this server may read: commands follow every link."""
    index = index_of(path, state)
    index.settle(WAITED_SECONDS)
    with index.lock:
        refuse_unread(index)
        if left_out := int(index.fact("left_out") or 0):
            message = f"{left_out} files of the dataset lead out of the folders that this server may read."
            raise Refusal(
                409, Problem("outside_folders", message, "Make a copy, which leaves them out; or use a terminal.")
            )


@router.post("/read", status_code=202)
def read_again(sent: Named, state: State) -> Response:
    """Read the dataset again, whatever its folders say."""
    index_of(readable(sent.path, state), state).read_again()
    return JSON({}, 202)


@router.post("/copy", status_code=202)
def copy_dataset(sent: NewCopy, state: State) -> Response:
    """Copy a dataset as plain files that may be edited, images in shards too; a task."""
    path, module = readable(sent.path, state), "lora_trainer.web.dataset_copy"
    with state.changing:
        target = new_place(sent.name, state)
        arguments = [str(path), str(target), *map(str, state.roots)]
        about = {"dataset": str(path), "target": str(target), "name": target.name}
        return JSON(state.tasks.start(COPIED, f"Copy of {path.name}", arguments, about, module=module), 202)


@router.post("/check", status_code=202)
def check_dataset_of(sent: Check, state: State) -> Response:
    """`check` as a task. Its findings are shown at the images once it has ended."""
    path = readable(sent.path, state)
    refuse_links(path, state)
    family, index = sent.family_for(path), index_of(path, state)
    with index.lock:
        resolution = index.framed(family, sent.resolution).resolution
    arguments, asked = ["check", str(path), "--json", "--offline"], sent.resolution
    if family != BUILTIN:
        arguments += ["--set", f"model.family={family}"]
    else:  # small enough to compare captions with images on any computer
        arguments += ["--model", BUILTIN]
    if (
        family == BUILTIN and path != DATA_FOLDER
    ):  # `check` knows the built-in model's own resolution only with the built-in images
        asked = resolution
    if asked is not None:
        arguments += ["--set", f"data.resolution={asked}"]
    about = {"dataset": str(path), "family": family, "resolution": resolution}
    return JSON(state.tasks.start(CHECKED, f"Check of {path.name}", arguments, about), 202)


@router.post("/clean", status_code=202)
def clean_dataset(sent: NewCopy, state: State) -> Response:
    """`check --clean-copy` as a task: what can be fixed is fixed in a copy that may be edited."""
    path = readable(sent.path, state)
    new_place(sent.name, state)
    refuse_links(path, state)
    with state.changing:
        target = new_place(sent.name, state)
        arguments = ["check", str(path), "--json", "--offline", "--clean-copy", str(target)]
        about = {"dataset": str(path), "target": str(target), "name": target.name}
        return JSON(state.tasks.start(CLEANED, f"Cleaned copy of {path.name}", arguments, about), 202)


@router.post("/caption", status_code=202)
def caption_dataset(sent: AutoCaption, state: State) -> Response:
    """`caption --in-place` as a task: images without a caption get one. No caption is overwritten."""
    path, model = editable(sent.path, state), allowed(sent.model, state.roots)
    if not model.is_dir():
        raise Refusal(
            422, Problem("model_missing", f"{sent.model[:300]} is no folder of a model.", "Name a local folder.")
        )
    refuse_links(path, state)
    index = index_of(path, state)
    with index.lock:
        folders = index.file.execute("SELECT path FROM stamps WHERE names IS NOT NULL").fetchall()
    for folder in (os.fsdecode(each) for (each,) in folders):
        if not Path(os.path.realpath(folder)).is_relative_to(path):
            raise Refusal(
                409,
                Problem(
                    "path_is_link", f"{folder} is a link: its captions would be written elsewhere.", "Make a copy."
                ),
            )
    arguments = ["caption", str(path), "--model", str(model), "--in-place", "--offline"]
    arguments += ["--threshold", f"{sent.threshold:g}"]
    about = {"dataset": str(path), "model": str(model)}
    return JSON(state.tasks.start(CAPTIONED, f"Captions for {path.name}", arguments, about), 202)
