"""After nonfinite steps: what is ruined, how far a run rolls back, and what lets it retry."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.config.schema import Config, OptimizerSection, SafeguardsSection
from lora_trainer.core.errors import TrainingFailed
from lora_trainer.monitor.progress_line import step_numbers
from lora_trainer.run_folder.progress import Progress
from lora_trainer.training.checkpoints import save
from lora_trainer.training.checkpoints.checkpoint import Checkpoint
from lora_trainer.training.guard import remedy, with_settings
from lora_trainer.training.state import TrainState
from lora_trainer.training.training_run import Run
from tests.training.test_guard import SETTINGS, bad_sample, events
from tests.training.tiny_run import TinyPlace


def failing(place: TinyPlace, name: str, **settings: object) -> Run:
    """A run whose steps 4, 5 and 6 are not finite."""
    return bad_sample(place.run(name, **{"safeguards__max_nonfinite_steps": 3, **SETTINGS, **settings}), 3, 4, 5)


@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["fast disk", "slow disk"])
def test_rollback_takes_an_older_checkpoint_when_the_same_step_fails_again(
    seconds: float, place: TinyPlace, monkeypatch: pytest.MonkeyPatch
):
    """The checkpoint written in between is new, and tried first."""
    began: list[int] = []
    save_checkpoint = save.save_checkpoint

    def save_slowly(root: Path, checkpoint: Checkpoint) -> None:
        time.sleep(seconds)
        save_checkpoint(root, checkpoint)

    monkeypatch.setattr(save, "save_checkpoint", save_slowly)
    run = place.run(
        "a", safeguards__on_nonfinite="rollback", checkpoint__every_n_steps=1, checkpoint__keep_last=9, steps=7
    )
    micros_of_step = run.feed.micros

    def micros(step: int) -> list[Any]:
        began.append(step)
        ruined = step == 5 and began.count(5) <= 3
        return (
            bad_sample(replace(run, feed=replace(run.feed, micros=micros_of_step)), step).feed.micros(step)
            if ruined
            else micros_of_step(step)
        )

    state, _ = place.train(replace(run, feed=replace(run.feed, micros=micros)))
    endings = [each["message"].rsplit("; ", 1)[1] for each in events(run)]
    assert endings == [f"training continues from step {step}" for step in (5, 4, 5)]
    assert (state.step, state.restored) == (7, 3)


def test_other_settings_reset_the_failure_count(place: TinyPlace):
    """The count of steps in a row continues with the same settings and restarts with a lower learning rate."""
    with pytest.raises(TrainingFailed):
        place.train(failing(place, "a", steps=9))
    with pytest.raises(TrainingFailed, match="in 4 steps in a row, up to step 7"):
        place.resume(bad_sample(place.run("a", steps=9, safeguards__max_nonfinite_steps=3, **SETTINGS), 6))
    lower = place.run("a", steps=9, safeguards__max_nonfinite_steps=3, optimizer__learning_rate=1e-4, **SETTINGS)
    state, _ = place.resume(bad_sample(lower, 7))
    assert (state.step, state.skipped) == (9, 5)


def test_rollbacks_are_forgotten_when_settings_change():
    """A halved learning rate stays unless another is set."""
    config = Config()
    before = replace(with_settings(TrainState(), config), restored=3, rate_scale=0.5, failed_at=6, returned_to=5)
    assert with_settings(before, config) == before
    patient = Config(safeguards=SafeguardsSection(max_nonfinite_steps=20))
    after = with_settings(before, patient)
    assert (after.restored, after.failed_at, after.rate_factor) == (0, 0, before.rate_factor)
    slower = with_settings(before, Config(optimizer=OptimizerSection(learning_rate=1e-5)))
    assert (slower.restored, slower.rate_factor) == (0, 0.5)
    unknown = replace(before, settings_digest="", configured_lr=None)  # of a checkpoint from an earlier version
    assert with_settings(unknown, config) == before


def test_the_checkpoint_from_before_the_failures_is_named(place: TinyPlace):
    run = failing(place, "a", checkpoint__keep_last=9)
    with pytest.raises(TrainingFailed, match=r"step-000002 is from before that: delete the later ones there"):
        place.train(run)


@pytest.mark.parametrize(("precision", "expected"), [("bf16", "weight_dtype=fp32"), ("fp32", None)])
def test_the_advice_names_only_settings_not_yet_in_use(place: TinyPlace, precision, expected):
    run = place.run(precision, memory__weight_dtype=precision, **SETTINGS)
    assert (remedy(run) == "Lower optimizer.learning_rate.") == (expected is None)
    assert expected is None or expected in remedy(run)


def test_a_damaged_base_model_is_reported(place: TinyPlace):
    """A lower learning rate does not fix it."""
    run = place.run("a", steps=9, safeguards__max_nonfinite_steps=3, **SETTINGS)
    name, weight = next(each for each in run.context.denoiser.named_parameters() if not each[1].requires_grad)
    with torch.no_grad():
        weight.view(-1)[0] = math.nan
    with pytest.raises(TrainingFailed) as ended:
        place.train(run)
    assert f"The base model is damaged: its {name} is not finite." in str(ended.value)
    assert "learning_rate" not in str(ended.value)


def test_the_message_names_the_skipped_newest_steps():
    assert step_numbers(Progress("training", 9, 20, loss=0.2, skipped=3), 20)["skipped"] == "skipped=3"
    assert "skipped" not in step_numbers(Progress("training", 9, 20, loss=0.2), 20)
