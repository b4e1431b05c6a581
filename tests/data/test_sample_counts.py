from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.core.randomness import position_turn, position_uniform
from lora_trainer.data.sample import Sample
from lora_trainer.data.sample_counts import SampleCounts, count_trained, never_trained, write_sample_counts
from lora_trainer.data.steps import Ref, StepPlan, plan_steps

SAMPLES = [
    Sample(Path("data") / f"{n}.png", f"caption {n}", 64, 64, f"{n:064x}"[::-1], (1, 2, 0.5)[n % 3], source=n % 3)
    for n in range(9)
]
KEPT = [replace(SAMPLES[n], path=Path(f"kept_{n}.png"), regularization=True, source=3) for n in range(4)]


def counts_of(plan: StepPlan, steps: int, share: float = 0.3) -> SampleCounts:
    def text_of(ref: Ref, step: int) -> str | None:
        if position_uniform(plan.seed, "drop", step, ref.id, ref.occurrence) < share:
            return None
        return plan.samples[ref.index].caption

    return count_trained(plan, steps, lambda ref: position_turn(2, ref.seen_before, plan.seed, "view", ref.id), text_of)


@given(st.integers(1, 7), st.integers(0, 2**40), st.integers(0, 60), st.integers(0, 30), st.booleans())
def test_a_stopped_and_resumed_run_counts_as_one(effective, seed, steps, more, regularised):
    plan = plan_steps([*SAMPLES, *(KEPT if regularised else [])], effective, seed)
    counts = counts_of(plan, steps)
    trained = Counter(ref.index for step in range(steps) for ref in plan.refs(step))
    assert list(counts.times) == [trained[index] for index in range(len(plan.samples))]
    assert sum(counts.buckets.values()) == sum(counts.captions.values()) == trained.total()
    assert counts.captions.get("", 0) == counts.dropped
    later = counts_of(plan, steps + more)
    assert all(now >= before for now, before in zip(later.times, counts.times, strict=True))
    assert sum(later.times) - sum(counts.times) == sum(plan.size(step) for step in range(steps, steps + more))


def test_the_line_and_the_file_count_what_was_trained(tmp_path: Path):
    plan = plan_steps([*SAMPLES[0:4:3], *KEPT, replace(SAMPLES[6], caption='a "b",\nc')], 2, 0)
    steps = 3 * plan.steps_per_epoch
    counts = counts_of(plan, steps, 0.0)
    # Three images per epoch, and as many positions for the four regularization images.
    assert counts.line == "every image 3 times, every regularization image 2–3 times"
    dropped = counts_of(plan, steps, 1.0)
    assert dropped.line.endswith("; captions dropped 100.0 %")
    assert dropped.to_json()["captions"] == {"texts": 1, "dropped": 18, "dropped_share": 1.0}
    assert counts_of(plan, 1).to_json()["images"] == {"count": 7, "least": 0, "most": 1, "never": 5}
    assert counts_of(plan, 1).line.startswith("every ")
    assert ", but 5 of 7 never" in counts_of(plan, 1).line
    with open(tmp_path / write_sample_counts(tmp_path, counts), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"]: int(row["times"]) for row in rows if row["kind"] == "caption"} == counts.captions
    assert [int(row["times"]) for row in rows if row["kind"] in ("image", "regularization")] == list(counts.times)
    assert {row["name"]: int(row["times"]) for row in rows if row["kind"] == "bucket"} == counts.buckets


@given(st.integers(1, 7), st.integers(0, 2**40), st.integers(0, 60), st.booleans())
def test_weights_that_have_not_seen_every_image_name_the_minimum_steps(effective, seed, steps, regularised):
    """Every image of every source counts, however many repeats it has; regularization images do not."""
    plan = plan_steps([*SAMPLES, *(KEPT if regularised else [])], effective, seed)
    found = never_trained(plan, steps, steps)
    times = counts_of(plan, steps).times[: len(SAMPLES)]
    assert (found is None) == (0 not in times)
    if found is None:
        return
    assert found.message.startswith(f"9 images, {sum(times)} sample")
    assert f"{times.count(0)} image" in found.message
    least = int(found.fix.split()[0])
    assert least > steps
    assert never_trained(plan, least - 1, least) is not None
    assert never_trained(plan, least, least) is None


def test_weights_of_an_early_step_name_the_later_training():
    plan = plan_steps(SAMPLES, 2, 0)
    found = never_trained(plan, 1, 100)
    assert found is not None
    assert found.message.startswith("9 images, 2 samples trained in 1 step: 7 images were never trained (first: ")
    assert found.fix.startswith("Validation loss was lowest at step 1 of 100")
