"""`batch --together`: several folders' LoRAs on one base, each as if it were alone."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.core.interrupt import signalled
from lora_trainer.core.io import read_json
from lora_trainer.jobs import worker
from lora_trainer.jobs.job_store import JobStore
from lora_trainer.run.requesting import send_request
from lora_trainer.training import feed, run_group
from lora_trainer.training.metrics import Metrics
from tests.recipes.recipe import record, rows, tensor_bytes
from tests.recipes.test_batch import STEPS, Night, make_root

NAMES = ("ash", "birch", "cedar")


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


SMALL = {"validation__every_n_steps": "2", "gates__lora_check": "off", "checkpoint__export_dtype": "fp32"}


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """Yields a list that gets how many runs are in each pass of the base with gradients."""
    found, real = list[int](), run_group.RunGroup._forward

    def counted(self: Any, members: Any, requests: Any) -> Any:
        if requests[0].trains:
            found.append(len(members))
        return real(self, members, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_group.RunGroup, "_forward", counted)
        yield found


def new_night(place: Path, images: Path, model: Path, cache: Path) -> Night:
    """Three folders with the same images, and settings of their own."""
    root = make_root(place / "root", images, *NAMES)
    for number, name in enumerate(NAMES):
        own = f"[train]\nseed = {number}\n[lora]\nrank = {(4, 4, 2)[number]}\n"
        own += f"[optimizer]\nlearning_rate = {1e-3 * (number + 1)}\n"
        (root / name / "lora.toml").write_text(own, encoding="utf-8")
    return Night(root, place / "night", model, cache)


@pytest.fixture
def night(tmp_path: Path, images: Path, tiny_model: Path, shared_cache: Path) -> Night:
    return new_night(tmp_path, images, tiny_model, shared_cache)


@dataclass(frozen=True)
class Over:
    """The same folders trained together and one after the other, with the passes of each."""

    together: Night
    alone: Night
    passes: list[int]
    passes_alone: list[int]


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory, images: Path, tiny_model: Path, shared_cache: Path) -> Over:
    night = new_night(tmp_path_factory.mktemp("together"), images, tiny_model, shared_cache)
    other = replace(night, output=night.output.parent / "alone")
    with counted_passes() as passes:
        assert night.run("--together", "3", **SMALL) == 0
    with counted_passes() as passes_alone:
        assert other.run(**SMALL) == 0
    return Over(night, other, passes, passes_alone)


def assert_same_loras(one: Night, other: Night, names: tuple[str, ...] = NAMES) -> None:
    """To the rounding of a batch in fp32, which Adam's first steps enlarge: 0.1 % of what was trained."""
    for name in names:
        mine, theirs = (load_file(night.output / name / f"{name}.safetensors") for night in (one, other))
        assert list(mine) == list(theirs)
        ups = [key for key in mine if "lora_up" in key]
        apart = torch.cat([(mine[key].float() - theirs[key].float()).flatten() for key in ups]).norm()
        assert apart < 1e-3 * torch.cat([theirs[key].float().flatten() for key in ups]).norm()


def test_each_folder_gets_the_lora_it_would_have_got_alone(over: Over) -> None:
    assert over.together.document()["done"] == 3
    assert max(over.passes) == 3
    assert len(over.passes) < sum(over.passes) / 2, over.passes
    assert over.passes_alone == [], "nothing is joined without --together"
    assert_same_loras(over.together, over.alone)
    for name in NAMES:
        mine, theirs = over.together.output / name, over.alone.output / name
        assert record(mine)["config"]["train"] == record(theirs)["config"]["train"]
        losses = [{row["step"]: row["loss"] for row in rows(each, "validation.jsonl")} for each in (mine, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_a_request_is_done_by_its_run_and_changes_no_bytes(
    over: Over, night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = feed.make_micro_batch, list[Path]()

    def asking(batch: Any, step: int, seed: int, *more: Any) -> Any:
        if seed == 1 and not asked:
            asked.extend(send_request(night.output / "birch", do) for do in ("save", "sample"))
        return real(batch, step, seed, *more)

    monkeypatch.setattr(feed, "make_micro_batch", asking)
    assert night.run("--together", "3", **SMALL) == 0
    save, sample = (read_json(path) for path in asked)
    assert save["result"].endswith(f"weights/birch-step-{save['step']:06}.safetensors")
    assert sample["result"] == f"generated samples/step-{sample['step']:06}.png"
    assert [len(record(night.output / name)["weights"]) for name in NAMES] == [0, 1, 0]
    for name in NAMES:
        one, other = (each.output / name / f"{name}.safetensors" for each in (night, over.together))
        assert tensor_bytes(one) == tensor_bytes(other)


def test_a_folder_that_turns_nan_is_reported_and_leaves_the_others_bytes(
    over: Over, night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is not finite from the second step on, each of which is skipped."""
    real = feed.make_micro_batch

    def spoiled(batch: Any, step: int, seed: int, *more: Any) -> Any:
        micro = real(batch, step, seed, *more)
        return replace(micro, latents=micro.latents * torch.nan) if seed == 1 and step > 0 else micro

    monkeypatch.setattr(feed, "make_micro_batch", spoiled)
    assert night.run("--together", "3", **SMALL) == 0
    for name in ("ash", "cedar"):
        one, other = (each.output / name / f"{name}.safetensors" for each in (night, over.together))
        assert tensor_bytes(one) == tensor_bytes(other)
    skipped = [row["step"] for row in rows(night.output / "birch") if row.get("skipped")]
    assert skipped == list(range(2, STEPS + 1))


def test_a_folder_is_refused_or_fails_by_itself(over: Over, night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has one image many times, the second fails in its second step; the third is trained to its end."""
    images = sorted((night.root / "ash").glob("*.png"))
    for image in images[1:]:
        shutil.copyfile(images[0], image)
    real = feed.make_micro_batch

    def failing(batch: Any, step: int, seed: int, *more: Any) -> Any:
        if seed == 1 and step == 1:
            raise OSError("the disk of birch is gone")
        return real(batch, step, seed, *more)

    with monkeypatch.context() as patch:
        patch.setattr(feed, "make_micro_batch", failing)
        assert night.run("--together", "3", **SMALL) == 5
    assert night.jobs("status") == {"ash": "refused", "birch": "failed", "cedar": "done"}
    assert not (night.output / "ash").exists()
    assert "the disk of birch is gone" in night.jobs("reason")["birch"]
    assert record(night.output / "cedar")["steps"] == STEPS
    assert_same_loras(night, over.alone, ("cedar",))


def test_a_stopped_group_is_resumed_and_ends_as_if_never_stopped(
    over: Over, night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal after the first step: all runs save, and --resume continues each from its checkpoint."""
    real = Metrics.add

    def interrupted(self: Any, state: Any, *more: Any) -> None:
        real(self, state, *more)
        if state.step == 1 and not signalled():
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "add", interrupted)
        assert night.run("--together", "3", **SMALL) == 143
    assert set(night.jobs("status").values()) == {"stopped"}
    stopped = {name: record(night.output / name)["steps"] for name in NAMES}
    assert set(stopped.values()) <= {1, 2}
    assert night.run("--together", "2", "--resume", **SMALL) == 0
    assert night.document()["done"] == 3
    assert all(f"resuming from step-{steps:06}" in night.log(name) for name, steps in stopped.items())
    assert_same_loras(night, over.alone)


def test_a_cancelled_run_stops_by_itself(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cancelled in its first step, and stops before the end; the others continue."""
    real = Metrics.add

    def cancelling(self: Any, state: Any, *more: Any) -> None:
        real(self, state, *more)
        if self._run.folder.name == "birch" and state.step == 1:
            JobStore(night.output).cancel(["birch"])
            wait_until(lambda: signalled())

    monkeypatch.setattr(worker, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(Metrics, "add", cancelling)
    assert night.run("--together", "3", **SMALL) == 0
    assert night.jobs("status") == {"ash": "done", "birch": "cancelled", "cedar": "done"}
    assert record(night.output / "birch")["steps"] < STEPS


def test_settings_that_need_a_base_of_their_own_are_named_and_trained_alone(
    night: Night, capsys: pytest.CaptureFixture[str]
) -> None:
    (night.root / "birch" / "lora.toml").write_text("[lora]\ndropout = 0.1\nrank = 4\n", encoding="utf-8")
    with counted_passes() as passes:
        assert night.run("--together", "3", **SMALL) == 0
    assert "birch trains alone, not with --together: lora.dropout" in capsys.readouterr().out
    assert max(passes) == 2
    assert night.document()["done"] == 3


@pytest.mark.parametrize("count", ["0", "-2"])
def test_fewer_than_one_together_is_refused(night: Night, count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert night.run("--together", count) == 2
    assert f"--together is {count}, must be at least 1." in capsys.readouterr().err
    assert not night.output.exists()
