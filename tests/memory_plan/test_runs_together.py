"""The memory of several runs on one base model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.memory_plan.estimate import GIB, Demand, parts_of, runs_together
from lora_trainer.memory_plan.memory_model import traced_memory_model
from lora_trainer.memory_plan.profiles import stored_memory_model
from lora_trainer.memory_plan.trace import META, Account, Subject, _micro_batch, _step_context, make_subject, trace
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.published import public_architecture
from lora_trainer.run.plans.plan import Plan, make_plan
from lora_trainer.training.run_group import Member, RunGroup
from lora_trainer.training.step import backward


def plan_of(family: str, preset: str, **train: object) -> Plan:
    user = Layer("--set", {"model": {"family": family}, "lora": {"rank": 32}, "train": train})
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


def traced_together(subjects: list[Subject], side: int, checkpointed: int) -> float:
    """GiB at the peak of a joined step of these runs, one sample of side x side latents each, on tensors without data."""
    first, group = subjects[0], RunGroup(len(subjects))
    checkpoint_blocks(first.denoiser, checkpointed)
    account = Account(first.results)
    for tensor in (*first.denoiser.parameters(), *first.denoiser.buffers()):
        account.follow(tensor)

    def work(member: Member) -> None:
        subject = subjects[int(member.name)]
        for copy in subject.adapter.copies.values():
            account.follow(copy)
        with META:
            context = replace(_step_context(subject), adapter=subject.adapter)
            context = member.join(context, ("bf16",), lambda line: None)
            backward(context, _micro_batch(subject, 1, side, side).to(META, subject.dtype), 1)

    with META, account:
        group.run({str(number): work for number in range(len(subjects))})
    assert group.passes == 1
    assert all(master.grad is not None for subject in subjects for master in subject.adapter.masters.values())
    return account.most / GIB


def agrees(family: str, side: int, blocks: tuple[int, ...], tmp_path: Path, *, thin: bool) -> None:
    """The plan of 1, 2 and 4 runs beside traces of their joined steps. Of a lone run also the trace of its own step."""
    made, architecture, rank = FAMILIES[family], public_architecture(family), 16
    if thin:
        architecture = replace(architecture, denoiser=made.denoiser.thin(architecture.denoiser))
    stored = None if thin else stored_memory_model(architecture, "attention")
    demand = Demand(
        memory_model=stored or traced_memory_model(made, architecture, "attention", tmp_path, rank),
        rank=rank,
        resolution=side * architecture.facts.downscale,
        downscale=architecture.facts.downscale,
        pixel_step=architecture.facts.pixel_step,
        samples=1,
        max_micro=1,
        checkpointing=0,
        precisions=("bf16",),
        optimizer="adamw",
        averaged=False,
        limit_gib=None,
    )
    for checkpointed in blocks:
        for runs in (1, 2, 4):
            subjects = [
                make_subject(made, architecture, rank=rank, targets="attention", dtype=torch.bfloat16)
                for _ in range(runs)
            ]
            parts = parts_of(demand, runs, checkpointed, "bf16", runs=runs)
            masters = sum(4 * subject.adapter.size for subject in subjects) / GIB
            found = traced_together(subjects, side, checkpointed)
            assert parts.weights + parts.adapter + parts.activations - masters == pytest.approx(found, rel=0.02)
            if runs == 1:
                alone = trace(subjects[0], micro=1, height=side, width=side, checkpointed=checkpointed)
                assert found == pytest.approx((alone.weights + alone.copies + alone.peak) / GIB, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "thin", "blocks"),
    [
        ("flux", True, (0,)),
        pytest.param("flux", True, (3,), marks=pytest.mark.slow),
        pytest.param("sd15", False, (0, 25), marks=pytest.mark.slow),
        pytest.param("sdxl", False, (0, 18), marks=pytest.mark.slow),
    ],
)
def test_the_plan_is_what_a_trace_of_a_joined_step_finds(
    family: str, thin: bool, blocks: tuple[int, ...], tmp_path: Path
) -> None:
    agrees(family, 64, blocks, tmp_path, thin=thin)


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
