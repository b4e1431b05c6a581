"""Which images the page shows: before and after, and each prompt through time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_trainer.report.ending import released_step
from lora_trainer.report.read import Image, RunReport

MOST_PAIRS = 12
MOST_STRIPS = 8
MOST_FRAMES = 8


@dataclass(frozen=True)
class ImagePair:
    """The same prompt and seed without the LoRA and with it, at each strength; a side that was not kept is None."""

    prompt: str
    seed: int
    sides: tuple[tuple[str, Path | None], ...]


@dataclass(frozen=True)
class Frame:
    """An image of a strip and when it was drawn."""

    label: str
    path: Path


@dataclass(frozen=True)
class Strip:
    """One prompt and seed from the untouched base to the finished LoRA."""

    prompt: str
    seed: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Gallery:
    """All images of the page. `at_end`: the pairs are the finished LoRA's. `hidden` counts those beyond the page's limit."""

    pairs: tuple[ImagePair, ...]
    strips: tuple[Strip, ...]
    at_end: bool
    hidden: int

    @property
    def paths(self) -> list[Path]:
        pairs = [path for pair in self.pairs for _, path in pair.sides if path]
        return [*pairs, *(frame.path for strip in self.strips for frame in strip.frames)]


def gallery_of(run: RunReport) -> Gallery:
    """Pairs from the end, or from the last images drawn while training; strips where there are two moments."""
    moments = {image.step for image in run.images}
    last = None if None in moments else max((step for step in moments if step is not None), default=None)
    pairs = pairs_of([image for image in run.images if image.step == last])
    strips = strips_of(run) if len(moments) > 1 else []
    hidden = max(0, len(pairs) - MOST_PAIRS) + max(0, len(strips) - MOST_STRIPS)
    return Gallery(tuple(pairs[:MOST_PAIRS]), tuple(strips[:MOST_STRIPS]), last is None, hidden)


def pairs_of(images: list[Image]) -> list[ImagePair]:
    drawn: dict[tuple[str, int], dict[float | None, Path]] = {}
    for image in images:
        drawn.setdefault((image.prompt, image.seed), {})[image.strength] = image.path
    strengths = list(dict.fromkeys(each for found in drawn.values() for each in found if each is not None)) or [1.0]
    return [
        ImagePair(prompt, seed, tuple((side_name(each, strengths), found.get(each)) for each in (None, *strengths)))
        for (prompt, seed), found in drawn.items()
    ]


def side_name(strength: float | None, strengths: list[float]) -> str:
    if strength is None:
        return "without"
    return "with the LoRA" if strengths == [1.0] else f"with the LoRA at {strength:g}"


def strips_of(run: RunReport) -> list[Strip]:
    """For each prompt and seed the base, then every step in order, then the end."""
    groups: dict[tuple[str, int], list[Image]] = {}
    # A strip shows full strength, else the strongest.
    strengths = {image.strength for image in run.images if image.strength is not None}
    strength = 1.0 if 1.0 in strengths else max(strengths, default=None)
    for image in run.images:
        groups.setdefault((image.prompt, image.seed), []).append(image)
    strips = []
    for (prompt, seed), found in groups.items():
        base = [Frame("base", image.path) for image in found if image.strength is None][:1]
        drawn = [Frame(when(run, image), image.path) for image in found if image.strength == strength]
        if len(drawn) > 1:
            strips.append(Strip(prompt, seed, tuple(chosen([*base, *drawn]))))
    return strips


def when(run: RunReport, image: Image) -> str:
    return f"step {image.step:,}" if image.step is not None else f"end, step {released_step(run) or run.steps:,}"


def chosen(frames: list[Frame]) -> list[Frame]:
    """At most MOST_FRAMES, evenly through time, first and last among them."""
    if len(frames) <= MOST_FRAMES:
        return frames
    return [frames[round(index * (len(frames) - 1) / (MOST_FRAMES - 1))] for index in range(MOST_FRAMES)]
