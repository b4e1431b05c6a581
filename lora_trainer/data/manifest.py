"""Reading a dataset: sources -> manifest, without decoding an image.

A source is a folder (plain, kohya's `10_name`, Hugging Face's image folder), a tar here or
on a server, a Parquet file, a table of images or one image; `data/sources/` has a file for each.
Captions come from, first found wins: the source's `captions_file`, a text beside the
image, the folder's metadata, the source's `caption`, the name of a kohya folder. One bad
file never stops the reading: it becomes a finding.
"""

from __future__ import annotations

import contextlib
import gc
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.core.findings import Finding, Severity, counted
from lora_trainer.data.images.images import BrokenImageError
from lora_trainer.data.images.remote import RemoteError, is_url
from lora_trainer.data.images.scan import read_headers
from lora_trainer.data.sample import Manifest, Mask, Sample, Span
from lora_trainer.data.sources.controls import find_swapped, judged_controls
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.masks import judged_alpha, judged_mask
from lora_trainer.data.sources.pairs import find_unpaired
from lora_trainer.data.sources.places import find_overlaps, places_of
from lora_trainer.data.sources.read import read_source
from lora_trainer.data.sources.texts import hidden_characters, tidy

if TYPE_CHECKING:
    from lora_trainer.data.images.jobs import Facts
    from lora_trainer.data.images.workers import Progress

FEWEST_TAGS, WORDS_OF_TAG = 4, 3  # a longer list of such short texts is hardly one of captions
MOST_WEIGHT_SHOWN = 40  # letters
MOST_USUAL_WEIGHT = 10  # what is more may count something else: kilograms, votes

Place = tuple[Path, Span | None]


def read_manifest(
    sources: Sequence[SourceSection | Path],
    *,
    allow_missing_captions: bool = False,
    captions: CaptionsSection | None = None,
    progress: Progress | None = None,
) -> tuple[Manifest, tuple[Finding, ...]]:
    """Read all sources; images that cannot be read become findings, not samples.

    `captions` are the caption settings of sources without their own. Raises UsageError,
    all problems at once, for a source that is missing, named twice or holds no image.
    """
    with _no_collecting():
        return _read_manifest(sources, allow_missing_captions, captions, progress)


@contextlib.contextmanager
def _no_collecting() -> Iterator[None]:
    """Switch off garbage collection: there are no cycles here, and it takes a quarter more time."""
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
    reading = SourceReading(allow_missing_captions)
    requests = [request_source(number, source, captions or CaptionsSection()) for number, source in enumerate(sources)]
    located = [(each, places_of(each, reading)) for each in requests]
    find_overlaps(located, reading)
    if not requests:
        reading.problem("There is no data.", "Name a folder of images with --data.")
    found = [(each, read_source(places, each, reading)) for each, places in located]
    find_unpaired([image for _, images in found for image in images], reading)
    named = {each.captions.column for each in requests} - {None}
    if named and not reading.tables:
        reading.note(f"captions.column={', '.join(map(str, named))} does nothing: no table and no JSON was read.")
    if not reading.problems and all(each.section.is_reg for each in requests):
        reading.problem("All data is regularization.", "Add a source of images to train on.")
    if reading.problems:
        raise UsageError(reading.problems)
    try:
        samples = _samples(found, reading, progress)
    except RemoteError as error:
        raise UsageError(error.problem_of("The data")) from error
    return Manifest(samples, tuple(reading.notes)), tuple(reading.findings)


def request_source(number: int, source: SourceSection | Path, captions: CaptionsSection) -> SourceRequest:
    """A source with its caption settings: its own, else those of all."""
    section = SourceSection.model_construct(path=str(source)) if isinstance(source, Path) else source
    return SourceRequest(number, section, section.captions or captions)


def _samples(
    found: Sequence[tuple[SourceRequest, Sequence[FoundImage]]], reading: SourceReading, progress: Progress | None
) -> tuple[Sample, ...]:
    """Every image whose header can be read, in the order of the sources; each file is read once."""
    places: dict[Place, None] = {}
    for _, images in found:
        for each in images:
            places[each.path, each.span] = None
            if each.mask is not None and each.mask.path is not None:
                places[each.mask.path, each.mask.span] = None
            places.update(((control.path, control.span), None) for control in each.controls)
    facts = dict(zip(places, read_headers(list(places), progress), strict=True))
    reported: set[Place] = set()
    samples: list[Sample] = []
    for request, images in found:
        reading.weights.clear()
        for each in images:
            read = facts[each.path, each.span]
            if not isinstance(read, BrokenImageError):
                sample = judged_controls(_sample(each, read, request, facts, reading), each.controls, facts, reading)
                samples.extend(() if sample is None else (sample,))
            elif (each.path, each.span) not in reported:
                reported.add((each.path, each.span))
                reading.find(read.code, "error", read.message, read.fix, each.path)
        if any(weight != 1 for weight in reading.weights):
            count, least, most = len(reading.weights), min(reading.weights), max(reading.weights)
            message = f"the loss of {counted(count, 'image')} is multiplied by a weight beside the caption"
            reading.note(f"{request.shown_path}: {message}, from {least:g} to {most:g}.")
    find_swapped(samples, reading)
    return tuple(samples)


def _sample(
    found: FoundImage,
    read: Facts,
    request: SourceRequest,
    facts: dict[Place, Facts | BrokenImageError],
    reading: SourceReading,
) -> Sample:
    sample = Sample(
        found.path,
        _caption_of(found, request, reading),
        read.width,
        read.height,
        read.content,
        found.repeats,
        _weight_of(found, request, reading),
        request.number,
        request.section.is_reg,
        found.span,
        found.mask,
        own_caption=found.caption is not None,
        colors=read.colors,
        has_alpha=read.has_alpha,
        caption_file=found.caption_file,
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
    named = replace(sample, mask=Mask(found.mask.path, mask.content, found.mask.span, mask.has_alpha))
    return judged_mask(named, (mask.width, mask.height), reading)


def _weight_of(found: FoundImage, request: SourceRequest, reading: SourceReading) -> float:
    """The table's weight times the source's; a finding where it is no number of at least 0."""
    weight, own = found.weight, request.section.loss_weight
    if weight is None:
        return own
    if isinstance(weight, int | float) and not isinstance(weight, bool):
        with contextlib.suppress(OverflowError):  # whole numbers have no end
            whole = float(weight) * own
            if math.isfinite(whole) and whole >= 0.0:
                reading.weights.append(float(weight))
                if weight == 0 or weight > MOST_USUAL_WEIGHT:
                    message = f"has the weight {weight:g}, by which its loss is multiplied."
                    fix = f"If that is not meant, rename the column or key weight; from 0.1 to {MOST_USUAL_WEIGHT} is usual."
                    reading.find("unusual_weight", "warning", message, fix, found.path)
                return whole
    text = repr(weight) if len(repr(weight)) < MOST_WEIGHT_SHOWN else f"{repr(weight)[:MOST_WEIGHT_SHOWN]}…"
    fix = "Write a number of at least 0; 1 is usual."
    reading.find("bad_weight", "error", f"has the weight {text}.", fix, found.path)
    return own


def _caption_of(found: FoundImage, request: SourceRequest, reading: SourceReading) -> str:
    candidates = (found.caption, request.section.default_caption, found.folder_caption)
    text = next((each for each in candidates if each is not None), None)
    if isinstance(text, tuple):
        text = _chosen(text, found.path, request, reading)
    caption = tidy(text or "", keep_lines=request.captions.wildcards)
    lines = [] if request.captions.wildcards else (text or "").strip().splitlines()
    if any(line.rstrip()[-1:].isalnum() for line in lines[:-1]):  # others end with a comma or a full stop
        reading.note(
            f"{request.shown_path}: some captions have several lines, which are joined with spaces, not commas;"
            " captions.wildcards=true picks one line each time."
        )
    if caption and (hidden := hidden_characters(text or "")):
        message = f"has characters in its caption that show nothing ({', '.join(hidden[:8])}); they are left out."
        reading.find(
            "hidden_characters", "note", message, "Remove them, or save the caption as UTF-8 again.", found.path
        )
    if caption or found.path in reading.reported:
        return caption
    message, code = (
        ("has an empty caption.", "empty_caption") if text is not None else ("has no caption.", "missing_caption")
    )
    ending = request.ending or ".txt"
    severity: Severity = "error"
    fix = _captions_needed(found, ending, request)
    if found.instead:
        message = f"has no {found.path.stem}{ending}, as captions.extension requires, but {found.instead}."
        there = Path(found.instead).suffix.lstrip(".")
        fix = f"--set captions.extension={there} reads what is there, or remove the setting."
    elif found.hint:
        fix = f"{found.hint} Else {fix[0].lower()}{fix[1:]}"
    # Regularization images show the model's own idea of a class: no trigger word is put in front of their captions.
    if request.captions.trigger_word and not request.section.is_reg and not found.instead:
        severity, fix = "note", found.hint or "To say what else it shows, write captions."
        message = f"{message.rstrip('.')}: the trigger word {request.captions.trigger_word!r} alone is trained."
    elif reading.allow_missing_captions:
        severity = "note"
        fix = f"It trains on an empty caption. To give it one, write {found.path.stem}{ending}."
    reading.find(code, severity, message, fix, found.path)
    return caption


def _captions_needed(found: FoundImage, ending: str, request: SourceRequest) -> str:
    """How an image without a caption gets one, or is trained without."""
    by_hand = f"Write one into {found.path.stem}{ending}."
    by_model = "Or write all with `lora-trainer caption` (--list names models)."
    if not is_url(request.section.path) and Path(request.section.path).is_dir():
        folder = shlex.quote(request.section.path)
        by_model = f"Or write all with `lora-trainer caption {folder} --model florence-2-base --in-place`."
    no_word = request.section.is_reg or request.section.captions is not None  # whose own table replaces the others
    alone = "" if no_word else "Or train a trigger word alone: --set captions.trigger_word=WORD. "
    return f"{by_hand} {by_model} {alone}Or train an empty caption: --set data.allow_missing_captions=true."


def _chosen(captions: tuple[str, ...], image: Path, request: SourceRequest, reading: SourceReading) -> str:
    """Several captions of one image as lines to choose from, or the first of them."""
    if request.captions.wildcards or len(captions) < 2:
        return "\n".join(" ".join(each.split()) for each in captions)
    if len(captions) >= FEWEST_TAGS and all(len(each.split()) <= WORDS_OF_TAG for each in captions):
        message = (
            f"has a list of {len(captions)} short texts as its captions, and is trained on the first: {captions[0]}."
        )
        fix = "If they are tags, write them as one text with commas, or name their key or column tags."
        reading.find("several_captions", "warning", message, fix, image)
        return captions[0]
    reading.note(
        f"{request.shown_path}: some images have several captions, of which the first is trained;"
        " captions.wildcards=true picks one each time."
    )
    return captions[0]
