"""`doctor` on stated machines and on this one with real faults: what it finds, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.doctor.examine import before
from lora_trainer.doctor.lines import Diagnosis, plain_text
from lora_trainer.doctor.this_machine import constrained_versions
from lora_trainer.doctor.variables import GROUPS, VARIABLES
from tests.doctor.planted import (
    CPU_BUILD,
    CUDA,
    HEALTHY,
    NVIDIA,
    REAL,
    ROCM,
    SMI,
    STATED,
    PresentGpu,
    faults_of,
    without_gpu,
)

WARNINGS = {
    "GPU newer than torch's build",
    "GPU without bf16",
    "attention with wrong gradients",
    "GPU throttled by heat",
    "power cap",
    "persistence off",
    "another program on the GPU",
    "a library that does not load",
    "another torch than tested",
    "container with half a CPU",
    "other programs use the CPUs",
    "little memory is free",
    "docker's shared memory",
    "few open files",
    "faketime",
    "a virtual clock that runs fast",
    "a slow clock source",
    "slow disk",
    "hub does not answer",
    "more threads than CPUs",
    "memory pool of your own",
    "TF32 overridden",
    "CUDA libraries of the system first",
    "extensions built for other GPUs",
    "NCCL without direct copies",
}
FIXES = {
    "NVIDIA GPU, torch's CPU build": "--index-url https://download.pytorch.org/whl/cu130",
    "NVIDIA GPU without a driver": "--gpus all",
    "GPU hidden by a variable": "unset CUDA_VISIBLE_DEVICES",
    "MIG without an instance": "nvidia-smi mig -cgi",
    "AMD GPU, torch's CUDA build": "torch for ROCm",
    "Intel GPU, torch's XPU build": "ACCELERATE_USE_CPU=true",
    "driver too old for torch's CUDA": "580 or newer",
    "GPU older than torch's build": "CUDA 12.6",
    "broken GPU memory": "restart",
    "power cap": "nvidia-smi -pl 450",
    "docker's shared memory": "--shm-size",
    "slow disk": "SSD",
    "diffusers outside of its range": "pip install 'diffusers==0.42.1'",
    "container with 2 GiB": "--memory 16g",
}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit code and printed lines, without their indent."""
    code = main(["doctor", *arguments])
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return code, [line.strip() for line in output.out.splitlines()]


def test_a_healthy_machine_has_no_fault() -> None:
    lines = before(HEALTHY)
    assert faults_of(HEALTHY) == []
    assert {"torch", "device", "driver", "GPU code", "attention", "cache disk", "clock"} <= {
        line.name for line in lines
    }
    diagnosis = Diagnosis((("before", lines),))
    assert diagnosis.exit_code == 0
    assert diagnosis.summary.startswith("No errors, no warnings")


@pytest.mark.parametrize("fault", STATED)
def test_a_stated_fault_is_found_alone(fault: str) -> None:
    """One line, at its level, with the fix; every other line of the machine stays as it was."""
    facts = STATED[fault](HEALTHY)
    (line,) = faults_of(facts)
    assert line.level == ("warning" if fault in WARNINGS else "error")
    assert line.wanted
    assert FIXES.get(fault, "") in line.fix
    assert line.fix
    diagnosis = Diagnosis((("before", before(facts)),))
    assert diagnosis.exit_code == (0 if fault in WARNINGS else 2)
    assert diagnosis.summary.startswith("No errors, 1 warning. " if fault in WARNINGS else "1 error. ")
    assert line.found in diagnosis.summary


@pytest.mark.parametrize("torch", [CPU_BUILD, replace(CUDA, devices=()), CUDA])
def test_the_cpu_may_be_requested(torch: object) -> None:
    asked = without_gpu(HEALTHY, torch, NVIDIA, environment={"ACCELERATE_USE_CPU": "true"})  # type: ignore[arg-type]
    facts = replace(asked, versions=HEALTHY.versions, smi=(SMI,))
    assert faults_of(facts) == []
    (line,) = [line for line in before(facts) if line.name == "device"]
    assert "ACCELERATE_USE_CPU=true" in line.found
    assert "NVIDIA GPU unused on purpose" in line.found


def test_an_empty_list_of_gpus_is_an_error_that_names_the_variable() -> None:
    facts = without_gpu(HEALTHY, replace(CUDA, devices=()), NVIDIA, environment={"CUDA_VISIBLE_DEVICES": ""})
    found = {line.name: line for line in faults_of(facts)}
    assert "CUDA_VISIBLE_DEVICES=''" in found["device"].found
    assert found["device"].fix.startswith("unset CUDA_VISIBLE_DEVICES")
    assert (found["device"].level, found["CUDA_VISIBLE_DEVICES"].level) == ("error", "warning")


def test_rocm_is_a_gpu_like_others() -> None:
    facts = without_gpu(HEALTHY, ROCM, PresentGpu("AMD", "/dev/kfd"))
    assert faults_of(facts) == []
    assert any("built for ROCm 6.4" in line.found for line in before(facts))


def test_graphics_inside_the_cpu_are_no_error() -> None:
    inside = PresentGpu("Intel", "/dev/dri/renderD128", integrated=True)
    (line,) = faults_of(without_gpu(HEALTHY, CPU_BUILD, inside))
    assert (line.name, line.level) == ("device", "warning")
    assert faults_of(replace(HEALTHY, gpus=(*HEALTHY.gpus, inside))) == []


def test_a_secret_is_never_shown() -> None:
    facts = replace(HEALTHY, environment={"HF_TOKEN": "hf_very_secret", "HTTPS_PROXY": "http://me:word@proxy"})
    text = "\n".join(plain_text(Diagnosis((("before", before(facts)),))))
    assert "HF_TOKEN: set, " in text
    assert "secret" not in text
    assert "word" not in text


def test_values_have_no_control_codes() -> None:
    facts = replace(HEALTHY, environment={"HF_ENDPOINT": "\x1b[31mred"})
    assert not any("\x1b" in line for line in plain_text(Diagnosis((("before", before(facts)),))))


def test_the_tested_versions_are_those_of_the_constraints(checkout: Path) -> None:
    tested = constrained_versions()
    assert f"torch=={tested['torch']}\n" in (checkout / "constraints.txt").read_text("utf-8")
    assert "pytorch-optimizer" in tested, "names are written as pip does"


def test_real_faults_of_settings_and_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))
    settings = (
        f"cache.dir={tmp_path / 'file' / 'cache'}",
        "hardware.attention_backend=flash3",
        f"run.output={tmp_path}",
    )
    code, lines = printed(capsys, *(word for setting in settings for word in ("--set", setting)))
    found = [line.replace(str(tmp_path), "<folder>") for line in lines]
    assert code == 2
    for fault in (
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_CACHE_DISABLE",
        "a pool setting that is none",
        "no temporary folder",
        "cache folder inside a file",
        "an attention backend that is missing",
    ):
        assert REAL[fault][1] in found
    assert "float32 on cpu: matmul, convolution, attention: at most" in "\n".join(found)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "what was measured is removed"


def test_a_config_of_another_trainer_is_named_with_the_command_that_converts_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "kohya.toml"
    config.write_text('network_dim = 8\nnetwork_module = "networks.lora"\n', encoding="utf-8")
    code, lines = printed(capsys, "--config", str(config))
    found = [line.replace(str(tmp_path), "<folder>") for line in lines]
    assert code == 2
    assert REAL["a config of kohya"][1] in found
    assert any("lora-trainer import <folder>/kohya.toml --output NEW.toml" in line for line in found)


def test_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of the settings, in one JSON document."""
    settings = ("model.family=flux", "memory.limit_gib=4", "memory.weight_dtype=bf16", "memory.blocks_to_swap=0")
    code = main(["doctor", "--json", *(word for setting in settings for word in ("--set", setting))])
    document = json.loads(capsys.readouterr().out)
    assert code == 2
    (line,) = [line for line in document["lines"] if line["name"] == "GPU memory of this run"]
    assert (line["part"], line["level"], line["wanted"]) == ("before", "error", "at most 4.0 GiB")
    assert document["errors"] >= 1
    assert document["summary"].endswith(tuple(each["found"] for each in document["lines"]))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
def test_real_limits_of_a_process(tmp_path: Path) -> None:
    """`ulimit` of a process of its own, and a hub that refuses the connection."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200));"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "from lora_trainer.__main__ import entry; raise SystemExit(entry(['doctor', '--online']))"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1", "LORA_TRAINER_CACHE": str(tmp_path)}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert done.returncode == 2, done.stderr
    for fault in ("few open files (ulimit -n 200)", "small files only (ulimit -f)", "a disk that refuses 8 MB"):
        assert REAL[fault][1] in lines
    assert any(re.match(r"warning hub: \S.* \(http://127.0.0.1:9\)", line) for line in lines)
    assert any(line.startswith("fix: raise the hard limit of 200: ") for line in lines)
    assert re.fullmatch(r"\d+ errors, \d+ warnings?\. First: .+", lines[-1])


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """Another torch is found first, and it lacks a library; settings and a folder are named, too."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is missing')", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    settings = ["--set", "model.family=sd15", "--set", f"run.output={tmp_path}", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "lora_trainer", "doctor", *settings],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "error   torch: it cannot be imported: libcudart.so.13 is missing" in done.stdout
    assert "1 error" in done.stdout
    assert "ok      memory: " in done.stdout, "the rest is checked all the same"


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a shell script")
def test_nvidia_smi_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program of that name, as a driver installs it: its table, and then its failure."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    row = "NVIDIA A100, 470.1, 40960, 20000, Disabled, 250.00, 400.00, Enabled, [N/A]"
    program.write_text(f"#!/bin/sh\necho '{row}'\n", encoding="utf-8")
    program.chmod(0o755)
    _, lines = printed(capsys)
    text = "\n".join(lines)
    for part in ("persistence: NVIDIA A100: off", "250 W of 400 W", "19.5 of 40.0 GiB are in use", "MIG: NVIDIA A100"):
        assert part in text
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n", encoding="utf-8")
    code, lines = printed(capsys)
    assert code == 2
    assert any("nvidia-smi fails: exit code 6: No devices were found" in line for line in lines)


@pytest.mark.parametrize("arguments", [["nowhere"], ["--fast"], ["."]])
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]) -> None:
    folder = [str(tmp_path / each) if not each.startswith("-") else each for each in arguments]
    assert main(["doctor", *folder]) == 2
    assert "error: " in capsys.readouterr().err


def test_every_variable_is_in_a_group() -> None:
    assert {variable.group for variable in VARIABLES.values()} == set(GROUPS)
    asked = "CUDA_LAUNCH_BLOCKING CUDA_CACHE_DISABLE TORCH_CUDA_ARCH_LIST HF_HOME HF_HUB_OFFLINE PYTORCH_ALLOC_CONF"
    assert set(asked.split()) <= set(VARIABLES)


def test_beside_a_run_only_faults_of_the_machine_are_printed_and_after_the_run() -> None:
    machine = before(next(iter(STATED.values()))(HEALTHY))
    of_run = before(HEALTHY)[:1]
    text = plain_text(Diagnosis((("after", of_run), ("before", machine))))
    assert text[0] == "After the run"
    rows = [line for line in text[3:-1] if not line.lstrip().startswith("fix:")]
    wrong = [line for line in machine if line.level != "ok"]
    assert len(rows) == len(wrong) + 1
    assert f"{len(machine) - len(wrong)} lines ok: lora-trainer doctor shows all" in rows[-1]
