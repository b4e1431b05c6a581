"""What somebody adds to the trainer: each kind in one place, trained, resumed and planned by the real command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer.adapters.base import ADAPTERS, AdapterKind, AdapterOptions, AdapterSpec
from lora_trainer.cli.main import main
from lora_trainer.diffusion.loss import WEIGHTINGS
from lora_trainer.export.lora_file import plain_forms
from lora_trainer.export.weights import module_name
from lora_trainer.optim.optimizers import OPTIMIZERS, OptimizerSpec
from tests.recipes.recipe import Bench, exported, losses


def momentum(groups, config):
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1)


def test_an_optimizer_is_one_entry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = OptimizerSpec(momentum, state=lambda shape: [4 * math.prod(shape)])
    monkeypatch.setitem(OPTIMIZERS, "momentum", spec)
    settings = {"optimizer__name": "momentum", "optimizer__learning_rate": 1e-2, "checkpoint__every_n_steps": 2}
    assert bench.run("straight", steps=4, **settings) == 0
    assert bench.run("resumed", steps=2, **settings) == 0
    assert bench.run("resumed", "--resume", steps=4, **settings) == 0
    assert exported(bench.folder("resumed")) == exported(bench.folder("straight"))
    assert len(set(losses(bench.folder("straight")))) == 4
    capsys.readouterr()
    assert main(bench.arguments("planned", command="plan", optimizer__name="momentum")) == 0
    assert bench.run("wrong", optimizer__name="momentun") == 2
    assert "Did you mean momentum?" in capsys.readouterr().err


def test_a_weighting_is_one_entry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHTINGS, "late", lambda config, process: lambda t: (t > 500).float() + 1.0)
    assert bench.run("plain", steps=3) == 0
    assert bench.run("late", steps=3, loss__weighting="late") == 0
    plain, late = losses(bench.folder("plain")), losses(bench.folder("late"))
    assert 1.0 <= late[0] / plain[0] <= 2.0
    assert late != plain


class Kronecker(nn.Module):
    """A layer whose weight changes by a Kronecker product: of full rank, unlike a LoRA."""

    def __init__(self, layer: nn.Linear, sides: tuple[int, int]) -> None:
        super().__init__()
        self.base_layer = layer
        rows, columns = sides
        out, width = layer.weight.shape
        self.left = nn.Parameter(torch.zeros(rows, columns))
        self.right = nn.Parameter(torch.randn(out // rows, width // columns))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer(x)
        return base + nn.functional.linear(x.to(self.left.dtype), torch.kron(self.left, self.right)).to(base.dtype)


@dataclass(frozen=True)
class KroneckerUpdate:
    left: Tensor
    right: Tensor

    @property
    def finite(self) -> bool:
        return bool(self.left.isfinite().all() and self.right.isfinite().all())

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return tuple(a * b for a, b in zip(self.left.shape, self.right.shape, strict=True))

    def delta(self) -> Tensor:
        return torch.kron(self.left.float(), self.right.float())

    def rounded(self, dtype: torch.dtype) -> KroneckerUpdate:
        return KroneckerUpdate(*(each.detach().cpu().to(dtype).contiguous() for each in (self.left, self.right)))

    def parts(self) -> Mapping[str, Tensor]:
        return {"lokr_w1": self.left, "lokr_w2": self.right}


def put_kronecker(
    model: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int
) -> dict[str, nn.Parameter]:
    found = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in modules:
            layer = model.get_submodule(name)
            adapted = Kronecker(layer, (2, 2))
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, adapted)
            found |= {f"{name}.left": adapted.left, f"{name}.right": adapted.right}
    return found


def kronecker_updates(
    trained: Mapping[str, Tensor], component: str, options: AdapterOptions
) -> dict[str, KroneckerUpdate]:
    names = [name.removesuffix(".left") for name in trained if name.endswith(".left")]
    return {
        module_name(component, name): KroneckerUpdate(trained[f"{name}.left"], trained[f"{name}.right"])
        for name in names
    }


KRONECKER = AdapterKind(put_kronecker, kronecker_updates, plain_forms)


def test_an_adapter_is_one_entry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a low-rank product: trained, resumed, planned and exported in both forms."""
    monkeypatch.setitem(ADAPTERS, "kronecker", AdapterSpec(lambda: KRONECKER))
    settings = {"lora__type": "kronecker", "checkpoint__every_n_steps": 2, "optimizer__learning_rate": 1e-3}
    assert bench.run("straight", steps=4, **settings) == 0
    assert bench.run("resumed", steps=2, **settings) == 0
    assert bench.run("resumed", "--resume", steps=4, **settings) == 0
    files = exported(bench.folder("straight"))
    assert exported(bench.folder("resumed")) == files
    kohya = load_file(bench.folder("straight") / "straight.safetensors")
    left = [name for name in kohya if name.endswith(".lokr_w1")]
    assert left
    assert all(name.startswith("lora_unet_") for name in left)
    assert all(bool(kohya[name].any()) for name in left)
    change = KroneckerUpdate(kohya[left[0]], kohya[left[0].replace("lokr_w1", "lokr_w2")]).delta()
    assert torch.linalg.matrix_rank(change) == min(change.shape)
    assert {name.rpartition(".")[2] for name in files["diffusers"]} == {"lokr_w1", "lokr_w2"}
    capsys.readouterr()
    assert main(bench.arguments("planned", command="plan", lora__type="kronecker")) == 0
    assert "GiB" in capsys.readouterr().out
