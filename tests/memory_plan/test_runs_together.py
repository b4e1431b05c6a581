"""The memory of several runs on one base model."""

from __future__ import annotations

import json

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.memory_plan.estimate import parts_of, runs_together
from lora_trainer.run.plans.plan import Plan, make_plan


def plan_of(family: str, preset: str, **train: object) -> Plan:
    user = Layer("--set", {"model": {"family": family}, "train": train})
    return make_plan(resolve([*preset_layers([preset]).layers, user]))


@pytest.mark.parametrize(("family", "preset"), [("sd15", "16gb"), ("sdxl", "24gb"), ("flux", "24gb")])
def test_weights_are_held_once_and_all_else_by_each_run(family: str, preset: str) -> None:
    plan = plan_of(family, preset, max_micro_batch_size=1, effective_batch_size=1)
    demand, fit = plan.demand, plan.fit
    alone = fit.parts
    assert runs_together(demand, fit, 1)[0].parts == alone
    for runs in (2, 4):
        found = parts_of(demand, runs * fit.micro, fit.checkpointed, fit.precision, fit.swapped, runs)
        assert found.weights == alone.weights
        assert found.optimizer == pytest.approx(runs * alone.optimizer, rel=0.01)  # 8-bit states have blocks
        assert found.adapter == pytest.approx(runs * alone.adapter)
        assert alone.activations < found.activations <= runs * alone.activations * 1.01
        assert found.tflop == pytest.approx(runs * alone.tflop, rel=0.01)


def test_fewer_runs_share_a_pass_where_more_do_not_fit() -> None:
    plan = plan_of("sdxl", "24gb", max_micro_batch_size=1, effective_batch_size=1)
    found = plan.together(16)
    assert [each.runs for each in found] == [1, 2, 4, 8, 16]
    shares = [each.in_a_pass for each in found]
    assert shares[:2] == [1, 2]
    assert shares[-1] < 16
    limit = 0.9 * (plan.demand.limit_gib or 0.0)
    assert all(each.parts.peak <= limit for each in found if each.in_a_pass)


def test_the_command_names_how_many_are_worth_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--preset", "16gb", "--set", "model.family=sd15", "--set", "train.max_micro_batch_size=1"]
    assert main([*arguments, "--together", "4"]) == 0
    assert "--together 4: all of them share a pass." in capsys.readouterr().out
    assert main([*arguments, "--together", "4", "--json"]) == 0
    assert [each["in_a_pass"] for each in json.loads(capsys.readouterr().out)["together"]] == [1, 2, 4]
    assert main([*arguments, "--together", "2", "--set", "lora.dropout=0.1"]) == 0
    assert "batch --together trains such a run alone: lora.dropout" in capsys.readouterr().err
    assert main([*arguments, "--together", "0"]) == 2
    assert "--together is 0, must be at least 1" in capsys.readouterr().err
