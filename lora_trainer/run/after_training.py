"""After training: export the LoRA, judge its file, and draw with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.core.disk import write_with_retry
from lora_trainer.core.errors import MACHINE_FAILURES, first_line
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.interrupt import remembering, stop_if_signalled
from lora_trainer.data.sample_counts import never_trained
from lora_trainer.evaluation.lora_check import LoraGate
from lora_trainer.evaluation.lora_report import NOTHING_ELSE, LoraReport
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.evaluation.verdict import SCALES, VerdictPart
from lora_trainer.lora_format.writing import write_learned_tokens
from lora_trainer.monitor.trackers import VALIDATION, read_lines
from lora_trainer.report.curve import still_falling
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.bases.find import silent
from lora_trainer.run.caching import cache_folder
from lora_trainer.run.choices import DTYPES
from lora_trainer.run.compare_loras import compare_after_training
from lora_trainer.run.counting import DRAWN, counting
from lora_trainer.run.file_sizes import lora_bytes
from lora_trainer.run.release import (
    cause_shown,
    choose_released,
    export_lora,
    judge_lora,
    lora_weights,
    report_verdict,
    training_facts,
    untrained_word,
)
from lora_trainer.run.round_trip import kept_decibels
from lora_trainer.run.sampling import draw_comparison, shown_images, triggers
from lora_trainer.run.verdict_images import keep_verdict_images
from lora_trainer.run_folder.progress import Phase, Progress
from lora_trainer.run_folder.record import BEFORE_AFTER, Record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lora_trainer.run.session import (
        Session,
    )
    from lora_trainer.training.state import TrainState
    from lora_trainer.training.step import StepContext
    from lora_trainer.training.training_run import Run


@dataclass(frozen=True)
class Outcome:
    """How a session ended. `signal_exit` is 128 + the signal's number when one stopped it."""

    record: Record
    lora: LoraReport | None
    comparison: Path | None
    signal_exit: int | None = None


def release(session: Session, run: Run, record: Record, state: TrainState) -> Outcome:
    """Export, check and draw; the outcome with scores and files."""
    config, console, folder = session.config, session.console, session.folder
    began, name = time.monotonic(), session.folder.name
    released = choose_released(config, run.checkpoints, state, run.context)
    facts = training_facts(session, name, released.step, record.started)
    weights = lora_weights(config, session.inputs.family, released.weights)
    # Learned tokens that are in no trained text: their embeddings did not change.
    tokens_learned = config.textual_inversion.placeholder_tokens
    texts = {text.lower() for sample in session.inputs.train for text in sample.texts} if tokens_learned else set()
    untrained = tuple(word for word in tokens_learned if not any(word.lower() in text for text in texts))
    embeddings = {key: value for key, value in weights.embeddings.items() if key.partition(".")[0] not in untrained}
    stored = DTYPES[config.checkpoint.export_dtype]
    export = partial(export_lora, session, folder, weights, facts, run.context.built.shapes)
    with remembering():  # the record names the files, whatever the gate finds
        kohya, diffusers = write_with_retry("the LoRA", folder, export, lora_bytes(config, run.context.stored_shapes))
        write = partial(write_learned_tokens, folder, name, replace(weights, embeddings=embeddings), dtype=stored)
        tokens = write_with_retry("learned tokens", folder, write, 0)
        files = {**record.files, "kohya": kohya.name, "diffusers": diffusers.name}
        files |= {path.stem.removeprefix(f"{name}."): path.name for path in tokens}
        record = replace(record, files=files, released=released.to_json())
        record.write(folder)
    console.print(f"exported: {kohya.name} and {diffusers.name} (step {released.step})")
    if tokens:
        console.print(f"learned tokens, also in {kohya.name}: {', '.join(path.name for path in tokens)}", markup=False)
    stop_if_signalled()
    del released, weights, export, write  # they hold the trained weights
    outcome = check_lora(session, run, record, state, kohya, untrained)
    return replace(outcome, record=outcome.record.with_seconds(validate=time.monotonic() - began))


def check_lora(
    session: Session, run: Run, record: Record, state: TrainState, kohya: Path, untrained: Sequence[str]
) -> Outcome:
    """Check the exported file and draw with it, as `gates.lora_check` says; the outcome with the report."""
    config, console = session.config, session.console
    step, can_check = record.released["step"], ADAPTERS[config.lora.type].is_checked
    effort = config.gates.lora_check
    if effort == "auto":
        effort = "full" if session.order.enforce_gates else "lite"
    unseen = never_trained(run.feed.plan, step, state.step)
    # It costs no forward pass, and no other part can change what it decides.
    is_decided = unseen is not None and session.order.enforce_gates and config.gates.lora > 0
    is_checked = can_check and effort != "off" and not is_decided
    if session.order.member is not None:
        session.order.member.finish_training()
        stop_if_signalled()
    free_step_context(run.context)
    show_phase(session, state, "validating")
    if is_checked:
        console.print("validating the LoRA from its file")
        encoder = find_encoder(config, say=silent)
        trigger = next(iter(triggers(config)), "")
        gate = LoraGate(config.gates.lora, effort, encoder=encoder, cache=cache_folder(config), trigger=trigger)
        inputs = session.inputs
        decibels = kept_decibels(inputs.facts, inputs.train, inputs.train_plan.views)
        images = replace(run.images, decibels=decibels)
        report = judge_lora(kohya, session, images, gate)
        report = replace(report, choice=compare_after_training(session, images, kohya, step, report, gate))
    elif is_decided:
        console.print(f"the LoRA is refused by its images alone: {NOTHING_ELSE}")
        report = LoraReport(config.gates.lora, {name: VerdictPart(name, None, NOTHING_ELSE) for name in SCALES})
    else:
        why = "gates.lora_check=off" if can_check else f"lora.type={config.lora.type} cannot be checked"
        console.print(f"{why}: the LoRA is not scored, and no images are made with it")
        report = LoraReport(config.gates.lora)
    explained = (cause_shown(each, config, step) for each in report.findings)
    falling = still_falling(read_lines(session.folder / VALIDATION), state.step)
    findings = (unseen, *explained, falling, *map(untrained_word, untrained))
    report = replace(report, findings=with_remedies([each for each in findings if each], report.parts))
    report_verdict(session, report, state.step)
    scores = {**record.scores, "lora": report.score}
    record = replace(record, scores=scores, outcome=report.outcome, lora=report.to_json())
    record.lora["images"] = keep_verdict_images(session, report.shown)
    if not is_checked:
        return Outcome(record, report, None)
    show_phase(session, state, "drawing")
    try:
        with counting(console) as count:
            most = 1 if effort == "lite" else None
            comparison = draw_comparison(session, kohya, most=most, progress=count(DRAWN))
    except MACHINE_FAILURES as error:  # the LoRA is whole and checked
        console.print(f"the before/after images could not be drawn: {first_line(error)}")
        return Outcome(record, report, None)
    session.threads.call("images", step, shown_images(session.folder, BEFORE_AFTER, with_base=True))
    files = {**record.files, "before_after": comparison.relative_to(session.folder).as_posix()}
    return Outcome(replace(record, files=files), report, comparison)


def show_phase(session: Session, state: TrainState, phase: Phase) -> None:
    """Report the phase after training to the watcher."""
    session.order.watch(
        Progress(
            phase,
            state.step,
            session.steps.total,
            loss=state.loss_average,
            val_loss=state.val_loss,
            val_loss_step=state.validated_step,
            best=state.best_val_loss,
        )
    )


def free_step_context(context: StepContext) -> None:
    """Free the trained model, whoever still refers to it: the check and drawing load a fresh base model.

    Otherwise both would be in memory, and a run would need more of it after its training than in it.
    """
    for module in context.modules:
        for part in list(module.modules()):
            part.__dict__.clear()  # weights, adapters, and the hooks that hold swapped blocks
    average = {} if context.average is None else context.average.values
    texts = {} if context.texts is None else context.texts.parameters
    adapter, fixed = context.adapter, {} if context.texts is None else context.texts.fixed
    for held in (adapter.copies, adapter.masters, adapter.fixed, average, texts, fixed, context.optimizer.state):
        held.clear()
    context.optimizer.param_groups.clear()
    free_memory(context.device)
