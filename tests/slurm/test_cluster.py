"""`batch --executor slurm` on a cluster of one node: `make test-slurm`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CHECKOUT
from tests.recipes.recipe import QUICK, draw_images

pytestmark = pytest.mark.slow
WAIT_SECONDS = 400.0
# Not finite in the second step.
FAILING = {"lora__alpha": "4000000", "optimizer__learning_rate": "10", "safeguards__on_nonfinite": "stop"}


@dataclass(frozen=True)
class Night:
    """A batch's folders, and the commands of a user of the cluster."""

    place: Path
    model: Path
    environment: Mapping[str, str]

    @property
    def output(self) -> Path:
        return self.place / "night"

    def start(self, *extra: str, steps: int = 200, **settings: object) -> subprocess.Popen[str]:
        values = QUICK | {"cache.dir": str(self.place / "cache"), "checkpoint.every_n_steps": "50", "gates.lora": "0"}
        values |= {key.replace("__", "."): str(value) for key, value in settings.items()}
        chosen = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        places = ["--model", str(self.model), "--output", str(self.output), "--max-steps", str(steps)]
        cpus = ["--executor", "slurm", "--executor-option", "gpus-per-node=0"]
        return self.command("batch", str(self.place / "root"), *places, *cpus, *chosen, *extra)

    def run(self, *extra: str, **settings: Any) -> tuple[int, str]:
        """The exit code and all that was printed."""
        process = self.start(*extra, **settings)
        output, _ = process.communicate(timeout=WAIT_SECONDS)
        return process.returncode, output

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "lora_trainer", *arguments],
            env=dict(self.environment) | {"PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def slurm(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def tasks(self) -> dict[str, str]:
        """Those that SLURM has, with their states."""
        lines = self.slurm("squeue", "--array", "--noheader", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def task_of(self, name: str) -> str:
        """The task that was submitted for a job."""
        found = max((self.output / "jobs" / ".batch").glob("*.json"))
        task: str = json.loads(found.read_text("utf-8"))["notes"]["slurm_tasks"][name]
        return task

    def log(self, name: str) -> str:
        return (self.output / "jobs" / ".slurm" / f"{self.task_of(name)}_0_log.out").read_text("utf-8")

    def jobs(self) -> dict[str, dict[str, Any]]:
        status = self.command("batch", "status", str(self.output), "--json")
        return {job["name"]: job for job in json.loads(status.communicate(timeout=60)[0])["jobs"]}

    def statuses(self) -> dict[str, str]:
        return {name: job["status"] for name, job in self.jobs().items()}


@pytest.fixture
def night(tmp_path: Path, tiny_model: Path, cluster: Mapping[str, str]) -> Night:
    return Night(tmp_path, tiny_model, cluster)


def wait_until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.5)


def test_a_night_with_a_preempted_and_a_cancelled_job_that_is_left_and_watched_again(night):
    """Four folders, two at once: one is preempted, one cancelled before it began, and the submitting command is stopped."""
    for name in ("ash", "birch", "cedar", "elm"):
        draw_images(night.place / "root" / name)
    (night.place / "root" / "elm" / "lora.toml").write_text("[run]\npriority = 5\n", "utf-8")
    first = night.start("--jobs", "2")
    checkpoint = night.output / "elm" / "checkpoints" / "step-000050"
    wait_until(checkpoint.exists)
    assert night.statuses() == {"ash": "running", "birch": "waiting", "cedar": "waiting", "elm": "running"}
    night.slurm("scontrol", "requeue", night.task_of("elm"))
    cancel = night.command("batch", "cancel", str(night.output), "cedar")
    assert cancel.communicate(timeout=60)[0].splitlines() == ["cedar: cancelled"]
    assert night.task_of("cedar") not in night.tasks()

    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=60)[0]
    assert first.returncode == 130
    assert "SLURM: 4 submitted, at most 2 at once" in said
    assert f"To look: lora-trainer batch status {night.output}" in said
    assert night.task_of("elm") in night.tasks(), "the cluster continues"

    code, said = night.run("--jobs", "2", "--resume")
    assert code == 0
    assert "SLURM: 0 submitted, 4 submitted before" in said
    jobs = night.jobs()
    assert {name: job["status"] for name, job in jobs.items()} == {
        **dict.fromkeys(("ash", "birch", "elm"), "done"),
        "cedar": "cancelled",
    }
    assert {name: job["attempts"] for name, job in jobs.items()} == {"ash": 1, "birch": 1, "cedar": 0, "elm": 2}
    assert "SIGTERM: saving and stopping" in night.log("elm")
    assert "resuming from step-" in (night.output / "elm" / "logs" / "console.txt").read_text("utf-8")
    wait_until(lambda: not night.tasks())


def test_a_job_whose_time_is_over_saves_requeues_itself_and_resumes(night):
    """SLURM's signal for that is sent at a checkpoint: its own comes after a minute at the earliest, on its own clock."""
    draw_images(night.place / "root" / "ash")
    process = night.start("--executor-option", "time=10", steps=200)
    wait_until((night.output / "ash" / "checkpoints" / "step-000050").exists)
    night.slurm("scancel", "--signal=USR1", night.task_of("ash"))
    said = process.communicate(timeout=WAIT_SECONDS)[0]
    assert process.returncode == 0, said
    assert (night.jobs()["ash"]["status"], night.jobs()["ash"]["attempts"]) == ("done", 2)
    assert "SIGUSR1: saving and stopping" in night.log("ash")
    assert "resuming from step-" in (night.output / "ash" / "logs" / "console.txt").read_text("utf-8")


def test_a_failed_job_waits_for_its_retry_in_the_queue_of_slurm_not_on_the_node(night):
    draw_images(night.place / "root" / "ash")
    process = night.start("--retries", "1", **FAILING)
    wait_until(lambda: (night.output / "jobs" / ".batch").is_dir() and night.statuses() == {"ash": "waiting"})
    wait_until(lambda: night.jobs()["ash"]["attempts"] == 1 and night.tasks().get(night.task_of("ash")) == "PENDING")
    said = process.communicate(timeout=WAIT_SECONDS)[0]
    assert process.returncode == 5, said
    assert (night.jobs()["ash"]["status"], night.jobs()["ash"]["attempts"]) == ("failed", 2)


@pytest.mark.parametrize("many", [False, True])
def test_nodes_with_another_version_are_reported_and_nothing_stays_submitted(many, night):
    for name in ("ash", "birch")[: 1 + many]:
        draw_images(night.place / "root" / name)
    (night.place / "old").mkdir()
    old = "import lora_trainer.core.version as version\nversion.__version__ = '0.0.1'\n"
    (night.place / "old" / "sitecustomize.py").write_text(old, "utf-8")
    setup = f"setup=export PYTHONPATH={night.place / 'old'}{os.pathsep}$PYTHONPATH"
    code, said = night.run("--executor-option", setup)
    assert code == 2
    assert "ash is a job for lora-trainer" in said
    assert "this is 0.0.1" in said
    assert set(night.statuses().values()) == {"waiting"}
    assert not night.tasks()


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("gpus-per-node=1", "Invalid generic resource (gres) specification"),
        ("partition=nowhere", "invalid partition specified: nowhere"),
        ("walltime=3", "unrecognized option '--walltime=3'"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused_before_anything_is_written(option, problem, night):
    draw_images(night.place / "root" / "ash")
    code, said = night.run("--executor-option", option)
    assert code == 2
    assert problem in said
    assert not night.output.exists()


def test_a_controller_that_does_not_answer_is_refused_before_anything_is_written(night):
    draw_images(night.place / "root" / "ash")
    conf = Path(night.environment["SLURM_CONF"])
    elsewhere = night.place / "slurm.conf"
    lines = conf.read_text("utf-8").splitlines()
    elsewhere.write_text(
        "\n".join("SlurmctldPort=1" if line.startswith("SlurmctldPort=") else line for line in lines), "utf-8"
    )
    away = Night(night.place, night.model, {**night.environment, "SLURM_CONF": str(elsewhere)})
    code, said = away.run()
    assert code == 2
    assert "Unable to contact slurm controller" in said
    assert not night.output.exists()
