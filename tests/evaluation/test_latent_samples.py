"""Samples as latents: each from its own seed, along the same path as the drift's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lora_trainer.evaluation.drift import base_visits
from lora_trainer.evaluation.latent_samples import Request, Sampler, sample_latents
from lora_trainer.models.families import FAMILIES
from tests.lora_format.tiny import tiny_pipeline

CPU = torch.device("cpu")
STEPS = 3
SIZES = torch.tensor([64.0, 64, 0, 0, 64, 64])


@pytest.fixture(scope="module", params=["sd15", "sd3"])
def sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    tiny_pipeline(folder / "tokenizer", request.param).save_pretrained(folder / "base")
    denoiser = family.denoiser.load(folder / "base", torch.float32, CPU)
    shapes = family.text.cond_shapes(denoiser.config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(6)
    empty = {name: torch.randn(1, *shape, generator=generator) for name, shape in shapes.items()}
    process = family.denoiser.make_process(folder / "base")
    return Sampler(partial(family.denoiser.predict, denoiser), process, STEPS, 3.0, empty)


def requests_of(sampler: Sampler, count: int) -> list[Request]:
    """Of two shapes in turn, each with a text and a seed of its own."""
    assert sampler.negative is not None
    channels = 4 if "pooled" not in sampler.negative else 16
    return [
        Request(
            {name: value * (1 + seed) for name, value in sampler.negative.items()},
            (channels, 8, 8 + 8 * (seed % 2)),
            SIZES,
            seed,
        )
        for seed in range(count)
    ]


def test_how_many_are_sampled_at_once_changes_only_rounding(sampler: Sampler) -> None:
    requests = requests_of(sampler, 5)
    alone, together = (sample_latents(sampler, requests, at_once) for at_once in (1, 4))
    for request, one, other in zip(requests, alone, together, strict=True):
        assert tuple(one.shape) == request.shape
        assert torch.isfinite(one).all()
        # Rounding, which CPUs do differently, grows from step to step.
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)
    (again,) = sample_latents(sampler, requests[3:4])
    assert torch.equal(again, alone[3])
    (reseeded,) = sample_latents(sampler, [replace(requests[3], seed=9)])
    assert not torch.allclose(reseeded, again, atol=0.1)


def test_guidance_of_1_and_no_negative_prompt_are_the_same(sampler: Sampler) -> None:
    requests = requests_of(sampler, 2)[1:]
    (guided,), (plain,), (without,) = (
        sample_latents(each, requests)
        for each in (sampler, replace(sampler, guidance=1.0), replace(sampler, negative=None))
    )
    assert torch.equal(plain, without)
    assert not torch.allclose(plain, guided)


def test_without_guidance_the_path_is_that_of_the_drift(sampler: Sampler) -> None:
    """The same timesteps, and from each to the next by the process's own parts."""
    visits: list[tuple[Tensor, Tensor, Tensor]] = []

    def predict(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        found = sampler.predict(noisy, t, cond, sizes)
        visits.append((noisy, t, found))
        return found

    (request,) = requests_of(sampler, 1)
    (last,) = sample_latents(replace(sampler, predict=predict, negative=None), [request])
    process = sampler.process
    of_drift = base_visits(sampler.predict, process, request.cond, request.sizes[None], request.shape, steps=STEPS)
    assert [int(t) for _, t, _ in visits] == [visit.t for visit in of_drift]
    for (noisy, t, prediction), (after, next_t, _) in pairwise(visits):
        clean, noise = process.parts(noisy, prediction, t)
        assert torch.allclose(process.add_noise(clean, noise, next_t), after, atol=1e-6)
    noisy, t, prediction = visits[-1]
    assert torch.allclose(process.parts(noisy, prediction, t)[0][0], last, atol=1e-6)
