"""The flow that a model was trained with, read from its scheduler's config, for training and for generating images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.folder import COPY, read_config, whole_number

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler

    from lora_trainer.diffusion.process import Process

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
MOST_STEPS, MOST_TOKENS, LARGEST_SHIFT = 100_000, 1 << 20, 100.0
# `use_beta_sigmas` spaces the steps of sampling alone, by a distribution that needs scipy: the usual spacing takes its place.
# Options that sample at other times than a plain rectified flow with a shift; each is off where it is not named.
OTHER_TIMES = (
    "invert_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "stochastic_sampling",
)


@dataclass(frozen=True)
class FlowSchedule:
    """A rectified flow (arXiv:2403.03206) and how far its times are shifted towards noise while sampling.

    `shift` is the factor for every size of image. Where `dynamic` is true, it is exp(mu) instead, and mu is linear from
    `base_shift` at `base_tokens` tokens of an image to `max_shift` at `max_tokens`. `terminal` is the last time that is
    sampled: shifted times are stretched to end there; 0 where they are not. Training does not use it.
    """

    steps: int
    shift: float
    dynamic: bool
    base_shift: float
    max_shift: float
    base_tokens: int
    max_tokens: int
    terminal: float = 0.0


def read_flow_schedule(folder: Path) -> FlowSchedule:
    """The schedule of a model folder. Raises UsageError, with all reasons, for one that cannot be followed."""
    config = read_config(folder, "scheduler/scheduler_config.json")
    path = folder / "scheduler" / "scheduler_config.json"
    if problems := _problems(config, path):
        raise UsageError(problems)
    return FlowSchedule(
        steps=whole_number(path, {"num_train_timesteps": 1000, **config}, "num_train_timesteps", 2, MOST_STEPS),
        shift=float(config.get("shift", 1.0)),
        dynamic=bool(config.get("use_dynamic_shifting")),
        base_shift=float(config.get("base_shift", 0.5)),
        max_shift=float(config.get("max_shift", 1.15)),
        base_tokens=whole_number(path, {"base_image_seq_len": 256, **config}, "base_image_seq_len", 1, MOST_TOKENS),
        max_tokens=whole_number(path, {"max_image_seq_len": 4096, **config}, "max_image_seq_len", 1, MOST_TOKENS),
        terminal=float(config.get("shift_terminal") or 0.0),
    )


def _problems(config: Mapping[str, Any], path: Path) -> list[Problem]:
    kind = config.get("_class_name")
    if kind != SCHEDULER:
        message = f"{path}: the scheduler is {kind or 'nameless'}; a model of flow matching has {SCHEDULER}."
        return [Problem("scheduler_unsupported", message, "Put back the scheduler that the model came with.")]
    problems = [
        Problem("scheduler_unsupported", f"{path}: {key} is {config[key]!r}, which is not supported.", "Remove it.")
        for key in OTHER_TIMES
        if config.get(key)
    ]
    if config.get("time_shift_type", "exponential") != "exponential":
        message = f"{path}: time_shift_type is {config['time_shift_type']!r}; exponential can be followed."
        problems.append(Problem("scheduler_unsupported", message, "Remove it."))
    for key, least in (("shift", 0.0), ("base_shift", -LARGEST_SHIFT), ("max_shift", -LARGEST_SHIFT)):
        value = config.get(key, 1.0)
        if not isinstance(value, int | float) or not least < value <= LARGEST_SHIFT:
            message = f"{path}: {key} is {value!r}; above {least:g}, up to {LARGEST_SHIFT:g} is meant."
            problems.append(Problem("scheduler_invalid", message, COPY))
    terminal = config.get("shift_terminal") or 0.0
    if not isinstance(terminal, int | float) or not 0 <= terminal < 1:
        problems.append(
            Problem("scheduler_invalid", f"{path}: shift_terminal is {terminal!r}; 0 to below 1 is meant.", COPY)
        )
    if config.get("base_image_seq_len", 256) == config.get("max_image_seq_len", 4096):
        problems.append(
            Problem("scheduler_invalid", f"{path}: base_image_seq_len and max_image_seq_len are the same.", COPY)
        )
    return problems


def make_process(folder: Path, patch: int = 2) -> Process:
    """The process for training and validation, with the model's own shift, whose tokens are `patch` by `patch` latents.

    Raises UsageError as `read_flow_schedule`.
    """
    from lora_trainer.diffusion.process import Process, flow_signal
    from lora_trainer.diffusion.timesteps import Shift, Times

    flow = read_flow_schedule(folder)
    tokens, mus = (flow.base_tokens, flow.max_tokens), (flow.base_shift, flow.max_shift)
    return Process(flow_signal(flow.steps), "flow", Times(shift=Shift(flow.shift, flow.dynamic, tokens, mus, patch)))


def make_scheduler(folder: Path) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler for sampling, on the same flow, with the model's shift. Raises UsageError as `read_flow_schedule`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    flow = read_flow_schedule(folder)
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=flow.steps,
        shift=flow.shift,
        use_dynamic_shifting=flow.dynamic,
        base_shift=flow.base_shift,
        max_shift=flow.max_shift,
        base_image_seq_len=flow.base_tokens,
        max_image_seq_len=flow.max_tokens,
        shift_terminal=flow.terminal or None,
    )
