"""The autoencoder of the built-in base: how its latents are centered."""

from __future__ import annotations

import pytest
import torch

from builtin_base import architecture
from builtin_base.train_vae import center_latents


def test_centering_the_latents_changes_no_image() -> None:
    torch.manual_seed(0)
    vae = architecture.make_vae().eval().requires_grad_(False)
    pixels = torch.rand(2, 3, 32, 32) * 2 - 1
    before = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
    latents = vae.encode(pixels).latent_dist.mode() + 3.0
    center_latents(vae, latents - 3.0)
    found = vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(vae.decode(found).sample, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.mean((0, 2, 3)), torch.zeros(architecture.LATENT_CHANNELS), atol=1e-4, rtol=0)
    assert float(found.std()) * vae.config.scaling_factor == pytest.approx(1.0, abs=1e-3)
