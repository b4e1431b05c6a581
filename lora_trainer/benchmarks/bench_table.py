"""`bench table`: the table of a GPU, filled by one command within its time.

Rows are in the order of their worth. Each is measured in a process of its own and written as soon as it is there, so
that a crash costs one row and the next call continues where this one ended. Without a GPU `--tiny` takes the same rows
of thin models at an eighth of the side, uncapped: that shows that each row runs, and nothing of its speed.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lora_trainer.benchmarks.baseline import SavedRows
from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.measure_row import RowSettings, measure_and_write, prove_cap
from lora_trainer.benchmarks.measures import Report, RequestedMeasure, Row
from lora_trainer.benchmarks.table_rows import COLUMNS, SPECS, Spec, compare_with
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import read_json

MINUTES = 25.0
FILE = "bench-table.json"
PRELOADED = ["lora_trainer.benchmarks.measure_row"]
CAP_FAILED = "the cap does not hold here: a process that passed it was not stopped"
ABOUT = {
    "ms": "median of the timed steps; p90: a tenth of them took longer",
    "ratio": "time over the plain row of the same model",
    "TFLOP/s": "operations of the step, from the plan, over its time",
    "GiB": "the most that was allocated at once, warm-up included; predicted: by the plan",
    "reserved": "the most that torch's allocator held",
    "loss": "mean relative difference of the first 20 steps' losses from the plain row's, same samples and noise",
    "base": "what the frozen weights are stored in; blocks: how many are recomputed in the backward pass",
    "graphs": "that torch.compile made",
}


def measure(request: RequestedMeasure) -> Report:
    """Fill the table, or what is missing of it. Raises UsageError for a file of another device."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not request.tiny:
        fix = "bench table --tiny shows that every row runs."
        raise UsageError(Problem("no_gpu", "There is no CUDA GPU here.", fix))
    how = RowSettings(steps=request.steps or RowSettings.steps)
    if request.tiny:
        how = RowSettings(1, request.steps or 2, tiny=True)
    names = request.filter(spec.name for spec in SPECS)
    wanted = [spec for spec in SPECS if spec.name in names]
    left_out = list[Spec]()
    if not on_gpu and request.only is None:
        left_out = [spec for spec in wanted if spec.settings.get("compile.enabled")]
    wanted = [spec for spec in wanted if spec not in left_out]
    saved = SavedRows.read(request.rows or Path(FILE), "table", device_name())
    fill_table(wanted, saved, how, 60.0 * (request.minutes or MINUTES))
    rows = {spec.name: row for spec in wanted if (row := find_row(saved, spec.name)) is not None}
    notes = describe(wanted, rows, saved, on_gpu=on_gpu)
    if left_out:
        notes.append(f"Left out, since nothing is compiled on a CPU: {', '.join(spec.name for spec in left_out)}.")
    return Report(list(rows.values()), ABOUT, notes, COLUMNS, first="row")


def find_row(saved: SavedRows, name: str | None) -> Row | None:
    """A row that is there already."""
    if name not in saved.rows:
        return None
    return Row.from_json({key: value for key, value in saved.rows[name].items() if key != "key"})


def fill_table(specs: Sequence[Spec], saved: SavedRows, how: RowSettings, seconds: float) -> None:
    """Measure what is missing, the rows that failed before last, while there is time. Each row is saved at once."""
    end = time.monotonic() + seconds
    missing = [spec for spec in specs if spec.name not in saved.rows]
    missing += [spec for spec in specs if spec.name in saved.rows and saved.rows[spec.name].get("failed")]
    cap: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for spec in missing:
            left = end - time.monotonic()
            if left < min(spec.seconds, seconds) / 4:  # most rows take a quarter of what they may
                continue
            if spec.cap_gib is not None and torch.cuda.is_available():
                if cap is None:
                    cap = run_in_child(prove_cap, (), Path(folder) / "cap.json", 60.0)
                if not cap.get("holds"):
                    failed = Row(spec.name, spec.family, figures={"failed": cap.get("failed") or CAP_FAILED})
                    saved.save(spec.name, failed.to_json())
                    continue
            sys.stderr.write(f"{spec.name} …\n")
            found = run_in_child(measure_and_write, (spec, how), Path(folder) / "row.json", min(spec.seconds, left))
            row = Row.from_json({"name": spec.name, "model": spec.family, **found})
            saved.save(spec.name, compare_with(row, find_row(saved, spec.like)).to_json())


def run_in_child(work: Callable[..., None], arguments: tuple[Any, ...], path: Path, seconds: float) -> dict[str, Any]:
    """What the work wrote in a process of its own; where it wrote nothing, how it ended, as `failed`."""
    path.unlink(missing_ok=True)
    # With a GPU every process starts from nothing; else from one that has loaded the libraries.
    quick = not torch.cuda.is_available() and "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if quick else "spawn")
    if quick:
        context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=work, args=(*arguments, str(path)))
    process.start()
    try:
        process.join(seconds)
    finally:  # also when this process is stopped: nothing stays on the GPU
        is_late = process.is_alive()
        if is_late:
            process.kill()
            process.join()
    if path.is_file():
        found: dict[str, Any] = read_json(path)
        return found
    if is_late:
        return {"failed": f"took longer than {seconds:.3g} s"}
    return {"failed": f"the process ended with code {process.exitcode}"}


def describe(wanted: Sequence[Spec], rows: dict[str, Row], saved: SavedRows, *, on_gpu: bool) -> list[str]:
    """What was not measured, and why."""
    notes = [f"{name}: {row['failed']}" for name, row in rows.items() if row["failed"]]
    late = [spec.name for spec in wanted if spec.name not in rows]
    if late:
        notes.append(f"No time was left for {', '.join(late)}; the same command continues with them.")
    if on_gpu:
        notes.append("A capped GPU shows that a row fits, not how fast a GPU of that size is.")
    else:
        notes.append("No GPU: rows show that they run. Nothing is capped, and speed of a CPU says nothing of a GPU's.")
    notes.append(f"Rows are kept in {saved.path}.")
    return notes
