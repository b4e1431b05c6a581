"""The results as a summary, as a section of docs/benchmarks.md, as the planner's constants, as a baseline."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.benchmarks.baseline import compare_with_baseline
from lora_trainer.benchmarks.measures import Row
from lora_trainer.benchmarks.table_rows import COLUMNS, SPECS, compare_with
from lora_trainer.core.errors import UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.io import write_text
from minutes.tasks import PARTS, ROW_PARTS, Task

Line = Mapping[str, Any]
PAGE, PLANNER, BASELINE = "docs/benchmarks.md", "lora_trainer/memory_plan/estimate.py", "tests/regressions.json"
BEGIN, END = "<!-- gpu_minutes: begin -->", "<!-- gpu_minutes: end -->"
ALL_LAYERS = "all layers"  # of the rows of attention, the one that sums the others
FIGURES: Mapping[str, str] = {  # what is shown of a row, where it has it
    "seconds_median": "{:.4f} s",
    "ratio": "ratio {:.3f}",
    "peak_gib": "{:.2f} GiB",
    "predicted_gib": "predicted {:.2f}",
    "largest": "largest difference {:.1e}",
    "output": "output {:.4f}",
    "gradient": "gradient {:.4f}",
    "error": "error {:+.1e}",
    "bound": "bound {:g}",
    "passed": "{} passed",
    "skipped": "{} skipped",
    "equal_tensors": "{} tensors equal",
    "summary": "{}",
}


SPEC_OF = {spec.name: spec for spec in SPECS}


class NothingToWrite(Exception):
    """The results are of no GPU, or there are none."""


def line_of(line: Line) -> str:
    """One task in one line, and each row that is not as it should be."""
    outcome = next((f"{word}: {line[word]}" for word in ("skipped", "failed") if word in line), "")
    rows = line.get("rows", ())
    texts = [f"{row['name']}: {figures(row)}" for row in rows if len(rows) == 1 or not row["is_right"]]
    wrong = "" if all(row["is_right"] for row in rows) else "NOT RIGHT "
    return f"{line['task']} ({line['seconds']:.1f} s) {wrong}{outcome}{'; '.join(texts) or f'{len(rows)} rows' * bool(rows)}"


def figures(row: Mapping[str, Any]) -> str:
    if row.get("failed"):
        return str(row["failed"])
    shown = [form.format(row[name]) for name, form in FIGURES.items() if row.get(name) is not None]
    wrong = [f"not passed: {name}" for name in row.get("wrong", ())]
    return ", ".join([*shown, *wrong, *([f"loss {row['loss_mean']:.1e}"] if row.get("loss_mean") is not None else [])])


def summary(lines: Sequence[Line], late: Sequence[Task]) -> str:
    """The counts, what was left out and why, then every task by part."""
    done = [line for line in lines if "rows" in line]
    skipped = [f"{line['task']}: {line.get('skipped') or line.get('failed')}" for line in lines if "rows" not in line]
    seconds, expected = (sum(line[name] for line in done) for name in ("seconds", "expected"))
    wrong = sum(not row["is_right"] for line in done for row in line["rows"])
    head = [
        f"{counted(len(done), 'task')} measured in {seconds:.0f} s ({expected:.0f} expected), {counted(wrong, 'row')} not right"
    ]
    head += [f"left out: {text}" for text in skipped]
    if late:
        head.append("no time was left for " + "; ".join(f"{task.name} (about {task.seconds:.0f} s)" for task in late))
    for part, title in PARTS.items():
        own = [line for line in lines if line["part"] == part]
        head += ["", f"{part}: {title}", *map(line_of, own)] if own else []
        for line in own:
            rows = line.get("rows", ())
            head += [f"  {row['name']}: {figures(row)}" for row in rows if len(rows) > 1]
    return "\n".join(head) + "\n"


# ---- pages


def write_pages(root: Path, lines: Sequence[Line]) -> list[str]:
    """Write the section, the constants and the baseline below `root`; what was written, and what is to be done then.

    Raises NothingToWrite before any of them is written.
    """
    done = [line for line in lines if "rows" in line]
    if not done:
        raise NothingToWrite("there are no results. Measure first: python scripts/gpu_minutes.py --output FOLDER")
    device, versions = done[-1]["device"], done[-1]["versions"]
    if device.endswith("rehearsed"):
        raise NothingToWrite(f"the results are of {device}: they say nothing of a GPU")
    before, begin, rest = (root / PAGE).read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise NothingToWrite(f"{PAGE} lacks {BEGIN} or, behind it, {END}")
    planner, notes = with_constants((root / PLANNER).read_text("utf-8"), done, device)
    document = json.loads((root / BASELINE).read_text("utf-8")) | {"gpu": baseline_of(done)}
    import check_regressions

    written = {
        PAGE: f"{before}{BEGIN}\n{section(lines, device, versions)}\n{END}{after}",
        PLANNER: planner,
        BASELINE: check_regressions.document_text(document),
    }
    for name, text in written.items():
        write_text(root / name, text)
    return [f"{PAGE}: written", *notes, f"{BASELINE}: {len(document['gpu']['rows'])} rows of {device} written"]


def section(lines: Sequence[Line], device: str, versions: Mapping[str, str]) -> str:
    """What was measured, as tables."""
    done = [line for line in lines if "rows" in line]
    own = {part: [row for line in done if line["part"] == part for row in line["rows"]] for part in PARTS}
    found = [
        f"`python scripts/gpu_minutes.py` on {device}. Rows of steps:",
        "",
        markdown(table_rows(done), device, versions),
        "",
    ]
    plain = [row for part in ("machine", "run", "tests", "memory", "quantized") for row in own[part] if is_plain(row)]
    found += ["| what | as it should be | figures |", "|---|---|---|"]
    found += [f"| {row['name']} | {'yes' if row['is_right'] else '**no**'} | {figures(row)} |" for row in plain]
    whole = [row for row in own["attention"] if row["shape"] == ALL_LAYERS]
    for title, rows in (("attention, all layers", whole), ("LoRAs on one base model", own["together"])):
        found += ["", f"| {title} | model | ms | ratio | GiB |", "|---|---|---|---|---|"] if rows else []
        found += [
            f"| {row['name']} | {row['model']} | {1000 * row['seconds_median']:.2f} | {row['ratio']:.3f} "
            f"| {'' if row.get('peak_gib') is None else format(row['peak_gib'], '.3f')} |"
            for row in rows
        ]
    without = [f"{line['task']} ({line.get('skipped') or line.get('failed')})" for line in lines if "rows" not in line]
    return "\n".join([*found, *(["", f"Not measured: {'; '.join(without)}."] if without else [])])


def markdown(rows: Sequence[Row], device: str, versions: Mapping[str, str]) -> str:
    """The rows of `bench table` as a table."""
    titles = ["row", *(title for title, _ in COLUMNS)]
    lines = [f"{device}, " + json.dumps(versions).strip("{}").replace('"', ""), ""]
    lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        cells = [row.name, row["failed"]] if row["failed"] else [row.name, *(cell(row) for _, cell in COLUMNS)]
        cells += [""] * (len(titles) - len(cells))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_plain(row: Mapping[str, Any]) -> bool:
    """Whether a row is none of the table's."""
    return row["name"] not in SPEC_OF


def table_rows(done: Sequence[Line]) -> list[Row]:
    """The rows of `bench table`, each held against the one that it names."""
    found = [row for line in done if line["part"] in ROW_PARTS for row in line["rows"] if not is_plain(row)]
    rows = {row["name"]: Row.from_json(row) for row in found}
    return [compare_with(row, rows.get(SPEC_OF[name].like or "")) for name, row in rows.items()]


def checked(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The results, their rows of steps with ratio and losses against the row that they name, and whether these are in bounds."""
    compared = {row.name: row for row in table_rows([line for line in lines if "rows" in line])}
    found = []
    for line in lines:
        rows = []
        for row in line.get("rows", ()):
            if (own := compared.get(row["name"])) is not None:
                bound = SPEC_OF[own.name].loss_bound
                loss_mean = own["loss_mean"]
                is_near = bound is None or loss_mean is None or loss_mean <= bound
                row = {**row, "ratio": own.ratio, "loss_mean": loss_mean, "is_right": row["is_right"] and is_near}
            rows.append(row)
        found.append({**line, "rows": rows} if "rows" in line else dict(line))
    return found


def with_constants(text: str, done: Sequence[Line], device: str) -> tuple[str, list[str]]:
    """The planner with its constants, the largest of the capped rows, rounded up; and what is said of that."""
    rows = [row for line in done if line["part"] == "memory" for row in line["rows"] if row.get("context_gib")]
    rows = [row for row in rows if row["is_right"] and row["fragmentation"] is not None]
    if not rows:
        return text, [f"{PLANNER}: no row has both constants, left as it is"]
    context = math.ceil(100 * max(row["context_gib"] for row in rows)) / 100
    fragmentation = math.ceil(1000 * max(row["fragmentation"] for row in rows)) / 1000
    for name, value in (("CONTEXT_GIB", context), ("FRAGMENTATION", fragmentation)):
        text, count = re.subn(rf"^{name} = [\d.]+", f"{name} = {value:g}", text, flags=re.MULTILINE)
        if count != 1:
            raise NothingToWrite(f"{PLANNER} has {count} lines of {name}, and one was expected")
    text = re.sub(
        r"^# .*\n(?=CONTEXT_GIB)",
        f"# The first two were measured on {device}: docs/benchmarks.md.\n",
        text,
        flags=re.MULTILINE,
    )
    then = "python -m lora_trainer plan --all; python scripts/check_regressions.py --update --only memory"
    return text, [
        f"{PLANNER}: CONTEXT_GIB = {context:g}, FRAGMENTATION = {fragmentation:g}",
        f"then, for plans that follow from them: {then}; the constants in docs/memory.md",
    ]


# ---- regressions


def baseline_of(done: Sequence[Line]) -> dict[str, Any]:
    """The measurement as a document of `bench`, to hold a later one against."""
    names = ("name", "model", "seconds_median", "seconds_p90", "ratio", "peak_gib")
    others = [
        row
        for line in done
        if line["part"] in ("attention", "together")
        for row in line["rows"]
        if row.get("shape", ALL_LAYERS) == ALL_LAYERS
    ]
    rows = [*(row.to_json() for row in table_rows(done) if row["failed"] is None), *others]
    kept = [{name: rounded(row.get(name)) for name in names} for row in rows]
    return {"device": done[-1]["device"], "versions": done[-1]["versions"], "rows": kept}


def rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def regressed(root: Path, lines: Sequence[Line]) -> list[str]:
    """What is worse than the stored baseline of the same GPU; nothing where there is none."""
    stored = json.loads((root / BASELINE).read_text("utf-8")).get("gpu")
    done = [line for line in lines if "rows" in line]
    if stored is None or not done or stored["device"] != done[-1]["device"]:
        return []
    try:
        _, problems = compare_with_baseline(stored, baseline_of(done))
    except UsageError:  # none of its rows was measured
        return []
    return [f"worse: {problem.message}" for problem in problems]
