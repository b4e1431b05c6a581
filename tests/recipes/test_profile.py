"""`--profile` and `profile RUN`: what is written, what it says of a starved run and of another, and that nothing changes."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lora_trainer.cli.main import main
from lora_trainer.core.errors import WRONG_USAGE
from lora_trainer.training import step
from tests.recipes.recipe import Bench, draw_images, exported, losses, patched, save_tiny_model
from tests.recipes.test_signals import signal_in

STEPS = 11  # of the last three the phases are shown: the profiler slowed none of them
SHORT = {"profile__wait": 1, "profile__warmup": 1, "profile__active": 1, "validation__split": 0}
LARGE = 1200  # pixels: reading such an image takes longer than a tiny model's step
Document = dict[str, Any]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("profile")
    return Bench(save_tiny_model(folder), draw_images(folder / "data"), folder / "runs", folder / "cache")


@pytest.fixture(scope="module")
def healthy(bench: Bench) -> Path:
    assert bench.run("healthy", "--profile", steps=STEPS, **SHORT) == 0
    return bench.folder("healthy")


@pytest.fixture(scope="module")
def starved(bench: Bench) -> Path:
    """Large images, each read, decoded and encoded in every step that trains it."""
    data = bench.data.parent / "large"
    data.mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (LARGE, LARGE, 3), dtype=np.uint8)
    for index in range(3):
        Image.fromarray(np.roll(noise, 400 * index, axis=0)).save(data / f"{index}.png", compress_level=1)
        (data / f"{index}.txt").write_text(f"noise number {index}", encoding="utf-8")
    settings = {**SHORT, "cache__latents": "false", "train__effective_batch_size": 1}
    assert replace(bench, data=data).run("starved", "--profile", steps=STEPS, **settings) == 0
    return bench.folder("starved")


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[Document, str]]:
    """What `profile RUN` shows: its JSON, and its text."""

    def shown(run: Path) -> tuple[Document, str]:
        capsys.readouterr()
        assert main(["profile", str(run), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main(["profile", str(run)]) == 0
        return document, capsys.readouterr().out

    return shown


Read = Callable[[Path], tuple[Document, str]]


def test_a_starved_run_is_bound_by_its_data_and_another_is_not(healthy: Path, starved: Path, read: Read) -> None:
    document, text = read(starved)
    assert "data-bound" in [each["name"] for each in document["bounds"]]
    assert document["answers"]["Is it the data?"].startswith("yes: a step waits ")
    command = f"lora-trainer train --config {starved}/config.toml --name starved-2 --set cache.latents=true"
    assert command in [each["command"] for each in document["advice"]]
    assert "data-bound, " in text
    assert command in text

    document, text = read(healthy)
    assert document["bounds"][0]["name"] != "data-bound"
    assert "cache.latents" not in text
    for part in (
        "forward",
        "backward",
        "Is it Python?",
        "MFU",
        "operators by their own time",
        "to try:",
        "trace-step-000003.json.gz",
    ):
        assert part in text


def test_phases_sum_to_the_step(healthy: Path, read: Read) -> None:
    phases = read(healthy)[0]["phases"]
    assert {"data", "copy", "forward", "backward", "clip", "optimizer", "metrics", "other"} <= set(phases)
    assert sum(phases.values()) == pytest.approx(1.0)


def test_the_trace_has_the_phases_by_name(healthy: Path) -> None:
    folder = healthy / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "operators.json",  # the report at the end read the trace
        "phases.json",
        "trace-step-000003.json.gz",
    ]
    with gzip.open(folder / "trace-step-000003.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    for phase in ("data", "copy", "forward", "backward", "clip", "optimizer", "metrics"):
        assert names.count(phase) >= 1, phase


def test_operations_are_those_that_the_plan_counts(bench: Bench) -> None:
    data = bench.data.parent / "square"
    draw_images(data, 4)  # two full steps: in an epoch of three images the second step has one
    for path in data.glob("*.png"):
        Image.open(path).resize((96, 96)).save(path)
    few = {"profile__wait": 0, "profile__warmup": 1, "profile__active": 2, "train__max_micro_batch_size": 1}
    assert replace(bench, data=data).run("counted", "--profile", steps=3, validation__split=0, **few) == 0
    folder = bench.folder("counted") / "profile"
    found = json.loads((folder / "operators.json").read_text("utf-8"))
    planned = json.loads((folder / "phases.json").read_text("utf-8"))["device"]["tflop_per_step"]
    assert found["steps"] == [2, 3]
    assert found["flop"] / 1e12 == pytest.approx(planned, rel=1e-6)


def test_a_profile_changes_nothing(bench: Bench, healthy: Path) -> None:
    assert bench.run("plain", steps=STEPS, validation__split=0) == 0
    assert exported(bench.folder("plain"))["kohya"] == exported(healthy)["kohya"]
    assert losses(bench.folder("plain")) == losses(healthy)
    assert not (bench.folder("plain") / "profile").exists()


def test_a_run_without_a_profile_has_its_steps_and_waits(bench: Bench, read: Read) -> None:
    if not bench.folder("plain").exists():
        bench.run("plain", steps=STEPS, validation__split=0)
    document, text = read(bench.folder("plain"))
    assert document["profiled"] is False
    assert set(document["phases"]) == {"data"}
    assert document["mfu"] is None
    assert document["answers"]["Forward or backward?"] == "not known without a profile"
    assert "This run has no profile. To take one, of the same settings:" in text
    assert f"lora-trainer train --config {bench.folder('plain')}/config.toml --name plain-profile --profile" in text


def test_the_report_of_a_profiled_run_has_a_section_of_it(healthy: Path) -> None:
    page = (healthy / "report.html").read_text("utf-8")
    assert "Where the time went" in page
    assert "Is it the data?" in page


def test_more_is_recorded_on_request_in_each_repetition(bench: Bench) -> None:
    few = {"profile__wait": 1, "profile__warmup": 1, "profile__active": 1, "profile__repeat": 2}
    assert bench.run("long", "--profile", "long", steps=7, validation__split=0, **few) == 0
    folder = bench.folder("long") / "profile"
    assert json.loads((folder / "operators.json").read_text("utf-8"))["trace"] == "trace-step-000006.json.gz"
    assert sorted(path.name for path in folder.glob("*-step-*")) == [
        "stacks-step-000003.txt",
        "stacks-step-000006.txt",
        "trace-step-000003.json.gz",
        "trace-step-000006.json.gz",
    ]
    assert "train_step" in (folder / "stacks-step-000006.txt").read_text("utf-8")


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_stopped_run_writes_no_trace_and_a_resumed_one_its_own(
    bench: Bench, healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with patched(step, "backward", signal_in(step, "backward", 5)):
        assert bench.run("stopped", "--profile", steps=STEPS, **SHORT | {"profile__active": 9}) == 143
    folder = bench.folder("stopped") / "profile"
    assert "profile: stopped while recording, after step " in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["phases.json"]
    assert bench.run("stopped", "--profile", "--resume", steps=STEPS, **SHORT) == 0
    assert len(list(folder.glob("trace-step-*.json.gz"))) == 1
    assert exported(bench.folder("stopped"))["kohya"] == exported(healthy)["kohya"]


@pytest.mark.parametrize("failing", ["step", "export_chrome_trace"])
def test_a_profiler_that_fails_ends_only_the_profile(
    failing: str, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the driver is gone")

    few = {"profile__wait": 0, "profile__warmup": 1, "profile__active": 1, "profile__repeat": 2}
    with patched(torch.profiler.profile, failing, fail):
        assert bench.run(failing, "--profile", steps=4, validation__split=0, **few) == 0
    assert capsys.readouterr().out.count("the training continues (the driver is gone)") == 1
    assert not torch._C._autograd._profiler_enabled()
    assert [path.name for path in (bench.folder(failing) / "profile").iterdir()] == ["phases.json"]


def test_errors_name_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tmp_path)]) == WRONG_USAGE
    assert "there is no run.json" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    assert main(["profile", str(tmp_path)]) == WRONG_USAGE
    assert "has no finished step" in capsys.readouterr().err
    assert main(["train", "--profile", "shrt"]) == WRONG_USAGE
    assert "short" in capsys.readouterr().err
