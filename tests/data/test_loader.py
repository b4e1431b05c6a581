from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.config.schema import CaptionsSection
from lora_trainer.data.caches.entries import Store, write_entries
from lora_trainer.data.captions import drops_caption, settled
from lora_trainer.data.loader import CachedData, prefetch, read_micro
from lora_trainer.data.sample import Sample
from lora_trainer.data.steps import Ref, plan_steps, share, split_micros
from lora_trainer.data.views import Framing, plan_views

COUNT = 6


@pytest.fixture
def data(tmp_path: Path) -> CachedData:
    """Six samples, every second one wide; each tensor holds the sample's number, the empty text -1."""
    samples = [
        Sample(Path(f"{n}.png"), f"caption {n}", 200 if n % 2 else 100, 100, f"{n:064d}"[::-1]) for n in range(COUNT)
    ]
    plan = plan_views(samples, [Framing((64,), 16)])
    for number, fit in enumerate(plan.fits):
        shape = (4, fit.bucket.height // 8, fit.bucket.width // 8)
        entry = {"mean": torch.full((1, *shape), float(number)), "spread": torch.full((1, *shape), 0.5)}
        write_entries(tmp_path, "latents", [f"{number:064x}"], entry)
    for number in (-1, *range(COUNT)):
        entry = {"embeds": torch.full((1, 5, 3), float(number)), "pooled": torch.full((1, 2), float(number))}
        write_entries(tmp_path, "texts", [f"{number + 1:064x}"], entry)
    return CachedData(
        samples,
        plan.views,
        [(f"{number:064x}",) for number in range(COUNT)],
        [(f"{number + 1:064x}",) for number in range(COUNT)],
        f"{0:064x}",
        Store(tmp_path, "latents"),
        Store(tmp_path, "texts"),
    )


def with_options(data: CachedData, **options: object) -> CachedData:
    """The same data with caption settings."""
    return replace(data, captions=(CaptionsSection.model_validate(options),))


def ref(data: CachedData, index: int, occurrence: int = 0) -> Ref:
    return Ref(index, data.samples[index].id, occurrence)


def test_a_batch_holds_its_samples(data: CachedData) -> None:
    refs = (ref(data, 1), ref(data, 5), ref(data, 1, 1))
    batch = read_micro(data, refs, step=3, epoch=0, seed=1)
    bucket = data.views[1][0].fit.bucket
    assert batch.mean.shape == batch.spread.shape == (3, 4, bucket.height // 8, bucket.width // 8)
    assert batch.mean[:, 0, 0, 0].tolist() == [1.0, 5.0, 1.0]
    assert batch.cond["embeds"][:, 0, 0].tolist() == [1.0, 5.0, 1.0]
    assert batch.cond["embeds"].shape == (3, 5, 3)
    assert batch.cond["pooled"].shape == (3, 2)
    assert batch.places == ((data.samples[1].id, 0), (data.samples[5].id, 0), (data.samples[1].id, 1))
    fit = data.views[1][0].fit
    assert batch.sizes.dtype == torch.float32
    assert batch.sizes[0].tolist() == [100, 200, fit.top, fit.left, fit.bucket.height, fit.bucket.width]


def test_every_step_can_be_read(data: CachedData) -> None:
    plan = plan_steps(data.samples, 4, 0)
    for step in range(4):
        refs = plan.refs(step)
        micros = split_micros(refs, lambda ref: data.bucket(ref, 0), 2)
        read = [number for micro in micros for number in read_micro(data, micro, step, 0, 0).mean[:, 0, 0, 0].tolist()]
        assert sorted(read) == sorted(float(each.index) for each in refs)


def test_caption_dropout_uses_the_empty_text(data: CachedData) -> None:
    refs = (ref(data, 0), ref(data, 2))
    assert read_micro(with_options(data, dropout=1.0), refs, 0, 0, 0).cond["embeds"].unique().tolist() == [-1.0]
    assert read_micro(with_options(data, dropout=0.0), refs, 0, 0, 0).cond["embeds"][:, 0, 0].tolist() == [0.0, 2.0]


@given(st.integers(0, 2**32), st.floats(0.05, 0.95))
def test_dropout_depends_only_on_the_position_and_keeps_its_share(seed: int, share: float) -> None:
    rules, places = CaptionsSection(dropout=share), [("id", occurrence) for occurrence in range(2000)]
    dropped = [drops_caption(rules, seed, 7, 0, place) for place in places]
    assert dropped == [drops_caption(rules, seed, 7, 0, place) for place in places]
    assert abs(sum(dropped) / len(dropped) - share) < 0.07


def test_a_sample_takes_its_texts_in_turn_and_none_in_an_epoch_without(data: CachedData) -> None:
    sample = replace(data.samples[0], variants=("a", "b", "c"))
    keys = [tuple(f"{number + 1:064x}" for number in (0, 2, 4)), *data.text_keys[1:]]
    several = with_options(replace(data, samples=[sample, *data.samples[1:]], text_keys=keys), dropout_every_n_epochs=4)

    def embedded(visit: int, epoch: int) -> float:
        place = Ref(0, sample.id, 0, visit)
        return float(read_micro(several, [place], 11, epoch, 3).cond["embeds"][0, 0, 0])

    taken = [embedded(visit, 0) for visit in range(6)]
    assert set(taken[:3]) == {0.0, 2.0, 4.0}
    assert [embedded(1, epoch) for epoch in range(4)] == [taken[1]] * 3 + [-1.0]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**30), st.integers(1, 5), st.integers(1, 3), st.integers(0, 30))
def test_texts_do_not_depend_on_the_reader_or_the_resumed_step(
    seed: int, effective: int, world: int, start: int
) -> None:
    rules = (CaptionsSection(shuffle=True, tag_dropout=0.25, dropout=0.2, dropout_every_n_epochs=3),)
    written = [Sample(Path(f"{n}.png"), f"a, b, c {n}", 9, 9, f"{n:064d}"[::-1], repeats=1 + n % 2) for n in range(5)]
    samples = settled(written, rules)
    keys = [tuple(f"{n}:{text}" for text in sample.texts) for n, sample in enumerate(samples)]
    data = CachedData(samples, [((),)] * 5, [], keys, "", None, None, captions=rules)  # type: ignore[arg-type]

    def texts(step: int, processes: int) -> list[str]:
        plan = plan_steps(samples, effective, seed)
        shared = [share(plan.refs(step), rank, processes) for rank in range(processes)]
        refs = sorted((ref for each in shared for ref in each), key=lambda ref: (ref.id, ref.occurrence))
        return [data.text_key(ref, step, step // plan.steps_per_epoch, seed) for ref in refs]

    alone = [texts(step, 1) for step in range(start + 6)]
    assert alone[start:] == [texts(step, world) for step in range(start, start + 6)]


def test_splitting_does_not_change_what_is_read(data: CachedData) -> None:
    refs = (ref(data, 0), ref(data, 2), ref(data, 4))
    data = with_options(data, dropout=0.5)
    whole = read_micro(data, refs, 5, 0, 9)
    parts = [read_micro(data, (each,), 5, 0, 9) for each in refs]
    assert torch.equal(whole.mean, torch.cat([part.mean for part in parts]))
    assert torch.equal(whole.cond["embeds"], torch.cat([part.cond["embeds"] for part in parts]))


def test_prefetch_yields_the_same_items() -> None:
    assert list(prefetch(iter(range(50)), depth=3)) == list(range(50))
    assert list(prefetch(iter([None, None]))) == [None, None]


def test_prefetch_passes_an_error_on_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    read = prefetch(source())
    assert next(read) == 1
    with pytest.raises(ValueError, match="broken"):
        next(read)


def test_prefetch_closes_its_source_in_the_thread_that_read_it() -> None:
    threads: list[threading.Thread] = []

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            threads.append(threading.current_thread())

    with closing(prefetch(source())) as read:
        assert next(read) == 0
    assert [thread.name for thread in threads] == ["prefetch"]
    assert not threads[0].is_alive()


def test_regularization_has_its_own_loss_weight(data: CachedData) -> None:
    samples = [replace(sample, weight=2.0, regularization=n % 2 == 0) for n, sample in enumerate(data.samples)]
    refs = (ref(data, 0), ref(data, 2))
    assert read_micro(replace(data, samples=samples, prior_weight=0.25), refs, 0, 0, 0).weights.tolist() == [0.5, 0.5]
    assert read_micro(replace(data, samples=samples), (ref(data, 1),), 0, 0, 0).weights.tolist() == [2.0]


def test_prefetch_reads_no_further_than_its_depth_and_stops() -> None:
    produced: list[int] = []
    enough = threading.Event()

    def source() -> Iterator[int]:
        for number in range(1000):
            produced.append(number)
            if number == 3:
                enough.set()
            yield number

    before = threading.active_count()
    with closing(prefetch(source(), depth=2)) as read:
        assert next(read) == 0
        assert enough.wait(300)
        assert len(produced) <= 5
    assert threading.active_count() == before
    assert len(produced) <= 5
