"""A batch through the command: every folder gets a LoRA or a reason, and nothing is done twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.core import hardware
from lora_trainer.core.interrupt import signalled
from lora_trainer.core.io import write_json
from lora_trainer.jobs import job_document, job_state, job_store, worker
from lora_trainer.jobs.job_state import Ending, NewJob
from lora_trainer.jobs.job_store import JobStore, open_batch
from lora_trainer.models import kept
from lora_trainer.models.families import FAMILIES
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.run.train import RunResult
from lora_trainer.run_folder.record import Record
from lora_trainer.training import fallbacks
from tests.recipes.recipe import QUICK, contents, draw_images, exported, patched, record, rows, save_tiny_model

STEPS = 3


class PowerCut(BaseException):
    """Ends the process without running error handlers."""


@dataclass(frozen=True)
class Night:
    """A ROOT, its output folder, and the command."""

    root: Path
    output: Path
    model: Path
    cache: Path

    def arguments(self, *extra: str, **settings: object) -> list[str]:
        values = QUICK | {"cache.dir": str(self.cache), "checkpoint.every_n_steps": "1"}
        values["gates.lora"] = "0"  # nothing is scored
        values |= {key.replace("__", "."): str(value) for key, value in settings.items()}
        chosen = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        places = ["--model", str(self.model), "--output", str(self.output)]
        return ["batch", str(self.root), *places, "--max-steps", str(STEPS), *chosen, *extra]

    def run(self, *extra: str, **settings: object) -> int:
        return main(self.arguments(*extra, **settings))

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "batch.json").read_text(encoding="utf-8"))
        return found

    def jobs(self, key: str) -> dict[str, Any]:
        return {job["name"]: job[key] for job in self.document()["jobs"]}

    def log(self, name: str) -> str:
        return (self.output / name / "logs" / "console.txt").read_text(encoding="utf-8")


def make_root(root: Path, images: Path, *names: str) -> Path:
    for name in names:
        shutil.copytree(images, root / name)
    return root


@pytest.fixture
def night(tmp_path: Path, images: Path, tiny_model: Path, shared_cache: Path) -> Night:
    """Three good folders with the same images."""
    root = make_root(tmp_path / "root", images, "ash", "birch", "cedar")
    return Night(root, tmp_path / "night", tiny_model, shared_cache)


@dataclass(frozen=True)
class Seen:
    """A finished batch: its exit code, the files it read, and ROOT before it."""

    night: Night
    code: int
    reads: list[str]
    before: dict[str, str]


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, images: Path) -> Seen:
    """Six folders, two of them bad, with their own caches."""
    place = tmp_path_factory.mktemp("over")
    root = make_root(place / "root", images, "ash", "birch", "cedar [x]", "elm", "fir")
    (root / "elm" / "lora.toml").write_text("[lora]\nrank = 8\n", encoding="utf-8")
    other = save_tiny_model(place / "models", "sdxl")
    path = os.path.relpath(other, root / "cedar [x]").replace("\\", "/")
    (root / "cedar [x]" / "lora.toml").write_text(f"[model]\npath = '{path}'\n", encoding="utf-8")
    (root / "fir" / "lora.toml").write_text("[lora]\nrang = 8\nalpha = -1\n", encoding="utf-8")
    for caption in sorted(draw_images(root / "dull").glob("*.txt"))[:5]:
        caption.unlink()
    night = Night(root, place / "night", tiny_model, place / "caches")
    reads: list[str] = []
    family = FAMILIES["sd15"]

    def counting(what: str, load: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            reads.append(what)
            return load(*arguments)

        return counted

    seen = replace(
        family,
        denoiser=replace(family.denoiser, load=counting("denoiser", family.denoiser.load)),
        pipeline=replace(family.pipeline, make=counting("pipeline", family.pipeline.make)),
    )
    before = contents(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "sd15", seen)
        patch.setattr(kept, "MEMORY_FULL", 101.0)  # percent: also if other programs use all of it
        code = night.run()
    return Seen(night, code, reads, before)


def test_good_folders_are_trained_and_bad_ones_have_a_reason(over, capsys):
    document, night = over.night.document(), over.night
    assert over.code == document["exit_code"] == 3, "the largest of 0, 2 and 3"
    assert {key: document[key] for key in ("done", "refused", "failed", "waiting")} == {
        "done": 4,
        "refused": 1,
        "failed": 1,
        "waiting": 0,
    }
    status = {"ash": "done", "birch": "done", "cedar [x]": "done", "dull": "refused", "elm": "done", "fir": "failed"}
    assert night.jobs("status") == status
    assert list(night.jobs("status")) == sorted(status)
    assert night.jobs("exit_code") == dict.fromkeys(status, 0) | {"dull": 3, "fir": 2}
    assert "5 of 10 files have no caption" in night.jobs("reason")["dull"]
    assert "lora.rang (from lora.toml)" in night.jobs("reason")["fir"]
    assert "lora.alpha = -1 (from lora.toml)" in night.jobs("reason")["fir"]
    assert night.jobs("scores")["dull"]["dataset"] < 0.8
    losses = {job.name: job.val_loss for job in JobStore(night.output).read_jobs()}
    for name in ("ash", "birch", "cedar [x]", "elm"):
        folder = Path(night.jobs("output")[name])
        assert (folder / f"{name}.safetensors").is_file()
        assert record(folder)["scores"] == night.jobs("scores")[name]
        assert night.jobs("seconds")[name] > 0
        assert night.jobs("reason")[name] is None
        *_, newest = (folder / "validation.jsonl").read_text("utf-8").splitlines()
        assert losses[name] == json.loads(newest)["loss"]
    assert not (night.output / "dull").exists()
    assert not (night.output / "fir").exists()
    assert main(["batch", "status", str(night.output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:7]] == ["ash", "birch", "cedar", "dull", "elm", "fir"]
    assert sum(line.startswith("fir: ") for line in lines) == 1


def test_the_whole_gate_applies_to_each_job(night):
    (night.root / "ash" / "lora.toml").write_text("[optimizer]\nlearning_rate = 1e-12\n", encoding="utf-8")
    shutil.rmtree(night.root / "cedar")
    (night.root / "birch" / "lora.toml").write_text("[gates]\nlora = 0\n", encoding="utf-8")
    assert night.run("--max-steps", "6", gates__lora=Config().gates.lora, gates__lora_check="lite") == 4
    assert night.jobs("status") == {"ash": "refused", "birch": "done"}
    assert night.jobs("outcome") == {"ash": "refused", "birch": "passed"}
    assert night.jobs("scores")["ash"]["lora"] == 0.0
    assert "changes nothing" in night.jobs("reason")["ash"]


def test_a_batch_refuses_a_lora_that_has_not_seen_every_image(night):
    shutil.rmtree(night.root / "birch")
    shutil.rmtree(night.root / "cedar")
    assert night.run(gates__lora="1e-9", gates__lora_check="lite") == 4
    assert night.jobs("status") == {"ash": "refused"}
    assert "9 images, 6 samples trained in 3 steps: 3 images were never trained" in night.jobs("reason")["ash"]
    document = json.loads((night.output / "ash" / "run.json").read_text(encoding="utf-8"))
    assert document["lora"]["cost"]["forward_passes"] == 0  # it has decided without any
    assert night.run("--resume", gates__lora="1e-9", gates__lora_check="lite") == 4
    assert "3 images were never trained" in night.jobs("reason")["ash"]


def test_nothing_is_written_beside_the_images(over):
    assert contents(over.night.root) == over.before


def test_a_folders_own_config_takes_precedence(over):
    elm, ash = record(over.night.output / "elm"), record(over.night.output / "ash")
    assert (elm["config"]["lora"]["rank"], elm["origins"]["lora.rank"]) == (8, "lora.toml")
    assert (ash["config"]["lora"]["rank"], ash["origins"]["lora.rank"]) == (4, "--set")
    cedar = record(over.night.output / "cedar [x]")
    assert (ash["model"]["family"], cedar["model"]["family"]) == ("sd15", "sdxl")
    assert (cedar["origins"]["model.path"], cedar["origins"]["sample.num_inference_steps"]) == ("lora.toml", "--set")
    assert "family preset sdxl" in cedar["origins"].values(), "another model brings its family's settings"


def test_the_base_model_is_read_once_and_caches_are_shared(over):
    assert over.reads == ["pipeline"]
    assert "latent cache: 10 images, encoding 10" in over.night.log("ash")
    assert "latent cache: 10 images, all cached" in over.night.log("elm")


def test_a_job_trains_the_same_as_a_single_run(over, tmp_path):
    night = over.night
    alone = night.arguments("--data", str(night.root / "elm"), "--name", "elm", lora__rank=8)
    alone[alone.index("--output") + 1] = str(tmp_path)
    assert main(["produce", *alone[2:]]) == 0
    assert exported(tmp_path / "elm") == exported(night.output / "elm")


def test_a_second_batch_does_nothing_until_a_folder_is_fixed(over, tmp_path, capsys):
    # Neither may change the batch that other tests read.
    shutil.copytree(over.night.output, tmp_path / "night")
    shutil.copytree(over.night.root, tmp_path / "root")
    night = replace(over.night, root=tmp_path / "root", output=tmp_path / "night")
    assert night.run() == 2
    assert "holds a batch already" in capsys.readouterr().err
    assert night.run("--resume") == 2, "a batch of another ROOT, which is still there"
    assert "holds a batch of" in capsys.readouterr().err
    JobStore(night.output).write_note("root", str(night.root))
    (night.root / "fir" / "lora.toml").unlink()
    before = contents(night.output / "ash")
    assert night.run("--resume") == 3
    assert contents(night.output / "ash") == before
    assert night.jobs("attempts") == {"ash": 1, "birch": 1, "cedar [x]": 1, "dull": 2, "elm": 1, "fir": 2}
    assert night.jobs("status")["fir"] == "done"


def test_a_batch_exports_a_lost_lora_again(over, tmp_path, steps_trained, capsys):
    shutil.copytree(over.night.output, tmp_path / "night")
    night = replace(over.night, output=tmp_path / "night")
    attempts, files = night.jobs("attempts"), exported(night.output / "ash")
    (night.output / "ash" / "ash.safetensors").unlink()
    whole = bytearray((night.output / "birch" / "birch.safetensors").read_bytes())
    whole[-20] ^= 1
    (night.output / "birch" / "birch.safetensors").write_bytes(whole)
    before = contents(night.output / "elm")
    assert night.run("--resume") == 3  # of the data that was refused
    assert "2 finished jobs among them, whose LoRA or run is missing or damaged: ash, birch" in capsys.readouterr().out
    assert night.jobs("status")["ash"] == night.jobs("status")["birch"] == "done"
    changed = {name for name, count in night.jobs("attempts").items() if count != attempts[name]}
    assert changed == {"ash", "birch", *(name for name in attempts if night.jobs("status")[name] == "refused"), "fir"}
    assert steps_trained == []
    assert exported(night.output / "ash") == exported(night.output / "birch") == files
    assert contents(night.output / "elm") == before


def in_run(name: str, step: int, act: Callable[[], None]) -> Callable[[Trackers, list[dict[str, Any]]], None]:
    """`Trackers.steps` that acts when a step of one run is about to be written."""
    written = Trackers.steps

    def steps(trackers: Trackers, found: list[dict[str, Any]]) -> None:
        if trackers._metrics.parent.name == name and any(row["step"] == step for row in found):
            act()
        written(trackers, found)

    return steps


@pytest.fixture
def steps_trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every step that is trained."""
    trained: list[int] = []
    true = fallbacks.train_step

    def train_step(*arguments: Any) -> Any:
        trained.append(1)
        return true(*arguments)

    monkeypatch.setattr(fallbacks, "train_step", train_step)
    return trained


def test_a_killed_batch_trains_nothing_twice(night, steps_trained, monkeypatch):
    def die() -> None:
        raise PowerCut

    host, number, started, machine = json.loads(job_state.this_process())
    dead = json.dumps([host, number, started - 1000, machine])
    cut, unheld = patched(Trackers, "steps", in_run("birch", 3, die)), patched(job_store, "this_process", lambda: dead)
    with cut, unheld, pytest.raises(PowerCut):
        night.run()
    first = contents(night.output / "ash")
    assert night.jobs("status") == {"ash": "done", "birch": "running", "cedar": "waiting"}
    assert night.run("--resume") == 0
    assert night.jobs("attempts") == {"ash": 1, "birch": 2, "cedar": 1}
    assert contents(night.output / "ash") == first
    assert "resuming from step-000002" in night.log("birch")
    # Only the step in progress at the power loss is trained again.
    assert len(steps_trained) == 3 * STEPS + 1
    assert exported(night.output / "birch")["kohya"] == exported(night.output / "ash")["kohya"]
    assert [row["step"] for row in rows(night.output / "birch")] == [1, 2, 3]


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_stopped_batch_resumes(name, code, night, steps_trained, capsys):
    with patched(Trackers, "steps", in_run("ash", 1, lambda: os.kill(os.getpid(), getattr(signal, name)))):
        assert night.run() == code
    assert "To continue, add --resume" in capsys.readouterr().out
    assert night.jobs("status") == {"ash": "stopped", "birch": "waiting", "cedar": "waiting"}
    assert night.document()["exit_code"] == code
    shutil.rmtree(night.root / "birch")
    shutil.rmtree(night.root / "cedar")
    assert night.run("--resume") == 0
    assert night.jobs("status") == {"ash": "done"}
    assert len(steps_trained) == STEPS


def test_workers_take_the_jobs_of_a_queue_that_was_only_filled(night, capsys):
    shutil.rmtree(night.root / "cedar")
    assert night.run("--jobs", "0") == 0
    assert night.document()["waiting"] == 2
    assert {path.name for path in night.output.iterdir()} == {"jobs", "batch.json"}
    file = json.loads((night.output / "jobs" / "birch" / "job.json").read_text("utf-8"))
    assert (file["config"]["train"]["max_steps"], file["origins"]["train.max_steps"]) == (STEPS, "--max-steps")
    assert len(file["data_hash"]) == 64
    assert set(file["cache_keys"]) == {"images", "texts"}
    assert f"lora-trainer batch work {night.output}" in capsys.readouterr().out
    with patched(Trackers, "steps", in_run("ash", 1, lambda: signal.raise_signal(signal.SIGTERM))):
        assert main(["batch", "work", str(night.output)]) == 143
    assert night.document()["waiting"] == 2, "the next worker resumes what this one stopped"
    assert main(["batch", "work", str(night.output)]) == 0
    assert night.jobs("attempts") == {"ash": 2, "birch": 1}
    assert [row["step"] for row in rows(night.output / "ash")] == [1, 2, 3]
    capsys.readouterr()
    assert main(["batch", "status", str(night.output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == night.document()
    assert main(["batch", "status", str(night.output)]) == 0
    assert "2 done" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_jobs_are_cancelled_and_retried(night, monkeypatch, capsys):
    """One that trains saves and stops, one that waits never begins, and the batch continues with the rest."""
    monkeypatch.setattr(worker, "LOOK_SECONDS", 0.05)
    output = str(night.output)

    def cancel() -> None:
        for _ in range(2):  # a second time changes nothing
            assert main(["batch", "cancel", output, "ash", "birch"]) == 0
        for _ in range(6000):
            if signalled():
                return
            time.sleep(0.05)
        raise AssertionError("the worker did not see it")

    with patched(Trackers, "steps", in_run("ash", 1, cancel)):
        assert night.run() == 0, "what somebody cancels is no failure"
    printed = capsys.readouterr().out
    assert "ash: saves and stops within seconds, and is cancelled then" in printed
    assert "birch: cancelled already" in printed
    assert night.jobs("status") == {"ash": "cancelled", "birch": "cancelled", "cedar": "done"}
    assert night.jobs("exit_code") == {"ash": None, "birch": None, "cedar": 0}
    assert record(night.output / "ash")["status"] == "stopped"
    assert (night.output / "ash" / "checkpoints" / "step-000001").is_dir()
    assert night.run("--resume") == 0
    assert night.jobs("status")["ash"] == "cancelled", "only a retry trains it"
    assert main(["batch", "retry", output]) == 0
    assert f"2 to run, by workers that run now, or by: lora-trainer batch work {output}" in capsys.readouterr().out
    assert main(["batch", "retry", output, "cedar", "ash"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["cedar: done already", "ash: waiting already"]
    assert main(["batch", "work", output]) == 0
    assert night.jobs("status") == {"ash": "done", "birch": "done", "cedar": "done"}
    assert night.jobs("attempts") == {"ash": 2, "birch": 1, "cedar": 1}
    assert [row["step"] for row in rows(night.output / "ash")] == [1, 2, 3]


def test_cancel_and_retry_name_what_they_cannot_do(night, capsys):
    store = JobStore(night.output)
    store.write_note("root", str(night.root))
    store.enlist([NewJob(name, night.root / name) for name in ("ash", "birch")])
    refused, output = store.claim(), str(night.output)
    assert refused is not None
    store.finish(refused, Ending(4, "0.84 is below 0.90", {"dataset": 1.0, "lora": 0.84}, "refused"))
    (night.output / "ash").mkdir()
    (night.output / "ash" / "run.json").write_text("{}", encoding="utf-8")
    for arguments, expected in (
        (["cancel", output, "birhc", "oak"], "has no job birhc. Did you mean birch?"),
        (["cancel", output], "No job is named. Cancel one or several of these: birch."),
        (["retry", output, "oak"], "has no job oak. Known: ash, birch."),
        (["retry", output, "ash"], "its training finished, and its LoRA was refused. Rename or delete"),
        (["status", output, "ash"], "batch status takes no names of jobs: ash."),
        (["cancel", str(night.root), "ash"], "contains no batch"),
    ):
        assert main(["batch", *arguments]) == 2, arguments
        assert expected in " ".join(capsys.readouterr().err.split())
    assert main(["batch", "retry", output]) == 0
    assert f"ash: its LoRA was refused; delete {night.output / 'ash'} to train it again" in capsys.readouterr().out
    assert night.jobs("status") == {"ash": "refused", "birch": "waiting"}


def test_filling_a_queue_again_adds_new_folders_and_repeats_no_failure(night):
    (night.root / "ash" / "lora.toml").write_text("[lora]\nrang = 8\n", encoding="utf-8")
    shutil.rmtree(night.root / "cedar")
    assert night.run("--jobs", "0") == 0
    assert main(["batch", "work", str(night.output)]) == 0, "how jobs ended is in the summary"
    assert night.jobs("status") == {"ash": "failed", "birch": "done"}
    shutil.copytree(night.root / "birch", night.root / "cedar")
    assert night.run("--jobs", "0", "--resume") == 0
    assert night.jobs("status") == {"ash": "failed", "birch": "done", "cedar": "waiting"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["work"], "batch work needs the --output of a batch."),
        (["status", "absent"], "absent contains no batch (no folder jobs)."),
        (["work", "absent", "--preset", "12gb"], "batch work takes no settings."),
        (["wrok", "absent"], "Unknown action wrok. Did you mean work?"),
    ],
)
def test_wrong_arguments_of_a_worker(arguments, expected, capsys):
    assert main(["batch", *arguments]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def quick_training(seen: list[Config], code: int = 0) -> Callable[[Any], RunResult]:
    """A fake training that writes a record and keeps its settings."""

    def train(order: Any) -> RunResult:
        seen.append(order.config)
        order.folder.mkdir(exist_ok=True)
        write_json(order.folder / "run.json", {"status": "done", "scores": {"dataset": 1.0, "lora": 1.0}})
        return RunResult(order.folder, Record(order.folder.name, scores={"dataset": 1.0, "lora": 1.0}), code)

    return train


def test_each_config_is_a_job(night, tmp_path, capsys):
    """Two of one dataset; a flag has precedence, as over --config, and names and places are the batch's."""
    for rank, settings in ((8, "[run]\nname = 'x'\noutput = 'elsewhere'\npriority = 1"), (32, "[train]\nseed = 7")):
        (tmp_path / f"rank{rank}.toml").write_text(f"[lora]\nrank = {rank}\nalpha = 2\n{settings}\n", encoding="utf-8")
    configs = [str(tmp_path / f"rank{rank}.toml") for rank in (32, 8)]
    data, seen = ["--data", str(night.root / "ash")], list[Config]()
    arguments = [each for each in night.arguments("--set", "lora.alpha=1", *data) if each != str(night.root)]
    at = arguments.index("lora.rank=4")
    del arguments[at - 1 : at + 1]
    with patched(worker, "train", quick_training(seen)):
        assert main([*arguments, "--configs", *configs]) == 0
    assert night.jobs("status") == {"rank32": "done", "rank8": "done"}
    assert [(each.run.name, each.lora.rank, each.lora.alpha, each.train.seed) for each in seen] == [
        ("rank8", 8, 1, Config().train.seed),
        ("rank32", 32, 1, 7),
    ], "the higher priority first"
    assert {each.run.output for each in seen} == {str(night.output)}
    assert night.jobs("data") == {"rank32": configs[0], "rank8": configs[1]}
    assert "batch of 2 configs, 2 to run" in capsys.readouterr().out
    assert main([*arguments, "--configs", str(tmp_path / "a.toml"), str(tmp_path / "b" / "A.toml")]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert "would both become the run A" in refused
    assert refused.count("does not exist") == 2


def test_one_job_is_worked_on_by_its_name(night, capsys):
    """As an engine does, with the exit code of the job."""
    assert night.run("--jobs", "0", "--retries", "1") == 0
    work, seen = ["batch", "work", str(night.output), "--job"], list[Config]()
    with patched(worker, "train", quick_training(seen, 5)):
        assert main([*work, "birch"]) == 5
    assert night.jobs("status") == {"ash": "waiting", "birch": "waiting", "cedar": "waiting"}
    (birch,) = [job for job in open_batch(night.output).read_jobs() if job.retry_in is not None]
    assert birch.name == "birch"
    assert main(["batch", "retry", str(night.output), "birch"]) == 0
    with patched(worker, "train", quick_training(seen, 4)):
        assert main([*work, "birch"]) == 4
        assert main([*work, "birch"]) == 4, "it is not run again"
    with patched(job_store, "this_process", lambda: json.dumps(["elsewhere", 1, 1.0, "another start"])):
        assert open_batch(night.output).claim("ash") is not None
    capsys.readouterr()
    assert main([*work, "ash"]) == 0
    assert "ash: another process trains it" in capsys.readouterr().out
    assert [(each.run.name, each.run.output) for each in seen] == [("birch", str(night.output))] * 2
    assert main([*work, "birsch"]) == 2
    assert "Did you mean birch?" in capsys.readouterr().err


def test_a_worker_refuses_data_that_is_not_what_was_submitted(night, capsys):
    for name in ("birch", "cedar"):
        shutil.rmtree(night.root / name)
    assert night.run("--jobs", "0") == 0
    caption = next(iter(sorted((night.root / "ash").glob("*.txt"))))
    caption.write_text("another caption", encoding="utf-8")
    seen, work = list[Config](), ["batch", "work", str(night.output)]
    with patched(worker, "train", quick_training(seen)):
        assert main([*work, "--job", "ash"]) == 2
        assert not seen
        assert "images or captions of ash" in night.jobs("reason")["ash"]
        assert night.run("--jobs", "0", "--resume") == 0, "with the data as it is now"
        assert main(["batch", "retry", str(night.output), "ash"]) == 0
        assert main(work) == 0
    assert night.jobs("status") == {"ash": "done"}
    with patched(job_document, "__version__", "99.1"):
        shutil.rmtree(night.output / "ash")
        assert night.run("--jobs", "0", "--resume") == 0
    assert night.jobs("status") == {"ash": "waiting"}
    capsys.readouterr()
    assert main(work) == 2
    assert "ash is a job for lora-trainer 99.1" in capsys.readouterr().err
    assert night.jobs("status") == {"ash": "waiting"}


def test_an_idle_gpu_is_named(night, monkeypatch, capsys):
    """Only the number of GPUs is simulated."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shutil.rmtree(night.root / "cedar")
    with patched(torch.cuda, "device_count", lambda: 3), patched(worker, "train", quick_training([])):
        assert night.run() == 0
    assert "GPUs 1, 2 are idle. Use all with: --jobs 2" in capsys.readouterr().out
    shutil.rmtree(night.output)
    shutil.rmtree(night.root / "birch")
    with patched(hardware, "visible_gpus", lambda: ["0", "1", "2"]):
        assert night.run() == 0
    assert "GPUs 1, 2 are idle. Train another LoRA there: put CUDA_VISIBLE_DEVICES=1" in night.log("ash")


def test_an_error_in_one_job_stops_no_other(night):
    true = worker.train

    def train(order: Any) -> Any:
        if order.config.run.name == "ash":
            raise RuntimeError("broken on purpose")
        return true(order)

    # Fails when the model is loaded: the run folder exists by then.
    (night.root / "birch" / "lora.toml").write_text('[lora]\ntarget_modules = "nothing.*"\n', encoding="utf-8")
    with patched(worker, "train", train):
        assert night.run() == 2
    assert night.jobs("status") == {"ash": "failed", "birch": "failed", "cedar": "done"}
    assert night.jobs("exit_code") == {"ash": 1, "birch": 2, "cedar": 0}
    assert night.jobs("reason")["ash"] == "RuntimeError: broken on purpose"
    assert "matches none of" in night.jobs("reason")["birch"]
    assert not (night.output / "birch").exists()
    (night.root / "birch" / "lora.toml").unlink()
    shutil.rmtree(night.root / "ash")
    shutil.rmtree(night.output / "cedar")
    assert night.run("--resume") == 1, "the failure of ash is still reported"
    assert night.jobs("status") == {"ash": "failed", "birch": "done", "cedar": "done"}
    assert night.jobs("attempts") == {"ash": 1, "birch": 2, "cedar": 2}, "a run that was deleted is made again"


def wrong_root(night: Night, tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    """Batches that are refused as a whole: the arguments and the message."""
    empty, mixed, same = tmp_path / "empty", tmp_path / "mixed", tmp_path / "same"
    empty.mkdir()
    draw_images(mixed, 2)
    for name in ("a", "b"):
        draw_images(same / name, 1)
        (same / name / "lora.toml").write_text('[run]\nname = "Twin"\n', encoding="utf-8")
    output = ["--output", str(night.output)]
    return {
        "no ROOT": ([], "batch needs ROOT"),
        "an absent one": ([str(tmp_path / "absent")], "does not exist"),
        "a file": ([str(mixed / "image_0.png")], "is a file"),
        "no folders": ([str(empty)], "holds no folder"),
        "images": ([str(mixed)], "lora-trainer train --data"),
        "one name twice": ([str(same)], "a and b would both become the run Twin"),
        "output inside": ([str(night.root), "--output", str(night.root / "out")], "where nothing is written"),
        "cache inside": (
            [str(night.root), *output, "--set", f"cache.dir={night.root / 'cache'}"],
            "where nothing is written",
        ),
        "data": ([str(night.root), *output, "--data", "x"], "--data is not for a batch"),
        "ROOT and configs": ([str(night.root), *output, "--configs", "a.toml"], "or --configs, not both"),
        "no executor": ([str(night.root), *output, "--executor", "slurn"], "There is no executor slurn."),
        "no such option": ([str(night.root), *output, "--executor-option", "a=b"], "takes no --executor-option"),
        "half an option": ([str(night.root), *output, "--executor-option", "a"], "is not KEY=VALUE"),
        "negative retries": ([str(night.root), *output, "--retries", "-1"], "--retries is -1, must be at least 0"),
        "a job": ([str(night.root), *output, "--job", "ash"], "--job is for batch work"),
        "a name": ([str(night.root), *output, "--name", "x"], "--name is not for a batch"),
        "negative jobs": ([str(night.root), *output, "--jobs", "-1"], "--jobs is -1, must be at least 0"),
        "no state": (
            [str(night.root), *output, "--set", "checkpoint.save_state=false"],
            "a batch continues interrupted jobs",
        ),
        "an unknown executor": (
            [str(night.root), *output, "--executor", "cloud"],
            "no executor cloud.\n       Known: local, ray, slurm.",
        ),
        "an unknown key": ([str(night.root), *output, "--set", "lora.rang=1"], "lora.rang (from --set)"),
        "no model": ([str(night.root), *output, "--model", str(empty)], "is empty"),
    }


def test_errors_that_concern_the_whole_batch_are_refused_first(night, tmp_path, capsys):
    before = contents(tmp_path)
    for what, (arguments, expected) in wrong_root(night, tmp_path).items():
        before = before | contents(tmp_path)
        assert main(["batch", *arguments]) == 2, what
        output = capsys.readouterr().err
        assert expected in output, what
        assert "Traceback" not in output
        assert contents(tmp_path).keys() == before.keys(), what
    assert main(["batch", str(tmp_path / "absent"), "--executor", "cloud", "--jobs", "-1"]) == 2
    assert "3 problems" in capsys.readouterr().err


def test_a_dry_run_refuses_the_folder_of_an_earlier_run(night):
    earlier = night.output / "ash"
    earlier.mkdir(parents=True)
    (earlier / "run.json").write_text('{"status": "stopped", "steps": 3}', encoding="utf-8")
    assert night.run("--dry-run") == 2
    assert night.run("--dry-run", "--resume") == 0


def test_a_dry_run_shows_every_folder_and_writes_nothing(night, tmp_path, capsys):
    (night.root / "cedar" / "lora.toml").write_text("[data]\nsources = ['x']\n[run]\noutput = 'y'\n", encoding="utf-8")
    before = contents(tmp_path)
    assert night.run("--dry-run", "--executor", "local") == 2
    shown = capsys.readouterr().out
    assert shown.count("9 training, 1 validation") == 2
    assert "data.sources (from lora.toml) cannot be set by a folder" in shown
    assert "run.output (from lora.toml) cannot be set by a folder" in shown
    assert contents(tmp_path) == before


def test_a_batch_that_was_copied_is_trained_in_the_copy(night):
    assert night.run() == 0
    copied = night.output.with_name("copied")
    shutil.copytree(night.output, copied)
    shutil.rmtree(night.output)
    lora = copied / "ash" / "ash.safetensors"
    lora.unlink()
    assert main(["batch", "retry", str(copied), "ash"]) == 0
    assert main(["batch", "work", str(copied)]) == 0
    assert lora.is_file()
    assert not night.output.exists()
