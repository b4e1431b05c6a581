"""Compare captions with their images: what `check --model` does beside the checks without a model.

By the base model, or by `gates.encoder` where that is a model of images and texts, such as CLIP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lora_trainer.core.errors import MACHINE_FAILURES, DatasetRefused, Problem, UsageError, is_out_of_memory
from lora_trainer.core.imports import importing
from lora_trainer.data.captions import canonical, settled
from lora_trainer.data.images.images import BrokenImageError, load_rgb
from lora_trainer.data.views import plan_plain
from lora_trainer.dataset_check.doubts import NOT_COMPARED, CaptionAgreement, Doubt
from lora_trainer.models.folder import read_config
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.bases.find import silent
from lora_trainer.run.counting import JUDGED, counting
from lora_trainer.run.inputs import caption_rules, data_in_use, read_model, trained_framings

if TYPE_CHECKING:  # torch is loaded where the base model is
    from pathlib import Path

    from lora_trainer.config.schema import Config
    from lora_trainer.core.findings import Finding
    from lora_trainer.data.sample import Sample
    from lora_trainer.dataset_check import DataReport
    from lora_trainer.evaluation.caption_fit import CaptionComparison
    from lora_trainer.models.family import Family, ModelFacts

MOST_IMAGES = 48  # of a dataset, evenly spread
IMAGES_TOGETHER = 24  # each with the captions of all of these
FEWEST_DIFFERENT = 4  # captions; fewer give no interval
TOKENIZERS = ("tokenizer.json", "vocab.json", "spiece.model")  # an encoder without one reads no text
LARGE_BEFORE_RUN = 3_000_000_000  # weights of a denoiser; with more, comparing delays a run by many minutes
LARGEST_SHARE_OF_GPU = 0.8  # of the memory that can be used; a denoiser that takes more comes in parts, slowly
LARGE_ON_CPU = 100_000_000  # weights of a denoiser; with more, comparing takes hours on a CPU


class CaptionExaminer:
    """Compares captions with images while data is read: what `read_data` calls with its report. `agreement` is what it found.

    Before a run it is advice, which neither ends nor delays the run much: only warnings count, because that the model does not know
    these captions is no reason against it; data that is refused anyway is not compared; a large model is not asked; and what fails is
    a `reason`. With `measures` false, `agreement` is what was found before the run that is resumed.
    """

    def __init__(
        self,
        config: Config,
        agreement: CaptionAgreement = NOT_COMPARED,
        *,
        before_run: bool = False,
        measures: bool = True,
    ) -> None:
        self._config = config
        self._before_run = before_run
        self._measures = measures
        self.agreement = agreement

    def __call__(self, report: DataReport) -> list[Finding]:
        if not self._measures and self.agreement.doubts:
            here = {each.path.resolve(): each.path for each in report.samples}
            found = [(each, here.get(each.path.resolve())) for each in self.agreement.doubts]
            self.agreement = replace(self.agreement, doubts=[replace(each, path=path) for each, path in found if path])
        elif self._measures and (report.passed or not self._before_run):
            self._measure(report.samples)
        return [each for each in self.agreement.findings if each.severity == "warning" or not self._before_run]

    def _measure(self, samples: Sequence[Sample]) -> None:
        from lora_trainer.core.hardware import free_memory
        from lora_trainer.monitor.memory import set_allocator
        from lora_trainer.run.choices import evaluated_on
        from lora_trainer.run.libraries import import_libraries
        from lora_trainer.training.determinism import fix_workspace

        if self._before_run:  # what the run sets before the first computation
            with importing():
                import_libraries(self._config)
            set_allocator(expandable=self._config.memory.expandable_segments)
            fix_workspace(self._config.train.deterministic)
        try:
            self.agreement = measure_agreement(self._config, samples, before_run=self._before_run)
            return
        except MACHINE_FAILURES as error:
            if not self._before_run and not is_out_of_memory(error):
                raise
            why = "not enough memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        self.agreement = CaptionAgreement(reason=why.partition("\n")[0], of_images=len(samples))
        free_memory(evaluated_on(self._config)[0])


@data_in_use()
def measure_agreement(config: Config, samples: Sequence[Sample], *, before_run: bool = False) -> CaptionAgreement:
    """Compare each image's caption with those of other images by the encoder or the base model. Nothing is downloaded.

    Before a run a base model is asked only where that is quick.
    `samples` are those without an error. What keeps it from being measured is the `reason`.
    """
    learned = {sample.content: sample for sample in samples if not sample.regularization and sample.caption}
    every = tuple(map(canonical, settled(tuple(learned.values()), caption_rules(config))))
    different = len({sample.caption for sample in every})
    if different < FEWEST_DIFFERENT:
        few = f"only {different} distinct captions, and at least {FEWEST_DIFFERENT} are needed"
        return CaptionAgreement(reason=few if different > 1 else "all captions are alike", of_images=len(every))
    config = config.model_copy(update={"run": config.run.model_copy(update={"offline": True})})
    chosen = every[:: -(-len(every) // MOST_IMAGES)]
    try:
        encoder = find_text_encoder(config)
        if encoder is not None:
            found = _compare_by_encoder(encoder, config, chosen)
        else:
            found = _compare(config, read_model(config, say=silent), chosen, before_run=before_run)
    except (UsageError, DatasetRefused) as error:
        found = CaptionAgreement(reason=str(error.problems[0]))
    return replace(found, of_images=len(every))


def find_text_encoder(config: Config, *, weights: bool = True) -> Path | None:
    """The folder of `gates.encoder` where its model reads texts too; without `weights` only configs are downloaded for it.

    Raises UsageError for what is no image encoder.
    """
    encoder = find_encoder(config, weights=weights, say=silent)
    if encoder is None or not any((encoder.path / name).exists() for name in TOKENIZERS):
        return None
    return encoder.path if "text_config" in read_config(encoder.path, "config.json") else None


def _compare_by_encoder(folder: Path, config: Config, chosen: Sequence[Sample]) -> CaptionAgreement:
    """By a model of images and texts: all images with all captions."""
    import numpy as np

    from lora_trainer.evaluation.caption_fit import compare_fits
    from lora_trainer.evaluation.likeness import differ
    from lora_trainer.models.text_matcher import load_text_matcher
    from lora_trainer.run.choices import evaluated_on

    if not differ([sample.caption for sample in chosen]):
        return CaptionAgreement(reason="all captions have the same words")
    device, _ = evaluated_on(config)
    places = list({sample.caption: place for place, sample in enumerate(chosen)}.values())
    mismatches = load_text_matcher(folder, [chosen[place].caption for place in places], device)
    losses = []
    with counting() as count:
        progress = count(JUDGED)
        for done, sample in enumerate(chosen, 1):
            try:
                losses.append(mismatches(load_rgb(sample.path, sample.span)).double().numpy())
            except BrokenImageError as error:
                raise UsageError(Problem(error.code, f"{sample.path} {error.message}", error.fix)) from error
            progress(done, len(chosen))
    found = compare_fits(np.stack(losses), places, [sample.caption for sample in chosen])
    return _summarized(chosen, [range(len(chosen))], [places], [found])


def _compare(
    config: Config, model: tuple[Family, ModelFacts], chosen: Sequence[Sample], *, before_run: bool
) -> CaptionAgreement:
    import torch

    from lora_trainer.core.hardware import free_memory
    from lora_trainer.evaluation.caption_fit import (
        caption_losses,
        compare_fits,
        passes,
    )
    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.likeness import differ
    from lora_trainer.evaluation.placing import bring_denoiser, with_less
    from lora_trainer.evaluation.prediction import Passes
    from lora_trainer.run.choices import evaluated_on, usable_bytes
    from lora_trainer.run.encoding import encode_by_base

    if not differ([sample.caption for sample in chosen]):
        return CaptionAgreement(reason="all captions have the same words")
    family, facts = model
    if facts.control_tokens and any(sample.controls for sample in chosen):
        return CaptionAgreement(reason=f"{facts.name} reads each caption with its own control images")
    device, dtype = evaluated_on(config)
    with torch.device("meta"):
        empty = family.denoiser.make(read_config(facts.path, f"{family.denoiser.component}/config.json"))
    weights = sum(weight.numel() for weight in empty.parameters())
    if device.type == "cpu" and weights > LARGE_ON_CPU:
        return CaptionAgreement(reason=f"without a GPU, {facts.name} would take hours")
    usable = usable_bytes(config, device)
    is_swapped = config.memory.blocks_to_swap not in ("auto", 0)
    is_swapped |= usable is not None and weights * dtype.itemsize > LARGEST_SHARE_OF_GPU * usable
    if before_run and (weights > LARGE_BEFORE_RUN or is_swapped):
        why = "comes to the GPU in parts" if is_swapped else f"has {weights / 1e9:.1f} billion weights"
        return CaptionAgreement(reason=f"{facts.name} {why}: `lora-trainer check DATA --model MODEL` compares them")

    encoded = encode_by_base(config, model, chosen, plan_plain(chosen, trained_framings(config, facts)), device)
    parts = -(-len(chosen) // IMAGES_TOGETHER)
    groups = [range(part, len(chosen), parts) for part in range(parts)]
    captions = [list({chosen[place].caption: place for place in reversed(group)}.values()) for group in groups]
    process = family.denoiser.make_process(facts.path)

    def compare(compute: Compute) -> list[CaptionComparison]:
        denoiser = family.denoiser.load(facts.path, compute.dtype, torch.device("cpu")).eval()
        places = max(math.prod(each.latents.shape[1:]) for each in encoded)
        bring_denoiser(denoiser, family, device, compute.usable, places)
        total = sum(
            passes([encoded[place] for place in group], len(own)) for group, own in zip(groups, captions, strict=True)
        )
        predict = Passes(compute.progress, total).counted(partial(family.denoiser.predict, denoiser))
        found = []
        for group, own in zip(groups, captions, strict=True):
            inside = [group.index(place) for place in own]
            losses = caption_losses(predict, [encoded[place] for place in group], inside, process, compute)
            found.append(compare_fits(losses, inside, [chosen[place].caption for place in group]))
        return found

    with counting() as count:
        compute = Compute(dtype, device, usable, progress=count(JUDGED))
        found = with_less(compare, compute)
    free_memory(device)
    return _summarized(chosen, groups, captions, found)


def _summarized(
    chosen: Sequence[Sample],
    groups: Sequence[range],
    captions: Sequence[Sequence[int]],
    found: Sequence[CaptionComparison],
) -> CaptionAgreement:
    """What the comparisons of groups of images say, each with captions at these places."""
    from lora_trainer.evaluation.caption_fit import mean_share

    share = mean_share([value for each in found for value in each.own])
    return CaptionAgreement(
        share.value,
        share.low,
        share.high,
        mean_share([value for each in found for value in each.apart]).value,
        images=len(chosen),
        comparisons=sum(len(group) * (len(own) - 1) for group, own in zip(groups, captions, strict=True)),
        doubts=doubts_among(chosen, groups, found),
    )


def doubts_among(
    chosen: Sequence[Sample], groups: Sequence[range], found: Sequence[CaptionComparison]
) -> tuple[Doubt, ...]:
    """Images that another image's caption suits better than their own, the worst first."""
    doubts = [
        Doubt(
            path=(image := chosen[group[row]]).path,
            caption=image.caption,
            other=(other := chosen[group[each.better[row]]]).path,
            better=other.caption,
            worse=1.0 - float(each.own[row]),
            margin=float(each.margin[row]),
        )
        for group, each in zip(groups, found, strict=True)
        for row in range(len(group))
        if each.margin[row] > 0
    ]
    return tuple(sorted(doubts, key=lambda doubt: -doubt.margin))
