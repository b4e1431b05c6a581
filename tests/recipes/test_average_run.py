"""`average RUN`: the mean of the trained weights of a run's checkpoints, as a LoRA file with the run's header."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_adapter, read_lora
from lora_trainer.run.release import lora_weights
from lora_trainer.training.checkpoints.checkpoint import read_checkpoint
from tests.recipes.recipe import Bench, record


def test_a_runs_checkpoints_are_averaged(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, some by an EMA, and one that is damaged; the text encoder's LoRA as well."""
    settings: dict[str, object] = {
        "checkpoint__every_n_steps": 1,
        "checkpoint__keep_last": 10,
        "checkpoint__export_weights": "last",
        "text_encoder__learning_rates": "[0.001]",
        "gates__lora_check": "off",
    }
    assert bench.run("run", steps=4, **settings) == 0
    folder, out = bench.folder("run"), bench.output / "mean.safetensors"
    capsys.readouterr()
    command = ["average", str(folder / "checkpoints"), "--output", str(out), "--dtype", "fp32"]
    assert main([*command, "--steps", "2..", "--decay", "0.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["of"], document["steps"]) == ("parameters", [2, 3, 4])
    states = [read_checkpoint(folder / "checkpoints" / f"step-{step:06d}").adapter for step in (2, 3, 4)]
    exported, found = read_lora(folder / "run.safetensors"), read_lora(out)
    assert found.modules.keys() == exported.modules.keys()
    for name, pair in found.modules.items():
        component, _, rest = name.partition(".")
        keys = [
            key
            for key in states[0]
            if rest.removeprefix("text_model.") in key and ("text" in key) == (component != "unet")
        ]
        up, down = (next(key for key in keys if f".{half}." in key) for half in ("lora_B", "lora_A"))
        mean = {key: (states[0][key] + 2 * states[1][key] + 4 * states[2][key]) / 7 for key in (up, down)}
        scale = exported.modules[name].delta().norm() / (states[2][up].flatten(1) @ states[2][down].flatten(1)).norm()
        exact = (mean[up].flatten(1) @ mean[down].flatten(1) * scale).reshape(pair.delta().shape)
        assert float((pair.delta() - exact).norm() / exact.norm()) < 2e-3, name  # the exported file is fp16
        assert pair.rank == exported.modules[name].rank
    with safe_open(out, framework="numpy") as file:
        header = file.metadata()
    assert header["ss_steps"] == "4"
    assert "lora_trainer.ema_decay" in exported.metadata
    assert "lora_trainer.ema_decay" not in header  # of the run's own file
    assert header["ss_base_model_version"] == exported.metadata["ss_base_model_version"]
    assert json.loads(header["lora_trainer.origin"]) == {
        "command": "average",
        "files": [],
        "run": "run",
        "decay": 0.5,
        "of": "parameters",
        "steps": [2, 3, 4],
    }
    inside = (
        "checkpoints/step-000002/adapter.safetensors",
        "run.safetensors",
        "new.safetensors",
        "checkpoints/x.safetensors",
    )
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name in inside:  # by either name of the run, nothing is written into it
        for read in (folder, folder / "checkpoints"):
            assert main(["average", str(read), "--output", str(folder / name), "--overwrite"]) == 2, name
            assert "lies inside" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert main([*command, "--overwrite"]) == 0
    assert "of 4 checkpoints (steps 1, 2, 3, 4)" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--overwrite", "--steps", "4.."]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "holds 1 checkpoint" in error
    assert "Keep more with checkpoint.keep_last, or widen --steps." in error
    damaged = folder / "checkpoints" / "step-000003" / "adapter.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert main([*command, "--overwrite"]) == 2
    assert "step-000003 is damaged" in " ".join(capsys.readouterr().err.split())
    assert read_lora(out).modules  # of the command before
    for step in (1, 2, 3):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
    assert main([*command, "--overwrite"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "holds 1 checkpoint" in error
    assert "Keep more with checkpoint.keep_last." in error


@pytest.mark.parametrize("kind", ["dora", "lokr", "loha", "oft"])
def test_the_average_of_a_run_of_another_kind_is_the_one_that_training_exports(
    kind: str, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the parameters, as SWA does. It is nearer to the mean of the changes than the two states are."""
    settings = {
        "lora__type": kind,
        **({} if kind == "oft" else {"lora__alpha": 2.5}),
        "lora__target_modules": '["*.attn1.to_q","*.conv1"]',
        "checkpoint__every_n_steps": 1,
        "checkpoint__keep_last": 10,
        "checkpoint__export_weights": "last",
        "checkpoint__export_dtype": "fp32",
        "train__swa_start": 2,  # counted from 0: the weights after the third and the fourth step
        "train__swa_every_n_steps": 1,
    }
    assert bench.run("run", steps=4, **settings) == 0
    folder = bench.folder("run")
    for to, ending in (("kohya", ".safetensors"), ("diffusers", ".diffusers.safetensors")):
        out, of_run = bench.output / f"mean{ending}", folder / f"run{ending}"
        command = ["average", str(folder), "--output", str(out), "--dtype", "fp32", "--to", to, "--steps", "3.."]
        assert main(command) == 0, capsys.readouterr().err
        assert "average of the parameters" in capsys.readouterr().err
        ours, theirs = load_file(out), load_file(of_run)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.allclose(tensor, theirs[key], rtol=1e-5, atol=1e-7), key
    with safe_open(bench.output / "mean.safetensors", framework="numpy") as file:
        header = file.metadata()
    before = read_adapter(folder / "run.safetensors").metadata
    assert "lora_trainer.swa_start" in before
    assert "lora_trainer.swa_start" not in header
    for key in ("ss_network_module", "ss_network_args", "ss_network_dim", "ss_network_alpha", "ss_base_model_version"):
        assert header[key] == before[key]
    rounded = bench.output / "bf16.safetensors"
    assert main(["average", str(folder), "--output", str(rounded), "--dtype", "bf16", "--json"]) == 0
    errors = [layer["error"] for layer in json.loads(capsys.readouterr().out)["layers"]]
    assert all(each == 0.0 if kind == "oft" else 1e-4 < each < 0.02 for each in errors)  # an OFT is stored in fp32
    config = Config.model_validate(record(folder)["config"])
    states = [
        lora_weights(config, FAMILIES["sd15"], read_checkpoint(folder / "checkpoints" / f"step-{step:06d}").adapter)
        for step in (3, 4)
    ]
    for name, update in read_adapter(bench.output / "mean.safetensors").modules.items():
        shape = (*update.weight_shape, *([8] if len(update.weight_shape) == 1 else []))
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        first, second = (state.modules[name].delta(weight).reshape(-1) for state in states)
        mean = (first + second) / 2
        assert float((update.delta(weight).reshape(-1) - mean).norm()) < 0.2 * float((first - mean).norm()), name
