"""What can be done to many captions at once: find and replace, tags, a trigger word. Pure functions of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from lora_trainer.core.errors import Problem
from lora_trainer.data.captions import has_trigger
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES
from lora_trainer.web.safety import Refusal

Word = Annotated[str, Field(min_length=1, max_length=1000)]
CONTROL = re.compile(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")


class _Edit(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Replace(_Edit):
    """Find a text, or a whole tag, and put another in its place; an empty one removes it."""

    do: Literal["replace"]
    find: Word
    put: Annotated[str, Field(max_length=1000)] = ""
    whole_tag: bool = False
    match_case: bool = True


class AddTag(_Edit):
    """Add a tag where it is missing."""

    do: Literal["add_tag"]
    tag: Word
    at: Literal["start", "end"] = "end"


class RemoveTag(_Edit):
    """Remove a tag wherever it is."""

    do: Literal["remove_tag"]
    tag: Word


class AddTriggerWord(_Edit):
    """Put a word in front of the captions that do not contain it, as `captions.trigger_word` does in training."""

    do: Literal["trigger_word"]
    word: Word


class SortTags(_Edit):
    """Sort the tags by the alphabet, but for the first `keep`."""

    do: Literal["sort_tags"]
    keep: Annotated[int, Field(ge=0, le=1000)] = 0


class DedupeTags(_Edit):
    """Remove tags that come a second time."""

    do: Literal["dedupe_tags"]


BulkEdit = Annotated[Replace | AddTag | RemoveTag | AddTriggerWord | SortTags | DedupeTags, Field(discriminator="do")]
TITLES: dict[str, str] = {
    "replace": "Find and replace",
    "add_tag": "Add a tag",
    "remove_tag": "Remove a tag",
    "trigger_word": "Trigger word",
    "sort_tags": "Sort tags",
    "dedupe_tags": "Remove repeated tags",
}


def edited(caption: str, edit: BulkEdit) -> str:
    """A caption after an edit. Tags are those of each line, between commas."""
    match edit:
        case Replace(whole_tag=False):
            pattern = re.compile(re.escape(edit.find), re.NOFLAG if edit.match_case else re.IGNORECASE)
            return pattern.sub(lambda _: edit.put, caption)
        case Replace():
            wanted, put = edit.find.strip(), edit.put.strip()
            same = wanted if edit.match_case else wanted.casefold()
            found = {tag for tag in tags_in(caption) if (tag if edit.match_case else tag.casefold()) == same}
            return each_line(
                caption, lambda tags: [put if tag in found else tag for tag in tags if put or tag not in found]
            )
        case AddTag():
            tag = edit.tag.strip()
            first, last = ([tag], []) if edit.at == "start" else ([], [tag])
            return each_line(caption or " ", lambda tags: tags if tag in tags else [*first, *tags, *last])
        case RemoveTag():
            return each_line(caption, lambda tags: [tag for tag in tags if tag != edit.tag.strip()])
        case AddTriggerWord():
            word = edit.word.strip()
            return each_line(caption or " ", lambda tags: tags if has_trigger(", ".join(tags), word) else [word, *tags])
        case SortTags():
            return each_line(caption, lambda tags: tags[: edit.keep] + sorted(tags[edit.keep :], key=str.casefold))
        case DedupeTags():
            return each_line(caption, lambda tags: list(dict.fromkeys(tags)))


def tags_in(line: str) -> list[str]:
    return [tag for part in line.replace("\n", ",").split(",") if (tag := part.strip())]


def each_line(caption: str, change: Callable[[list[str]], Sequence[str]]) -> str:
    """The caption with the tags of each line changed; a line whose tags stay is left as it is written."""
    lines = []
    for line in caption.split("\n"):
        tags = tags_in(line)
        after = list(change(list(tags)))
        lines.append(line.strip() if after == tags else ", ".join(after))
    return "\n".join(lines)


def refuse_wrong_text(caption: str, name: str) -> None:
    """Raise Refusal for what is no caption: too long, or with control codes."""
    try:
        size = len(caption.encode("utf-8"))
    except UnicodeEncodeError:
        size = -1
    if size < 0 or CONTROL.search(caption):
        raise Refusal(
            422, Problem("caption_invalid", f"The caption of {name[:200]} has control codes.", "Remove them.")
        )
    if size >= MOST_CAPTION_BYTES:
        raise Refusal(
            422, Problem("caption_too_large", f"The caption of {name[:200]} is larger than 1 MiB.", "Shorten it.")
        )
