"""The LoRA gate: evaluates the exported file on a fresh copy of its base model.

Each part has its own gate (`evaluation/verdict.py`). All but the first are counted in samples, which the judge compares with the
dataset's images after its own test (`evaluation/judge.py`):

- **works**: every value finite, every pair complete, every key a module of the base with its shape, loaded by a fresh
  diffusers pipeline without an ignored key, and the prediction changed by more than `LEAST_CHANGE`. All or nothing.
- **shows**: samples of the dataset's captions show what its images show.
- **whole**: they have none of the faults that the judge can tell.
- **follows_captions**: they are more like the images whose captions are like their own.
- **is_new**: they are no copies of the images.
- **varied**: two seeds of one prompt give different images.
- **stays_away**: prompts about other things do not show the dataset.
- **keeps_base**: they still show what the base shows for them.

The score is the least of the measured parts. What cannot be measured is named and leaves the score.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL
import torch
from torch import Tensor

from lora_trainer.core.findings import Finding, counted
from lora_trainer.core.hardware import free_memory
from lora_trainer.data.caches.base_features import BaseFeatures, digest_of
from lora_trainer.evaluation.compute import ON_CPU, Compute
from lora_trainer.evaluation.drift import NEUTRAL_PROMPTS, VISITS, Visit, base_visits, drift
from lora_trainer.evaluation.encode import EncodeTexts, read_each, text_reader, with_seen
from lora_trainer.evaluation.evidence import GUIDANCE, Effort, RealImages, Studio
from lora_trainer.evaluation.health import examine
from lora_trainer.evaluation.judge import Judge, Tested
from lora_trainer.evaluation.latent_samples import Sampler
from lora_trainer.evaluation.likeness import differ
from lora_trainer.evaluation.loading import (
    at_strength,
    components_of,
    fresh_pipeline,
    misfits,
    misfits_by_config,
    without_lora,
)
from lora_trainer.evaluation.lora_findings import (
    cannot_tell_findings,
    drift_findings,
    health_findings,
    key_findings,
    loading_findings,
    not_alive,
    part_findings,
)
from lora_trainer.evaluation.lora_report import NO_ENCODER, LoraReport
from lora_trainer.evaluation.placing import bring_denoiser
from lora_trainer.evaluation.prediction import Passes, in_batches, in_parts, rows_at_once
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.evaluation.sample_rates import BY_SAMPLES, DrawnSample, Unrelated, counted_parts, kept_part
from lora_trainer.evaluation.seeing import open_eyes
from lora_trainer.evaluation.shown_samples import SHOWN, Sampled, ShownSample, choose_shown, shown_by_trigger
from lora_trainer.evaluation.texts import EncodedTexts, reads_again, texts_at
from lora_trainer.evaluation.tracking import gain_by_noise
from lora_trainer.evaluation.trigger_prompts import TriggerPrompts, trigger_prompts
from lora_trainer.evaluation.validation_loss import (
    MICRO,
    EncodedSample,
    improvement,
    validation_losses,
)
from lora_trainer.evaluation.verdict import (
    LINE,
    NOT_COMPARED,
    SCALES,
    Cost,
    Estimate,
    VerdictPart,
)
from lora_trainer.lora_format.weights import AdapterWeights, adaptable_modules
from lora_trainer.models.base_loras import base_digest
from lora_trainer.models.folder import fingerprint
from lora_trainer.models.lora_names import read_adapter_with_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lora_trainer.models.family import Caption, Family, SamplingDefaults
    from lora_trainer.models.vision_encoder import EncoderFolder

SEED = 20_240_229  # the gate's own, so that a LoRA's score does not depend on the run's seed
FEWEST_REAL = 4  # fewer have no distances to compare with
NO_IMAGES = "no images of the dataset to compare with"
LEAST_DECIBELS = (
    24.0  # that a base's autoencoder keeps of images: below, eyes and outlines are gone before a LoRA is trained
)
BROKEN_BASE_FIX = "Copy or download the base model again, or set memory.weight_dtype=bf16 or fp32."
# In half of the prompts, where the dataset has one caption for all images.
ADDED_WORDS = ("red background", "blue background", "white background", "black background")
# A round of samples, the most, the steps of each, and unrelated prompts.
LORA_CHECKS: Mapping[str, Effort] = {"full": Effort(12, 48, 20, 8), "lite": Effort(8, 8, 8, 4)}
TIMESTEPS = 8  # of each validation loss


@dataclass(frozen=True)
class LoraGate:
    """What a LoRA must reach, and how it is measured.

    `minimum` is the least score of each part, 0 to refuse nothing. `check` is one of `LORA_CHECKS`. The judge also compares images by
    an outside `encoder`, if there is one. `cache` is the folder in which what is measured of the base
    model alone is kept; None keeps nothing. Of a `trigger` word a full check also draws what it does alone and what the
    captions show without it, to look at. `strengths` are those at which `OpenLora.at` can
    use the LoRA; a verdict is measured at strength 1 alone.
    """

    minimum: float = LINE
    check: str = "full"
    prompts: Sequence[str] = NEUTRAL_PROMPTS
    encoder: EncoderFolder | None = None
    cache: Path | None = None
    trigger: str = ""
    strengths: Sequence[float] = (1.0,)


def takes_few_steps(usual: SamplingDefaults) -> bool:
    """Whether a model is distilled for fewer steps than a verdict takes."""
    return not usual.guided and usual.steps < LORA_CHECKS["full"].steps


def effort_on(check: str, family: Family, base: Path) -> Effort:
    """What a verdict measures on a model: one distilled for few steps is sampled in no more of them."""
    effort, usual = LORA_CHECKS[check], family.pipeline.sampling_defaults(base)
    return replace(effort, steps=min(effort.steps, usual.steps)) if takes_few_steps(usual) else effort


def check_lora(
    lora: Path, base: Path, family: Family, images: RealImages, gate: LoraGate = LoraGate(), compute: Compute = ON_CPU
) -> LoraReport:
    """Evaluate a LoRA file on a base model's folder. Progress is counted in forward passes.

    Raises UsageError when the file is not a readable LoRA.
    """
    began, passes = time.monotonic(), 0

    def progress(done: int, total: int) -> None:
        nonlocal passes
        passes = done
        compute.progress(done, total)

    report = measure_lora(lora, base, family, images, gate, replace(compute, progress=progress))
    encoder = NO_ENCODER if gate.encoder is None else gate.encoder.name
    return replace(report, encoder=encoder, cost=Cost(passes, round(time.monotonic() - began, 2)))


@dataclass(frozen=True)
class OpenLora:
    """A LoRA on a fresh copy of its base model, and how images are sampled with it and without.

    `norms` are the sizes of the base's weights by module, `sizes` those of changes that depend on them; `texts` the text embeddings with the LoRA at each strength;
    `by_trigger` the prompts with and without the trigger word.
    """

    studio: Studio
    pipeline: Any
    weights: AdapterWeights
    norms: Mapping[str, float]
    sizes: Mapping[str, float]
    images: RealImages
    texts: Mapping[float, EncodedTexts]
    by_trigger: TriggerPrompts

    @contextlib.contextmanager
    def at(self, strength: float) -> Iterator[Studio]:
        """The studio in which the LoRA has one of the gate's strengths: exactly so many times its change of each weight."""
        with at_strength(self.pipeline, strength):
            yield replace(self.studio, changed=self.texts[strength])


def open_lora(
    lora: Path, base: Path, family: Family, images: RealImages, gate: LoraGate, compute: Compute
) -> OpenLora | LoraReport:
    """Load a LoRA for its verdict; the report of one that does not work."""
    device, dtype, usable = compute.device, compute.dtype, compute.usable
    effort = effort_on(gate.check, family, base)
    weights = read_adapter_with_tokens(lora)
    if refused := refused_unloaded(weights, base, family, gate.minimum):
        return refused
    encoding = device if usable != 0 else torch.device("cpu")
    facts, process = family.describe(base), family.denoiser.make_process(base)
    prompts = gate.prompts[: effort.unrelated]
    is_guided = family.pipeline.sampling_defaults(base).negative
    read = text_reader(family, facts, dtype, encoding, usable or None)
    by_trigger = uncounted_of(images, gate, effort)
    original = encoded_texts(read, prompts, images, by_trigger.samples, compute, is_guided=is_guided)
    del read
    free_memory(device)  # the encoders, before the pipeline loads its own
    compute.say("loading the LoRA on a fresh copy of the base model")
    # Only the denoiser runs: the rest of the pipeline need not fit on the GPU with it.
    pipeline = fresh_pipeline(family, base, dtype, torch.device("cpu"))
    denoiser = getattr(pipeline, family.denoiser.component)
    modules = adaptable_modules(components_of(pipeline, family))
    of_base = [name for name in weights.modules if name in modules]
    norms = {name: float(modules[name].weight.detach().to(device).float().norm()) for name in of_base}
    shapes = {name: tuple(module.weight.shape) for name, module in modules.items()}
    problems = key_findings(misfits(weights, shapes, family, base))
    if findings := problems or loading_findings(pipeline, family, lora, weights):
        return does_not_work(findings, {}, gate.minimum)
    sizes_on_base = {
        name: float(update.delta(modules[name].weight.detach()).norm())
        for name, update in weights.modules.items()
        if update.needs_weight
    }
    samples, texts = original.samples, dict.fromkeys(gate.strengths, original)
    if reads_again(weights, samples, family):
        reading = replace(compute, device=encoding)
        original, texts = texts_at(pipeline, family, original, weights, (prompts, gate.strengths), reading)
    places = max([(facts.resolution // facts.downscale) ** 2, *(sample.latents[0].numel() for sample in samples)])
    if gate.encoder is not None:
        compute.say(f"images are compared by {gate.encoder.name}")
    eyes, reserved = open_eyes(None if gate.encoder is None else gate.encoder.path, facts, compute, places)
    placed = bring_denoiser(denoiser, family, device, usable and max(0, usable - reserved), places)
    if placed.resident is not None:
        compute.say(f"evaluating with {placed.description}")
    side = facts.resolution // facts.downscale
    sizes = torch.tensor([facts.resolution] * 2 + [0] * 2 + [facts.resolution] * 2, dtype=torch.float32)
    shape = (facts.latent_channels, side, side)
    passes = Passes(compute.progress)
    predict = partial(in_parts, passes.counted(partial(family.denoiser.predict, denoiser)))
    studio = Studio(
        Sampler(
            predict,
            process,
            effort.steps,
            GUIDANCE,
            {} if is_guided else None,
            few=takes_few_steps(family.pipeline.sampling_defaults(base)),
        ),
        shape,
        sizes,
        partial(without_lora, pipeline),
        original,
        texts[gate.strengths[0]],
        device,
        dtype,
        passes,
        eyes,
    )
    if gate.cache is not None:
        studio = replace(studio, kept=BaseFeatures(gate.cache, model_key(studio, base, family, gate.encoder)))
    return OpenLora(studio, pipeline, weights, norms, sizes_on_base, images, texts, by_trigger)


def encoded_texts(
    read: EncodeTexts,
    prompts: Sequence[str],
    images: RealImages,
    uncounted: Sequence[EncodedSample],
    compute: Compute,
    *,
    is_guided: bool,
) -> EncodedTexts:
    """The embeddings of the neutral prompts, and the real images, those with longer captions and those that are not counted with theirs.

    With guidance, images whose captions are read with control images also have the embedding of an empty one.
    """
    longer = with_added_words(images.every)
    new = [with_seen(each.caption, each.seen) for each in (*longer, *uncounted)]
    rows = iter(read_each(read, [*prompts, *new]))
    neutral = [next(rows) for _ in prompts]
    samples = [*images.every, *(replace(each, cond=next(rows)) for each in longer)]
    uncounted = [replace(each, cond=next(rows)) for each in uncounted]
    if is_guided:
        samples, uncounted = with_empty_captions(read, samples), with_empty_captions(read, uncounted)
    stacked = {
        name: torch.stack([row[name] for row in neutral]).to(compute.device, compute.dtype) for name in neutral[0]
    }
    return EncodedTexts(stacked, samples, uncounted)


def with_empty_captions(read: EncodeTexts, samples: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Each sample whose caption is read with control images also has the embedding of an empty caption with them."""
    seen = [each for each in samples if each.seen]
    empties = iter(read_each(read, [with_seen("", each.seen) for each in seen]))
    return [replace(each, empty=next(empties)) if each.seen else each for each in samples]


def uncounted_of(images: RealImages, gate: LoraGate, effort: Effort) -> TriggerPrompts:
    """The prompts with and without the trigger word that a full check draws to look at."""
    if gate.check != "full" or not_comparable(images):
        return TriggerPrompts()
    count = len(images.every)
    prompts = count + len(with_added_words(images.every))
    places = [place for place in places_of(range(effort.round), count, prompts) if place < count]
    return trigger_prompts(images.every, places, gate.trigger)


def measure_lora(
    lora: Path, base: Path, family: Family, images: RealImages, gate: LoraGate, compute: Compute
) -> LoraReport:
    """The report without its cost."""
    opened = open_lora(lora, base, family, images, gate, compute)
    if isinstance(opened, LoraReport):
        return opened
    studio, images, effort = opened.studio, opened.images, effort_on(gate.check, family, base)
    studio.passes.plan(count_passes(studio, effort, images))
    if (drifted := _measure_drift(studio)) is None:
        return base_not_finite(gate.minimum)
    if not math.isfinite(drifted) and (broken := not_alive(drifted, None)):
        return does_not_work([broken], {"drift": drifted}, gate.minimum)
    if images.unseen:
        compute.say(f"validation loss with and without the LoRA: {counted(len(images.unseen), 'image')}")
    losses = paired_losses(studio, images) if images.unseen else None
    learned = None if losses is None else improvement(*losses)
    health = examine(opened.weights.modules, opened.norms, opened.sizes)
    if broken := not_alive(drifted, learned):
        return does_not_work([broken], {"drift": drifted, "health": asdict(health)}, gate.minimum)
    compute.say(f"samples with the LoRA: {counted(effort.round, 'prompt')} in {effort.steps} steps each")
    measured, sampled = measure_samples(studio, images, effort, gate.minimum, compute)
    parts = {"works": VerdictPart("works", Estimate(1.0, 1.0, 1.0)), **measured}
    tested = sampled.tested
    numbers = {
        "drift": drifted,
        "judge": None if tested is None else asdict(tested),
        "health": asdict(health),
        "learning": None
        if learned is None or losses is None
        else asdict(learned) | {"by_noise": {name: asdict(band) for name, band in gain_by_noise(*losses).items()}},
        "images": {
            "trained": len(images.trained),
            "unseen": len(images.unseen),
            "decibels": images.decibels,
        },
    }
    prompted = studio.original.samples
    counts = SHOWN[gate.check]
    by_trigger: list[ShownSample] = []
    if studio.changed.uncounted and sampled.judge is not None:
        by_trigger = shown_by_trigger(studio, sampled.subject, opened.by_trigger)
        counts = {**counts, "typical": 0}
    shown = (*by_trigger, *choose_shown(sampled, prompted, gate.prompts, counts, studio.sample_without))
    del opened, studio
    free_memory(compute.device)
    parts = {name: parts[name] for name in SCALES}
    cannot_tell = () if tested is None else tested.cannot_tell
    decided = part_findings(parts, gate.minimum, may_grow=gate.check == "lite")
    untold = cannot_tell_findings(cannot_tell, encoder=gate.encoder is not None)
    findings = with_remedies([*decided, *untold, *drift_findings(drifted), *health_findings(health)], parts)
    return LoraReport(gate.minimum, parts, findings, numbers, shown=shown, cannot_tell=cannot_tell)


def measure_samples(
    studio: Studio, images: RealImages, effort: Effort, minimum: float, compute: Compute
) -> tuple[dict[str, VerdictPart], Sampled]:
    """The parts that are counted in samples: rounds of the dataset's and of unrelated prompts until each part is decided."""
    unrelated = studio.sample_unrelated(0, effort.seeds)
    parts = {"keeps_base": kept_part(unrelated, effort.looks)}
    if why := not_comparable(images):
        return parts | {name: VerdictPart(name, None, *why) for name in BY_SAMPLES}, Sampled(unrelated)
    prompted, every = studio.original.samples, images.every
    texts = [each.text for each in prompted]
    compute.say("testing the judge with planted faults")
    if (found := tested_judge(studio, images, texts, unrelated)) is None:
        why = "the dataset's images are not finite as the base model's autoencoder shows them", BROKEN_BASE_FIX
        return parts | {name: VerdictPart(name, None, *why) for name in BY_SAMPLES}, Sampled(unrelated)
    judge, tested = found
    subject: list[DrawnSample] = []
    more_unrelated = False
    for start in range(0, effort.most, effort.round):
        if more_unrelated:
            unrelated = [*unrelated, *studio.sample_unrelated(start // effort.round, effort.seeds)]
        seeds = range(start, start + effort.round)
        subject += studio.sample_subject(places_of(seeds, len(every), len(prompted)), seeds, texts)
        parts = counted_parts(judge, tested, (subject, unrelated), effort.looks, is_edit=images.is_edit)
        if not any(part.outcome(minimum) == "unresolved" for part in parts.values()):
            break
        if (after := start + effort.round) < effort.most:
            compute.say(
                f"not decided after {counted(after, 'sample')} of at most {effort.most}: {counted(effort.round, 'more prompt')}"
            )
            more_unrelated = any(parts[name].outcome(minimum) == "unresolved" for name in ("stays_away", "keeps_base"))
            planned = round_passes(studio, range(after, after + effort.round), len(every))
            studio.passes.plan(planned + (unrelated_passes(studio, effort) if more_unrelated else 0))
    return parts, Sampled(unrelated, subject, judge, tested)


def cannot_show(decibels: float | None) -> tuple[str, str] | None:
    """Why a base that keeps so many dB of the images cannot show them, and what to do; None where it can, or nothing is known."""
    if decibels is None or decibels >= LEAST_DECIBELS:
        return None
    reason = (
        f"this base model cannot show these images: its autoencoder keeps {decibels:.0f} dB of them"
        f" (least: {LEAST_DECIBELS:.0f})"
    )
    return reason, "Train on another base model, or at a higher resolution (data.resolution)."


def not_comparable(images: RealImages) -> tuple[str, str] | None:
    """Why samples cannot be compared with the dataset's images, and what to do; None where they can."""
    count = len(images.every)
    if why := cannot_show(images.decibels):
        return why
    if count >= FEWEST_REAL:
        return None
    if not count:
        return NO_IMAGES, f"Name at least {FEWEST_REAL} of its training images (--data)."
    reason = f"{counted(count, 'image')} of the dataset, and at least {FEWEST_REAL} are needed to compare with"
    return reason, "Add images of the subject. With so few, look at the LoRA's samples and decide for yourself."


def tested_judge(
    studio: Studio, dataset: RealImages, texts: Sequence[str], unrelated: Sequence[Unrelated]
) -> tuple[Judge, Tested] | None:
    """The judge of the dataset's images and what it can tell, from the cache if it was tested before; `texts` are the prompts'.

    The base's own samples of unrelated prompts are its other things.

    None where the images are not finite.
    """
    images = dataset.every
    seen = [studio.eyes.image(each.latents) for each in images]
    shown = [image for image in seen if image is not None]
    if len(shown) < len(seen):
        return None
    judge = Judge(shown, texts[: len(images)], studio.eyes.describe)

    def test() -> dict[str, Tensor]:
        tested = judge.tested([each.base for each in unrelated if each.base.is_finite])
        return {
            f"{what}/{name}": torch.tensor(value, dtype=torch.float64)
            for what, found in asdict(tested).items()
            for name, value in found.items()
        }

    key = digest_of(
        "test of the judge",
        f"Pillow {PIL.__version__}, NumPy {np.__version__}",  # which resize and plant
        # As the autoencoder shows them here: whole, in tiles or on another device it does so a little differently.
        *(
            part
            for image, each in zip(shown, images, strict=True)
            for part in (torch.from_numpy(np.array(image)), each.text)
        ),
        *(each.latents[0] for each in unrelated),
    )
    entry = studio.read_or_make(key, test, 0)
    judge.describe = None  # an encoder on the device is not kept by who keeps the judge
    rows: dict[str, dict[str, Any]] = {"limits": {}, "found": {}, "untouched": {}}
    for name, value in entry.items():
        what, _, own = name.partition("/")
        rows[what][own] = float(value) if what == "limits" else tuple(int(each) for each in value)
    if dataset.is_mirrored:  # every other image was trained mirrored
        rows["limits"].pop("turned", None)
        rows["found"]["mirrored"] = (0, rows["found"]["mirrored"][1])
    return judge, Tested(**rows)


def with_added_words(images: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Where the captions of the images are all alike, a few of the images with `ADDED_WORDS` in their captions; else none.

    A LoRA trained on one caption may show its images for this caption alone, and nothing of them in any longer prompt.
    """
    if len(images) < FEWEST_REAL or differ([each.text for each in images]):
        return []

    def longer(caption: Caption, words: str) -> Caption:
        if not isinstance(caption, str):
            return (*caption, (words, 1.0))
        return f"{caption}, {words}" if caption else words

    return [
        replace(image, caption=longer(image.caption, words), cond={})
        for image, words in zip(images, ADDED_WORDS, strict=False)
    ]


def places_of(seeds: Sequence[int], images: int, prompts: int) -> list[int]:
    """The place of each seed's prompt among so many: the captions of the images, and after them the longer ones.

    Two seeds, 2 k and 2 k + 1, have one prompt. In an order in which neighbors in the dataset are far apart, so that few samples
    meet many kinds. Every second prompt is one of the longer ones, where there are any.
    """
    stride = next(step for step in range(max(1, round(0.38 * images)), 2 * images) if gcd(step, images) == 1)
    longer = prompts - images
    pairs = [seed // 2 for seed in seeds]
    if not longer:
        return [pair * stride % images for pair in pairs]
    return [images + pair // 2 % longer if pair % 2 else pair // 2 * stride % images for pair in pairs]


def paired_losses(studio: Studio, images: RealImages) -> tuple[Tensor, Tensor]:
    """Losses [N, T] without the LoRA and with it of the images that were not trained on."""
    losses = partial(
        validation_losses,
        studio.sampler.predict,
        process=studio.sampler.process,
        seed=SEED,
        timesteps=TIMESTEPS,
        compute=Compute(studio.dtype, studio.device),
    )
    unseen = slice(len(images.trained), len(images.every))
    samples = studio.original.samples[unseen]

    def without() -> dict[str, Tensor]:
        with studio.without():
            return {"losses": losses(samples)}

    of_each = (part for each in samples for part in (each.id, each.latents, {**each.cond, **each.controls}, each.sizes))
    key = digest_of("losses", str((SEED, TIMESTEPS)), *of_each)
    return studio.read_or_make(key, without, loss_passes(images))["losses"], losses(studio.changed.samples[unseen])


def refused_unloaded(weights: AdapterWeights, base: Path, family: Family, minimum: float = LINE) -> LoraReport | None:
    """The report on a LoRA refused for its numbers, names or shapes, before any weight of the base model is loaded.

    None for any other.
    """
    if not_finite := weights.not_finite():
        message = f"{len(not_finite)} of {counted(len(weights.modules), 'module')} hold NaN or infinity (first: {not_finite[0]})."
        finding = Finding("not_finite", "error", message, "Train again with a lower learning rate.")
        return does_not_work([finding], {}, minimum)
    if problems := misfits_by_config(weights, family, base):
        return does_not_work(key_findings(problems), {}, minimum)
    return None


def does_not_work(findings: Sequence[Finding], numbers: Mapping[str, Any], minimum: float) -> LoraReport:
    """The report on a LoRA that cannot be used, so that nothing else is measured."""
    rest = {name: VerdictPart(name, None, "the LoRA does not work") for name in SCALES if name != "works"}
    return LoraReport(
        minimum, {"works": VerdictPart("works", Estimate(0.0, 0.0, 0.0)), **rest}, tuple(findings), numbers
    )


def model_key(studio: Studio, base: Path, family: Family, encoder: EncoderFolder | None) -> str:
    """A digest of what all features of a base model depend on: its weights, and how and by what they are computed.

    The code is this room's: limits that were found for one measure say nothing about another.
    """
    folder, process = base / family.denoiser.component, studio.sampler.process
    return digest_of(
        *(path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))),
        family.name,
        base_digest(family, base),
        (folder / "config.json").read_text("utf-8"),
        "" if encoder is None else fingerprint(encoder.path, "."),
        fingerprint(base, "vae"),
        process.description,
        process.alphas_cumprod,
        str((studio.dtype, torch.__version__)),
        torch.cuda.get_device_name(studio.device) if studio.device.type == "cuda" else studio.device.type,
    )


def base_not_finite(minimum: float) -> LoraReport:
    """The report where the base model itself does not work, which is no fault of the LoRA."""
    reason = "the base model's own predictions are not finite"
    message = "Nothing was measured: the base model's own predictions hold NaN or infinity."
    parts = {name: VerdictPart(name, None, reason) for name in SCALES}
    return LoraReport(minimum, parts, (Finding(NOT_COMPARED, "warning", message, BROKEN_BASE_FIX),))


def _measure_drift(studio: Studio) -> float | None:
    """Of the predictions of unrelated prompts; None where the base model's own are not finite."""
    cond, changed = (
        {name: value.to(studio.device) for name, value in each.prompts.items()}
        for each in (studio.original, studio.changed)
    )
    sizes = studio.sizes.to(studio.device).expand(len(next(iter(cond.values()))), -1)

    def without() -> dict[str, Tensor]:
        with studio.without():
            visits = base_visits(studio.sampler.predict, studio.sampler.process, cond, sizes, studio.shape)
        return {
            "t": torch.tensor([visit.t for visit in visits]),
            "latents": torch.stack([visit.latents for visit in visits]),
            "predictions": torch.stack([visit.prediction for visit in visits]),
        }

    key = digest_of("drift", str((VISITS, studio.shape)), studio.original.prompts, studio.sizes)
    found = studio.read_or_make(key, without, VISITS * in_batches(len(sizes), rows_at_once(studio.shape[1:])))
    found = {name: value.to(studio.device) for name, value in found.items()}
    if not bool(found["predictions"].isfinite().all()):
        return None
    visits = list(map(Visit, found["t"].tolist(), found["latents"], found["predictions"]))
    return drift(studio.sampler.predict, visits, changed, sizes)


def count_passes(studio: Studio, effort: Effort, images: RealImages) -> int:
    """Forward passes of the gate where the first round decides and nothing is cached."""
    prompts = len(next(iter(studio.original.prompts.values())))
    return (
        unrelated_passes(studio, effort)
        + 2 * VISITS * in_batches(prompts, rows_at_once(studio.shape[1:]))
        + (0 if not_comparable(images) else round_passes(studio, range(effort.round), len(images.every)))
        + 2 * loss_passes(images)
    )


def unrelated_passes(studio: Studio, effort: Effort) -> int:
    """Forward passes of a round's samples of unrelated prompts, by the base model and with the LoRA."""
    prompts = len(next(iter(studio.original.prompts.values())))
    return 2 * studio.passes_for([studio.shape] * prompts * effort.seeds)


def round_passes(studio: Studio, seeds: Sequence[int], images: int) -> int:
    """Forward passes of the subject's samples with these seeds."""
    prompted = studio.original.samples
    return studio.passes_for(
        [tuple(prompted[place].latents.shape) for place in places_of(seeds, images, len(prompted))]
    )


def loss_passes(images: RealImages) -> int:
    """Forward passes of the losses of the images that were not trained on, on one side."""
    return sum(in_batches(TIMESTEPS, min(rows_at_once(each.latents.shape[1:]), MICRO)) for each in images.unseen)
