"""Jobs of `batch --executor ray` that share a GPU by their plans, and data through the object store: `make test-ray`.

The GPUs are made up: Ray counts them, and a program named nvidia-smi tells their memory. The jobs train on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.conftest import CHECKOUT
from tests.ray.test_ray_cluster import ONE_NODE, WAIT_SECONDS, Night, wait_until
from tests.recipes.recipe import draw_images, save_tiny_model

pytestmark = pytest.mark.slow
# Of a node: its temporary files lie in a folder of its own, and it does not see the datasets.
ELSEWHERE = """
import os, sys, tempfile
tempfile.tempdir = os.environ["NODES_OWN"]
def refuse(event, arguments):
    if event in ("open", "os.scandir", "os.listdir") and str(arguments[0]).startswith(os.environ["HIDDEN"]):
        raise PermissionError(13, "this node does not see it", str(arguments[0]))
sys.addaudithook(refuse)
"""


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    """A head that runs nothing."""
    utils = pytest.importorskip("ray.cluster_utils", reason="pip install 'lora-trainer[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(CHECKOUT))
        started = utils.Cluster(initialize_head=True, head_node_args=ONE_NODE | {"num_cpus": 0})
        yield Night(tmp_path, save_tiny_model(tmp_path / "model"), started)
        started.shutdown()


def add_gpu(night: Night, mib: int) -> Any:
    """A node with one GPU of this memory."""
    tools = night.place / f"tools-{mib}"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\necho {mib}\n")
    (tools / "nvidia-smi").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
        return night.cluster.add_node(**ONE_NODE | {"num_cpus": 2, "num_gpus": 1})


def add_apart(night: Night, name: str) -> Path:
    """A node that does not see the datasets; the folder of its temporary files."""
    own, site = night.place / name, night.place / "site"
    own.mkdir()
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(ELSEWHERE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NODES_OWN", str(own))
        patch.setenv("HIDDEN", str(night.place / "root"))
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{CHECKOUT}")
        night.cluster.add_node(**ONE_NODE)
    return own


def record(night: Night, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((night.output / name / "run.json").read_text("utf-8"))
    return document


def test_two_jobs_share_a_gpu_by_their_plan_and_a_smaller_gpu_gets_none(night: Night) -> None:
    """Each is limited to its share; a node that comes later with too small a GPU is not used."""
    names = ("ash", "birch", "cedar")
    for name in names:
        draw_images(night.place / "root" / name)
    add_gpu(night, 2000)
    auto = ("--executor-option", "gpus=auto")
    batch = night.start("--jobs", "2", *auto, steps=120)
    wait_until(lambda: len(night.checkpointed(names)) == 2, batch)
    assert all("tools-2000" in night.holder(name).environ()["PATH"] for name in night.checkpointed(names))
    batch.terminate()
    said, _ = batch.communicate(timeout=WAIT_SECONDS)
    (share,) = re.findall(r"GPU share: ([\d.]+) \(plan: 0.7 GiB of 1.95 GiB\), 3 jobs", said)
    assert 1 / 3 < float(share) <= 0.5, "two jobs fit, and no third"

    refused = night.start("--jobs", "3", "--resume", *auto, steps=120)
    said, _ = refused.communicate(timeout=WAIT_SECONDS)
    assert refused.returncode == 2, said
    assert f"The Ray cluster has 1 GPU: 2 jobs at once with {share} of a GPU each, and --jobs is 3." in said

    again = night.start("--jobs", "2", "--resume", *auto, "--executor-option", "cpus=1.5", steps=120)
    wait_until(lambda: len(night.checkpointed(names)) == 1, again)  # the other waits for CPUs
    add_gpu(night, 700)
    said, _ = again.communicate(timeout=WAIT_SECONDS)
    assert again.returncode == 0, said
    assert "has a GPU of 0.684 GiB, and the job's plan is for 1.95 GiB: it waits for another node" in said
    assert {job["status"] for job in night.jobs().values()} == {"done"}
    for name in names:
        found = record(night, name)
        assert found["config"]["memory"]["limit_gib"] == pytest.approx(float(share) * 2000 / 1024, abs=0.01)
        assert found["origins"]["memory.limit_gib"] == "GPU share"
        log = (night.output / name / "logs" / "console.txt").read_text("utf-8")
        assert f"GPU share: {share} (plan: 0.7 GiB of 1.95 GiB); memory.limit_gib=0.87 for this run" in log


def test_a_job_that_fits_no_gpu_is_refused_before_any_is_submitted(night: Night) -> None:
    draw_images(night.place / "root" / "ash")
    draw_images(night.place / "root" / "birch")
    (night.place / "root" / "birch" / "lora.toml").write_text("[memory]\nlimit_gib = 0.75\n")
    add_gpu(night, 2000)
    batch = night.start("--jobs", "2", "--executor-option", "gpus=auto")
    said, _ = batch.communicate(timeout=WAIT_SECONDS)
    assert batch.returncode == 2, said
    assert "birch: Training needs 0.71 GiB at its peak" in said or "birch: Training needs 0.7 GiB at its peak" in said
    assert "The largest GPU of the cluster has 1.95 GiB." in said
    assert night.jobs()["ash"]["attempts"] == 0


def test_a_night_with_data_from_the_object_store_and_a_worker_killed(night: Night) -> None:
    """Two nodes that do not see the datasets train the LoRAs of a batch that reads them by path."""
    names = ("ash", "birch", "cedar", "elm")
    for name in names:
        draw_images(night.place / "root" / name)
    (night.place / "root" / "ash" / "orphan.txt").write_text("a caption without an image")  # to be found
    nodes = [add_apart(night, "node-1"), add_apart(night, "node-2")]
    batch = night.start("--jobs", "2", "--executor-option", "data=store")
    wait_until(lambda: night.checkpointed(names), batch)
    killed = night.checkpointed(names)[0]
    night.holder(killed).kill()
    said, _ = batch.communicate(timeout=WAIT_SECONDS)
    assert batch.returncode == 0, said
    assert "data: 4 datasets, 0.000 GiB, through Ray's object store" in said
    assert {job["status"] for job in night.jobs().values()} == {"done"}
    copies = [path for node in nodes for path in node.glob("lora-trainer-data-*/*") if len(path.name) == 64]
    assert len({path.name for path in copies}) == 4
    assert not [path for node in nodes for path in node.glob("lora-trainer-data-*/.*")]

    by_path = subprocess.run(
        [*night_by_path(night)], env=dict(os.environ) | {"PYTHONPATH": str(CHECKOUT)}, capture_output=True, check=False
    )
    assert by_path.returncode == 0, by_path.stdout
    for name in names:
        again = ["claimed", "lost"] if name == killed else []
        assert night.events(name) == [*again, "claimed", "ended"]
        log = (night.output / name / "logs" / "console.txt").read_text("utf-8")
        assert ("resuming from step-" in log) == (name == killed)
        assert "files from Ray's object store, in " in log
        found, other = record(night, name), json.loads((night.place / "path" / name / "run.json").read_text("utf-8"))
        assert found["config"]["data"] == other["config"]["data"]
        assert found["data_hash"] == other["data_hash"]
        assert found["dataset"] == other["dataset"]
        there, here = (
            load_file(folder / name / f"{name}.safetensors") for folder in (night.output, night.place / "path")
        )
        assert there.keys() == here.keys()
        assert all(there[key].tobytes() == here[key].tobytes() for key in here)


def night_by_path(night: Night) -> list[str]:
    """The same batch on this machine, as a command."""
    started = night.start("--dry-run")
    command = list(map(str, started.args))  # type: ignore[call-overload]
    started.communicate(timeout=WAIT_SECONDS)
    command.remove("--dry-run")
    while "--executor-option" in command:
        at = command.index("--executor-option")
        del command[at : at + 2]
    command[command.index("--executor") + 1] = "local"
    command[command.index("--output") + 1] = str(night.place / "path")
    return command
