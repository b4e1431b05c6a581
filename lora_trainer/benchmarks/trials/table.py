"""`bench table`: the table of a GPU, filled by one command within its time.

Rows are in the order of their worth. Each is measured in a process of its own and written as soon as it is there, so
that a crash costs one row and the next call continues where this one ended. Without a GPU `--tiny` takes the same rows
of thin models at an eighth of the side: that shows that each row runs, and nothing of its speed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lora_trainer.benchmarks.baseline import read_measurement
from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.measures import Column, Report, RequestedMeasure, figure, milliseconds
from lora_trainer.benchmarks.trials.cap import prove_cap
from lora_trainer.benchmarks.trials.row import Asking, child
from lora_trainer.benchmarks.trials.specs import SPECS, Spec, TableRow, beside, row_of_document
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import package_versions
from lora_trainer.core.io import read_json, write_json

MINUTES = 25.0
FILE = "bench-table.json"
PRELOADED = ["lora_trainer.benchmarks.trials.row"]
CAP_FAILED = "the cap does not hold here: a process that passed it was not stopped"


def measure(asked: RequestedMeasure) -> Report:
    """Fill the table, or what is missing of it. Raises UsageError for a file of another device."""
    path = asked.rows or Path(FILE)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not asked.tiny:
        raise UsageError(
            Problem("no_gpu", "There is no CUDA GPU here.", "bench table --tiny shows that every row runs.")
        )
    asking = Asking(1, asked.steps or 2, tiny=True) if asked.tiny else Asking(steps=asked.steps or Asking.steps)
    wanted = [spec for spec in SPECS if asked.only is None or asked.only in spec.name]
    late = [spec for spec in wanted if spec.settings.get("compile.enabled") and not on_gpu and asked.only is None]
    wanted = [spec for spec in wanted if spec not in late]
    if not wanted:
        raise UsageError(
            Problem(
                "no_row_of_that_name",
                f"No row has {asked.only!r} in its name.",
                f"Rows: {', '.join(s.name for s in SPECS)}.",
            )
        )
    device = device_name()
    rows = fill(wanted, rows_in(path, device), asking, path, device, 60.0 * (asked.minutes or MINUTES))
    ordered = [rows[spec.name] for spec in wanted if spec.name in rows]
    notes = notes_on(wanted, rows, path, on_gpu=on_gpu)
    if late:
        notes.append(f"Left out, since nothing is compiled on a CPU: {', '.join(spec.name for spec in late)}.")
    return Report(ordered, ABOUT, notes, COLUMNS, first="row", text=markdown(ordered, device))


def fill(
    specs: Sequence[Spec], rows: dict[str, TableRow], asking: Asking, path: Path, device: str, seconds: float
) -> dict[str, TableRow]:
    """Measure what is missing, the rows that failed before last, while there is time. Each row is written at once."""
    end = time.monotonic() + seconds
    missing = [spec for spec in specs if spec.name not in rows]
    missing += [spec for spec in specs if spec.name in rows and rows[spec.name].failed]
    holds = None
    with tempfile.TemporaryDirectory() as folder:
        for spec in missing:
            left = end - time.monotonic()
            if left < min(spec.seconds, seconds) / 4:  # most rows take a quarter of what they may
                continue
            if spec.cap_gib is not None and torch.cuda.is_available():
                holds = in_child(prove_cap, (), Path(folder) / "cap.json", 60.0) if holds is None else holds
                if not holds.get("holds"):
                    rows[spec.name] = TableRow(spec.name, spec.family, failed=holds.get("failed") or CAP_FAILED)
                    continue
            sys.stderr.write(f"{spec.name} …\n")
            found = in_child(child, (spec, asking), Path(folder) / "row.json", min(spec.seconds, left))
            row = row_of_document(found | {"name": spec.name, "model": found.get("model", spec.family)})
            rows[spec.name] = beside(row, rows.get(spec.like or ""))
            write(path, rows, device)
    return rows


def in_child(work: Any, arguments: tuple[Any, ...], path: Path, seconds: float) -> dict[str, Any]:
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
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
    if path.is_file():
        found: dict[str, Any] = read_json(path)
        return found
    return {
        "failed": f"took longer than {seconds:.3g} s" if late else f"the process ended with code {process.exitcode}"
    }


def rows_in(path: Path, device: str) -> dict[str, TableRow]:
    """The rows that a file has already, by name. Raises UsageError where it is another device's."""
    if not path.is_file():
        return {}
    document = read_measurement(path)
    if document.get("device") != device:
        problem = f"{path} is of {document.get('device')}, and this is {device}."
        raise UsageError(Problem("baseline_differs", problem, "Name another file with --rows."))
    return {row.name: row for row in map(row_of_document, document["rows"])}


def write(path: Path, rows: Mapping[str, TableRow], device: str) -> None:
    document = {"device": device, "versions": package_versions(), "rows": [asdict(row) for row in rows.values()]}
    write_json(path, document)


def notes_on(wanted: Sequence[Spec], rows: Mapping[str, TableRow], path: Path, *, on_gpu: bool) -> list[str]:
    """What was not measured, and why."""
    notes = [f"{row.name}: {row.failed}" for spec in wanted if (row := rows.get(spec.name)) and row.failed]
    late = [spec.name for spec in wanted if spec.name not in rows]
    if late:
        notes.append(f"No time was left for {', '.join(late)}; the same command continues with them.")
    if on_gpu:
        notes.append("A capped GPU shows that a row fits, not how fast a GPU of that size is.")
    else:
        notes.append(
            "No GPU: rows show that they run. Memory and caps are not measured; capped rows take what the plan"
        )
        notes[-1] += " of the full model chose for such a GPU. Speed of a CPU says nothing of a GPU's."
    notes.append(f"Rows are kept in {path}.")
    return notes


def tflops(row: TableRow) -> str:
    return "" if row.tflop is None or row.seconds_median is None else f"{row.tflop / row.seconds_median:.0f}"


COLUMNS: tuple[Column, ...] = (
    ("ms", milliseconds("seconds_median")),
    ("p90", milliseconds("seconds_p90")),
    ("ratio", figure("ratio", ".2f")),
    ("TFLOP/s", tflops),
    ("GiB", figure("peak_gib", ".2f")),
    ("reserved", figure("reserved_gib", ".2f")),
    ("predicted", figure("predicted_gib", ".2f")),
    ("loss", figure("loss_mean", ".1e")),
    ("base", lambda row: row.precision or ""),
    ("blocks", figure("checkpointed", "")),
    ("graphs", figure("compilations", "d")),
)
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


def markdown(rows: Sequence[TableRow], device: str) -> str:
    """The table for docs/benchmarks.md."""
    titles = ["row", *(title for title, _ in COLUMNS)]
    lines = [f"{device}, " + json.dumps(package_versions()).strip("{}").replace('"', ""), ""]
    lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        cells = [row.name, *(cell(row) for _, cell in COLUMNS)] if row.failed is None else [row.name, row.failed]
        cells += [""] * (len(titles) - len(cells))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
