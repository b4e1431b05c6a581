"""The LoRA gate: evaluates the exported file on a fresh copy of its base model.

Score = integrity x learning^0.5 x preservation^0.3 x health^0.2.

- **integrity** is 1 or 0: every value finite, every pair complete, every key a module of the
  base with its shape, loaded by a fresh diffusers pipeline without an ignored key, and the
  prediction changed by more than `LEAST_CHANGE`. A LoRA that was never trained stops here.
- **learning** compares validation loss with and without the LoRA at the same noise. It is
  size x certainty: size rises from 0 (no improvement) to 1 at `ENOUGH_IMPROVEMENT` of the
  base's loss; certainty from 0 (a coin's throw) to 1 when the 95 % interval lies above 0.
  Most of a denoising loss cannot be learned away, so certainty matters more than size.
- **preservation** is drift on neutral prompts, relative to the base's prediction: 1 up to
  `DRIFT_FREE`, falling evenly in its logarithm to 0 at `DRIFT_RUINED`.
- **health** is 1 while the largest ||delta W|| / ||W|| stays under `NORM_FREE`, falling evenly
  in its logarithm to 0 at `NORM_RUINED`, times the share of modules that learned anything.

A part of 0 makes the score 0. Learning that could not be measured counts `UNMEASURED_LEARNING`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import Finding, counted
from lora_trainer.diffusion.process import Process
from lora_trainer.evaluation.compute import ON_CPU, Compute
from lora_trainer.evaluation.drift import NEUTRAL_PROMPTS, VISITS, base_visits, drift
from lora_trainer.evaluation.encode import text_reader
from lora_trainer.evaluation.health import Health, examine
from lora_trainer.evaluation.loading import (
    adapted_modules,
    components_of,
    free_memory,
    fresh_pipeline,
    in_short,
    judged,
    misfits,
    misfits_by_config,
    without_lora,
)
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.placing import bring_denoiser
from lora_trainer.evaluation.texts import EncodedTexts, encode_with, reads_again
from lora_trainer.evaluation.validation_loss import (
    MICRO,
    EncodedSample,
    Improvement,
    Predict,
    improvement,
    validation_losses,
)
from lora_trainer.export.weights import LoraWeights, adaptable_modules
from lora_trainer.models.family import Family, ModelFacts
from lora_trainer.models.lora_names import read_lora_with_tokens
from lora_trainer.models.memory.phases import PREDICTED_AT_ONCE

GATE = 0.9
WEIGHTS: Mapping[str, float] = {"learning": 0.5, "preservation": 0.3, "health": 0.2}

# The thresholds, with their reasons; measured on the built-in model only.
LEAST_CHANGE = 1e-4  # fp16 rounding of the weights alone moves a prediction by about this much
ENOUGH_IMPROVEMENT = 0.005  # LoRAs that people keep improve validation loss by 1 to 5 %
DRIFT_FREE, DRIFT_RUINED = 0.30, 3.0
NORM_FREE, NORM_RUINED = 0.5, 10.0
NORM_WARNED = 1.0  # a layer that changes by less than its size is a note, not a warning
UNMEASURED_LEARNING = 0.5  # no evidence is no proof of failure, but the score stays under 0.71

SEED = 20_240_229  # the gate's own, so that a LoRA's score does not depend on the run's seed
CELLS = 128  # samples x timesteps: fewer samples get more timesteps
FEWEST_TIMESTEPS, MOST_TIMESTEPS = 8, 64
LORA_CHECKS: Mapping[str, float] = {"full": 1.0, "lite": 0.25, "off": 0.0}  # shares of samples x timesteps and prompts


@dataclass(frozen=True)
class LoraGate:
    """What a LoRA must reach, and how it is measured.

    `share`, one of `LORA_CHECKS`, is how much is measured. The samples were not trained on, unless `unseen` is False,
    which becomes a finding.
    """

    minimum: float = GATE
    share: float = LORA_CHECKS["full"]
    unseen: bool = True
    prompts: Sequence[str] = NEUTRAL_PROMPTS


def check_lora(
    lora: Path,
    base: Path,
    family: Family,
    samples: Sequence[EncodedSample],
    gate: LoraGate = LoraGate(),
    compute: Compute = ON_CPU,
) -> LoraReport:
    """Evaluate a LoRA file on a base model's folder. Progress is counted in forward passes.

    Raises UsageError when the file is not a readable LoRA.
    """
    device, dtype, usable = compute.device, compute.dtype, compute.usable
    weights = read_lora_with_tokens(lora)
    if refused := refused_unloaded(weights, base, family, gate.minimum):
        return refused
    encoding = device if usable != 0 else torch.device("cpu")
    facts, process = family.describe(base), family.denoiser.make_process(base)
    prompts, samples, timesteps = choose_inputs(gate.prompts, samples, gate.share)
    # The encoders are freed before the pipeline loads its own.
    text = text_reader(family, facts, dtype, encoding, usable or None)(prompts)
    free_memory(device)
    neutral = {name: tensor.to(device, dtype) for name, tensor in text.items()}
    compute.say("loading the LoRA on a fresh copy of the base model")
    # Only the denoiser runs: the rest of the pipeline need not fit on the GPU with it.
    pipeline = fresh_pipeline(family, base, dtype, torch.device("cpu"))
    denoiser = getattr(pipeline, family.denoiser.component)
    modules = adaptable_modules(components_of(pipeline, family))
    of_base = [name for name in weights.modules if name in modules]
    norms = {name: float(modules[name].weight.detach().to(device).float().norm()) for name in of_base}
    shapes = {name: tuple(module.weight.shape) for name, module in modules.items()}
    problems = _key_findings(misfits(weights, shapes, family, base))
    if findings := problems or _loading_findings(pipeline, family, lora, weights):
        return _report({"integrity": 0.0}, findings, {}, gate.minimum)
    original = changed = EncodedTexts(neutral, samples)
    if reads_again(weights, samples, family):
        original, changed = encode_with(pipeline, family, prompts, original, weights, replace(compute, device=encoding))
    places = max([(facts.resolution // facts.downscale) ** 2, *(sample.latents[0].numel() for sample in samples)])
    placed = bring_denoiser(denoiser, family, device, usable, places)
    if placed.resident is not None:
        compute.say(f"evaluating with {placed.description}")
    total = count_passes(len(prompts), len(samples), timesteps)
    of_drift = count_passes(len(prompts), 0, timesteps)
    predict = partial(in_parts, watched(partial(family.denoiser.predict, denoiser), total, compute.progress))
    compute.say(f"drift on unrelated prompts: {of_drift} forward passes at {facts.resolution} px")
    conds = [{name: value.to(device) for name, value in each.prompts.items()} for each in (original, changed)]
    drifted = _measure_drift(pipeline, predict, process, facts, *conds)
    compute.say(f"validation loss with and without the LoRA: {total - of_drift} forward passes")
    losses = partial(
        validation_losses,
        predict,
        process=process,
        seed=SEED,
        timesteps=timesteps,
        compute=Compute(dtype, device),
    )
    learned = None
    if samples:  # `original` ones without the LoRA, `changed` ones encoded and predicted with it
        with without_lora(pipeline):
            before = losses(original.samples)
        learned = improvement(before, losses(changed.samples))
    health = examine(weights.modules, norms)
    del pipeline, denoiser, modules, predict, losses
    free_memory(device)
    report = judge(drifted, learned, health, unseen=gate.unseen, gate=gate.minimum, samples=len(samples))
    return replace(report, findings=(*report.findings, *_share_findings(gate.share, total)))


def refused_unloaded(weights: LoraWeights, base: Path, family: Family, gate: float = GATE) -> LoraReport | None:
    """The report on a LoRA refused for its numbers, names or shapes, before any weight of the base model is loaded.

    None for any other.
    """
    if not_finite := weights.not_finite():
        return _report({"integrity": 0.0}, [_not_finite(not_finite, len(weights.modules))], {}, gate)
    if problems := misfits_by_config(weights, family, base):
        return _report({"integrity": 0.0}, _key_findings(problems), {}, gate)
    return None


def judge(
    drifted: float, learned: Improvement | None, health: Health, *, unseen: bool, gate: float, samples: int
) -> LoraReport:
    """The report from the measurements. `learned` is None when there was no sample."""
    numbers: dict[str, Any] = {"drift": drifted, "health": asdict(health), "samples": samples, "unseen": unseen}
    findings: list[Finding] = []
    if learned is not None:
        numbers["learning"] = asdict(learned)
    if not math.isfinite(drifted) or (learned is not None and not math.isfinite(learned.mean)):
        message = "The model's predictions hold NaN or infinity with the LoRA."
        findings.append(Finding("prediction_not_finite", "error", message, "Train again with a lower learning rate."))
        return _report({"integrity": 0.0}, findings, numbers, gate)
    if drifted < LEAST_CHANGE and (learned is None or abs(learned.mean) < LEAST_CHANGE):
        message = (
            f"The LoRA changes nothing: predictions move by {drifted:.1e} of their size (least: {LEAST_CHANGE:.0e})."
        )
        fix = "Too few steps or too low a learning rate: set train.max_steps or optimizer.learning_rate higher."
        findings.append(Finding("changes_nothing", "error", message, fix))
        return _report({"integrity": 0.0}, findings, numbers, gate)
    parts = {
        "integrity": 1.0,
        "learning": learning_score(learned) if learned is not None else UNMEASURED_LEARNING,
        "preservation": falling(drifted, DRIFT_FREE, DRIFT_RUINED),
        "health": health_score(health),
    }
    findings += _learning_findings(learned, unseen, samples)
    findings += _preservation_findings(drifted) + _health_findings(health)
    return _report(parts, findings, numbers, gate)


def learning_score(found: Improvement) -> float:
    """Size times certainty, each in [0, 1]; 0 when the LoRA is not better."""
    size = min(1.0, max(0.0, found.mean) / ENOUGH_IMPROVEMENT)
    certainty = min(1.0, max(0.0, (found.certainty - 0.5) / 0.475))
    return size * certainty


def health_score(found: Health) -> float:
    """1 for updates that are small beside the weights in modules that all learned something."""
    return falling(found.largest, NORM_FREE, NORM_RUINED) * (1.0 - found.dead / found.modules)


def falling(value: float, free: float, ruined: float) -> float:
    """1 up to `free`, 0 from `ruined` on, linear in the logarithm between."""
    if value <= free:
        return 1.0
    return max(0.0, 1.0 - math.log(value / free) / math.log(ruined / free))


def _report(parts: Mapping[str, float], findings: list[Finding], numbers: Mapping[str, Any], gate: float) -> LoraReport:
    complete = {"integrity": 0.0, **dict.fromkeys(WEIGHTS, 0.0), **parts}
    score = complete["integrity"] * math.prod(complete[name] ** weight for name, weight in WEIGHTS.items())
    return LoraReport(round(score, 4), gate, complete, tuple(findings), numbers)


def _measure_drift(
    pipeline: Any,
    predict: Any,
    process: Process,
    facts: ModelFacts,
    cond: Mapping[str, Tensor],
    changed: Mapping[str, Tensor],
) -> float:
    """`cond` are text embeddings of the prompts without the LoRA, `changed` with it on the text encoders."""
    first = next(iter(cond.values()))
    side = facts.resolution // facts.downscale
    row = [float(number) for number in (facts.resolution, facts.resolution, 0, 0, facts.resolution, facts.resolution)]
    sizes = torch.tensor([row] * len(first), device=first.device)
    with without_lora(pipeline):
        visits = base_visits(predict, process, cond, sizes, (facts.latent_channels, side, side))
    return drift(predict, visits, changed, sizes)


def in_parts(predict: Predict, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The same prediction [B, C, h, w], a few rows at a time: at full size eight rows take gigabytes."""
    parts = [slice(start, start + PREDICTED_AT_ONCE) for start in range(0, len(t), PREDICTED_AT_ONCE)]
    return torch.cat(
        [
            predict(noisy[part], t[part], {name: value[part] for name, value in cond.items()}, sizes[part])
            for part in parts
        ]
    )


def watched(predict: Predict, total: int, watch: Callable[[int, int], None]) -> Predict:
    """The same predictions; `watch` is called with their number, of `total`, after each."""
    done = 0

    def predict_watched(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        nonlocal done
        found = predict(noisy, t, cond, sizes)
        done += 1
        watch(done, max(done, total))
        return found

    return predict_watched


def choose_inputs(
    prompts: Sequence[str], samples: Sequence[EncodedSample], share: float
) -> tuple[Sequence[str], Sequence[EncodedSample], int]:
    """The prompts and samples for a share of the gate, and the number of timesteps for each sample."""
    cells = int(CELLS * share)
    if share < LORA_CHECKS["full"]:
        stride = -(-len(samples) // max(1, cells // FEWEST_TIMESTEPS)) or 1
        prompts, samples = prompts[:: int(1 / share)], samples[::stride]
    return prompts, samples, max(FEWEST_TIMESTEPS, min(MOST_TIMESTEPS, cells // max(1, len(samples))))


def count_passes(prompts: int, samples: int, timesteps: int) -> int:
    """Forward passes with and without the LoRA, for drift and for validation losses."""
    passes = VISITS * -(-prompts // PREDICTED_AT_ONCE)
    if samples:
        whole, rest = divmod(timesteps, MICRO)
        passes += samples * (whole * -(-MICRO // PREDICTED_AT_ONCE) + -(-rest // PREDICTED_AT_ONCE))
    return 2 * passes


def _loading_findings(pipeline: Any, family: Family, lora: Path, weights: LoraWeights) -> list[Finding]:
    complaints, expected = judged(pipeline, family, lora, weights), len(weights.modules)
    adapted = adapted_modules(pipeline, family)
    if not complaints and adapted == expected:
        return []
    reason = f" diffusers: {complaints[0][:200]}" if complaints else ""
    message = f"A fresh pipeline loaded {adapted} of {expected} modules.{reason}"
    return [
        Finding("not_loaded_whole", "error", message, "Write it in another format with `convert`, or export it again.")
    ]


def _key_findings(problems: list[Problem]) -> list[Finding]:
    return [Finding("key_does_not_fit", "error", problem.message, problem.fix) for problem in in_short(problems)]


def _not_finite(names: list[str], total: int) -> Finding:
    message = f"{len(names)} of {total} modules hold NaN or infinity (first: {names[0]})."
    return Finding("not_finite", "error", message, "Train again with a lower learning rate.")


def _share_findings(share: float, passes: int) -> list[Finding]:
    if share == LORA_CHECKS["full"]:
        return []
    message = f"Measured in brief, with {counted(passes, 'forward pass', 'forward passes')}: the score is less certain."
    fix = "Measure it in full with gates.lora_check=full, or with `validate`."
    return [Finding("lite_check", "note", message, fix)]


def _learning_findings(found: Improvement | None, unseen: bool, samples: int) -> list[Finding]:
    if found is None:
        fix = "Set --data to images of the subject with captions."
        return [Finding("no_samples", "warning", "Learning could not be measured: there are no images.", fix)]
    findings = []
    interval = f"{found.mean:.2%}, 95 % interval {found.low:.2%} to {found.high:.2%}"
    if found.mean <= 0:
        message = f"Validation loss is not lower with the LoRA ({interval})."
        findings.append(Finding("learned_nothing", "error", message, "Train longer, or at another learning rate."))
    elif found.low <= 0:
        message = f"The improvement of validation loss may be luck ({interval})."
        findings.append(
            Finding("learning_uncertain", "warning", message, "Train longer, or use more validation images.")
        )
    elif found.mean < ENOUGH_IMPROVEMENT:
        message = f"Validation loss improved by little ({interval}; enough is {ENOUGH_IMPROVEMENT:.2%})."
        findings.append(Finding("learned_little", "warning", message, "Train longer, or at a higher learning rate."))
    if not unseen:
        images = f"{counted(samples, 'image')} that may have been trained on"
        message = f"No validation images: learning was measured on {images}."
        findings.append(Finding("trained_images", "note", message, "Set validation.split=0.1, or --data to others."))
    elif not found.over_samples:
        message = f"What the LoRA learned was measured on {counted(samples, 'validation image')}."
        findings.append(
            Finding("few_validation_images", "note", message, "From 4 images on the score is more certain.")
        )
    return findings


def _preservation_findings(drifted: float) -> list[Finding]:
    if drifted <= DRIFT_FREE:
        return []
    message = (
        f"Unrelated prompts change by {drifted:.0%} of the base model's prediction (good: up to {DRIFT_FREE:.0%})."
    )
    fix = "Train with data.num_class_images=32, or fewer steps, or at a lower learning rate or rank."
    return [Finding("drift", "warning", message, fix)]


def _named(found: Health) -> str:
    return ", ".join((*found.dead_modules, *(["…"] if found.dead > len(found.dead_modules) else [])))


def _health_findings(found: Health) -> list[Finding]:
    findings = []
    if found.largest > NORM_FREE:
        message = f"The layer that changed most, {found.largest_module}, changed by {found.largest:.0%} of its size"
        usual = f"up to {NORM_FREE:.0%} is usual"
        if found.largest > NORM_WARNED:
            findings.append(Finding("large_update", "warning", f"{message} ({usual}).", "Lower the learning rate."))
        else:
            fix = "If the images look distorted, lower the learning rate."
            findings.append(Finding("large_update", "note", f"{message} ({usual}).", fix))
    if found.dead:
        message = f"{found.dead} of {found.modules} modules learned nothing ({_named(found)})."
        findings.append(
            Finding("dead_modules", "warning", message, "Train them longer, or remove them from lora.target_modules.")
        )
    if found.rank_used < 0.1:
        message = f"The updates use {found.rank_used:.0%} of their rank."
        findings.append(Finding("rank_unused", "note", message, "A smaller lora.rank would do."))
    return findings
