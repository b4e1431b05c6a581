"""The verdict on a run: its result, what is saved, and how to continue."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from lora_trainer.evaluation.verdict import NOT_COMPARED, WORDS
from lora_trainer.report.read import RunReport, mapping, text, whole

Tone = Literal["good", "fair", "bad", "open"]


@dataclass(frozen=True)
class Verdict:
    """`label` is a word, `headline` a line. `command` continues the run; None when it is finished."""

    tone: Tone
    label: str
    headline: str
    sentences: tuple[str, ...]
    command: str | None = None


def verdict_of(run: RunReport) -> Verdict:
    """The verdict on every ending of a run, also on one that never said how it ended."""
    if run.status == "done":
        return done(run)
    if run.status == "refused":
        return Verdict(
            "bad",
            "refused",
            "The LoRA is refused",
            (
                *not_passed(run),
                "Its files are kept in the folder, marked as refused.",
                *released(run),
                *unmeasured(run),
            ),
        )
    if run.status == "unresolved":
        open_questions = (*undecided(run), *released(run), *unmeasured(run))
        return Verdict("fair", "unresolved", "Measured, but not decided", open_questions)
    safe, command = (*what_is_safe(run),), resume_command(run)
    of = f" of {run.planned}" if run.planned else ""
    if run.status == "stopped":
        return Verdict("open", "stopped", f"Stopped at step {run.steps}{of}", safe, command)
    if run.status == "failed":
        where = f" after step {run.seen_steps}{of}" if run.seen_steps else " before the first step"
        reason = text(run.record.get("reason"))
        sentences = [reason, *(sentence for sentence in safe if sentence.partition(" ")[0] not in reason)]
        return Verdict("bad", "failed", f"Failed{where}", tuple(filter(None, sentences)), command)
    if run.status == "running":
        state = "The run is still training, or it was killed before it could record its end."
        return Verdict("open", "not ended", f"At step {run.seen_steps}{of}", (state, *safe), command)
    return Verdict("open", run.status, "How this run ended is not known", safe, command)


def done(run: RunReport) -> Verdict:
    """A finished run: `train` enforces no gate, so its LoRA may lie under one."""
    short = run.planned is not None and run.steps < run.planned
    why = text(run.record.get("reason")) or "train.max_hours is over"
    early = (f"The training ended after {run.steps} of {run.planned} steps: {why}.",) if short else ()
    early = (*released(run), *unmeasured(run), *early)
    if run.lora.value is None:
        return Verdict("fair", "done", "Trained, not evaluated", early)
    if run.lora.outcome == "unresolved":
        return Verdict("fair", "done", "Done, but the LoRA is not decided", (*undecided(run), *early))
    if run.lora.passed and run.dataset.passed:
        return Verdict("good", "done", "Ready to use", ("Dataset and LoRA passed.", *early))
    return Verdict("fair", "done", "Done, but below a minimum score", (*not_passed(run), *early))


def not_passed(run: RunReport) -> tuple[str, ...]:
    """A sentence for each score that is under its gate, and for each error that refuses a LoRA."""
    under = tuple(
        f"The {what} scores {score.value:.2f}, below the minimum of {score.gate:.2f}."
        for what, score in (("dataset", run.dataset), ("LoRA", run.lora))
        if score.value is not None and score.gate is not None and score.value < score.gate
    )
    errors = (group for group in run.lora_findings if group.severity == "error" and not run.lora.passed)
    return (*under, *(message for group in errors for _, message in group.about))


def undecided(run: RunReport) -> tuple[str, ...]:
    """What is not decided about the LoRA, and what would decide it."""
    groups = [group for group in run.lora_findings if group.code in {*WORDS, NOT_COMPARED}]
    about = ((message, group.fix) for group in groups if group.severity == "warning" for _, message in group.about)
    return tuple(f"{message} {fix}".rstrip() for message, fix in about)


def unmeasured(run: RunReport) -> tuple[str, ...]:
    """A sentence on the parts of the LoRA's verdict that were not measured, and why."""
    parts = mapping(run.part("lora").get("parts"))
    missing = [(name, mapping(part)) for name, part in parts.items() if mapping(part).get("measured") is False]
    return tuple(
        f"Not measured: {WORDS[name].title.lower()} ({text(part.get('reason'))})."
        for name, part in missing
        if name in WORDS
    )


def what_is_safe(run: RunReport) -> list[str]:
    """Sentences on the files of an unfinished run that can be used."""
    sentences = []
    if run.checkpoints:
        others = f" ({len(run.checkpoints)} checkpoints in all)" if len(run.checkpoints) > 1 else ""
        sentences.append(f"checkpoints/{run.checkpoints[0]} is safe{others}.")
    else:
        sentences.append("No checkpoint was written: --resume starts at step 0.")
    kohya = run.folder / f"{run.name}.safetensors"
    if kohya.is_file():
        sentences.append(f"{kohya.name} is complete, but this session did not evaluate it.")
    return sentences


def resume_command(run: RunReport) -> str:
    """The command that resumes the run, wherever its folder is now."""
    place, command = run.folder.resolve(), "produce" if run.record.get("gates_enforced") else "train"
    config = place / "config.toml"
    if config.is_file():
        words = ["lora-trainer", command, "--config", str(config), "--output", str(place.parent), "--name", place.name]
        return shlex.join([*words, "--resume"])
    return "Run the same command again, with --resume."


def released(run: RunReport) -> tuple[str, ...]:
    """Which step's weights became the LoRA, where the record says why."""
    reason, step = text(run.part("released").get("reason")), released_step(run)
    return (f"The LoRA has the weights of step {step}: {reason.rstrip('.')}.",) if reason and step else ()


def released_step(run: RunReport) -> int | None:
    """The step whose weights were exported; None when none were."""
    if not run.part("files").get("kohya"):
        return None
    return whole(run.part("released").get("step")) or run.steps
