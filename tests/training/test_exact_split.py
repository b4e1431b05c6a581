"""A step trains the same however it is split: over micro-batches, processes or sessions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.step import backward
from lora_trainer.training.training_run import Run
from tests.training.tiny_run import TinyPlace, outcome, together

pytestmark = pytest.mark.exact

STEPS = 6


def noise_inputs(micros: list[MicroBatch]) -> Counter[tuple[bytes, ...]]:
    """Each sample with its latents, noise and timestep."""
    parts = [(micro.latents, micro.noise, micro.t) for micro in micros]
    return Counter(
        tuple(each[place].numpy().tobytes() for each in part) for part in parts for place in range(len(part[0]))
    )


def gradient(run: Run, micros: list[MicroBatch]) -> torch.Tensor:
    """The gradients of the first step, in one row."""
    for micro in micros:
        backward(run.context, micro, 4)
    return torch.cat([master.grad.flatten() for master in run.context.masters])


@pytest.mark.parametrize(("rates", "scale"), [((), 3.0), ((1e-4,), None)])
def test_a_step_of_the_builtin_model_is_the_same_for_every_micro_batch_size(rates, scale, place: TinyPlace):
    """In fp32 within 1e-5, with guidance in the target or its text encoder trained too; that of tiny random models in float64 within 1e-9 (test_step.py)."""
    here = replace(place, model=BASE_FOLDER)
    common: dict[str, object] = {"train__effective_batch_size": 4, "data__resolution": 64, "data__max_aspect": 1.0}
    common |= {"text_encoder__learning_rates": rates, "loss__guidance_target": scale}
    runs = [here.run(f"by_{most}", steps=1, train__max_micro_batch_size=most, **common) for most in (4, 2, 1)]
    fed = [run.feed.micros(0) for run in runs]
    assert [[len(micro.latents) for micro in micros] for micros in fed] == [[4], [2, 2], [1, 1, 1, 1]]
    assert noise_inputs(fed[0]) == noise_inputs(fed[1]) == noise_inputs(fed[2])
    whole, *split = [gradient(run, micros) for run, micros in zip(runs, fed, strict=True)]
    assert float(whole.norm()) > 0.0
    assert all(float((part - whole).norm() / whole.norm()) < 1e-5 for part in split)


def jobs_of(place: TinyPlace, name: str, world: int, **settings: object) -> list[Run]:
    args = {"train__effective_batch_size": 3, "checkpoint__every_n_steps": 1, "checkpoint__keep_last": 9, **settings}
    return [place.run(name, steps=STEPS, processes=each, **args) for each in together(world)]


def later_ones_gone(runs: list[Run], step: int) -> None:
    """As if the run had been killed after the checkpoint of `step`."""
    for path in runs[0].checkpoints.glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            path.rename(path.with_name(f"gone-{path.name}-{step}"))


# Not bitsandbytes' 8-bit states: the library is not thread-safe, and threads simulate processes here.
PARTS: dict[str, dict[str, object]] = {
    "adamw": {"validation__every_n_steps": 2, "captions__shuffle": True, "captions__dropout": 0.3},
    "lion": {"optimizer__name": "lion", "train__ema_decay": 0.9, "memory__weight_dtype": "bf16"},
    "random": {
        "optimizer__stochastic_rounding": True,
        "memory__weight_dtype": "bf16",
        "optimizer__gradient_noise": 0.01,
        "train__swa_start": 3,
        "train__swa_every_n_steps": 1,
    },
    "prodigy": {"optimizer__name": "prodigy", "optimizer__learning_rate": 1.0, "memory__weight_dtype": "fp16"},
    "schedule_free": {"optimizer__name": "adamw_schedulefree", "validation__every_n_steps": 2},
    "adafactor": {"optimizer__name": "adafactor", "lr_scheduler__name": "cosine"},
    "words": {
        "textual_inversion__placeholder_tokens": ("<zobo>",),
        "captions__trigger_word": "<zobo>",
        "validation__every_n_steps": 2,
    },
    "compressed": {"train__gradient_compression": "bf16", "validation__every_n_steps": 2},
    "texts": {"text_encoder__learning_rates": (1e-3,), "captions__dropout": 0.3, "validation__every_n_steps": 2},
}
EVERY_PART = [pytest.param(name, marks=() if name == "lion" else pytest.mark.slow) for name in PARTS]


@pytest.mark.parametrize("kind", EVERY_PART)
def test_two_processes_resume_exactly_from_any_step(kind, place):
    straight = jobs_of(place, "straight", 2, **PARTS[kind])
    place.resume_together(straight)
    expected = outcome(straight[0])
    for step in (1, 4):
        runs = jobs_of(place, "straight", 2, **PARTS[kind])
        later_ones_gone(runs, step)
        place.resume_together(runs)
        assert outcome(runs[0]) == expected, f"from step {step}"


def numbers(run: Run) -> tuple[list[float], torch.Tensor]:
    """The losses of all steps, and the weights at the end."""
    weights = torch.cat([master.detach().flatten() for master in run.context.masters])
    return [row["loss"] for row in outcome(run)["metrics.jsonl"]], weights


# With Lion the sign of a gradient decides, so rounding sometimes matters.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "schedule_free", "texts"])
def test_a_run_resumes_with_more_or_fewer_processes(kind, place):
    """The same samples in the same steps, summed in another order: equal up to rounding (built-in model)."""
    here = replace(place, model=BASE_FOLDER)
    settings = {**PARTS[kind], "data__resolution": 64, "optimizer__learning_rate": 1e-3, "validation__every_n_steps": 0}
    alone = jobs_of(here, "alone", 1, **settings)
    here.resume_together(alone)
    expected, final = numbers(alone[0])
    for first, then in ((1, 2), (2, 1)):
        name = f"{first} then {then}"
        before = jobs_of(here, name, first, **settings)
        here.resume_together(before)
        later_ones_gone(before, 3)
        after = jobs_of(here, name, then, **settings)
        here.resume_together(after)
        losses, weights = numbers(after[0])
        assert losses == pytest.approx(expected, rel=1e-4), name
        assert float((weights - final).norm() / final.norm()) < 1e-3, name
