"""Two processes equal one: the same samples, the same weights, one record."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import load_file

from tests.recipes.recipe import Bench, exported, losses, record, rows

WITHOUT_GPUS = ("--gpu_ids=-1,-1", "--main_process_port", "0")  # accelerate's own flags; port 0: any that is free


def launch(
    checkout: Path,
    arguments: list[str],
    config_file: str = "accelerate_configs/cpu_2.yaml",
    *flags: str,
    script: str = "scripts/train_lora.py",
) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` of the command, on two CPU processes unless a file sets another."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    config = ["--config_file", str(checkout / config_file), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    return subprocess.run(
        [*command, *config, str(checkout / script), *arguments[1:]],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        cwd=checkout,
        timeout=500,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux")
def test_two_processes_train_the_same_as_one(bench: Bench, checkout: Path):
    """Launched by the file for several GPUs on one machine, with every GPU hidden: over gloo, on the CPU."""
    settings: dict[str, object] = {
        "train__effective_batch_size": 3,
        "validation__every_n_steps": 3,
        "validation__split": 0.4,  # four images: captions are compared
        "checkpoint__every_n_steps": 3,
        "train__ema_decay": 0.9,
        "captions__shuffle": "true",
        "captions__dropout": 0.3,
        "data__num_class_images": 2,
    }
    ended = launch(
        checkout,
        bench.arguments("two", gates__lora_check="lite", **settings),
        "accelerate_configs/multi_gpu.yaml",
        *WITHOUT_GPUS,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("validating the LoRA") == 1, "only one process speaks"
    assert bench.run("one", **settings) == 0

    two, one = bench.folder("two"), bench.folder("one")
    assert record(two)["hardware"]["processes"] == 2
    assert [row["step"] for row in rows(two)] == [1, 2, 3, 4, 5, 6]
    assert [row["samples"] for row in rows(two)] == [row["samples"] for row in rows(one)]
    for name in ("metrics.jsonl", "validation.jsonl"):
        mine, theirs = ([row["loss"] for row in rows(folder, name)] for folder in (two, one))
        assert mine == pytest.approx(theirs, rel=1e-3)
    (before, *mine), (same, *theirs) = (rows(folder, "validation.jsonl") for folder in (two, one))
    assert before == same
    assert "agreement" in before
    assert [row["gain"] for row in mine] == pytest.approx([row["gain"] for row in theirs], abs=1e-3)
    first, second = rows(two)[0]["loss"], rows(one)[0]["loss"]
    assert first == pytest.approx(second, rel=1e-5)
    mine, theirs = load_file(two / "two.safetensors"), load_file(one / "one.safetensors")
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        np.testing.assert_allclose(values, theirs[name], atol=1e-3, err_msg=name)


@pytest.mark.slow
def test_processes_stop_at_the_same_step(bench: Bench, checkout: Path):
    """Each has its own clock: without agreement one would wait forever."""
    ended = launch(checkout, bench.arguments("late", "--max-hours", "1e-9", steps=50))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert record(bench.folder("late"))["steps"] == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux")
def test_two_killed_and_resumed_processes_equal_two_uninterrupted_ones(bench: Bench, checkout: Path):
    """Bit for bit with every optimizer, and with dropout: each process has its own masks."""
    settings: dict[str, object] = {"optimizer__name": "adamw8bit", "lora__rank": 128, "lora__dropout": 0.1}
    settings |= {"train__effective_batch_size": 3, "checkpoint__every_n_steps": 2, "checkpoint__keep_last": 3}
    assert launch(checkout, bench.arguments("straight", **settings)).returncode == 0
    expected = outcome_of(bench, "straight")
    document = record(bench.folder("straight"))
    (bench.folder("straight") / "run.json").write_text(json.dumps(document | {"status": "running"}), encoding="utf-8")
    for step in ("000004", "000006"):
        shutil.rmtree(bench.folder("straight") / "checkpoints" / f"step-{step}")
    ended = launch(checkout, bench.arguments("straight", "--resume", **settings))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "resuming from step-000002" in ended.stdout
    assert outcome_of(bench, "straight") == expected


def outcome_of(bench: Bench, name: str) -> tuple[list[float], dict[str, dict[str, bytes]]]:
    return losses(bench.folder(name)), exported(bench.folder(name))


@pytest.mark.slow
def test_two_machines_are_two_launches(bench: Bench, checkout: Path, tmp_path: Path):
    """The launch file for several machines, filled in, with CPUs in place of GPUs."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    config = yaml.safe_load((checkout / "accelerate_configs" / "multi_node.yaml").read_text("utf-8"))
    filled = {"main_process_ip": "127.0.0.1", "main_process_port": port, "num_processes": 2}
    path = tmp_path / "machines.yaml"
    path.write_text(yaml.safe_dump(config | filled | {"gpu_ids": "-1", "use_cpu": True}), encoding="utf-8")
    with ThreadPoolExecutor() as both:
        machines = [
            both.submit(
                launch,
                checkout,
                bench.arguments("two", steps=4, gates__lora_check="lite"),
                str(path),
                "--machine_rank",
                str(rank),
            )
            for rank in (0, 1)
        ]
        ended = [machine.result() for machine in machines]
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr[-3000:]
    assert record(bench.folder("two"))["hardware"]["processes"] == 2
    assert "validating the LoRA" not in ended[1].stdout, "only one process speaks"


@pytest.mark.slow
def test_two_processes_encode_the_same_as_one(bench: Bench, checkout: Path):
    """Without cached latents each process decodes and encodes its own share of a step."""
    settings: dict[str, object] = {"train__effective_batch_size": 3, "cache__latents": "false", "data__flip": "true"}
    ended = launch(checkout, bench.arguments("two", **settings))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert bench.run("one", **settings) == 0
    two, one = bench.folder("two"), bench.folder("one")
    assert [row["loss"] for row in rows(two)] == pytest.approx([row["loss"] for row in rows(one)], rel=1e-3)
    assert record(two)["sample_counts"] == record(one)["sample_counts"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux")
def test_two_processes_train_text_encoders_and_tokens_as_one_does(bench: Bench, checkout: Path):
    """Each encodes the captions of its own samples; the encoders stay the same in both."""
    settings: dict[str, object] = {
        "train__effective_batch_size": 3,
        "validation__every_n_steps": 3,
        "captions__shuffle": "true",
        "captions__dropout": 0.3,
        "captions__trigger_word": "<zobo>",
        "text_encoder__learning_rates": "[5e-3]",
        "textual_inversion__placeholder_tokens": '["<zobo>"]',
        "textual_inversion__num_vectors": 2,
    }
    ended = launch(checkout, bench.arguments("two", **settings))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert bench.run("one", **settings) == 0
    two, one = bench.folder("two"), bench.folder("one")
    assert record(two)["hardware"]["processes"] == 2
    assert [row["samples"] for row in rows(two)] == [row["samples"] for row in rows(one)]
    for name in ("metrics.jsonl", "validation.jsonl"):
        mine, theirs = ([row["loss"] for row in rows(folder, name)] for folder in (two, one))
        assert mine == pytest.approx(theirs, rel=1e-3)
    mine, theirs = load_file(two / "two.safetensors"), load_file(one / "one.safetensors")
    assert mine.keys() == theirs.keys()
    assert {name.partition("_")[0] for name in mine} == {"lora", "bundle"}
    assert any(name.startswith("lora_te_") for name in mine)
    for name, values in mine.items():
        np.testing.assert_allclose(values, theirs[name], atol=1e-3, err_msg=name)


SHORT_IN_ONE = """
import os, sys
import torch
from lora_trainer.cli.main import main
from lora_trainer.training import step

true, calls = {where}, iter(range(1000))

def short(*given, **named):
    if os.environ["RANK"] == "1" and next(calls) == {call}:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return true(*given, **named)

{where} = short
if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_one_process_of_two_runs_out_of_memory_and_takes_smaller_micro_batches(
    bench: Bench, checkout: Path, tmp_path: Path
):
    """It shrinks alone, no process waits in vain, and the weights equal those of an undisturbed run up to rounding."""
    script = tmp_path / "short.py"
    script.write_text(SHORT_IN_ONE.format(where="step.backward", call=4), encoding="utf-8")
    settings: dict[str, object] = {"train__effective_batch_size": 4, "steps": 12}
    ended = launch(checkout, bench.arguments("short", **settings), script=str(script))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert launch(checkout, bench.arguments("calm", **settings)).returncode == 0
    short, calm = bench.folder("short"), bench.folder("calm")
    (event,) = rows(short, "events.jsonl")
    assert (event["step"], event["kind"]) == (10, "memory")
    assert "another process ran out of memory: all continue with micro-batches of 1 " in event["message"]
    assert record(short)["training"]["fit"]["micro"] == 1
    mine, theirs = ([row["loss"] for row in rows(folder)] for folder in (short, calm))
    assert len(mine) == 12
    assert mine[:2] == theirs[:2]
    assert mine == pytest.approx(theirs, rel=1e-3)
    for name, values in load_file(short / "short.safetensors").items():
        np.testing.assert_allclose(values, load_file(calm / "calm.safetensors")[name], atol=1e-3, err_msg=name)


@pytest.mark.slow
def test_one_process_of_two_runs_out_of_memory_in_its_update(bench: Bench, checkout: Path, tmp_path: Path):
    """The other has continued: the run ends, reports the step and the saved checkpoint, and nobody waits forever."""
    script = tmp_path / "short.py"
    script.write_text(SHORT_IN_ONE.format(where="torch.optim.AdamW.step", call=3), encoding="utf-8")
    ended = launch(
        checkout,
        bench.arguments("short", train__effective_batch_size=4, checkpoint__every_n_steps=2),
        script=str(script),
    )
    assert ended.returncode != 0
    assert "Process 1: Out of memory while the weights were changed, at step 4" in ended.stderr
    assert (bench.folder("short") / "checkpoints" / "step-000002").is_dir()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux")
def test_two_processes_with_half_of_the_base_each_train_and_resume_as_one(bench: Bench, checkout: Path):
    """`memory.fsdp`, compiled or not: the losses of one process; from two processes to one, and back to two."""
    settings: dict[str, object] = {
        "train__effective_batch_size": 3,  # one process takes a pass less than the other
        "train__max_micro_batch_size": 1,
        "validation__every_n_steps": 3,
        "validation__split": 0.4,
        "checkpoint__every_n_steps": 2,
        "checkpoint__keep_last": 3,
        "memory__gradient_checkpointing": "true",
    }
    assert bench.run("one", **settings) == 0
    expected = losses(bench.folder("one"))
    for name, kind in {"full_shard": {}, "shard_grad_op": {}, "compiled": {"compile__enabled": "true"}}.items():
        sharded = settings | kind | {"memory__fsdp": "full_shard" if kind else name}
        ended = launch(checkout, bench.arguments(name, **sharded))
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert "blocks over 2 processes" in ended.stdout
        assert ("compiled: " in ended.stdout) == bool(kind)
        assert "compiled blocks failed" not in ended.stdout
        assert losses(bench.folder(name)) == pytest.approx(expected, rel=1e-6)
    sharded = settings | {"memory__fsdp": "full_shard"}
    back_to(bench.folder("full_shard"), 2)
    assert bench.run("full_shard", "--resume", steps=4, **sharded) == 0  # alone: it holds all weights
    ended = launch(checkout, bench.arguments("full_shard", "--resume", **sharded))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "resuming from step-000004" in ended.stdout
    assert losses(bench.folder("full_shard")) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux")
def test_compressed_gradients_change_the_loss_by_their_rounding(bench: Bench, checkout: Path):
    """The first loss is the same; later ones differ by less than 0.1 %, in bf16 by more than in fp16."""
    found = {}
    for name in ("none", "fp16", "bf16"):
        arguments = bench.arguments(f"in_{name}", train__effective_batch_size=4, train__gradient_compression=name)
        ended = launch(checkout, arguments)
        assert ended.returncode == 0, ended.stderr[-3000:]
        found[name] = np.array(losses(bench.folder(f"in_{name}")))
    off = {name: np.abs(found[name] / found["none"] - 1.0) for name in ("fp16", "bf16")}
    assert off["fp16"][0] == off["bf16"][0] == 0.0
    assert 0.0 < off["fp16"].max() < off["bf16"].max() < 1e-3


def back_to(folder: Path, step: int) -> None:
    """As if the run had been killed after the checkpoint of `step`."""
    document = record(folder)
    (folder / "run.json").write_text(json.dumps(document | {"status": "running"}), encoding="utf-8")
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals and gloo as on Linux")
def test_a_machine_of_torchrun_dies_and_the_other_resumes_alone(bench: Bench, checkout: Path):
    """Two launches of `torchrun` meet at an endpoint. One is killed whole: the other ends with one message."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings: dict[str, object] = {"train__effective_batch_size": 3, "checkpoint__every_n_steps": 2, "steps": 4000}
    meeting = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    meeting += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    script = [str(checkout / "scripts/train_lora.py"), *bench.arguments("two", **settings)[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": ""}
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *meeting, *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=checkout,
        )
        for _ in range(2)
    ]
    try:
        deadline = time.monotonic() + 300
        while not (bench.folder("two") / "checkpoints" / "step-000002").is_dir():
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert [machine.poll() for machine in machines] == [None, None], machines[0].communicate()[1][-3000:]
            time.sleep(0.2)
        killed_whole(machines[1])
        _, errors = machines[0].communicate(timeout=300)
    finally:
        for machine in machines:
            killed_whole(machine)
            machine.communicate()
    assert machines[0].returncode not in (0, None)
    assert errors.count("error: ") == 1, errors[-3000:]
    assert "--resume" in errors
    trained = losses(bench.folder("two"))
    steps = len(trained) + 2
    assert bench.run("two", "--resume", **settings | {"steps": steps}) == 0
    assert len(losses(bench.folder("two"))) == steps
    assert record(bench.folder("two"))["hardware"]["processes"] == 1


def killed_whole(machine: subprocess.Popen[str]) -> None:
    """SIGKILL to a launcher and all that it started, as when a machine loses power."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(machine.pid)
        for each in (*launcher.children(recursive=True), launcher):
            with suppress(psutil.NoSuchProcess):
                each.kill()
