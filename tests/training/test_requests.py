"""How requests are read, agreed on by all processes, and answered (`training/requests.py`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.config.schema import SampleSection
from lora_trainer.core.errors import Problem
from lora_trainer.monitor.trackers import EVENTS, read_lines
from lora_trainer.training.requests import KINDS, MOST_BYTES, Requests, write_request
from tests.training.tiny_run import TinyPlace, outcome, together


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "requests"


def answers(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text("utf-8")) for path in (folder / "done").iterdir()}


def test_two_processes_do_it_after_the_same_step(place: TinyPlace) -> None:
    """Only the main one reads; the trained weights are those of a run without requests."""
    settings: dict[str, Any] = {"steps": 3, "checkpoint__every_n_steps": 9, "checkpoint__keep_last": 9}
    calm = [place.run("calm", processes=each, **settings) for each in together(2)]
    place.resume_together(calm)
    asked = [place.run("asked", processes=each, **settings) for each in together(2)]
    for do, prompts in (("save", ()), ("sample", ()), ("prompts", ("a ring at sea",))):
        write_request(asked[0].folder, do, prompts)
    place.resume_together(asked)
    found = answers(asked[0].folder / "requests")
    assert {name: (each["step"], "result" in each) for name, each in found.items()} == dict.fromkeys("123", (1, True))
    assert found["1"]["result"] == "saved checkpoints/step-000001 and weights/asked-step-000001.safetensors"
    assert (asked[0].folder / "weights" / "asked-step-000001.safetensors").is_file()
    assert sorted(path.name for path in asked[0].checkpoints.glob("step-*")) == ["step-000001", "step-000003"]
    assert [row["kind"] for row in read_lines(asked[0].folder / EVENTS)] == ["request"] * 3
    assert asked[1].requests.prompts is None
    one, other = outcome(calm[0]), outcome(asked[0])
    assert one["tensors"] == other["tensors"]
    assert one["optimizer"] == other["optimizer"]


def test_what_came_after_a_vote_waits_for_the_next_one(folder: Path) -> None:
    """On GPUs votes are read one step later: what was read meanwhile is not among them."""
    requests = Requests(folder.parent)
    assert requests.read() == [False] * 3
    write_request(folder.parent, "sample")
    assert requests.read() == [False, True, False]  # voted in the first step
    write_request(folder.parent, "save")
    requests.agree(["sample"])  # in the second step the votes of the first are read, then new ones are sent
    assert requests.read() == [True, False, False]
    assert requests.due == {"sample"}
    assert requests.answer(2, {"sample": "generated"}.__getitem__) == ["requested: generated"]
    assert requests.due == frozenset()
    requests.agree(["save"])
    requests.answer(3, {"save": "saved"}.__getitem__)
    assert {name: each["step"] for name, each in answers(folder).items()} == {"1": 2, "2": 3}
    assert os.listdir(folder) == ["done"]


def test_after_a_rollback_unanswered_requests_are_read_again(folder: Path) -> None:
    requests = Requests(folder.parent)
    write_request(folder.parent, "prompts", ["a"])
    requests.read()
    requests.agree(["prompts"])
    requests.restart()
    assert (requests.due, requests.prompts) == (frozenset(), ("a",))
    assert requests.read() == [kind == "prompts" for kind in KINDS]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff\xfe", "no JSON document"),
        (b"[" * 100_000, "no JSON document"),
        (b'"' + b" " * MOST_BYTES + b'"', "no JSON document"),
        (b"[]", "A request is a JSON object."),
        (b"{}", "There is no request None."),
        (b'{"do": ["save"]}', "There is no request ['save']."),
        (b'{"do": "save", "step": 7}', "A request has no 'step'."),
        (b'{"do": "sample", "prompts": ["a"]}', "Prompts belong to the request `prompts`."),
        (b'{"do": "prompts", "prompts": "abc"}', "Prompts are a list"),
        (b'{"do": "prompts", "prompts": ["a", 1]}', "Prompts are a list"),
        (b'{"do": "prompts", "prompts": ["\\ud800"]}', "not UTF-8"),
        (b'{"do": "prompts", "prompts": ["a", "b"]}', "Name as many."),
    ],
)
def test_damaged_requests_are_answered_with_a_problem(folder: Path, content: bytes, problem: str) -> None:
    folder.mkdir()
    (folder / "1.json").write_bytes(content)
    requests = Requests(
        folder.parent, SampleSection(prompts=("x", "y", "z"), control_images=("x.png", "y.png", "z.png"))
    )
    assert requests.read() == [False] * 3
    requests.agree([])
    (sentence,) = requests.answer(5, lambda kind: "done")
    assert sentence.startswith("a request was refused: ")
    assert problem in answers(folder)["1"]["problem"]
    assert requests.prompts is None
    assert requests.read() == [False] * 3
    assert not (folder / "1.json").exists()


def test_only_whole_files_are_read(folder: Path) -> None:
    (folder / "2.json").mkdir(parents=True)
    (folder / ".1.json.x.part").write_text('{"do": "save"}', encoding="utf-8")
    os.mkfifo(folder / "3.json")
    (folder / "4.json").symlink_to(folder / ".1.json.x.part")
    assert Requests(folder.parent).read() == [False] * 3
    assert write_request(folder.parent, "save").name == "5.json"


def test_what_is_left_at_the_end_is_answered(folder: Path) -> None:
    requests = Requests(folder.parent)
    with requests:
        requests.answer(7, lambda kind: Problem("planted", "none"))
        write_request(folder.parent, "prompts", ["a"])
    assert answers(folder)["1"]["problem"] == "The training ended before this was done."
    assert (answers(folder)["1"]["step"], requests.prompts) == (7, None)


def test_a_disk_that_refuses_an_answer_ends_nothing(folder: Path) -> None:
    """A request that cannot be deleted is done once."""
    requests = Requests(folder.parent)
    write_request(folder.parent, "save")
    requests.read()
    requests.agree(["save"])
    (folder / "1.json").unlink()
    (folder / "1.json").mkdir()  # cannot be unlinked
    (folder / "done" / "1.json").mkdir()  # cannot be replaced
    assert requests.answer(1, lambda kind: "saved") == ["requested: saved"]
    (folder / "1.json").rmdir()
    (folder / "1.json").write_text('{"do": "save"}', encoding="utf-8")
    assert requests.read() == [False] * 3
