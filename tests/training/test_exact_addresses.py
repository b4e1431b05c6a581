"""The same bytes wherever a model's weights start in a file, and so in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lora_trainer.training.torch_settings import rounds_alike_anywhere
from tests.training.tiny_run import TinyPlace, outcome

pytestmark = pytest.mark.exact
ALIGNED = 64  # bytes: CPU kernels may depend on this alignment
SAMPLED = (8, 40)  # in every suite; a header is mostly padded to a multiple of 8
COMPONENTS = ("unet", "text_encoder", "vae")


def moved_weights(model: Path, into: Path, offset: int) -> Path:
    """The same model, with the tensors of each file `offset` bytes after a multiple of 64."""
    shutil.copytree(model, into)
    for file in (next((into / part).glob("*.safetensors")) for part in COMPONENTS):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length].rstrip(b" ")
        padded = header + b" " * ((offset - 8 - len(header)) % ALIGNED)
        assert (8 + len(padded)) % ALIGNED == offset
        file.write_bytes(len(padded).to_bytes(8, "little") + padded + content[8 + length :])
    return into


def trained(place: TinyPlace, tmp_path: Path, offset: int) -> object:
    """The outcome of a two-step run with new caches and moved weights."""
    model = moved_weights(place.model, tmp_path / f"model_{offset}", offset)
    other = TinyPlace(model, place.data, tmp_path / f"runs_{offset}", tmp_path / f"cache_{offset}")
    run = other.run("run", steps=2, validation__every_n_steps=2)
    other.train(run)
    return outcome(run)


@pytest.mark.parametrize(
    "offset", [pytest.param(n, marks=() if n in SAMPLED else pytest.mark.slow) for n in range(1, ALIGNED)]
)
def test_memory_addresses_of_the_weights_change_no_run(place, tmp_path, offset) -> None:
    assert trained(place, tmp_path, offset) == trained(place, tmp_path, 0)


def test_memory_addresses_change_no_matmul() -> None:
    """MKL's kernels depend on addresses for small matmuls. The package's own probe agrees."""
    assert rounds_alike_anywhere()
    memory = torch.empty(2**18, dtype=torch.uint8)
    first = -memory.data_ptr() % ALIGNED

    def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
        view = memory[first + offset :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return view.copy_(tensor)

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for rows in (1, 2, 3, 4, 77):
            for inner, outer in ((32, 32), (48, 20), (320, 40)):
                x = torch.randn(rows, inner, generator=generator, dtype=dtype)
                weight = torch.randn(outer, inner, generator=generator, dtype=dtype)
                expected = torch.nn.functional.linear(x, weight)
                for offset in range(0, ALIGNED, weight.element_size()):
                    assert torch.equal(torch.nn.functional.linear(x, moved(weight, offset)), expected)
                    assert torch.equal(torch.nn.functional.linear(moved(x, offset), weight), expected)
