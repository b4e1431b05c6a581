"""`/api/queue`: the jobs of the folder of runs: add, cancel, retry, order them, and start workers."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from lora_trainer.config.layers import Layer
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import Problem
from lora_trainer.core.hardware import available_cpus
from lora_trainer.jobs.changes import cancel_jobs, named_jobs, retry_jobs
from lora_trainer.jobs.folders import Shared, read_configs, read_root
from lora_trainer.jobs.job_state import (
    EXECUTOR,
    RETRIES,
    ROOT,
    SEVERAL_MACHINES,
    SHARED,
    TOGETHER,
    WAIT_MINUTES,
    NewJob,
)
from lora_trainer.jobs.job_store import FOLDER, JobStore, holds_batch, open_batch
from lora_trainer.jobs.summary import write_summary
from lora_trainer.monitor.console import Console
from lora_trainer.web.asked_settings import AskedSettings, Text, layers_of, user_presets
from lora_trainer.web.safety import JSON, Refusal, allowed
from lora_trainer.web.server_state import ServerState, State

MOST_TOGETHER = 64

router = APIRouter(prefix="/api/queue", default_response_class=JSON)
Priority = Annotated[int, Field(ge=-1000, le=1000)]


class NewJobs(AskedSettings):
    """Jobs to add: the folders in `root`, single `folders`, or `configs`. With `dry_run` they are only listed."""

    root: Text | None = None
    folders: list[Text] = Field([], max_length=10_000)
    configs: list[Text] = Field([], max_length=10_000)
    priority: Priority = 0
    together: Annotated[int | None, Field(ge=1, le=MOST_TOGETHER)] = None
    dry_run: bool = False


class JobPriority(BaseModel):
    """Jobs of a higher priority begin first."""

    model_config = ConfigDict(extra="forbid")
    priority: Priority


class Workers(BaseModel):
    """Worker processes to start; each takes jobs until none waits. They take the `gpus` in turn."""

    model_config = ConfigDict(extra="forbid")
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    gpus: list[Annotated[int, Field(ge=0, le=1023)]] = Field([], max_length=64)


@router.get("")
def show_queue(state: State) -> Response:
    """The document of `batch status --json`, with progress, priorities and workers."""
    return JSON(state.queue.document())


@router.post("", status_code=201)
def add_to_queue(asked: NewJobs, state: State) -> Response:
    """Add jobs, or list what would be added and what is wrong with it. Either all are added or none."""
    if asked.data:
        raise Refusal(
            422, Problem("settings_invalid", "data is not for jobs.", "Name root or folders: they are the datasets.")
        )
    with state.changing:
        jobs = jobs_of(asked, state)
        if asked.dry_run:
            return JSON({"jobs": checked_jobs(state, asked, jobs), "dry_run": True})
        add_jobs(state, asked, jobs, asked.priority, asked.together)
    return JSON(state.queue.document(), 201)


def jobs_of(asked: NewJobs, state: ServerState) -> dict[str, Path]:
    """Dataset folders and configs by the name of their run. Raises UserError."""
    places = [allowed(each, state.roots) for each in (*asked.folders, *asked.configs, *filter(None, [asked.root]))]
    folders = places[: len(asked.folders)]
    configs = places[len(folders) : len(folders) + len(asked.configs)]
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise Refusal(422, Problem("folder_missing", f"{folder} is not a folder.", "Name folders of images."))
        found.setdefault(folder.name, folder)
    found |= read_configs(configs) if configs else {}
    found |= read_root(places[-1]) if asked.root else {}
    if not found or len(found) < len(folders) + len(configs):
        what = "Two jobs would have one name." if found else "No jobs are named."
        raise Refusal(
            422, Problem("job_names_invalid", what, "Name root, folders or configs, each with a name of its own.")
        )
    return found


def checked_jobs(state: ServerState, asked: AskedSettings, jobs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """For each job what is wrong with it: its settings, or that its name is taken."""
    request = {"do": "jobs", "jobs": {name: str(place) for name, place in jobs.items()}}
    shared = {"shared": shared_of(state, asked).to_json(), "roots": list(map(str, state.roots))}
    rows: list[dict[str, Any]] = state.planner.ask_once({**request, **shared})["jobs"]
    taken = {FOLDER, *(job.name for job in state.queue.jobs())}  # the jobs' own folder is beside those of the runs
    for row in rows:
        if row["name"] in taken or (state.output / row["name"]).exists():
            fix = "Rename the folder or config, or delete that run."
            row["problems"].append(vars(Problem("name_taken", f"There is a run or job {row['name']} already.", fix)))
    return rows


def shared_of(state: ServerState, asked: AskedSettings) -> Shared:
    """The layers of a request, as a batch keeps them. Raises UserError."""
    problems = list[Problem]()
    presets, user, _ = layers_of(asked, user_presets(state.own / "presets"), lambda user: None, problems)
    if problems:
        raise Refusal(422, problems)
    # A worker has another current folder than the server.
    return Shared(tuple(presets), (*user, Layer("--output", {"run": {"output": str(state.output)}})))


def add_jobs(
    state: ServerState,
    asked: AskedSettings,
    jobs: Mapping[str, Path],
    priority: int = 0,
    together: int | None = None,
) -> None:
    """Add jobs to the queue behind those that it has, each with the settings of the request. Raises UserError."""
    rows = checked_jobs(state, asked, jobs)
    if problems := [Problem(**each) for row in rows for each in row["problems"]]:
        raise Refusal(422, list(dict.fromkeys(problems)))
    is_new, queue = not holds_batch(state.output), own_queue(state.output)
    notes: dict[str, Any] = {} if together is None else {TOGETHER: together}
    if is_new:
        minutes = Config().checkpoint.wait_minutes
        empty = {ROOT: None, SHARED: Shared((), ()).to_json(), EXECUTOR: "local", TOGETHER: 1, RETRIES: 0}
        notes = {**empty, WAIT_MINUTES: minutes, **notes}
    own = {SHARED: shared_of(state, asked).to_json()}
    queue.enlist([NewJob(name, place, priority, own) for name, place in jobs.items()], notes, keep_others=True)
    write_summary(queue)


def own_queue(output: Path) -> JobStore:
    """The jobs of the folder of runs, made where there are none. Raises Refusal for those of several machines."""
    store = JobStore(output)
    if store.read_note(SEVERAL_MACHINES):
        fix = "Use lora-trainer batch in a terminal, or another folder of runs: lora-trainer ui --output DIR"
        raise Refusal(
            409, Problem("queue_of_several_machines", "The jobs in this folder are those of several machines.", fix)
        )
    return store


@router.post("/{name}/cancel")
def cancel_job(name: str, state: State) -> Response:
    """As `batch cancel`: a job that runs saves and stops."""
    return changed(state, "cancel", name)


@router.post("/{name}/retry")
def retry_job(name: str, state: State) -> Response:
    """As `batch retry`: a job that ended without a LoRA waits again."""
    return changed(state, "retry", name)


def changed(state: ServerState, what: Literal["cancel", "retry"], name: str) -> Response:
    text = io.StringIO()
    console = Console(file=text, highlight=False, markup=False, emoji=False, soft_wrap=True)
    (cancel_jobs if what == "cancel" else retry_jobs)(state.output, [name], console)
    return JSON({"messages": text.getvalue().splitlines(), **state.queue.document()})


@router.post("/{name}/priority")
def set_priority(name: str, asked: JobPriority, state: State) -> Response:
    """Let a job begin before or after others."""
    with state.changing:
        queue = own_queue(state.output)
        named_jobs(queue, [name], "Order")
        queue.set_priority(name, asked.priority)
    return JSON(state.queue.document())


@router.post("/work", status_code=201)
def start_workers(asked: Workers, state: State) -> Response:
    """Start workers beside those that run. Each is `lora-trainer batch work`, and ends when no job waits."""
    open_batch(state.output)  # there are jobs
    share = {"OMP_NUM_THREADS": str(max(1, available_cpus() // asked.workers))} if asked.workers > 1 else {}
    with state.changing:
        taken = {child.name for child in state.queue.workers()}
        names = [name for number in range(1, 1025) if (name := f"~worker-{number}") not in taken][: asked.workers]
        for number, name in enumerate(names):
            gpu = str(asked.gpus[number % len(asked.gpus)]) if asked.gpus else None
            environment = dict(share) if "OMP_NUM_THREADS" not in os.environ else {}
            if gpu is not None:
                environment["CUDA_VISIBLE_DEVICES"] = gpu
            work = ["batch", "work", str(state.output)]
            state.children.start(name, work, about={"gpu": gpu}, environment=environment)
    return JSON(state.queue.document(), 201)


@router.post("/stop")
def stop_workers(state: State) -> Response:
    """Let the workers that were started here save and stop; their jobs wait again."""
    workers = state.queue.workers()
    for child in workers:
        child.stop()
    stopped = [child.name.lstrip("~") for child in workers]
    return JSON({**state.queue.document(), "stopped_workers": stopped})
