"""Families with a transformer: predictions, adapted layers, checkpointed blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.diffusion.process import Process, flow_signal, usual_process
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.flux import predict as flux_predict
from lora_trainer.models.family import Family
from lora_trainer.models.memory.checkpointing import checkpoint_blocks, checkpointable_blocks, checkpointed_blocks
from lora_trainer.models.published import public_architecture

SMALL = {
    "sd3": {
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 12,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 20,
        "pos_embed_max_size": 16,
        "sample_size": 16,
        "dual_attention_layers": [0],
    },
    "flux": {
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 12,
        "pooled_projection_dim": 20,
        "axes_dims_rope": [2, 2, 4],
    },
}


def small(name: str) -> tuple[Family, torch.nn.Module, dict[str, Tensor]]:
    config = {**public_architecture(name).denoiser, **SMALL[name]}
    torch.manual_seed(0)
    shapes = FAMILIES[name].text.cond_shapes(config)
    cond = {key: torch.randn(2, *shape) for key, shape in shapes.items()}
    return FAMILIES[name], FAMILIES[name].denoiser.make(config), cond


@pytest.mark.parametrize("name", SMALL)
def test_latents_keep_their_shape(name):
    family, denoiser, cond = small(name)
    noisy, t = torch.randn(2, 16, 8, 12), torch.tensor([0, 999])
    with torch.no_grad():
        velocity = family.denoiser.predict(denoiser, noisy, t, cond, torch.zeros(2, 6))
        other = family.denoiser.predict(denoiser, noisy, t.flip(0), cond, torch.zeros(2, 6))
    assert velocity.shape == noisy.shape
    assert not torch.allclose(velocity, other)


@pytest.mark.parametrize("name", SMALL)
def test_times_are_embedded_in_fp32(name):
    """FluxTransformer2DModel by itself embeds 500 different times of the 1000 in bf16, up to 3 timesteps off."""
    family, denoiser, cond = small(name)
    embedded: list[Tensor] = []
    denoiser.time_text_embed.time_proj.register_forward_hook(lambda _, args, result: embedded.append(result[0]))
    cond = {key: value[:1].bfloat16() for key, value in cond.items()}
    denoiser.to(torch.bfloat16)
    for t in range(990, 1000):
        with torch.no_grad():
            noisy = torch.zeros(1, 16, 4, 4, dtype=torch.bfloat16)
            family.denoiser.predict(denoiser, noisy, torch.tensor([t]), cond, torch.zeros(1, 6))
    times = embedded[:: len(embedded) // 10]  # FLUX.1 dev embeds its guidance too
    exact = denoiser.time_text_embed.time_proj(torch.arange(991.0, 1001.0))
    assert torch.equal(torch.stack(times), exact)
    rounded = (torch.arange(1, 1001) / 1000).bfloat16() * 1000
    assert (rounded.float() - torch.arange(1, 1001)).abs().max() == 3.0
    assert (denoiser.time_text_embed.time_proj(rounded[990:]) - exact).abs().max() > 1.0


class Echo(torch.nn.Module):
    """Returns its tokens and keeps its other inputs."""

    time_text_embed = torch.nn.Identity()

    def forward(self, packed, embeds, pooled, t, places, text_places, guidance, return_dict):
        self.received = (t, places, guidance)
        return (packed,)


def test_flux_packs_neighbors_as_diffusers_does():
    from diffusers import FluxPipeline

    echo = Echo()
    echo.config = type("Config", (), {"guidance_embeds": True})()
    noisy = torch.randn(2, 16, 8, 12)
    cond = {"embeds": torch.zeros(2, 5, 12), "pooled": torch.zeros(2, 20)}
    assert torch.equal(flux_predict(echo, noisy, torch.tensor([0, 999]), cond, torch.zeros(2, 6)), noisy)
    t, places, guidance = echo.received
    assert t.tolist() == pytest.approx([0.001, 1.0])
    assert torch.equal(places, FluxPipeline._prepare_latent_image_ids(2, 4, 6, torch.device("cpu"), torch.float32))
    assert guidance.tolist() == [1.0, 1.0]
    packed = FluxPipeline._pack_latents(noisy, 2, 16, 8, 12)
    keeping = replace_forward(echo)
    flux_predict(echo, noisy, torch.tensor([0, 999]), cond, torch.zeros(2, 6))
    assert torch.equal(keeping[0], packed)


def replace_forward(echo: Echo) -> list[Tensor]:
    seen: list[Tensor] = []
    echo.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    return seen


@pytest.mark.parametrize("name", SMALL)
def test_the_lora_trains_both_streams(name):
    family, denoiser, cond = small(name)
    attention = target_modules(denoiser, family.denoiser, "attention")
    both = target_modules(denoiser, family.denoiser, "attention+ff")
    endings = {each.rpartition(".attn.")[2] for each in attention}
    assert {"to_q", "to_out.0", "add_k_proj", "to_add_out"} <= endings
    assert set(attention) < set(both)
    assert any("ff_context" in each for each in both)
    parameters = inject_lora(denoiser.requires_grad_(False), both, AdapterOptions(2, 2.0), 0)
    family.denoiser.predict(
        denoiser, torch.randn(2, 16, 8, 8), torch.tensor([1, 2]), cond, torch.zeros(2, 6)
    ).sum().backward()
    assert all(parameter.grad.any() for key, parameter in parameters.items() if "lora_B" in key)


def test_the_lora_trains_the_whole_single_blocks_of_flux_with_feed_forward():
    family, denoiser, _ = small("flux")
    single = {
        targets: {
            name.split(".", 2)[2] for name in target_modules(denoiser, family.denoiser, targets) if "single" in name
        }
        for targets in ("attention", "attention+ff")
    }
    assert single["attention"] == {"attn.to_q", "attn.to_k", "attn.to_v"}
    assert single["attention+ff"] == single["attention"] | {"proj_mlp", "proj_out"}
    assert "proj_out" not in target_modules(denoiser, family.denoiser, "attention+ff"), "the model's own output"


@pytest.mark.parametrize("name", SMALL)
def test_checkpointing_counts_blocks_and_changes_nothing(name):
    family, denoiser, cond = small(name)
    names = target_modules(denoiser, family.denoiser, "attention")
    parameters = inject_lora(denoiser.requires_grad_(False), names, AdapterOptions(2, 2.0), 0)
    denoiser.train()
    blocks = checkpointable_blocks(denoiser)
    assert len(blocks) == sum(SMALL[name].get(key, 0) for key in ("num_layers", "num_single_layers"))
    noisy, found = torch.randn(2, 16, 8, 8), []
    for count in (0, 2, len(blocks)):
        checkpoint_blocks(denoiser, count)
        assert checkpointed_blocks(denoiser) == count
        assert len(checkpointable_blocks(denoiser)) == len(blocks)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found[-1].append(1) or tensor, lambda kept: kept):
            found.append([])
            out = family.denoiser.predict(denoiser, noisy, torch.tensor([1, 2]), cond, torch.zeros(2, 6))
        out.square().sum().backward()
        gradients = {key: parameter.grad for key, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        if count == 0:
            expected = gradients
        assert all(torch.equal(gradients[key], value) for key, value in expected.items())
    assert len(found[0]) > len(found[1]) > len(found[2])


@pytest.mark.parametrize("name", SMALL)
def test_a_tiny_model_has_few_blocks_of_each_type(name):
    config = public_architecture(name).denoiser
    with torch.device("meta"):
        whole, thin = (FAMILIES[name].denoiser.make(each) for each in (config, FAMILIES[name].denoiser.thin(config)))
    kinds = [Counter(type(block).__name__ for block in checkpointable_blocks(model)) for model in (whole, thin)]
    assert kinds[0].keys() == kinds[1].keys()
    assert all(kinds[1][kind] <= count / 6 for kind, count in kinds[0].items())
    weights = [sum(parameter.numel() for parameter in model.parameters()) for model in (whole, thin)]
    assert weights[1] < 0.01 * weights[0]


def test_a_flow_goes_straight_from_latents_to_noise():
    process = usual_process("flow")
    latents, noise = torch.randn(2, 16, 4, 4), torch.randn(2, 16, 4, 4)
    t = torch.tensor([249, 999])
    noisy = process.add_noise(latents, noise, t)
    share = torch.tensor([0.25, 1.0]).view(-1, 1, 1, 1)
    assert torch.allclose(noisy, (1 - share) * latents + share * noise)
    assert torch.allclose(noisy - share * process.target(latents, noise, t), latents, atol=1e-5)
    assert process.timesteps == len(flow_signal(1000)) == 1000
    with pytest.raises(ValueError, match="signal-to-noise"):
        process.snr(t)
    assert isinstance(replace(process, prediction="epsilon"), Process)
