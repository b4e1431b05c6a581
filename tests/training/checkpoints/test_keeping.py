"""Which checkpoints stay (`keep_last`, `keep_every`, `keep_best`), checkpoints of weights alone, LoRA files by epochs."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.core.errors import UsageError
from lora_trainer.monitor.trackers import VALIDATION, read_lines
from lora_trainer.run.kept_steps import shown_weights_of
from lora_trainer.run.order import plain_console
from lora_trainer.run.start import find_start
from lora_trainer.training.checkpoints.best import best_files
from lora_trainer.training.checkpoints.checkpoint import (
    VERSION,
    WEIGHTS_ONLY,
    Keep,
    list_checkpoints,
    newest_valid,
    prune,
    read_checkpoint,
    resume_hint,
    sealed_text,
    step_name,
    step_of,
)
from lora_trainer.training.state import TrainState
from tests.recipes.recipe import tensor_bytes
from tests.training.tiny_run import TinyPlace, outcome, signal_at_step

LOSSES = st.lists(st.none() | st.sampled_from([0.1, 0.2, 0.3, math.nan]), min_size=1, max_size=12)


def stub(folder: Path, step: int, loss: float | None) -> None:
    """A checkpoint's folder as far as pruning reads it."""
    state = TrainState(step=step, weighted_val_loss=loss, validated_step=None if loss is None else step)
    document = {"version": VERSION, "state": state.to_json(), "files": {}}
    (folder / step_name(step)).mkdir(parents=True)
    (folder / step_name(step) / "state.json").write_bytes(sealed_text(document))


@given(LOSSES, st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_what_is_kept_depends_on_no_order_of_deleting(
    losses: list[float | None], last: int, nth: int, best: int, every: int
) -> None:
    """Pruning after each checkpoint leaves what one choice among all of them would."""
    keep = Keep(last, lambda step: step % every == 0, lambda step: nth > 0 and step % (nth * every) == 0, best)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step, loss in enumerate(losses, start=1):
            stub(folder, step, loss)
            prune(folder, keep, step)
        steps = range(1, len(losses) + 1)
        expected = {*steps[-last:], *(step for step in steps if keep.for_good(step))}
        expected |= set([step for step in steps if keep.regular(step)][-1:])
        known = [(loss, -step) for step, loss in zip(steps, losses, strict=True) if loss is not None and loss == loss]
        expected |= {-step for _, step in sorted(known)[:best]}
        assert {step_of(path) for path in list_checkpoints(folder)} == expected


def test_the_best_and_every_second_checkpoint_stay(place: TinyPlace) -> None:
    settings = {"validation__every_n_steps": 1, "checkpoint__every_n_steps": 1, "checkpoint__keep_last": 1}
    run = place.run("run", steps=8, checkpoint__keep_best=2, checkpoint__keep_every=3, **settings)
    place.train(run)
    losses = {row["step"]: row["weighted_loss"] for row in read_lines(run.folder / VALIDATION) if row["step"]}
    best = sorted(losses, key=lambda step: (losses[step], -step))[:2]
    assert {step_of(path) for path in list_checkpoints(run.checkpoints)} == {3, 6, 8, *best}
    named = {read_checkpoint(path).state.best_step for path in list_checkpoints(run.checkpoints)}
    assert set(best_files(run.checkpoints)) == named


def test_checkpoints_of_weights_alone_cannot_be_resumed(place: TinyPlace) -> None:
    settings = {"checkpoint__every_n_steps": 2, "train__ema_decay": 0.9}
    whole = place.run("whole", steps=4, **settings)
    place.train(whole)
    light = place.run("light", steps=4, checkpoint__save_state=False, **settings)
    place.train(light)
    newest = light.checkpoints / step_name(4)
    assert {path.name for path in newest.iterdir()} == {"adapter.safetensors", "state.json"}
    average = tensor_bytes(whole.checkpoints / step_name(4) / "average.safetensors")
    assert tensor_bytes(newest / "adapter.safetensors") == average, "what would be exported"
    shown = shown_weights_of(newest, light.config)
    assert shown is not None
    assert {name: value.numpy().tobytes() for name, value in shown.items()} == average
    assert newest_valid(light.checkpoints) == (None, dict.fromkeys(list_checkpoints(light.checkpoints), WEIGHTS_ONLY))
    found, _ = newest_valid(light.checkpoints, weights_suffice=True)
    assert found is not None
    assert found[1].state.step == 4
    assert "to use but not to resume" in resume_hint(light.checkpoints)
    shutil.rmtree(light.folder / "weights")
    with pytest.raises(UsageError, match=r"step-000004 is its newest checkpoint.*save_state=false") as refused:
        find_start(light.folder, light.settings, plain_console(quiet=True), light.config)
    assert "Start a new --name" in str(refused.value)


def test_a_stopped_run_without_state_leaves_its_lora(place: TinyPlace) -> None:
    run = place.run("light", steps=6, checkpoint__save_state=False)
    place.train(signal_at_step(run, 3))
    lora = run.folder / "weights" / "light-step-000004.safetensors"
    assert lora.is_file()
    with pytest.raises(UsageError) as refused:
        find_start(run.folder, run.settings, plain_console(quiet=True), run.config)
    assert f"--set lora.network_weights={lora}" in str(refused.value)
    onward = place.run("onward", steps=1, lora__network_weights=str(lora))
    place.train(onward)


def test_an_older_checkpoint_with_state_is_resumed(place: TinyPlace, capsys: pytest.CaptureFixture[str]) -> None:
    straight = place.run("straight", steps=6, checkpoint__every_n_steps=2, checkpoint__keep_last=9)
    place.train(straight)
    place.train(place.run("mixed", steps=2, checkpoint__every_n_steps=2))
    run = place.run("mixed", steps=4, checkpoint__every_n_steps=2, checkpoint__save_state=False)
    place.resume(run)
    run = place.run("mixed", steps=6, checkpoint__every_n_steps=2)
    start = find_start(run.folder, run.settings, plain_console(), run.config)
    assert start is not None
    assert start.state.step == 2
    assert "step-000004 is skipped" in capsys.readouterr().out
    place.train(run, start)
    assert outcome(run)["tensors"] == outcome(straight)["tensors"]


def test_lora_files_by_epochs_and_how_many_stay(place: TinyPlace) -> None:
    run = place.run("run", steps=12, checkpoint__export_every_n_epochs=1, checkpoint__export_keep_last=2)
    place.train(run)
    each = run.feed.plan.steps_per_epoch
    written = [step for step in range(1, 13) if step % each == 0]
    assert len(written) > 1
    kept = sorted(path.name for path in (run.folder / "weights").iterdir())
    assert kept == [f"run-step-{step:06d}.safetensors" for step in written[-2:]]
