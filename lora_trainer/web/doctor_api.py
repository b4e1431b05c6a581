"""`/api/doctor`: the checklist of this machine, and of a run, by the command `doctor` as a process of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from lora_trainer.web.run_list import LONGEST_ID, folder_of
from lora_trainer.web.safety import JSON
from lora_trainer.web.server_state import ServerState, State

KIND = "doctor"
# A command in the sentence of a fix: the program, then words, quoted or not, until the sentence ends or continues.
COMMAND = re.compile(
    r"""\b(?:sudo|pip\ install|docker\ run|ulimit|timedatectl|lora-trainer|accelerate\ launch)
    (?:\ (?!(?:in|if|or|and|to|unless|lists|shows)\b|\() (?:(?<=\ )\.(?=\ |$) | '[^']*' | "[^"]*" | [^\s,;.)'"] | [,;.)](?![\s,;.)]|$))+ )+""",
    re.VERBOSE,
)

router = APIRouter(prefix="/api/doctor", default_response_class=JSON)
RunId = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]


class CheckOf(BaseModel):
    """What to check: a run, or without one this machine."""

    model_config = ConfigDict(extra="forbid")
    run: RunId | None = None


@router.post("", status_code=201)
def start_check(asked: CheckOf, state: State) -> Response:
    """Start a check; the row of its task. One that runs is answered instead: two would measure each other."""
    folder = [] if asked.run is None else [str(folder_of(asked.run, state.output).resolve())]
    with state.changing:
        running = [row for row in checks_of(asked.run, state) if row["status"] == "running"]
        if running:
            return JSON(running[0])
        title = "Check of this machine" if asked.run is None else f"Check of {asked.run}"
        return JSON(state.tasks.start(KIND, title, ["doctor", *folder, "--json"], {"run": asked.run}), 201)


@router.get("")
def show_checks(state: State, run: Annotated[str | None, Query(max_length=LONGEST_ID)] = None) -> Response:
    """The last check of this machine, or of a run, and the newest one that has a result, with its document."""
    if run is not None:
        folder_of(run, state.output)
    rows = checks_of(run, state)
    ended = (row for row in rows if row["status"] in ("done", "failed"))  # with an error among its lines it ends with 2
    found = ({**row, "document": state.tasks.document(row["id"])} for row in ended)
    newest = next(
        (each for each in found if isinstance(each["document"], Mapping) and "lines" in each["document"]), None
    )
    for line in newest["document"]["lines"] if newest else ():
        line["commands"] = COMMAND.findall(line["fix"])  # for a button that copies each
    return JSON({"run": run, "last": rows[0] if rows else None, "newest": newest})


def checks_of(run: str | None, state: ServerState) -> list[dict[str, Any]]:
    """The tasks that checked this machine, or a run, newest first."""
    return [row for row in state.tasks.rows() if row["kind"] == KIND and row["about"].get("run") == run]
