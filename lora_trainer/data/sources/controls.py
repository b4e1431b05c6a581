"""Control images of edit models: images of the same name in folders of their own, or columns of the source's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.data.buckets import has_other_shape
from lora_trainer.data.images.images import BrokenImageError
from lora_trainer.data.sample import ControlImage, Sample, Span
from lora_trainer.data.sources.pairs import find_partners
from lora_trainer.data.sources.places import control_place

if TYPE_CHECKING:
    from lora_trainer.data.images.jobs import Facts
    from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest

FIX = "Add it, or remove the image."


def with_controls(
    found: Sequence[FoundImage], root: Path, request: SourceRequest, reading: SourceReading
) -> list[FoundImage]:
    """Each image with its control images, those of folders before those of columns. An image that lacks one is left out:
    a LoRA that is trained on whole pairs and on bare images learns to ignore its controls."""
    wanted = len(request.section.control_columns)
    labels = [control_place(each) for each in request.section.control_images]
    for named, (folder, _) in zip(request.section.control_images, labels, strict=True):
        if not folder.is_dir():
            message = f"There is no folder of control images {named}."
            reading.problem(message, "Name a folder of this machine in data.sources.control_images.")
    if not (labels or wanted) or any(not folder.is_dir() for folder, _ in labels):
        return list(found)
    files = {folder: find_partners(folder) for folder in dict.fromkeys(folder for folder, _ in labels)}
    partners = [files[folder].pair(found, root, (label,), "control", reading) for folder, label in labels]
    paired = []
    for each in found:
        paths = [of_folder.get(each.path) for of_folder in partners]
        lacking = [
            f"{folder.name}/*{label}" if label else folder.name
            for (folder, label), path in zip(labels, paths, strict=True)
            if path is None
        ]
        if len(each.controls) < wanted:
            lacking.append(f"column {request.section.control_columns[len(each.controls)]}")
        if lacking:
            message = f"has no control image in {', '.join(lacking)}."
            reading.find("missing_control", "error", message, FIX, each.path)
            continue
        own = tuple(ControlImage(path) for path in paths if path is not None)
        paired.append(replace(each, controls=(*own, *each.controls)))
    if found and not paired:
        where = ", ".join((*request.section.control_images, *request.section.control_columns))
        message = f"No image of {request.section.path} has all of its control images ({where})."
        label = labels[0][1] if labels else ""
        reading.problem(message, f"A control image has its image's name: {found[0].path.stem}{label}.png.")
    return paired


def judged_controls(
    sample: Sample,
    controls: Sequence[ControlImage],
    facts: Mapping[tuple[Path, Span | None], Facts | BrokenImageError],
    reading: SourceReading,
) -> Sample | None:
    """The sample with its control images as their headers describe them; None where one cannot be read."""
    judged = []
    for each in controls:
        read = facts[each.path, each.span]
        if isinstance(read, BrokenImageError):
            message = f"has a control image that cannot be used: {each.path.name} {read.message}"
            reading.find("unreadable_control", "error", message, read.fix, sample.path)
            return None
        control = ControlImage(each.path, each.span, read.content, read.width, read.height, read.colors)
        if read.content == sample.content:
            message = (
                f"is its own control image ({each.path.name} has the same bytes): a LoRA learns to change nothing."
            )
            reading.find("identical_control", "error", message, "Replace one of them by the edited image.", sample.path)
            return None
        if has_other_shape((sample.width, sample.height), (read.width, read.height)):
            message = (
                f"is {sample.width}×{sample.height}, its control image {each.path.name} {read.width}×{read.height}: "
                "the middle of the control image is used."
            )
            fix = "Crop both alike, unless the control is a reference of another shape."
            is_turned = not has_other_shape((sample.height, sample.width), (read.width, read.height))
            if is_turned:
                fix = "Turn one of them, if it lost its EXIF orientation. " + fix
            reading.find("control_differs", "warning" if is_turned else "note", message, fix, sample.path)
        judged.append(control)
    return replace(sample, controls=tuple(judged))


def find_swapped(samples: Sequence[Sample], reading: SourceReading) -> None:
    """An error for each image that is another's control image: its pair is the wrong way round, or mixed up."""
    names = {control.content: control.path for sample in samples for control in sample.controls}
    for sample in samples:
        if sample.controls and sample.content in names:
            message = f"is an edited image here and a control image elsewhere ({names[sample.content].name})."
            fix = "Swap the pair, or remove it: every pair must change images in the same direction."
            reading.find("swapped_control", "error", message, fix, sample.path)
