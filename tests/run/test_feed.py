"""The samples of a step do not depend on resuming, splitting or the number of processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.schema import CaptionsSection, Config
from lora_trainer.core.errors import TrainingFailed
from lora_trainer.data.caches.entries import Store, write_entries
from lora_trainer.data.loader import CachedData
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import Framing, plan_views
from lora_trainer.diffusion.process import Process, scaled_linear_alphas
from lora_trainer.training.feed import Feed, make_feed
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.processes import Processes

CPU = torch.device("cpu")
LEARNER = cast(
    "Any",
    SimpleNamespace(
        device=CPU,
        dtype=torch.float32,
        process=Process(scaled_linear_alphas(1000, 0.00085, 0.012), "epsilon"),
        is_joined=False,
        is_sharded=False,
        add_micros=lambda micros, places, step: micros,
    ),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> CachedData:
    """Images of two shapes, two resolutions, flipped, with three texts each, repeats and regularization; one twice."""
    folder = tmp_path_factory.mktemp("entries")
    samples = [
        Sample(
            Path(f"{n}.png"),
            f"{n} a",
            (100, 200)[n % 2],
            100,
            f"{max(n, 1):064d}"[::-1],
            repeats=(1, 2, 0.5)[n // 3],
            source=n // 3,
            regularization=n >= 6,
            variants=(f"{n} a", f"{n} b", f"{n} c"),
        )
        for n in range(9)
    ]
    views = plan_views(samples, [Framing((64, 32), 16, flip=True)] * 3).views
    latent_keys, text_keys, empty = [], [], f"{0:064x}"
    write_entries(folder, "texts", [empty], {"embeds": torch.full((1, 5, 3), -1.0)})
    for n, ways in enumerate(views):
        latent_keys.append([f"{1 + 100 * n + place:064x}" for place in range(len(ways))])
        text_keys.append(tuple(f"{5000 + 10 * n + place:064x}" for place in range(3)))
        for place, (key, view) in enumerate(zip(latent_keys[n], ways, strict=True)):
            shape = (1, 2, view.fit.bucket.height // 8, view.fit.bucket.width // 8)
            entry = {"mean": torch.full(shape, n + place / 10), "spread": torch.full(shape, 0.5)}
            write_entries(folder, "latents", [key], entry)
        write_entries(
            folder, "texts", text_keys[n], {"embeds": torch.arange(3.0).view(3, 1, 1).expand(3, 5, 3) + 10 * n}
        )
    rules = (CaptionsSection(dropout=0.3),) * 3
    stores = Store(folder, "latents"), Store(folder, "texts")
    return CachedData(samples, views, latent_keys, text_keys, empty, *stores, prior_weight=0.5, captions=rules)


def feeds(data: CachedData, seed: int, effective: int, world: int, most: int, learner: Any = LEARNER) -> list[Feed]:
    config = Config.model_validate(
        {"train": {"seed": seed, "effective_batch_size": effective}, "noise": {"offset": 0.1}}
    )
    places = [Processes(rank, world, CPU, None, lambda: None) for rank in range(world)]
    return [make_feed(config, data, learner, place, most, total=1000) for place in places]


def rows(micros: list[MicroBatch]) -> Counter[tuple[bytes, ...]]:
    """Each sample with all of its tensors, as trained."""
    found: Counter[tuple[bytes, ...]] = Counter()
    for micro in micros:
        parts = (micro.latents, micro.noise, micro.t, *micro.cond.values(), micro.sizes, micro.weights)
        found.update(tuple(part[place].numpy().tobytes() for part in parts) for place in range(len(micro.latents)))
    return found


@given(st.integers(0, 2**40), st.integers(1, 7), st.integers(0, 60), st.integers(1, 4))
def test_training_samples_depend_only_on_the_step(data, seed, effective, start, most):
    (whole,) = feeds(data, seed, effective, 1, 7)
    steps = [rows(whole.micros(step)) for step in range(start, start + 2)]
    for world in (1, 2, 3):
        resumed = feeds(data, seed, effective, world, most)
        for step, expected in enumerate(steps, start):
            micros = [micro for feed in resumed for micro in feed.micros(step)]
            assert rows(micros) == expected
            assert expected.total() == whole.plan.size(step)
            assert all(len(micro.latents) <= most for micro in micros)


@given(st.integers(0, 2**40), st.integers(1, 7), st.integers(0, 60), st.integers(1, 3))
def test_processes_that_share_the_base_take_equally_many_passes(data, seed, effective, step, most):
    """Those without a sample left take the others' passes with one of no weight, which counts nowhere."""
    sharded = SimpleNamespace(**vars(LEARNER) | {"is_sharded": True})
    together, alone = (feeds(data, seed, effective, 3, most, learner) for learner in (sharded, LEARNER))
    passes = [feed.micros(step) for feed in together]
    assert len({len(micros) for micros in passes}) == 1
    assert max(len(feed.micros(step)) for feed in alone) == len(passes[0])
    for feed, micros, usual in zip(together, passes, alone, strict=True):
        assert rows([micro for micro in micros if not micro.is_idle]) == rows(usual.micros(step))
        assert all(not micro.weights.any() for micro in micros if micro.is_idle)
        assert feed.groups(step) == usual.groups(step)
        assert feed.sample_counts(step) == usual.sample_counts(step)


@given(st.integers(0, 2**40), st.integers(1, 7), st.integers(1, 30))
def test_sample_counts_match_the_samples_fed(data, seed, effective, steps):
    (feed,) = feeds(data, seed, effective, 1, 4)
    counts = feed.sample_counts(steps)
    micros = [micro for step in range(steps) for micro in feed.micros(step)]
    fed = Counter(float(value) for micro in micros for value in micro.cond["embeds"][:, 0, 0])
    texts = {
        float(10 * n + place): text for n, sample in enumerate(data.samples) for place, text in enumerate(sample.texts)
    }
    assert {texts.get(value, ""): count for value, count in fed.items()} == counts.captions
    assert fed[-1.0] == counts.dropped
    sizes = Counter("x".join(str(int(side)) for side in (row[5], row[4])) for micro in micros for row in micro.sizes)
    assert sizes == counts.buckets
    assert sum(counts.times) == sum(map(feed.plan.size, range(steps)))


def test_a_missing_cache_entry_names_its_image(data, tmp_path):
    (feed,) = feeds(CachedData(**{**vars(data), "latents": Store(tmp_path, "latents")}), 0, 1, 1, 1)
    name = data.samples[feed.plan.refs(0)[0].index].path.name
    with pytest.raises(TrainingFailed, match=rf"removed or damaged during the run .*{name}"):
        feed.micros(0)
