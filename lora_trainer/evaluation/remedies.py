"""Which way to train next: longer, less, or more gently. It is decided once, from everything that was found, so that no two
findings of a LoRA advise against each other.

What shows that a LoRA was trained too much (it copies, spoils the base, gives one image, or made things worse than without it) is
weighed against what shows that it was trained too little. Where both are there, the number of steps is not the fault: the
learning rate is. What is no refusal decides only where no refusal does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lora_trainer.core.findings import Finding
    from lora_trainer.evaluation.verdict import VerdictPart

Direction = Literal["longer", "gentler", "less"]
STILL_FALLING = "still_falling"  # the note of `report/curve.py`

TOO_MUCH = {"is_new", "stays_away", "keeps_base", "varied", "not_finite", "prediction_not_finite"}  # errors
TOO_LITTLE = {"shows", "images_never_trained", "changes_nothing"}  # errors
# Where no error decides, the first of these that was found does.
HINTS: tuple[tuple[str, Direction], ...] = (
    ("follows_captions", "less"),
    (STILL_FALLING, "longer"),
    ("drift", "less"),
    ("large_update", "less"),
    ("dead_modules", "longer"),
)


@dataclass(frozen=True)
class Remedy:
    """What to do about a finding in each direction, and whatever the direction is."""

    always: str = ""
    longer: str = ""
    gentler: str = ""
    less: str = ""


SLOWER = "Train at a lower learning rate."
PRESERVE = "Train with loss.output_preservation_weight=1 in every step, or with data.num_class_images=32"
# By the code of the finding. Of a part it is what to do where the part is refused.
REMEDIES: Mapping[str, Remedy] = {
    "works": Remedy("Export or train it again."),
    "shows": Remedy(
        "Compare the worst samples with the nearest images of the dataset.",
        longer="Train longer.",
        gentler=SLOWER,
        less=SLOWER,
    ),
    "whole": Remedy(
        "Look at the worst samples: soft or noisy ones may be so in the dataset, too.",
        longer="Train longer.",
        gentler=SLOWER,
        less=SLOWER,
    ),
    "follows_captions": Remedy(
        "Check that captions describe their images.",
        gentler=SLOWER,
        less="Train fewer steps, or at a lower learning rate.",
    ),
    "is_new": Remedy(
        gentler="Train at a lower learning rate or rank, or with more images.",
        less="Train fewer steps, at a lower rank, or with more images.",
    ),
    "keeps_base": Remedy(
        gentler="Train at a lower learning rate or rank, or with regularization images.",
        less="Train fewer steps, at a lower learning rate or rank, or with regularization images.",
    ),
    "varied": Remedy(
        gentler="Train at a lower learning rate, or with more varied images.",
        less="Train fewer steps, or with more varied images.",
    ),
    "drift": Remedy(
        longer=f"{PRESERVE}.",
        gentler=f"{PRESERVE}, or at a lower learning rate or rank.",
        less=f"{PRESERVE}, or fewer steps, or at a lower learning rate or rank.",
    ),
    "stays_away": Remedy(
        longer=f"{PRESERVE}.",
        gentler=f"{PRESERVE}, or at a lower rank.",
        less=f"{PRESERVE}, or fewer steps, or at a lower rank.",
    ),
    "large_update": Remedy(gentler=SLOWER, less=SLOWER),
    "dead_modules": Remedy(
        longer="Train them longer, or remove them from lora.target_modules.",
        gentler="Remove them from lora.target_modules.",
        less="Remove them from lora.target_modules.",
    ),
    STILL_FALLING: Remedy(
        longer="More steps would teach more: a higher --max-steps, with --resume unless checkpoint.save_state=false."
    ),
}


def direction_of(findings: Sequence[Finding], parts: Mapping[str, VerdictPart]) -> Direction | None:
    """Which way to train next, from all findings of a LoRA and its parts; None where nothing shows it."""
    errors = {each.code for each in findings if each.severity == "error"}
    changed_most = any(each.code == "large_update" and each.severity == "warning" for each in findings)
    too_little = bool(errors & TOO_LITTLE)
    if errors & TOO_MUCH or (changed_most and too_little):
        return "gentler" if too_little else "less"
    if too_little:
        return "longer"
    found = {each.code for each in findings if each.code not in parts or each.severity == "error"}
    return next((direction for code, direction in HINTS if code in found), None)


def with_remedies(findings: Sequence[Finding], parts: Mapping[str, VerdictPart]) -> tuple[Finding, ...]:
    """The findings, each with what to do about it in the one direction that all of them agree on.

    What is undecided keeps what would decide it. The note that the loss still falls is left out where the LoRA should not be trained
    longer. Repeated with more findings, it decides anew.
    """
    direction, found = direction_of(findings, parts), []
    for each in findings:
        remedy = REMEDIES.get(each.code)
        if each.code == STILL_FALLING and direction != "longer":
            continue
        if remedy is None or (each.code in parts and each.severity != "error"):
            found.append(each)
            continue
        own = getattr(remedy, direction) if direction else ""
        found.append(replace(each, fix=" ".join(filter(None, [remedy.always, own]))))
    return tuple(found)
