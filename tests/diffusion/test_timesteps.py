"""Timesteps of flow matching, against the formulas of arXiv:2403.03206."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.schema import Config, FlowSection
from lora_trainer.diffusion.process import Process, scaled_linear_alphas, usual_process
from lora_trainer.diffusion.timesteps import Shift, Times, drawn_timesteps, flow_times, logit_normal, mode, shifted
from lora_trainer.training.build import trained_process

DRAWS = st.floats(0.0, 1.0, exclude_max=True)
FACTORS = st.floats(0.05, 50.0)
SHIFTS = st.one_of(FACTORS, st.sampled_from(["model", "resolution"]))
SIZE = (64, 64)
FLOWS = st.builds(
    FlowSection,
    timestep_sampling=st.sampled_from(["uniform", "logit_normal", "mode"]),
    logit_mean=st.floats(-3.0, 3.0),
    logit_std=st.floats(0.1, 3.0),
    mode_scale=st.floats(-1.0, 1.75),
    shift=SHIFTS,
)


@given(FLOWS, st.lists(DRAWS, min_size=2, max_size=8), st.integers(2, 2000))
def test_timesteps_rise_with_the_draw_and_stay_in_range(flow, draws, count):
    times = flow_times(flow, Shift(3.0))
    found = [times.at(draw, SIZE) for draw in sorted(draws)]
    assert all(0.0 <= each <= 1.0 for each in found)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(found))
    timesteps = drawn_timesteps(sorted(draws), times, count, SIZE)
    assert timesteps.dtype == torch.long
    assert int(timesteps.min()) >= 0
    assert int(timesteps.max()) < count


@given(DRAWS, FACTORS, FACTORS)
def test_shifts_compose_to_their_product(time, one, other):
    assert shifted(shifted(time, one), other) == pytest.approx(shifted(time, one * other), rel=1e-9)
    assert shifted(time, one) == pytest.approx(time / (time + (1 - time) / one), rel=1e-9)
    assert shifted(shifted(time, one), 1 / one) == pytest.approx(time, rel=1e-9, abs=1e-12)


def slope(quantile, draw: float) -> float:
    width = 1e-5
    return (quantile(draw + width) - quantile(draw - width)) / (2 * width)


@given(st.floats(0.02, 0.98), st.floats(-1.5, 1.5), st.floats(0.3, 2.0))
def test_the_density_of_logit_normal_is_the_papers(draw, mean, spread):
    """A quantile's slope is one over the density, eq. 19."""
    t = logit_normal(draw, mean, spread)
    density = NormalDist(mean, spread).pdf(math.log(t / (1 - t))) / (t * (1 - t))
    assert slope(lambda u: logit_normal(u, mean, spread), draw) * density == pytest.approx(1.0, rel=1e-3)


@given(st.floats(0.0, 1.0), st.floats(-1.0, 1.75))
def test_mode_is_the_papers_formula_reversed(u, scale):
    published = 1 - u - scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u)
    assert mode(1 - u, scale) == pytest.approx(published, abs=1e-12)


def test_what_each_setting_prefers():
    """For evenly spread draws: the share of timesteps in the middle third, and their mean."""
    draws = [(index + 0.5) / 4000 for index in range(4000)]

    def share(**flow: object) -> tuple[float, float]:
        times = flow_times(FlowSection.model_validate(flow), Shift())
        t = drawn_timesteps(draws, times, 1000, SIZE).double() / 1000
        return float(((t > 1 / 3) & (t < 2 / 3)).double().mean()), float(t.mean())

    assert share(timestep_sampling="uniform") == pytest.approx((1 / 3, 0.5), abs=2e-3)
    # P(|z| < log 2) of a standard normal z
    assert share(timestep_sampling="logit_normal") == pytest.approx(
        (math.erf(math.log(2) / math.sqrt(2)), 0.5), abs=2e-3
    )
    assert share(timestep_sampling="mode")[0] > 0.4
    assert share(timestep_sampling="mode", mode_scale=-0.5)[0] < 1 / 3
    # a uniform time shifted by s has the mean s / (s - 1) - s ln s / (s - 1)^2
    assert share(timestep_sampling="uniform", shift=3)[1] == pytest.approx(1.5 - 0.75 * math.log(3), abs=2e-3)


def test_resolution_shifts_as_in_flux_sampling():
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    times = flow_times(FlowSection(timestep_sampling="uniform", shift="resolution"), Shift())
    for side in (32, 64, 90, 128):
        factor = math.exp(calculate_shift((side // 2) ** 2))
        assert times.at(0.3, (side, side)) == pytest.approx(factor * 0.3 / (1 + (factor - 1) * 0.3), rel=1e-9)
    assert times.at(0.3, (64, 128)) == times.at(0.3, (128, 64)), "only the number of tokens counts"


def test_shift_equals_the_schedulers_own():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(1000, shift=3.0)
    ours = [shifted((index + 1) / 1000, 3.0) for index in range(1000)]
    assert torch.allclose(scheduler.sigmas.flip(0), torch.tensor(ours), atol=1e-6)


def test_timestep_settings_apply_only_to_flow_models():
    """A diffusion model stays uniform; a flow model keeps its scheduler's shift by default."""
    cpu, config = torch.device("cpu"), Config.model_validate({"flow": {"timestep_sampling": "mode", "shift": 2.0}})
    diffusion = Process(scaled_linear_alphas(1000, 0.00085, 0.012), "epsilon")
    assert trained_process(diffusion, config, cpu).times == Times()
    assert trained_process(usual_process("flow"), config, cpu).times == Times("mode", mode_scale=1.29, shift=Shift(2.0))
    own = Process(usual_process("flow").alphas_cumprod, "flow", Times(shift=Shift(3.0)))
    assert trained_process(own, Config(), cpu).times.shift == Shift(3.0)
    assert trained_process(own, Config(), cpu).times.kind == "logit_normal"


def test_timesteps_are_described() -> None:
    assert Times("mode", mode_scale=1.29, shift=Shift(0.5)).describe((8, 8)) == "mode 1.29, shift 0.5"
    grown = Times("logit_normal", shift=Shift(by_size=True, tokens=(16, 64), mus=(0.0, 1.0)))
    assert grown.describe((8, 8)) == "logit_normal (mean 0, spread 1), shift 1"
