"""The verdict's images of a run, as small files: samples to look at, next to the dataset's images nearest to them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor

from lora_trainer.core.errors import MACHINE_FAILURES, DatasetRefused, first_line
from lora_trainer.core.io import atomic_path, finite
from lora_trainer.data.images.pixels import read_pixels
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.placing import with_less
from lora_trainer.evaluation.seeing import to_image
from lora_trainer.evaluation.shown_samples import ShownSample, open_decoder
from lora_trainer.models.memory.phases import costs_of
from lora_trainer.run.choices import usable_bytes

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.views import View
    from lora_trainer.evaluation.validation_loss import EncodedSample
    from lora_trainer.models.family import ModelFacts
    from lora_trainer.run.inputs import Inputs
    from lora_trainer.run.session import Session

FOLDER = "samples/verdict"  # in a run's
SIDE, QUALITY = 512, 90  # pixels of the longest side; of WebP

Decode = Callable[[Tensor], Image.Image]


def keep_verdict_images(session: Session, shown: Sequence[ShownSample]) -> list[dict[str, Any]]:
    """Decode the verdict's samples, write them into the run's folder, and describe them for `run.json`.

    An earlier verdict's are removed. Without memory or disk space for them there are none: the verdict is complete.
    """
    choices = session.choices
    compute = Compute(choices.dtype, choices.device, usable_bytes(session.config, choices.device))
    write = partial(write_verdict_images, session.folder, session.inputs, shown)
    return keep_images(session.folder / FOLDER, shown, write, compute, partial(session.console.print, markup=False))


def keep_images(
    folder: Path,
    shown: Sequence[ShownSample],
    write: Callable[[Compute], list[dict[str, Any]]],
    compute: Compute,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """What `write` writes of samples into a folder, in place of what was there; nothing, with a line, where memory or disk lack."""
    shutil.rmtree(folder, ignore_errors=True)
    if not shown:
        return []
    try:
        return with_less(write, compute)
    except MACHINE_FAILURES as error:
        say(f"the verdict's images could not be decoded: {first_line(error)}")
        return []


def write_verdict_images(
    folder: Path, inputs: Inputs, shown: Sequence[ShownSample], compute: Compute
) -> list[dict[str, Any]]:
    """Decode and write the samples of a run; what each file is, with names relative to `folder`. Raises OSError."""
    samples = (*inputs.train, *inputs.validation)
    views = (*inputs.train_plan.views, *inputs.validation_plan.views)
    known = {sample.id: (sample, own[0]) for sample, own in zip(samples, views, strict=True)}
    return write_images((folder, FOLDER), inputs.facts, known, shown, compute)


def write_images(
    place: tuple[Path, str],
    facts: ModelFacts,
    known: Mapping[str, tuple[Sample, View]],
    shown: Sequence[ShownSample],
    compute: Compute,
) -> list[dict[str, Any]]:
    """Decode and write samples; `place` is a folder and the name of the one in it that they go into, whose names are relative to the
    first. `known` are the dataset's images by id, as they were trained. Raises OSError."""
    folder, inside = place
    largest = max(each.lora.shape[-2] * each.lora.shape[-1] for each in shown) * facts.downscale**2
    decode = open_decoder(facts.path, costs_of(facts), largest, compute)
    read, rows = training_images(known, decode), []
    for index, each in enumerate(shown):
        images = {"lora": decode(each.lora)}
        if each.base is not None:
            images["base"] = decode(each.base)
        if each.untriggered is not None:
            images["untriggered"] = decode(each.untriggered)
        row: dict[str, Any] = {
            "kind": each.kind,
            "prompt": each.prompt,
            "seed": each.seed,
            "ratio": each.ratio,
        }
        if each.nearest is not None:
            row["nearest_path"], images["nearest"] = read(each.nearest)
        for what, image in images.items():
            name = f"{inside}/{index:02d}_{what}.webp"
            image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
            with atomic_path(folder / name) as temporary:
                image.save(temporary, format="WEBP", quality=QUALITY)
            row[what] = name
        rows.append(row)
    return [finite(row) for row in rows]


def training_images(
    known: Mapping[str, tuple[Sample, View]], decode: Decode
) -> Callable[[EncodedSample], tuple[str, Image.Image]]:
    """The path and the trained part of an image of the dataset: from its file, else decoded from its latents."""

    def read(wanted: EncodedSample) -> tuple[str, Image.Image]:
        sample, view = known[wanted.id]
        try:
            return str(sample.path), to_image(read_pixels(sample, view))
        except DatasetRefused:  # removed or changed since
            return str(sample.path), decode(wanted.latents)

    return read
