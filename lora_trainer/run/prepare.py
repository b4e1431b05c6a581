"""What a run trains with: caches, the step's context, data, validation, samples and profiler, composed once."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.config.schema import AttentionName, Config
from lora_trainer.core.errors import MACHINE_FAILURES, UserError, first_line
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.interrupt import StepAborted, abortable
from lora_trainer.data.steps import StepArithmetic, micro_shapes
from lora_trainer.diffusion.loss import WEIGHTINGS
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.tracking import Pairs, caption_margins, plan_pairs
from lora_trainer.evaluation.validation_loss import (
    ValidationLoss,
    losses_at,
    mean_losses,
    validation_losses,
)
from lora_trainer.memory_plan.profiles import Sizes
from lora_trainer.models.memory.block_swap import move_to_device
from lora_trainer.monitor.idle import IdleSetup
from lora_trainer.run.caching import cached_data, measured_images, preservation_of
from lora_trainer.run.choices import asked_by_user, compiling_pays
from lora_trainer.run.inputs import named_controls, own_architecture
from lora_trainer.run.messages import length_lines, model_lines, print_row, show_captions, show_views
from lora_trainer.run.miniature import trial_line
from lora_trainer.run.plans.plan import gauge_of
from lora_trainer.run.release import (
    draw_while_training,
    export_step,
    withdraw_after,
)
from lora_trainer.run.run_record import TIMED_ATTENTION
from lora_trainer.run.session import (
    Session,
    fill,
    with_found_micro,
)
from lora_trainer.run.uncached import fresh_latents
from lora_trainer.run_folder.record import Record
from lora_trainer.training.build import build_step_context
from lora_trainer.training.checkpoints.scratch import Scratch
from lora_trainer.training.feed import Feed, make_feed
from lora_trainer.training.objectives.guidance import make_guidance_target
from lora_trainer.training.profiler import ProfiledDevice, Profiler
from lora_trainer.training.requests import Requests
from lora_trainer.training.state import OomFallback, TrainState
from lora_trainer.training.texts import encode_validation_captions
from lora_trainer.training.training_run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.evaluation.evidence import RealImages
    from lora_trainer.training.step import StepContext


VALIDATION_TIMESTEPS = 8
WITHOUT_STATE = (
    "checkpoint.save_state=false: checkpoints hold weights alone, so this run cannot be resumed. When it ends, the LoRA of"
    " its last step is in the folder weights, for a new run to start from (lora.network_weights)"
)


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
    preservation = preservation_of(config, inputs, plans)
    if preservation is not None:
        console.print(preservation.line)
        context = preservation.applied_to(context)
    if not config.cache.latents:
        console.print("latents are encoded while training (cache.latents=false); the VAE stays loaded")
        fresh = fresh_latents(config, inputs, session.choices, session.processes.world)
        data = replace(data, fresh=fresh)
    session = with_found_micro(session, context, data)
    micro, total = session.choices.micro, session.steps.total
    feed = make_feed(config, data, context, session.processes, micro, total)
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
