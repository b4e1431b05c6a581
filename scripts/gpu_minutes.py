"""Measure what only a GPU can show, in at most nine minutes, the most useful first; then write it into the pages.

    python scripts/gpu_minutes.py --list
    python scripts/gpu_minutes.py --output FOLDER
    python scripts/gpu_minutes.py --output FOLDER --write
    python scripts/gpu_minutes.py --output FOLDER --rehearse

Each part is measured in a process of its own, and what does not fit into the time that is left is left out. The
same command measures what is missing. FOLDER has results.jsonl, log.txt and summary.txt. It needs no installation: a checkout,
and its dependencies on PYTHONPATH. `--rehearse` runs the same tasks with thin models on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]  # a checkout that is not installed

from lora_trainer.core.errors import DONE, TRAINING_FAILED, WRONG_USAGE, UserError  # noqa: E402
from minutes.pages import NothingToWrite, checked, line_of, regressed, summary, write_pages  # noqa: E402
from minutes.schedule import Result, Workers, run_tasks  # noqa: E402
from minutes.tasks import PARTS, Task, all_tasks, rehearsed, simulated  # noqa: E402

MINUTES = 9.0
RESULTS, LOG, SUMMARY = "results.jsonl", "log.txt", "summary.txt"
ORDER = {
    "describe": "minutes.work:describe_device",
    "loaded": ("minutes.work", "check_regressions", "lora_trainer.benchmarks.measure_row", "diffusers", "peft"),
    "modules": ("bitsandbytes", "pytest", "hypothesis"),
}
ON_A_CPU = 600.0  # seconds that a rehearsed task may take on a busy machine
GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")  # in /dev: NVIDIA's, WSL's, AMD's


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, list or write. The exit code: 0, 2 without a GPU, 5 where a result is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-minutes"), metavar="FOLDER", help="gpu-minutes")
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="M", help=f"time for all of it ({MINUTES:g})")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable: one of the parts (all)")
    parser.add_argument("--list", action="store_true", help="print what would be measured, and when")
    parser.add_argument("--rehearse", action="store_true", help="thin models on the CPU: shows that everything runs")
    parser.add_argument("--write", action="store_true", help="write the results into docs, planner and regressions")
    chosen = parser.parse_args(arguments)
    if not chosen.minutes > 0:
        parser.error(f"--minutes is {chosen.minutes:g}, must be above 0")
    tasks = [task for task in all_tasks() if chosen.part is None or task.part in chosen.part]
    if chosen.list:
        print_list(tasks, chosen.minutes)
        return DONE
    try:
        if chosen.write:
            print("\n".join(write_pages(ROOT, list(read_results(chosen.output).values()))))
            return DONE
        return measure(tasks, chosen.output, BEGAN + 60 * chosen.minutes, rehearse=chosen.rehearse)
    except NothingToWrite as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE


def print_list(tasks: Sequence[Task], minutes: float) -> None:
    """The tasks in their order with their expected seconds."""
    planned, late = simulated(tasks, 60 * minutes)
    for part, title in PARTS.items():
        own = [(task, start) for task, start in planned if task.part == part]
        if own:
            print(f"{part}: {title} ({sum(task.seconds for task, _ in own):.0f} s)")
        for task, start in own:
            print(f"  {int(start) // 60}:{int(start) % 60:02}  {task.seconds:4.0f} s  {task.name}")
    total = sum(task.seconds for task, _ in planned)
    print(f"{len(planned)} of {len(tasks)} tasks in about {total:.0f} s of {60 * minutes:.0f}")
    if late:
        left = sum(task.seconds for task in late)
        print(f"left for another call, about {left:.0f} s: {'; '.join(task.name for task in late)}")


def measure(tasks: Sequence[Task], folder: Path, end: float, *, rehearse: bool) -> int:
    """Measure what is missing in a folder until the clock is at `end`. The exit code."""
    if rehearse:
        tasks = rehearsed(tasks, ON_A_CPU)
    results = read_results(folder)
    finished = {name for name, line in results.items() if "rows" in line}
    missing = [task for task in tasks if task.name not in finished]
    if not missing:
        print(f"Everything is measured: {folder / RESULTS}")
        return DONE
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl+C: processes are ended below
    # A busy CPU computes tiny models sooner in one thread.
    environment = {"OMP_NUM_THREADS": "1"} if rehearse else {}
    workers = Workers({**ORDER, "environment": environment, "rehearse": rehearse}, folder / LOG)
    try:
        facts = workers.facts(missing[0].part, end - time.monotonic())
        if problem := problem_with(facts, results):
            print(f"error: {problem}", file=sys.stderr)
            if facts is not None and not was_there:  # else the log says why
                shutil.rmtree(folder, ignore_errors=True)
            return WRONG_USAGE
        assert facts is not None
        print(f"{facts['device']}: libraries loaded in {facts['import_seconds']:.1f} s", flush=True)
        if facts["reason"]:
            print(f"The GPU cannot be used: {facts['reason']}", flush=True)
        head = {name: facts[name] for name in ("device", "versions")}

        def keep(task: Task, result: Result, taken: float) -> None:
            line = {"task": task.name, "part": task.part, "seconds": round(taken, 1), "expected": task.seconds}
            results[task.name] = line | head | result
            with (folder / RESULTS).open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(results[task.name]))  # a line that was cut ends here
            print(line_of(checked(list(results.values()))[list(results).index(task.name)]), flush=True)

        failed = {name for name, line in results.items() if "failed" in line}
        late = run_tasks(tasks, finished, failed, end, workers.perform, keep)
    finally:
        workers.close()
    lines = checked(list(results.values()))
    text = summary(lines, late)
    (folder / SUMMARY).write_text(text, encoding="utf-8")
    print(text.partition("\n\n")[0])  # what was left out, and why
    print(f"results: {folder / SUMMARY}, {folder / RESULTS}")
    worse = [] if rehearse else regressed(ROOT, lines)
    for problem in worse:
        print(problem)
    wrong = [row for line in lines for row in line.get("rows", ()) if not row["is_right"]]
    return TRAINING_FAILED if worse or wrong else DONE


def problem_with(facts: Mapping[str, Any] | None, results: Mapping[str, Any]) -> str | None:
    """Why nothing can be measured here."""
    if facts is None:
        return f"The process that measures did not start. {LOG} says why."
    if facts["reason"] and not any(any(Path("/dev").glob(name)) for name in GPU_FILES):
        return f"There is no GPU here ({facts['reason']}). --rehearse runs the same tasks with thin models on the CPU."
    others = {line["device"] for line in results.values()} - {facts["device"]}
    if others:
        return f"The results are of {', '.join(sorted(others))}, and this is {facts['device']}. Name another --output."
    return None


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The last line of each task. A line that was cut when a call was killed counts as not there."""
    file, found = folder / RESULTS, dict[str, dict[str, Any]]()
    for text in file.read_text("utf-8").splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["task"]] = line
    return found


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
