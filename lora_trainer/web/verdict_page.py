"""What the page shows of a run's verdict, as one document: the report's own words, with addresses of images."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lora_trainer.core.io import finite
from lora_trainer.report.ending import verdict_of
from lora_trainer.report.gallery import ShownGroup, StepSheet, candidates_sheet, evidence_of, pairs_of, sheet_of
from lora_trainer.report.read import RunReport, Score, mapping, number
from lora_trainer.report.verdict_parts import compared_rows, verdict_parts
from lora_trainer.run_folder.record import RECORD, step_files
from lora_trainer.web.run_list import file_url

MOST_LISTED = 200  # images of one kind of finding


def verdict_document(run: RunReport, identity: str) -> dict[str, Any]:
    """Outcome in words, parts with intervals and what shows them, compared steps and strengths, findings, files."""

    def url(path: Path | None) -> str | None:
        return None if path is None else file_url(identity, path.relative_to(run.folder).as_posix())

    lora, verdict = run.record.lora, verdict_of(run)
    named = {name: kind for kind, name in run.record.files.items() if name}
    files = [(kind, run.folder / name) for name, kind in named.items() if name != RECORD]
    pairs = pairs_of([image for image in run.images if image.step is None])
    samples = [ShownGroup("before_after", "Without and with the LoRA", "", tuple(pairs))] if pairs else []
    found = {
        "id": identity,
        "name": run.name,
        "status": run.status,
        "outcome": run.record.outcome,
        **asdict(verdict),
        "lora": score_document(run.lora),
        "dataset": score_document(run.dataset),
        "parts": [{**asdict(part), "outcome_name": part.outcome_name} for part in verdict_parts(lora)],
        "findings": [asdict(group) for group in run.lora_findings],
        "dataset_findings": [
            {**asdict(group), "about": list(group.about[:MOST_LISTED]), "count": len(group.about)}
            for group in run.data_findings
        ],
        "evidence": [
            {
                **{key: getattr(group, key) for key in ("kind", "heading", "about")},
                "pairs": [
                    {
                        **{key: getattr(pair, key) for key in ("prompt", "seed", "about")},
                        "sides": [{"label": label, "url": url(path)} for label, path in pair.sides],
                    }
                    for pair in group.pairs
                ],
            }
            for group in (*samples, *evidence_of(run))
        ],
        "sheets": {
            name: {
                "columns": list(sheet.columns),
                "rows": [
                    {"prompt": row.prompt, "seed": row.seed, "urls": [url(path) for path in row.images]}
                    for row in sheet.rows
                ],
            }
            for name, sheet in (("steps", sheet_of(run)), ("strengths", candidates_sheet(run)))
            if isinstance(sheet, StepSheet)
        },
        "compared": [{**asdict(row), "is_advised": row.is_advised} for row in compared_rows(run)],
        "released": run.record.released,
        "checkpoints": checkpoints_of(run, identity),
        "numbers": dict(mapping(lora.get("numbers"))),
        "cost": dict(mapping(lora.get("cost"))),
        "files": [
            {"name": path.name, "kind": kind, "size": path.stat().st_size, "url": file_url(identity, path.name)}
            for kind, path in files
            if path.parent == run.folder and path.is_file()
        ],
    }
    document: dict[str, Any] = finite(found)
    return document


def score_document(score: Score) -> dict[str, Any]:
    return {**asdict(score), "parts": dict(score.parts), "passed": score.passed}


def checkpoints_of(run: RunReport, identity: str) -> list[dict[str, Any]]:
    """The steps of which weights are kept, newest first, with the validation loss there and an exported file."""
    losses = {int(step): loss for step, loss in run.validation}
    ends = {path: path.stem.rpartition("-")[2] for path in step_files(run.folder)}
    exported = {int(step): path for path, step in ends.items() if step.isdecimal()}
    kept = {int(step) for name in run.checkpoints if (step := name.partition("-")[2]).isdecimal()}
    released = number(run.record.released.get("step"))
    return [
        {
            "step": step,
            "val_loss": losses.get(step),
            "is_released": step == released,
            "can_resume": step in kept,
            "url": file_url(identity, f"weights/{exported[step].name}") if step in exported else None,
        }
        for step in sorted({*kept, *exported}, reverse=True)
    ]
