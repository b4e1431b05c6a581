"""What a new run is made of: settings and presets, the plan, configs of other trainers; start a run, or resume one."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from lora_trainer.config.needs import needs_in_words
from lora_trainer.config.presets import AUTO, presets, tier_gb
from lora_trainer.config.resuming import FIXED, FIXED_IN_EFFECT
from lora_trainer.config.tables import names_for
from lora_trainer.config.toml import can_be_emptied, is_a_list, read_toml, section_types, shown, without_empty
from lora_trainer.core.errors import Problem
from lora_trainer.core.io import write_json, write_text
from lora_trainer.importers.documents import read_document
from lora_trainer.importers.imported import FORMATS, import_file
from lora_trainer.importers.other_names import other_names
from lora_trainer.report.read import mapping
from lora_trainer.run_folder.record import Record
from lora_trainer.web.asked_settings import AskedSettings, texts_in, user_presets
from lora_trainer.web.queue_api import add_jobs
from lora_trainer.web.run_list import folder_of, id_of
from lora_trainer.web.safety import JSON, Refusal, allowed
from lora_trainer.web.server_state import ServerState, State

MOST_NAMES = 10_000
PRESET_NAME = r"^[\w][\w .-]{0,79}$"

router = APIRouter(prefix="/api", default_response_class=JSON)


class NewRun(AskedSettings):
    """A run to start, or to add to the queue. Without a name it has that of its data, with a number if there is one."""

    name: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    command: Literal["train", "produce"] = "train"
    when: Literal["now", "queue"] = "now"
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0


class ResumedRun(BaseModel):
    """Settings that may change when a run is resumed."""

    model_config = ConfigDict(extra="forbid")
    settings: dict[str, Any] = Field({}, max_length=1000)


class SavedPreset(BaseModel):
    """Settings to be used again by a name."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern=PRESET_NAME)
    settings: dict[str, Any] = Field(min_length=1, max_length=1000)


class OtherConfig(BaseModel):
    """The text of another trainer's config; `format` is the ending of its file, which only decides whose error is shown."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(min_length=1, max_length=4_000_000)
    format: Literal["toml", "json", "yaml", "sh"] | None = None


@router.get("/settings")
def show_schema(state: State) -> Response:
    """Every setting with its kind, limits, default and description; the presets, and those that were saved here."""
    own = [{"name": name, "settings": flat(values)} for name, values in saved(state).items()]
    return JSON({"sections": sections(), "presets": preset_rows(), "auto": AUTO, "saved": own})


@cache
def sections() -> list[dict[str, Any]]:
    """The schema, in its order."""
    found, aliases = [], other_names()
    for section, kind in section_types().items():
        schema = kind.model_json_schema()
        rows = []
        for key, field in kind.model_fields.items():
            name, extra = f"{section}.{key}", field.json_schema_extra
            kinds = list(alternatives(schema["properties"][key], schema.get("$defs", {})))
            choices = [
                value for each in kinds for value in each.get("enum", [each["const"]] if "const" in each else [])
            ]
            limits = {word: each[limit] for each in kinds for word, limit in LIMITS.items() if limit in each}
            rows.append(
                {
                    "name": name,
                    "key": key,
                    "types": list(
                        dict.fromkeys(each["type"] for each in kinds if each.get("type") not in (None, "null"))
                    ),
                    "choices": choices or list(names_for(name)) or None,
                    **limits,
                    "is_list": is_a_list(kind, key),
                    "can_be_empty": can_be_emptied(kind, key),
                    "default": kind().model_dump(mode="json")[key],
                    "description": field.description or "",
                    "needs": needs_in_words(name),
                    "aliases": aliases.get(name, ()),
                    "on_resume": extra.get("on_resume") if isinstance(extra, dict) else None,
                }
            )
        found.append({"name": section, "description": (kind.__doc__ or "").strip(), "settings": rows})
    return found


LIMITS = {
    "minimum": "minimum",
    "maximum": "maximum",
    "above": "exclusiveMinimum",
    "below": "exclusiveMaximum",
    "pattern": "pattern",
}


def alternatives(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The kinds of values that a schema allows, references followed."""
    if "$ref" in schema:
        yield from alternatives(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    elif "anyOf" in schema or "oneOf" in schema:
        for each in schema.get("anyOf", schema.get("oneOf", [])):
            yield from alternatives(each, definitions)
    else:
        yield schema


@cache
def preset_rows() -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "kind": each.kind,
            "gb": tier_gb(each.name),
            "family": each.family or None,
            "description": each.description,
            "settings": flat(each.values),
            "evidence": dict(each.evidence),
        }
        for each in presets().values()
    ]


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by `section.key`."""
    return {f"{section}.{key}": value for section, of in values.items() for key, value in mapping(of).items()}


def saved(state: ServerState) -> dict[str, dict[str, Any]]:
    return user_presets(state.own / "presets")


def question(state: ServerState, asked: AskedSettings, do: str, **more: Any) -> dict[str, Any]:
    """A request of the planner."""
    found = asked.model_dump(include={"model", "data", "presets", "settings"})
    return {"do": do, "asked": found, "own": saved(state), "roots": list(map(str, state.roots)), **more}


@router.post("/plan")
def plan(asked: AskedSettings, state: State) -> Response:
    """The document of `plan --json` with `settings`: each value and its origin, `differences` from the presets, and
    `seconds_at_least` of the whole training. A model of a hub must be downloaded already."""
    return JSON({**state.planner.ask(question(state, asked, "plan")), "problems": []})


@router.post("/import")
def import_config(sent: OtherConfig, state: State) -> Response:
    """The document of `import --json`: the settings, and what became of every key."""
    with tempfile.TemporaryDirectory(prefix="lora-trainer-import-") as folder:
        path = Path(folder) / f"config.{sent.format or 'txt'}"
        path.write_text(sent.text, encoding="utf-8", errors="replace")
        for text in texts_of(read_document(path)):
            refuse_other_file(text, path.parent, state)
        text = json.dumps(import_file(path).to_json(), default=str)
        # Relative paths stay as they were written: nobody knows where the file was.
        document = json.loads(text.replace(json.dumps(f"{path.resolve().parent}{os.sep}")[1:-1], ""))
    return JSON({**document, "file": None, "formats": [each.name for each in FORMATS]})


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in [*value.values()] if isinstance(value, Mapping) else value:
            yield from texts_of(each)


def refuse_other_file(text: str, folder: Path, state: ServerState) -> None:
    """Raise Refusal for a file that a config names, and that may not be read: importers read configs beside a config."""
    if len(text) > 4096 or "\n" in text or "\0" in text:
        return
    for base in (folder, *folder.parents, Path.cwd()):
        path = base / os.path.expanduser(text)
        if os.path.isfile(path):
            allowed(path, (*state.roots, folder))


@router.post("/presets", status_code=201)
def save_preset(sent: SavedPreset, state: State) -> Response:
    """Save settings as a preset of one's own. Its settings are checked as a run's are; one of that name is replaced."""
    if sent.name in presets() or sent.name == AUTO:
        raise Refusal(422, Problem("name_taken", f"{sent.name} is a preset of the program.", "Choose another name."))
    asked, problems = AskedSettings(settings=sent.settings), list[Problem]()
    values = asked.nested(problems)
    if problems:
        raise Refusal(422, problems)
    state.planner.ask(question(state, asked, "resolve"))
    write_text(state.own / "presets" / f"{sent.name}.toml", tomli_w.dumps(without_empty(values)))
    return JSON({"name": sent.name, "settings": sent.settings}, 201)


@router.post("/runs", status_code=201)
def start_run(asked: NewRun, state: State) -> Response:
    """Start a run in a process of its own, or add it to the queue; refused with all problems before anything is written."""
    with state.changing:
        name = free_name(asked, state)
        own = [{"run": {"output": str(state.output), "name": name}}]
        enforces = asked.when == "queue" or asked.command == "produce"
        found = state.planner.ask_once(question(state, asked, "check", runs=own, enforce_gates=enforces))
        problems = list[Problem]()
        values = asked.nested(problems)
        for preset in reversed([saved(state)[each] for each in asked.presets if each in saved(state)]):
            values = {
                section: {**mapping(preset.get(section)), **values.get(section, {})} for section in {**preset, **values}
            }
        run = id_of(state.output / name, state.output)
        config = write_config(state, run, values)
        write_json(state.request_file(run), asked.model_dump(exclude={"when", "priority"}))
        chosen = [each for each in asked.presets if each not in saved(state)]
        if asked.when == "queue":
            add_jobs(
                state, AskedSettings(model=asked.model, data=asked.data, presets=chosen), {name: config}, asked.priority
            )
        else:
            flags = [f"--preset={','.join(chosen)}"] if chosen else []
            flags += [f"--model={asked.model}"] if asked.model is not None else []
            flags += [f"--data={each}" for each in asked.data]
            flags += [f"--config={config}", f"--output={state.output}", f"--name={name}"]
            state.children.start(run, [asked.command, *flags])
    return JSON({"id": run, "name": name, "when": asked.when, **found}, 201)


def free_name(asked: NewRun, state: ServerState) -> str:
    """The name of the run: as asked, else of its data or `builtin`, with the first number that no folder has."""
    if asked.name is not None:
        if asked.name.startswith(".") and asked.name.strip(".") and "/" not in asked.name:
            raise Refusal(
                422,
                Problem("folder_hidden", f"{asked.name} is the name of a hidden folder.", "Begin it with a letter."),
            )
        return asked.name
    sources = asked.settings.get("data.sources") or ()
    tables = [mapping(each).get("path") for each in sources] if isinstance(sources, list) else []
    data = [*asked.data, *texts_in(tables)]
    stem = re.sub(r"[-_. ]*\{[^{}]*\}", "", Path(data[0]).stem) if data else "demo"
    first = stem.strip(". ") or "run"
    taken = {child.name for child in state.children.all() if child.is_alive}
    names = [first, *(f"{first}-{number}" for number in range(2, MOST_NAMES))]
    return next(name for name in names if name not in taken and not (state.output / name).exists())


def write_config(state: ServerState, name: str, values: Mapping[str, Any]) -> Path:
    """The settings as a TOML file that the command reads."""
    path = state.own / "configs" / f"{name}.toml"
    write_text(path, tomli_w.dumps(without_empty(dict(values))))
    return path


@router.post("/runs/{run}/resume", status_code=201)
def resume_run(run: str, state: State, asked: ResumedRun | None = None) -> Response:
    """Continue a run, with other settings where they may change; refused with all problems before anything is written."""
    folder = folder_of(run, state.output)
    settings, record = (asked or ResumedRun()).settings, Record.read(folder)
    row = state.runs.row(folder)
    if not row["is_live"] and not state.run_rows.is_starting_again(row):
        state.children.wait(run)
    with state.changing:
        if row["is_live"]:
            raise Refusal(409, Problem("already_running", f"{folder.name} runs already.", "Stop it first."))
        path = folder / "config.toml"
        if record is None or not record.keeps_state or not path.is_file():
            raise Refusal(
                409, Problem("not_resumable", f"{folder.name} cannot be resumed: it kept no state.", "Start a new run.")
            )
        problems = list[Problem]()
        values = AskedSettings(settings=settings).nested(problems)
        for name, value in settings.items():
            old = record.setting(name)
            if name in (*FIXED, *FIXED_IN_EFFECT) and value != old:
                message = f"{name} was {shown(old)} and cannot be changed when a run is resumed."
                problems.append(Problem("setting_changed", message, "Set it back, or start a new run."))
        config = read_toml(path)
        merged = {
            section: {**mapping(config.get(section)), **values.get(section, {})} for section in {**config, **values}
        }
        own = {"output": str(folder.parent), "name": folder.name}
        kept = {key: value for key, value in mapping(merged.get("run")).items() if key not in own}
        merged["run"] = {**kept, **own}
        if problems:
            raise Refusal(422, problems)
        # All of it is held to the roots, and commands are refused: the folder may be somebody else's.
        sent = question(
            state,
            AskedSettings(settings=settings),
            "check",
            runs=[merged],
            resume=True,
        )
        found = state.planner.ask_once(sent)
        command = "produce" if record.gates_enforced else "train"
        written = write_config(state, run, merged)
        arguments = [command, f"--config={written}", f"--output={folder.parent}", f"--name={folder.name}", "--resume"]
        state.children.start(run, arguments, again=True)
    return JSON({"id": run, **found}, 201)
