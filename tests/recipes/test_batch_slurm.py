"""`batch --executor slurm` with programs that stand for SLURM's; `tests/slurm` has the real ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.jobs.executors import slurm
from lora_trainer.jobs.job_store import open_batch
from tests.recipes.recipe import Bench, draw_images

pytestmark = pytest.mark.skipif(os.name == "nt", reason="SLURM is for POSIX")
# Each writes its arguments into a file; sbatch keeps the script, squeue shows a list of tasks once.
PROGRAMS = {
    "sbatch": 'case "$*" in *--test-only*) cat refusal >&2; test ! -s refusal;; '
    '*) cp "$1" script; echo Submitted batch job $((7 + $(grep -c . submitted))); echo x >> submitted;; esac',
    "srun": "true",
    "squeue": "cat queue; : > queue",
    "scancel": 'echo "$@" >> cancelled',
    "scontrol": 'echo "$@" >> controlled',
}
# Not finite in the second step.
FAILING = {"lora__alpha": "4000000", "optimizer__learning_rate": "10", "safeguards__on_nonfinite": "stop"}


@dataclass(frozen=True)
class Cluster:
    """What the programs of the cluster do is in files of this folder."""

    folder: Path
    bench: Bench

    @property
    def output(self) -> Path:
        return self.bench.output

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, "utf-8")

    def read(self, name: str) -> str:
        return (self.folder / name).read_text("utf-8")

    def run(self, *extra: str, **settings: object) -> int:
        bench = Bench(self.bench.model, self.bench.data, self.output, self.bench.cache)
        (command, *rest) = bench.arguments("x", command="batch", steps=2, gates__lora="0", **settings)
        for flag in ("--name", "--data"):
            del rest[rest.index(flag) : rest.index(flag) + 2]
        return main([command, str(bench.data), *rest, "--executor", "slurm", *extra])


@pytest.fixture
def cluster(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster that takes jobs and runs none, for the folders ash and birch; birch has a higher priority."""
    root = tmp_path / "root"
    for name in ("ash", "birch"):
        draw_images(root / name)
    (root / "birch" / "lora.toml").write_text("[run]\npriority = 2\n", "utf-8")
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, does in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\ncd {folder}\n{does}\n", "utf-8")
        (folder / name).chmod(0o755)
    for name in ("refusal", "queue", "submitted", "cancelled", "controlled"):
        (folder / name).touch()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "LOOK_EVERY_SECONDS", 0.01)
    return Cluster(folder, Bench(bench.model, root, tmp_path / "night", bench.cache))


def test_an_array_is_submitted_and_what_never_begins_is_one_message(cluster, capsys):
    options = ("time=04:00:00", "account=lab", "cpus-per-task=8", "exclusive=")
    chosen = [part for option in options for part in ("--executor-option", option)]
    assert cluster.run("--jobs", "3", *chosen) == 2
    script = cluster.read("script").splitlines()
    for line in (
        *("--array=0-1%2", "--gpus-per-node=1", "--time=04:00:00", "--account=lab", "--exclusive", "--requeue"),
        *("--cpus-per-task=8", f"--signal=USR1@{slurm.SAVING_SECONDS}"),
    ):
        assert f"#SBATCH {line}" in script
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in script
    said = capsys.readouterr()
    assert "SLURM: 2 submitted, at most 3 at once" in said.out
    assert said.err.startswith("error: not in SLURM any more: ash, birch: there is no log of them in ")
    assert "Choose an --output on a disk that the nodes share with this machine" in said.err
    tasks = open_batch(cluster.output).read_note(slurm.TASKS)
    assert tasks == {"birch": "7_0", "ash": "7_1"}, "the first task is that of the highest priority"
    assert cluster.read("cancelled") == "--quiet 7_1 7_0\n"


def test_without_a_time_the_partition_decides_and_a_log_says_what_happened(cluster, capsys):
    cluster.run()
    assert "--time" not in cluster.read("script")
    (cluster.output / "jobs" / ".slurm" / "7_0_0_log.out").write_text(
        "error: No disk.\nsrun: error: task 0: exit 2\n", "utf-8"
    )
    cluster.write("queue", "7_1\n7_0\n")
    assert cluster.run("--resume") == 2
    said = capsys.readouterr()
    assert "SLURM: 0 submitted, 2 submitted before" in said.out
    assert "birch: No disk." in said.err


def test_a_second_submission_takes_only_what_is_not_in_slurm(cluster):
    cluster.run()
    cluster.write("queue", "7_1\n99\n")
    assert cluster.run("--resume") == 2
    assert open_batch(cluster.output).read_note(slurm.TASKS) == {"birch": "8", "ash": "7_1"}


def test_cancel_takes_the_task_out_of_slurm(cluster, capsys):
    cluster.run()
    cluster.write("cancelled", "")
    assert main(["batch", "cancel", str(cluster.output), "ash"]) == 0
    assert cluster.read("cancelled") == "--quiet 7_1\n"
    assert "ash: cancelled" in capsys.readouterr().out


@pytest.fixture
def task(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """This process is a task of the cluster."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGCONT)}
    yield cluster
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_task_trains_its_job_and_no_other(task):
    assert task.run("--jobs", "0") == 0
    with pytest.raises(SystemExit) as left:
        slurm.work_on_node(str(task.output), "ash")
    assert left.value.code == 0
    assert {job.name: job.status for job in open_batch(task.output).read_jobs()} == {"ash": "done", "birch": "waiting"}
    assert task.read("controlled") == ""


def test_a_task_whose_job_is_repeated_later_goes_back_into_the_queue_until_then(task):
    assert task.run("--jobs", "0", "--retries", "1", **FAILING) == 0
    with pytest.raises(SystemExit) as left:
        slurm.work_on_node(str(task.output), "ash")
    assert left.value.code == 5
    requeue, update = task.read("controlled").splitlines()
    assert requeue == "requeue 7_1"
    assert update in [f"update JobId=7_1 StartTime=now+{seconds}" for seconds in range(50, 61)]


def test_all_that_cannot_be_submitted_is_said_before_anything_is_written(cluster, monkeypatch, capsys):
    options = ("gpus=a100:2", "gres=gpu:1,shard:4", "array=1-5", "output=log.txt")
    assert cluster.run("--together", "4", *(part for each in options for part in ("--executor-option", each))) == 2
    said = capsys.readouterr().err
    assert "4 problems" in said
    assert "--together is not for --executor slurm." in said
    assert "--executor-option gpus=a100:2 is for several GPUs, and a job of a batch trains on one." in said
    cluster.write("refusal", "sbatch: error: Invalid account\n")
    assert cluster.run() == 2
    assert "sbatch: Invalid account. The jobs ask for --gpus-per-node=1." in " ".join(capsys.readouterr().err.split())
    (cluster.folder / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(cluster.folder))
    assert cluster.run() == 2
    assert "This machine has no sbatch." in capsys.readouterr().err
    assert not cluster.output.exists()
