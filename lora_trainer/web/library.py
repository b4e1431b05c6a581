"""`/api/loras`: the LoRA files that are here, what is in them, the tools that make others of them, and images with them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi import Path as PathPart
from pydantic import BaseModel, ConfigDict

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.detection import detect_family
from lora_trainer.models.lora_facts import read_lora_facts
from lora_trainer.web.asked_settings import Text
from lora_trainer.web.lora_list import ENDING, LIBRARY, TOKENS, preview_beside
from lora_trainer.web.lora_tools import KIND as TOOL
from lora_trainer.web.lora_tools import AskedTool, name_of_model, named_model, start_tool
from lora_trainer.web.safety import JSON, Refusal, allowed
from lora_trainer.web.sample_sheets import (
    SHEETS,
    AskedSheet,
    folder_of_sheet,
    image_of,
    sheet_document,
    sheet_previews,
    start_sheet,
)
from lora_trainer.web.served_files import WIDTHS, answer_with, thumbnail
from lora_trainer.web.server_state import ServerState, State
from lora_trainer.web.tasks import numbered_folders

INSPECTION = "lora-inspect"  # the kind of the tasks
Width = Annotated[int | None, Query(ge=WIDTHS[0], le=WIDTHS[1])]

router = APIRouter(prefix="/api/loras", default_response_class=JSON)


class NamedFolder(BaseModel):
    """A folder of LoRA files to list."""

    model_config = ConfigDict(extra="forbid")
    path: Text


@router.get("")
def list_loras(state: State) -> Response:
    """All LoRA files, newest first, by their headers; `pending` of them were not read yet: ask again."""
    rows, pending = state.loras.rows()
    previews = sheet_previews(state)
    rows = [{**row, "preview": preview_of(row, previews)} for row in rows]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["folder"]] = counts.get(row["folder"], 0) + 1
    folders = [
        {"path": each, "count": counts.get(each, 0), "is_there": os.path.isdir(each)} for each in state.loras.folders()
    ]
    return JSON(
        {"loras": rows, "count": len(rows), "pending": pending, "folders": folders, "library": str(state.loras.library)}
    )


def preview_of(row: Mapping[str, Any], previews: Mapping[str, str]) -> str | None:
    """An image for a file: the one beside it, the newest that was generated with it, else the newest of its run."""
    beside: str | None = row["preview"] if row["from"] != "run" else None
    return beside or previews.get(row["id"]) or row["preview"]


@router.post("/folders", status_code=201)
def add_folder(asked: NamedFolder, state: State) -> Response:
    """List the LoRA files in a folder too, and below it."""
    return JSON({"path": str(state.loras.add_folder(asked.path))}, 201)


@router.delete("/folders")
def remove_folder(path: Annotated[str, Query(max_length=4096)], state: State) -> Response:
    """List a folder no more; its files stay."""
    state.loras.remove_folder(path)
    return JSON({})


@router.post("/tools", status_code=201)
def run_tool(asked: AskedTool, state: State) -> Response:
    """Start `convert`, `merge`, `resize`, `average` or `extract` as a task, which writes into the library."""
    with state.changing:
        return JSON(start_tool(asked, state), 201)


@router.get("/sheets")
def list_sheets(state: State, lora: str | None = None) -> Response:
    """Sheets of images, newest first, as far as they are generated."""
    found = [sheet_document(folder, state) for folder in numbered_folders(state.own / SHEETS)]
    return JSON({"sheets": [each for each in found if lora in (None, each["lora"])]})


@router.post("/sheets", status_code=201)
def make_sheet(asked: AskedSheet, state: State) -> Response:
    """Start `sample` as a task: images of prompts by strengths."""
    return JSON(start_sheet(asked, state), 201)


@router.get("/sheets/{sheet}")
def show_sheet(sheet: str, state: State) -> Response:
    """One sheet, as far as it is generated."""
    return JSON(sheet_document(folder_of_sheet(sheet, state), state))


@router.get("/sheets/{sheet}/images/{row}/{column}")
def show_image(
    sheet: str,
    row: Annotated[int, PathPart(ge=0)],
    column: Annotated[int, PathPart(ge=0)],
    state: State,
    width: Width = None,
) -> Response:
    """An image of a sheet, by row and column."""
    path = image_of(sheet, row, column, state)
    return answer_with(path if width is None else thumbnail(path, width, state.own / "thumbnails"), "image")


@router.delete("/sheets/{sheet}")
def delete_sheet(sheet: str, state: State) -> Response:
    """Delete the images of a sheet."""
    folder = folder_of_sheet(sheet, state)
    if sheet_document(folder, state)["status"] == "running":
        raise Refusal(409, Problem("still_generating", "Its images are being generated.", "Stop that first."))
    shutil.rmtree(folder)
    return JSON({})


@router.get("/{lora}")
def show_lora(lora: str, state: State) -> Response:
    """The row of a file, all of its header, and the document of `inspect --json` where it was inspected."""
    row = state.loras.row(lora)
    try:
        header = read_lora_facts(Path(row["path"]))[1]
    except UsageError:
        header = {}
    task = inspection_of(row, state)
    found = None if task is None or task["status"] == "running" else state.tasks.document(task["id"])
    return JSON({**row, "preview": preview_of(row, sheet_previews(state)), "header": header, "inspection": found})


def inspection_of(row: dict[str, Any], state: ServerState) -> dict[str, Any] | None:
    """The newest task that inspects or has inspected a file as it is now. A damaged one ends with an error and a document."""
    wanted = {"lora": row["id"], "stamp": row["stamp"]}.items()
    of_it = (each for each in state.tasks.rows() if each["kind"] == INSPECTION and wanted <= each["about"].items())
    return next(
        (each for each in of_it if each["status"] == "running" or state.tasks.document(each["id"]) is not None), None
    )


@router.post("/{lora}/inspect", status_code=201)
def inspect_lora(lora: str, state: State) -> Response:
    """The task that inspects a file; it is started where it was not inspected as it is now."""
    with state.changing:
        row = state.loras.row(lora)
        about = {"lora": row["id"], "stamp": row["stamp"]}
        found = inspection_of(row, state)
        return JSON(
            found or state.tasks.start(INSPECTION, f"inspect {row['name']}", ["inspect", row["path"], "--json"], about),
            201,
        )


@router.get("/{lora}/bases")
def list_bases(lora: str, state: State) -> Response:
    """Base models that runs were trained on and that are here, and the built-in one; whether their family is the LoRA's. The
    `default` is that of the LoRA's run."""
    row, builtin = state.loras.row(lora), str(BASE_FOLDER)
    runs = state.runs.rows()
    own = next((run["base"] or builtin for run in runs if run["id"] == row["run"]), None)
    families = {builtin: detect_family(BASE_FOLDER)}
    for run in runs:
        if run["base"] is not None:
            families[run["base"]] = families.get(run["base"]) or run["family"]
    found, needed = [], row["family"]
    for named, known in families.items():
        with contextlib.suppress(Refusal):
            fits = None if None in (known, needed) else known == needed
            about = {"model": named_model(named, state), "name": name_of_model(named), "family": known, "fits": fits}
            found.append({**about, "is_builtin": named == builtin, "is_default": named == own})
    found.sort(key=lambda each: (not each["is_default"], each["fits"] is False, each["is_builtin"]))
    return JSON({"bases": found})


@router.get("/{lora}/file")
def download(lora: str, state: State) -> Response:
    """The file itself, to be saved."""
    path = allowed(state.loras.row(lora)["path"], state.roots)
    return answer_with(path, "lora")


@router.get("/{lora}/preview")
def show_preview(lora: str, state: State, width: Width = None) -> Response:
    """The image beside a file, as other programs put it there."""
    path = preview_beside(Path(state.loras.row(lora)["path"]), state.roots)
    if path is None:
        raise Refusal(404, Problem("image_missing", "There is no image beside this file.", "Generate some with it."))
    return answer_with(path if width is None else thumbnail(path, width, state.own / "thumbnails"), "image")


@router.delete("/{lora}")
def delete_lora(lora: str, state: State) -> Response:
    """Move a file of the library, with its learned tokens, to the trash, which is a folder too."""
    row = state.loras.row(lora)
    if not row["can_delete"]:
        raise Refusal(
            409,
            Problem(
                "lora_missing", f"{row['name']} is not in the library.", "Delete its run, or the file where it is."
            ),
        )
    path = Path(row["path"])
    trash = state.own / "trash" / f"{LIBRARY}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    trash.mkdir(parents=True)
    stem = path.name.removesuffix(ENDING)
    own = [each for each in path.parent.iterdir() if each.name.startswith(f"{stem}{TOKENS}")]
    for each in (path, *own):
        os.rename(each, trash / each.name)
    for task in state.tasks.rows():
        if task["about"].get("lora") == lora and task["kind"] == TOOL and task["status"] != "running":
            state.tasks.forget(task["id"])  # its result is no more
    return JSON({"moved_to": str(trash)})
