"""The verdict on images that another program drew with a LoRA: `validate --samples DIR --data DATA`."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.errors import DatasetRefused, Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.data.images.images import IMAGE_ENDINGS, BrokenImageError, load_rgb
from lora_trainer.data.images.pixels import read_pixels
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.prompt_weights import plain_caption
from lora_trainer.data.views import plan_plain
from lora_trainer.evaluation.judge import Judge
from lora_trainer.evaluation.looks import look_at
from lora_trainer.evaluation.lora_check import FEWEST_REAL, cannot_show
from lora_trainer.evaluation.lora_findings import cannot_tell_findings, part_findings
from lora_trainer.evaluation.lora_report import NO_ENCODER, LoraReport
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.evaluation.sample_rates import BY_SAMPLES, DrawnSample, away_part, subject_parts
from lora_trainer.evaluation.seeing import describing, load_encoder, to_image
from lora_trainer.evaluation.verdict import SCALES, Cost, VerdictPart
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.inputs import measured_among, read_model, trained_framings
from lora_trainer.run.round_trip import open_round_trip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from PIL import Image

    from lora_trainer.config.schema import Config
    from lora_trainer.evaluation.judge import Tested

FEWEST_SAMPLES = 4
NOT_JUDGED = {
    "works": VerdictPart("works", None, "images were judged, not a file"),
    "keeps_base": VerdictPart("keeps_base", None, "the base model's own samples of these prompts are not known"),
}


def judge_images(
    samples: Path, data: Path, unrelated: Path | None, config: Config, say: Callable[[str], None]
) -> LoraReport:
    """Judge the images of a folder beside a dataset's.

    Each `NAME.png` has its prompt in `NAME.txt`; images of one prompt are its seeds. `unrelated` has images of prompts that are not
    about the dataset. With `model.path` the dataset's images go through its autoencoder first. Raises UsageError for folders
    and images that cannot be read, images without a prompt, and too few of them.
    """
    began = time.monotonic()
    encoder = find_encoder(config, say=say)
    describe = None if encoder is None else describing(load_encoder(encoder.path, torch.device("cpu")))
    drawn = read_drawn(samples, FEWEST_SAMPLES)
    others = None if unrelated is None else [image for _, image in read_drawn(unrelated, 1, prompted=False)]
    name = NO_ENCODER if encoder is None else encoder.name
    images, captions, decibels = read_real(data, config)
    numbers = {"images": {"decibels": decibels}}
    say(f"{counted(len(drawn), 'image')} from {samples}, beside {counted(len(images), 'image')} of the dataset")
    if why := cannot_show(decibels):
        parts = {**NOT_JUDGED, **{part: VerdictPart(part, None, *why) for part in BY_SAMPLES}}
        return replace(report_of(parts, config.gates.lora, (), name), numbers=numbers)
    judge = Judge(images, captions, describe)
    say("testing the judge with planted faults")
    tested = judge.tested()
    report = judged(judge, tested, drawn, others, (config.gates.lora, name))
    cost = Cost(0, round(time.monotonic() - began, 2))
    return replace(report, numbers={**report.numbers, **numbers}, cost=cost)


def judged(
    judge: Judge,
    tested: Tested,
    drawn: Sequence[tuple[str, Image.Image]],
    unrelated: Sequence[Image.Image] | None,
    gate: tuple[float, str],
) -> LoraReport:
    """The report on images with their prompts, and on images of unrelated prompts; `gate` is the least score and the encoder's name."""
    prompts = list(dict.fromkeys(prompt for prompt, _ in drawn))
    samples = [
        DrawnSample(prompt, prompts.index(prompt), number, look_at(image, judge.describe))
        for number, (prompt, image) in enumerate(drawn)
    ]
    away = VerdictPart("stays_away", None, "no images of other prompts (--unrelated)")
    if unrelated is not None:
        away = away_part(judge, tested, [(None, look_at(image, judge.describe)) for image in unrelated], 1)
    parts = {**NOT_JUDGED, **subject_parts(judge, tested, samples), "stays_away": away}
    report = report_of(parts, gate[0], tested.cannot_tell, gate[1])
    return replace(report, numbers={"judge": asdict(tested)})


def report_of(parts: Mapping[str, VerdictPart], minimum: float, cannot_tell: Sequence[str], encoder: str) -> LoraReport:
    ordered = {name: parts[name] for name in SCALES}
    found = part_findings(ordered, minimum, may_grow=False)
    untold = cannot_tell_findings(cannot_tell, encoder=encoder != NO_ENCODER)
    findings = with_remedies([*found, *untold], ordered)
    return LoraReport(minimum, ordered, findings, encoder=encoder, cannot_tell=tuple(cannot_tell))


def read_drawn(folder: Path, fewest: int, *, prompted: bool = True) -> list[tuple[str, Image.Image]]:
    """The images of a folder, each with its prompt, in the order of their names. Raises UsageError, also for fewer than `fewest`."""
    if not folder.is_dir():
        raise UsageError(Problem("folder_missing", f"There is no folder {folder}.", "Check the path."))
    paths = sorted(each for each in folder.iterdir() if each.suffix.lower() in IMAGE_ENDINGS)
    if len(paths) < fewest:
        message = f"{folder} has {counted(len(paths), 'image')}; at least {fewest} are needed."
        raise UsageError(
            Problem("too_few_samples", message, "Draw more images, of several prompts with two seeds each.")
        )
    found = []
    for path in paths:
        words = path.with_suffix(".txt")
        if prompted and not words.is_file():
            fix = f"Write the prompt of {path.name} into {words.name}."
            raise UsageError(Problem("prompt_missing", f"{path} has no prompt beside it.", fix))
        try:
            found.append((words.read_text("utf-8").strip() if prompted else "", load_rgb(path)))
        except BrokenImageError as error:
            raise UsageError(Problem(error.code, f"{path} {error.message}", error.fix)) from error
        except (OSError, UnicodeDecodeError) as error:
            message = f"{path} or its prompt cannot be read: {error}"
            raise UsageError(Problem("sample_unreadable", message, "Draw it again, or remove it.")) from error
    return found


def read_real(data: Path, config: Config) -> tuple[list[Image.Image], list[str], float | None]:
    """The dataset's images as they are trained, their captions, and how many dB the model's autoencoder keeps of them.

    They have been through the autoencoder, if the config names a model; else there is no figure.
    """
    _, facts = read_model(config)
    manifest, findings = read_manifest([data], allow_missing_captions=True)
    if broken := [finding for finding in findings if finding.severity == "error"]:
        raise UsageError([Problem(each.code, f"{each.path} {each.message}", each.fix) for each in broken])
    samples = [manifest.samples[index] for index in measured_among(manifest.samples, ())]
    if len(samples) < FEWEST_REAL:
        message = f"{data} has {counted(len(samples), 'image')}; at least {FEWEST_REAL} are needed to compare with."
        raise UsageError(Problem("too_few_images", message, "Name the images that the LoRA was trained on."))
    views = plan_plain(samples, trained_framings(config, facts)[:1]).views
    try:
        pixels = [read_pixels(sample, view[0])[None] for sample, view in zip(samples, views, strict=True)]
    except DatasetRefused as refused:
        raise UsageError(refused.problems) from refused
    captions = [plain_caption(sample.caption) for sample in samples]
    if config.model.path is None:
        return [to_image(each[0]) for each in pixels], captions, None
    kept = list(map(open_round_trip(facts), pixels))
    return [to_image(shown[0]) for shown, _ in kept], captions, sum(ratio for _, ratio in kept) / len(kept)
