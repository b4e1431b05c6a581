"""What somebody adds to the trainer: each kind in one place, trained, resumed and planned by the real command."""

from __future__ import annotations

import math

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.diffusion.loss import WEIGHTINGS
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
