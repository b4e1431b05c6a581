"""Which strength of a LoRA, and which step's weights, are worth using: candidates compared by the verdict's own measures.

**The criterion is the verdict's score**, the least of the parts: the part that fails first decides, and the parts' common scale says
what it is worth. It has two ends, and both are named. At weak strengths and early steps samples do not *show* the subject. At strong
ones and late steps they copy, or prompts about other things show it too.

**All candidates have the same prompts and seeds**, so their differences are much less uncertain than their scores. Prompts, real images
and validation images are resampled together for all candidates and all parts, and in each draw the score is the least part of that
draw. The difference of a candidate's score from that of the *usual* one (the exported weights at strength 1) has a joint 95 % interval,
percentiles of the draws that are as far out for each candidate (Beran 1988), so that among many candidates none is better by chance
alone. Each round of samples looks once more, and the level is divided by their number (Bonferroni).

**Another candidate is chosen only if it surely is better, and by at least `WORTH`.** A score has no more detail than its formulas: on
its scale, 0.9 is good enough and 1 is all that a part can show, and what lies between is no reason to change what everybody expects.
So beside a usual one that passes, a candidate is worth it from half of that way on. All others tie or are worse, and the usual one is
kept.

**Rounds.** Each round samples as many prompts as a lite verdict, up to four times: first with every candidate, then with the better half
of those that are neither surely better or worse nor hardly worth choosing (successive halving). The base's half is measured once for
all (`data/caches/base_features.py`). A candidate that is chosen in place of the usual one is measured once more with other seeds, and
passes by these alone: the best of several looks better than it is.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lora_trainer.core.errors import UsageError, first_line
from lora_trainer.core.findings import counted
from lora_trainer.core.hardware import free_memory
from lora_trainer.evaluation.advice import advice_on
from lora_trainer.evaluation.likeness import DRAWS, Values
from lora_trainer.evaluation.lora_check import (
    LORA_CHECKS,
    LoraGate,
    OpenLora,
    not_comparable,
    open_lora,
    places_of,
    tested_judge,
)
from lora_trainer.evaluation.lora_choice import WORTH, Candidate, CandidateScore, LoraChoice
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.sample_rates import DrawnSample, Unrelated, counted_parts
from lora_trainer.evaluation.verdict import SCALES, Cost, Estimate, VerdictPart, score_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.evidence import Effort, RealImages
    from lora_trainer.evaluation.judge import Judge, Tested
    from lora_trainer.models.family import Family

STRENGTHS = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
LEVEL = 0.95
FRESH = 16  # samples of a chosen candidate that took no part in the choice, in rounds as long as the others


def compared_effort() -> Effort:
    """A lite verdict's samples in each round, up to four rounds."""
    lite = LORA_CHECKS["lite"]
    return replace(lite, most=4 * lite.round)


@dataclass(frozen=True)
class Evidence:
    """The samples of a candidate so far: of the dataset's captions, and of unrelated prompts."""

    subject: tuple[DrawnSample, ...] = ()
    unrelated: tuple[Unrelated, ...] = ()

    def __add__(self, more: Evidence) -> Evidence:
        return Evidence((*self.subject, *more.subject), (*self.unrelated, *more.unrelated))


def compare_candidates(
    candidates: Sequence[Candidate],
    base: Path,
    family: Family,
    images: RealImages,
    gate: LoraGate,
    compute: Compute,
) -> LoraChoice | None:
    """Measure LoRAs until it is decided whether another than the first, the usual one, is worth choosing.

    Progress is counted in candidates. None where there is nothing to compare: images that samples cannot be compared with, fewer than two LoRAs, or a
    usual one that does not work or of which nothing can be measured. Files that do not work, or cannot be read, are left out and named to `compute.say`.
    """
    if len(candidates) < 2 or not_comparable(images):
        return None
    began, effort = time.monotonic(), compared_effort()
    with contextlib.ExitStack() as held:
        cache = gate.cache or Path(held.enter_context(tempfile.TemporaryDirectory()))
        contest = held.enter_context(
            contextlib.closing(Contest(base, family, images, replace(gate, check="lite", cache=cache), compute))
        )
        left, found = list(candidates), dict[Candidate, Evidence]()
        scores = dict[Candidate, CandidateScore]()
        for start in range(0, effort.most, effort.round):
            names = ", ".join(each.name for each in left)
            compute.say(
                f"comparing {names}: {counted(effort.round, 'prompt')} each" if start == 0 else f"still open: {names}"
            )
            for done, candidate in enumerate(contest.in_order(left), 1):
                more = contest.measure(candidate, candidates, range(start, start + effort.round))
                if more is not None:
                    found[candidate] = found.get(candidate, Evidence()) + more
                compute.progress(done, len(left))
            left = [each for each in left if each in found]
            if left[:1] != [candidates[0]] or len(found) < 2:
                return None
            parts = {each: contest.parts_of(found[each], effort.looks) for each in left}
            if all(part.measure is None for part in parts[candidates[0]].values()):
                return None
            scores |= compared(parts, candidates[0], start + effort.round)
            # The better half of those that are open (successive halving, Jamieson and Talwalkar 2016).
            undecided = sorted(
                (each for each in left[1:] if scores[each].is_open), key=lambda each: -scores[each].gain.value
            )
            left = [candidates[0], *undecided[: -(-len(undecided) // 2)]]
            if len(left) == 1:
                break
        ordered = tuple(scores[each] for each in candidates if each in scores)
        chosen = choose(ordered)
        fresh = None
        if chosen != candidates[0]:
            compute.say(f"measuring {chosen.name} again, with other seeds")
            again = Evidence()
            for start in range(effort.most, effort.most + FRESH, effort.round):
                more = contest.measure(chosen, candidates, range(start, start + effort.round))
                again += more or Evidence()
            fresh = contest.parts_of(again, looks=1) if again.subject else None
        cost = Cost(contest.passes, round(time.monotonic() - began, 2))
    choice = LoraChoice(ordered, chosen, cost, gate.minimum, fresh)
    return replace(choice, advice=advice_on(choice))


class Contest:
    """Opens LoRAs, one at a time, and measures them by the same prompts. The base's features are read from the cache."""

    def __init__(self, base: Path, family: Family, images: RealImages, gate: LoraGate, compute: Compute) -> None:
        self.base, self.family, self.images, self.gate, self.compute = base, family, images, gate, compute
        self.passes = 0
        self.file: Path | None = None
        self.opened: OpenLora | None = None
        self.judge: tuple[Judge, Tested] | None = None

    def close(self) -> None:
        """Free the LoRA and its base model."""
        self.file = self.opened = None
        free_memory(self.compute.device)

    def in_order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of the file that is open first, then file by file, so that each is opened once."""
        files = list(dict.fromkeys(each.file for each in candidates))
        return sorted(candidates, key=lambda each: (each.file != self.file, files.index(each.file)))

    def measure(self, candidate: Candidate, candidates: Sequence[Candidate], seeds: range) -> Evidence | None:
        """A round of samples with a candidate; None for a file that does not work on the base model, and where the images are not
        finite on it."""
        opened = self.open(candidate.file, [each.strength for each in candidates if each.file == candidate.file])
        if opened is None:
            return None
        images = self.images
        with opened.at(candidate.strength) as studio:
            prompted = studio.original.samples
            texts = [each.text for each in prompted]
            unrelated = studio.sample_unrelated(seeds.start // len(seeds), compared_effort().seeds)
            self.judge = self.judge or tested_judge(studio, images, texts, unrelated)
            if self.judge is None:
                return None
            places = places_of(seeds, len(images.every), len(prompted))
            subject = studio.sample_subject(places, seeds, texts)
            return Evidence(tuple(subject), tuple(unrelated))

    def open(self, file: Path, strengths: Sequence[float]) -> OpenLora | None:
        """The LoRA of a file, which is kept open until another is; None, with a line, for one that cannot be compared."""
        if file == self.file:
            return self.opened
        self.close()

        def count(done: int, total: int) -> None:
            del done, total
            self.passes += 1

        gate, compute = replace(self.gate, strengths=tuple(strengths)), replace(self.compute, progress=count)
        self.file = file
        try:
            opened = open_lora(file, self.base, self.family, self.images, gate, compute)
        except UsageError as error:
            compute.say(f"{file.name} is not compared: {first_line(error)}")
            return None
        if isinstance(opened, LoraReport):
            compute.say(f"{file.name} is not compared: {opened.findings[0].message}")
            return None
        self.opened = opened
        return opened

    def parts_of(self, found: Evidence, looks: int) -> dict[str, VerdictPart]:
        """The parts of the verdict that samples give, in the verdict's order; `looks` is how often they are looked at, at most."""
        assert self.judge is not None
        judge, tested = self.judge
        parts = counted_parts(judge, tested, (found.subject, found.unrelated), looks, is_edit=self.images.is_edit)
        return {name: parts[name] for name in SCALES if name in parts}


def score_draws(parts: Mapping[str, VerdictPart]) -> Values:
    """The score in each draw of the bootstrap, [DRAWS]: the least part of that draw. 0 for a part that is not finite."""
    found = np.ones(DRAWS)
    for name, part in parts.items():
        if part.measure is None:
            continue
        value, draws = part.measure.value, np.array(part.measure.draws or [math.nan] * DRAWS)
        draws[~np.isfinite(draws)] = value  # a draw without pairs or distances to compare
        found = np.minimum(found, [SCALES[name].score(float(draw)) for draw in draws])
    return found


def compared(
    parts: Mapping[Candidate, Mapping[str, VerdictPart]], usual: Candidate, samples: int
) -> dict[Candidate, CandidateScore]:
    """Each candidate's score after so many samples, and its difference from the usual one's with the joint interval."""
    values = {each: score_of(own) for each, own in parts.items()}
    draws = {each: score_draws(own) for each, own in parts.items()}
    apart = {each: draws[each] - draws[usual] for each in parts}
    effort = compared_effort()
    outside = joint_share([apart[each] for each in parts if each != usual], (1.0 - LEVEL) * effort.round / effort.most)
    found = {}
    for each, own in parts.items():
        gain = values[each] - values[usual]
        edges = np.quantile(apart[each], [outside / 2, 1.0 - outside / 2])
        score = np.quantile(draws[each], [0.025, 0.975])
        bound = float(np.quantile(apart[each], LEVEL))
        found[each] = CandidateScore(each, own, with_ends(values[each], score), with_ends(gain, edges), samples, bound)
    return found


def joint_share(draws: Sequence[Values], outside: float) -> float:
    """The share of draws outside of each interval of percentiles at which `outside` of all draws are outside of any of them.

    So all candidates' intervals are equally likely to miss, whatever the shapes of their distributions (Beran 1988).
    """
    if not draws:
        return outside
    ranks = np.array([(each.argsort().argsort() + 0.5) / len(each) for each in draws])
    depths = 2.0 * np.minimum(ranks, 1.0 - ranks)
    least = depths.min(axis=0)
    return float(np.quantile(least, outside))


def with_ends(value: float, edges: Values) -> Estimate:
    """A value with percentiles of its draws, which the least of several parts may all lie below."""
    return Estimate(value, min(value, float(edges[0])), max(value, float(edges[1])))


def choose(scores: Sequence[CandidateScore]) -> Candidate:
    """Of those that are better than the usual one, the first, the best; of several that are about as good, the nearest to it."""
    usual, better = scores[0].candidate, [each for each in scores if each.standing == "better"]
    if not better:
        return usual
    best = max(each.score.value for each in better)
    alike = [each.candidate for each in better if each.score.value > best - WORTH]

    def distance(candidate: Candidate) -> tuple[int, float]:
        return abs((candidate.step or 0) - (usual.step or 0)), abs(candidate.strength - usual.strength)

    return min(alike, key=distance)
