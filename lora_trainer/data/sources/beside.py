"""Captions in files beside their images: texts, and JSON with a caption and a weight. The members of a tar are read so, too."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lora_trainer.core.bounded import TextError, decode, read_bounded
from lora_trainer.core.findings import Finding, Severity
from lora_trainer.data.sources.names import IMAGE_ENDING_SET, NamedImages, ending_of, is_image, stem_of
from lora_trainer.data.sources.rows import Caption, description_of
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES

if TYPE_CHECKING:
    from lora_trainer.data.sources.found import SourceReading, SourceRequest

CAPTION_ENDINGS = (".txt", ".caption")
JSON_ENDING = ".json"


def caption_endings(request: SourceRequest) -> tuple[str, ...]:
    return CAPTION_ENDINGS if request.ending is None else (request.ending,)


class TextFile(NamedTuple):
    """A file that belongs to an image by its name. Of several captions the one with the least `order` is read."""

    order: tuple[int, ...]
    name: str
    images: Sequence[str]  # all that it belongs to

    @property
    def is_caption(self) -> bool:
        """Whether its ending is one that captions have here. A JSON that is none may hold one all the same."""
        return not self.order[0]


class TextFiles(NamedTuple):
    """The files beside images: those of each image in their order, captions of no image, and what is not read."""

    of: dict[str, list[TextFile]]
    orphans: list[str]
    unread: list[str]


def texts_beside(names: Sequence[str], request: SourceRequest) -> TextFiles:
    """The texts among the files of a folder. The caption of `cat.png` is `cat.txt` or `cat.png.txt`."""
    images = NamedImages[str]()
    for name in names:
        if is_image(name):
            images.add(stem_of(name), name)
            images.add(name, name)
    return sort_texts(names, images, request)


def sort_texts(names: Iterable[str], images: NamedImages[str], request: SourceRequest) -> TextFiles:
    """Give each text to its images."""
    read = caption_endings(request)
    places = {ending: place for place, ending in enumerate(dict.fromkeys((*read, *CAPTION_ENDINGS, JSON_ENDING)))}
    found, orphans, unread = dict[str, list[TextFile]](), list[str](), list[str]()
    for name in names:
        ending = ending_of(name)
        place = places.get(ending)
        if place is None:
            if ending not in IMAGE_ENDING_SET:
                unread.append(name)
            continue
        is_caption = place < len(read)
        stem = name[: -len(ending)]
        nearness, owners = images.find(stem)
        if is_caption and not owners:
            orphans.append(name)
        elif not is_caption and (not owners or ending != JSON_ENDING):
            unread.append(name)
        # Own captions before shared ones, the nearest name, the first ending, `cat.txt` before `cat.png.txt` and `cat.TXT`.
        order = (not is_caption, len(owners) > 1, nearness, place, is_image(stem), not name.endswith(ending))
        for owner in owners:
            found.setdefault(owner, []).append(TextFile(order, name, owners))
    for files in found.values():
        files.sort()
    return TextFiles(found, orphans, unread)


def reader_of(folder: Path) -> Callable[[str], bytes]:
    """Reads small files of a folder by their names. Not by joining paths, which takes as long as reading the file."""
    before = os.path.join(folder, "")
    return lambda name: read_bounded(before + name, MOST_CAPTION_BYTES)


@dataclass(frozen=True)
class Beside:
    """What the files beside an image hold. `file` is that of its caption, `instead` what was found in place of one, and
    `hint` where it may be. `damage` says what is wrong with a file that may be the caption."""

    caption: Caption | None = None
    weight: object = None
    file: str = ""
    instead: str = ""
    hint: str = ""
    damage: Finding | None = None


NOTHING = Beside()


def read_beside(
    image: Path,
    files: Sequence[TextFile],
    read: Callable[[str], bytes],
    request: SourceRequest,
    reading: SourceReading,
    listed: Caption | None = None,
) -> Beside:
    """What an image's files hold; `read` returns the bytes of one by its name, and raises TextError.

    `listed` is the image's caption in a table: a text comes before it, and a JSON only where its ending is the one set.
    """
    if not files:
        return NOTHING if listed is None else Beside(listed)
    # What comes before both captions leaves nothing to decide between them.
    table, other = "the folder's table", listed if request.section.captions_file is None else None
    captions = [each for each in files if each.is_caption]
    documents = [each for each in files if each.name.lower().endswith(JSON_ENDING)]
    # A text. Its JSON may have a weight.
    if captions and captions[0] not in documents:
        _find_doubtful(image, captions, reading)
        weight = _weight_in(image, documents, read, request, reading)
        name = captions[0].name
        try:
            caption = decode(read(name))
            find_other_caption(image, posixpath.basename(name), caption, table, other, reading)
            return Beside(caption, weight, name)
        except TextError as error:
            message = f"has a caption file that {error} ({posixpath.basename(name)})."
            damage = Finding("unreadable_caption", "error", message, "Save it as a short UTF-8 text.", image)
            return Beside(listed, weight, name, damage=damage)
    # Nothing of the ending that is set.
    if request.ending not in (None, JSON_ENDING) or not documents:
        weight = _weight_in(image, documents, read, request, reading)
        return Beside(listed, weight, instead=posixpath.basename(files[0].name))
    # A table, which somebody wrote for training; many programs write a JSON.
    if listed is not None and request.ending is None:
        return Beside(listed, _weight_in(image, documents, read, request, reading))
    _find_doubtful(image, documents, reading)
    reading.tables += 1
    try:
        described = description_of(read(documents[0].name), request.columns)
    except TextError as error:
        return Beside(listed, damage=_damaged(image, documents[0], error, "error"))
    if described.caption is not None:
        reading.filled[described.filled] += 1
        reading.first_filled.setdefault(described.filled, image)
        name = posixpath.basename(documents[0].name)
        find_other_caption(image, name, described.caption, table, other, reading)
        return Beside(described.caption, described.weight, documents[0].name)
    if listed is not None or not (described.columns or described.groups):
        return Beside(listed, described.weight)
    name, columns = posixpath.basename(documents[0].name), ", ".join(described.columns)
    if described.groups:
        hint = f"{name} has its tags in groups ({', '.join(described.groups)}): write them as one text or one list."
        return Beside(weight=described.weight, hint=hint)
    reading.without_caption.append(f"{name}, which has {columns}")
    hint = f"{name} has {columns}: captions.column names the one that holds captions."
    return Beside(weight=described.weight, hint=hint)


def _find_doubtful(image: Path, captions: Sequence[TextFile], reading: SourceReading) -> None:
    """Name what could be meant otherwise: several captions of one image, and one caption of several images."""
    used = captions[0]
    if len(captions) > 1:
        other = captions[1]
        message = (
            f"has two captions; {posixpath.basename(used.name)} is used and {posixpath.basename(other.name)} is not."
        )
        severity: Severity = "warning" if other.order == used.order else "note"
        reading.find("two_captions", severity, message, "Remove one of them.", image)
    if len(used.images) > 1:
        message = f"is one of {len(used.images)} images with the caption {posixpath.basename(used.name)}."
        fix = f"If it is not meant for all of them, name theirs {image.name}{CAPTION_ENDINGS[0]}."
        reading.find("shared_caption", "warning", message, fix, image)


def find_other_caption(
    image: Path, place: str, caption: Caption, other_place: str, other: Caption | None, reading: SourceReading
) -> None:
    """Name the caption that is used where another place has another one."""
    if other is None:
        return
    lines = [(each,) if isinstance(each, str) else each for each in (caption, other)]
    used, unused = ([" ".join(text.split()) for text in texts] for texts in lines)
    if used != unused:
        message = f"has a caption in {place}, which is used, and another one in {other_place}."
        reading.find("two_captions", "note", message, "Remove one of them.", image)


def _weight_in(
    image: Path,
    documents: Sequence[TextFile],
    read: Callable[[str], bytes],
    request: SourceRequest,
    reading: SourceReading,
) -> object:
    """The weight in an image's first JSON, whose caption is not used; a note where that is damaged."""
    if not documents:
        return None
    try:
        return description_of(read(documents[0].name), request.columns).weight
    except TextError as error:
        reading.findings.append(_damaged(image, documents[0], error, "note"))
        return None


def _damaged(image: Path, document: TextFile, error: TextError, severity: Severity) -> Finding:
    message = f"has a file {posixpath.basename(document.name)} beside it that {error}."
    return Finding("bad_metadata", severity, message, "Fix or remove it.", image)
