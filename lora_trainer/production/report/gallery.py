"""Which pictures the page shows: before and after, and each prompt through time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_trainer.production.report.read import Picture, RunReport
from lora_trainer.production.report.verdict import released_step

MOST_PAIRS = 12
MOST_STRIPS = 8
MOST_FRAMES = 8


@dataclass(frozen=True)
class Pair:
    """The same prompt and seed without and with the LoRA; a side that was not kept is None."""

    prompt: str
    seed: int
    without: Path | None
    with_lora: Path | None


@dataclass(frozen=True)
class Frame:
    """A picture of a strip and when it was drawn."""

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
    """All pictures of the page. `at_end`: the pairs are the finished LoRA's. `left_out` counts what a page has no room for."""

    pairs: tuple[Pair, ...]
    strips: tuple[Strip, ...]
    at_end: bool
    left_out: int

    @property
    def paths(self) -> list[Path]:
        pairs = [path for pair in self.pairs for path in (pair.without, pair.with_lora) if path]
        return [*pairs, *(frame.path for strip in self.strips for frame in strip.frames)]


def gallery_of(run: RunReport) -> Gallery:
    """Pairs from the end, or from the last pictures drawn while training; strips where there are two moments."""
    moments = {picture.step for picture in run.pictures}
    last = None if None in moments else max((step for step in moments if step is not None), default=None)
    pairs = pairs_of([picture for picture in run.pictures if picture.step == last])
    strips = strips_of(run) if len(moments) > 1 else []
    left_out = max(0, len(pairs) - MOST_PAIRS) + max(0, len(strips) - MOST_STRIPS)
    return Gallery(tuple(pairs[:MOST_PAIRS]), tuple(strips[:MOST_STRIPS]), last is None, left_out)


def pairs_of(pictures: list[Picture]) -> list[Pair]:
    sides: dict[tuple[str, int], dict[bool, Path]] = {}
    for picture in pictures:
        sides.setdefault((picture.prompt, picture.seed), {})[picture.with_lora] = picture.path
    return [Pair(prompt, seed, each.get(False), each.get(True)) for (prompt, seed), each in sides.items()]


def strips_of(run: RunReport) -> list[Strip]:
    """For each prompt and seed the base, then every step in order, then the end."""
    groups: dict[tuple[str, int], list[Picture]] = {}
    for picture in run.pictures:
        groups.setdefault((picture.prompt, picture.seed), []).append(picture)
    strips = []
    for (prompt, seed), found in groups.items():
        base = [Frame("base", picture.path) for picture in found if not picture.with_lora][:1]
        drawn = [Frame(when(run, picture), picture.path) for picture in found if picture.with_lora]
        if len(drawn) > 1:
            strips.append(Strip(prompt, seed, tuple(chosen([*base, *drawn]))))
    return strips


def when(run: RunReport, picture: Picture) -> str:
    return f"step {picture.step:,}" if picture.step is not None else f"end, step {released_step(run) or run.steps:,}"


def chosen(frames: list[Frame]) -> list[Frame]:
    """At most MOST_FRAMES, evenly through time, first and last among them."""
    if len(frames) <= MOST_FRAMES:
        return frames
    return [frames[round(index * (len(frames) - 1) / (MOST_FRAMES - 1))] for index in range(MOST_FRAMES)]
