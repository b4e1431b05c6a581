"""Prepare a session: choose for the hardware, fill the caches, build denoiser and LoRA, and the loop's run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from torch import Tensor

from lora_trainer.adapters.base import ADAPTERS
from lora_trainer.config.schema import AttentionName, Config
from lora_trainer.core.errors import UserError, first_line
from lora_trainer.core.interrupt import StepAborted, abortable
from lora_trainer.data.caches.upkeep import keep_limit
from lora_trainer.data.loader import CachedData
from lora_trainer.data.steps import StepArithmetic, micro_shapes
from lora_trainer.evaluation.loading import free_memory
from lora_trainer.evaluation.validation_loss import EncodedSample, validation_losses
from lora_trainer.models.memory.block_swap import move_to_device
from lora_trainer.monitor.progress import Progress
from lora_trainer.report.record import read_record
from lora_trainer.run.caching import CachePlans, cached_data, fill_caches, plan_caches, validation_samples
from lora_trainer.run.choices import Choices, asked_by_user, cap_memory, choose
from lora_trainer.run.compiling import compiling_pays
from lora_trainer.run.feed import Feed, fresh_latents, make_feed
from lora_trainer.run.find_micro import earlier_find, find_micro, smallest
from lora_trainer.run.inputs import Inputs, arithmetic, own_architecture
from lora_trainer.run.messages import model_lines, show_captions, show_unheld, show_views
from lora_trainer.run.order import Order
from lora_trainer.run.release import draw_while_training, export_step, withdraw_after
from lora_trainer.training.build import Built, build_step_context
from lora_trainer.training.hardware import rounds_alike_anywhere, set_hardware
from lora_trainer.training.layout import Layout
from lora_trainer.training.processes import Processes, join_processes
from lora_trainer.training.run import Run
from lora_trainer.training.state import OomFallback, TrainState
from lora_trainer.training.step import StepContext
from lora_trainer.training.texts import encode_validation_captions

VALIDATION_TIMESTEPS = 8
TIMED_ATTENTION = "timed_attention"  # in the record's hardware
UNEVEN_PRODUCTS = (
    "warning: matrix products of this process round by the memory address of their operands, so results differ in "
    "rounding from run to run. Import lora_trainer before anything is computed, or set MKL_CBWR=AUTO,STRICT."
)


@dataclass(frozen=True)
class Session:
    """What the steps of a session share."""

    order: Order
    inputs: Inputs
    processes: Processes
    choices: Choices
    steps: StepArithmetic

    @property
    def config(self) -> Config:
        return self.order.config

    @property
    def folder(self) -> Path:
        return self.order.folder

    @property
    def console(self) -> Console:
        return self.order.console


@dataclass(frozen=True)
class Prepared:
    """All that the loop and the export need. `cache_seconds` is the time to fill the caches."""

    session: Session
    built: Built
    feed: Feed
    run: Run
    validation: list[EncodedSample]
    cache_seconds: float


def open_session(order: Order, inputs: Inputs) -> Session:
    """Join the processes and choose for the hardware; loads no model."""
    processes = join_processes(order.config.train.process_timeout_minutes)
    if crowded := cap_memory(order.config, processes.device):
        order.console.print(crowded)
    choices = choose(order.resolved, inputs.family, own_architecture(inputs), processes.device, processes.world)
    steps = arithmetic(order.config, inputs.train, choices.micro, processes.world)
    threads = set_hardware(order.config, processes.device, earlier_threads(order.folder) if order.resume else None)
    if processes.device.type == "cpu":
        order.console.print(f"threads: {threads.count} ({threads.reason})")
        if not rounds_alike_anywhere():
            order.console.print(UNEVEN_PRODUCTS)
    return Session(order, inputs, processes, choices, steps)


def prepare(session: Session, settings: dict[str, Any]) -> Prepared:
    """Fill the caches, then build the step context; `settings` are in each checkpoint. Raises UserError."""
    inputs, console = session.inputs, session.console
    show_views(session.config, inputs, session.steps, console)
    for line in (
        inputs.split_line,
        f"steps: {session.steps.line}",
        *model_lines(session.config, inputs),
        *session.choices.lines,
    ):
        console.print(line)
    show_unheld(session.config, inputs, console)
    show_captions(session.config, inputs, console, session.choices.encoder_dtype.itemsize)
    began = time.monotonic()
    session.order.watch(Progress("caching", total=session.steps.total))
    plans = fill(session)
    cache_seconds = time.monotonic() - began
    validation = validation_samples(session.config, inputs, plans)
    built = build(session)
    for note in (*built.notes, *(built.details if session.order.verbose else ())):
        console.print(note)
    data = cached_data(session.config, inputs, plans)
    if not session.config.cache.latents:
        console.print("latents are encoded while training (cache.latents=false); the VAE stays loaded")
        fresh = fresh_latents(session.config, inputs, session.choices, session.processes.world)
        data = replace(data, fresh=fresh)
    session = with_found_micro(session, built.context, data)
    feed = make_feed(session.config, data, built.context, session.processes, session.choices.micro, session.steps.total)
    run = make_run(session, built, feed, validation, settings)
    return Prepared(session, built, feed, run, validation, cache_seconds)


def with_found_micro(session: Session, context: StepContext, data: CachedData) -> Session:
    """The session with the micro-batch size that `train.auto_find_micro_batch_size` finds, which is logged.

    A resumed run keeps the size found at its start: another would change its rounding.
    """
    config, processes = session.config, session.processes
    if not config.train.auto_find_micro_batch_size:
        return session
    most = min(
        -(-config.train.effective_batch_size // processes.world),
        config.train.max_micro_batch_size or config.train.effective_batch_size,
    )
    found = earlier_find(session.folder) if session.order.resume else None
    if found is not None:
        micro, reason = min(found, most), "found at the start of the run (train.auto_find_micro_batch_size)"
    else:
        with nullcontext() if context.compiled is None else context.compiled.off():
            micro, reason = find_micro(config, session.inputs, context, data, most)
        micro = smallest(micro, processes)
    choices = replace(session.choices, micro=micro, micro_reason=reason)
    session.console.print(choices.lines[-1])
    steps = arithmetic(config, session.inputs.train, micro, processes.world)
    return replace(session, choices=choices, steps=steps)


def fill(session: Session) -> CachePlans:
    """Fill the missing entries of the caches, shared among processes, without waiting in a collective."""
    console, processes = session.console, session.processes
    plans = plan_caches(session.config, session.inputs, session.choices)
    for line in plans.lines:
        console.print(line)
    start = processes.rank / processes.world
    say, choices = console.print, session.choices
    try:
        fill_caches(session.config, session.inputs, choices, plans, filling_lines(console), start, say)
    except (KeyboardInterrupt, SystemExit):
        for plan in plans.kinds:
            total = plan.filled.reused + plan.filled.rebuilt
            say(f"cache: {total - len(plan.still_missing().missing)} of {total} {plan.filled.kind} are there and kept")
        raise
    if processes.is_main:
        kept = keep_limit(plans.latents.folder, int(session.config.cache.limit_gb * 10**9))
        for line in kept.lines if kept.removed or kept.needed else ():
            console.print(f"cache: {line}")
    return plans


def filling_lines(console: Console) -> Callable[[str, int, int], None]:
    """A function that prints a line for every hundred entries of a cache, and at its end, of all processes."""
    shown: dict[str, int] = {}

    def show(what: str, done: int, total: int) -> None:
        if done == total or done // 100 > shown.get(what, 0):
            shown[what] = done // 100
            console.print(f"  {what}: {done}/{total}")

    return show


def layout_of(session: Session) -> Layout:
    """The denoiser's layout: as chosen for the hardware, and compiled where the run is long enough."""
    inputs, steps, choices = session.inputs, session.steps, session.choices
    compiled = compiling_pays(session.config, choices.device, steps.total)
    shapes = micro_shapes(steps, len(inputs.train_plan.counts))
    return replace(choices.layout, compiled=compiled, shapes=shapes)


def build(session: Session) -> Built:
    processes = session.processes
    config, is_requested = with_earlier_attention(session)
    built = build_step_context(
        config,
        session.inputs.family,
        session.inputs.facts,
        layout_of(session),
        device=session.choices.device,
        reduce=processes.reduce,
        is_attention_requested=is_requested,
        latents=largest_latents(session),
    )
    return replace(
        built,
        context=replace(built.context, rank=processes.rank, world=processes.world, await_gpu=processes.await_gpu),
    )


def with_earlier_attention(session: Session) -> tuple[Config, bool]:
    """The config, and whether the user set its attention backend: a resumed run keeps what was the fastest.

    A new timing could choose another backend, which rounds otherwise.
    """
    config, order = session.config, session.order
    if (
        config.hardware.attention_backend != "fastest"
        or not order.resume
        or (name := earlier_attention(order.folder)) is None
    ):
        return config, asked_by_user(order.resolved, "hardware.attention_backend")
    session.console.print(
        f"attention backend: {name} (the fastest at the start of the run; hardware.attention_backend=fastest)"
    )
    return config.model_copy(update={"hardware": config.hardware.model_copy(update={"attention_backend": name})}), False


def earlier_threads(folder: Path) -> int | None:
    """The threads at the start of the run, from its record; None where it has no such number."""
    hardware = (read_record(folder) or {}).get("hardware")
    count = hardware.get("threads") if isinstance(hardware, dict) else None
    return count if isinstance(count, int) and count > 0 else None


def earlier_attention(folder: Path) -> str | None:
    """The fastest attention backend from the run's record; None where it has none that is known here."""
    hardware = (read_record(folder) or {}).get("hardware")
    name = hardware.get(TIMED_ATTENTION) if isinstance(hardware, dict) else None
    return name if name in get_args(AttentionName) else None


def largest_latents(session: Session) -> tuple[int, int, int, int]:
    """The shape [B, C, h, w] of a micro-batch of the run's largest bucket."""
    facts, buckets = session.inputs.facts, session.inputs.train_plan.counts
    bucket = max(buckets, key=lambda bucket: bucket.width * bucket.height)
    height, width = bucket.height // facts.downscale, bucket.width // facts.downscale
    return session.choices.micro, facts.latent_channels, height, width


def make_run(
    session: Session, built: Built, feed: Feed, validation: list[EncodedSample], settings: dict[str, Any]
) -> Run:
    """What the loop needs: how to get the micro-batches of a step, validate and sample."""
    config, context = session.config, built.context

    def predict(*arguments: Any) -> Tensor:
        with abortable():
            return context.predict(context.denoiser, *arguments)

    def validate(batch_size: int) -> float:
        for module in context.modules:
            module.eval()
        try:
            with context.adapter.swapped_in(context.shown()):
                losses = validation_losses(
                    predict,
                    encode_validation_captions(context.texts, validation, context.device),
                    context.process,
                    seed=config.train.seed,
                    timesteps=VALIDATION_TIMESTEPS,
                    device=context.device,
                    micro=batch_size,
                    dtype=context.dtype,
                )
        finally:
            for module in context.modules:
                module.train()
        return float(losses.mean())

    def sample(state: TrainState) -> None:
        if session.processes.is_main:
            try_to_draw(session, built, state)
        session.processes.wait()

    def export(step: int, weights: Mapping[str, Tensor]) -> None:
        export_step(session.folder, config, session.inputs, session.steps, session.choices, built.shapes, step, weights)

    return Run(
        config=config,
        folder=session.folder,
        context=context,
        processes=session.processes,
        planned=OomFallback(session.choices.micro, built.checkpointed, swapped=built.swapped),
        total_steps=session.steps.total,
        steps_per_epoch=session.steps.steps_per_epoch,
        samples_in=feed.plan.size,
        names_in=feed.names,
        micros=feed.micros,
        validate=validate if session.inputs.validation else None,
        sample=sample if ADAPTERS[config.lora.type].is_checked else None,  # diffusers reads no other file
        settings=settings,
        say=session.console.print,
        export=export,
        withdraw=partial(withdraw_after, session.folder),
    )


def try_to_draw(session: Session, built: Built, state: TrainState) -> None:
    """Draw images while training. Out of memory or a full disk is logged, and does not end the training."""
    try:
        draw_while_training(
            session.folder,
            session.config,
            session.inputs,
            session.steps,
            session.choices,
            built,
            state,
            session.console.print,
        )
    except StepAborted:
        reason = "a signal came"
    except (RuntimeError, ValueError, OSError, MemoryError, UserError) as error:
        reason = first_line(error)
    else:
        return
    # Out here the pipeline is freed: there is room for the denoiser, where that was moved away.
    free_memory(session.choices.device)
    move_to_device(built.context.denoiser, session.choices.device)
    session.console.print(f"no images at step {state.step}: {reason}")
