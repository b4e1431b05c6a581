"""The arithmetic of noise, schedules and losses, against the formulas themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.schema import LossSection
from lora_trainer.core.errors import UsageError
from lora_trainer.core.randomness import position_key, position_keys, position_uniform
from lora_trainer.diffusion.loss import (
    WEIGHTINGS,
    debiased_weight,
    huber_error,
    make_loss,
    min_snr_weight,
    squared_error,
    v_as_epsilon_weight,
)
from lora_trainer.diffusion.noise import generator, multires_noise, position_noise, training_noise
from lora_trainer.diffusion.process import (
    Process,
    linear_alphas,
    scaled_linear_alphas,
    usual_process,
    zero_terminal_alphas,
)
from lora_trainer.diffusion.timesteps import Times, drawn_timesteps, stratified_timesteps

ALPHAS = scaled_linear_alphas(1000, 0.00085, 0.012)
PLAIN = {"offset": 0.0, "multires_iterations": 0, "multires_discount": 0.3}


def test_schedules_equal_diffusers():
    from diffusers import DDPMScheduler

    for name, ours in (("scaled_linear", scaled_linear_alphas), ("linear", linear_alphas)):
        theirs = DDPMScheduler(1000, 0.00085, 0.012, beta_schedule=name)
        assert torch.allclose(ours(1000, 0.00085, 0.012), theirs.alphas_cumprod, rtol=1e-6)


def test_zero_terminal_schedule_equals_diffusers_and_ends_without_signal():
    from diffusers import DDIMScheduler

    theirs = DDIMScheduler(1000, 0.00085, 0.012, beta_schedule="scaled_linear", rescale_betas_zero_snr=True)
    ours = zero_terminal_alphas(ALPHAS)
    assert torch.allclose(ours, theirs.alphas_cumprod, atol=1e-6)
    assert ours[-1] == 0.0
    assert ours[0] == pytest.approx(float(ALPHAS[0]), rel=1e-6)
    process = Process(ours, "v_prediction")
    assert process.snr(torch.tensor([999])) == 0.0


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noising_and_targets_equal_diffusers(prediction):
    from diffusers import DDPMScheduler

    theirs = DDPMScheduler(1000, 0.00085, 0.012, beta_schedule="scaled_linear", prediction_type=prediction)
    process = Process(ALPHAS, prediction)
    latents, noise, t = torch.randn(3, 4, 6, 5), torch.randn(3, 4, 6, 5), torch.tensor([0, 500, 999])
    assert torch.allclose(process.add_noise(latents, noise, t), theirs.add_noise(latents, noise, t), atol=1e-6)
    expected = noise if prediction == "epsilon" else theirs.get_velocity(latents, noise, t)
    assert torch.allclose(process.target(latents, noise, t), expected, atol=1e-6)


@given(st.integers(0, 999), st.floats(0.1, 20.0))
def test_min_snr_weight_is_the_papers_formula(t, gamma):
    snr = float(ALPHAS[t] / (1 - ALPHAS[t]))
    epsilon = float(min_snr_weight(Process(ALPHAS, "epsilon"), torch.tensor([t]), gamma))
    velocity = float(min_snr_weight(Process(ALPHAS, "v_prediction"), torch.tensor([t]), gamma))
    assert epsilon == pytest.approx(min(snr, gamma) / snr, rel=1e-4)
    assert velocity == pytest.approx(min(snr, gamma) / (snr + 1), rel=1e-4)


@given(st.integers(0, 999))
def test_debiased_and_v_as_epsilon_are_kohyas_formulas(t):
    snr = min(float(ALPHAS[t] / (1 - ALPHAS[t])), 1000.0)
    at = torch.tensor([t])
    assert float(debiased_weight(Process(ALPHAS, "epsilon"), at)) == pytest.approx(snr**-0.5, rel=1e-4)
    assert float(debiased_weight(Process(ALPHAS, "v_prediction"), at)) == pytest.approx(1 / (snr + 1), rel=1e-4)
    assert float(v_as_epsilon_weight(Process(ALPHAS, "v_prediction"), at)) == pytest.approx(snr / (snr + 1), rel=1e-4)


@given(st.integers(0, 999))
def test_an_error_of_velocity_counts_as_that_of_the_noise_it_implies(t):
    """With `v_as_epsilon`: the definition behind the formula, where the limit of 1000 is not reached."""
    process, at = Process(ALPHAS, "v_prediction"), torch.tensor([t])
    noisy, found, true = (torch.randn(1, 4, 3, 3, dtype=torch.float64) for _ in range(3))
    of_noise = (process.parts(noisy, found, at)[1] - process.parts(noisy, true, at)[1]).square().mean()
    weighed = (found - true).square().mean() * v_as_epsilon_weight(process, at)
    if float(process.snr(at)) < 1000.0:
        assert float(weighed) == pytest.approx(float(of_noise), rel=1e-4)


def test_weightings_that_a_model_cannot_follow_are_refused():
    with pytest.raises(UsageError, match="the model predicts noise"):
        make_loss(LossSection(weighting="v_as_epsilon"), Process(ALPHAS, "epsilon"))
    with pytest.raises(UsageError, match="no signal-to-noise ratio"):
        make_loss(LossSection(weighting="debiased"), usual_process("flow"))


def test_min_snr_with_v_prediction_is_defined_at_zero_snr():
    process = Process(torch.tensor([0.5, 0.0]), "v_prediction")
    assert float(min_snr_weight(process, torch.tensor([1]), 5.0)) == 0.0


def test_loss_is_one_number_per_sample():
    predicted, target = torch.zeros(2, 4, 3, 3), torch.zeros(2, 4, 3, 3)
    target[1] = 2.0
    assert squared_error(predicted, target).tolist() == [0.0, 4.0]


DIFFERENCES = st.lists(st.floats(-50.0, 50.0, width=32), min_size=4, max_size=4)


@given(DIFFERENCES, st.floats(0.01, 10.0))
def test_huber_lies_between_l1_and_mse(values, delta):
    """Never above the square or 2 delta times the absolute error, and near the smaller of both."""
    d = torch.tensor(values, dtype=torch.float64).view(1, 1, 2, 2)
    huber = huber_error(d, torch.zeros_like(d), delta=delta)
    assert huber.shape == (1,)
    assert float(huber) <= float(d.square().mean()) * (1 + 1e-9)
    assert float(huber) <= 2 * delta * float(d.abs().mean()) * (1 + 1e-9)
    formula = (2 * delta * ((d.square() + delta**2).sqrt() - delta)).mean()
    assert float(huber) == pytest.approx(float(formula), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("size", "expected"), [(1e-4, 1e-8), (1e4, 2e3)])
def test_huber_is_quadratic_when_small_and_linear_when_large(size, expected):
    """In float32, where the plain formula would give 0 for the small one."""
    predicted = torch.full((1, 4, 2, 2), size)
    assert float(huber_error(predicted, torch.zeros_like(predicted), delta=0.1)) == pytest.approx(expected, rel=1e-4)


def test_losses_follow_the_settings():
    process = Process(ALPHAS, "epsilon")
    predicted, target, t = torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5), torch.tensor([10, 500, 900])

    def loss(**settings: object) -> torch.Tensor:
        return make_loss(LossSection.model_validate(settings), process)(predicted, target, t)

    assert torch.equal(loss(), squared_error(predicted, target))
    weight = min_snr_weight(process, t, 5.0)
    assert torch.equal(loss(min_snr_gamma=5.0), squared_error(predicted, target) * weight)
    huber = huber_error(predicted, target, delta=0.3)
    assert torch.equal(loss(type="huber", huber_delta=0.3, min_snr_gamma=5.0), huber * weight)


@pytest.mark.parametrize(
    "settings", [{}, {"type": "huber"}, {"min_snr_gamma": 5.0}, {"type": "huber", "min_snr_gamma": 1.0}]
)
def test_a_mask_selects_where_the_loss_counts(settings):
    """A white mask changes no bit, a black half does not count, and a black mask gives 0."""
    process, t = Process(ALPHAS, "epsilon"), torch.tensor([10, 500, 900])
    predicted, target = torch.randn(3, 4, 6, 5, requires_grad=True), torch.randn(3, 4, 6, 5)
    loss = make_loss(LossSection.model_validate(settings), process)
    plain = loss(predicted, target, t)
    mask = torch.ones(3, 1, 6, 5)
    assert torch.equal(loss(predicted, target, t, mask), plain)
    mask[1, :, 3:] = 0.0
    mask[2] = 0.0
    masked = loss(predicted, target, t, mask)
    assert torch.equal(masked[0], plain[0])
    assert torch.allclose(masked[1], loss(predicted[1:2, :, :3], target[1:2, :, :3], t[1:2])[0], rtol=1e-5)
    assert masked[2].item() == 0.0
    (gradient,) = torch.autograd.grad(masked.sum(), predicted)
    assert gradient.isfinite().all()
    assert ((gradient != 0.0) == (mask > 0.0)).all()


def test_the_unmasked_weight_counts_where_a_mask_is_black():
    loss = make_loss(LossSection(unmasked_weight=0.25), Process(ALPHAS, "epsilon"))
    predicted, mask = torch.tensor([1.0, 3.0]).view(1, 1, 1, 2), torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    found = loss(predicted, torch.zeros_like(predicted), torch.tensor([0]), mask)
    assert float(found) == pytest.approx((1.0 * 1.0 + 0.25 * 9.0) / 1.25)


def test_a_weighting_by_snr_is_refused_on_a_flow_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHTINGS, "by_snr", lambda config, process: lambda t: process.snr(t) + 1.0)
    settings = LossSection(weighting="by_snr")
    make_loss(settings, Process(ALPHAS, "epsilon"))
    with pytest.raises(UsageError, match=r'loss.weighting = "by_snr": a flow-matching model has no signal-to-noise'):
        make_loss(settings, usual_process("flow"))
    make_loss(LossSection(), usual_process("flow"))


def test_zero_terminal_snr_trains_without_a_nan():
    """The last timestep has no signal: the v-prediction loss and weight are finite there, the target is -latents."""
    process = Process(zero_terminal_alphas(ALPHAS), "v_prediction")
    t, latents, noise = torch.tensor([999, 0]), torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    assert torch.equal(process.add_noise(latents, noise, t)[0], noise[0])
    target = process.target(latents, noise, t)
    assert torch.equal(target[0], -latents[0])
    assert make_loss(LossSection(min_snr_gamma=5.0), process)(torch.zeros_like(target), target, t).isfinite().all()


def test_noise_depends_on_every_part_of_the_position():
    shape = (4, 8, 8)
    base = position_noise(shape, 42, "noise", 3, "abc", 0)
    assert torch.equal(base, position_noise(shape, 42, "noise", 3, "abc", 0))
    for other in ((43, "noise", 3, "abc", 0), (42, "posterior", 3, "abc", 0), (42, "noise", 4, "abc", 0)):
        assert not torch.equal(base, position_noise(shape, *other))
    assert not torch.equal(base, position_noise(shape, 42, "noise", 3, "abd", 0))
    assert not torch.equal(base, position_noise(shape, 42, "noise", 3, "abc", 1))


def test_noise_uses_the_upper_half_of_its_key():
    """torch's own generator would give the same numbers for keys that differ above 32 bits."""
    keys = {position_key(1, "noise", step) for step in range(200)}
    assert len({key >> 64 for key in keys}) == 200
    drawn = {float(position_noise((1,), 1, "noise", step)) for step in range(200)}
    assert len(drawn) == 200


def test_plain_noise_is_standard_normal():
    noise = training_noise((4, 64, 64), 42, 0, "abc", 0, **PLAIN)
    assert abs(float(noise.mean())) < 0.03
    assert float(noise.std()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("size", [(16, 16), (1, 1), (3, 40)])
def test_multires_noise_keeps_unit_variance_and_is_smoother(size):
    plain = position_noise((4, *size), 1, "noise", 0)
    coarse = multires_noise(plain, generator(1, "multires", 0), 8, 0.8)
    assert coarse.shape == plain.shape
    assert float(coarse.std()) == pytest.approx(1.0, abs=1e-4)
    if min(size) > 4:
        neighbors = (coarse[:, :, 1:] - coarse[:, :, :-1]).std()
        assert neighbors < (plain[:, :, 1:] - plain[:, :, :-1]).std()


def test_offset_and_multires_together_keep_unit_spread():
    """As kohya's sd-scripts, which scale last: added to scaled noise, the offset made 1.117 of both at 0.3."""
    options = {"offset": 0.3, "multires_iterations": 6, "multires_discount": 0.3}
    spreads = [float(training_noise((4, 16, 16), 0, "a", index, **options).std()) for index in range(20)]
    assert spreads == pytest.approx([1.0] * 20, abs=1e-5)


def test_offset_moves_whole_channels():
    options = {**PLAIN, "offset": 0.5}
    moved = training_noise((4, 8, 8), 42, 0, "abc", 0, **options)
    difference = moved - training_noise((4, 8, 8), 42, 0, "abc", 0, **PLAIN)
    assert float(difference.std(dim=(1, 2)).max()) < 1e-6
    assert len(set(difference[:, 0, 0].tolist())) == 4


@given(st.floats(0.0, 1.0, exclude_max=True), st.integers(1, 2000))
def test_timesteps_stay_in_range(draw, count):
    assert 0 <= int(drawn_timesteps([draw], Times(), count, (64, 64))) < count


@given(st.integers(1, 64), st.integers(64, 1000))
def test_stratified_timesteps_cover_the_schedule(count, timesteps):
    points = stratified_timesteps(count, timesteps)
    assert points == sorted(set(points))
    assert 0 <= points[0] <= timesteps / count
    assert timesteps - timesteps / count - 1 <= points[-1] < timesteps


@given(st.integers(0, 40), st.integers(), st.text(max_size=9), st.integers(0, 9))
def test_a_batch_of_keys_equals_single_keys(count, seed, purpose, epoch):
    singly = [position_key(seed, purpose, epoch, index) >> 64 for index in range(count)]
    assert position_keys(count, seed, purpose, epoch) == b"".join(key.to_bytes(8, "big") for key in singly)


@given(st.integers(), st.text())
def test_uniform_is_in_the_unit_interval(seed, purpose):
    assert 0.0 <= position_uniform(seed, purpose) < 1.0
