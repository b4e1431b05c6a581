"""Sheets of images that the page generates with a LoRA: prompts by strengths, in folders of the server, of which the newest stay."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.core.errors import Problem
from lora_trainer.core.grid import image_name
from lora_trainer.core.io import read_json, write_json
from lora_trainer.report.read import mapping, sequence
from lora_trainer.run_folder.record import Record
from lora_trainer.web.asked_settings import Text, refuse_outside
from lora_trainer.web.lora_tools import name_of_model, named_model
from lora_trainer.web.run_list import folder_of
from lora_trainer.web.safety import Refusal
from lora_trainer.web.server_state import ServerState
from lora_trainer.web.tasks import numbered_folders

KIND = "sample"  # of the tasks
SHEET, SHEETS = "sheet.json", "sheets"
MOST_SHEETS, MOST_IMAGES = 40, 256
LARGEST_SIDE = 4096
Prompt = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=4000)]


class AskedSheet(BaseModel):
    """Images of each prompt with each seed, without the LoRA and with it at each strength. Without `model` the base model is
    that of the LoRA's run, else the built-in one; a model of a hub must be downloaded already."""

    model_config = ConfigDict(extra="forbid")
    lora: Annotated[str, Field(max_length=100)]
    prompts: list[Prompt] = Field(min_length=1, max_length=32)
    strengths: list[Annotated[float, Field(ge=-10.0, le=10.0)]] = Field([1.0], min_length=1, max_length=16)
    seeds: list[Annotated[int, Field(ge=0, lt=2**62)]] = Field([0], min_length=1, max_length=16)
    negative_prompt: Annotated[str, StringConstraints(strip_whitespace=True, max_length=4000)] = ""
    num_inference_steps: Annotated[int, Field(ge=1, le=500)] | None = None
    guidance_scale: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    width: Annotated[int, Field(ge=1, le=LARGEST_SIDE)] | None = None
    height: Annotated[int, Field(ge=1, le=LARGEST_SIDE)] | None = None
    model: Text | None = None


def start_sheet(asked: AskedSheet, state: ServerState) -> dict[str, Any]:
    """Start to generate a sheet; its document. Raises Refusal with all problems."""
    row = state.loras.row(asked.lora)
    problems = list[Problem]()
    prompts, strengths = list(dict.fromkeys(asked.prompts)), list(dict.fromkeys(asked.strengths))
    seeds = list(dict.fromkeys(asked.seeds))
    count = len(prompts) * len(seeds) * (1 + len(strengths))
    if count > MOST_IMAGES:
        problems.append(
            Problem("too_many_images", f"These are {count} images.", f"At most {MOST_IMAGES} are generated at once.")
        )
    if row["is_damaged"]:
        problems.append(Problem("lora_unusable", f"{row['name']}: {row['problem']}", "Choose another LoRA."))
    try:
        is_text = "\0" not in "".join((*prompts, asked.negative_prompt)).encode("utf-8").decode("utf-8")
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        problems.append(Problem("prompt_invalid", "A prompt holds what is no text.", "Type it again."))
    if (asked.width is None) != (asked.height is None):
        problems.append(Problem("size_invalid", "Width and height belong together.", "Give both, or neither."))
    model: str | None = None
    try:
        model = named_model(asked.model, state) if asked.model is not None else own_model(row, state)
    except Refusal as error:
        problems += error.problems
    if problems:
        raise Refusal(422, problems)
    arguments = ["sample", row["path"], "--offline"]
    arguments += [f"--model={model}"] if model is not None else []
    arguments += [f"--prompt={prompt}" for prompt in prompts]
    arguments += [f"--strength={strength}" for strength in strengths]
    arguments += [f"--seed={seed}" for seed in seeds]
    for flag in ("num_inference_steps", "guidance_scale"):
        if (value := getattr(asked, flag)) is not None:
            arguments.append(f"--{flag.replace('_', '-')}={value}")
    arguments += [f"--negative-prompt={asked.negative_prompt}"] if asked.negative_prompt else []
    arguments += [f"--size={asked.width}x{asked.height}"] if asked.width is not None else []
    with state.changing:
        folder = new_folder(state)
        about = {"lora": row["id"], "name": row["name"], "sheet": folder.name}
        try:
            task = state.tasks.start(KIND, f"sample {row['name']}", [*arguments, f"--output={folder}"], about)
        except BaseException:  # too many tasks run, or the disk is full
            folder.rmdir()
            raise
        kept = asked.model_dump() | {"prompts": prompts, "strengths": strengths, "seeds": seeds, "model": model}
        stem = Path(row["path"]).stem
        kept |= {"name": row["name"], "grid": f"{stem}_before_after", "created": time.time(), "task": task["id"]}
        write_json(folder / SHEET, kept)
    return sheet_document(folder, state)


def own_model(row: Mapping[str, Any], state: ServerState) -> str | None:
    """The base model where none is named: the built-in one; None for that of the run beside the file, with its other parts.

    Raises Refusal where that may not be read."""
    model: Mapping[str, Any] = {}
    if row["run"] is not None:
        record = Record.read(folder_of(row["run"], state.output))
        model = {} if record is None else record.section("model")
        problems = list[Problem]()
        refuse_outside(
            [{"model": {key: value for key, value in model.items() if value is not None}}], state.roots, problems
        )
        if problems:
            raise Refusal(403, problems)
    if not model.get("path"):
        return str(BASE_FOLDER)
    return None if row["step"] is None else str(model["path"])  # the record is not beside the files of steps


def new_folder(state: ServerState) -> Path:
    """The folder of a new sheet. The oldest ones are deleted, unless they are being generated."""
    known = numbered_folders(state.own / SHEETS)
    for folder in known[MOST_SHEETS - 1 :]:
        if sheet_document(folder, state)["status"] != "running":
            shutil.rmtree(folder, ignore_errors=True)
    folder = state.own / SHEETS / str(1 + max((int(each.name) for each in known), default=0))
    folder.mkdir(parents=True)
    return folder


def folder_of_sheet(sheet: str, state: ServerState) -> Path:
    """The folder of a sheet. Raises Refusal where there is none."""
    found = next((each for each in numbered_folders(state.own / SHEETS) if each.name == sheet), None)
    if found is None or not (found / SHEET).is_file():
        raise Refusal(
            404, Problem("sheet_missing", f"There is no sheet {sheet[:100]}.", "GET /api/loras/sheets lists them.")
        )
    return found


def sheet_document(folder: Path, state: ServerState) -> dict[str, Any]:
    """A sheet as far as it is generated: columns without the LoRA and at each strength, rows of prompts and seeds."""
    try:
        kept = read_json(folder / SHEET)
        columns = [None, *kept["strengths"]]
        # As they were asked; the recipe has the trigger word in its place.
        asked = [{"prompt": prompt, "seed": seed} for prompt in kept["prompts"] for seed in kept["seeds"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {"id": folder.name, "lora": None, "status": "damaged", "columns": [], "rows": [], "created": 0.0}
    recipe: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        recipe = mapping(read_json(folder / f"{kept['grid']}.json"))
    rows = [mapping(each) for each in sequence(recipe.get("images"))] or asked
    try:
        task = state.tasks.row(kept["task"])
    except Refusal:  # it was forgotten
        task = None
    status = task["status"] if task is not None else "done" if recipe else "failed"
    return {
        "id": folder.name,
        "task": task,
        "status": status,
        **{key: kept[key] for key in ("lora", "name", "model", "created", "negative_prompt")},
        "base": name_of_model(kept["model"]) if kept["model"] else "that of its run",
        **{key: recipe.get(key) for key in ("family", "steps", "guidance", "size", "scheduler")},
        "columns": columns,
        "rows": [
            {
                "prompt": each.get("prompt"),
                "seed": each.get("seed"),
                "urls": [
                    f"/api/loras/sheets/{folder.name}/images/{at}/{column}"
                    if (folder / image_name(kept["grid"], at, strength)).is_file()
                    else None
                    for column, strength in enumerate(columns)
                ],
            }
            for at, each in enumerate(rows)
        ],
    }


def image_of(sheet: str, row: int, column: int, state: ServerState) -> Path:
    """One image of a sheet. Raises Refusal where there is none."""
    folder = folder_of_sheet(sheet, state)
    found = sheet_document(folder, state)
    kept = read_json(folder / SHEET)
    if row < len(found["rows"]) and column < len(found["columns"]) and found["rows"][row]["urls"][column]:
        path: Path = folder / image_name(kept["grid"], row, found["columns"][column])
        return path
    raise Refusal(404, Problem("image_missing", "This image is not there.", "It may be generated later."))


def sheet_previews(state: ServerState) -> dict[str, str]:
    """For each LoRA with a sheet the address of an image with it: of the newest sheet, at the strength next to 1."""
    found: dict[str, str] = {}
    for folder in numbered_folders(state.own / SHEETS):
        document = sheet_document(folder, state)
        order = sorted(range(1, len(document["columns"])), key=lambda at: abs(document["columns"][at] - 1.0))
        urls = [row["urls"][at] for row in document["rows"][:1] for at in order[:1]]
        if document["lora"] is not None and urls and urls[0]:
            found.setdefault(document["lora"], urls[0])
    return found
