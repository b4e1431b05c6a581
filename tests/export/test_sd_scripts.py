"""sd-scripts' own results for LoKr, LoHa and OFT: each change that this program reads is the same there, with alpha unlike rank.

`sd_scripts.safetensors` has random tensors of the modules of `networks/lokr.py`, `loha.py` (with and without a Tucker core) and `oft.py` at
commit aff4a2e7 (15 February 2026, branch feat-support-lokr-loha), and the change of a layer's weight that they compute.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.core.errors import UsageError
from lora_trainer.export.lora_file import read_adapter

GOLDEN = load_file(Path(__file__).with_name("sd_scripts.safetensors"))
CASES = sorted({key.partition("/")[0] for key in GOLDEN})
LAYER = "mid_block_attentions_0_proj_in"


def written(name: str, path: Path, prefix: str = "lora_unet") -> dict[str, torch.Tensor]:
    """Write a case's tensors as a file of one layer; all of the case."""
    tensors = {key.partition("/")[2]: each for key, each in GOLDEN.items() if key.partition("/")[0] == name}
    own = {end: each for end, each in tensors.items() if end not in ("weight", "change")}
    save_file({f"{prefix}_{LAYER}.{end}": each for end, each in own.items()}, path)
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_that_of_sd_scripts(name: str, tmp_path: Path) -> None:
    tensors = written(name, tmp_path / "theirs.safetensors")
    (update,) = read_adapter(tmp_path / "theirs.safetensors").modules.values()
    found = update.delta(tensors.get("weight")).reshape(tensors["change"].shape)
    assert float((found - tensors["change"]).norm() / tensors["change"].norm()) < 1e-5


def test_names_of_its_oft_files_are_refused(tmp_path: Path) -> None:
    written(next(name for name in CASES if name.startswith("oft")), tmp_path / "theirs.safetensors", "oft_unet")
    with pytest.raises(UsageError, match="oft_unet"):
        read_adapter(tmp_path / "theirs.safetensors")
