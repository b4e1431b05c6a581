"""The part of a run that needs torch: choose, cache, build, train, export, judge, draw."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from lora_trainer.config.layers import Resolved
from lora_trainer.config.schema import Config
from lora_trainer.config.toml import to_toml
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import describe_machine
from lora_trainer.core.io import write_text
from lora_trainer.data.loader import read_micro
from lora_trainer.data.steps import StepArithmetic, plan_steps, share, split_micros
from lora_trainer.evaluation.held_out import held_out_losses
from lora_trainer.evaluation.report import LoraReport
from lora_trainer.monitor.progress import step_line
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.production.caching import CachePlans, cached_data, fill_caches, plan_caches, validation_samples
from lora_trainer.production.choices import Choices, asked_by_user, card_gib, choose
from lora_trainer.production.inputs import Inputs, arithmetic
from lora_trainer.production.record import Record
from lora_trainer.production.release import draw_comparison, export_lora, judge_lora, lora_weights, training_facts
from lora_trainer.training.build import Built, build_learner
from lora_trainer.training.checkpoint import Checkpoint, newest_valid, step_name
from lora_trainer.training.micro import Micro, make_micro
from lora_trainer.training.processes import Processes, join_processes
from lora_trainer.training.run import Job, train
from lora_trainer.training.state import TrainState

VALIDATION_TIMESTEPS = 8
# What a checkpoint's weights, order of samples and noise hang on: these must not change in a resumed run.
FIXED_ON_RESUME = (
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "optim.name",
    "train.seed",
    "batch.effective",
    "data.resolution",
    "data.held_out",
)


@dataclass(frozen=True)
class Outcome:
    """How a session ended. `signal_exit` is 128 + the signal's number when one stopped it."""

    record: Record
    lora: LoraReport | None
    comparison: Path | None
    signal_exit: int | None = None


@dataclass(frozen=True)
class Session:
    """What the steps of a session share."""

    resolved: Resolved
    inputs: Inputs
    folder: Path
    console: Console
    processes: Processes
    choices: Choices
    steps: StepArithmetic

    @property
    def config(self) -> Config:
        return self.resolved.config


def run_session(
    resolved: Resolved, inputs: Inputs, folder: Path, record: Record, console: Console, *, resume: bool
) -> Outcome:
    """Train and release one LoRA in `folder`. Raises UserError."""
    processes = join_processes()
    choices = choose(resolved, processes.device, processes.world)
    steps = arithmetic(resolved.config, inputs.train, choices.micro, processes.world)
    session = Session(resolved, inputs, folder, console, processes, choices, steps)
    settings = fixed_settings(session)
    start = find_start(folder, settings, console) if resume else None
    if processes.is_main:
        write_text(folder / "config.toml", to_toml(repeatable(session)))
    for line in (*inputs.train_plan.lines, steps.line, *choices.lines):
        console.print(line)

    began = time.monotonic()
    plans = fill_and_say(session.config, inputs, choices, processes, console)
    record = record.with_seconds(cache=time.monotonic() - began)

    held_out = validation_samples(inputs, plans)
    built = build(session)
    for note in built.notes:
        console.print(note)
    job = make_job(session, built, cached_data(inputs, plans), held_out, settings)
    state, signal_exit = run_training(session, job, start)
    record = replace(
        record.with_seconds(train=state.seconds - (start.state.seconds if start else 0.0)),
        steps=state.step,
        hardware={**describe_machine(), "device": str(choices.device), "processes": processes.world},
        arithmetic=steps.to_json(),
        choices=(*choices.lines, *built.notes),
        training=asdict(state),
    )
    if signal_exit is not None or not processes.is_main:
        return Outcome(record, None, None, signal_exit)
    return release(session, built, record, state, held_out)


def fill_only(resolved: Resolved, inputs: Inputs, console: Console) -> None:
    """The caching part of a session by itself."""
    processes = join_processes()
    fill_and_say(resolved.config, inputs, choose(resolved, processes.device, processes.world), processes, console)


def fill_and_say(
    config: Config, inputs: Inputs, choices: Choices, processes: Processes, console: Console
) -> CachePlans:
    """Fill what is missing, in the main process while the others wait."""
    plans = plan_caches(config, inputs, choices)
    for line in plans.lines:
        console.print(f"cache: {line}")
    if processes.is_main:
        fill_caches(config, inputs, choices, plans, partial(show_filling, console))
    processes.wait()
    return plans


def repeatable(session: Session) -> Config:
    """The config that repeats this run from any folder: absolute paths, what the hardware decided, the run's name."""
    config = session.config
    model = config.model.model_copy(update={"path": config.model.path and str(Path(config.model.path).resolve())})
    sources = tuple(str(Path(source).resolve()) for source in config.data.sources)
    data = config.data.model_copy(update={"sources": sources})
    memory = config.memory.model_copy(update={"base_precision": session.choices.precision.value})
    return config.model_copy(update={"model": model, "data": data, "memory": memory})


def build(session: Session) -> Built:
    return build_learner(
        session.config,
        session.inputs.family,
        session.inputs.facts,
        dtype=session.choices.dtype,
        device=session.choices.device,
        reduce=session.processes.reduce,
        card_gib=card_gib(session.config),
        attention_asked=asked_by_user(session.resolved, "memory.attention"),
    )


def make_job(session: Session, built: Built, data: Any, held_out: list[Any], settings: dict[str, Any]) -> Job:
    """The loop's job: how to get the micro batches of a step, validate and sample."""
    config, learner = session.config, built.learner
    plan = plan_steps(session.inputs.train, config.batch.effective, config.train.seed)
    fits = session.inputs.train_plan.fits

    def micros(step: int) -> list[Micro]:
        mine = share(plan.refs(step), session.processes.rank, session.processes.world)
        groups = split_micros(mine, lambda index: fits[index].bucket, session.choices.micro)
        batches = [read_micro(data, group, step, config.train.seed, config.data.caption_dropout) for group in groups]
        return [make_micro(batch, step, config.train.seed, config.noise, learner.process) for batch in batches]

    def validate() -> float:
        learner.denoiser.eval()
        losses = held_out_losses(
            partial(learner.predict, learner.denoiser),
            held_out,
            learner.process,
            seed=config.train.seed,
            timesteps=VALIDATION_TIMESTEPS,
            device=learner.device,
            dtype=learner.dtype,
        )
        learner.denoiser.train()
        return float(losses.mean())

    def sample(state: TrainState) -> None:
        if session.processes.is_main:
            draw_while_training(session, built, state)
        session.processes.wait()

    return Job(
        config=config,
        folder=session.folder,
        learner=learner,
        processes=session.processes,
        total_steps=session.steps.total,
        steps_per_epoch=session.steps.steps_per_epoch,
        samples_in=lambda step: len(plan.refs(step)),
        micros=micros,
        validate=validate if session.inputs.held_out else None,
        sample=sample,
        settings=settings,
    )


def run_training(session: Session, job: Job, start: Checkpoint | None) -> tuple[TrainState, int | None]:
    """Run the loop with its trackers and progress line."""
    console, total = session.console, session.steps.total
    done = start.state.step if start else 0
    if done >= total:
        console.print(f"all {total} steps are trained already")
    trackers = Trackers(session.folder, resume_step=done if start else None) if session.processes.is_main else None
    try:
        state, interrupt = train(job, start, trackers, step_line(console, total, done))
    finally:
        if trackers:
            trackers.close()
    return state, interrupt.exit_code if interrupt else None


def release(session: Session, built: Built, record: Record, state: TrainState, held_out: list[Any]) -> Outcome:
    """Export, judge and draw; the record with scores and files."""
    config, console, folder, choices = session.config, session.console, session.folder, session.choices
    began, name = time.monotonic(), session.folder.name
    facts = training_facts(config, session.inputs, name, state, session.steps, time.time() - state.seconds)
    weights = lora_weights(config, session.inputs, built.learner.adapter)
    kohya, diffusers = export_lora(folder, name, weights, facts, built.shapes)
    console.print(f"exported {kohya.name} and {diffusers.name}; every key fits the model")
    console.print("validating the LoRA from its file")
    report = judge_lora(kohya, config, session.inputs, held_out, choices.device, choices.dtype)
    comparison = draw_comparison(kohya, folder / "samples", config, session.inputs, choices.device, choices.dtype)
    record = replace(
        record.with_seconds(validate=time.monotonic() - began),
        scores={**record.scores, "lora": round(report.score, 4)},
        files={**record.files, "kohya": kohya.name, "diffusers": diffusers.name},
        lora=report.to_json(),
    )
    return Outcome(record, report, comparison)


def draw_while_training(session: Session, built: Built, state: TrainState) -> None:
    """Save the LoRA as it is now, then draw from that file: what a user's program would show."""
    folder, name = session.folder / "samples", step_name(state.step)
    facts = training_facts(session.config, session.inputs, name, state, session.steps, time.time() - state.seconds)
    weights = lora_weights(session.config, session.inputs, built.learner.adapter)
    kohya, diffusers = export_lora(folder, name, weights, facts, built.shapes)
    diffusers.unlink()
    draw_comparison(
        kohya, folder, session.config, session.inputs, session.choices.device, session.choices.dtype, name=name
    )


def show_filling(console: Console, what: str, done: int, total: int) -> None:
    """A line at the end of each cache, and every hundred entries on the way."""
    if done == total or done % 100 == 0:
        console.print(f"  {what}: {done}/{total}")


def fixed_settings(session: Session) -> dict[str, Any]:
    """What a checkpoint is only good for: settings, data and model."""
    dumped = session.config.model_dump(mode="json", by_alias=True)
    values = {name: dumped[name.split(".")[0]][name.split(".")[1]] for name in FIXED_ON_RESUME}
    return {**values, "data": session.inputs.manifest.data_hash, "precision": session.choices.precision.value}


def find_start(folder: Path, settings: dict[str, Any], console: Console) -> Checkpoint | None:
    """The newest checkpoint that can be gone on from; None, said, when there is none.

    Raises UsageError when settings changed that its weights or its order of samples hang on.
    """
    found = newest_valid(folder / "checkpoints")
    if found is None:
        console.print("--resume: no checkpoint yet, starting at step 0")
        return None
    path, checkpoint = found
    changed = {name: old for name, old in checkpoint.settings.items() if settings.get(name) != old}
    if changed:
        raise UsageError(
            [
                Problem(f"{name} was {old!r} and is now {settings.get(name)!r}.", "Set it back, or start a new --name.")
                for name, old in changed.items()
            ]
        )
    console.print(f"resuming from {path.name} of {folder}")
    return checkpoint
