"""From a source's path or pattern to the folders and files that it means."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.bounded import TextError, read_text
from lora_trainer.data.images.remote import is_url, shown_place
from lora_trainer.data.sources.found import SourceReading, SourceRequest
from lora_trainer.data.sources.remote import MOST_INDEX_BYTES, names_in, remote_places, shards_named_by

if TYPE_CHECKING:
    from lora_trainer.config.schema import SourceSection

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})")
MOST_SHARDS = 100_000


def places_of(request: SourceRequest, reading: SourceReading) -> tuple[Path, ...]:
    """The places of one source: `data-{000..009}.tar` is ten. Problems for those that are not there."""
    text = request.section.path
    words = [shard for word in _expanded(text, reading) for shard in _shards_of(word, reading)]
    if urls := [word for word in words if is_url(word)]:
        pointers = iter(remote_places(urls, request, reading))
        if reading.problems:
            return ()
        return tuple(next(pointers) if is_url(word) else place_from(word) for word in words)
    places = [place_from(word) for word in words]
    missing = [place for place in places if not place.exists()]
    if len(missing) == 1 or (missing and len(missing) == len(places)):
        reading.problem(f"There is no folder or file {missing[0]}.", "Check the path of the data.")
    elif missing:
        message = f"{len(missing)} of {len(places)} files of {text} are not there (first: {missing[0]})."
        reading.problem(message, "Check the range.")
    return () if missing else tuple(places)


def _shards_of(word: str, reading: SourceReading) -> list[str]:
    """The shards that an index file names, a line each, from where it is itself; any other word is a place."""
    if is_url(word):
        return shards_named_by(word, reading)
    place = place_from(word)
    if place.suffix.lower() != ".txt" or not place.is_file():
        return [word]
    try:
        names = names_in(read_text(place, MOST_INDEX_BYTES))
    except TextError as error:
        reading.problem(f"{place} {error}.", "An index of shards has one name in each line.")
        return []
    return [name if is_url(name) else str(place.parent / name) for name in names]


def named_places(section: SourceSection) -> list[Path]:
    """The places that a source names, whether they are there or not: its images, its table, its masks, its control images."""
    named = [*_expanded(section.path, SourceReading()), section.captions_file, section.masks]
    places = [place_from(each) for each in named if each is not None and each != "alpha" and not is_url(each)]
    return places + [control_place(each)[0] for each in section.control_images if not is_url(each)]


def control_place(named: str) -> tuple[Path, str]:
    """The folder of an entry of `control_images`, and what follows an image's name there: `_0` of `before/*_0`."""
    place = place_from(named)
    return (place.parent, place.name[1:]) if place.name.startswith("*") else (place, "")


def place_from(text: str | Path) -> Path:
    """From the root of the disk, links left as they are."""
    return Path(os.path.abspath(Path(text).expanduser()))


def _expanded(text: str, reading: SourceReading) -> list[str]:
    """Every name that a pattern with braces means: `{000..009}` or `{train,extra}`. A file of that very name wins."""
    if os.path.lexists(os.path.expanduser(text)):
        return [text]
    choices = [_choices(inner) for inner in BRACES.findall(text)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if not choices or count > MOST_SHARDS:
        if count > MOST_SHARDS:
            reading.problem(f"{text} means {count} files; {MOST_SHARDS} are the most.", "Check the range.")
            return []
        return [text]
    between = BRACES.split(text)[::2]
    return [
        "".join(itertools.chain.from_iterable(itertools.zip_longest(between, chosen, fillvalue="")))
        for chosen in itertools.product(*choices)
    ]


def _choices(inner: str) -> Sequence[str]:
    match = RANGE.fullmatch(inner)
    if match is None:
        return inner.split(",")
    first, last = int(match[1]), int(match[2])
    step = 1 if first <= last else -1
    # One more than the most is enough to say that it is too many.
    numbers = range(first, last + step, step)[: MOST_SHARDS + 1]
    return [str(number).zfill(len(match[1])) for number in numbers]


def common_root(places: Sequence[Path]) -> Path:
    """The place that images of these places are named from: the only one, or the folder around all."""
    named = [shown_place(place) for place in places]
    if len(named) == 1:
        return named[0]
    try:
        return Path(os.path.commonpath([place.parent for place in named]))
    except ValueError:  # on several drives, or here and on a server
        return named[0].parent


# Sources that differ in one of these make other samples of the same images.
DIFFERING = (
    "resolutions",
    "flip",
    "color_variants",
    "crop",
    "default_caption",
    "captions_file",
    "masks",
    "captions",
    "control_images",
    "control_columns",
)


def find_overlaps(requests: Sequence[tuple[SourceRequest, Sequence[Path]]], reading: SourceReading) -> None:
    """Images must not come in twice unseen: repeats say that openly."""
    fix = "Name it once; to weigh images use repeats, or folders such as 10_name."
    seen: dict[Path, list[tuple[SourceRequest, Path]]] = {}
    for request, places in requests:
        for place in places:
            before = seen.setdefault(place.resolve(), [])
            if any(_alike(request, earlier) for earlier, _ in before):
                reading.problem(f"{shown_place(place)} is named as data twice.", fix)
            before.append((request, place))
    for real, those in seen.items():
        if len(those) > 1:
            reading.note(
                f"{shown_place(those[0][1])}: {len(those)} sources with settings of their own train each of its images."
            )
        for outer in real.parents:
            if outer in seen:
                message = f"Of the data {seen[outer][0][1]} and {those[0][1]} one contains the other."
                reading.problem(message, fix)


def _alike(one: SourceRequest, other: SourceRequest) -> bool:
    return all(getattr(one.section, name) == getattr(other.section, name) for name in DIFFERING)
