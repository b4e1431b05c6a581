from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.data.sample import Sample
from lora_trainer.data.split import split_validation

contents = st.lists(st.text("0123456789abcdef", min_size=8, max_size=8), max_size=200)


def samples_of(names: list[str]) -> list[Sample]:
    return [Sample(Path(f"{n}.png"), f"caption {n}", 8, 8, content) for n, content in enumerate(names)]


@given(contents, st.floats(0.0, 0.5))
def test_every_sample_is_on_one_side(names: list[str], share: float) -> None:
    samples = samples_of(names)
    train, validation = split_validation(samples, share)
    assert sorted([*train, *validation], key=str) == sorted(samples, key=str)
    assert not {s.content for s in train} & {s.content for s in validation}
    images = len({s.content for s in validation})
    assert images == 0 if len(set(names)) < 2 or share == 0 else 1 <= images <= 16


@given(contents.filter(lambda names: len(set(names)) >= 8), st.randoms())
def test_order_and_names_do_not_matter(names: list[str], random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = {s.content for s in split_validation(samples_of(names), 0.1)[1]}
    assert first == {s.content for s in split_validation(samples_of(shuffled), 0.1)[1]}


@given(st.integers(8, 300))
def test_one_more_image_moves_at_most_one_other(count: int) -> None:
    names = [f"{n:064x}" for n in range(count)]
    before = {s.content for s in split_validation(samples_of(names), 0.1)[1]}
    after = {s.content for s in split_validation(samples_of([*names, "f" * 64]), 0.1)[1]}
    assert len(before - after) <= 1
    assert len(after - before) <= 1


def test_usual_sizes() -> None:
    sizes = {n: len(split_validation(samples_of([str(k) for k in range(n)]), 0.1)[1]) for n in (1, 2, 8, 20, 40, 1000)}
    assert sizes == {1: 0, 2: 1, 8: 1, 20: 2, 40: 4, 1000: 16}


def test_small_sets_keep_their_images_unless_asked() -> None:
    sizes = {n: len(split_validation(samples_of([str(k) for k in range(n)]), None)[1]) for n in (8, 39, 40, 140, 1000)}
    assert sizes == {8: 0, 39: 0, 40: 12, 140: 14, 1000: 16}


def test_another_seed_chooses_other_images_and_never_regularization() -> None:
    samples = samples_of([str(k) for k in range(100)])
    first, second = ({s.content for s in split_validation(samples, 0.1, seed)[1]} for seed in (0, 1))
    assert first != second
    kept = [replace(sample, regularization=sample.content in first) for sample in samples]
    train, validation = split_validation(kept, 0.1)
    assert not any(sample.regularization for sample in validation)
    assert {s.content for s in train if s.regularization} == first


def test_an_image_similar_to_regularization_is_never_validation() -> None:
    samples = samples_of([str(k) for k in range(100)])
    first = split_validation(samples, 0.1)[1]
    copies = [replace(sample, path=Path(f"class/{sample.path}"), regularization=True) for sample in first[:5]]
    twins = [replace(sample, content=f"near {sample.content}", regularization=True) for sample in first[5:]]
    kin = {twin.content: sample.content for twin, sample in zip(twins, first[5:], strict=True)}
    train, validation = split_validation([*samples, *copies, *twins], 0.1, kin=kin)
    assert len(validation) == 10
    assert not {s.content for s in validation} & {s.content for s in first}
    assert {s.content for s in train} >= {s.content for s in first}
