"""Settings resolved, checked and planned in a process of its own: a plan may load torch, and a model of a hub the network.

The one for plans stays for a while, since people change one setting after the other, and works offline.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.config.contradictions import from_user
from lora_trainer.config.layers import Layer, Resolved, valid_settings
from lora_trainer.core.errors import Problem, UserError, gathering
from lora_trainer.core.io import finite
from lora_trainer.core.json_process import JsonProcess, open_streams, send
from lora_trainer.jobs.folders import job_settings, shared_from_json
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.folder import claim
from lora_trainer.run.inputs import list_data, read_model
from lora_trainer.run.order import make_order
from lora_trainer.run.plans.plan import Data, architecture_of, make_plan, planned_data
from lora_trainer.run.settings import refuse_unmeasured, settle
from lora_trainer.web.asked_settings import PAGE, AskedSettings, layers_of, needs_gpu, refuse_outside
from lora_trainer.web.safety import Refusal

IDLE_SECONDS = 300.0  # after which the process of the plans ends
LONGEST_SECONDS = 120.0  # of a plan; a model that was never seen is traced
LISTED_BY = ("model", "data", "captions", "validation")  # sections that the lists of images depend on
LISTED_SECONDS = 30.0

Request = Mapping[str, Any]


class Planner:
    """The process of the plans. Any thread may ask; one is answered at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: JsonProcess | None = None
        self._idle: threading.Timer | None = None

    def ask(self, request: Request) -> dict[str, Any]:
        """The document of a plan. Raises UserError with all problems."""
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            if self._process is None or not self._process.is_alive:
                self._process = start({"HF_HUB_OFFLINE": "1"})
            try:
                return answered(self._process, request)
            finally:
                self._idle = threading.Timer(IDLE_SECONDS, self.close)
                self._idle.daemon = True
                self._idle.start()

    def ask_once(self, request: Request) -> dict[str, Any]:
        """The same in a new process, which may ask a hub for its model. Raises UserError with all problems."""
        process = start({})
        try:
            return answered(process, request)
        finally:
            process.close()

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            if self._process is not None:
                self._process.close()
            self._process = None


def start(environment: Mapping[str, str]) -> JsonProcess:
    return JsonProcess("lora_trainer.web.planner", environment, is_apart=True)


def answered(process: JsonProcess, request: Request) -> dict[str, Any]:
    """The answer of a process to a request. Raises UserError with the problems that it names."""
    try:
        found: dict[str, Any] = process.ask(request, LONGEST_SECONDS)
    except (TimeoutError, EOFError, ValueError):
        message = f"The plan was not made: its process ended, or took more than {LONGEST_SECONDS:.0f} s."
        fix = "Try again, or use `lora-trainer plan` in a terminal."
        raise Refusal(503, Problem("process_lost", message, fix)) from None
    if "problems" in found:
        raise Refusal(422, [Problem(*each) for each in found["problems"]])
    return found


# In the process.


def planned(request: Request, lists: dict[str, tuple[float, Data]]) -> dict[str, Any]:
    """The document of `plan --json`, every setting with its origin, and what differs from the presets.

    `lists` keeps the images of the last request for half a minute: who types changes other settings.
    """
    alone, resolved, notes = resolved_of(request)
    config = resolved.config
    key = json.dumps([getattr(config, name).model_dump(mode="json") for name in LISTED_BY])
    kept = lists.get(key)
    if kept is None or time.monotonic() - kept[0] > LISTED_SECONDS:
        data = planned_data(config, architecture_of(config, FAMILIES)[1].facts)
        lists.clear()
        kept = lists[key] = (time.monotonic(), data)
    is_auto = needs_gpu(AskedSettings(**request["asked"]))
    gpu = memory_of_gpu([Layer(PAGE, config.model_dump())]) if is_auto else None
    plan = make_plan(resolved, gpu_gib=gpu, data=kept[1], here=gpu is not None)
    values, before = config.model_dump(mode="json"), alone.config.model_dump(mode="json")
    rows, differences = {}, []
    for name, origin in resolved.origin.items():
        section, _, setting = name.partition(".")
        value, preset = values[section][setting], before[section][setting]
        rows[name] = {"value": value, "origin": origin, "evidence": resolved.evidence.get(name) or None}
        if value != preset and from_user(origin):
            differences.append({"name": name, "value": value, "preset": preset, "origin": alone.origin[name]})
    document, steps = plan.to_json(), plan.steps
    each = document["seconds_per_step_at_least"]
    return {
        **document,
        "what_if": document["settings"],
        "gpu_gib": gpu,
        "seconds_at_least": {name: seconds * steps for name, seconds in each.items()} if steps else None,
        "shortages": plan.shortages,
        "settings": rows,
        "differences": differences,
        "notes": notes,
    }


def memory_of_gpu(layers: Sequence[Layer]) -> float | None:
    """GiB of the GPU on which a run with these settings trains; None without a GPU."""
    from lora_trainer.run.choices import gpu_gib_for_auto

    return gpu_gib_for_auto(layers)


def resolved_of(request: Request) -> tuple[Resolved, Resolved, list[str]]:
    """The settings of model, data and presets alone, those of the request, and notes. Raises UserError."""
    asked, problems, notes = AskedSettings(**request["asked"]), list[Problem](), list[str]()
    roots = [Path(root) for root in request["roots"]]
    presets, user, of_presets = layers_of(asked, request["own"], memory_of_gpu, problems)
    refuse_outside((layer.values for layer in user), roots, problems)
    if problems:  # nothing outside is read, also not to find more problems
        for layer in user:
            valid_settings(layer, problems)
        raise Refusal(422, problems)
    is_published = request["do"] == "plan" and not asked.model and "model.family" in asked.settings
    # As the command will get them: a run's file states its presets' settings too, also those that its length leaves idle.
    of_run = [Layer("--config of the run", each) for each in request.get("runs", ())]
    resolved = settle(presets, [*user, *of_run], builtin_if_none=not is_published, say=notes.append)
    refuse_outside([resolved.config.model_dump(mode="json")], roots, problems)
    if problems:
        raise Refusal(422, problems)
    named = [layer for layer in user if layer.name in ("--model", "--data")]
    if is_published:
        named.append(Layer(PAGE, {"model": {"family": asked.settings["model.family"]}}))
    alone = settle(presets, [*named, *of_run], builtin_if_none=not is_published, say=list[str]().append)
    return alone, resolved, [*of_presets, *resolved.notes, *notes]


def checked(request: Request) -> dict[str, Any]:
    """Whether a run may begin: its settings, its folder, its model and data. Writes nothing. Raises UserError."""
    _, resolved, notes = resolved_of(request)
    problems = list[Problem]()
    order = make_order(resolved, resume=bool(request.get("resume")))
    with gathering(problems):
        if request.get("enforce_gates"):
            refuse_unmeasured(resolved.config.gates)
    with gathering(problems):
        claim(order, only_looks=True)
    with gathering(problems):
        read_model(resolved.config, weights=False)
    with gathering(problems):
        if resolved.config.data.sources:
            list_data(resolved.config, allow_missing_captions=True)
    if problems:
        raise Refusal(422, problems)
    return {"name": order.folder.name, "folder": str(order.folder), "notes": notes}


def checked_jobs(request: Request) -> dict[str, Any]:
    """For each job of a batch what is wrong with its settings. Raises UserError for nothing."""
    shared, roots = shared_from_json(request["shared"]), [Path(root) for root in request["roots"]]
    found = []
    for name, place in request["jobs"].items():
        problems = list[Problem]()
        with gathering(problems):
            resolved = job_settings(shared, name, Path(place))
            refuse_outside([resolved.config.model_dump(mode="json")], roots, problems)
            refuse_unmeasured(resolved.config.gates)
            read_model(resolved.config, weights=False)
        found.append({"name": name, "data": place, "problems": [vars(each) for each in problems]})
    return {"jobs": found}


def answer(request: Request, lists: dict[str, tuple[float, Data]]) -> dict[str, Any]:
    """The document of a request, or its problems. No error leaves this function."""
    try:
        if request["do"] == "plan":
            return planned(request, lists)
        if request["do"] == "resolve":
            return {"notes": resolved_of(request)[2]}
        return checked(request) if request["do"] == "check" else checked_jobs(request)
    except UserError as error:
        problems: Sequence[Problem] = error.problems
    except Exception as error:  # noqa: BLE001  a bug ends no process that others wait for
        problems = [
            Problem("bug", f"This is a bug in lora-trainer: {type(error).__name__}: {error}", "Please report it.")
        ]
    return {"problems": [(each.code, each.message, each.fix) for each in problems]}


def main() -> None:
    """Answer requests until the input ends."""
    from lora_trainer.core.imports import OPTIONAL, hide, own_process

    own_process()
    hide(OPTIONAL)
    lists: dict[str, tuple[float, Data]] = {}
    requests, answers = open_streams()
    for line in requests:
        send(answers, finite(answer(json.loads(line), lists)))
