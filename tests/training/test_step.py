"""One optimizer step: splitting it, clipping it, overflowing in it, its precision."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.adapters.masters import Adapter, make_adapter
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.config.schema import LossSection, OptimizerSection
from lora_trainer.diffusion.loss import make_loss
from lora_trainer.diffusion.process import Process, scaled_linear_alphas
from lora_trainer.models.families import FAMILIES
from lora_trainer.optim.clipping import clip_by_norm, clip_by_value
from lora_trainer.optim.optimizers import make_optimizer
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.step import StepContext, StepSettings, backward, train_step
from tests.lora_format.tiny import tiny_pipeline

PROCESS = Process(scaled_linear_alphas(1000, 0.00085, 0.012), "epsilon")


@pytest.fixture
def unet(tmp_path: Path) -> nn.Module:
    return tiny_pipeline(tmp_path).unet.requires_grad_(False)


def make_step_context(unet: nn.Module, dtype: torch.dtype = torch.float32, **changes) -> StepContext:
    family = FAMILIES["sd15"]
    names = target_modules(unet, family.denoiser, "attention")
    unet.to(dtype)
    parameters = inject_lora(unet, names, AdapterOptions(4, 4.0), 1)
    if dtype == torch.float64:
        for parameter in parameters.values():
            parameter.data = parameter.data.double()
        adapter = Adapter(parameters, parameters)
    else:
        adapter = make_adapter(parameters, dtype)
    name = changes.pop("optimizer", "adamw")
    context = StepContext(
        denoiser=unet,
        predict=family.denoiser.predict,
        process=PROCESS,
        loss=make_loss(LossSection(min_snr_gamma=5.0), PROCESS),
        adapter=adapter,
        average=None,
        shown=lambda: adapter.masters,
        optimizer=make_optimizer(adapter.masters, OptimizerSection(name=name)),
        scaler=torch.amp.GradScaler(enabled=False),
        reduce=None,
        device=torch.device("cpu"),
        dtype=dtype,
        clip=partial(clip_by_norm, largest=0.0),
    )
    return dataclasses.replace(context, **changes)


def random_micro(count: int, dtype: torch.dtype = torch.float32) -> MicroBatch:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    t = torch.randint(0, 1000, (count,), generator=generator)
    latents, noise, embeds = drawn(count, 4, 8, 8), drawn(count, 4, 8, 8), drawn(count, 77, 32)
    return MicroBatch(latents, noise, noise, t, {"embeds": embeds}, drawn(count, 6), torch.ones(count, dtype=dtype))


def gradients(context: StepContext, micros: list[MicroBatch], samples: int) -> list[torch.Tensor]:
    for micro in micros:
        backward(context, micro, samples)
    found = [master.grad.clone() for master in context.masters]
    context.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("bounds", [(0, 2, 4), (0, 1, 4), (0, 1, 2, 3, 4)])
def test_splitting_a_step_changes_rounding_only(unet, bounds):
    context = make_step_context(unet, torch.float64)
    for parameter in context.masters:  # up projections start at zero and would hide most gradients
        parameter.data += 0.01
    micro = random_micro(4, torch.float64)
    whole = gradients(context, [micro], 4)
    split = gradients(context, [micro.part(a, b) for a, b in pairwise(bounds)], 4)
    norm = torch.cat([g.flatten() for g in whole]).norm()
    difference = torch.cat([(a - b).flatten() for a, b in zip(whole, split, strict=True)]).norm()
    assert norm > 0
    assert difference / norm < 1e-9


def test_two_processes_sum_to_one(unet):
    """Each process has its share of the samples. Summed gradients equal those of the whole step."""
    context = make_step_context(unet, torch.float64)
    micro = random_micro(3, torch.float64)
    whole = gradients(context, [micro], 3)
    shares = [gradients(context, [micro.part(a, b)], 3) for a, b in ((0, 2), (2, 3))]
    for expected, *parts in zip(whole, *shares, strict=True):
        assert torch.allclose(expected, sum(parts), rtol=1e-9, atol=1e-15)


def test_a_process_without_samples_still_takes_part(unet):
    seen = []

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.clone())
        return tensor

    context = make_step_context(unet, reduce=reduce)
    result = train_step(context, [], 1, StepSettings(1e-3))
    assert len(seen) == 1
    assert float(seen[0].abs().sum()) == 0.0
    assert float(result.loss) == 0.0


def test_a_loss_weight_multiplies_the_loss_of_its_sample(unet):
    context = make_step_context(unet, torch.float64)
    for parameter in context.masters:
        parameter.data += 0.01
    micro = random_micro(2, torch.float64)
    first, second = (gradients(context, [micro.part(row, row + 1)], 2) for row in (0, 1))
    weighted = dataclasses.replace(micro, weights=torch.tensor([3.0, 0.0], dtype=torch.float64))
    for one, other, expected in zip(first, second, gradients(context, [weighted], 2), strict=True):
        assert float(other.abs().sum()) > 0.0
        assert torch.allclose(3.0 * one, expected, rtol=1e-9, atol=1e-15)


def test_masks_split_and_stay_on_their_samples(unet):
    """A mask of ones trains like no mask, bit for bit. A mask does not affect other samples."""
    context = make_step_context(unet, torch.float64)
    for parameter in context.masters:
        parameter.data += 0.01
    micro = random_micro(2, torch.float64)
    mask = torch.ones(2, 1, 8, 8)
    plain = gradients(context, [micro], 2)
    white = gradients(context, [dataclasses.replace(micro, mask=mask)], 2)
    assert all(torch.equal(one, other) for one, other in zip(plain, white, strict=True))
    mask[1, :, :, 4:] = 0.0
    masked = dataclasses.replace(micro, mask=mask)
    whole = torch.cat([each.flatten() for each in gradients(context, [masked], 2)])
    split = gradients(context, [micro.part(0, 1), masked.part(1, 2)], 2)
    assert (whole - torch.cat([each.flatten() for each in split])).norm() < 1e-9 * whole.norm()


def test_training_lowers_the_loss(unet):
    context = make_step_context(unet)
    micro = random_micro(4)
    losses = [float(train_step(context, [micro], 4, StepSettings(1e-2)).loss) for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]


def test_clipping_clips_and_reports_the_norm_before():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    assert float(clip_by_norm([parameter], largest=1.0)) == pytest.approx(6.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0, abs=1e-4)
    parameter.grad = torch.full((4,), 0.1)
    clip_by_norm([parameter], largest=1.0)
    assert float(parameter.grad.norm()) == pytest.approx(0.2)
    parameter.grad = torch.full((4,), 3.0)
    clip_by_norm([parameter], largest=0.0)
    assert float(parameter.grad.norm()) == pytest.approx(6.0)
    parameter.grad = torch.tensor([3.0, -4.0, 0.1, 0.0])
    assert float(clip_by_value([parameter], largest=0.5)) == pytest.approx(5.001, abs=1e-3)
    assert parameter.grad.tolist() == pytest.approx([0.5, -0.5, 0.1, 0.0])


def test_bf16_keeps_fp32_masters_that_small_updates_reach(unet):
    context = make_step_context(unet, torch.bfloat16)
    before = [master.clone() for master in context.masters]
    train_step(context, [random_micro(2).to(context.device, torch.bfloat16)], 2, StepSettings(1e-5))
    masters, copies = context.adapter.masters, context.adapter.copies
    assert all(master.dtype == torch.float32 for master in masters.values())
    assert all(copy.dtype == torch.bfloat16 for copy in copies.values())
    assert any(not torch.equal(master, old) for master, old in zip(context.masters, before, strict=True))
    assert all(torch.equal(copies[name], masters[name].bfloat16()) for name in masters)


def test_fp16_overflow_is_skipped_and_the_scale_falls(unet):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    context = make_step_context(unet, torch.float16, scaler=scaler)
    before = [master.clone() for master in context.masters]
    result = train_step(context, [random_micro(2)], 2, StepSettings(1e-2))
    assert result.skipped
    assert scaler.get_scale() == 2.0**29
    assert all(torch.equal(master, old) for master, old in zip(context.masters, before, strict=True))
    calm = with_scale(context, 2.0**4)
    assert not train_step(calm, [random_micro(2)], 2, StepSettings(1e-2)).skipped
    assert any(not torch.equal(master, old) for master, old in zip(calm.masters, before, strict=True))


def with_scale(context: StepContext, scale: float) -> StepContext:
    return dataclasses.replace(context, scaler=torch.amp.GradScaler("cpu", init_scale=scale))
