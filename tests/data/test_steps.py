from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.data.sample import Sample
from lora_trainer.data.steps import (
    Lengths,
    StepPlan,
    largest_step,
    micro_shapes,
    plan_steps,
    share,
    split_micros,
    step_arithmetic,
)


def samples_of(repeats: list[int], contents: int | None = None) -> list[Sample]:
    return [
        Sample(Path(f"{n}.png"), "", 64, 64, f"{n % (contents or len(repeats)):064x}"[::-1], count)
        for n, count in enumerate(repeats)
    ]


repeat_counts = st.lists(st.integers(1, 5), min_size=1, max_size=12)
plans = st.builds(
    lambda repeats, effective, seed: plan_steps(samples_of(repeats, 5), effective, seed),
    repeat_counts,
    st.integers(1, 9),
    st.integers(0, 2**40),
)


@given(plans, st.integers(0, 3))
def test_an_epoch_holds_every_sample_as_often_as_it_is_repeated(plan: StepPlan, epoch: int) -> None:
    start = epoch * plan.steps_per_epoch
    steps = [plan.refs(step) for step in range(start, start + plan.steps_per_epoch)]
    assert Counter(ref.index for refs in steps for ref in refs) == {
        index: group.seen // len(group.indices) for group in plan.groups for index in group.indices
    }
    assert all(len(refs) == plan.effective for refs in steps[:-1])
    assert len(steps[-1]) >= 1


@given(plans, st.integers(0, 30))
def test_resuming_anywhere_gives_the_same_tail(plan: StepPlan, start: int) -> None:
    uninterrupted = [plan.refs(step) for step in range(start + 5)]
    fresh = StepPlan(plan.samples, plan.groups, plan.effective, plan.seed)
    assert [fresh.refs(step) for step in range(start, start + 5)] == uninterrupted[start:]


mixed_samples = st.lists(
    st.builds(
        lambda content, repeats, source, kept: Sample(
            Path("a.png"), "", 64, 64, f"{content:064x}"[::-1], repeats, source=source, regularization=kept
        ),
        st.integers(0, 6),
        st.sampled_from([0.3, 0.5, 1, 1.5, 2, 3]),
        st.integers(0, 2),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(mixed_samples, st.integers(1, 7), st.integers(0, 2**40), st.integers(0, 40), st.integers(1, 4))
def test_any_number_of_processes_resumes_anywhere_with_the_same_samples(samples, effective, seed, start, most):
    """Repeats, fractions, regularization, copies and buckets: each step has the same samples and occurrences."""
    whole = [Counter(plan_steps(samples, effective, seed).refs(step)) for step in range(start + 4)]
    for world in (1, 2, 3):
        resumed = [plan_steps(samples, effective, seed) for _ in range(world)]
        for step in range(start, start + 4):
            shares = [share(plan.refs(step), rank, world) for rank, plan in enumerate(resumed)]
            micros = [split_micros(refs, lambda ref: samples[ref.index].source, most) for refs in shares]
            assert Counter(ref for of_rank in micros for micro in of_rank for ref in micro) == whole[step]
            assert resumed[0].size(step) == whole[step].total()


@given(mixed_samples, st.integers(1, 7), st.integers(0, 2**40))
def test_occurrences_count_up_and_samples_of_a_source_differ_by_at_most_one(samples, effective, seed):
    plan = plan_steps(samples, effective, seed)
    steps = 5 * plan.steps_per_epoch
    seen: dict[int, list[int]] = {index: [] for index in range(len(samples))}
    for step in range(steps):
        for ref in plan.refs(step):
            seen[ref.index].append(ref.seen_before)
    for group in plan.groups:
        counts = [len(seen[index]) for index in group.indices]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == 5 * group.seen
    for visits in seen.values():  # within an epoch in any order
        assert sorted(visits) == list(range(len(visits)))


@given(mixed_samples, st.integers(1, 7), st.integers(0, 2**40), st.randoms())
def test_renamed_and_moved_images_change_no_step(samples, effective, seed, random):
    """Other names change the order of files; swapped sources change numbers and order."""
    moved = [replace(sample, path=Path(f"{random.random()}.png"), source=2 - sample.source) for sample in samples]
    random.shuffle(moved)
    one, other = plan_steps(samples, effective, seed), plan_steps(moved, effective, seed)
    assert one.steps_per_epoch == other.steps_per_epoch
    for step in range(2 * one.steps_per_epoch + 1):
        trained = [
            [(plan.samples[ref.index].facts, ref.seen_before) for ref in plan.refs(step)] for plan in (one, other)
        ]
        assert trained[0] == trained[1]


@given(plans, st.integers(0, 20))
def test_no_two_positions_of_a_step_share_random_numbers(plan: StepPlan, step: int) -> None:
    refs = plan.refs(step)
    assert len({(ref.id, ref.occurrence) for ref in refs}) == len(refs)


@given(plans, st.integers(0, 20), st.integers(1, 5))
def test_the_shares_of_all_processes_form_the_step(plan: StepPlan, step: int, world: int) -> None:
    refs = plan.refs(step)
    shares = [share(refs, rank, world) for rank in range(world)]
    assert sorted((ref for part in shares for ref in part), key=refs.index) == list(refs)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(plans, st.integers(0, 20), st.integers(1, 6), st.integers(1, 4))
def test_micro_batches_stay_in_one_bucket_and_lose_no_sample(
    plan: StepPlan, step: int, most: int, buckets: int
) -> None:
    refs = plan.refs(step)
    micros = split_micros(refs, lambda ref: ref.index % buckets, most)
    assert sorted((ref for micro in micros for ref in micro), key=refs.index) == list(refs)
    for micro in micros:
        assert 1 <= len(micro) <= most
        assert len({ref.index % buckets for ref in micro}) == 1
    assert micros == split_micros(refs, lambda ref: ref.index % buckets, most)


def test_each_epoch_and_seed_has_its_own_order() -> None:
    plan = plan_steps(samples_of([1] * 20), 20, 1)
    orders = [tuple(ref.index for ref in plan.refs(step)) for step in range(3)]
    other = plan_steps(samples_of([1] * 20), 20, 2)
    assert len({*orders, tuple(ref.index for ref in other.refs(0))}) == 4


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        plan_steps([], 1, 0)


@given(repeat_counts, st.integers(1, 9), st.integers(1, 4))
def test_epochs_make_steps(repeats: list[int], effective: int, epochs: int) -> None:
    samples = samples_of(repeats)
    counted = step_arithmetic(samples, effective, Lengths(max_epochs=epochs))
    assert counted.total == epochs * plan_steps(samples, effective, 0).steps_per_epoch


@pytest.mark.parametrize(
    ("lengths", "total", "epochs"),
    [
        (Lengths(), 500, 10),
        (Lengths(max_steps=120), 120, 3),
        (Lengths(max_steps=120, max_epochs=2), 100, 2),
        (Lengths(max_epochs=3, total_repeats=7), 150, 3),
        (Lengths(step_ceiling=500), 500, 10),
        (Lengths(step_ceiling=149), 100, 2),
        (Lengths(step_ceiling=3), 50, 1),
        (Lengths(max_steps=120, step_ceiling=50), 120, 3),
        (Lengths(max_epochs=3, step_ceiling=50), 150, 3),
    ],
)
def test_lengths(lengths: Lengths, total: int, epochs: int) -> None:
    counted = step_arithmetic(samples_of([10] * 20), 4, lengths)
    assert (counted.total, counted.epochs, counted.steps_per_epoch) == (total, epochs, 50)


@given(repeat_counts, st.integers(1, 30), st.integers(1, 40))
def test_what_is_counted_beforehand_is_what_the_steps_train(repeats: list[int], effective: int, steps: int) -> None:
    samples = samples_of(repeats)
    samples[-1] = replace(samples[-1], regularization=len(samples) > 1)
    plan = plan_steps(samples, effective, seed=0)
    counts = step_arithmetic(samples, effective, Lengths(max_steps=steps))
    assert counts.samples_in(steps) == sum(plan.size(step) for step in range(steps))
    whole = step_arithmetic(samples, effective, Lengths(max_epochs=2))
    trained = [ref.index for step in range(whole.total) for ref in plan.refs(step)]
    own = sum(not samples[index].regularization for index in trained)
    assert whole.exposures() == pytest.approx(own / whole.images)


@given(repeat_counts, st.integers(1, 30), st.integers(1, 3), st.integers(1, 4))
def test_no_micro_batch_is_larger_than_the_largest_of_the_data(
    repeats: list[int], effective: int, processes: int, buckets: int
) -> None:
    samples = samples_of(repeats)
    largest = largest_step(samples, [{index % buckets} for index in range(len(samples))], effective, processes)
    plan = plan_steps(samples, effective, seed=0)
    shares = [share(plan.refs(step), 0, processes) for step in range(2 * plan.steps_per_epoch)]
    micros = [micro for refs in shares for micro in split_micros(refs, lambda ref: ref.index % buckets, effective)]
    assert max(map(len, shares)) == largest.samples
    assert max(map(len, micros)) <= largest.in_bucket <= largest.samples


def test_a_batch_larger_than_the_data_is_one_micro_batch() -> None:
    counted = step_arithmetic(samples_of([1] * 6), 64, Lengths(), max_micro=None, processes=1)
    assert (counted.batch, counted.accumulation, counted.total) == (6, 1, 100)
    assert counted.exposures() == 100


def test_accumulation_is_derived() -> None:
    counted = step_arithmetic(samples_of([1] * 20), 12, Lengths(), max_micro=4, processes=2)
    assert (counted.batch, counted.accumulation, counted.processes) == (3, 2, 2)
    one = step_arithmetic(samples_of([1]), 1, Lengths(max_epochs=1)).line
    assert one == "1 image / effective batch size 1 = 1 per epoch x 1 epoch = 1"
    assert "20 images / effective batch size 12 = 2 per epoch" in counted.line


def test_the_ceiling_is_shown_with_what_it_cuts() -> None:
    line = step_arithmetic(samples_of([1] * 200), 2, Lengths(step_ceiling=4000)).line
    assert line == (
        "200 images / effective batch size 2 = 100 per epoch x 40 epochs = 4000"
        " (train.step_ceiling; 10000 by train.total_repeats)"
    )


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40), st.integers(1, 3))
def test_a_run_uses_the_counted_micro_batch_sizes(effective: int, most: int, passes: int, processes: int) -> None:
    samples = samples_of([1] * passes)
    counts = step_arithmetic(samples, effective, Lengths(), max_micro=most, processes=processes)
    plan = plan_steps(samples, effective, seed=0)
    met = {
        len(micro)
        for step in range(plan.steps_per_epoch)
        for rank in range(processes)
        for micro in split_micros(share(plan.refs(step), rank, processes), lambda ref: 0, counts.batch)
    }
    assert micro_shapes(counts, 1) == len(met)
    assert micro_shapes(counts, 3) == 3 * counts.batch >= len(met)
