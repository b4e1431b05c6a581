"""The LoRA gate: evaluates the exported file on a fresh copy of its base model.

Seven parts, each a measure with its 95 % interval and a gate of its own (`evaluation/verdict.py`):

- **works**: every value finite, every pair complete, every key a module of the base with its shape, loaded by a fresh
  diffusers pipeline without an ignored key, and the prediction changed by more than `LEAST_CHANGE`. All or nothing.
- **learned**: by how much the loss on images that were not trained on falls, at the same noise.
- **faithful**: how near samples of the dataset's captions come to the real images, from the base's samples (0) to the
  real images among themselves (1), in the base model's features.
- **follows_captions**: how well samples follow what the base knows of their captions, beside its own samples.
- **does_not_copy**: how far samples are from the nearest real image, beside real images.
- **keeps_base**: how far samples of unrelated prompts move, beside other seeds of the base.
- **diverse**: how different samples are from each other, beside real images.

The score is the least of the measured parts. What cannot be measured is named and leaves the score.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.core.findings import Finding, counted
from lora_trainer.core.hardware import free_memory
from lora_trainer.data.caches.base_features import BaseFeatures, digest_of
from lora_trainer.evaluation.compute import ON_CPU, Compute
from lora_trainer.evaluation.drift import NEUTRAL_PROMPTS, VISITS, Visit, base_visits, drift
from lora_trainer.evaluation.encode import EncodeTexts, read_each, text_reader, with_seen
from lora_trainer.evaluation.encoder_features import open_encoder
from lora_trainer.evaluation.evidence import GUIDANCE, Effort, RealImages, Sides, Studio
from lora_trainer.evaluation.features import LATENT_GRID, NOISE_LEVEL
from lora_trainer.evaluation.health import examine
from lora_trainer.evaluation.latent_samples import Sampler
from lora_trainer.evaluation.likeness import (
    Features,
    differ,
    diversity,
    faithfulness,
    following,
    nearness,
    spoiling,
)
from lora_trainer.evaluation.loading import (
    at_strength,
    components_of,
    fresh_pipeline,
    misfits,
    misfits_by_config,
    without_lora,
)
from lora_trainer.evaluation.lora_findings import (
    ALREADY_KNOWN,
    drift_findings,
    health_findings,
    key_findings,
    leak_findings,
    loading_findings,
    not_alive,
    part_findings,
)
from lora_trainer.evaluation.lora_report import BASE_FEATURES, LoraReport
from lora_trainer.evaluation.placing import bring_denoiser
from lora_trainer.evaluation.prediction import Passes, in_batches, in_parts, rows_at_once
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.evaluation.shown_samples import SHOWN, Sampled, choose_shown
from lora_trainer.evaluation.texts import EncodedTexts, reads_again, texts_at
from lora_trainer.evaluation.tracking import gain_by_noise
from lora_trainer.evaluation.validation_loss import (
    MICRO,
    EncodedSample,
    improvement,
    validation_losses,
)
from lora_trainer.evaluation.verdict import (
    BY_SAMPLES,
    LINE,
    NOT_COMPARED,
    SCALES,
    Cost,
    Estimate,
    VerdictPart,
)
from lora_trainer.export.weights import AdapterWeights, adaptable_modules
from lora_trainer.models.base_loras import base_digest
from lora_trainer.models.folder import fingerprint
from lora_trainer.models.lora_names import read_adapter_with_tokens

if TYPE_CHECKING:
    from lora_trainer.models.family import Caption, Family, SamplingDefaults
    from lora_trainer.models.vision_encoder import EncoderFolder

SEED = 20_240_229  # the gate's own, so that a LoRA's score does not depend on the run's seed
FEWEST_REAL = 4  # fewer have no distances to compare with
NO_IMAGES = "no images of the dataset to compare with"
KNOWN_FIX = (
    "Add images of the subject, or compare by another image encoder: `lora-trainer validate` with"
    " --set gates.encoder=facebook/dinov2-base. Or look at the LoRA's samples and decide for yourself."
)
BROKEN_BASE_FIX = "Copy or download the base model again, or set memory.weight_dtype=bf16 or fp32."
# In half of the prompts, where the dataset has one caption for all images.
ADDED_WORDS = ("red background", "blue background", "white background", "black background")
# A round of samples, the most, the steps of each, and unrelated prompts.
LORA_CHECKS: Mapping[str, Effort] = {"full": Effort(12, 48, 20, 8), "lite": Effort(8, 8, 8, 4)}
TIMESTEPS = 8  # of each validation loss
FORMULAS = "2"  # part of every key of what is cached: change it when samples or features are computed differently


@dataclass(frozen=True)
class LoraGate:
    """What a LoRA must reach, and how it is measured.

    `minimum` is the least score of each part, 0 to refuse nothing. `check` is one of `LORA_CHECKS`. Images are
    compared by `encoder`, or by the base model's own features. `cache` is the folder in which what is measured of the base
    model alone is kept; None keeps nothing. `strengths` are those at which `OpenLora.at` can
    use the LoRA; a verdict is measured at strength 1 alone.
    """

    minimum: float = LINE
    check: str = "full"
    prompts: Sequence[str] = NEUTRAL_PROMPTS
    encoder: EncoderFolder | None = None
    cache: Path | None = None
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
    encoder = BASE_FEATURES if gate.encoder is None else gate.encoder.name
    return replace(report, encoder=encoder, cost=Cost(passes, round(time.monotonic() - began, 2)))


@dataclass(frozen=True)
class OpenLora:
    """A LoRA on a fresh copy of its base model, and how images are sampled with it and without.

    `norms` are the sizes of the base's weights by module, `sizes` those of changes that depend on them; `texts` the text embeddings with the LoRA at each strength.
    """

    studio: Studio
    pipeline: Any
    weights: AdapterWeights
    norms: Mapping[str, float]
    sizes: Mapping[str, float]
    images: RealImages
    texts: Mapping[float, EncodedTexts]

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
    original = encoded_texts(
        text_reader(family, facts, dtype, encoding, usable or None), prompts, images, compute, is_guided=is_guided
    )
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
    encoder, reserved = None, 0
    if gate.encoder is not None:
        compute.say(f"images are compared by {gate.encoder.name}")
        encoder, reserved = open_encoder(gate.encoder.path, facts, compute, places)
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
        family.denoiser.features(denoiser),
        partial(without_lora, pipeline),
        original,
        texts[gate.strengths[0]],
        device,
        dtype,
        passes,
        encoder,
    )
    if gate.cache is not None:
        studio = replace(studio, kept=BaseFeatures(gate.cache, model_key(studio, base, family, gate.encoder)))
    return OpenLora(studio, pipeline, weights, norms, sizes_on_base, images, texts)


def encoded_texts(
    read: EncodeTexts, prompts: Sequence[str], images: RealImages, compute: Compute, *, is_guided: bool
) -> EncodedTexts:
    """The embeddings of the neutral prompts, and the real images and those with longer captions with theirs.

    With guidance, images whose captions are read with control images also have the embedding of an empty one.
    """
    longer = with_added_words(images.every)
    text = read_each(read, [*prompts, *(with_seen(each.caption, each.seen) for each in longer)])
    measured = [*images.every, *longer]
    if is_guided and any(each.seen for each in measured):
        empties = read_each(read, [with_seen("", each.seen) for each in measured])
        measured = [replace(each, empty=empty) for each, empty in zip(measured, empties, strict=True)]
    neutral = {
        name: torch.stack([row[name] for row in text[: len(prompts)]]).to(compute.device, compute.dtype)
        for name in text[0]
    }
    known, rest = measured[: len(images.every)], measured[len(images.every) :]
    return EncodedTexts(
        neutral, [*known, *(replace(each, cond=row) for each, row in zip(rest, text[len(prompts) :], strict=True))]
    )


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
    compute.say(f"samples with and without the LoRA: {counted(effort.round, 'prompt')} in {effort.steps} steps each")
    gained = None if learned is None else Estimate(learned.mean, learned.low, learned.high)
    why = "" if learned else "no image is known that was not trained on" if images.trained else NO_IMAGES
    parts = {
        "works": VerdictPart("works", Estimate(1.0, 1.0, 1.0)),
        "learned": VerdictPart("learned", gained, why),
    }
    by_samples, sampled = measure_samples(studio, images.every, effort, gate.minimum, compute)
    parts |= by_samples
    # Of unrelated prompts: how far they show the dataset's images.
    leaked = (
        None if sampled.real is None else faithfulness(sampled.real, sampled.unrelated.base, sampled.unrelated.lora)
    )
    numbers = {
        "drift": drifted,
        "leak": None if leaked is None else {"value": leaked.value, "low": leaked.low, "high": leaked.high},
        "health": asdict(health),
        "learning": None
        if learned is None or losses is None
        else asdict(learned) | {"by_noise": {name: asdict(band) for name, band in gain_by_noise(*losses).items()}},
        "images": {"trained": len(images.trained), "unseen": len(images.unseen)},
    }
    prompted = studio.original.samples
    del opened, studio
    free_memory(compute.device)
    parts = {name: parts[name] for name in SCALES}
    decided = part_findings(parts, gate.minimum, may_grow=gate.check == "lite")
    others = [*drift_findings(drifted), *leak_findings(leaked), *health_findings(health)]
    findings = with_remedies([*decided, *others], parts)
    shown = choose_shown(sampled, prompted, gate.prompts, SHOWN[gate.check])
    return LoraReport(gate.minimum, parts, findings, numbers, shown=shown)


def measure_samples(
    studio: Studio, images: Sequence[EncodedSample], effort: Effort, minimum: float, compute: Compute
) -> tuple[dict[str, VerdictPart], Sampled]:
    """The parts that are measured by sampling: rounds of the subject's prompts until each part is decided."""
    unrelated = studio.compare_unrelated(0)
    unrelated_once, is_unrelated_open = unrelated.prompts, False
    parts = {"keeps_base": kept_part(unrelated)}
    if len(images) < FEWEST_REAL:
        reason, fix = NO_IMAGES, f"Name at least {FEWEST_REAL} of its training images (--data)."
        if images:
            reason = (
                f"{counted(len(images), 'image')} of the dataset, and at least {FEWEST_REAL} are needed to compare with"
            )
            fix = "Add images of the subject. With so few, look at the LoRA's samples and decide for yourself."
        return parts | {name: VerdictPart(name, None, reason, fix) for name in BY_SAMPLES}, Sampled(unrelated)
    real = studio.describe_real(images)
    prompted = studio.original.samples
    captions = [plain_caption(each.caption) for each in images]
    sides: Sides | None = None
    for start in range(0, effort.most, effort.round):
        seeds = range(start, start + effort.round)
        more = studio.compare(places_of(seeds, len(images), len(prompted)), seeds, prompted)
        sides = more if sides is None else sides.with_more(more)
        if start and is_unrelated_open:
            unrelated = unrelated.with_more(studio.compare_unrelated(start // effort.round))
            parts["keeps_base"] = kept_part(unrelated)
        parts |= sample_parts(real, sides, captions)
        # More samples may yet tell the base's from the dataset's images.
        is_open = parts["faithful"].measure is None and parts["does_not_copy"].measure is not None
        if not is_open and not any(part.outcome(minimum) == "unresolved" for part in parts.values()):
            break
        if (after := start + effort.round) < effort.most:
            compute.say(
                f"not decided after {counted(after, 'sample')} of at most {effort.most}: {counted(effort.round, 'more prompt')}"
            )
            is_unrelated_open = parts["keeps_base"].outcome(minimum) == "unresolved"
            more_unrelated = 3 * studio.passes_for([studio.shape] * len(unrelated_once)) if is_unrelated_open else 0
            studio.passes.plan(round_passes(studio, range(after, after + effort.round), len(images)) + more_unrelated)
    return parts, Sampled(unrelated, sides, real)


def kept_part(unrelated: Sides) -> VerdictPart:
    """`keeps_base`, by samples of unrelated prompts."""
    spoiled = spoiling(unrelated.base, unrelated.other_seeds, unrelated.lora)
    seedless = "the base model's samples are not finite, or do not differ between seeds"
    return VerdictPart("keeps_base", spoiled, "" if spoiled else seedless)


def with_added_words(images: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Where the captions of the images are all alike, a few of the images with `ADDED_WORDS` in their captions; else none.

    A LoRA trained on one caption may show its images for this caption alone, and nothing of them in any longer prompt.
    """
    if len(images) < FEWEST_REAL or differ([plain_caption(each.caption) for each in images]):
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

    In an order in which neighbors in the dataset are far apart, so that few samples meet many kinds. Every second seed has one
    of the longer ones, where there are any.
    """
    stride = next(step for step in range(max(1, round(0.38 * images)), 2 * images) if gcd(step, images) == 1)
    longer = prompts - images
    if not longer:
        return [seed * stride % images for seed in seeds]
    return [images + seed // 2 % longer if seed % 2 else seed // 2 * stride % images for seed in seeds]


def sample_parts(real: Features, sides: Sides, captions: Sequence[str]) -> dict[str, VerdictPart]:
    """The parts that compare samples with the dataset's images."""
    if reason := not_comparable(real, sides):
        return {name: VerdictPart(name, None, reason, BROKEN_BASE_FIX) for name in BY_SAMPLES}
    faithful = faithfulness(real, sides.base, sides.lora)
    followed, unheard = None, "all captions are alike"
    if differ([captions[place] for place in sides.prompts if place < len(captions)]):
        followed = following(real, sides.base, sides.other_seeds, sides.lora, sides.prompts)
        unheard = "the base model's samples do not depend on these captions"
    # In longer prompts a copy has another background: only the captions themselves show whether images are copied.
    own = [row for row, place in enumerate(sides.prompts) if place < len(captions)]
    by_captions = {name: block[own] for name, block in sides.lora.items()}
    near, varied = nearness(real, by_captions), diversity(real, by_captions)
    same = "the images are all the same"
    why, fix = (ALREADY_KNOWN, KNOWN_FIX) if near else (same, "Add images that differ.")
    return {
        "faithful": VerdictPart("faithful", faithful, "" if faithful else why, "" if faithful else fix),
        "follows_captions": VerdictPart("follows_captions", followed, "" if followed else unheard),
        "does_not_copy": VerdictPart("does_not_copy", near, "" if near else same),
        "diverse": VerdictPart("diverse", varied, "" if varied else same),
    }


def not_comparable(real: Features, sides: Sides) -> str:
    """Why nothing can be compared with the dataset's images or the base's samples; empty where all of them are finite."""
    for what, features in (
        ("the dataset's images", (real,)),
        ("the base model's samples", (sides.base, sides.other_seeds)),
    ):
        if not all(bool(block.isfinite().all()) for each in features for block in each.values()):
            return f"the features of {what} are not finite"
    return ""


def plain_caption(caption: Caption) -> str:
    """The caption's text, without weights."""
    return caption if isinstance(caption, str) else " ".join(text for text, _ in caption)


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
    """A digest of what all features of a base model depend on: its weights, and how and by what they are computed."""
    folder, process = base / family.denoiser.component, studio.sampler.process
    return digest_of(
        FORMULAS,
        family.name,
        base_digest(family, base),
        (folder / "config.json").read_text("utf-8"),
        "" if encoder is None else fingerprint(encoder.path, ".") + fingerprint(base, "vae"),
        process.description,
        process.alphas_cumprod,
        *(f"{name}: {block.grid}, {block.patch}" for name, block in studio.blocks.items()),
        str((NOISE_LEVEL, LATENT_GRID, studio.dtype, torch.__version__)),
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
    """Forward passes of the gate where the first round decides and nothing is cached: with the LoRA, and twice as many by the
    base model, which samples with other seeds too.
    """
    prompts = len(next(iter(studio.original.prompts.values())))
    unrelated = studio.passes_for([studio.shape] * prompts)
    of_drift = 2 * VISITS * in_batches(prompts, rows_at_once(studio.shape[1:]))
    subject = round_passes(studio, range(effort.round), len(images.every)) if len(images.every) >= FEWEST_REAL else 0
    real = (studio.encoder is None) * len(images.every) if subject else 0
    return 3 * unrelated + of_drift + subject + real + 2 * loss_passes(images)


def round_passes(studio: Studio, seeds: Sequence[int], images: int) -> int:
    """Forward passes of the subject's samples with these seeds: with the LoRA, and by the base model with two seeds."""
    prompted = studio.original.samples
    return 3 * studio.passes_for(
        [tuple(prompted[place].latents.shape) for place in places_of(seeds, images, len(prompted))]
    )


def loss_passes(images: RealImages) -> int:
    """Forward passes of the losses of the images that were not trained on, on one side."""
    return sum(in_batches(TIMESTEPS, min(rows_at_once(each.latents.shape[1:]), MICRO)) for each in images.unseen)
