"""What the verdict on a LoRA finds, in sentences with what to do: of its parts, and beside them of its file and weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lora_trainer.core.findings import Finding, Severity, counted
from lora_trainer.evaluation.loading import adapted_modules, in_short, judged
from lora_trainer.evaluation.part_words import LOOK_AT_THEM, MORE_SAMPLES, WORDS, own_value
from lora_trainer.evaluation.verdict import NOT_COMPARED, SCALES, VerdictPart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lora_trainer.core.errors import Problem
    from lora_trainer.evaluation.health import Health
    from lora_trainer.evaluation.validation_loss import Improvement
    from lora_trainer.lora_format.weights import AdapterWeights
    from lora_trainer.models.family import Family

# The thresholds of what works and of findings, with their reasons; measured on the built-in model only.
LEAST_CHANGE = 1e-4  # fp16 rounding of the weights alone moves a prediction by about this much
DRIFT_NOTED = 0.30
NORM_NOTED, NORM_WARNED = 0.5, 1.0  # of a layer's size: a note, a warning


def not_alive(drifted: float, learned: Improvement | None) -> Finding | None:
    """The finding on a LoRA whose predictions are not finite, or that changes nothing."""
    if not math.isfinite(drifted) or (learned is not None and not math.isfinite(learned.mean)):
        message = "The model's predictions hold NaN or infinity with the LoRA."
        return Finding("prediction_not_finite", "error", message, "Train again with a lower learning rate.")
    if drifted < LEAST_CHANGE and (learned is None or abs(learned.mean) < LEAST_CHANGE):
        message = (
            f"The LoRA changes nothing: predictions move by {drifted:.1e} of their size (least: {LEAST_CHANGE:.0e})."
        )
        fix = "Too few steps or too low a learning rate: set train.max_steps or optimizer.learning_rate higher."
        return Finding("changes_nothing", "error", message, fix)
    return None


def loading_findings(pipeline: Any, family: Family, lora: Path, weights: AdapterWeights) -> list[Finding]:
    complaints, expected = judged(pipeline, family, lora, weights), len(weights.modules)
    adapted = adapted_modules(pipeline, family)
    if not complaints and adapted == expected:
        return []
    reason = f" diffusers: {complaints[0][:200]}" if complaints else ""
    message = f"A fresh pipeline loaded {adapted} of {expected} modules.{reason}"
    return [
        Finding("not_loaded_whole", "error", message, "Write it in another format with `convert`, or export it again.")
    ]


def key_findings(problems: list[Problem]) -> list[Finding]:
    return [Finding("key_does_not_fit", "error", problem.message, problem.fix) for problem in in_short(problems)]


def part_findings(parts: Mapping[str, VerdictPart], minimum: float, *, may_grow: bool) -> list[Finding]:
    """A finding for each part that is refused, to be completed by `with_remedies`, or undecided; a note for each that was not
    measured. One warning says why samples could not be compared with images, for all parts that were not measured for this.

    `may_grow`: a full check would take more samples.
    """
    found = []
    compared = parts.get("shows", VerdictPart("shows", None))
    if compared.measure is None:
        missing = [WORDS[each.name].title.lower() for each in parts.values() if each.reason == compared.reason]
        message = f"Nothing shows whether the LoRA learned the dataset's images: {compared.reason}. Not measured: {', '.join(missing)}."
        found.append(Finding(NOT_COMPARED, "warning", message, compared.fix))
    for part in parts.values():
        outcome = part.outcome(minimum)
        about = WORDS[part.name]
        if part.measure is None:
            if compared.measure is not None or part.reason != compared.reason:
                message = f"{about.title}: not measured ({part.reason})."
                code = part.name if part.is_needed else f"{part.name}_not_measured"
                found.append(Finding(code, "warning" if part.is_needed else "note", message, part.fix))
            continue
        measured = own_value(part.name, part.measure, SCALES[part.name].at(minimum))
        if outcome == "refused":
            found.append(Finding(part.name, "error", f"{about.refused}: {measured}."))
        elif outcome == "unresolved":
            message = f"{about.title}: not decided, since the minimum lies within the interval: {measured}."
            fix = MORE_SAMPLES if may_grow else LOOK_AT_THEM
            if fix == MORE_SAMPLES and any(MORE_SAMPLES in each.fix for each in found):
                fix = ""  # one command takes samples for all parts
            found.append(Finding(part.name, "warning", message, fix))
    return found


def cannot_tell_findings(cannot_tell: Sequence[str], encoder: bool) -> list[Finding]:
    """A note of the faults that the judge does not tell from untouched images of this dataset."""
    if not cannot_tell:
        return []
    message = f"What the judge cannot tell from untouched images of this dataset: {', '.join(cannot_tell)}."
    fix = "Look for these in the samples yourself"
    if not encoder:
        fix += ", or set gates.encoder, such as facebook/dinov2-base, which sees more"
    return [Finding("cannot_tell", "note", message, f"{fix}.")]


def drift_findings(drifted: float) -> list[Finding]:
    """A note where predictions of unrelated prompts move far."""
    if drifted <= DRIFT_NOTED:
        return []
    message = (
        f"Predictions of unrelated prompts change by {drifted:.0%} of their size (usual: up to {DRIFT_NOTED:.0%})."
    )
    return [Finding("drift", "note", message)]


def health_findings(found: Health) -> list[Finding]:
    findings = []
    if found.largest > NORM_NOTED:
        message = f"The layer that changed most, {found.largest_module}, changed by {found.largest:.0%} of its size"
        severity: Severity = "warning" if found.largest > NORM_WARNED else "note"
        findings.append(Finding("large_update", severity, f"{message} (up to {NORM_NOTED:.0%} is usual)."))
    if found.dead:
        named = ", ".join((*found.dead_modules, *(["…"] if found.dead > len(found.dead_modules) else [])))
        message = f"{found.dead} of {counted(found.modules, 'module')} learned nothing ({named})."
        findings.append(Finding("dead_modules", "warning", message))
    if found.rank_used is not None and found.rank_used < 0.1:
        message = f"The updates use {found.rank_used:.0%} of their rank."
        findings.append(Finding("rank_unused", "note", message, "A smaller lora.rank would do."))
    return findings
