"""After training: export the LoRA in both formats, evaluate the file, generate images with and without it."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.adapters.adapter_kinds import adapter_kind, denoiser_options, text_options
from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.findings import Finding, counted
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.interrupt import abortable
from lora_trainer.core.version import __version__
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.lora_check import LoraGate, check_lora
from lora_trainer.evaluation.part_words import WORDS
from lora_trainer.evaluation.placing import with_less
from lora_trainer.lora_format.metadata import FlowFacts, TrainingFacts
from lora_trainer.lora_format.weights import AdapterWeights
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.base_loras import loras_line
from lora_trainer.models.lora_names import names_of
from lora_trainer.models.memory.block_swap import move_to_device
from lora_trainer.models.textual_inversion import to_embeddings
from lora_trainer.optim.schedules import first_swa_step, warmup_length
from lora_trainer.run.choices import DTYPES, Choices, usable_bytes
from lora_trainer.run.counting import JUDGED, counting
from lora_trainer.run.inputs import Inputs, trained_framings
from lora_trainer.run.sampling import draw_comparison, shown_images, triggers
from lora_trainer.run_folder.record import step_files
from lora_trainer.training.build import trained_process
from lora_trainer.training.checkpoints.best import read_best
from lora_trainer.training.checkpoints.checkpoint import step_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from lora_trainer.config.schema import Config
    from lora_trainer.diffusion.process import Process
    from lora_trainer.evaluation.evidence import RealImages
    from lora_trainer.evaluation.lora_report import LoraReport
    from lora_trainer.lora_format.layer_updates import LayerUpdate
    from lora_trainer.models.family import Family
    from lora_trainer.run.session import Session
    from lora_trainer.training.state import TrainState
    from lora_trainer.training.step import StepContext

WEIGHTS = "weights"  # the folder of exported LoRA files that are never deleted
ENDS = ("", "_low", "_high")  # of a part's score, in trackers
ROOM_TO_DRAW = 2.0  # times the denoiser's size: a whole pipeline and its images take less


@dataclass(frozen=True)
class Released:
    """The weights that are exported: of which step, its validation loss, and why that step."""

    step: int
    val_loss: float | None
    weights: Mapping[str, Tensor]
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "val_loss": self.val_loss, "reason": self.reason}


def choose_released(config: Config, checkpoints: Path, state: TrainState, context: StepContext) -> Released:
    """The weights of the best step where there are validation images and it is requested; else the last."""
    last = f"the last, step {state.step}"
    loss = "" if state.val_loss is None else f", has validation loss {state.val_loss:.4f}"
    if config.checkpoint.export_weights == "last":
        reason = f"checkpoint.export_weights=last: {last}{loss}"
        return Released(state.step, state.val_loss, context.shown(), reason)
    if state.best_step is None:
        return Released(state.step, state.val_loss, context.shown(), "the last: no validation images")
    lowest = f"its validation loss is the lowest, {state.best_weighted_loss or 0.0:.4f}"
    if state.best_weighted_loss not in (None, state.best_val_loss):
        lowest = f"its weighted validation loss is the lowest, {state.best_weighted_loss or 0.0:.4f}"
    if state.best_step == state.step:
        return Released(state.step, state.val_loss, context.shown(), f"the last; {lowest}")
    # The best step is an earlier one: its weights are in its checkpoint.
    weights = read_best(checkpoints, state.best_step)
    if weights is None:
        reason = f"the weights of step {state.best_step}, the best, cannot be read; {last}{loss}"
        return Released(state.step, state.val_loss, context.shown(), reason)
    reason = f"{lowest}; {last}, has {state.weighted_val_loss or 0.0:.4f}"
    return Released(state.best_step, state.best_val_loss, weights, reason)


def lora_weights(config: Config, family: Family, trained: Mapping[str, Tensor]) -> AdapterWeights:
    """The trained updates by module name, and learned tokens."""
    kind, encoders = adapter_kind(config), tuple(f"{name}." for name in family.text.targets)
    denoiser = {name: value for name, value in trained.items() if not name.startswith(encoders)}
    found: dict[str, LayerUpdate] = dict(kind.updates(denoiser, family.denoiser.component, denoiser_options(config)))
    for prefix in encoders:
        own = {name.removeprefix(prefix): value for name, value in trained.items() if name.startswith(prefix)}
        component = prefix.removesuffix(".")
        found |= kind.updates(own, component, text_options(config, component))
    words = (
        to_embeddings(trained, family.text.clips, config.textual_inversion.placeholder_tokens)
        if config.textual_inversion.placeholder_tokens
        else {}
    )
    return AdapterWeights(found, embeddings=words)


def untrained_word(word: str) -> Finding:
    """The finding of a learned token that was not trained; the LoRA's score does not depend on it."""
    message = f"The token {word!r} is untrained: no caption contains it, so no embedding file is written."
    fix = f"Write it into the captions, or set captions.trigger_word={word}, and train again."
    return Finding("untrained_word", "warning", message, fix)


def cause_shown(finding: Finding, config: Config, step: int) -> Finding:
    """The finding that a LoRA changes nothing, with its steps and learning rate; others unchanged."""
    if finding.code != "changes_nothing":
        return finding
    was = f"{counted(step, 'step')} at optimizer.learning_rate={config.optimizer.learning_rate:g}"
    fix = f"It was trained for {was}, which is too little: set train.max_steps or optimizer.learning_rate higher."
    return replace(finding, fix=fix)


def training_facts(session: Session, name: str, trained: int, started: float) -> TrainingFacts:
    """The run's facts for the file's header; `trained` is the step of the weights."""
    config, inputs, steps = session.config, session.inputs, session.steps
    targets = config.lora.target_modules
    base_version, architecture = inputs.family.lora_files.base_names(inputs.facts)
    process = trained_process(inputs.family.denoiser.make_process(inputs.facts.path), config, torch.device("cpu"))
    return TrainingFacts(
        name=name,
        base_version=base_version,
        architecture=architecture,
        base_name=inputs.facts.name,
        base_form=inputs.facts.form,
        base_loras=loras_line(inputs.family.loras),
        alpha=denoiser_options(config).alpha,
        targets=targets if isinstance(targets, str) else ", ".join(targets),
        resolution=(inputs.resolution, inputs.resolution),
        steps=trained,
        epochs=-(-trained // steps.steps_per_epoch),
        batch=config.train.effective_batch_size,
        learning_rate=config.optimizer.learning_rate,
        optimizer=config.optimizer.name,
        schedule=config.lr_scheduler.name,
        seed=config.train.seed,
        started=started,
        finished=time.time(),
        version=__version__,
        prediction=inputs.facts.prediction,
        warmup_steps=warmup_length(config.lr_scheduler, steps.total),
        mixed_precision={torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[session.choices.dtype],
        min_snr_gamma=config.loss.min_snr_gamma,
        loss_weighting=config.loss.weighting,
        loss_type=config.loss.type,
        huber_delta=config.loss.huber_delta if config.loss.type == "huber" else None,
        noise_offset=config.noise.offset or None,
        multires_iterations=config.noise.multires_iterations or None,
        multires_discount=config.noise.multires_discount if config.noise.multires_iterations else None,
        input_perturbation=config.noise.input_perturbation or None,
        zero_terminal_snr=process.prediction != "flow" and bool(process.alphas_cumprod[-1] == 0),
        dropout=config.lora.dropout,
        rank_stabilized=config.lora.use_rslora,
        network_args=network_args(config),
        ema_decay=config.train.ema_decay,
        swa_start=first_swa_step(config.train, steps.total),
        flow=flow_facts(process),
        **captions_read(config),
        **images_shown(config, inputs),
    )


def network_args(config: Config) -> dict[str, object]:
    """LoRA+, T-LoRA and a LoKr's factor where they are set, by the names that kohya's scripts and LyCORIS have."""
    lora = config.lora
    found: dict[str, object] = {
        "loraplus_lr_ratio": lora.loraplus_lr_ratio,
        "loraplus_text_encoder_lr_ratio": lora.loraplus_text_encoder_lr_ratio,
        "timestep_min_rank": lora.timestep_min_rank,
        "timestep_rank_exponent": lora.timestep_rank_exponent if lora.timestep_min_rank else None,
        "factor": lora.lokr_factor if lora.lokr_factor != -1 else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def captions_read(config: Config) -> dict[str, Any]:
    """Caption settings, text encoding and the text encoders' LoRA, for the file's header."""
    return {
        "caption_dropout": config.captions.dropout,
        "caption_dropout_every_epochs": config.captions.dropout_every_n_epochs,
        "caption_tag_dropout": config.captions.tag_dropout,
        "shuffle_captions": config.captions.shuffle,
        "keep_tokens": config.captions.keep_tokens,
        "trigger": ", ".join(triggers(config)) or None,
        "clip_skip": config.text_encoder.clip_skip,
        "max_tokens": config.text_encoder.max_tokens,
        "t5_tokens": config.text_encoder.max_sequence_length,
        "without_t5": config.model.without_t5,
        "text_rates": config.text_encoder.learning_rates,
        "text_alpha": text_options(config).alpha,
    }


def flow_facts(process: Process) -> FlowFacts | None:
    """The timesteps of a flow, for the file's header; None for other processes."""
    if process.prediction != "flow":
        return None
    times = process.times
    shift = None if times.shift.by_size else times.shift.factor
    return FlowFacts(times.kind, times.logit_mean, times.logit_spread, times.mode_scale, shift)


def images_shown(config: Config, inputs: Inputs) -> dict[str, Any]:
    """Numbers of images, buckets and augmentations, for the file's header."""
    framings = trained_framings(config, inputs.facts)
    kept = sum(sample.regularization for sample in inputs.train)
    return {
        "samples": len(inputs.train) - kept,
        "regularization": kept,
        "validation_images": len(inputs.validation),
        "buckets": {(bucket.width, bucket.height): count for bucket, count in inputs.train_plan.counts.items()},
        "bucket_sides": (config.data.bucket_min, config.data.bucket_max),
        "no_upscale": config.data.bucket_no_upscale,
        "flip": any(framing.flip for framing in framings),
        "random_crop": any(framing.crops > 1 for framing in framings),
        "recolored": any(framing.colors for framing in framings),
    }


def export_lora(
    session: Session,
    folder: Path,
    weights: AdapterWeights,
    facts: TrainingFacts,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Path, Path]:
    """Write both files, every key checked against the model's `shapes` before they get their names; kohya's path first.

    Raises TrainingFailed, and leaves no file, when a value is not finite or a key does not fit.
    """
    config = session.config
    return write_lora(
        folder,
        facts.name,
        weights,
        facts,
        FileLayout(
            DTYPES[config.checkpoint.export_dtype],
            shapes,
            names_of(session.inputs.family),
            adapter_kind(config).forms,
        ),
    )


def judge_lora(lora: Path, session: Session, images: RealImages, gate: LoraGate) -> LoraReport:
    """The LoRA gate's report on the exported file.

    Raises TrainingFailed, with the command to evaluate it later, when the GPU is too small even layer by layer.
    """
    config, inputs, console = session.config, session.inputs, session.console
    device, dtype = session.choices.device, session.choices.dtype

    def judge(compute: Compute) -> LoraReport:
        with counting(console) as count:
            counted_compute = replace(compute, progress=count(JUDGED))
            return check_lora(lora, inputs.facts.path, inputs.family, images, gate, counted_compute)

    try:
        say = partial(console.print, markup=False)
        return with_less(judge, Compute(dtype, device, usable_bytes(config, device), say=say))
    except torch.OutOfMemoryError as error:
        message = f"{lora.name} is trained and saved, but not evaluated: out of memory."
        fix = f"When more memory is free: lora-trainer validate {lora}"
        raise TrainingFailed(Problem("not_evaluated", message, fix)) from error


def report_verdict(session: Session, report: LoraReport, step: int) -> None:
    """Show the verdict in the run's trackers, beside its curves."""
    if report.score is None:
        return
    measured = {name: part.scores for name, part in report.parts.items() if part.measure is not None}
    numbers = {f"{name}{end}": score for name, own in measured.items() for end, score in zip(ENDS, own, strict=True)}
    rows = [
        f"| {WORDS[name].title} | {part.outcome(report.gate) or 'not measured'} | "
        + (" | ".join(f"{score:.2f}" for score in measured[name]) if name in measured else f"{part.reason} | |")
        + " |"
        for name, part in report.parts.items()
    ]
    findings = [f"- {finding.severity}: {finding.message} {finding.fix}".rstrip() for finding in report.findings]
    table = ["| part | outcome | score | low | high |", "|---|---|---|---|---|", *rows]
    markdown = "\n".join([f"**{report.outcome}**, score {report.score:.2f}", "", *table, "", *findings])
    session.threads.call("scalars", "verdict", {"step": step, "score": report.score, **numbers})
    session.threads.call("text", step, "verdict", markdown)


def draw_while_training(session: Session, context: StepContext, state: TrainState) -> None:
    """Export the current LoRA, then generate images from that file, as a user's program does."""
    config, inputs = session.config, session.inputs
    name = step_name(state.step)
    facts = training_facts(session, name, state.step, time.time() - state.seconds)
    weights = lora_weights(config, inputs.family, context.shown())
    kohya, diffusers = export_lora(session, session.folder / "samples", weights, facts, context.built.shapes)
    diffusers.unlink()
    with making_room(context, config, session.choices), abortable():
        draw_comparison(session, kohya, name=name)
    session.threads.call("images", state.step, shown_images(session.folder, name))


def export_step(
    session: Session, shapes: Mapping[str, tuple[int, ...]], step: int, trained: Mapping[str, Tensor]
) -> None:
    """Write the weights of a step as `weights/NAME-step-000500.safetensors`, as ComfyUI and kohya's scripts load it."""
    facts = training_facts(session, f"{session.folder.name}-{step_name(step)}", step, time.time())
    weights = lora_weights(session.config, session.inputs.family, trained)
    _, diffusers = export_lora(session, session.folder / WEIGHTS, weights, facts, shapes)
    diffusers.unlink()
    if keep := session.config.checkpoint.export_keep_last:
        for path in step_files(session.folder)[:-keep]:
            path.unlink(missing_ok=True)


def withdraw_after(folder: Path, step: int) -> None:
    """Delete what `export_step` wrote after `step`, to which the run rolled back. Raises OSError."""
    for path in (folder / WEIGHTS).glob("*.safetensors"):
        number = path.stem.removeprefix(f"{folder.name}-step-")
        if number.isdigit() and int(number) > step:
            path.unlink(missing_ok=True)


@contextmanager
def making_room(context: StepContext, config: Config, choices: Choices) -> Iterator[None]:
    """Move the trained denoiser to system memory inside the block where a second, unquantized one would not fit."""
    denoiser, device = context.denoiser, choices.device
    usable = usable_bytes(config, device)
    another = choices.dtype.itemsize * sum(map(math.prod, context.built.shapes.values()))
    if usable is None or usable > ROOM_TO_DRAW * another:
        yield
        return
    move_to_device(denoiser, torch.device("cpu"))
    free_memory(device)
    try:
        yield
    finally:
        free_memory(device)
        move_to_device(denoiser, device)
