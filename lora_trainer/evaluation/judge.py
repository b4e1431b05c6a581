"""The judge: what it measures of a sample beside the dataset's images, and where each measure says that it is faulty.

A measure is a number of one image, larger where it is worse. Its limit is found by a test: between what untouched images of the
dataset have, each compared with the others as if it were a sample, and what they have with a fault drawn into them
(`evaluation/faults.py`). So the judge is calibrated for each dataset, and it knows what it cannot tell.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lora_trainer.evaluation.faults import FAULTS
from lora_trainer.evaluation.likeness import agreement
from lora_trainer.evaluation.looks import SCALES, Describe, Look, edges_of, look_at

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MOST_PLANTED = 16  # images that each fault is planted into
MIDDLE, COARSEST = SCALES[1:]
CONSTANT = 0.8  # of the other images have a pattern that belongs to the subject
PARTS_OF_SUBJECT = 48  # patterns that are looked for in each sample
ABSENT = 6  # of these, the least like the sample
REACH = 1  # block that a copy may be shifted by
ZOOMS = (0.9, 0.8)  # parts of an image, in shares of its sides, of which a sample may be a copy as of the whole image
LOOKED_AT = 6  # of these, the most alike as a whole
EXTREME = 0.95  # quantile of the distances of an image's patterns: one odd part is enough
OVERALL = 4  # cells a side in which whole images are compared
TWICE, EXACT = math.log(2.0), -math.log(1e-5)  # as near as; the measure `near` of an image and itself, less rounding
USUAL, CLEAR = 0.95, 0.1  # quantiles of untouched and of faulty images
OTHER, OTHER_WORDS = "other", "other things"  # what the base draws for unrelated prompts
OTHER_CLEAR = 0.25  # quantile of these: one of the prompts may be about what the dataset shows
# Of the way to other things. They are far away: lumps in the dataset's colors lay at two thirds of it, good samples at a tenth.
TOWARDS_OTHER = 0.33
# Of the way from the untouched to the faulty ones, a limit lies: samples are never as good as real images.
LENIENT = 0.67
LEAST_FOUND = 0.8  # share of the faulty images that must be found, and of the untouched ones that must pass

# The faults that each measure is there for.
MEASURES: Mapping[str, tuple[str, ...]] = {
    "unlike": ("lump", OTHER),
    "strange": ("lump", OTHER),  # where it tells what `unlike` does not
    "foreign": ("lump", "melted", "swapped", "cut", OTHER),
    "plain": ("lump",),
    "odd": ("melted", "lump"),
    "missing": ("cut", "melted"),
    "turned": ("mirrored",),
    "edge": ("blurred", "lump"),
    "grain": ("noisy",),
    "near": ("copied",),
}
# Of which measures none may be beyond its limit, by part of the verdict.
ASKED: Mapping[str, tuple[str, ...]] = {
    "shows": ("unlike", "strange", "plain", "foreign"),
    "whole": ("odd", "missing", "turned", "edge", "grain"),
    "is_new": ("near",),
}


@dataclass(frozen=True)
class Bank:
    """The patterns of several looks, [P, D] by scale; `owners` [P] are the places of the looks that they are from."""

    values: Mapping[int, Tensor]
    owners: Mapping[int, Tensor]


def bank_of(looks: Sequence[Look]) -> Bank:
    scales = looks[0].patterns
    rows = {scale: [look.patterns[scale].values.flatten(0, 1) for look in looks] for scale in scales}
    owners = {
        scale: torch.cat([torch.full((len(row),), place) for place, row in enumerate(found)])
        for scale, found in rows.items()
    }
    return Bank({scale: torch.cat(found) for scale, found in rows.items()}, owners)


def own_patterns(look: Look, scale: int) -> Tensor:
    """The patterns of a look that have structure, [P, D]; all of them where none has. Every second place of the finest scale."""
    values, structured = look.patterns[scale].values, look.patterns[scale].structured
    if scale == SCALES[0]:
        values, structured = values[::2, ::2], structured[::2, ::2]
    return values[structured] if bool(structured.any()) else values.flatten(0, 1)


def edge_strength(look: Look, scale: int) -> float:
    """How strong the edges of a look's structured patterns are, on average."""
    return float(edges_of(own_patterns(look, scale)).sum(1).mean())


def with_edge_strength(look: Look, strengths: Mapping[int, float]) -> Look:
    """The look with edges as strong as those by scale: bolder or fainter lines have the same forms. By a factor of two at most."""
    patterns = {}
    for scale, strength in strengths.items():
        values = look.patterns[scale].values.clone()
        factor = strength / max(edge_strength(look, scale), 1e-6)
        edges_of(values).mul_(min(max(factor, 0.5), 2.0))
        patterns[scale] = replace(look.patterns[scale], values=values)
    return replace(look, patterns=patterns)


def strangeness(look: Look, bank: Bank, without: Collection[int] = ()) -> dict[int, Tensor]:
    """By scale, the distance [P] of each pattern of a look to the nearest of the bank, of which looks may be left out."""
    left_out = torch.tensor(sorted(without))
    found = {}
    for scale in bank.values:
        values = bank.values[scale]
        if without:
            values = values[~torch.isin(bank.owners[scale], left_out)]
        found[scale] = torch.cdist(own_patterns(look, scale), values).amin(1)
    return found


def same_place_distance(one: Look, other: Look) -> float:
    """How different two images are where either has structure, if one may be shifted by `REACH` blocks; infinite for other shapes.

    The tenth of the places that differ most decides: a copy is like the image everywhere.
    """
    apart = []
    for scale in SCALES[:2]:
        first, second = one.patterns[scale], other.patterns[scale]
        if first.values.shape != second.values.shape:
            return math.inf
        ways = ((first, second), (second, first))
        apart.append(max(_one_way(each.values, each.structured, beside.values) for each, beside in ways))
    return sum(apart) / len(apart)


def _one_way(values: Tensor, structured: Tensor, others: Tensor) -> float:
    rows, columns = structured.shape
    padded = torch.full((rows + 2 * REACH, columns + 2 * REACH, others.shape[-1]), math.inf)
    padded[REACH : REACH + rows, REACH : REACH + columns] = others
    shifts = [
        (values - padded[y : y + rows, x : x + columns]).square().sum(-1)
        for y in range(2 * REACH + 1)
        for x in range(2 * REACH + 1)
    ]
    nearest = torch.stack(shifts).amin(0).sqrt()
    chosen = nearest[structured] if bool(structured.any()) else nearest.flatten()
    return float(chosen.quantile(0.9))


def overall(look: Look) -> Tensor:
    """What the whole image is like, [D]: by an encoder's features, else by its patterns."""
    return overall_patterns(look) if look.features is None else look.features


def overall_patterns(look: Look) -> Tensor:
    """The coarser patterns of a look in `OVERALL` x `OVERALL` cells, [D]."""
    cells = [adaptive_avg_pool2d(look.patterns[scale].values.permute(2, 0, 1), OVERALL) for scale in SCALES[1:]]
    return torch.cat(cells).flatten()


@dataclass(frozen=True)
class SubjectParts:
    """Patterns that nearly all images of the dataset have: `values` [K, D] of the middle scale, and how far each usually is from the
    nearest pattern of another image, [K]."""

    values: Tensor
    usual: Tensor

    def missing(self, look: Look) -> float:
        """How far the `ABSENT` parts that a look has least are from its patterns, beside what is usual."""
        nearest = torch.cdist(self.values, look.patterns[MIDDLE].values.flatten(0, 1)).amin(1) / self.usual
        return float(nearest.topk(min(ABSENT, len(nearest))).values.mean())


class PartsFinder:
    """Finds the parts of the subject in several looks, of which some may be left out: an image has the parts that it is the source of."""

    def __init__(self, looks: Sequence[Look]) -> None:
        own = [own_patterns(look, MIDDLE) for look in looks]
        self.values = torch.cat(own)
        self.owners = torch.cat([torch.full((len(row),), place) for place, row in enumerate(own)])
        every = [look.patterns[MIDDLE].values.flatten(0, 1) for look in looks]
        self.nearest = torch.stack([torch.cdist(self.values, other).amin(1) for other in every])
        self.nearest[self.owners, torch.arange(len(self.values))] = -1.0  # its own image says nothing
        self.found: dict[tuple[int, ...], SubjectParts] = {}

    def without(self, places: Collection[int]) -> SubjectParts:
        """The most constant patterns of the other looks, none like another."""
        key = tuple(sorted(places))
        if key not in self.found:
            self.found[key] = self.find(key)
        return self.found[key]

    def find(self, left_out: tuple[int, ...]) -> SubjectParts:
        rows = [row for row in range(len(self.nearest)) if row not in left_out]
        others = torch.isin(self.owners, torch.tensor(rows))
        values, nearest = self.values[others], self.nearest[rows][:, others]
        usual = nearest.sort(0).values[min(1, len(rows) - 1) :].quantile(CONSTANT, 0)
        # A pattern that is near to everything is no part of a subject.
        order = (usual / values.norm(dim=1).clamp(min=1e-6)).argsort()
        chosen: list[int] = []
        for place in order.tolist():
            if len(chosen) == PARTS_OF_SUBJECT:
                break
            if not chosen or float(torch.cdist(values[place : place + 1], values[chosen]).amin()) > float(usual[place]):
                chosen.append(place)
        return SubjectParts(values[chosen], usual[chosen].clamp(min=1e-6))


@dataclass(frozen=True)
class Tested:
    """What the judge can tell. `limits` are those of the measures that tell anything; `found` says how many of the faulty images
    are found, and of how many, by fault; `untouched` how many untouched images pass, by part."""

    limits: Mapping[str, float]
    found: Mapping[str, tuple[int, int]]
    untouched: Mapping[str, tuple[int, int]]

    def tells(self, fault: str) -> bool:
        count, of = self.found[fault]
        return count >= LEAST_FOUND * of

    @property
    def cannot_tell(self) -> tuple[str, ...]:
        """The faults that cannot be distinguished from untouched images, in words."""
        words = {name: fault.words for name, fault in FAULTS.items()} | {OTHER: OTHER_WORDS}
        return tuple(words[name] for name in words if name in self.found and not self.tells(name))

    def is_measured(self, part: str) -> bool:
        """Whether a part of the verdict has a measure that tells something, and untouched images pass it."""
        passing, of = self.untouched[part]
        if not of or passing < LEAST_FOUND * of:
            return False
        # `plain`, how much structure there is, says nothing of what is shown.
        return part not in ASKED or any(measure in self.limits for measure in ASKED[part] if measure != "plain")


class Judge:
    """Compares samples with a dataset's images, which have a caption each.

    Images are RGB; at least two are needed. `describe` is an outside encoder, with which the judge also sees what things are.
    """

    def __init__(
        self, images: Sequence[Image.Image], captions: Sequence[str], describe: Describe | None = None
    ) -> None:
        self.images, self.captions = images, captions
        self.describe = describe
        self.looks = [look_at(image, describe) for image in self.images]
        self.zoomed = list(enumerate(self.looks))
        for row, image in enumerate(self.images):
            self.zoomed += [(row, look_at(middle_of(image, zoom))) for zoom in ZOOMS]
        self.zoomed_whole = torch.stack([overall_patterns(part) for _, part in self.zoomed])
        self.bank = bank_of(self.looks)
        self.mirrored = bank_of([look_at(ImageOps.mirror(image)) for image in self.images])
        self.parts = PartsFinder(self.looks)
        self.whole_images = torch.stack([overall(look) for look in self.looks])
        self.whole_patterns = self.zoomed_whole[: len(self.looks)]
        own = [strangeness(look, self.bank, [row]) for row, look in enumerate(self.looks)]
        # The finest patterns differ in any sample, as a base's own texture does: edges and grain are asked of other measures.
        self.strengths = {
            scale: float(np.mean([edge_strength(look, scale) for look in self.looks])) for scale in SCALES[1:]
        }
        formed = [with_edge_strength(look, self.strengths) for look in self.looks]
        self.forms = bank_of(formed)
        odd = [strangeness(look, self.forms, [row]) for row, look in enumerate(formed)]
        self.usual_extremes = {
            scale: float(np.mean([float(each[scale].quantile(EXTREME)) for each in odd])) + 1e-6
            for scale in self.strengths
        }
        apart = [self.whole_distance(whole, [row]) for row, whole in enumerate(self.whole_patterns)]
        self.usual_distance = float(np.mean(apart))
        self.usual_means = {
            scale: float(np.mean([float(each[scale].mean()) for each in own])) + 1e-6 for scale in SCALES
        }
        # A verdict asks for the measures of a sample in every round, and again to choose what is shown.
        self.known: WeakKeyDictionary[Look, dict[str, float]] = WeakKeyDictionary()

    @property
    def has_encoder(self) -> bool:
        """Whether an outside encoder describes the images."""
        return self.looks[0].features is not None

    def measure(self, look: Look, without: Collection[int] = ()) -> dict[str, float]:
        """Each measure of a look; `without` are places of images that it is not compared with."""
        if without:
            return self.compared(look, without)
        if look not in self.known:
            self.known[look] = self.compared(look, ())
        return self.known[look]

    def compared(self, look: Look, without: Collection[int]) -> dict[str, float]:
        """What `measure` returns, measured now."""
        whole = overall_patterns(look)
        strange, turned = strangeness(look, self.bank, without), strangeness(look, self.mirrored, without)
        right, wrong = (sum(float(each[scale].mean()) for scale in SCALES[1:]) for each in (strange, turned))
        forms = strangeness(with_edge_strength(look, self.strengths), self.forms, without)
        rows = [row for row in range(len(self.looks)) if row not in without]
        return self.foreign(look, rows) | {
            # As a whole, and in its coarse patterns wherever they are: what is fine is asked of other measures.
            "unlike": self.whole_distance(whole, without) / (2 * self.usual_distance + 1e-6)
            + float(strange[COARSEST].mean()) / (2 * self.usual_means[COARSEST]),
            "strange": float(np.mean([float(strange[scale].mean()) / self.usual_means[scale] for scale in SCALES])),
            "plain": -math.log(float(look.patterns[SCALES[0]].structured.float().mean()) + 1e-3),
            "odd": float(
                np.mean([float(forms[scale].quantile(EXTREME)) / usual for scale, usual in self.usual_extremes.items()])
            ),
            "missing": self.parts.without(without).missing(look),
            "turned": math.log((right + 1e-6) / (wrong + 1e-6)),
            "edge": math.log(look.edge),
            "grain": math.log(look.grain + 0.5),
            "near": -math.log(self.nearest(look, whole, without) + 1e-6),
        }

    def whole_distance(self, whole: Tensor, without: Collection[int]) -> float:
        """The distance of a look's overall patterns [D] to those of the image that it is most like."""
        apart = (self.whole_patterns - whole).norm(dim=1)
        return float(apart[[row for row in range(len(apart)) if row not in without]].amin())

    def nearest(self, look: Look, whole: Tensor, without: Collection[int]) -> float:
        """The distance of a look, with overall patterns [D], to the part of an image that it is most like, place by place."""
        alike = (self.zoomed_whole - whole).norm(dim=1).nan_to_num(torch.inf).argsort().tolist()
        parts = [self.zoomed[place] for place in alike]
        chosen = [part for row, part in parts if row not in without][:LOOKED_AT]
        return min(same_place_distance(look, part) for part in chosen)

    def foreign(self, look: Look, rows: Sequence[int]) -> dict[str, float]:
        """The angle between an encoder's features and those of the nearest image, as a distance; nothing without an encoder."""
        if look.features is None:
            return {}
        others = [self.looks[row].features for row in rows]
        apart = torch.stack([each for each in others if each is not None]) - look.features
        return {"foreign": float(apart.norm(dim=1).amin())}

    def suits(self, look: Look, caption: str, without: Collection[int] = ()) -> float:
        """How much a look is like the images with like captions: Pearson's correlation over the dataset's images, NaN where captions
        are alike."""
        rows = [row for row in range(len(self.looks)) if row not in without]
        alike = agreement([caption, *(self.captions[row] for row in rows)])[0, 1:]
        near = -(self.whole_images[rows] - overall(look)).norm(dim=1).double().numpy()
        x, y = alike - alike.mean(), near - near.mean()
        size = float(np.sqrt((x @ x) * (y @ y)))
        return float(x @ y) / size if size > 1e-12 else math.nan

    def tested(self, others: Sequence[Look] = (), seed: int = 0) -> Tested:
        """Plant each fault into images of the dataset, and set the limits. `others` show other things, if there are any."""
        rng = random.Random(seed)
        rows = sorted(rng.sample(range(len(self.images)), min(MOST_PLANTED, len(self.images))))
        untouched = [self.measure(look, [row]) for row, look in enumerate(self.looks)]
        planted = {}
        for name, fault in FAULTS.items():
            looks = [look_at(fault.plant(self.images[row], self.images, rng), self.describe) for row in rows]
            # Only a copy is compared with the image that it was made of.
            hidden: list[list[int]] = [[] if name == "copied" else [row] for row in rows]
            planted[name] = [self.measure(look, each) for look, each in zip(looks, hidden, strict=True)]
        if others:
            planted[OTHER] = list(map(self.measure, others))
        limits = limits_between(untouched, planted)
        found = {}
        for name, values in planted.items():
            asked = (*ASKED["shows"], *ASKED["whole"])
            if name == "copied":
                asked = ASKED["is_new"]
            if name == OTHER:
                asked = ASKED["shows"]
            found[name] = (sum(is_beyond(each, limits, asked) for each in values), len(values))
        passing = {
            part: (sum(not is_beyond(each, limits, asked) for each in untouched), len(untouched))
            for part, asked in ASKED.items()
        }
        suiting = [self.suits(look, self.captions[row], [row]) for row, look in enumerate(self.looks)]
        known = [each > 0 for each in suiting if math.isfinite(each)]
        passing["follows_captions"] = (sum(known), len(known))
        return Tested(limits, found, passing)


def middle_of(image: Image.Image, share: float) -> Image.Image:
    """The middle of an image, a share of its sides, at the image's size."""
    left, top = (side * (1 - share) / 2 for side in image.size)
    box = (left, top, image.width - left, image.height - top)
    return image.resize(image.size, Image.Resampling.BICUBIC, box)


def limits_between(
    untouched: Sequence[Mapping[str, float]], planted: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, float]:
    """By measure, the value `LENIENT` of the way from the untouched images to the faulty ones that are nearest to them, of the faults
    that the measure tells; none for a measure that tells none."""
    limits: dict[str, float] = {}
    distinguished: dict[str, set[str]] = {}
    for measure, faults in MEASURES.items():
        if measure not in untouched[0]:
            continue
        usual = quantile([each[measure] for each in untouched], USUAL)
        clear = {
            name: quantile([each[measure] for each in planted[name]], OTHER_CLEAR if name == OTHER else CLEAR)
            for name in faults
            if name in planted
        }
        above = {name: value for name, value in clear.items() if usual < value < math.inf}
        if above:
            limits[measure] = min(
                usual + (TOWARDS_OTHER if name == OTHER else LENIENT) * (value - usual) for name, value in above.items()
            )
            distinguished[measure] = set(above)
    # Two measures have more false alarms than one.
    if "strange" in limits and distinguished["strange"] <= distinguished.get("unlike", set()):
        del limits["strange"]
    # A copy of the whole image is nearer than images of the dataset ever are to each other, also where a cropped one is not.
    known = [each["near"] for each in untouched if math.isfinite(each["near"])]
    if "near" not in limits and known and max(known) + TWICE < EXACT:
        limits["near"] = max(known) + TWICE
    return limits


def quantile(values: Sequence[float], share: float) -> float:
    """NaN between values that are not finite: of images without edges, or of which none has another's shape."""
    with np.errstate(invalid="ignore"):
        return float(np.quantile(values, share))


def is_beyond(values: Mapping[str, float], limits: Mapping[str, float], measures: Collection[str]) -> bool:
    """Whether any of the measures is beyond its limit; NaN is."""
    return any(not values[measure] <= limits[measure] for measure in measures if measure in limits)
