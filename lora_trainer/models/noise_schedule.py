"""The noise schedule that a model was trained with, read from its scheduler's config, for training and for sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.family import PREDICTIONS, SamplingDefaults
from lora_trainer.models.folder import read_config

if TYPE_CHECKING:
    from diffusers import DDIMScheduler

    from lora_trainer.diffusion.process import Prediction, Process

SHAPES = ("scaled_linear", "linear")
MOST_STEPS = 100_000
FEW_STEP_SCHEDULERS = ("LCMScheduler", "TCDScheduler")  # of arXiv:2310.04378 and arXiv:2402.19159
OTHER_PROCESSES = ("EDM", "FlowMatch")  # beginnings of the names of schedulers with another process


@dataclass(frozen=True)
class NoiseSchedule:
    """Variance-preserving noise. `zero_terminal`: the last timestep holds no signal (arXiv:2305.08891)."""

    shape: str
    steps: int
    beta_start: float
    beta_end: float
    prediction: Prediction
    zero_terminal: bool


def read_noise_schedule(folder: Path) -> NoiseSchedule:
    """The schedule of a model folder. Raises UsageError, with all reasons, for one that cannot be followed."""
    config = read_config(folder, "scheduler/scheduler_config.json")
    problems = _problems(config, folder / "scheduler" / "scheduler_config.json")
    if problems:
        raise UsageError(problems)
    return NoiseSchedule(
        shape=config.get("beta_schedule", "scaled_linear"),
        steps=int(config.get("num_train_timesteps", 1000)),
        beta_start=float(config.get("beta_start", 0.00085)),
        beta_end=float(config.get("beta_end", 0.012)),
        prediction=config.get("prediction_type", "epsilon"),
        zero_terminal=bool(config.get("rescale_betas_zero_snr")),
    )


def is_few_step(folder: Path) -> bool:
    """Whether a folder's scheduler is set for few steps, as of SD Turbo, SDXL Turbo, LCM and TCD.

    Nothing else in their configs differs. Models of zero terminal SNR are sampled with `trailing` in many steps.
    """
    config = read_config(folder, "scheduler/scheduler_config.json")
    is_trailing = config.get("timestep_spacing") == "trailing" and not config.get("rescale_betas_zero_snr")
    predicts_noise = config.get("prediction_type", "epsilon") == "epsilon"
    return config.get("_class_name") in FEW_STEP_SCHEDULERS or (is_trailing and predicts_noise)


def sampling_defaults(folder: Path, steps: int = 25) -> SamplingDefaults:
    """Four steps without guidance for models distilled for few steps, else the family's usual ones."""
    return SamplingDefaults(steps=4, guided=False, negative=False) if is_few_step(folder) else SamplingDefaults(steps)


def _problems(config: Mapping[str, Any], where: Path) -> list[Problem]:
    problems: list[Problem] = []
    kind = str(config.get("_class_name", ""))
    shape, prediction = config.get("beta_schedule", "scaled_linear"), config.get("prediction_type", "epsilon")
    if kind.startswith(OTHER_PROCESSES):
        problems.append(
            Problem("scheduler_unsupported", f"{where}: {kind} is not supported.", "Use a model with a DDPM schedule.")
        )
    if shape not in SHAPES:
        problems.append(
            Problem("scheduler_unsupported", f"{where}: noise schedule {shape!r}.", f"Supported: {', '.join(SHAPES)}.")
        )
    if prediction not in PREDICTIONS:
        problems.append(
            Problem(
                "prediction_unsupported",
                f"{where}: the model predicts {prediction!r}.",
                f"Supported: {', '.join(PREDICTIONS)}.",
            )
        )
    if config.get("rescale_betas_zero_snr") and prediction == "epsilon":
        problems.append(
            Problem(
                "prediction_impossible",
                f"{where}: rescale_betas_zero_snr is true and the model predicts epsilon; at the last timestep its "
                "input is the noise itself, so there is nothing to learn.",
                "Such models predict velocity: set prediction_type to v_prediction, or rescale_betas_zero_snr to false.",
            )
        )
    problems += _number_problems(config, where)
    if config.get("trained_betas") is not None:
        problems.append(
            Problem(
                "scheduler_unsupported",
                f"{where}: trained_betas sets a noise schedule of its own, which is not supported yet.",
                "Use a model whose schedule is set by beta_start, beta_end and beta_schedule.",
            )
        )
    return problems


def _number_problems(config: Mapping[str, Any], where: Path) -> list[Problem]:
    """Steps and betas that make no schedule, or one that no memory holds."""
    copy = "Copy or download the model again."
    steps = config.get("num_train_timesteps", 1000)
    start, end = config.get("beta_start", 0.00085), config.get("beta_end", 0.012)
    problems = []
    if type(steps) is not int or not 2 <= steps <= MOST_STEPS:
        problems.append(
            Problem("scheduler_invalid", f"{where}: num_train_timesteps is {steps!r}, must be 2 to {MOST_STEPS}.", copy)
        )
    if not all(isinstance(each, int | float) for each in (start, end)) or not 0 < start <= end < 1:
        problems.append(
            Problem(
                "scheduler_invalid", f"{where}: betas from {start!r} to {end!r}, must be 0 < start <= end < 1.", copy
            )
        )
    return problems


def make_process(folder: Path) -> Process:
    """The process for training and measuring. Raises UsageError as `read_noise_schedule`."""
    from lora_trainer.diffusion.process import Process, linear_alphas, scaled_linear_alphas, zero_terminal_alphas

    schedule = read_noise_schedule(folder)
    shapes = {"scaled_linear": scaled_linear_alphas, "linear": linear_alphas}
    alphas = shapes[schedule.shape](schedule.steps, schedule.beta_start, schedule.beta_end)
    return Process(zero_terminal_alphas(alphas) if schedule.zero_terminal else alphas, schedule.prediction)


def make_scheduler(folder: Path) -> DDIMScheduler:
    """The scheduler for sampling, on the same schedule. Raises UsageError as `read_noise_schedule`."""
    from diffusers import DDIMScheduler

    schedule = read_noise_schedule(folder)
    # Not from the source's config: Euler, PNDM and others lack keys whose DDIM defaults wash images out.
    return DDIMScheduler(
        num_train_timesteps=schedule.steps,
        beta_start=schedule.beta_start,
        beta_end=schedule.beta_end,
        beta_schedule=schedule.shape,
        prediction_type=schedule.prediction,
        rescale_betas_zero_snr=schedule.zero_terminal,
        # Without signal at the end, sampling must begin at the very last timestep (arXiv:2305.08891, 3.3); few steps
        # begin there as well.
        timestep_spacing="trailing" if schedule.zero_terminal or is_few_step(folder) else "leading",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
