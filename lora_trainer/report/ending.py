"""The verdict on a run: may its LoRA be used, at which strength, from which step, and why; and how to continue."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lora_trainer.core.findings import counted
from lora_trainer.evaluation.part_words import WORDS
from lora_trainer.evaluation.verdict import LINE, NOT_COMPARED
from lora_trainer.report.read import RunReport, mapping, number, sequence, text, whole
from lora_trainer.report.verdict_parts import PartInterval, verdict_parts, weakest
from lora_trainer.run_folder.record import step_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Tone = Literal["good", "fair", "bad", "open"]
FULL_STRENGTH = "1.0"


@dataclass(frozen=True)
class Reason:
    """Why a LoRA may or may not be used, and what to do about it; `command` can be copied."""

    what: str
    to_do: str = ""
    command: str = ""


@dataclass(frozen=True)
class Answer:
    """A question about the LoRA, its answer in a word or number, and what explains it."""

    question: str
    answer: str
    about: str = ""
    command: str = ""


@dataclass(frozen=True)
class Verdict:
    """`label` is a word, `headline` the answer to whether the LoRA may be used. `command` resumes an unfinished run."""

    tone: Tone
    label: str
    headline: str
    reasons: tuple[Reason, ...]
    answers: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = ()
    command: str | None = None


def verdict_of(run: RunReport) -> Verdict:
    """The verdict on every ending of a run, also on one that never recorded how it ended."""
    if run.status in ("done", "refused", "unresolved"):
        return finished(run)
    command = resume_command(run)
    safe = tuple(Reason(sentence) for sentence in what_is_safe(run))
    of = f" of {run.planned:,}" if run.planned else ""
    is_exported = exported_file(run).is_file() and run.steps == run.planned
    if run.status == "stopped":
        where = "before the LoRA was measured" if is_exported else f"at step {run.steps:,}{of}"
        headline = f"{'Not known' if is_exported else 'Not yet'}: stopped {where}"
        return Verdict("open", "stopped", headline, safe, command=command)
    if run.status == "failed":
        where = f" after step {run.seen_steps:,}{of}" if run.seen_steps else " before the first step"
        reason = run.record.reason or ""
        kept = tuple(each for each in safe if each.what.partition(" ")[0] not in reason)
        reasons = (*((Reason(reason),) if reason else ()), *kept)
        return Verdict("bad", "failed", f"Not yet: the training failed{where}", reasons, command=command)
    state = Reason("The run is still training, or it was killed before it could record its end.")
    return Verdict("open", "not ended", f"Not yet: at step {run.seen_steps:,}{of}", (state, *safe), command=command)


def finished(run: RunReport) -> Verdict:
    """The verdict on a run that exported its LoRA; `train` enforces no gate, but the answer is the same."""
    named = run.record.files["kohya"]
    if named and not (run.folder / named).is_file():
        gone = Reason(f"{named} is not in the run's folder: it was moved or deleted.")
        again = resume_command(run) if run.checkpoints and run.record.keeps_state else None
        safe = (Reason("The LoRA is exported again from the last checkpoint:", command=again),) if again else ()
        return Verdict("bad", "missing", "No: its file is missing", (gone, *safe), command=again)
    parts = tuple(verdict_parts(run.record.lora))
    answers = (*strength_answers(run), *step_answers(run))
    explained = " ".join(
        message for group in run.lora_findings for _, message in group.about if group.code == NOT_COMPARED
    )
    faults = ", ".join(text(fault) for fault in sequence(run.record.lora.get("cannot_tell")))
    notes = (
        *([f"The judge cannot tell {faults} on this dataset: look for these in the images."] if faults else []),
        *unmeasured([part for part in parts if part.value is not None or part.about not in explained]),
        *ended_early(run),
    )
    if run.lora.value is None and run.status != "refused":
        return Verdict(
            "fair", "not measured", "Not known: the LoRA was not measured", not_measured(run), answers, notes
        )
    if run.lora.outcome == "refused" or (run.status == "refused" and run.lora.outcome != "unresolved"):
        kept = ("Its files are kept in the folder, marked as refused.",) if run.status == "refused" else ()
        # The strength of a LoRA that is not to be used matters only where others were compared.
        if not run.record.lora.get("choice"):
            answers = step_answers(run)
        return Verdict("bad", "refused", "No, do not use it", refusals(run), answers, (*kept, *notes))
    if run.lora.outcome == "unresolved":
        return Verdict("fair", "not decided", "Not decided yet", undecided(run), answers, notes)
    if run.lora.outcome != "passed" or weakest(parts) is None:
        reason = Reason(
            "Its score has no outcome and no intervals that this version knows.",
            "To measure it again, in the run's folder:",
            validate_command(run),
        )
        headline = "Not known: it was measured by an earlier version"
        return Verdict("fair", "not known", headline, (reason, *below_minimum(run)), answers, notes)
    if run.dataset.passed:
        return Verdict("good", "passed", "Yes, you can use it", why_passed(run, parts), answers, notes)
    reasons = (*why_passed(run, parts), *below_minimum(run))
    return Verdict("fair", "passed", "Yes, but look at its dataset", reasons, answers, notes)


def why_passed(run: RunReport, parts: tuple[PartInterval, ...]) -> tuple[Reason, ...]:
    """The rates of the samples, and how many parts passed."""
    least = weakest(parts)
    if least is None or least.value is None:
        return ()
    gate = LINE if run.lora.gate is None else run.lora.gate
    if gate == 0:
        return (Reason("No minimum was set (gates.lora=0), so nothing could refuse it.", "Look at its parts below."),)
    measured = sum(part.value is not None for part in parts)
    count = f"All {measured} parts that were measured are" if measured > 1 else "The part that was measured is"
    rates = [
        part.about.partition(" (")[0] for part in parts if part.name in ("shows", "whole", "is_new") and part.about
    ]
    return (Reason(f"{'; '.join(rates)}." if rates else f"{count} above their minimum."),)


def below_minimum(run: RunReport) -> tuple[Reason, ...]:
    """A dataset below its minimum score."""
    score = run.dataset
    if score.value is None or score.gate is None or score.value >= score.gate:
        return ()
    what = f"The dataset scores {score.value:.2f}, below the minimum of {score.gate:.2f}."
    return (Reason(what, "What to change is under “Dataset” below."),)


def refusals(run: RunReport) -> tuple[Reason, ...]:
    """Each error that refuses the LoRA, with its fix."""
    errors = [group for group in run.lora_findings if group.severity == "error"]
    found = tuple(Reason(message, group.fix) for group in errors for _, message in group.about)
    return (*found, *below_minimum(run)) or (Reason(run.record.reason or "A part is below its minimum."),)


def undecided(run: RunReport) -> tuple[Reason, ...]:
    """What is not decided about the LoRA, and what would decide it."""
    groups = [group for group in run.lora_findings if group.code in {*WORDS, NOT_COMPARED}]
    open_parts = [group for group in groups if group.severity == "warning"]
    found = tuple(Reason(message, group.fix) for group in open_parts for _, message in group.about)
    return (*found, *below_minimum(run)) or (Reason("A part's interval has its minimum inside."),)


def not_measured(run: RunReport) -> tuple[Reason, ...]:
    """Why nothing was measured, and the command that measures it."""
    off = run.record.setting("gates.lora_check") == "off"
    why = "gates.lora_check=off: no part of the verdict was measured, and no images were made."
    reason = Reason(
        why if off else "No part of the verdict was measured.",
        "To measure it now, in the run's folder:",
        validate_command(run),
    )
    errors = (Reason(message, group.fix) for group in run.lora_findings for _, message in group.about)
    return (reason, *errors, *below_minimum(run))


def strength_answers(run: RunReport) -> tuple[Answer, ...]:
    """The strength to use: the advised one, none where it is refused, else 1.0 with the command that compares others."""
    choice = mapping(run.record.lora.get("choice"))
    question, strength = "At which strength?", number(choice.get("strength"))
    if strength is not None:
        answer = "none is advised" if choice.get("outcome") == "refused" else str(strength)
        return (Answer(question, answer, text(choice.get("advice"))),)
    if released_step(run) is None:
        return ()
    if run.lora.value is None:
        return (Answer(question, FULL_STRENGTH, "The usual one; none was measured."),)
    about = "Other strengths were not compared. To compare them, in the run's folder:"
    return (Answer(question, FULL_STRENGTH, about, f"{validate_command(run)} --compare strengths"),)


def step_answers(run: RunReport) -> tuple[Answer, ...]:
    """The step whose weights are in the file, why, and a better one where the comparison found it."""
    released = released_step(run)
    if released is None:
        return ()
    reason = text(run.record.released.get("reason")).rstrip(".")
    of = f" of {run.steps:,}" if run.steps else ""
    choice = mapping(run.record.lora.get("choice"))
    advised = None if choice.get("outcome") == "refused" else whole(choice.get("step"))
    if advised is not None and advised != released:
        about = f"The exported file has step {released:,}{of}."
        return (Answer("From which step?", f"{advised:,}", about),)
    if reason and "=" not in reason.partition(":")[0]:  # the name of a setting stays as it is typed
        reason = f"{reason[:1].upper()}{reason[1:]}"
    return (Answer("From which step?", f"{released:,}{of}", f"{reason}." if reason else ""),)


def unmeasured(parts: Sequence[PartInterval]) -> tuple[str, ...]:
    """One sentence for each reason why parts were not measured."""
    reasons: dict[str, list[str]] = {}
    for part in parts:
        if part.value is None:
            reasons.setdefault(part.about, []).append(part.title.lower())
    return tuple(f"Not measured: {', '.join(names)} ({reason})." for reason, names in reasons.items())


def ended_early(run: RunReport) -> tuple[str, ...]:
    """Why a finished run has fewer steps than planned."""
    if run.status != "done" or run.planned is None or run.steps >= run.planned:
        return ()
    why = run.record.reason or "train.max_hours is over"
    return (f"The training ended after {run.steps:,} of {run.planned:,} steps: {why}.",)


def what_is_safe(run: RunReport) -> list[str]:
    """Sentences on the files of an unfinished run that can be used."""
    sentences = []
    kohya = exported_file(run)
    if kohya.is_file():
        sentences.append(f"{kohya.name} is complete, but this session did not evaluate it.")
    else:
        sentences.append("No LoRA is exported yet.")
    if run.checkpoints:
        others = f" ({counted(len(run.checkpoints), 'checkpoint')} in all)" if len(run.checkpoints) > 1 else ""
        sentences.append(f"checkpoints/{run.checkpoints[0]} is safe{others}.")
    else:
        sentences.append("No checkpoint was written: --resume starts at step 0.")
    return sentences


def resume_command(run: RunReport) -> str:
    """The command that resumes the run, wherever its folder is now; one without state starts anew, from its weights if they are kept."""
    place, command = run.folder.resolve(), "produce" if run.record.gates_enforced else "train"
    config, kept = place / "config.toml", step_files(place)
    if config.is_file():
        words = ["lora-trainer", command, "--config", str(config), "--output", str(place.parent), "--name"]
        if not run.record.keeps_state and (kept or run.checkpoints):
            weights = ["--set", f"lora.network_weights={kept[-1]}"] if kept else []
            return shlex.join([*words, f"{place.name}-2", *weights])
        return shlex.join([*words, place.name, "--resume"])
    return "Run the same command again, with --resume."


def validate_command(run: RunReport) -> str:
    """The command that measures the exported file, in its folder; model and data are read from the run next to it."""
    return shlex.join(["lora-trainer", "validate", exported_file(run).name])


def exported_file(run: RunReport) -> Path:
    """The LoRA as ComfyUI and kohya's scripts load it."""
    return run.folder / (run.record.files["kohya"] or f"{run.name}.safetensors")


def released_step(run: RunReport) -> int | None:
    """The step whose weights were exported; None when none were."""
    if not run.record.files["kohya"]:
        return None
    return whole(run.record.released.get("step")) or run.steps
