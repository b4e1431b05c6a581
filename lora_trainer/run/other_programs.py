"""The finished LoRA in the programs that draw with it: a copy in their folder, a ComfyUI workflow, the text for A1111 and Forge."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from lora_trainer.core.digests import remembered_sha256
from lora_trainer.core.errors import Problem, UsageError, first_line
from lora_trainer.core.io import atomic_path, read_json, write_json, write_text
from lora_trainer.run.bases.catalog import catalog
from lora_trainer.run.bases.programs import COMFYUI, FORGE, TITLES, VARIABLES, Program, find_programs, is_program
from lora_trainer.run_folder.record import BEFORE_AFTER

if TYPE_CHECKING:
    from lora_trainer.run.order import Order
    from lora_trainer.run_folder.record import Record

WORKFLOW, PROMPT = "comfyui", "a1111"  # keys of the record's files
MOST_COPIES = 10_000  # of one name


def wrong_copy_to(target: str | None) -> list[Problem]:
    """Why the LoRA cannot be copied there."""
    if target is None:
        return []
    try:
        folder = loras_folder(target)
    except UsageError as error:
        return list(error.problems)
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if os.access(there, os.W_OK):
        return []
    message = f"run.copy_to is {target}, and {there} cannot be written to."
    return [Problem("folder_not_writable", message, "Name a folder that can be written to, or copy the LoRA yourself.")]


def loras_folder(target: str) -> Path:
    """The folder for LoRA files that `run.copy_to` names: of a program by name, of a program's folder, or any folder.

    Raises UsageError where it is not found.
    """
    if target in (COMFYUI, FORGE):
        found = next((program for program in find_programs() if program.kind == target), None)
        if found is None:
            message = f"run.copy_to is {target}, and no {TITLES[target]} was found here."
            fix = f"Name its folder, --copy-to DIR, or set the variable {VARIABLES[target]} to it."
            raise UsageError(Problem("program_not_found", message, fix))
        return found.loras
    folder = Path(target).expanduser()
    if not folder.is_dir():
        message = f"run.copy_to is {target}, which is no folder."
        near = get_close_matches(target.lower(), (COMFYUI, FORGE), n=1)
        fix = f"Name {COMFYUI}, {FORGE}, the folder of one of them, or a folder for LoRA files."
        if near:
            fix = f"Did you mean {near[0]}? Else name a folder for LoRA files."
        raise UsageError(Problem("folder_missing", message, fix))
    kind = next((kind for kind in TITLES if is_program(kind, folder)), None)
    return folder if kind is None else Program(kind, folder).loras


def with_copy(order: Order, record: Record) -> Record:
    """The record with where the LoRA was copied to, where that is set. A copy that fails is printed and changes nothing else."""
    target, name = order.config.run.copy_to, record.files.get("kohya")
    if target is None or name is None:
        return record
    try:
        copy = copy_beside(order.folder / name, loras_folder(target))
    except (OSError, UsageError) as error:
        order.console.print(f"warning: the LoRA was not copied: {first_line(error)}", markup=False)
        return record
    return replace(record, copied_to=str(copy))


def copy_beside(lora: Path, folder: Path) -> Path:
    """Copy a file into a folder, never over another one: `cat.safetensors`, else `cat-2.safetensors`, …

    A file with the same bytes counts as the copy. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, MOST_COPIES):
        copy = folder / (lora.name if number == 1 else f"{lora.stem}-{number}{lora.suffix}")
        if copy.exists() or copy.is_symlink():
            if copy.is_file() and remembered_sha256(copy) == remembered_sha256(lora):
                return copy
            continue
        with atomic_path(copy) as temporary:
            shutil.copyfile(lora, temporary)
        return copy
    raise OSError(f"{folder} holds {MOST_COPIES - 1} files of that name")


def with_files_for_programs(order: Order, record: Record) -> Record:
    """The record with a ComfyUI workflow and a text for A1111 that draw the first sample; without samples as it was.

    Nothing reads the built-in miniature, so its LoRA has none; nor has one of an edit model, whose control images both lack.
    What cannot be written is left out.
    """
    name, drawn = record.files.get("kohya"), order.folder / "samples" / f"{BEFORE_AFTER}.json"
    if name is None or not record.files.get(BEFORE_AFTER) or order.config.model.path is None:
        return record
    from lora_trainer.evaluation.recipe import CONTROLS, parameters, rows_of
    from lora_trainer.report.comfyui import workflow_of

    files = dict(record.files)
    with suppress(OSError, ValueError, KeyError, TypeError, UsageError):
        recipe = read_json(drawn)
        if CONTROLS in recipe:
            return record
        lora = PurePath(record.copied_to or name).name
        strength = next((each for each in recipe["strengths"] if each), 1.0)
        model = file_of_model(order.config.model.path)
        text = parameters({**recipe, "lora": lora, "model": PurePath(model).stem}, rows_of(recipe)[0], strength)
        write_text(order.folder / f"{record.name}.a1111.txt", text + "\n")
        files[PROMPT] = f"{record.name}.a1111.txt"
        workflow = workflow_of(recipe, lora, model)
        if workflow is not None:
            write_json(order.folder / f"{record.name}.comfyui.json", workflow)
            files[WORKFLOW] = f"{record.name}.comfyui.json"
    return replace(record, files=files)


def file_of_model(path: str) -> str:
    """The file that other programs would load: the checkpoint itself, or the published one of a hub's model."""
    known = next((model for model in catalog().values() if model.hub_id == path), None)
    if known is not None and known.checkpoints:
        return f"{known.checkpoints[0]}.safetensors"
    name = PurePath(path.replace("\\", "/").rstrip("/")).name
    return name if name.endswith((".safetensors", ".gguf")) else f"{name}.safetensors"
