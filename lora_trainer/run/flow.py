"""Run a session from start to end: resume, prepare, train, export, check the LoRA, draw."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.config.schema import AttentionName, Config
from lora_trainer.config.toml import to_toml
from lora_trainer.core.disk import current, write_with_retry
from lora_trainer.core.errors import MACHINE_FAILURES, UsageError, UserError, first_line
from lora_trainer.core.hardware import describe_machine, free_memory
from lora_trainer.core.interrupt import StepAborted, abortable, remembering, stop_if_signalled
from lora_trainer.core.io import write_text
from lora_trainer.data.sample_counts import FILE as SAMPLE_COUNTS
from lora_trainer.data.sample_counts import never_trained, write_sample_counts
from lora_trainer.data.steps import StepArithmetic, micro_shapes
from lora_trainer.diffusion.loss import WEIGHTINGS
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.lora_check import LoraGate
from lora_trainer.evaluation.lora_report import NOTHING_ELSE, LoraReport
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.evaluation.seeing import load_encoder
from lora_trainer.evaluation.tracking import Pairs, caption_margins, plan_pairs
from lora_trainer.evaluation.validation_loss import (
    ValidationLoss,
    losses_at,
    mean_losses,
    validation_losses,
)
from lora_trainer.evaluation.verdict import SCALES, VerdictPart
from lora_trainer.lora_format.writing import write_learned_tokens
from lora_trainer.memory_plan.profiles import Sizes
from lora_trainer.models.memory.block_swap import move_to_device
from lora_trainer.monitor.events import Event
from lora_trainer.monitor.idle import IdleSetup, means_of
from lora_trainer.monitor.memory import gpu_pool, highest_memory_gib
from lora_trainer.monitor.progress_line import step_line
from lora_trainer.monitor.trackers import SYSTEM, VALIDATION, Trackers, read_lines
from lora_trainer.report.curve import still_falling
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.bases.find import silent
from lora_trainer.run.caching import cache_folder, cached_data, measured_images
from lora_trainer.run.changed_data import write_images
from lora_trainer.run.choices import DTYPES, asked_by_user, compiling_pays
from lora_trainer.run.compare_loras import compare_after_training
from lora_trainer.run.counting import DRAWN, counting
from lora_trainer.run.differences import ROUNDING_DIFFERS, other_machine, pinned, repeated_record
from lora_trainer.run.file_sizes import lora_bytes
from lora_trainer.run.inputs import Inputs, named_controls, own_architecture, with_absolute_paths
from lora_trainer.run.messages import length_lines, model_lines, print_row, show_captions, show_views
from lora_trainer.run.miniature import trial_line
from lora_trainer.run.plans.plan import gauge_of
from lora_trainer.run.release import (
    cause_shown,
    choose_released,
    draw_while_training,
    export_lora,
    export_step,
    judge_lora,
    lora_weights,
    report_verdict,
    training_facts,
    untrained_word,
    untrained_words,
    withdraw_after,
)
from lora_trainer.run.room import room_for
from lora_trainer.run.round_trip import kept_decibels
from lora_trainer.run.sampling import draw_comparison, shown_images, triggers
from lora_trainer.run.session import (
    Session,
    checked_start,
    fill,
    open_session,
    with_found_micro,
    with_generated_images,
)
from lora_trainer.run.start import class_image_settings, refuse_other_class_images
from lora_trainer.run.uncached import fresh_latents
from lora_trainer.run.verdict_images import keep_verdict_images
from lora_trainer.run_folder.progress import Phase, Progress
from lora_trainer.run_folder.record import BEFORE_AFTER, Record
from lora_trainer.training.build import build_step_context
from lora_trainer.training.checkpoints.checkpoint import Checkpoint, newest_valid
from lora_trainer.training.checkpoints.scratch import Scratch
from lora_trainer.training.control import is_stopped_early, stop_reason
from lora_trainer.training.feed import Feed, make_feed
from lora_trainer.training.guidance import make_guidance_target
from lora_trainer.training.loop import train
from lora_trainer.training.profiler import ProfiledDevice, Profiler
from lora_trainer.training.requests import Requests
from lora_trainer.training.run import Run
from lora_trainer.training.state import OomFallback, TrainState
from lora_trainer.training.texts import encode_validation_captions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lora_trainer.evaluation.evidence import RealImages
    from lora_trainer.monitor.tracker_thread import TrackerThreads
    from lora_trainer.run.order import Order
    from lora_trainer.training.step import StepContext

VALIDATION_TIMESTEPS = 8
WITHOUT_STATE = (
    "checkpoint.save_state=false: checkpoints hold weights alone, so this run cannot be resumed. When it ends, the LoRA of"
    " its last step is in the folder weights, for a new run to start from (lora.network_weights)"
)
TIMED_ATTENTION = "timed_attention"  # in the record's hardware


@dataclass(frozen=True)
class Outcome:
    """How a session ended. `signal_exit` is 128 + the signal's number when one stopped it."""

    record: Record
    lora: LoraReport | None
    comparison: Path | None
    signal_exit: int | None = None


def run_session(order: Order, inputs: Inputs, record: Record, threads: TrackerThreads) -> Outcome:
    """Train and release one LoRA in the order's folder. Raises UserError."""
    session = replace(open_session(order, inputs), threads=threads)
    if (encoder := find_encoder(session.config, say=session.console.print)) is not None:
        load_encoder(encoder.path, torch.device("cpu"))  # which refuses another kind of model before it is needed
    settings, start = checked_start(order, inputs, session.choices, session.steps)
    session = with_generated_images(session)  # which takes long, so after all that is refused
    settings |= class_image_settings(session.config, session.inputs)
    refuse_other_class_images(start, settings, order.folder, order.config)
    for line in order.differences:
        order.console.print(line)
    done, total = start.state.step if start else 0, session.steps.total
    order.watch(Progress("caching", done, total))
    session, run = prepare(session, settings)
    if session.processes.is_main:
        text = to_toml(repeatable_config(session, run.context.built.attention))
        file = order.folder / "config.toml"
        keep = partial(write_text, file, text)
        current().keep(file.name, keep)
        write_with_retry(file.name, order.folder, keep, len(text))
        write_images(order.folder, inputs.manifest.samples)
    record = with_preparation(record, session, run)
    if session.processes.is_main:  # a run that fails from here on has its hardware in the record
        record.write(order.folder)
        (order.folder / SAMPLE_COUNTS).unlink(missing_ok=True)  # an earlier session's
    with remembering():  # what was trained is recorded before a signal ends the run
        try:
            shapes = weight_shapes(run.context)
            room = room_for(session.config, order.folder, shapes, done, total, session.steps.steps_per_epoch)
            if room.problem is not None:
                raise UsageError(room.problem)
            if room.scarce:
                order.console.print(f"{room.line}: that is just enough")
            if done >= total:
                order.console.print(f"all {total} steps are trained already")
            with open_trackers(session, start, record.changed) as trackers:
                progress = step_line(order.console, total, done, order.watch)
                state, interrupt = train(run, start, trackers, progress)
        except UserError:
            if (
                session.processes.is_main
                and (saved := newest_valid(run.checkpoints, weights_suffice=True)[0]) is not None
            ):
                with contextlib.suppress(OSError):  # the disk may refuse this too
                    with_sample_counts(record, session, run, saved[1].state).write(order.folder)
            raise
        finally:
            run.feed.close()
        early = is_stopped_early(session.config.safeguards, state.control)
        trained = state.seconds - (start.state.seconds if start else 0.0)
        record = replace(
            record.with_seconds(train=trained),
            steps=state.step,
            training={key: value for key, value in asdict(state).items() if key != "base_losses"}
            | {"stopped_early": early},
            reason=stop_reason(session.config.safeguards, state.control) if early else None,
            checkpoints=run.writer.summary(run.copier.writes),
            memory=memory_summary(session.choices.device),
            seen=means_of(read_lines(order.folder / SYSTEM)) | run.watches.summary(),
        )
        if session.processes.is_main:
            record = with_sample_counts(record, session, run, state)
            record.write(order.folder)
    if interrupt or not session.processes.is_main:
        return Outcome(record, None, None, interrupt.exit_code if interrupt else None)
    stop_if_signalled()
    return release(with_prompts(session, run.requests.prompts), run, record, state)


def prepare(session: Session, settings: dict[str, Any]) -> tuple[Session, Run]:
    """Fill the caches, build the step context, and the run that trains it; `settings` are in each checkpoint.

    The session returned has the micro-batch size that was found, and how long caching took. Raises UserError.
    """
    config, inputs, console = session.config, session.inputs, session.console
    verbose = session.order.verbose
    show_views(config, inputs, session.steps, console, verbose=verbose)
    for line in (
        inputs.split_line,
        f"steps: {session.steps.line}",
        *length_lines(session.order.resolved, session.steps),
        *model_lines(session.order.resolved, inputs),
        *session.choices.lines,
        *(() if config.checkpoint.save_state else (WITHOUT_STATE,)),
    ):
        print_row(console, line, verbose=verbose)
    show_captions(config, inputs, console, session.choices.encoder_dtype.itemsize, verbose=verbose)
    if session.processes.is_main and (line := trial_line(config, inputs)) is not None:
        console.print(line)
    began = time.monotonic()
    plans = fill(session)
    session = replace(session, cache_seconds=session.cache_seconds + time.monotonic() - began)
    images = measured_images(config, inputs, plans)
    context = build(session)
    for note in (*context.built.notes, *(context.built.details if verbose else ())):
        print_row(console, note, verbose=verbose)
    data = cached_data(config, inputs, plans)
    if (scale := config.loss.guidance_target) is not None:
        empty = data.texts.read(data.empty_key)
        guidance = make_guidance_target(scale, context.denoiser, empty, context.device, context.dtype)
        context = guidance.applied_to(context)
    if not config.cache.latents:
        console.print("latents are encoded while training (cache.latents=false); the VAE stays loaded")
        fresh = fresh_latents(config, inputs, session.choices, session.processes.world)
        data = replace(data, fresh=fresh)
    session = with_found_micro(session, context, data)
    feed = make_feed(config, data, context, session.processes, session.choices.micro, session.steps.total)
    return session, make_run(session, context, feed, images, settings)


def build(session: Session) -> StepContext:
    """The step context: the denoiser as chosen for the hardware, compiled where the run is long enough."""
    inputs, steps, choices = session.inputs, session.steps, session.choices
    facts, member = inputs.facts, session.order.member
    bucket = max(inputs.train_plan.counts, key=lambda bucket: bucket.width * bucket.height)
    layout = replace(
        choices.layout,
        compiled=member is None and compiling_pays(session.config, choices.device, steps.total),
        shapes=micro_shapes(steps, len(inputs.train_plan.counts)),
        latents=(
            choices.micro,
            facts.latent_channels,
            bucket.height // facts.downscale,
            bucket.width // facts.downscale,
        ),
    )
    config, is_requested = with_earlier_attention(session)
    family, stored = (
        inputs.family,
        (str(facts.path), str(layout.dtype), layout.stored, f"{layout.swapped} blocks swapped"),
    )
    if member is not None:
        family = member.sharing(family, stored)
    context = build_step_context(config, family, facts, layout, session.processes, is_attention_requested=is_requested)
    return context if member is None else member.join(context, stored, session.console.print)


def with_earlier_attention(session: Session) -> tuple[Config, bool]:
    """The config, and whether the user set its attention backend: a resumed run keeps what was the fastest.

    A new timing could choose another backend, which rounds otherwise.
    """
    config, order = session.config, session.order
    record = Record.read(order.folder) if order.resume else None
    name = None if record is None else record.hardware.get(TIMED_ATTENTION)
    if config.hardware.attention_backend != "fastest" or name not in get_args(AttentionName):
        return config, asked_by_user(order.resolved, "hardware.attention_backend")
    session.console.print(
        f"attention backend: {name} (the fastest at the start of the run; hardware.attention_backend=fastest)"
    )
    return config.model_copy(update={"hardware": config.hardware.model_copy(update={"attention_backend": name})}), False


def make_run(session: Session, context: StepContext, feed: Feed, images: RealImages, settings: dict[str, Any]) -> Run:
    """What the loop needs: the micro-batches of each step, and how to validate, sample and export."""
    config, built, profiler = session.config, context.built, make_profiler(session, context)
    if profiler is not None:
        context = replace(context, phase=profiler.phase)
    weight = WEIGHTINGS[config.loss.weighting](config.loss, context.process)

    own = partial(context.predict, context.denoiser) if context.validated is None else context.validated(context)

    def predict(*arguments: Any) -> Tensor:
        with contextlib.nullcontext() if context.is_sharded else abortable():
            return own(*arguments)

    pairs = compared_captions(config, images, session.steps)

    def validate(batch_size: int) -> ValidationLoss:
        compute, seed = Compute(context.dtype, context.device, at_once=batch_size), config.train.seed
        process, margins = context.process, None
        for module in context.modules:
            module.eval()
        try:
            with context.adapter.swapped_in(context.shown()):
                samples = encode_validation_captions(context.texts, images.unseen, context.device)
                losses = validation_losses(
                    predict, samples, process, seed=seed, timesteps=VALIDATION_TIMESTEPS, compute=compute
                )
                if pairs:
                    losses_of = partial(losses_at, predict, process, seed=seed, compute=compute)
                    margins = caption_margins(losses_of, samples, losses, pairs, process.timesteps)
        finally:
            for module in context.modules:
                module.train()
        return replace(mean_losses(losses, process, weight), margins=margins)

    is_main, saved, scratch = session.processes.is_main, config.checkpoint, None
    requests = Requests(session.folder if is_main else None, config.sample)

    def sample(state: TrainState) -> str | None:
        reason = try_to_draw(with_prompts(session, requests.prompts), context, state) if is_main else None
        session.processes.wait()
        return reason

    if saved.scratch is not None and is_main:
        size = 3 * 4 * context.adapter.size  # of a checkpoint: fp32 weights, and AdamW's two moments
        limit = int(saved.scratch_limit_gb * 10**9)
        scratch = Scratch(saved.scratch, session.folder / "checkpoints", size, limit, session.console.print)

    return Run(
        config=config,
        folder=session.folder,
        context=context,
        feed=feed,
        processes=session.processes,
        planned=OomFallback(session.choices.micro, built.checkpointed, swapped=built.swapped),
        total_steps=session.steps.total,
        validate=validate if images.unseen else None,
        sample=sample if ADAPTERS[config.lora.type].is_checked else None,  # diffusers reads no other file
        settings=settings,
        say=session.console.print,
        setup=IdleSetup(
            cached=config.cache.latents,
            compiled=context.compiled is not None,
            swapped=built.swapped,
            weight_dtype=session.choices.precision.value,
            micro=session.choices.micro,
            samples=session.choices.samples,
            largest_micro=session.choices.largest_micro,
        ),
        export=partial(export_step, session, context.built.shapes),
        withdraw=partial(withdraw_after, session.folder),
        images=images,
        steering=session.order.steering,
        requests=requests,
        profiler=profiler,
        scratch=scratch,
    )


def make_profiler(session: Session, context: StepContext) -> Profiler | None:
    """What profiles the main process, where `profile.enabled` is set."""
    config, inputs, choices = session.config, session.inputs, session.choices
    if not config.profile.enabled or not session.processes.is_main:
        return None
    tflop, counts = None, inputs.train_plan.counts
    with contextlib.suppress(Exception):  # then it is counted in what was recorded; no profile may end a run
        memory_model, flops = gauge_of(inputs.family, own_architecture(inputs), config), 0.0
        for bucket, count in counts.items():
            area = bucket.width * bucket.height // inputs.facts.downscale**2 * (1 + named_controls(config))
            sizes = Sizes(config.lora.rank, choices.micro, area, checkpointed=0)  # without what is recomputed
            flops += count * memory_model.footprint(sizes, choices.precision.value).flops / choices.micro
        tflop = None if config.trains_text else flops / sum(counts.values()) * choices.samples / 1e12
    on = ProfiledDevice(context.device, context.dtype, tflop)
    return Profiler(config.profile, session.folder, on, session.console.print)


def compared_captions(config: Config, images: RealImages, steps: StepArithmetic) -> Pairs:
    """The captions that each validation compares; none where that is off or there are too few."""
    if not config.validation.agreement or any(sample.seen for sample in images.unseen):
        return ()  # of captions that are read with their own control images, none is another image's
    between = steps.samples_in(min(config.validation.every_n_steps or steps.total, steps.total))
    return plan_pairs([str(sample.caption) for sample in images.unseen], between)


def with_prompts(session: Session, prompts: tuple[str, ...] | None) -> Session:
    """The session with other prompts for sample images, as a request set them."""
    if prompts is None:
        return session
    sample = session.config.sample.model_copy(update={"prompts": prompts})
    resolved = replace(session.order.resolved, config=session.config.model_copy(update={"sample": sample}))
    return replace(session, order=replace(session.order, resolved=resolved))


def try_to_draw(session: Session, context: StepContext, state: TrainState) -> str | None:
    """Draw images while training. Out of memory or a full disk is logged and returned, and does not end the training."""
    try:
        draw_while_training(session, context, state)
    except StepAborted:
        reason = "a signal came"
    except (*MACHINE_FAILURES, UserError) as error:
        reason = first_line(error)
    else:
        return None
    # Out here the pipeline is freed: there is room for the denoiser, where that was moved away.
    free_memory(session.choices.device)
    move_to_device(context.denoiser, session.choices.device)
    session.console.print(f"no images at step {state.step}: {reason}")
    return reason


def weight_shapes(context: StepContext) -> list[tuple[int, ...]]:
    """The shapes of the trained weights, and of what checkpoints and LoRA files hold beside them."""
    return [tuple(value.shape) for value in (*context.adapter.masters.values(), *context.adapter.fixed.values())]


def with_preparation(record: Record, session: Session, run: Run) -> Record:
    """The record with what is known before the first step."""
    built = run.context.built
    device, world = str(session.choices.device), session.processes.world
    hardware = {**describe_machine(), "device": device, "processes": world}
    if session.config.hardware.attention_backend == "fastest":
        hardware[TIMED_ATTENTION] = built.attention
    earlier = record.hardware
    if not earlier and (repeated := repeated_record(session.order.resolved)) is not None:
        earlier = repeated.hardware
    moved = other_machine(earlier, hardware)
    if moved:
        session.console.print(f"another machine: {', '.join(moved)}; {ROUNDING_DIFFERS}")
    return replace(
        record.with_seconds(cache=session.cache_seconds),
        hardware=hardware,
        changed=(*record.changed, *moved),
        pinned=record.pinned | pinned(record.config, decided_settings(session, built.attention)),
        model={**record.model, "sha256": run.settings["model"]},
        arithmetic=session.steps.to_json(),
        setup=asdict(run.setup),
        choices=(
            *session.order.resolved.notes,
            *model_lines(session.order.resolved, session.inputs),
            *session.choices.lines,
            *built.notes,
            *built.details,
        ),
    )


def with_sample_counts(record: Record, session: Session, run: Run, state: TrainState) -> Record:
    """The record with the sample counts, which are also logged and written to a file.

    On a full disk only that file is missing: the weights are saved already.
    """
    if not state.step:
        return record
    counts = run.feed.sample_counts(state.step)
    line = counts.line + (f"; {state.skipped} of {state.step} steps were skipped" if state.skipped else "")
    session.console.print(f"trained: {line}")
    summary = counts.to_json() | {"skipped_steps": state.skipped, "line": line}
    try:
        file: str | None = write_sample_counts(session.folder, counts)
    except OSError as error:
        session.console.print(f"{SAMPLE_COUNTS} could not be written: {error}")
        file = None
    return replace(record, sample_counts=summary, files={**record.files, "sample_counts": file})


def repeatable_config(session: Session, attention: str) -> Config:
    """The config that repeats this run from any folder: absolute paths, and the settings chosen for the hardware.

    In a file these count as set by the user, so they never fall back.
    """
    config = with_absolute_paths(session.config)
    fixed = {"run": {"name": session.folder.name}, **decided_settings(session, attention)}
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in fixed.items()}
    return config.model_copy(update=sections)


def decided_settings(session: Session, attention: str) -> dict[str, dict[str, Any]]:
    """The values of automatic settings, from the hardware or a measurement, by section and key."""
    found = {"max_micro_batch_size": session.choices.micro} if session.config.train.auto_find_micro_batch_size else {}
    threads = {"threads": torch.get_num_threads()} if session.choices.device.type == "cpu" else {}
    return {
        "memory": {"weight_dtype": session.choices.precision.value},
        "train": found,
        "hardware": {"attention_backend": attention, **threads},
    }


def memory_summary(device: torch.device) -> dict[str, float]:
    """For the record: peak memory, and on a GPU what torch reserved, what of it is unused, and allocation retries."""
    summary = {"peak_gib": round(highest_memory_gib(device), 3)}
    if pool := gpu_pool(device):
        summary |= {"held_gib": round(pool.most_reserved / 2**30, 3), "unused_gib": round(pool.unused / 2**30, 3)}
        summary |= {"retries": pool.retries, "limit_gib": round(pool.limit / 2**30, 3)}
    return summary


@contextlib.contextmanager
def open_trackers(session: Session, start: Checkpoint | None, changed: Sequence[str]) -> Iterator[Trackers | None]:
    """The run's files of metrics and events; None in all processes but the main one.

    `changed` are the differences of a resumed run.
    """
    if not session.processes.is_main:
        yield None
        return
    with contextlib.closing(
        Trackers(session.folder, resume_step=start.state.step if start else -1, threads=session.threads)
    ) as trackers:
        if start:
            message = "; ".join([f"resumed at step {start.state.step}", *changed])
            trackers.event(Event(start.state.step, "resumed", message))
        yield trackers


def release(session: Session, run: Run, record: Record, state: TrainState) -> Outcome:
    """Export, check and draw; the outcome with scores and files."""
    config, console, folder = session.config, session.console, session.folder
    began, name = time.monotonic(), session.folder.name
    released = choose_released(config, run.checkpoints, state, run.context)
    facts = training_facts(session, name, released.step, record.started)
    weights = lora_weights(config, session.inputs.family, released.weights)
    untrained = untrained_words(config.textual_inversion.placeholder_tokens, session.inputs.train)
    embeddings = {key: value for key, value in weights.embeddings.items() if key.partition(".")[0] not in untrained}
    stored = DTYPES[config.checkpoint.export_dtype]
    export = partial(export_lora, session, folder, weights, facts, run.context.built.shapes)
    with remembering():  # the record names the files, whatever the gate finds
        kohya, diffusers = write_with_retry("the LoRA", folder, export, lora_bytes(config, weight_shapes(run.context)))
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
