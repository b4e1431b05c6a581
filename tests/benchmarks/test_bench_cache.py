from __future__ import annotations

from lora_trainer.benchmarks.bench_cache import ABOUT, compare_readers


def test_every_reader_is_measured_next_to_the_minimum() -> None:
    rows = {row.name: row for row in compare_readers(rounds=2, entries=8)}
    assert list(rows) == ["mapped", "ours", "file_each", "torch_each", "npz_each"]
    assert rows.keys() | {"ratio"} == ABOUT.keys()
    assert rows["mapped"].ratio == 1.0
    assert all(0 < row.seconds_p10 <= row.seconds_median <= row.seconds_p90 for row in rows.values())
