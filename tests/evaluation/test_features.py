"""What the base model sees in latents: one description of an image, whatever is described with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Identity

from lora_trainer.evaluation.features import as_image, image_features
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import FeatureBlock
from tests.export.tiny import tiny_pipeline

CPU = torch.device("cpu")
GRIDS = {"middle": 1, "after": 9, "latents": 16}  # cells


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_describes_an_image_the_same_whatever_the_batch(name: str, tmp_path: Path) -> None:
    family, base = FAMILIES[name], tmp_path / "base"
    tiny_pipeline(tmp_path / "tokenizer", name).save_pretrained(base)
    denoiser = family.denoiser.load(base, torch.float32, CPU)
    generator = torch.Generator().manual_seed(4)
    shapes = family.text.cond_shapes(denoiser.config)  # type: ignore[arg-type]
    cond = {key: torch.randn(1, *shape, generator=generator) for key, shape in shapes.items()}
    channels = family.describe(base).latent_channels
    images = [
        (torch.randn(channels, height, width, generator=generator), torch.tensor([64.0, 64, 0, 0, 64, 64]))
        for height, width in ((8, 8), (8, 8), (16, 8))
    ]
    blocks, process = family.denoiser.features(denoiser), family.denoiser.make_process(base)

    def described(chosen: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return image_features(
            lambda *arguments: family.denoiser.predict(denoiser, *arguments), process, chosen, cond, blocks
        )

    together, alone = described(images), [described([image]) for image in reversed(images)][::-1]
    assert set(together) == set(GRIDS)
    for block, features in together.items():
        assert features.shape[0] == 3
        assert features.shape[1] % GRIDS[block] == 0
        assert torch.isfinite(features).all()
        assert torch.equal(features, torch.cat([each[block] for each in alone]))
        assert not torch.allclose(features[0], features[1])
    assert together["latents"].shape[1] == channels * GRIDS["latents"]


def test_tokens_of_an_image_become_rows_and_columns_and_those_of_a_caption_are_left_out() -> None:
    image = torch.arange(2 * 3 * 5.0).reshape(1, 5, 2, 3)
    tokens = torch.cat([image.flatten(2).transpose(1, 2), torch.full((1, 4, 5), -1.0)], dim=1)
    assert torch.equal(as_image(tokens, 4, 6, FeatureBlock(Identity(), 1, 2)), image)
    last = FeatureBlock(Identity(), 1, 2, text_first=True)
    assert torch.equal(as_image(tokens.flip(1), 4, 6, last), image.flip(2, 3))
    assert as_image(image, 4, 6, last) is image
