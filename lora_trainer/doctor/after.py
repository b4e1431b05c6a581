"""Checks of a run that is over, however it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.core.findings import counted
from lora_trainer.core.hardware import package_versions
from lora_trainer.doctor.during import events_so_far
from lora_trainer.doctor.lines import Fault, Lines, error, first_fault, ok, warning
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
    reasons = [reason for reason in verdict.reasons if reason.what]
    to_do = next((f"{each.to_do} {each.command}".strip() for each in reasons if each.to_do or each.command), "")
    found = f"{report.status}: {verdict.headline}"
    if report.status == "running":
        found = f"killed at step {report.seen_steps:,}: the record says running, and no process trains here"
    elif reasons:
        found += f" ({reasons[0].what})"
    to_look = to_do or "see report.html"
    yield first_fault(
        "status",
        found,
        (report.status == "running", "error", "a finished run", verdict.command or ""),
        (report.status == "failed", "error", "a finished run", verdict.command or to_do),
        (verdict.tone == "bad", "error", "a LoRA that passes", to_look),
        (verdict.tone != "good", "warning", "a LoRA that passes", verdict.command or to_look),
    )


def files(run: RunFacts) -> Lines:
    """Whether the files that the run wrote are there, and what was written."""
    keeps_state = run.report.record.keeps_state
    for name, why in (run.damaged or {}).items():
        if name.startswith("checkpoints/"):
            fix = "delete it: --resume uses the one before" if keeps_state else "delete it"
        elif name.endswith(".html"):
            fix = f"lora-trainer report {run.report.folder}"
        else:
            fix = "export it again: --resume, or copy it from a backup" if keeps_state else "copy it from a backup"
        yield error("files", f"{name}: {why}", "as it was written", fix)
    if run.checked:
        shown = ", ".join(run.checked[:MOST_NAMED])
        if len(run.checked) > MOST_NAMED:
            shown += ", …"
        yield ok("files", f"{counted(len(run.checked), 'file')} as written: {shown}")
    elif not run.damaged:
        yield warning("files", "no LoRA and no checkpoint", "what the run wrote", "start it again")


def scores(run: RunFacts) -> Lines:
    """Both gates: the dataset's score, and the outcome of the LoRA's verdict."""
    dataset, lora = run.report.dataset, run.report.lora
    if dataset.value is not None:
        gate = "passed" if dataset.gate is None else f"at least {dataset.gate:.2f}"
        fault: Fault = (not dataset.passed, "warning", gate, REPORTED)
        yield first_fault("dataset score", f"{dataset.value:.2f}", fault, wanted=gate)
    if lora.value is not None:
        outcome = lora.outcome or ("passed" if lora.passed else "refused")
        yield first_fault("LoRA", outcome, (not lora.passed, "warning", "passed", REPORTED))


def targets(run: RunFacts) -> Lines:
    """What the run should have reached on its machine."""
    for target in targets_of(run.report):
        fault: Fault = (not target.met, "warning", target.aim, "docs/watching.md explains what slows a run")
        yield first_fault("target", f"{target.name}: {target.seen}", fault, wanted=target.aim)


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
