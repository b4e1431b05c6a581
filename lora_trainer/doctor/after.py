"""Checks of a run that is over, however it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.core.findings import counted
from lora_trainer.core.hardware import package_versions
from lora_trainer.doctor.during import events_so_far
from lora_trainer.doctor.lines import Lines, error, ok, warning
from lora_trainer.report.ending import verdict_of
from lora_trainer.report.read import text
from lora_trainer.report.targets import targets_of
from lora_trainer.run_folder.record import UNFINISHED

if TYPE_CHECKING:
    from lora_trainer.doctor.run_facts import RunFacts

MOST_NAMED = 12  # files
REPORTED = "report.html lists what to change"
AS_RECORDED = ("torch", "diffusers", "peft", "transformers")


def after_lines(run: RunFacts) -> Lines:
    """Everything about a run that no process trains any more."""
    yield from ending(run)
    yield from files(run)
    yield from scores(run)
    yield from targets(run)
    yield from other_versions(run)
    yield from events_so_far(run)


def ending(run: RunFacts) -> Lines:
    """How it ended, why, and what to do next."""
    report = run.report
    if not report.record.config:
        fix = "run the same command again with --resume: it continues from the newest checkpoint with its state"
        yield error("status", "run.json is damaged or missing", "a record", fix)
        return
    verdict = verdict_of(report)
    found = f"{report.status}: {verdict.headline}"
    reasons = [each for each in verdict.reasons if each.what]
    why = f" ({reasons[0].what})" if reasons else ""
    to_do = next((f"{each.to_do} {each.command}".strip() for each in reasons if each.to_do or each.command), "")
    if report.status == "running":
        found = f"killed at step {report.seen_steps:,}: the record says running, and no process trains here"
        yield error("status", found, "a finished run", verdict.command or "")
    elif report.status == "failed":
        yield error("status", f"{found}{why}", "a finished run", verdict.command or to_do)
    elif verdict.tone == "good":
        yield ok("status", f"{found}{why}")
    elif verdict.tone == "bad":
        yield error("status", f"{found}{why}", "a LoRA that passes", to_do or "see report.html")
    else:
        yield warning("status", f"{found}{why}", "a LoRA that passes", verdict.command or to_do or "see report.html")


def files(run: RunFacts) -> Lines:
    """Whether the files that the run wrote are there, and what was written."""
    for name, why in (run.damaged or {}).items():
        if name.startswith("checkpoints/"):
            fix = "delete it: --resume uses the one before" if run.report.record.keeps_state else "delete it"
            yield error("files", f"{name}: {why}", "as it was written", fix)
        else:
            again = (
                f"lora-trainer report {run.report.folder}"
                if name.endswith(".html")
                else "export it again: --resume, or copy it from a backup"
                if run.report.record.keeps_state
                else "copy it from a backup"
            )
            yield error("files", f"{name}: {why}", "as it was written", again)
    if run.checked:
        shown = ", ".join(run.checked[:MOST_NAMED]) + (", …" if len(run.checked) > MOST_NAMED else "")
        yield ok("files", f"{counted(len(run.checked), 'file')} as written: {shown}")
    elif not run.damaged:
        yield warning("files", "no LoRA and no checkpoint", "what the run wrote", "start it again")


def scores(run: RunFacts) -> Lines:
    """Both gates: the dataset's score, and the outcome of the LoRA's verdict."""
    dataset, lora = run.report.dataset, run.report.lora
    if dataset.value is not None:
        found = f"{dataset.value:.2f}"
        gate = "passed" if dataset.gate is None else f"at least {dataset.gate:.2f}"
        yield ok("dataset score", found, gate) if dataset.passed else warning("dataset score", found, gate, REPORTED)
    if lora.value is not None:
        outcome = lora.outcome or ("passed" if lora.passed else "refused")
        yield ok("LoRA", outcome) if lora.passed else warning("LoRA", outcome, "passed", REPORTED)


def targets(run: RunFacts) -> Lines:
    """What the run should have reached on its machine."""
    for target in targets_of(run.report):
        if target.met:
            yield ok("target", f"{target.name}: {target.seen}", target.aim)
        else:
            fix = "docs/watching.md explains what slows a run"
            yield warning("target", f"{target.name}: {target.seen}", target.aim, fix)


def other_versions(run: RunFacts) -> Lines:
    """Other packages than those that the run was trained with, where it can be resumed."""
    if run.report.status not in UNFINISHED:
        return
    then, now = run.report.record.versions, package_versions()
    changed = [
        f"{name} {text(then[name])} is now {now[name]}"
        for name in AS_RECORDED
        if name in then and name in now and then[name] != now[name]
    ]
    if changed:
        fix = "install the versions of run.json, where the rest must be the same to the bit"
        yield warning("versions of the run", ", ".join(changed), "the same", fix)
