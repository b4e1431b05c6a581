"""Six steps are three, a stop, and three more: bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.monitor.trackers import Trackers
from tests.recipes.recipe import Bench, contents, draw_images, exported, losses, patched, record, rows

pytestmark = pytest.mark.exact

# Through the whole command. tests/training/test_exact_resume.py stops every kind of run at every step.
KINDS: dict[str, dict[str, object]] = {
    # A rank at which the down projections are large enough for 8-bit state.
    "adamw8bit": {"optimizer__name": "adamw8bit", "lora__rank": 128},
    "bf16 and average": {"memory__weight_dtype": "bf16", "train__ema_decay": 0.9, "validation__every_n_steps": 1},
}


class PowerCut(BaseException):
    """Ends a run without running error handlers."""


def at_step(step: int, act: Callable[[], None]) -> Callable[[Trackers, list[dict[str, Any]]], None]:
    """`Trackers.steps` that acts when the numbers of a step are about to be written."""
    written = Trackers.steps

    def steps(trackers: Trackers, found: list[dict[str, Any]]) -> None:
        if any(row["step"] == step for row in found):
            act()
        written(trackers, found)

    return steps


def stop(number: int) -> Callable[[Trackers, list[dict[str, Any]]], None]:
    """A signal between the second step and the third, which still completes."""
    return at_step(2, lambda: os.kill(os.getpid(), number))


def assert_same_run(bench: Bench, one: str, other: str) -> None:
    """The same losses and tensors. `one` and `other` are run names, which may differ."""
    assert losses(bench.folder(one)) == losses(bench.folder(other))
    assert exported(bench.folder(one)) == exported(bench.folder(other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_resumes_exactly(kind, bench):
    settings = KINDS[kind]
    assert bench.run("straight", **settings) == 0
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert bench.run("broken", **settings) == 143
    stopped = record(bench.folder("broken"))
    steps = 2 if "validation__every_n_steps" in settings else 3  # the validation of the second step is aborted
    assert (stopped["status"], stopped["exit_code"], stopped["steps"]) == ("stopped", 143, steps)
    assert bench.run("broken", "--resume", **settings) == 0
    assert [row["step"] for row in rows(bench.folder("broken"))] == [1, 2, 3, 4, 5, 6]
    assert record(bench.folder("broken"))["status"] == "done"
    assert_same_run(bench, "straight", "broken")


def test_control_c_saves_and_ends_with_130(finished, bench, capsys):
    with patched(Trackers, "steps", stop(signal.SIGINT)):
        assert bench.run("first") == 130
    assert record(bench.folder("first"))["status"] == "stopped"
    assert "--resume" in capsys.readouterr().out
    assert bench.run("first", "--resume") == 0
    assert "step-000003" in capsys.readouterr().out
    assert exported(bench.folder("first")) == exported(finished.folder("first"))


def test_a_killed_run_resumes_from_its_last_checkpoint(finished, bench):
    def die() -> None:
        raise PowerCut

    with patched(Trackers, "steps", at_step(5, die)), pytest.raises(PowerCut):
        bench.run("first", checkpoint__every_n_steps=3)
    assert [row["step"] for row in rows(bench.folder("first"))] == [1, 2, 3, 4]
    assert bench.run("first", "--resume", checkpoint__every_n_steps=3) == 0
    assert [row["step"] for row in rows(bench.folder("first"))] == [1, 2, 3, 4, 5, 6]
    assert losses(bench.folder("first")) == losses(finished.folder("first"))
    assert exported(bench.folder("first")) == exported(finished.folder("first"))


def test_a_damaged_checkpoint_is_skipped(finished, bench, capsys):
    with patched(Trackers, "steps", at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM))):
        assert bench.run("first", checkpoint__every_n_steps=3) == 143
    newest = bench.folder("first") / "checkpoints" / "step-000005" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    assert bench.run("first", "--resume", checkpoint__every_n_steps=3) == 0
    output = capsys.readouterr().out
    assert "step-000005 is damaged and skipped (optimizer.safetensors is cut off)" in output
    assert "resuming from step-000003" in output
    assert exported(bench.folder("first")) == exported(finished.folder("first"))


def test_settings_that_the_run_chose_are_not_reported_as_changes(bench, capsys):
    assert bench.run("first", steps=2, memory__weight_dtype=None) == 0
    config = bench.folder("first") / "config.toml"
    assert 'weight_dtype = "fp32"' in config.read_text("utf-8")
    capsys.readouterr()
    assert main(["train", "--config", str(config), "--resume", "--max-steps", "3"]) == 0
    output = capsys.readouterr().out
    assert [line for line in output.splitlines() if line.startswith("changed: ")] == ["changed: train.max_steps 2 → 3"]
    assert f"precision: fp32 (as in {config})" in output
    assert bench.run("first", "--resume", steps=4, memory__weight_dtype=None) == 0  # the first flags again
    output = capsys.readouterr().out
    assert "changed: memory" not in output
    assert "changed: hardware" not in output
    assert bench.run("first", "--resume", steps=5, hardware__attention_backend="math") == 0
    assert 'changed: hardware.attention_backend "auto" → "math"' in capsys.readouterr().out


def test_a_finished_run_has_nothing_to_resume(finished, capsys):
    before = record(finished.folder("first"))
    assert finished.run("first", "--resume") == 0
    assert "finished" in capsys.readouterr().out
    assert record(finished.folder("first")) == before


def test_a_finished_run_resumes_to_more_steps(finished, bench, capsys):
    assert bench.run("first", steps=3, checkpoint__every_n_steps=3) == 0
    assert bench.run("first", "--resume", steps=2, checkpoint__every_n_steps=3) == 0
    assert "Nothing to do" in capsys.readouterr().out
    assert bench.run("first", "--resume", steps=6, checkpoint__every_n_steps=3) == 0
    assert "changed: train.max_steps 3 → 6" in capsys.readouterr().out
    assert record(bench.folder("first"))["steps"] == 6
    assert losses(bench.folder("first")) == losses(finished.folder("first"))
    assert exported(bench.folder("first")) == exported(finished.folder("first"))


def test_a_runs_own_config_resumes_it(finished, bench, capsys):
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert bench.run("first") == 143
    config = str(bench.folder("first") / "config.toml")
    assert main(["train", "--config", config]) == 2
    assert "Add --resume" in capsys.readouterr().err
    assert main(["train", "--config", config, "--resume"]) == 0
    assert exported(bench.folder("first")) == exported(finished.folder("first"))


def test_a_folder_in_use_is_refused(bench, capsys):
    bench.folder("stopped").mkdir(parents=True)
    (bench.folder("stopped") / "run.json").write_text('{"status": "stopped", "steps": 3}', encoding="utf-8")
    assert bench.run("stopped") == 2
    output = capsys.readouterr().err
    assert "holds a run" in output
    assert "--resume" in output


def test_a_run_with_only_damaged_checkpoints_is_refused_and_unchanged(bench, capsys):
    assert bench.run("hurt", steps=2, checkpoint__every_n_steps=1) == 0
    folder, checkpoints = bench.folder("hurt"), bench.folder("hurt") / "checkpoints"
    cut, bits = (
        checkpoints / "step-000002" / "adapter.safetensors",
        checkpoints / "step-000001" / "optimizer.safetensors",
    )
    cut.write_bytes(cut.read_bytes()[:50])
    bits.write_bytes(bits.read_bytes()[:-1] + bytes([bits.read_bytes()[-1] ^ 1]))
    (folder / "run.json").write_text('{"status": "stopped", "steps": 2}', encoding="utf-8")
    before = contents(folder)
    capsys.readouterr()
    assert bench.run("hurt", "--resume", steps=2) == 2
    output = capsys.readouterr()
    assert "starting at step 0" not in output.out
    assert "step-000002 (adapter.safetensors is cut off)" in output.err
    assert "step-000001 (optimizer.safetensors is not what was written: its checksum differs)" in output.err
    assert "a new --name" in output.err
    assert record(folder) == {"status": "stopped", "steps": 2}
    left = contents(folder)
    for name in before.keys() - {"run.json"}:
        assert left[name] == before[name], name
    shutil.rmtree(checkpoints)
    assert bench.run("hurt", "--resume", steps=2) == 0


def test_resume_without_a_run_starts_at_the_beginning(bench, capsys):
    assert bench.run("new", "--resume", steps=1) == 0
    assert "starting at step 0" in capsys.readouterr().out
    assert record(bench.folder("new"))["steps"] == 1


def test_settings_that_the_weights_depend_on_must_not_change(bench, capsys):
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        bench.run("changed")
    before = record(bench.folder("changed"))
    assert bench.run("changed", "--resume", lora__rank=8, train__seed=7, optimizer__weight_decay=0.5) == 2
    printed = capsys.readouterr().err
    assert "lora.rank was 4 and is now 8" in printed
    assert "train.seed was 42 and is now 7" in printed
    assert "optimizer.weight_decay was 0.01 and is now 0.5" in printed
    assert "Traceback" not in printed
    other = draw_images(bench.output.parent / "other", count=11)
    assert main([*bench.arguments("changed", "--resume"), "--data", str(other)]) == 2
    printed = capsys.readouterr().err
    assert f"The images, captions or weights differ: {bench.data} → {bench.data}, {other}." in printed
    assert record(bench.folder("changed")) == before, "a resume that was refused changes nothing"


def test_a_moved_run_resumes(finished, bench):
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        bench.run("first")
    moved = Bench(bench.model, bench.data, bench.output.parent / "elsewhere", bench.cache)
    moved.output.mkdir()
    bench.folder("first").rename(moved.folder("first"))
    assert moved.run("first", "--resume") == 0
    assert exported(moved.folder("first")) == exported(finished.folder("first"))


def test_another_base_model_is_refused_on_resume(bench, tmp_path, capsys):
    assert bench.run("swapped", steps=2, checkpoint__every_n_steps=1) == 0
    other = Path(shutil.copytree(bench.model, tmp_path / "other"))
    weights = other / "unet" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    (bench.folder("swapped") / "run.json").write_text('{"status": "stopped", "steps": 2}')
    arguments = bench.arguments("swapped", "--resume", steps=2)
    arguments[arguments.index("--model") + 1] = str(other)
    assert main(arguments) == 2
    assert (
        "The model's weights, or those of model.loras, differ from those at the start of the run."
        in capsys.readouterr().err
    )


def test_sample_counts_are_the_same_after_a_stop_in_the_middle_of_an_epoch(bench, finished, capsys):
    settings = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3}
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert bench.run("first", **settings) == 143
    assert record(bench.folder("first"))["sample_counts"]["samples"] == 2 * record(bench.folder("first"))["steps"]
    assert bench.run("first", "--resume", **settings) == 0
    whole, resumed = (record(place.folder("first")) for place in (finished, bench))
    # Five steps per epoch for nine images, the last with one image, and one more step.
    assert whole["sample_counts"]["images"] == {"count": 9, "least": 1, "most": 2, "never": 0}
    assert whole["sample_counts"]["line"] == "every image 1–2 times"
    assert "trained: every image 1–2 times" in capsys.readouterr().out
    assert resumed["sample_counts"] == whole["sample_counts"]
    tables = [(place.folder("first") / "sample_counts.csv").read_text("utf-8") for place in (finished, bench)]
    assert tables[0] == tables[1]
    assert resumed["files"]["sample_counts"] == "sample_counts.csv"
    assert "Trained: every image 1–2 times." in (bench.folder("first") / "report.html").read_text("utf-8")
