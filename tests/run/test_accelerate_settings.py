"""What accelerate was asked for is a layer of settings, above the presets and below the user's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer
from lora_trainer.config.presets import preset_layers
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.run.accelerate_settings import accelerate_layers
from lora_trainer.run.settings import settle

ROOT = Path(__file__).resolve().parents[2]
UNSET = {  # as accelerate 1.15 exports them where nothing was asked for
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_USE_CPU": "True",
}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "false"}


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
        monkeypatch.delenv(name)


def asked(environment: dict[str, str]) -> dict[str, Any]:
    problems: list[Problem] = []
    layers = accelerate_layers(problems, {**UNSET, **environment})
    assert not problems
    return {
        f"{name}.{key}": value for layer in layers for name, own in layer.values.items() for key, value in own.items()
    }


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, {}),
        (dict.fromkeys(UNSET, ""), {}),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"memory.weight_dtype": "fp16"}),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"memory.weight_dtype": "bf16"}),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {"memory.weight_dtype": "fp8"}),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {"compile.enabled": True}),
        (
            {
                "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
                "ACCELERATE_DYNAMO_MODE": "max-autotune",
                "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
                "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True",
            },
            {
                "compile.enabled": True,
                "compile.mode": "max-autotune",
                "compile.dynamic": True,
                "compile.fullgraph": True,
            },
        ),
        ({"ACCELERATE_DYNAMO_MODE": "max-autotune"}, {}),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, {"optimizer.max_grad_norm": 0.5}),
        ({**FSDP, "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}, {"memory.fsdp": "full_shard"}),
        ({**FSDP, "FSDP_SHARDING_STRATEGY": "2"}, {"memory.fsdp": "shard_grad_op"}),
        ({**FSDP, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {}),
        ({**FSDP, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}, {"memory.fsdp": "full_shard"}),
        ({**FSDP, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"memory.fsdp": "shard_grad_op"}),
        (
            {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
            {"memory.fsdp": "full_shard", "memory.gradient_checkpointing": True, "memory.weight_dtype": "bf16"},
        ),
    ],
)
def test_variables_as_settings(environment: dict[str, str], settings: dict[str, Any]) -> None:
    assert asked(environment) == settings


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}, "train.effective_batch_size"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "memory.fsdp"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "memory.fsdp"),
        ({"ACCELERATE_IN_TPU_POD": "1"}, "TPU"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}, "parallelism_config"),
        ({"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, "dynamo_backend"),
        ({"ACCELERATE_MIXED_PRECISION": "fp4"}, "memory.weight_dtype"),
        ({**FSDP, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "FULL_SHARD"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, "memory.blocks_to_swap"),
    ],
)
def test_what_cannot_be_done_is_refused(
    environment: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**UNSET, **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        settle([], [])
    (problem,) = caught.value.problems
    assert named in f"{problem.message} {problem.fix}"


def test_it_is_above_the_presets_and_below_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    presets = list(preset_layers(["12gb"]).layers)
    resolved = settle(presets, [])
    assert presets[0].values["memory"]["weight_dtype"] == "bf16"
    assert resolved.config.memory.weight_dtype == "fp16"
    assert resolved.origin["memory.weight_dtype"] == "accelerate"
    for name in ("--config a.toml", "--set"):
        own = settle(presets, [Layer(name, {"memory": {"weight_dtype": "fp32"}})])
        assert own.config.memory.weight_dtype == "fp32"
        assert own.origin["memory.weight_dtype"] == name


def test_a_value_that_is_none_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "much")
    with pytest.raises(UsageError, match=r"optimizer\.max_grad_norm .*accelerate"):
        settle([], [])


def test_explain_shows_the_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {**UNSET, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}.items():
        monkeypatch.setenv(name, value)
    assert main(["plan", "--set", "model.family=sd15", "--explain", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "accelerate" in json.dumps(shown)
    assert not asked({})


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` on this machine's CPU; the user's own accelerate config is that of `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--quiet", "--num_processes", "1"]
    return subprocess.run(
        [*command, *arguments, str(ROOT / "scripts" / "train_lora.py"), "--explain"],
        cwd=folder,
        env={**environment, "HF_HOME": str(folder), "LORA_TRAINER_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_accelerate_launch(tmp_path: Path) -> None:
    """By flags, by a config file, and by the user's default one; --quiet makes accelerate end with 1 for any error."""
    ended = launch(tmp_path, "--cpu", "--mixed_precision", "fp16", "--dynamo_backend", "inductor")
    rows = {line.split()[1]: line.split()[2:] for line in ended.stdout.splitlines() if line.startswith("* ")}
    assert rows["memory.weight_dtype"] == ['"fp16"', "accelerate"]
    assert rows["compile.enabled"] == ["true", "accelerate"]

    refused = launch(tmp_path, "--cpu", "--gradient_accumulation_steps", "8")
    assert refused.returncode == 1
    assert "train.effective_batch_size" in refused.stderr

    config = (ROOT / "accelerate_configs" / "cpu.yaml").read_text(encoding="utf-8")
    (tmp_path / "accelerate").mkdir()
    own = tmp_path / "accelerate" / "default_config.yaml"
    own.write_text(config.replace('mixed_precision: "no"', "mixed_precision: bf16"), encoding="utf-8")
    assert '"bf16"' in next(line for line in launch(tmp_path).stdout.splitlines() if "memory.weight_dtype" in line)
    shipped = launch(tmp_path, "--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml"))
    assert shipped.returncode == 0
    assert "accelerate" not in shipped.stdout
