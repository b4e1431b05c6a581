"""The plan of a custom model, fp8 weights in a real run, and GPU choices tested without a GPU."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from lora_trainer.config.layers import Layer
from lora_trainer.config.presets import preset_layers
from lora_trainer.core.errors import UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.published import public_architecture
from lora_trainer.run.choices import Choice, planned_choices
from lora_trainer.run.file_sizes import CHECKPOINT_HEAD, NAMED, STATE_OF, cache_bytes, run_bytes
from lora_trainer.run.plans.plan import architecture_of, make_demand, make_plan, planned_data
from lora_trainer.run.settings import settle
from tests.recipes.recipe import Bench, exported, losses, record

GPU = torch.device("cuda")


def test_a_custom_model_is_traced_once_and_cached(bench: Bench, capsys, monkeypatch):
    arguments = bench.arguments("planned", "--json", command="plan", memory__weight_dtype=None)
    from lora_trainer.cli.main import main

    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["predicted_from"] == "traced on this model"
    assert (first["steps"], first["resolution"]) == (6, 64)
    assert first["peak_gib"] > first["activations_gib"] > 0.0

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("lora_trainer.memory_plan.trace.make_subject", refuse)
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_images_that_training_refuses_are_noted(bench: Bench, capsys):
    from lora_trainer.cli.main import main

    for settings, is_traced in (({}, False), ({"data__resolution": 512}, True)):
        assert main(bench.arguments("planned", command="plan", **settings)) == 0
        output = capsys.readouterr().out
        assert ("10 of 10 images would be enlarged" in output) == is_traced
        assert "as in published models of its family" in output


def test_settings_are_traced_only_when_requested(bench: Bench, capsys, monkeypatch):
    """A trace of a large model takes seconds: a plan takes no more traces than it needs."""
    from lora_trainer.memory_plan import memory_model

    traced, true = [], memory_model.traced_footprint
    monkeypatch.setattr(memory_model, "traced_footprint", lambda *args: traced.append(args) or true(*args))
    settings = {"memory__weight_dtype": None, "lora__rank": 6, "memory__limit_gib": 24.0}
    assert bench.run("planned", "--json", command="plan", **settings) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == []
    assert len(traced) == 1
    assert bench.run("planned", "--json", "--what-if", command="plan", **settings) == 0
    bought = {row["setting"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert {"memory.offload_activations=true", "memory.gradient_checkpointing=true", "lora.rank=3"} <= set(bought)
    assert len(traced) > 5


def bytes_in(folder: Path, *endings: str) -> int:
    """The size of the files in a folder, of all or of the named ones."""
    return sum(
        each.stat().st_size
        for each in folder.rglob("*")
        if each.is_file() and (not endings or each.name.endswith(endings))
    )


@pytest.mark.parametrize("latents", ["true", "false", "bf16"])
def test_the_disk_space_of_a_run_is_planned(bench: Bench, tmp_path, latents):
    """Caches within 5 %, never too small. The run folder briefly holds one checkpoint more than at the end."""
    settings = {"cache__dir": tmp_path / "cache", "cache__latents": latents, "lora__rank": 16}
    if latents == "bf16":  # the LoRA too, with an average
        settings |= {"cache__latents": "true", "cache__latents_dtype": "bf16", "memory__weight_dtype": "bf16"}
        settings |= {"optimizer__stochastic_rounding": "true", "train__swa_start": 2, "train__swa_every_n_steps": 1}
    settings |= {"checkpoint__every_n_steps": 2, "checkpoint__keep_last": 2, "data__flip": "true"}
    settings |= {"captions__variants": 3, "captions__shuffle": "true"}
    assert bench.run("written", **settings) == 0
    folder = bench.folder("written")
    resolved = settle([], [Layer("written", tomllib.loads((folder / "config.toml").read_text("utf-8")))])
    config = resolved.config
    family, architecture = architecture_of(config, FAMILIES)
    cached, there = (
        cache_bytes(config, family, architecture, *planned_data(config, architecture.facts)),
        bytes_in(tmp_path / "cache"),
    )
    assert there <= cached <= 1.05 * there
    shapes = make_demand(resolved, family, architecture, None).memory_model.shapes(16)
    needed, left = run_bytes(config, shapes, 6), bytes_in(folder, ".safetensors", ".jsonl", "state.json")
    one_more = bytes_in(folder / "checkpoints" / "step-000006")
    names = 4 * (CHECKPOINT_HEAD + (5 * NAMED + 3 * STATE_OF) * len(shapes))  # of three checkpoints and all else
    assert left <= needed <= left + one_more + names
    assert needed >= left + one_more, "there was a third while it was written"
    plan = make_plan(resolved)
    assert plan.disk_gib * 2**30 == pytest.approx(cached + needed)


def test_a_dry_run_shows_the_memory_plan(bench: Bench, capsys):
    """Without a GPU in one line, and only if a limit is set."""
    assert bench.run("dry", "--dry-run") == 0
    assert "memory on a GPU" not in capsys.readouterr().out
    assert bench.run("dry", "--dry-run", memory__limit_gib=12.0) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "memory on a GPU" in line]
    assert "GiB of 12" in line


def test_fp8_weights_resume_exactly_and_are_evaluated_on_the_base_model(bench: Bench):
    settings = {"memory__weight_dtype": "fp8", "checkpoint__every_n_steps": 2, "memory__gradient_checkpointing": "true"}
    assert bench.run("narrow", steps=4, gates__lora_check="lite", **settings) == 0
    straight = bench.folder("narrow")
    document = record(straight)
    assert "precision: fp8 (as set)" in document["choices"]
    assert document["lora"]["parts"]["works"]["value"] == 1.0
    before, numbers = exported(straight), losses(straight)
    resumed = shutil.copytree(straight, bench.output / "narrow-again")
    shutil.rmtree(resumed / "checkpoints" / "step-000004")
    (resumed / "run.json").write_text('{"status": "stopped", "steps": 2}', encoding="utf-8")
    assert bench.run("narrow-again", "--resume", steps=4, **settings) == 0
    assert losses(resumed)[2:] == numbers[2:]
    assert exported(resumed) == before


def demand_on_a_gpu(limit: float, **memory: object):
    values = {"model": {"family": "sdxl"}, "memory": {"limit_gib": limit, **memory}}
    resolved = settle(preset_layers(["8gb"]).layers, [Layer("--set", values)], builtin_if_none=False)
    family, architecture = architecture_of(resolved.config, FAMILIES)
    assert architecture == public_architecture("sdxl")
    return make_demand(resolved, family, architecture, limit, precision="bf16")


@pytest.mark.parametrize(
    ("limit", "precision", "dtype"), [(24.0, "bf16", torch.bfloat16), (5.0, "fp8", torch.bfloat16)]
)
def test_a_gpu_decides_precision_and_checkpointing(limit, precision, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    found = planned_choices(demand_on_a_gpu(limit), Choice("bf16", "the preset's"), GPU)
    assert (found.layout.stored, found.layout.dtype, found.layout.narrow) == (precision, dtype, precision == "fp8")
    assert f"of {limit:.1f}" in found.lines[0]
    assert (found.checkpointing == 0) == (limit == 24.0)


def test_a_gpu_refuses_settings_that_do_not_fit():
    with pytest.raises(UsageError, match=r"memory\.gradient_checkpointing=auto"):
        planned_choices(
            demand_on_a_gpu(6.0, gradient_checkpointing=False, blocks_to_swap=0), Choice("bf16", "the preset's"), GPU
        )
