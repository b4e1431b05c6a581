"""The disk space that a run needs, estimated before it starts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.schema import Config
from lora_trainer.run.file_sizes import StepSpan, checkpoint_bytes, highest_bytes, occurrences
from lora_trainer.run.room import Room

SHAPES = [(8, 320), (320, 8)] * 10


def needed(**settings: object) -> int:
    config = Config.model_validate({"checkpoint": settings})
    return highest_bytes(config, SHAPES, 0, StepSpan(0, 2000, per_epoch=100))


def test_kept_files_take_disk_space():
    lora = 2 * sum(8 * 320 for _ in SHAPES)
    assert needed(keep_last=4) > needed(keep_last=2)
    assert needed(export_every_n_steps=100) - needed() >= 20 * lora
    assert needed(export_dtype="fp32") - needed() == 2 * lora, "both files, twice as wide"


def test_kept_checkpoints_take_disk_space():
    one = checkpoint_bytes(Config(), SHAPES)
    often = {"every_n_steps": 100}
    assert needed(**often, keep_best=3) - needed(**often) >= 3 * one
    assert needed(**often, keep_every=2) - needed(**often) >= 10 * one, "of steps 200, 400 … 2000"
    assert needed(**often, keep_every=1, keep_best=9) == needed(**often, keep_every=1), "no more than there are"
    assert needed(every_n_epochs=1, keep_every=1) - needed(every_n_epochs=1) >= 15 * one
    light = checkpoint_bytes(Config.model_validate({"checkpoint": {"save_state": False}}), SHAPES)
    assert 3 * light <= one < 3.1 * light, "AdamW keeps two numbers for each weight"
    by_epochs = needed(export_every_n_epochs=1) - needed()
    assert by_epochs == needed(export_every_n_steps=100) - needed()
    assert needed(export_every_n_epochs=1, export_keep_last=3) - needed() == by_epochs * 4 // 20


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_events_of_an_interval_are_counted(every, done, more):
    total = done + more
    counted = sum(step % every == 0 or step == total for step in range(done + 1, total + 1))
    assert occurrences(every, done, total) == counted


def test_just_enough_disk_space_is_scarce(tmp_path):
    assert Room(tmp_path, 100, 110).scarce
    assert not Room(tmp_path, 100, 200).scarce
    assert not Room(tmp_path, 100, 90).scarce  # refused
    assert Room(tmp_path, 100, 90).problem is not None
