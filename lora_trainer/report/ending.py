"""The verdict on a run: may its LoRA be used, at which strength, from which step, and why; and how to continue."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lora_trainer.evaluation.part_words import WORDS
from lora_trainer.evaluation.verdict import NOT_COMPARED
from lora_trainer.report.read import RANKS, ImageGroup, RunReport, mapping, number, sequence, text, whole
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
        return verdict_of_finished(run)
    command, safe = resume_command(run), what_is_safe(run)
    of_planned = f" of {run.planned:,}" if run.planned else ""
    if run.status == "stopped":
        headline = f"Not yet: stopped at step {run.steps:,}{of_planned}"
        if exported_file(run).is_file() and run.steps == run.planned:
            headline = "Not known: stopped before the LoRA was measured"
        return Verdict("open", "stopped", headline, safe, command=command)
    if run.status == "failed":
        headline = "Not yet: the training failed before the first step"
        if run.seen_steps:
            headline = f"Not yet: the training failed after step {run.seen_steps:,}{of_planned}"
        if why := run.record.reason:
            # A file that the reason names already is not listed again.
            others = [reason for reason in safe if reason.what.partition(" ")[0] not in why]
            safe = (Reason(why), *others)
        return Verdict("bad", "failed", headline, safe, command=command)
    state = Reason("The run is still training, or it was killed before it could record its end.")
    headline = f"Not yet: at step {run.seen_steps:,}{of_planned}"
    return Verdict("open", "not ended", headline, (state, *safe), command=command)


def verdict_of_finished(run: RunReport) -> Verdict:
    """The verdict on a run that exported its LoRA. `train` enforces no gate, but the answer is the same as of `produce`."""
    exported = run.record.files["kohya"]
    if exported and not (run.folder / exported).is_file():
        return verdict_without_file(run, exported)
    parts = tuple(verdict_parts(run.record.lora))
    notes = verdict_notes(run, parts)
    answers = (*strength_answers(run), *step_answers(run))
    is_refused, outcome = run.status == "refused", run.lora.outcome

    if run.lora.value is None and not is_refused:
        headline = "Not known: the LoRA was not measured"
        return Verdict("fair", "not measured", headline, not_measured(run), answers, notes)

    if outcome == "unresolved":
        about_parts = [group for group in run.lora_findings if group.code in WORDS or group.code == NOT_COMPARED]
        reasons = (*reasons_in(about_parts, "warning"), *below_minimum(run))
        default = Reason("A part's interval has its minimum inside.")
        return Verdict("fair", "not decided", "Not decided yet", reasons or (default,), answers, notes)

    if is_refused or outcome == "refused":
        if is_refused:
            notes = ("Its files are kept in the folder, marked as refused.", *notes)
        # The strength of a LoRA that is not to be used matters only where others were compared.
        if not run.record.lora.get("choice"):
            answers = step_answers(run)
        reasons = (*reasons_in(run.lora_findings, "error"), *below_minimum(run))
        default = Reason(run.record.reason or "A part is below its minimum.")
        return Verdict("bad", "refused", "No, do not use it", reasons or (default,), answers, notes)

    if outcome != "passed" or weakest(parts) is None:
        what = "Its score has no outcome and no intervals that this version knows."
        reason = Reason(what, "To measure it again, in the run's folder:", validate_command(run))
        headline = "Not known: it was measured by an earlier version"
        return Verdict("fair", "not known", headline, (reason, *below_minimum(run)), answers, notes)

    if run.dataset.passed:
        return Verdict("good", "passed", "Yes, you can use it", (why_passed(run, parts),), answers, notes)
    reasons = (why_passed(run, parts), *below_minimum(run))
    return Verdict("fair", "passed", "Yes, but look at its dataset", reasons, answers, notes)


def verdict_without_file(run: RunReport, exported: str) -> Verdict:
    """The verdict on a finished run whose LoRA is not in its folder any more."""
    missing = Reason(f"{exported} is not in the run's folder: it was moved or deleted.")
    if not run.checkpoints or not run.record.keeps_state:
        return Verdict("bad", "missing", "No: its file is missing", (missing,))
    command = resume_command(run)
    again = Reason("The LoRA is exported again from the last checkpoint:", command=command)
    return Verdict("bad", "missing", "No: its file is missing", (missing, again), command=command)


def verdict_notes(run: RunReport, parts: Sequence[PartInterval]) -> tuple[str, ...]:
    """What the judge cannot tell, which parts were not measured and why, and why the training ended early."""
    notes = []
    if faults := ", ".join(map(text, sequence(run.record.lora.get("cannot_tell")))):
        notes.append(f"The judge cannot tell {faults} on this dataset: look for these in the images.")
    findings = [group for group in run.lora_findings if group.code == NOT_COMPARED]
    explained = " ".join(message for group in findings for _, message in group.about)
    titles: dict[str, list[str]] = {}  # of the parts that were not measured, by the reason
    for part in parts:
        if part.value is None and part.about not in explained:
            titles.setdefault(part.about, []).append(part.title.lower())
    notes += [f"Not measured: {', '.join(names)} ({reason})." for reason, names in titles.items()]
    if run.status == "done" and run.planned is not None and run.steps < run.planned:
        reason = run.record.reason or "train.max_hours is over"
        notes.append(f"The training ended after {run.steps:,} of {run.planned:,} steps: {reason}.")
    return tuple(notes)


def why_passed(run: RunReport, parts: Sequence[PartInterval]) -> Reason:
    """The rates of the samples, else how many parts passed."""
    if run.lora.gate == 0:
        return Reason("No minimum was set (gates.lora=0), so nothing could refuse it.", "Look at its parts below.")
    counts_samples = [part for part in parts if part.name in ("shows", "whole", "is_new") and part.about]
    if counts_samples:
        # Without the gate, which follows in brackets.
        rates = [part.about.partition(" (")[0] for part in counts_samples]
        return Reason(f"{'; '.join(rates)}.")
    measured = [part for part in parts if part.value is not None]
    if len(measured) == 1:
        return Reason("The part that was measured is above their minimum.")
    return Reason(f"All {len(measured)} parts that were measured are above their minimum.")


def below_minimum(run: RunReport) -> tuple[Reason, ...]:
    """A dataset below its minimum score; empty where it passes or was not scored."""
    score = run.dataset
    if score.value is None or score.gate is None or score.value >= score.gate:
        return ()
    what = f"The dataset scores {score.value:.2f}, below the minimum of {score.gate:.2f}."
    return (Reason(what, "What to change is under “Dataset” below."),)


def reasons_in(groups: Sequence[ImageGroup], *severities: str) -> tuple[Reason, ...]:
    """Each finding of these severities, with its fix."""
    return tuple(
        Reason(message, group.fix) for group in groups if group.severity in severities for _, message in group.about
    )


def not_measured(run: RunReport) -> tuple[Reason, ...]:
    """Why nothing was measured, and the command that measures it."""
    what = "No part of the verdict was measured."
    if run.record.setting("gates.lora_check") == "off":
        what = "gates.lora_check=off: no part of the verdict was measured, and no images were made."
    reason = Reason(what, "To measure it now, in the run's folder:", validate_command(run))
    return (reason, *reasons_in(run.lora_findings, *RANKS), *below_minimum(run))


def strength_answers(run: RunReport) -> tuple[Answer, ...]:
    """The strength to use: the advised one, none where it is refused, else 1.0 with the command that compares others."""
    question, choice = "At which strength?", mapping(run.record.lora.get("choice"))
    strength, advice = number(choice.get("strength")), text(choice.get("advice"))
    if strength is not None and choice.get("outcome") == "refused":
        return (Answer(question, "none is advised", advice),)
    if strength is not None:
        return (Answer(question, str(strength), advice),)
    if released_step(run) is None:
        return ()
    if run.lora.value is None:
        return (Answer(question, FULL_STRENGTH, "The usual one; none was measured."),)
    about = "Other strengths were not compared. To compare them, in the run's folder:"
    return (Answer(question, FULL_STRENGTH, about, f"{validate_command(run)} --compare strengths"),)


def step_answers(run: RunReport) -> tuple[Answer, ...]:
    """The step whose weights are in the file, why, and a better one where the comparison found it."""
    question, released = "From which step?", released_step(run)
    if released is None:
        return ()
    exported = f"{released:,} of {run.steps:,}" if run.steps else f"{released:,}"
    choice = mapping(run.record.lora.get("choice"))
    advised = whole(choice.get("step"))
    if advised not in (None, released) and choice.get("outcome") != "refused":
        return (Answer(question, f"{advised:,}", f"The exported file has step {exported}."),)
    reason = text(run.record.released.get("reason")).rstrip(".")
    if not reason:
        return (Answer(question, exported),)
    if "=" not in reason.partition(":")[0]:  # the name of a setting stays as it is typed
        reason = f"{reason[0].upper()}{reason[1:]}"
    return (Answer(question, exported, f"{reason}."),)


def what_is_safe(run: RunReport) -> tuple[Reason, ...]:
    """A sentence on the LoRA of an unfinished run, and one on its checkpoints."""
    lora, saved = "No LoRA is exported yet.", "No checkpoint was written: --resume starts at step 0."
    if exported_file(run).is_file():
        lora = f"{exported_file(run).name} is complete, but this session did not evaluate it."
    if len(run.checkpoints) == 1:
        saved = f"checkpoints/{run.checkpoints[0]} is safe."
    elif run.checkpoints:
        saved = f"checkpoints/{run.checkpoints[0]} is safe ({len(run.checkpoints)} checkpoints in all)."
    return Reason(lora), Reason(saved)


def resume_command(run: RunReport) -> str:
    """The command that resumes the run, wherever its folder is now.

    A run whose checkpoints have no state (`checkpoint.save_state=false`) starts anew, from its newest weights if they are kept.
    """
    folder = run.folder.resolve()
    config, weights = folder / "config.toml", step_files(folder)
    if not config.is_file():
        return "Run the same command again, with --resume."
    command = "produce" if run.record.gates_enforced else "train"
    words = ["lora-trainer", command, "--config", str(config), "--output", str(folder.parent), "--name"]
    if run.record.keeps_state or not (weights or run.checkpoints):
        return shlex.join([*words, folder.name, "--resume"])
    words.append(f"{folder.name}-2")
    if weights:
        words += ["--set", f"lora.network_weights={weights[-1]}"]
    return shlex.join(words)


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
