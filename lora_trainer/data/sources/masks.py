"""Where an image's loss counts: its own transparency, or a gray image of the same name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.data.buckets import has_other_shape
from lora_trainer.data.sample import Mask, Sample
from lora_trainer.data.sources.names import MASK_LABEL
from lora_trainer.data.sources.pairs import find_partners

if TYPE_CHECKING:
    from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest

ALPHA = "alpha"


def masks_folder(request: SourceRequest) -> Path | None:
    """The folder of gray images, where one is configured."""
    masks = request.section.masks
    return None if masks is None or masks == ALPHA else Path(os.path.abspath(Path(masks).expanduser()))


def with_masks(
    found: Sequence[FoundImage], root: Path, request: SourceRequest, reading: SourceReading
) -> list[FoundImage]:
    """Each image with where its mask lies; its content is read with the headers."""
    if request.section.masks is None:
        return list(found)
    if request.section.masks == ALPHA:
        return [replace(each, mask=Mask(None)) for each in found]
    folder = masks_folder(request)
    if folder is None or not folder.is_dir():
        message = f"There is no folder of masks {request.section.masks}."
        reading.problem(message, "Check data.sources.masks: a folder of gray images, or `alpha`.")
        return list(found)
    masks = find_partners(folder).pair(found, root, (MASK_LABEL, ""), "mask", reading)
    paired = [replace(each, mask=Mask(masks[each.path])) if each.path in masks else each for each in found]
    if found and not any(each.mask for each in paired):
        reading.problem(
            f"{folder} holds no mask of any of {len(found)} images.",
            f"A mask has its image's name: {found[0].path.stem}.png or {found[0].path.stem}{MASK_LABEL}.png. Or remove masks.",
        )
    for each in paired:
        if each.mask is None:
            _missing(each.path, f"has no mask in {folder.name}", reading)
    return paired


def _missing(path: Path, what: str, reading: SourceReading) -> None:
    message = f"{what}; all of it is trained on."
    reading.find("missing_mask", "warning", message, "Add one, or move the image to a source without masks.", path)


def judged_mask(sample: Sample, size: tuple[int, int], reading: SourceReading) -> Sample:
    """The sample with its mask file, whose `size` (width, height) must be of the image's shape."""
    width, height = size
    if has_other_shape((sample.width, sample.height), size) and sample.mask is not None:
        name = sample.mask.path.name if sample.mask.path else "its mask"
        message = f"is {sample.width}×{sample.height}, its mask {name} {width}×{height}: another shape."
        fix = "Make the mask of the image's shape; any size will do."
        if not has_other_shape((sample.height, sample.width), size):
            message = f"{message[:-1]}, turned by 90°, as if one of the two had lost its EXIF orientation."
            fix = "Turn the mask as the image is seen, and save it without an orientation in its EXIF data."
        reading.find("mask_differs", "error", message, fix, sample.path)
        return replace(sample, mask=None)
    return sample


def judged_alpha(sample: Sample, reading: SourceReading) -> Sample:
    """The sample with its own transparency as a mask, where it has any."""
    if sample.has_alpha:
        return sample
    _missing(sample.path, "has no transparency to be its mask", reading)
    return replace(sample, mask=None)
