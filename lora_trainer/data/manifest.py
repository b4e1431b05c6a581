"""Reading a dataset: sources -> manifest, without decoding an image.

A source is a folder (plain, kohya's `10_name`, Hugging Face's image folder), a tar, a
Parquet file, a table of images or one image; `data/sources/` has a file for each.
Captions come from, first found wins: the source's `captions_file`, a text beside the
image, the folder's metadata, the source's `caption`, the name of a kohya folder. One bad
file never stops the reading: it becomes a finding.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.core.findings import Finding, Severity
from lora_trainer.data.images.images import BrokenImageError
from lora_trainer.data.images.jobs import Facts
from lora_trainer.data.images.scan import read_headers
from lora_trainer.data.images.workers import Progress
from lora_trainer.data.sample import Manifest, Mask, Sample, Span
from lora_trainer.data.sources.found import Asked, Found, Reading
from lora_trainer.data.sources.masks import judged_alpha, judged_mask
from lora_trainer.data.sources.places import find_overlaps, places_of
from lora_trainer.data.sources.read import read_source
from lora_trainer.data.sources.texts import tidy

MOST_WEIGHT_SHOWN = 40  # letters

Place = tuple[Path, Span | None]


def read_manifest(
    sources: Sequence[SourceSection | Path],
    *,
    allow_missing_captions: bool = False,
    captions: CaptionsSection | None = None,
    progress: Progress | None = None,
) -> tuple[Manifest, tuple[Finding, ...]]:
    """Read all sources; images that cannot be read become findings, not samples.

    `captions` rules how captions are looked for where a source does not say. Raises UsageError,
    all problems at once, for a source that is missing, given twice or holds no image.
    """
    with _no_collecting():
        return _read_manifest(sources, allow_missing_captions, captions, progress)


@contextlib.contextmanager
def _no_collecting() -> Iterator[None]:
    """Hundreds of thousands of small values are made here and none in circles: looking for some takes a quarter more time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _read_manifest(
    sources: Sequence[SourceSection | Path],
    allow_missing_captions: bool,
    captions: CaptionsSection | None,
    progress: Progress | None,
) -> tuple[Manifest, tuple[Finding, ...]]:
    reading = Reading(allow_missing_captions)
    asked = [asked_for(number, source, captions or CaptionsSection()) for number, source in enumerate(sources)]
    given = [(each, places_of(each, reading)) for each in asked]
    find_overlaps(given, reading)
    if not asked:
        reading.problem("No data was given.", "Name a folder of images with --data.")
    found = [(each, read_source(places, each, reading)) for each, places in given]
    if not reading.problems and all(each.section.is_reg for each in asked):
        reading.problem("All data is regularization.", "Name what is to be learned, too.")
    if reading.problems:
        raise UsageError(reading.problems)
    samples = _samples(found, reading, progress)
    return Manifest(samples, tuple(reading.notes)), tuple(reading.findings)


def asked_for(number: int, source: SourceSection | Path, captions: CaptionsSection) -> Asked:
    """A source with the captions' settings that rule it: its own, else those of all."""
    section = SourceSection.model_construct(path=str(source)) if isinstance(source, Path) else source
    return Asked(number, section, section.captions or captions)


def _samples(
    found: Sequence[tuple[Asked, Sequence[Found]]], reading: Reading, progress: Progress | None
) -> tuple[Sample, ...]:
    """Every image whose header can be read, in the order of the sources; each file is read once."""
    places: dict[Place, None] = {}
    for _, images in found:
        for each in images:
            places[each.path, each.span] = None
            if each.mask is not None and each.mask.path is not None:
                places[each.mask.path, each.mask.span] = None
    facts = dict(zip(places, read_headers(list(places), progress), strict=True))
    told: set[Place] = set()
    samples = []
    for asked, images in found:
        for each in images:
            read = facts[each.path, each.span]
            if not isinstance(read, BrokenImageError):
                samples.append(_sample(each, read, asked, facts, reading))
            elif (each.path, each.span) not in told:
                told.add((each.path, each.span))
                reading.find(read.code, "error", read.message, read.fix, each.path)
    return tuple(samples)


def _sample(
    found: Found, read: Facts, asked: Asked, facts: dict[Place, Facts | BrokenImageError], reading: Reading
) -> Sample:
    sample = Sample(
        found.path,
        _caption_of(found, asked, reading),
        read.width,
        read.height,
        read.content,
        found.repeats,
        _weight_of(found, asked, reading),
        asked.number,
        asked.section.is_reg,
        found.span,
        found.mask,
        own_caption=found.caption is not None,
    )
    if found.mask is None:
        return sample
    if found.mask.path is None:
        return judged_alpha(sample, reading)
    mask = facts[found.mask.path, found.mask.span]
    if isinstance(mask, BrokenImageError):
        message = f"has a mask that cannot be used: {found.mask.path.name} {mask.message}"
        reading.find("unreadable_mask", "error", message, mask.fix, found.path)
        return replace(sample, mask=None)
    named = replace(sample, mask=Mask(found.mask.path, mask.content, found.mask.span))
    return judged_mask(named, (mask.width, mask.height), reading)


def _weight_of(found: Found, asked: Asked, reading: Reading) -> float:
    """The weight that a table gives times the source's; a finding where no loss can be multiplied by it."""
    weight, own = found.weight, asked.section.loss_weight
    if weight is None:
        return own
    if isinstance(weight, int | float) and not isinstance(weight, bool):
        with contextlib.suppress(OverflowError):  # whole numbers have no end
            whole = float(weight) * own
            if math.isfinite(whole) and whole >= 0.0:
                return whole
    told = repr(weight) if len(repr(weight)) < MOST_WEIGHT_SHOWN else f"{repr(weight)[:MOST_WEIGHT_SHOWN]}…"
    fix = "Write a number of at least 0; 1 is usual."
    reading.find("bad_weight", "error", f"has the weight {told}.", fix, found.path)
    return own


def _caption_of(found: Found, asked: Asked, reading: Reading) -> str:
    given = (found.caption, asked.section.default_caption, found.folder_caption)
    text = next((each for each in given if each is not None), None)
    caption = tidy(text or "", keep_lines=asked.captions.wildcards)
    if caption or found.path in reading.reported:
        return caption
    message, code = (
        ("has an empty caption.", "empty_caption") if text is not None else ("has no caption.", "missing_caption")
    )
    severity: Severity = "note" if reading.allow_missing_captions else "error"
    ending = asked.ending or ".txt"
    fix = f"Write one into {found.path.stem}{ending} or set data.allow_missing_captions=true."
    if found.instead:
        message = f"has no {found.path.stem}{ending}, as captions.extension asks, but {found.instead}."
        fix = "Set captions.extension to what is there, or remove it."
    elif found.table is not None:
        fix = f"{found.table.name} lies here: name it as captions_file of the source, or as --data. Else {fix[0].lower()}{fix[1:]}"
    if reading.allow_missing_captions:
        fix = f"It is trained on the empty caption, as data.allow_missing_captions asks; or write {found.path.stem}{ending}."
    reading.find(code, severity, message, fix, found.path)
    return caption
