"""`/api/runs`: what runs did and do, from their folders; stop them, ask them for something, delete them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from lora_trainer.config.toml import section_types
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import printable_lines
from lora_trainer.core.io import read_json
from lora_trainer.jobs.job_store import JobStore, holds_batch
from lora_trainer.monitor.trackers import EVENTS, METRICS, read_lines
from lora_trainer.report.prometheus import newest_row
from lora_trainer.report.read import images_in, number, read_run, settings_of
from lora_trainer.run_folder.alive import is_alive, live_progress
from lora_trainer.run_folder.lock import take_free_lock
from lora_trainer.run_folder.record import BEFORE_AFTER, Record
from lora_trainer.training.requests import FOLDER as REQUESTS
from lora_trainer.training.requests import KINDS, write_request
from lora_trainer.web.children import read_end, stop_process
from lora_trainer.web.run_list import file_url, folder_of, path_of
from lora_trainer.web.safety import JSON, Refusal
from lora_trainer.web.served_files import WIDTHS, answer_with, inside, thumbnail
from lora_trainer.web.server_state import ServerState, State
from lora_trainer.web.verdict_page import verdict_document

MOST_ROWS, MOST_COMPARED, MOST_POINTS = 1000, 12, 20_000
MOST_LOG = 1_000_000  # bytes
MOST_REQUESTS = 100  # of a run that wait
CONSOLE = Path("logs") / "console.txt"  # of a run of a batch

router = APIRouter(prefix="/api", default_response_class=JSON)


class SentRequest(BaseModel):
    """What a run is to do between two steps."""

    model_config = ConfigDict(extra="forbid")
    do: str = Field(max_length=100)
    prompts: list[str] = Field([], max_length=1000)


@router.get("/runs")
def list_runs(
    state: State,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = MOST_ROWS,
    offset: Annotated[int, Query(ge=0)] = 0,
    status: str | None = None,
    is_live: bool | None = None,
) -> Response:
    """All runs, newest first; those that were started here and have not begun to write are `starting`."""
    rows = [
        row for row in state.run_rows.rows() if status in (None, row["status"]) and is_live in (None, row["is_live"])
    ]
    return JSON({"runs": rows[offset : offset + limit], "count": len(rows)})


@router.get("/runs/{run}")
def show_run(run: str, state: State) -> Response:
    """The document of `run.json`, how far the run is, and what it may be asked for."""
    starting = [row for row in state.run_rows.starting() if row["id"] == run]
    folder = state.output if starting else folder_of(run, state.output)
    asked = {"has_request": state.request_file(run).is_file()}
    if starting:
        may = ["stop"] if starting[0]["is_live"] else ["delete"]
        return JSON({**starting[0], **asked, "progress": None, "may": may})
    record, row = Record.read(folder) or Record(folder.name, status="failed"), state.runs.row(folder)
    resumes = record.keeps_state and (folder / "config.toml").is_file()
    # After its last step its LoRA is exported and scored: nothing reads requests.
    is_trained = bool(record.training) or (row["total"] is not None and row["step"] >= row["total"])
    trains = [] if is_trained else KINDS
    may = ["stop", *trains] if row["is_live"] else [*(["resume"] if resumes else []), "delete"]
    own = {"id": run, "folder": str(folder), "is_live": row["is_live"], "may": may, "preview": row["preview"]}
    lora = record.files["kohya"]
    own["lora_url"] = file_url(run, lora) if lora and (folder / lora).is_file() else None
    if state.run_rows.is_starting_again(row):
        own |= {"status": "starting", "is_live": True, "may": ["stop"]}
    own["start_error"] = None if row["is_live"] else failed_start(state, run, row["ended"] or 0.0)
    return JSON({**asdict(record), "name": row["name"], **own, **asked, "progress": progress_of(folder, row)})


@router.get("/runs/{run}/request")
def show_request(run: str, state: State) -> Response:
    """What a run that was started here was asked to be, as `POST /api/runs` takes it, to be asked for again."""
    try:
        found = read_json(state.request_file(run)) if path_of(run, state.output) is not None else None
    except (OSError, ValueError):
        found = None
    if found is None:
        raise Refusal(
            404,
            Problem(
                "request_unknown",
                f"What {run[:100]} was asked to be is not known.",
                "See its settings; it was not started here.",
            ),
        )
    return JSON(found)


def failed_start(state: ServerState, run: str, written: float) -> str | None:
    """What the last start here of a run said, where it ended before it wrote anything, such as a refused `--resume`."""
    child = state.children.of(run)
    is_over = child is not None and child.started > written and not child.is_alive
    return state.children.last_words(run) if is_over else None


def progress_of(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Step, losses, seconds of a step and until the training ends, by the newest rows."""
    newest = newest_row(folder / METRICS)[0]
    seconds = number(newest.get("seconds"))
    left = None if row["total"] is None or seconds is None else max(0, row["total"] - row["step"]) * seconds
    found = {key: row[key] for key in ("phase", "step", "total", "loss", "val_loss")}
    return {**found, "lr": number(newest.get("lr")), "seconds_per_step": seconds, "seconds_left": left}


@router.get("/runs/{run}/metrics")
def show_metrics(
    run: str,
    state: State,
    after: int = -1,
    points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = 2000,
) -> Response:
    """Columns of the steps after `after`; of more steps than `points` the lowest and highest losses are kept."""
    return JSON(state.metrics.document(folder_of(run, state.output), after, points))


@router.get("/compare")
def compare_runs(runs: str, state: State, points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = 1000) -> Response:
    """The metrics of several runs, named with commas. Those that ended before they wrote anything are left out."""
    names = list(dict.fromkeys(name for name in runs.split(",") if name))
    if not 1 <= len(names) <= MOST_COMPARED:
        raise Refusal(
            422,
            Problem("count_out_of_range", f"{len(names)} runs are named.", f"Name 1 to {MOST_COMPARED}, with commas."),
        )
    unwritten = {row["id"] for row in state.run_rows.starting()}
    folders = {name: folder_of(name, state.output) for name in names if name not in unwritten}
    rows = [
        {"id": name, "name": folder.name, "metrics": state.metrics.document(folder, points=points)}
        for name, folder in folders.items()
    ]
    return JSON({"runs": rows})


@router.get("/runs/{run}/events")
def show_events(run: str, state: State) -> Response:
    """What happened beside the steps."""
    return JSON({"events": read_lines(folder_of(run, state.output) / EVENTS)})


@router.get("/runs/{run}/log")
def show_log(run: str, state: State, tail: Annotated[int, Query(ge=1, le=MOST_LOG)] = 20_000) -> Response:
    """The end of what the run printed. A run that was started in a terminal printed it there."""
    starting = {row["id"] for row in state.run_rows.starting()}
    folder = state.output if run in starting else folder_of(run, state.output)
    for path in (folder / CONSOLE, state.children.log(run)):
        try:
            text, size = read_end(path, tail)
        except OSError:
            continue
        return JSON({"text": printable_lines(text.replace("\r\n", "\n")), "size": size, "file": str(path)})
    return JSON({"text": "", "size": 0, "file": None})


@router.get("/runs/{run}/samples")
def show_samples(run: str, state: State) -> Response:
    """Every image that was generated, by step; those without a step are of the end."""
    folder = folder_of(run, state.output)
    record = Record.read(folder)
    ended = record is not None and bool(record.files.get(BEFORE_AFTER))
    rows = [
        {
            "step": image.step,
            "prompt": image.prompt,
            "seed": image.seed,
            "strength": image.strength,
            "is_base": image.strength is None,
            "url": file_url(run, f"samples/{image.path.name}"),
        }
        for image in images_in(folder / "samples", ended=ended)
    ]
    return JSON({"samples": rows})


@router.get("/runs/{run}/verdict")
def show_verdict(run: str, state: State) -> Response:
    """The scores with their parts, what shows them, and what to do."""
    return JSON(verdict_document(read_run(folder_of(run, state.output)), run))


@router.get("/runs/{run}/settings")
def show_settings(run: str, state: State) -> Response:
    """Every setting with its value, where that came from, and whether it may change when the run is resumed."""
    folder = folder_of(run, state.output)
    record, types, rows = Record.read(folder) or Record(folder.name), section_types(), []
    for row in settings_of(record):
        section, _, key = row.name.partition(".")
        field = types[section].model_fields.get(key) if section in types else None
        extra = field.json_schema_extra if field is not None else None
        rows.append(
            {
                "name": row.name,
                "value": record.setting(row.name),
                "shown": row.value,
                "origin": row.origin,
                "is_chosen": row.chosen,
                "default": None if field is None else field.get_default(call_default_factory=True),
                "description": row.about,
                "on_resume": extra.get("on_resume") if isinstance(extra, dict) else None,
            }
        )
    return JSON({"settings": json.loads(json.dumps(rows, default=_plain))})


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


@router.get("/runs/{run}/files/{name:path}")
def show_file(
    run: str, name: str, state: State, width: Annotated[int | None, Query(ge=WIDTHS[0], le=WIDTHS[1])] = None
) -> Response:
    """A file of the run; `width` asks for a smaller copy of an image."""
    path = inside(folder_of(run, state.output), name)
    if width is not None:
        path = thumbnail(path, width, state.own / "thumbnails")
    return answer_with(path, name)


@router.post("/runs/{run}/stop")
def stop_run(run: str, state: State) -> Response:
    """Let the run save and stop. A job of the queue is cancelled, so that no worker takes it again."""
    starting = {row["id"] for row in state.run_rows.starting()}
    folder = (path_of(run, state.output) if run in starting else None) or folder_of(run, state.output)
    if cancel_job(folder):
        return JSON({"message": f"{folder.name}: saves and stops within seconds, and is cancelled then"})
    child = state.children.of(run)
    if child is not None and (run in starting or state.run_rows.is_starting_again(state.runs.row(folder))):
        child.stop()
    elif state.runs.row(folder)["status"] != "running" or (live := live_progress(folder)) is None:
        raise Refusal(409, Problem("not_running", f"{folder.name} does not run.", "There is nothing to stop."))
    elif live.is_of_this_machine:
        stop_process(live.pid, live.start)
    else:
        raise Refusal(
            409, Problem("on_other_machine", f"{folder.name} is trained on another machine.", "Stop it there.")
        )
    return JSON({"message": f"{folder.name}: saves and stops within seconds"})


def cancel_job(folder: Path) -> bool:
    """Cancel the job that trains in this folder; False where it is none of a batch."""
    if not holds_batch(folder.parent):
        return False
    store = JobStore(folder.parent)
    if not any(job.name == folder.name and job.status == "running" for job in store.read_jobs()):
        return False
    store.cancel([folder.name])
    return True


@router.post("/runs/{run}/requests", status_code=202)
def request_of_run(run: str, request: SentRequest, state: State) -> Response:
    """Leave a file for the trainer, which reads it between two steps: save, generate images, or use other prompts."""
    folder = folder_of(run, state.output)
    if not is_alive(folder):
        raise Refusal(409, Problem("not_running", f"{folder.name} does not run.", "Resume it first."))
    record = Record.read(folder)
    if record is not None and record.training:
        raise Refusal(409, Problem("run_not_training", f"{folder.name} does not train any more.", "Wait for its end."))
    waiting = sum(1 for _ in (folder / REQUESTS).glob("*.json"))
    if waiting >= MOST_REQUESTS:
        raise Refusal(
            409, Problem("too_many_requests", f"{waiting} requests wait for the run.", "Wait for its next step.")
        )
    path = write_request(folder, request.do, request.prompts)
    return JSON({"number": int(path.stem)}, 202)


@router.delete("/runs/{run}")
def delete_run(run: str, state: State) -> Response:
    """Move the folder of a run that does not run to the trash, which is a folder too."""
    never_began = [row for row in state.run_rows.starting() if row["id"] == run and not row["is_live"]]
    if never_began and not Path(never_began[0]["folder"]).exists():
        state.children.forget(run)  # it never came to be a run
        state.request_file(run).unlink(missing_ok=True)
        return JSON({"moved_to": None})
    folder = folder_of(run, state.output)
    if is_alive(folder):
        raise Refusal(409, Problem("already_running", f"{folder.name} runs.", "Stop it first."))
    try:
        # The sign of life of a run that trains may be missing, on a full disk, or old, by another machine's clock.
        take_free_lock(folder, "Stop it first.").release()
    except UsageError as error:
        raise Refusal(409, error.problems) from error
    trash = state.own / "trash" / f"{run}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    trash.parent.mkdir(parents=True, exist_ok=True)
    os.rename(folder, trash)
    state.children.forget(run)
    state.request_file(run).unlink(missing_ok=True)
    return JSON({"moved_to": str(trash)})
