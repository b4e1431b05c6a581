"""A fast folder that checkpoints are written to first: nothing is lost, whatever ends the run, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.core import disk
from lora_trainer.core.disk import Patience, patient
from lora_trainer.core.io import remove_unfinished
from lora_trainer.run_folder.lock import LOCK
from lora_trainer.run_folder.progress import ProgressFile
from lora_trainer.training.checkpoints import save as saving
from lora_trainer.training.checkpoints import scratch as scratching
from lora_trainer.training.checkpoints.checkpoint import (
    Checkpoint,
    NewerVersion,
    list_checkpoints,
    newest_valid,
    put_back,
    read_checkpoint,
    save_checkpoint,
    sealed_text,
    step_of,
)
from lora_trainer.training.checkpoints.scratch import PREFIX, Scratch, take_over
from lora_trainer.training.state import TrainState
from lora_trainer.training.training_run import Run
from tests.recipes.recipe import patched
from tests.training.test_returning import bad_once
from tests.training.tiny_run import TinyPlace, outcome, together

SETTINGS: dict[str, object] = {"validation__every_n_steps": 2, "checkpoint__every_n_steps": 2}


def test_auto_takes_the_place_that_is_fast_enough_to_be_worth_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, memory, disk = (tmp_path / name for name in ("run", "memory", "disk"))
    for folder in (run, memory, disk):
        folder.mkdir()
    monkeypatch.setattr(scratching, "MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(scratching, "LEFT_FREE", 0.0)
    lines = list[str]()
    for speeds, expected in (
        ({run: 1e8, memory: 2e9, disk: 3e8}, memory),
        ({run: 1e8, memory: 3e8, disk: 5e8}, disk),
        ({run: 1e9, memory: 1.9e9, disk: 1e8}, run),
    ):
        monkeypatch.setattr(scratching, "write_speed", speeds.__getitem__)
        assert scratching.fastest_place(run, 10**6, lines.append) == expected
    assert str(memory) in lines[0]
    monkeypatch.setattr(scratching, "MEMORY", tmp_path / "gone")
    monkeypatch.setattr(scratching, "write_speed", {run: 1e8, disk: 3e8}.__getitem__)
    assert scratching.fastest_place(run, 10**6, lines.append) == disk
    assert scratching.fastest_place(run, 2**62, lines.append) == run, "no place has so much room"
    monkeypatch.setattr(scratching, "LEFT_FREE", 1.1)
    assert scratching.fastest_place(run, 0, lines.append) == run, "a share stays free for others"


def test_the_speed_of_a_folder_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    assert scratching.write_speed(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []
    assert scratching.write_speed(tmp_path / "gone") == 0


def checkpoint_at(step: int) -> Checkpoint:
    weights = {"a": torch.full((4, 4), float(step))}
    return Checkpoint(TrainState(step=step), weights, {"state": {}, "param_groups": []}, None, {})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch folder on this machine's disk, however full that is."""
    monkeypatch.setattr(scratching, "LEFT_FREE", 0.0)
    (tmp_path / "fast").mkdir()
    return tmp_path / "fast"


def killed_session(root: Path, checkpoints: Path, *steps: int) -> Path:
    """The folder of a session that was killed when it had written these checkpoints there."""
    scratch = Scratch(str(root), checkpoints, 0, 10**9, print).__enter__()
    assert scratch.folder is not None
    for step in steps:
        save_checkpoint(scratch.folder, checkpoint_at(step))
    return scratch.folder


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(folder)]


def test_a_run_with_a_scratch_folder_is_the_same_run(place: TinyPlace, root: Path) -> None:
    plain = place.run("plain", **SETTINGS)
    place.train(plain)
    fast = place.run("fast", checkpoint__scratch=str(root), **SETTINGS)
    place.train(fast)
    assert outcome(fast) == outcome(plain)
    assert list(root.iterdir()) == []
    names = {path.name for path in plain.checkpoints.iterdir()}
    assert {path.name for path in fast.checkpoints.iterdir()} == names
    assert len(fast.copier.writes) >= 3


def test_a_slow_disk_does_not_hold_up_what_is_written_fast(place: TinyPlace, root: Path) -> None:
    """While one checkpoint is copied, the next ones are complete in the scratch folder."""
    run = place.run("run", checkpoint__scratch=str(root), checkpoint__keep_last=9, **SETTINGS)
    there: list[list[int]] = []

    def slow(source: Path, folder: Path) -> None:
        while len(list_checkpoints(source.parent)) + len(list_checkpoints(folder)) < 3:
            time.sleep(0.01)
        there.append(steps_in(source.parent))
        copy(source, folder)

    copy = saving.copy_checkpoint
    with patched(saving, "copy_checkpoint", slow):
        place.train(run)
    assert there[0] == [6, 4, 2]
    assert steps_in(run.checkpoints) == [6, 4, 2]


def test_a_checkpoint_that_is_deleted_before_it_is_copied_ends_nothing(place: TinyPlace, root: Path) -> None:
    plain = place.run("plain", **SETTINGS)
    place.train(plain)
    lines = list[str]()
    run = replace(place.run("run", checkpoint__scratch=str(root), **SETTINGS), say=lines.append)
    copy = saving.copy_checkpoint

    def delete_first(source: Path, folder: Path) -> None:
        if source.name == "step-000002":
            shutil.rmtree(source)
        copy(source, folder)

    with (
        patched(saving, "copy_checkpoint", delete_first),
        patient(Patience(minutes=1.0)),
        patched(disk, "RETRY_EVERY", 0),
    ):
        place.train(run)
    assert steps_in(run.checkpoints)[0] == 6
    assert outcome(run)["tensors"] == outcome(plain)["tensors"]
    assert [line for line in lines if "step-000002 was deleted before it was copied" in line]


def test_a_step_that_is_saved_twice_waits_for_its_first_copy(place: TinyPlace, root: Path) -> None:
    """As by a signal right after a checkpoint, while the disk is slow."""
    run = place.run("run", checkpoint__scratch=str(root), **SETTINGS)
    copy, copied = saving.copy_checkpoint, list[int]()

    def slow(source: Path, folder: Path) -> None:
        time.sleep(0.2)
        copy(source, folder)
        copied.append(step_of(source))

    assert run.scratch is not None
    with run.scratch, run.copier, run.writer, patched(saving, "copy_checkpoint", slow):
        saving.save(run, TrainState(step=2))
        saving.save(run, TrainState(step=2, seconds=1.0), last=True)
    assert copied == [2, 2]
    assert read_checkpoint(run.checkpoints / "step-000002").state.seconds == 1.0
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("why", ["full", "gone", "refusing"])
def test_what_does_not_fit_goes_to_the_run_with_one_warning(why: str, place: TinyPlace, root: Path) -> None:
    plain = place.run("plain", **SETTINGS)
    place.train(plain)
    lines: list[str] = []
    run = place.run("run", checkpoint__scratch=str(root), **SETTINGS)
    assert run.scratch is not None
    scratch = replace(run.scratch, limit=1000 if why == "full" else run.scratch.limit, say=lines.append)
    run = replace(run, scratch=scratch)
    if why == "gone":
        shutil.rmtree(root)
    if why == "refusing":
        original = run.feed.samples_in

        def samples_in(step: int) -> int:
            if step == 3:
                run.writer.settle()
                run.copier.settle()
                shutil.rmtree(root)
            return original(step)

        run = replace(run, feed=replace(run.feed, samples_in=samples_in))
    place.train(run)
    assert outcome(run) == outcome(plain)
    assert [line.startswith("warning: ") for line in lines] == [True]


def test_a_scratch_folder_with_little_room_is_used_in_turn(place: TinyPlace, root: Path) -> None:
    """What is copied makes room for the next one: no warning."""
    run, lines = place.run("run", checkpoint__scratch=str(root), **SETTINGS), list[str]()
    size = sum(value.nbytes for value in saving.take(run, TrainState()).adapter.values())
    assert run.scratch is not None
    run = replace(run, scratch=replace(run.scratch, limit=8 * size, say=lines.append))
    place.train(run)
    assert lines == []
    assert steps_in(run.checkpoints)[0] == 6


def test_a_rollback_finds_what_is_still_being_copied(place: TinyPlace, root: Path) -> None:
    settings: dict[str, object] = {**SETTINGS, "safeguards__on_nonfinite": "rollback"}
    plain = bad_once(place.run("plain", **settings), 4)
    place.train(plain)
    fast = bad_once(place.run("fast", checkpoint__scratch=str(root), **settings), 4)
    copy = saving.copy_checkpoint

    def slow(source: Path, folder: Path) -> None:
        time.sleep(0.2)
        copy(source, folder)

    with patched(saving, "copy_checkpoint", slow):
        place.train(fast)
    assert outcome(fast) == outcome(plain)
    assert list(root.iterdir()) == []


def test_of_several_processes_the_main_one_writes(place: TinyPlace, root: Path) -> None:
    runs = [place.run("two", processes=each, checkpoint__scratch=str(root), **SETTINGS) for each in together(2)]
    assert [run.scratch is not None for run in runs] == [True, False]
    place.resume_together(runs)
    assert steps_in(runs[0].checkpoints)[0] == 6
    assert list(root.iterdir()) == []


def test_leftovers_of_a_killed_run_are_taken_over(tmp_path: Path, root: Path) -> None:
    checkpoints, lines = tmp_path / "run" / "checkpoints", list[str]()
    save_checkpoint(checkpoints, checkpoint_at(2))
    folder = killed_session(root, checkpoints, 2, 4, 6)  # step 2 was copied, and not yet removed
    damaged = folder / "step-000006" / "adapter.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (folder / ".step-000008.part").mkdir()
    take_over(checkpoints, lines.append)
    assert steps_in(checkpoints) == [4, 2]
    assert torch.equal(read_checkpoint(checkpoints / "step-000004").adapter["a"], torch.full((4, 4), 4.0))
    assert [line for line in lines if line.startswith("warning: ")] == [
        f"warning: {folder / 'step-000006'} is damaged and skipped"
    ]
    assert list(root.iterdir()) == []
    lines.clear()
    take_over(checkpoints, lines.append)
    assert lines == [], "once"


def test_what_a_newer_version_left_is_refused_and_kept(tmp_path: Path, root: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    folder = killed_session(root, checkpoints, 4)
    state = folder / "step-000004" / "state.json"
    document = json.loads(state.read_text())
    del document["sha256"]
    state.write_bytes(sealed_text(document | {"version": 99}))
    for _ in range(2):
        with pytest.raises(NewerVersion):
            take_over(checkpoints, print)
    assert steps_in(folder) == [4]


def test_a_scratch_folder_that_is_gone_costs_what_was_in_it(tmp_path: Path, root: Path) -> None:
    checkpoints, lines = tmp_path / "run" / "checkpoints", list[str]()
    save_checkpoint(checkpoints, checkpoint_at(2))
    killed_session(root, checkpoints, 4)
    shutil.rmtree(root)
    take_over(checkpoints, lines.append)
    assert "is gone" in lines[0]
    assert steps_in(checkpoints) == [2]


def test_the_next_run_removes_what_nobody_needs(tmp_path: Path, root: Path) -> None:
    waiting, copied, alive = (tmp_path / name / "checkpoints" for name in ("waiting", "copied", "alive"))
    folders = [killed_session(root, checkpoints, 4) for checkpoints in (waiting, copied, alive)]
    half_written = killed_session(root, tmp_path / "half" / "checkpoints")
    (half_written / ".step-000004.part").mkdir()
    save_checkpoint(copied, checkpoint_at(4))
    save_checkpoint(alive, checkpoint_at(4))
    lines = list[str]()
    (alive.parent / LOCK).touch()
    with ProgressFile(alive.parent), Scratch(str(root), tmp_path / "next" / "checkpoints", 0, 10**9, lines.append):
        assert [folder.exists() for folder in folders] == [True, False, True]
        assert not half_written.exists()
    assert [str(folders[0]) in line and str(waiting.parent) in line for line in lines] == [True]
    take_over(waiting, print)
    assert steps_in(waiting) == [4]


def test_only_folders_that_a_session_made_are_removed(tmp_path: Path, root: Path) -> None:
    users = [root / "lora-trainer-main", root / f"{PREFIX}notes", tmp_path / "elsewhere"]
    for folder in users:
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    made = killed_session(root, tmp_path / "run" / "checkpoints")
    shutil.copy(made / "owner.json", users[-1])
    (root / f"{PREFIX}link").symlink_to(users[-1])
    with Scratch(str(root), tmp_path / "next" / "checkpoints", 0, 10**9, print):
        assert not made.exists()
    assert [(folder / "thesis.txt").read_text() for folder in users] == ["mine"] * 3


@pytest.mark.parametrize("name", ["lora-trainer-outputs", f"{PREFIX}mine"])
def test_a_run_folder_of_somebody_else_names_nothing_that_is_removed(name: str, tmp_path: Path, root: Path) -> None:
    checkpoints, lines = tmp_path / "foreign" / "checkpoints", list[str]()
    save_checkpoint(checkpoints, checkpoint_at(2))
    save_checkpoint(root / name, checkpoint_at(4))
    (checkpoints / "scratch.json").write_text(json.dumps({"path": str(root / name)}))
    take_over(checkpoints, lines.append)
    assert steps_in(root / name) == [4]
    assert "nothing is copied from there" in lines[0]
    assert steps_in(checkpoints) == [2]


def test_a_copied_run_leaves_the_other_what_it_has(tmp_path: Path, root: Path) -> None:
    checkpoints, copied, lines = tmp_path / "run" / "checkpoints", tmp_path / "copy" / "checkpoints", list[str]()
    folder = killed_session(root, checkpoints, 4)
    shutil.copytree(checkpoints, copied)
    take_over(copied, lines.append)
    assert "stays" in lines[-1]
    assert steps_in(folder) == [4]
    take_over(checkpoints, lines.append)
    assert steps_in(copied) == steps_in(checkpoints) == [4]
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_moved_run_keeps_what_was_not_copied(is_replaced: bool, tmp_path: Path, root: Path) -> None:
    """Also where another run trains in its old place, with checkpoints of the same steps."""
    checkpoints, lines = tmp_path / "run" / "checkpoints", list[str]()
    folder = killed_session(root, checkpoints, 4)
    (tmp_path / "run").rename(tmp_path / "moved")
    if is_replaced:
        save_checkpoint(checkpoints, checkpoint_at(4))
    with Scratch(str(root), tmp_path / "next" / "checkpoints", 0, 10**9, lines.append):
        assert str(folder) in lines[0]
    moved = tmp_path / "moved" / "checkpoints"
    take_over(moved, print)
    assert steps_in(moved) == [4]


CHILD = """
import sys, time
from pathlib import Path
import torch
from lora_trainer.training.checkpoints import checkpoint
from lora_trainer.training.checkpoints.scratch import Scratch
from lora_trainer.training.state import TrainState

def checkpoint_at(step):
    weights = {"a": torch.full((4, 4), float(step))}
    return checkpoint.Checkpoint(TrainState(step=step), weights, {"state": {}, "param_groups": []}, None, {})

root, checkpoints, when = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
flush = checkpoint.flush_file

def hang(path):
    print("now", flush=True)
    time.sleep(600)

with Scratch(str(root), checkpoints, 0, 10**9, print) as scratch:
    for step in (2, 4):
        fast = checkpoint.save_checkpoint(scratch.folder, checkpoint_at(step))
        if step == 4 and when == "before":
            hang(fast)
        if step == 4 and when == "half":
            checkpoint.flush_file = hang
        checkpoint.copy_checkpoint(fast, checkpoints)
        if step == 4 and when == "after":
            hang(fast)
        checkpoint.remove(fast)
"""


def kill_a_child(program: str, *arguments: str) -> None:
    """Run a program until it prints a line, and kill it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
    assert line.strip() == b"now"


@pytest.mark.parametrize("when", ["half", "before", "after"])
def test_a_kill_loses_nothing(when: str, tmp_path: Path, root: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    kill_a_child(CHILD, str(root), str(checkpoints), when)
    assert steps_in(checkpoints) == ([4, 2] if when == "after" else [2]), "what was on the run's folder is there"
    (folder,) = root.iterdir()
    assert json.loads((checkpoints / "scratch.json").read_text())["path"] == str(folder)
    put_back(checkpoints)  # as the next run does
    remove_unfinished(checkpoints.parent)
    take_over(checkpoints, print)
    found, damaged = newest_valid(checkpoints)
    assert damaged == {}
    assert found is not None
    assert found[1].state.step == 4
    assert torch.equal(found[1].adapter["a"], torch.full((4, 4), 4.0))
    assert list(root.iterdir()) == []


WHOLE = """
import sys, time
from pathlib import Path
from lora_trainer.training.checkpoints import save as saving
from tests.training.checkpoints.test_scratch import SETTINGS
from tests.training.tiny_run import TinyPlace

copy = saving.copy_checkpoint

def hang(source, folder):
    if source.name == "step-000004":
        while True:
            time.sleep(0.05)
            if (source.parent / "step-000006").exists():
                print("now", flush=True)
                time.sleep(600)
    copy(source, folder)

saving.copy_checkpoint = hang
place = TinyPlace(*map(Path, sys.argv[1:5]))
place.train(place.run("killed", steps=8, checkpoint__scratch=sys.argv[5], **SETTINGS))
"""


def test_a_killed_run_resumes_from_the_scratch_folder(place: TinyPlace, root: Path) -> None:
    straight = place.run("straight", steps=8, **SETTINGS)
    place.train(straight)
    kill_a_child(WHOLE, str(place.model), str(place.data), str(place.folder), str(place.cache), str(root))
    run: Run = place.run("killed", steps=8, **SETTINGS)
    assert steps_in(run.checkpoints) == [2]
    take_over(run.checkpoints, print)
    assert steps_in(run.checkpoints)[0] == 6
    place.resume(run)
    assert outcome(run)["tensors"] == outcome(straight)["tensors"]
    assert list(root.iterdir()) == []
