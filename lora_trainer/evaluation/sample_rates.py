"""The parts of a verdict that are counted in samples: each a rate with its interval.

Samples are measured by the judge (`evaluation/judge.py`); what is asked of a part is in how many of them it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lora_trainer.evaluation.judge import ASKED, Judge, Tested, is_beyond, overall, same_place_distance
from lora_trainer.evaluation.likeness import DRAWS, differ
from lora_trainer.evaluation.verdict import Estimate, VerdictPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lora_trainer.evaluation.looks import Look

BY_SAMPLES = ("shows", "whole", "follows_captions", "is_new", "varied", "stays_away")
LEVEL = 0.05  # of error: of passing a part that is below its gate, and of refusing any that is above it
PARTS_COUNTED = 7
TOWARDS = 0.5  # of the way from the base's sample of an unrelated prompt to the dataset's images
UNTOLD = "the judge cannot tell {} from untouched images of this dataset"
LOOK = "Look at the samples yourself"
ENCODER = "set gates.encoder, such as facebook/dinov2-base"


@dataclass(frozen=True)
class DrawnSample:
    """A sample of the LoRA: the prompt's text, its place among the prompts, the seed, what is seen of it, and where it was sampled
    here, its latents [C, h, w]."""

    prompt: str
    place: int
    seed: int
    look: Look
    latents: Tensor | None = None


@dataclass(frozen=True)
class Unrelated:
    """A prompt that is not about the dataset, by its place, and its samples of one seed: by the base model, and with the LoRA;
    `latents` [C, h, w] are theirs."""

    place: int
    seed: int
    base: Look
    lora: Look
    latents: tuple[Tensor, Tensor]


def rate_of(flags: Sequence[bool], looks: int = 1) -> Estimate:
    """The share of the flags that are set, with an interval that holds over so many looks at growing numbers of samples.

    Each end is Wilson's (1927). To pass, all parts must: their errors do not add up, and the lower end is that of one part. One part
    is enough to refuse: the upper end is corrected for the number of parts, too (Bonferroni).
    """
    count, of = sum(flags), len(flags)
    low = Estimate.of_share(count / of, of, LEVEL / looks).low
    high = Estimate.of_share(count / of, of, LEVEL / looks / PARTS_COUNTED).high
    draws = np.random.default_rng(0).integers(0, of, (DRAWS, of))
    drawn = np.asarray(flags, np.float64)[draws].mean(axis=1)
    return Estimate(count / of, low, high, tuple(drawn.tolist()), count, of)


def subject_parts(
    judge: Judge, tested: Tested, samples: Sequence[DrawnSample], looks: int = 1
) -> dict[str, VerdictPart]:
    """The parts that samples of the dataset's captions show."""
    values = [judge.measure(each.look) for each in samples]
    parts = {}
    for name, words in (("shows", "shapeless lumps"), ("whole", "faulty images"), ("is_new", "copies")):
        rate = rate_of([not is_beyond(each, tested.limits, ASKED[name]) for each in values], looks)
        parts[name] = VerdictPart(name, rate) if tested.is_measured(name) else untold(name, words, judge)
    parts["follows_captions"] = caption_part(judge, tested, samples, looks)
    parts["varied"] = varied_part(judge, tested, samples, looks)
    return parts


def untold(name: str, words: str, judge: Judge) -> VerdictPart:
    """A part that the judge cannot measure. Copies are compared place by place: an encoder does not help to find them."""
    may_help = not judge.has_encoder and name in ("shows", "follows_captions", "stays_away")
    fix = f"{LOOK}, or {ENCODER}." if may_help else f"{LOOK}."
    return VerdictPart(name, None, UNTOLD.format(words), fix, is_needed=name in ("shows", "follows_captions"))


def caption_part(judge: Judge, tested: Tested, samples: Sequence[DrawnSample], looks: int) -> VerdictPart:
    """Whether each sample is more like the images whose captions are like its own."""
    name = "follows_captions"
    if not differ(judge.captions):
        return VerdictPart(name, None, "all captions are alike")
    if not tested.is_measured(name):
        return untold(name, "what the captions say", judge)
    suiting = [judge.suits(each.look, each.prompt) for each in samples]
    # A prompt that shares no telling word with a caption asks for nothing that could be compared; a broken sample does not suit.
    known = [
        each > 0 for each, own in zip(suiting, samples, strict=True) if math.isfinite(each) or not own.look.is_finite
    ]
    if not known:
        return VerdictPart(name, None, "the prompts have no words of the captions")
    return VerdictPart(name, rate_of(known, looks))


def varied_part(judge: Judge, tested: Tested, samples: Sequence[DrawnSample], looks: int) -> VerdictPart:
    """Whether two seeds of one prompt give different images."""
    if not tested.is_measured("is_new"):
        return untold("varied", "an image from its copy", judge)
    by_prompt: dict[int, list[Look]] = {}
    for each in samples:
        by_prompt.setdefault(each.place, []).append(each.look)
    pairs = [pair for same in by_prompt.values() for pair in zip(same[::2], same[1::2], strict=False)]
    if not pairs:
        return VerdictPart("varied", None, "no prompt has samples of two seeds")
    nearest = math.exp(-tested.limits["near"])
    return VerdictPart("varied", rate_of([same_place_distance(*pair) > nearest for pair in pairs], looks))


def away_part(judge: Judge, tested: Tested, unrelated: Sequence[tuple[Look | None, Look]], looks: int) -> VerdictPart:
    """Whether prompts that are not about the dataset do not show it: pairs of the base's sample, if known, and the LoRA's.

    A sample that the base itself draws like the dataset's images says nothing.
    """
    measures = [each for each in ("unlike", "strange") if each in tested.limits]
    if not measures:
        return untold("stays_away", "the dataset's subject from other things", judge)
    # Of two, one tells lumps and the other other things: that one counts beyond which more of the base's samples are.
    drawn = [judge.measure(base) for base, _ in unrelated if base is not None]
    measure = max(measures, key=lambda each: sum(values[each] > tested.limits[each] for values in drawn))
    limit, flags = tested.limits[measure], []
    for base, lora in unrelated:
        after = judge.measure(lora)[measure]
        if base is None:
            flags.append(after > limit)
            continue
        before = judge.measure(base)[measure]
        if before > limit:
            flags.append(before - after < TOWARDS * (before - 1.0))
    if not flags:
        reason = "the base model's own samples of unrelated prompts are already like the dataset's images"
        return VerdictPart("stays_away", None, reason)
    return VerdictPart("stays_away", rate_of(flags, looks))


def counted_parts(
    judge: Judge,
    tested: Tested,
    samples: tuple[Sequence[DrawnSample], Sequence[Unrelated]],
    looks: int = 1,
    *,
    is_edit: bool = False,
) -> dict[str, VerdictPart]:
    """All parts of samples of the dataset's captions, and of unrelated prompts.

    Where the base's own samples of unrelated prompts are already like the dataset, the judge does not tell what the dataset shows from
    other things. An edit model (`is_edit`) is asked for the very image that its control image has in the dataset.
    """
    subject, unrelated = samples
    parts = subject_parts(judge, tested, subject, looks)
    parts["stays_away"] = away_part(judge, tested, [(each.base, each.lora) for each in unrelated], looks)
    parts["keeps_base"] = kept_part(unrelated, looks)
    if unrelated and parts["stays_away"].measure is None:
        parts["shows"] = untold("shows", "other things", judge)
    if is_edit:
        reason = "an edit of a training pair should look like its target"
        parts |= {name: VerdictPart(name, None, reason) for name in ("is_new", "varied")}
    return parts


def kept_part(unrelated: Sequence[Unrelated], looks: int = 1) -> VerdictPart:
    """Whether unrelated prompts still give what they gave: a sample is nearest to one of the base's samples of its own prompt.

    Only samples count whose prompt the base's own sample shows: it is nearest to another of the base's samples of that prompt.
    """
    if len({each.place for each in unrelated}) < 2:
        return VerdictPart("keeps_base", None, "one unrelated prompt has no other to be distinguished from")
    base = torch.stack([overall(each.base) for each in unrelated])
    if not bool(base.isfinite().all()):
        return VerdictPart("keeps_base", None, "the base model's samples are not finite")

    def nearest_place(look: Look, without: int | None = None) -> int | None:
        apart = (base - overall(look)).norm(dim=1)
        if not bool(apart.isfinite().all()):
            return None
        if without is not None:
            apart[without] = torch.inf
        return unrelated[int(apart.argmin())].place

    clear = [each for row, each in enumerate(unrelated) if nearest_place(each.base, row) == each.place]
    if len(clear) < len(unrelated) / 2:
        reason = "the base model's own samples of unrelated prompts cannot be distinguished"
        return VerdictPart("keeps_base", None, reason)
    return VerdictPart("keeps_base", rate_of([nearest_place(each.lora) == each.place for each in clear], looks))
