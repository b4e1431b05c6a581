"""`system.jsonl` of the real loop: rows at steps, none of steps that are trained again, none when it is off."""

from __future__ import annotations

from lora_trainer.monitor.trackers import SYSTEM, read_lines
from tests.training.tiny_run import TinyPlace, outcome


def test_the_machine_is_sampled_beside_the_steps_and_changes_nothing(place: TinyPlace) -> None:
    run = place.run("sampled", steps=6, run__system_every_seconds=0.005, checkpoint__every_n_steps=3)
    place.train(run)
    rows = read_lines(run.folder / SYSTEM)
    assert rows, "an interval is shorter than a step"
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    for row in rows:
        assert row["seconds"] > 0
        assert all(0.0 <= row[name] <= 1.0 for name in ("cpu", "system_memory", "in_steps", "data_wait"))
        assert row["process_memory_gib"] > 0
    off = place.run("off", steps=6, run__system_every_seconds=0, checkpoint__every_n_steps=3)
    place.train(off)
    assert not (off.folder / SYSTEM).exists()
    assert outcome(off) == outcome(run)


def test_rows_of_steps_after_the_resumed_one_are_deleted(place: TinyPlace) -> None:
    run = place.run("again", steps=2, run__system_every_seconds=0, checkpoint__every_n_steps=2)
    place.train(run)
    lines = "".join(f'{{"step": {step}, "seconds": 9.0}}\n' for step in (1, 2, 3, 4))
    (run.folder / SYSTEM).write_text(lines)
    place.resume(place.run("again", steps=4, run__system_every_seconds=0, checkpoint__every_n_steps=2))
    assert [row["step"] for row in read_lines(run.folder / SYSTEM)] == [1, 2]
