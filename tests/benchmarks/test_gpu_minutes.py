"""`scripts/gpu_minutes.py`: what is left out, resumed, ended and written. Its clock and its processes are the tests' own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import gpu_minutes
from lora_trainer.benchmarks.table_rows import SPECS
from minutes import pages, schedule
from minutes.pages import NothingToWrite, regressed, summary, write_pages
from minutes.schedule import Workers, run_tasks
from minutes.tasks import ENDING, PARTS, Task, all_tasks, rehearsed, simulated
from tests.benchmarks.minutes_work import DEVICE

ROOT = Path(__file__).resolve().parents[2]
WORK = "tests.benchmarks.minutes_work:"
ORDER = {
    "describe": f"{WORK}describe",
    "loaded": ("json", "no_such_module"),
    "modules": ("tomllib", "lacking"),
    "environment": {},
    "rehearse": False,
}
QUICK = {name: ORDER[name] for name in ("describe", "loaded", "modules")}
posix = pytest.mark.skipif(os.name != "posix", reason="process groups and SIGKILL are POSIX's")


class Clock:
    """Moves only while a task is measured."""

    def __init__(self) -> None:
        self.now, self.kept = 1000.0, list[tuple[str, dict[str, Any]]]()

    def __call__(self) -> float:
        return self.now

    def run(self, tasks: list[Task], takes: dict[str, float], seconds: float, **before: set[str]) -> list[str]:
        """Measure with tasks that take these seconds, but are ended at their bound; the names of those left out."""

        def perform(task: Task, bound: float) -> dict[str, Any]:
            self.now += min(takes[task.name], bound)
            return {"rows": []} if takes[task.name] <= bound else {"failed": f"took longer than {bound:g} s"}

        def keep(task: Task, result: dict[str, Any], taken: float) -> None:
            self.kept.append((task.name, result))

        finished, failed = before.get("finished", set()), before.get("failed", set())
        late = run_tasks(tasks, finished, failed, self.now + seconds, perform, keep, self)
        return [task.name for task in late]


def task(
    name: str, seconds: float = 1.0, limit: float = 60.0, part: str = "steps", work: str = "process_of", **more: Any
) -> Task:
    return Task(name, part, seconds, limit, WORK + work, **more)


def test_what_does_not_fit_is_left_out_and_shorter_tasks_still_run():
    clock = Clock()
    tasks = [task("a", 40), task("long", 80), task("b", 30), task("c", 30)]
    assert clock.run(tasks, {"a": 50, "b": 30, "c": 30}, 120 + ENDING) == ["long"]
    assert [name for name, _ in clock.kept] == ["a", "b", "c"]
    assert clock.now == 1000 + 110


def test_the_time_is_never_exceeded():
    clock = Clock()
    tasks = [task(str(number), 10, limit=100) for number in range(8)]
    late = clock.run(tasks, {str(number): 1e9 for number in range(8)}, 240.0)
    assert clock.now == 1000 + 240 - ENDING
    assert [result["failed"] for _, result in clock.kept] == [f"took longer than {bound} s" for bound in (100, 100, 35)]
    assert late == ["3", "4", "5", "6", "7"]


def test_what_is_measured_is_not_measured_again_and_what_failed_comes_last():
    clock = Clock()
    tasks = [task(name) for name in "abcd"]
    clock.run(tasks, dict.fromkeys("abcd", 1.0), 60.0, finished={"b"}, failed={"a"})
    assert [name for name, _ in clock.kept] == ["c", "d", "a"]


def test_nine_minutes_are_enough_for_every_part_but_the_rest():
    planned, late = simulated(all_tasks(), 60 * gpu_minutes.MINUTES)
    assert {task.part for task in late} <= {"rest"}
    assert sum(task.seconds for task, _ in planned) <= 60 * gpu_minutes.MINUTES - ENDING
    assert [task.part for task in all_tasks()] == sorted((task.part for task in all_tasks()), key=list(PARTS).index)


def test_tasks_are_unique_bounded_and_cover_every_row_of_the_table():
    tasks = {task.name: task for task in all_tasks()}
    assert len(tasks) == len(all_tasks())
    assert {spec.name for spec in SPECS} <= set(tasks)
    assert all(task.part in PARTS and task.seconds < task.limit for task in tasks.values())
    rows = {(spec.family, spec.name) for spec in SPECS if spec.part == "memory"}
    families = [family for family, _ in rows]
    assert {family: families.count(family) for family in families} == dict.fromkeys(
        ("sd15", "sdxl", "sd3", "flux", "flux2", "z_image"), 2
    )
    assert {spec.cap_gib for spec in SPECS if spec.part == "memory"} == {8.0, 12.0, 24.0}


def test_a_rehearsal_has_every_part():
    tasks = rehearsed(all_tasks(), 60.0)
    assert {task.part for task in tasks} == set(PARTS)
    families = {spec.name: spec.family for spec in SPECS}
    memory = [families[task.name] for task in tasks if task.part == "memory" and task.name in families]
    assert sorted(memory) == ["sd15", "sd3", "sdxl"]
    assert not any(task.on_gpu for task in tasks)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    found = Workers(ORDER, tmp_path / "log.txt")
    try:
        yield found
    finally:
        found.close()


def test_a_part_has_a_process_of_its_own(workers):
    numbers = {}
    for name, part in (("a", "run"), ("b", "run"), ("c", "steps")):
        numbers[name] = workers.perform(task(name, part=part), 60.0)["rows"][0]["process"]
    assert numbers["a"] == numbers["b"] != numbers["c"]


def test_a_failing_task_stops_no_other(workers, tmp_path):
    assert workers.perform(task("bad", work="fail"), 60.0) == {"failed": "ValueError: a planted fault"}
    assert workers.perform(task("dies", work="end"), 60.0) == {"failed": "its process ended with code 9"}
    assert workers.perform(task("unknown", work="no_such_function"), 60.0)["failed"].startswith("AttributeError")
    for name in ("no_such_module", "lacking"):
        assert workers.perform(task(name, needs=(name,)), 60.0).keys() == {"skipped"}
    assert workers.perform(task("good", needs=("json", "tomllib")), 60.0)["rows"][0]["is_right"]
    assert "a planted fault" in (tmp_path / "log.txt").read_text("utf-8")


@posix
def test_a_hung_task_is_ended_at_its_bound_with_its_children(workers, tmp_path):
    file = tmp_path / "child"
    workers.facts("steps", 60.0)
    found = workers.perform(task("hangs", work="hang", arguments={"path": str(file)}), 3.0)
    assert found == {"failed": "took longer than 3 s"}
    assert has_ended(int(file.read_text("ascii")))
    assert workers.perform(task("next"), 60.0)["rows"]


def has_ended(process: int) -> bool:
    for _ in range(600):
        if not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_without_a_usable_gpu_what_needs_none_is_measured(tmp_path):
    workers = Workers({**ORDER, "describe": f"{WORK}describe_no_gpu"}, tmp_path / "log.txt")
    try:
        assert workers.perform(task("step"), 60.0) == {"skipped": "torch 0 is built without CUDA"}
        assert workers.perform(task("doctor", on_gpu=False), 60.0)["rows"]
    finally:
        workers.close()


# ---- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Its processes do what the tests say; its tasks are three quick ones."""
    monkeypatch.setattr(gpu_minutes, "ORDER", QUICK)
    monkeypatch.setattr(gpu_minutes, "all_tasks", lambda: [task("a"), task("b", work="fail"), task("c")])
    return monkeypatch


def run(folder: Path, *more: str) -> int:
    before = signal.getsignal(signal.SIGTERM)
    try:
        gpu_minutes.BEGAN = time.monotonic()
        return gpu_minutes.main(["--output", str(folder), *more])
    finally:
        signal.signal(signal.SIGTERM, before)


def results(folder: Path) -> list[tuple[str, set[str]]]:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").strip().splitlines()]
    assert all(line["device"] == DEVICE and line["versions"] for line in lines)
    return [(line["task"], line.keys() & {"rows", "failed", "skipped"}) for line in lines]


def test_results_are_kept_and_a_second_call_measures_what_is_missing(command, tmp_path):
    assert run(tmp_path) == 0
    assert results(tmp_path) == [("a", {"rows"}), ("b", {"failed"}), ("c", {"rows"})]
    command.setattr(gpu_minutes, "all_tasks", lambda: [task("a"), task("b"), task("c"), task("d")])
    assert run(tmp_path) == 0
    assert results(tmp_path)[3:] == [("d", {"rows"}), ("b", {"rows"})]
    assert run(tmp_path) == 0, "everything is measured"
    assert len(results(tmp_path)) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "results.jsonl", "summary.txt"]


def test_a_line_that_was_cut_is_measured_again(command, tmp_path):
    run(tmp_path)
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text("utf-8")[:-20], encoding="utf-8")
    command.setattr(gpu_minutes, "all_tasks", lambda: [task("a"), task("c")])
    assert run(tmp_path) == 0
    assert gpu_minutes.read_results(tmp_path).keys() == {"a", "b", "c"}


def test_a_row_that_is_not_right_gives_5(command, tmp_path):
    line = {"task": "x", "part": "run", "seconds": 1, "expected": 1, "device": DEVICE, "versions": {"torch": "0"}}
    (tmp_path / "results.jsonl").write_text(
        json.dumps(line | {"rows": [{"name": "x", "is_right": False}]}), encoding="utf-8"
    )
    assert run(tmp_path) == 5
    assert "1 row not right" in (tmp_path / "summary.txt").read_text("utf-8")


def test_no_gpu_gives_2(command, tmp_path, capsys):
    command.setattr(gpu_minutes, "ORDER", QUICK | {"describe": f"{WORK}describe_no_gpu"})
    command.setattr(gpu_minutes, "GPU_FILES", ("no-such-device",))
    assert run(tmp_path / "new") == 2
    assert "--rehearse" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    command.setattr(gpu_minutes, "GPU_FILES", ("null",))  # a GPU that torch cannot use
    assert run(tmp_path) == 0
    assert {next(iter(kind)) for _, kind in results(tmp_path)} == {"skipped"}


def test_results_of_another_device_are_not_mixed(command, tmp_path, capsys):
    run(tmp_path)
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text("utf-8").replace(DEVICE, "another"), encoding="utf-8")
    command.setattr(gpu_minutes, "all_tasks", lambda: [task("z")])
    assert run(tmp_path) == 2
    assert "another" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "--minutes", "0")
    assert ended.value.code == 2


@posix
def test_a_killed_command_leaves_no_process_and_resumes(tmp_path):
    """Killed while a task hangs: what was measured before is kept, and the process that hung ends itself."""
    child = tmp_path / "child"
    code = (
        "import gpu_minutes; from minutes.tasks import Task; "
        f"gpu_minutes.ORDER = {QUICK!r}; "
        f"gpu_minutes.all_tasks = lambda: [Task('a', 'run', 1, 60, {WORK + 'process_of'!r}), "
        f"Task('b', 'run', 1, 600, {WORK + 'hang'!r}, {{'path': {str(child)!r}}})]; "
        f"gpu_minutes.main(['--output', {str(tmp_path)!r}])"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    while not child.is_file() or not child.read_text("ascii"):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert has_ended(int(child.read_text("ascii")))
    assert results(tmp_path) == [("a", {"rows"})]


# ---- pages


STEP = {
    "name": "sdxl 1024 in 8 GB",
    "model": "sdxl, 1024 px, random weights",
    "seconds_median": 0.5,
    "seconds_p90": 0.6,
    "peak_gib": 6.5,
    "predicted_gib": 6.4,
    "context_gib": 0.512,
    "fragmentation": 0.0713,
    "is_right": True,
}
EAGER = STEP | {"name": "sdxl 1024 eager", "seconds_median": 0.25, "seconds_p90": 0.26, "losses": [1.0, 2.0]}
ATTENTION = {"name": "flash", "model": "sdxl", "shape": "all layers", "ratio": 0.2, "seconds_median": 0.001}


def line(name: str, part: str, rows: list[dict[str, Any]], device: str = "NVIDIA H100 80GB HBM3") -> dict[str, Any]:
    head = {
        "task": name,
        "part": part,
        "seconds": 8.0,
        "expected": 9.0,
        "device": device,
        "versions": {"torch": "2.11.0"},
    }
    return head | {"rows": rows}


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    whole = ATTENTION | {"seconds_p90": 0.002, "peak_gib": 0.1, "is_right": True}
    skipped = line("sdxl 1024 nf4", "quantized", [])
    del skipped["rows"]
    return [
        line("GPU against CPU", "run", [{"name": "losses", "largest": 1e-5, "bound": 1e-3, "is_right": True}]),
        line("sdxl 1024 in 8 GB", "memory", [STEP]),
        line("sdxl 1024 eager", "steps", [EAGER]),
        line("attention", "attention", [whole, whole | {"shape": "4096", "seconds_median": 9.0}]),
        skipped | {"skipped": "bitsandbytes cannot be imported"},
    ]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copies of the files that are written."""
    for name in (pages.PAGE, pages.PLANNER, pages.BASELINE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), encoding="utf-8")
    return tmp_path


def test_pages_constants_and_baseline_are_written(lines, checkout):
    write_pages(checkout, lines)
    page = (checkout / pages.PAGE).read_text("utf-8")
    before, section, after = re.split(r"<!-- gpu_minutes: (?:begin|end) -->", page)
    assert "| sdxl 1024 eager | 250.0 | 260.0 | 1.00 |" in section
    assert "| sdxl 1024 in 8 GB | 500.0 | 600.0 | 2.00 |" in section
    assert "bitsandbytes cannot be imported" in section
    original = (ROOT / pages.PAGE).read_text("utf-8")
    assert original.startswith(before)
    assert original.endswith(after)
    planner = (checkout / pages.PLANNER).read_text("utf-8")
    assert re.search(r"^CONTEXT_GIB = 0\.52 ", planner, re.MULTILINE)
    assert re.search(r"^FRAGMENTATION = 0\.072 ", planner, re.MULTILINE)
    compile(planner, pages.PLANNER, "exec")
    baseline = json.loads((checkout / pages.BASELINE).read_text("utf-8"))
    stored = json.loads((ROOT / pages.BASELINE).read_text("utf-8"))
    assert {part: baseline[part] for part in stored if part != "gpu"} == {p: stored[p] for p in stored if p != "gpu"}
    assert [row["name"] for row in baseline["gpu"]["rows"]] == ["sdxl 1024 in 8 GB", "sdxl 1024 eager", "flash"]
    written = {name: (checkout / name).read_text("utf-8") for name in (pages.PAGE, pages.PLANNER, pages.BASELINE)}
    write_pages(checkout, lines)
    assert written == {name: (checkout / name).read_text("utf-8") for name in written}, "written again, nothing changes"


@pytest.mark.parametrize(
    ("name", "lost"), [(pages.PAGE, pages.BEGIN), (pages.PAGE, pages.END), (pages.PLANNER, "FRAGMENTATION = ")]
)
def test_nothing_is_written_where_one_of_them_has_no_place(lines, checkout, name, lost):
    text = (checkout / name).read_text("utf-8")
    (checkout / name).write_text(text.replace(lost, "", 1), encoding="utf-8")
    before = {each: (checkout / each).read_bytes() for each in (pages.PAGE, pages.PLANNER, pages.BASELINE)}
    with pytest.raises(NothingToWrite):
        write_pages(checkout, lines)
    assert before == {each: (checkout / each).read_bytes() for each in before}


def test_a_later_measurement_is_held_against_the_baseline(lines, checkout):
    assert regressed(checkout, lines) == []
    write_pages(checkout, lines)
    assert regressed(checkout, lines) == []
    lines[2] = line("sdxl 1024 eager", "steps", [EAGER | {"seconds_median": 0.3, "seconds_p90": 0.31}])
    assert len(regressed(checkout, lines)) == 1
    assert regressed(checkout, [each | {"device": "another"} for each in lines]) == []


def test_a_rehearsal_is_never_written(lines, checkout):
    rehearsed = [each | {"device": "x86_64 CPU, 1 thread, rehearsed"} for each in lines]
    for nothing in (rehearsed, []):
        with pytest.raises(NothingToWrite):
            write_pages(checkout, nothing)
    assert (checkout / pages.PLANNER).read_text("utf-8") == (ROOT / pages.PLANNER).read_text("utf-8")
    assert gpu_minutes.main(["--output", str(checkout / "none"), "--write"]) == 2


def test_the_summary_has_what_was_left_out_and_why(lines):
    text = summary(lines, [task("flux 512", 10)])
    assert "left out: sdxl 1024 nf4: bitsandbytes cannot be imported" in text
    assert "flux 512 (about 10 s)" in text
    assert schedule.answer({"work": f"{WORK}fail", "arguments": {}}, rehearse=False) == {
        "failed": "ValueError: a planted fault"
    }


def test_losses_are_held_against_the_dense_row_within_its_bound(lines):
    int8 = STEP | {"name": "sdxl 1024 int8", "losses": [1.01, 2.02], "context_gib": None}
    for losses, is_right in (([1.01, 2.02], True), ([1.1, 2.2], False)):
        rows = [line("sdxl 1024 int8", "quantized", [int8 | {"losses": losses}])]
        (row,) = pages.checked([*lines, *rows])[-1]["rows"]
        assert row["is_right"] is is_right
        assert row["ratio"] == 2.0
        assert row["loss_mean"] == pytest.approx(losses[0] - 1)
