"""A fast folder that checkpoints are written to first: nothing is lost, whatever ends the run, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.core.io import remove_unfinished
from lora_trainer.training.checkpoints import save as saving
from lora_trainer.training.checkpoints import scratch as scratching
from lora_trainer.training.checkpoints.best import read_best, write_best
from lora_trainer.training.checkpoints.checkpoint import (
    Checkpoint,
    list_checkpoints,
    newest_valid,
    put_back,
    read_checkpoint,
    save_checkpoint,
    step_of,
    write_checkpoint,
)
from lora_trainer.training.checkpoints.scratch import Scratch, place_in, take_over
from lora_trainer.training.run import Run
from lora_trainer.training.state import TrainState
from tests.recipes.recipe import patched
from tests.training.test_returning import bad_once
from tests.training.tiny_run import TinyPlace, outcome, together

SETTINGS: dict[str, object] = {"validation__every_n_steps": 2, "checkpoint__every_n_steps": 2}


def test_auto_takes_the_place_that_is_fast_enough_to_be_worth_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, memory, disk, gone = (tmp_path / name for name in ("run", "memory", "disk", "gone"))
    for folder in (run, memory, disk):
        folder.mkdir()
    monkeypatch.setattr(scratching, "AUTO_PLACES", (str(memory), str(disk), str(gone)))
    monkeypatch.setattr(scratching, "LEFT_FREE", 0.0)
    lines = list[str]()
    for speeds, expected in (
        ({run: 1e8, memory: 2e9, disk: 3e8}, memory),
        ({run: 1e8, memory: 3e8, disk: 5e8}, disk),
        ({run: 1e9, memory: 1.9e9, disk: 1e8}, None),
    ):
        monkeypatch.setattr(scratching, "bytes_per_second", speeds.__getitem__)
        assert scratching.fastest_place(run, 10**6, 10**9, lines.append) == expected
    assert str(memory) in lines[0]
    assert scratching.fastest_place(run, 10**6, 10**5, lines.append) is None, "a checkpoint is above the limit"
    assert scratching.fastest_place(run, 2**62, 2**63, lines.append) is None, "no place has so much room"
    monkeypatch.setattr(scratching, "LEFT_FREE", 1.1)
    assert scratching.fastest_place(run, 0, 1, lines.append) is None, "a share stays free for others"


def test_the_speed_of_a_folder_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    assert scratching.bytes_per_second(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        scratching.bytes_per_second(tmp_path / "gone")


def checkpoint_at(step: int) -> Checkpoint:
    weights = {"a": torch.full((4, 4), float(step))}
    return Checkpoint(TrainState(step=step), weights, {"state": {}, "param_groups": []}, None, {})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch folder on this machine's disk, however full that is."""
    monkeypatch.setattr(scratching, "LEFT_FREE", 0.0)
    (tmp_path / "fast").mkdir()
    return tmp_path / "fast"


@contextmanager
def killed_session(root: Path, checkpoints: Path) -> Iterator[Path]:
    """The folder of a session that is killed at the end of the block."""
    scratch = Scratch(root, checkpoints, 10**9, print).__enter__()
    assert scratch.folder is not None
    yield scratch.folder
    assert scratch._lock is not None
    scratch._lock.release()  # as the system does


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
    with killed_session(root, checkpoints) as folder:
        write_checkpoint(folder, checkpoint_at(2))  # copied, and not yet removed
        write_checkpoint(folder, checkpoint_at(4))
        write_best(folder, 3, {"a": torch.ones(2)})
        damaged = write_checkpoint(folder, checkpoint_at(6)) / "adapter.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        (folder / ".step-000008.part").mkdir()
    take_over(checkpoints, lines.append)
    assert steps_in(checkpoints) == [4, 2]
    assert torch.equal(read_checkpoint(checkpoints / "step-000004").adapter["a"], torch.full((4, 4), 4.0))
    assert read_best(checkpoints, 3) is not None
    assert next(line for line in lines if "damaged" in line).startswith(f"warning: {folder / 'step-000006'} is damaged")
    assert list(root.iterdir()) == []
    take_over(checkpoints, lines.append)
    assert len(lines) == 2, "once"


def test_a_scratch_folder_that_is_gone_costs_what_was_in_it(tmp_path: Path, root: Path) -> None:
    checkpoints, lines = tmp_path / "run" / "checkpoints", list[str]()
    save_checkpoint(checkpoints, checkpoint_at(2))
    with killed_session(root, checkpoints) as folder:
        write_checkpoint(folder, checkpoint_at(4))
    shutil.rmtree(root)
    take_over(checkpoints, lines.append)
    assert "is gone" in lines[0]
    assert steps_in(checkpoints) == [2]


def test_the_next_run_removes_what_nobody_needs(tmp_path: Path, root: Path) -> None:
    waiting, copied = (tmp_path / name / "checkpoints" for name in ("waiting", "copied"))
    for checkpoints in (waiting, copied):
        with killed_session(root, checkpoints) as folder:
            write_checkpoint(folder, checkpoint_at(4))
    save_checkpoint(copied, checkpoint_at(4))
    place, elsewhere, lines = place_in(root), tmp_path / "elsewhere", list[str]()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    link = place / ("0" * 32)
    link.symlink_to(elsewhere)
    with killed_session(root, tmp_path / "alive" / "checkpoints") as alive:
        with Scratch(root, tmp_path / "next" / "checkpoints", 10**9, lines.append) as scratch:
            assert scratch.folder is not None
            kept = {path.name for path in place.iterdir()} - {link.name, scratch.folder.name, alive.name}
        assert len(kept) == 1
        assert "--resume of" in lines[0]
        assert str(waiting.parent) in lines[0]
        assert alive.exists()
    assert (elsewhere / "file").exists()
    take_over(waiting, lines.append)
    assert steps_in(waiting) == [4]


def test_only_folders_that_a_session_made_are_removed(tmp_path: Path, root: Path) -> None:
    """Whatever its name and age: a checkout beside ours, or one below ours that no session made."""
    with killed_session(root, tmp_path / "run" / "checkpoints"):
        pass
    place = place_in(root)
    users = [root / "lora-trainer-main", root / ("a" * 32), place / "notes", place / ("b" * 32)]
    for folder in users:
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
        os.utime(folder, (0, 0))
    half_made = place / ("c" * 32)
    half_made.mkdir()
    os.utime(half_made, (0, 0))
    with Scratch(root, tmp_path / "next" / "checkpoints", 10**9, print):
        assert not half_made.exists()
    assert [(folder / "thesis.txt").read_text() for folder in users] == ["mine"] * 4


@pytest.mark.parametrize("parents", ["", f"{place_in(Path()).name}/"])
def test_a_run_folder_of_somebody_else_names_nothing_that_is_removed(parents: str, tmp_path: Path, root: Path) -> None:
    checkpoints, lines = tmp_path / "foreign" / "checkpoints", list[str]()
    save_checkpoint(checkpoints, checkpoint_at(2))
    for name in ("lora-trainer-outputs", "a" * 32):
        named = root / f"{parents}{name}"
        write_checkpoint(named, checkpoint_at(4))
        (checkpoints / "scratch.json").write_text(json.dumps({"folder": str(named)}))
        take_over(checkpoints, lines.append)
        assert steps_in(named) == [4]
        assert "it is left alone" in lines.pop()
    assert steps_in(checkpoints) == [2]


def test_a_copied_run_takes_nothing_from_the_other(tmp_path: Path, root: Path) -> None:
    checkpoints, copied, lines = tmp_path / "run" / "checkpoints", tmp_path / "copy" / "checkpoints", list[str]()
    with killed_session(root, checkpoints) as folder:
        write_checkpoint(folder, checkpoint_at(4))
        shutil.copytree(checkpoints, copied)
        take_over(copied, lines.append)
        assert "is in use by the run" in lines.pop()
        assert steps_in(copied) == []
        assert steps_in(folder) == [4]
    take_over(copied, lines.append)
    assert "stays" in lines[-1]
    take_over(checkpoints, lines.append)
    assert steps_in(copied) == steps_in(checkpoints) == [4]
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_moved_run_keeps_what_was_not_copied(is_replaced: bool, tmp_path: Path, root: Path) -> None:
    """Also where another run trains in its old place, with checkpoints of the same steps."""
    checkpoints, lines = tmp_path / "run" / "checkpoints", list[str]()
    with killed_session(root, checkpoints) as folder:
        write_checkpoint(folder, checkpoint_at(4))
        write_best(folder, 3, {"a": torch.ones(2)})
    (tmp_path / "run").rename(tmp_path / "moved")
    if is_replaced:
        save_checkpoint(checkpoints, checkpoint_at(4))
    with Scratch(root, tmp_path / "next" / "checkpoints", 10**9, lines.append):
        assert str(folder) in lines[0]
        assert "where that run is not any more" in lines[0]
    moved = tmp_path / "moved" / "checkpoints"
    take_over(moved, print)
    assert steps_in(moved) == [4]
    assert read_best(moved, 3) is not None


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

with Scratch(root, checkpoints, 10**9, print) as scratch:
    for step in (2, 4):
        fast = checkpoint.write_checkpoint(scratch.folder, checkpoint_at(step))
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
    (folder,) = place_in(root).iterdir()
    assert json.loads((checkpoints / "scratch.json").read_text())["folder"] == str(folder)
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
