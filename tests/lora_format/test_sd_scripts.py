"""sd-scripts' own results for LoKr, LoHa and OFT: each change that this program reads is the same there, with alpha unlike rank.

`sd_scripts.safetensors` has random tensors of the modules of `networks/lokr.py`, `loha.py` (with and without a Tucker core) and `oft.py` at
commit aff4a2e7 (15 February 2026, branch feat-support-lokr-loha), and the change of a layer's weight that they compute.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.reading import read_adapter

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


def test_its_oft_files_are_read_by_their_own_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.safetensors"
    tensors = written(next(name for name in CASES if name.startswith("oft")), path, "oft_unet")
    ((name, update),) = read_adapter(path).modules.items()
    assert name == "unet.mid_block.attentions.0.proj_in"
    found = update.delta(tensors["weight"]).reshape(tensors["change"].shape)
    assert float((found - tensors["change"]).norm() / tensors["change"].norm()) < 1e-5
    assert main(["inspect", str(path), "--json"]) == 0
    reads = {each["name"]: each["reads"] for each in json.loads(capsys.readouterr().out)["clients"]}
    assert (reads["ComfyUI"], reads["sd-scripts"]) == ("not", "whole")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"alpha": torch.tensor(0.0)}, "by an alpha of 0 sd-scripts' OFT turns nothing"),
        ({"oft_blocks.0": torch.zeros(2, 4, 4)}, "for the parts of a fused layer"),
    ],
)
def test_its_oft_files_with_another_meaning_are_refused(
    changed: dict[str, torch.Tensor], reason: str, tmp_path: Path
) -> None:
    """An alpha of 0 means no bound in LyCORIS; networks.oft_flux divides fused layers."""
    tensors = {"oft_blocks": torch.randn(2, 4, 4), "alpha": torch.tensor(0.1)} | changed
    save_file({f"oft_unet_{LAYER}.{end}": each for end, each in tensors.items()}, tmp_path / "theirs.safetensors")
    with pytest.raises(UsageError) as refused:
        read_adapter(tmp_path / "theirs.safetensors")
    assert reason in str(refused.value)
