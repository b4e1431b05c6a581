"""`batch --executor ray` on a real cluster of several nodes on this machine: `make test-ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import CHECKOUT
from tests.recipes.recipe import QUICK, draw_images, save_tiny_model

pytestmark = pytest.mark.slow
WAIT_SECONDS = 900.0
NAMES = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "yew")
ONE_NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000}


@dataclass(frozen=True)
class Night:
    """A batch's folders and its cluster."""

    place: Path
    model: Path
    cluster: Any

    @property
    def output(self) -> Path:
        return self.place / "night"

    def start(self, *extra: str, steps: int = 60, **settings: object) -> subprocess.Popen[str]:
        values = QUICK | {"cache.dir": str(self.place / "cache"), "checkpoint.every_n_steps": "5", "gates.lora": "0"}
        values |= {key.replace("__", "."): str(value) for key, value in settings.items()}
        chosen = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        places = ["--model", str(self.model), "--output", str(self.output), "--max-steps", str(steps)]
        ray = ["--executor", "ray", "--executor-option", "gpus=0"]
        at = ["--executor-option", f"address={self.cluster.address}"]
        root = str(self.place / "root")
        return self.command("batch", root, *places, *ray, *at, *chosen, *extra)

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "lora_trainer", *arguments],
            env=dict(os.environ) | {"PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def jobs(self) -> dict[str, dict[str, Any]]:
        status = self.command("batch", "status", str(self.output), "--json")
        return {job["name"]: job for job in json.loads(status.communicate(timeout=60)[0])["jobs"]}

    def events(self, name: str) -> list[str]:
        """What happened to a job, in order."""
        entries = sorted((self.output / "jobs" / name).glob("[0-9]*.json"))
        return [json.loads(entry.read_text("utf-8"))["event"] for entry in entries]

    def holder(self, name: str) -> psutil.Process:
        """The process that holds a running job."""
        *_, last = sorted((self.output / "jobs" / name).glob("[0-9]*.json"))
        return psutil.Process(json.loads(json.loads(last.read_text("utf-8"))["holder"])[1])

    def checkpointed(self, names: Sequence[str]) -> list[str]:
        """Those whose training has begun and not ended."""
        at_work = [name for name in names if self.events(name)[-1:] == ["claimed"]]
        return [name for name in at_work if any((self.output / name).glob("checkpoints/step-*"))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs nothing, and two nodes for one job each."""
    utils = pytest.importorskip("ray.cluster_utils", reason="pip install 'lora-trainer[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(CHECKOUT))
        started = utils.Cluster(initialize_head=True, head_node_args=ONE_NODE | {"num_cpus": 0})
        for _ in range(2):
            started.add_node(**ONE_NODE)
        yield started
        started.shutdown()


@pytest.fixture
def night(tmp_path: Path, cluster: Any) -> Night:
    return Night(tmp_path, save_tiny_model(tmp_path / "model"), cluster)


def wait_until(is_so: Callable[[], object], batch: subprocess.Popen[str]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert batch.poll() is None, batch.communicate()[0]
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


def test_a_night_of_twelve_folders_with_two_workers_killed_and_a_node_added(night: Night) -> None:
    """Every folder gets its LoRA; what was killed continues from its checkpoint, and nothing is trained twice."""
    for name in NAMES:
        draw_images(night.place / "root" / name)
    batch = night.start("--jobs", "3")
    killed = list[str]()
    for _ in range(2):
        left = [name for name in NAMES if name not in killed]
        wait_until(lambda left=left: night.checkpointed(left), batch)
        name = night.checkpointed(left)[0]
        night.holder(name).kill()
        killed.append(name)
    added = night.cluster.add_node(**ONE_NODE)
    said, _ = batch.communicate(timeout=WAIT_SECONDS)
    night.cluster.remove_node(added)
    assert batch.returncode == 0, said
    jobs = night.jobs()
    assert {job["status"] for job in jobs.values()} == {"done"}
    assert jobs.keys() == set(NAMES)
    for name in NAMES:
        again = ["claimed", "lost"] if name in killed else []
        assert night.events(name) == [*again, "claimed", "ended"]
        log = (night.output / name / "logs" / "console.txt").read_text("utf-8")
        assert ("resuming from step-" in log) == (name in killed)
        assert any((night.output / name).glob("*.safetensors"))
    assert said.count("it will be continued") == 2


def test_a_node_that_dies_and_ctrl_c(night: Night) -> None:
    """A job of a dead node continues elsewhere; Ctrl-C saves, and --resume continues."""
    for name in NAMES[:3]:
        draw_images(night.place / "root" / name)
    batch = night.start("--jobs", "3", steps=700, checkpoint__every_n_steps=20)
    wait_until(lambda: len(night.checkpointed(NAMES[:3])) == 2, batch)
    node = night.cluster.add_node(**ONE_NODE)  # not that of the submitting process
    wait_until(lambda: len(night.checkpointed(NAMES[:3])) == 3, batch)
    night.cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: sum("lost" in night.events(name) for name in NAMES[:3]) == 1, batch)
    batch.send_signal(signal.SIGINT)
    said, _ = batch.communicate(timeout=WAIT_SECONDS)
    assert batch.returncode == 130, said
    assert "To continue, add --resume" in said
    assert "running" not in {job["status"] for job in night.jobs().values()}

    again = night.start("--jobs", "2", "--resume", steps=700, checkpoint__every_n_steps=20)
    said, _ = again.communicate(timeout=WAIT_SECONDS)
    assert again.returncode == 0, said
    assert {job["status"] for job in night.jobs().values()} == {"done"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("gpus=1", "No node of the Ray cluster has what a job asks for: gpus=1, cpus=1."),
        ("cpus=64", "No node of the Ray cluster has what a job asks for: gpus=0, cpus=64."),
        ("address=127.0.0.1:1", "No Ray cluster can be reached at 127.0.0.1:1"),
    ],
)
def test_what_the_cluster_cannot_do_is_refused_before_anything_is_written(
    night: Night, option: str, message: str
) -> None:
    draw_images(night.place / "root" / "ash")
    batch = night.start("--executor-option", option)
    said, _ = batch.communicate(timeout=120)
    assert batch.returncode == 2, said
    assert message in " ".join(said.split())
    assert not night.output.exists()


def test_a_node_with_another_version_is_refused(night: Night, tmp_path: Path) -> None:
    """Its package differs from that of the machine that submits."""
    changed = tmp_path / "changed" / "sitecustomize.py"
    changed.parent.mkdir()
    changed.write_text("import lora_trainer.core.version as version\nversion.__version__ = '9.9.9'\n")
    draw_images(night.place / "root" / "ash")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{changed.parent}{os.pathsep}{CHECKOUT}")
        node = night.cluster.add_node(**ONE_NODE | {"num_cpus": 2})
    batch = night.start("--executor-option", "cpus=2")  # which no other node has
    said, _ = batch.communicate(timeout=240)
    night.cluster.remove_node(node)
    assert batch.returncode == 2, said
    assert "ash: a node of the cluster cannot run it: ash is a job for lora-trainer" in " ".join(said.split())
    assert "and this is 9.9.9" in " ".join(said.split())
    assert night.jobs()["ash"]["attempts"] == 0
