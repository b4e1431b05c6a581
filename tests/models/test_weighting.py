"""Prompt weighting scales the embeddings of the weighted tokens and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Encoders
from lora_trainer.models.unet import load_tokenizer
from lora_trainer.models.weighting import read_tokens
from tests.lora_format.tiny import tiny_pipeline

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["sd15", "sdxl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    tiny_pipeline(root / "tokens", request.param).save_pretrained(root / request.param, safe_serialization=True)
    return root / request.param


@pytest.fixture(scope="module")
def encoders(folder: Path) -> Encoders:
    return FAMILIES[folder.name].load_encoders(folder, torch.float32, CPU)


def test_chunks_have_the_same_tokens_as_the_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, "text_encoder")
    text = "a red ring on a blue field, a ring, " * 9  # longer than the encoder reads
    for whole in ("a red ring on a blue field", "", text):
        words = tuple((part, 1.5) for part in whole.replace(" ", " \n").split("\n"))
        read = read_tokens(tokenizer, [whole, words], CPU)
        assert torch.equal(read.ids[0], read.ids[1])
        assert read.weights[0] is None
        assert read.weights[1] is not None
        assert read.weights[1].shape == read.ids[0].shape
        assert read.weights[1][0] == 1.0


def test_weights_scale_their_words_and_keep_the_mean(encoders: Encoders) -> None:
    weighted = (("a ", 1.0), ("red", 1.4), (" ring", 1.0))
    cond = encoders.encode_text(["a red ring", weighted, "a red ring", (("a red ring", 1.0),)])
    plain, heavy = cond["embeds"][0], cond["embeds"][1]
    assert torch.equal(cond["embeds"][2], plain)  # a neighbor in the batch changes nothing
    torch.testing.assert_close(cond["embeds"][3], plain)
    assert torch.equal(cond["embeds"][1], encoders.encode_text(["x", weighted])["embeds"][1])
    widths = (32, 24) if "pooled" in cond else (32,)
    for before, after in zip(plain.split(widths, dim=-1), heavy.split(widths, dim=-1), strict=True):
        torch.testing.assert_close(after.mean(), before.mean())
        ratio = (after / before).median(dim=-1).values  # one number per token
        assert not torch.allclose(ratio, torch.ones_like(ratio))
        others = ratio[[0, 1, 3, 4]]
        torch.testing.assert_close(others, others[:1].expand_as(others))
        torch.testing.assert_close(ratio[2] / ratio[0], torch.tensor(1.4))
    if "pooled" in cond:
        assert torch.equal(cond["pooled"][0], cond["pooled"][1])
