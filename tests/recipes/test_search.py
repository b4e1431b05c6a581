"""`search` and `search lr` through the command, on a tiny model."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("optuna")

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.diffusion import loss
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.training import loop
from lora_trainer.training.training_run import Run
from tests.recipes.recipe import Bench, patched, record, rows, tensor_bytes
from tests.recipes.test_batch_together import counted_passes

SPACE = """
[parameters."optimizer.learning_rate"]
type = "float"
low = 1e-4
high = 1e-2
log = true

[parameters."lora.rank"]
choices = [2, 4]
"""
STEPS = 3


@pytest.fixture
def search(bench: Bench, tmp_path: Path) -> Callable[..., int]:
    """The command with a space, in the folder `runs/name`."""

    def run(name: str, *extra: str, space: str = SPACE, steps: int = STEPS, **settings: object) -> int:
        path = tmp_path / "space.toml"
        path.write_text(space, encoding="utf-8")
        settings = {"lora__rank": None, "optimizer__learning_rate": None, "checkpoint__every_n_steps": 1, **settings}
        arguments = bench.arguments(name, *extra, command="search", steps=steps, **settings)
        return main([*arguments, "--space", str(path)])

    return run


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "search.json").read_text(encoding="utf-8"))
    return found


def outcomes(folder: Path) -> list[tuple[Any, ...]]:
    return [(row["number"], row["state"], row["value"], row["values"]) for row in document(folder)["trials"]]


def test_a_search_finds_a_preset_and_its_trials_are_ordinary_runs(search, bench, capsys):
    extra = ("--trials", "2", "--sampler", "random", "--confirm", "2")
    assert search("a", *extra, validation__split=0.3) == 0
    folder, printed = bench.folder("a"), capsys.readouterr().out
    found = document(folder)
    assert found["planned"] == 2
    assert [row["state"] for row in found["trials"]] == ["complete", "complete"]
    best = found["best"]
    assert best["value"] == min(row["value"] for row in found["trials"])
    for row in found["trials"]:
        run = record(folder / row["folder"])
        assert run["status"] == "done"
        assert run["training"]["best_val_loss"] == row["value"]
        assert run["config"]["optimizer"]["learning_rate"] == row["values"]["optimizer.learning_rate"]
        assert (folder / row["folder"] / f"{row['number']:04d}.safetensors").is_file()
    preset = tomllib.loads((folder / "best.toml").read_text(encoding="utf-8"))
    assert preset["lora"]["rank"] == best["values"]["lora.rank"]
    assert "best of 2 trials (random)" in preset["evidence"]["lora.rank"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "best of 2 complete trials" in page
    assert "default-src 'none'" in page, "nothing is fetched"
    # The confirmation has other seeds, and validation images that no trial was measured on.
    confirmed = found["confirmed"]
    assert confirmed["outcome"] in ("proven", "tied", "worse")
    assert confirmed["low"] <= confirmed["mean"] <= confirmed["high"]
    assert [pair["seed"] for pair in confirmed["pairs"]] == [43, 44]
    assert [pair["measured_before"] for pair in confirmed["pairs"]] == [0, 0]
    assert confirmed["text"] in printed
    # The same command has nothing left to do.
    before = record(folder / "trials" / "0000")
    assert search("a", *extra, validation__split=0.3) == 0
    assert record(folder / "trials" / "0000") == before
    assert document(folder) == found
    # And the preset is one that `train` takes.
    capsys.readouterr()
    assert main(["train", "--config", str(folder / "best.toml"), "--explain"]) == 0
    assert "best of 2 trials" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_search_that_is_stopped_continues_as_if_it_was_not(search, bench, capsys):
    extra = ("--trials", "2", "--sampler", "random", "--pruner", "none")
    assert search("whole", *extra) == 0
    write, seen = Trackers.steps, list[str]()

    def stop(trackers: Trackers, new: list[dict[str, Any]]) -> None:
        write(trackers, new)
        seen.extend(str(row["step"]) for row in new)
        if len(seen) == STEPS + 2:  # in the second trial
            os.kill(os.getpid(), signal.SIGTERM)

    with patched(Trackers, "steps", stop):
        assert search("stopped", *extra) == 143
    assert "1 of 2 trials have ended" in capsys.readouterr().out
    assert [row["state"] for row in document(bench.folder("stopped"))["trials"]] == ["complete"]
    assert search("stopped", *extra) == 0
    assert outcomes(bench.folder("stopped")) == outcomes(bench.folder("whole"))
    names = ("stopped", "whole")
    assert [row["step"] for row in rows(bench.folder("stopped") / "trials" / "0001")] == [1, 2, 3]
    first, second = (tensor_bytes(bench.folder(name) / "trials" / "0001" / "0001.safetensors") for name in names)
    assert first == second
    # More trials continue it; another space or objective does not.
    assert search("stopped", "--trials", "1", *extra[2:]) == 2
    assert (
        search(
            "stopped", *extra, "--objective", "verdict", space=SPACE.replace("[2, 4]", "[2, 8]"), gates__lora_check=None
        )
        == 2
    )
    problem = capsys.readouterr().err
    assert "--trials is 1, but" in problem
    assert "--objective validation → verdict" in problem
    assert "lora.rank 2 | 4 → 2 | 8" in problem


def test_a_bad_trial_is_recorded_and_a_hopeless_one_is_pruned(search, bench, capsys):
    """Only a model that predicts velocity has the second weighting; one learning rate is far too low, one far too high."""
    space = '[parameters."loss.weighting"]\nchoices = ["min_snr", "v_as_epsilon"]\n'
    assert search("bad", "--sampler", "grid", space=space) == 0
    states = {row["values"]["loss.weighting"]: row for row in document(bench.folder("bad"))["trials"]}
    assert states["min_snr"]["state"] == "complete"
    assert states["v_as_epsilon"]["state"] == "failed"
    assert "loss.weighting" in states["v_as_epsilon"]["reason"]
    only_bad = space.replace('"min_snr", ', "")
    assert search("worse", "--sampler", "grid", space=only_bad) == 5
    assert "no trial has a result" in capsys.readouterr().out
    rates = '[parameters."optimizer.learning_rate"]\nchoices = [1e-2, 1e-8, 2e-8, 3e-8]\n'
    assert search("pruned", "--sampler", "grid", space=rates, steps=2, validation__every_n_steps=1) == 0
    found = document(bench.folder("pruned"))["trials"]
    pruned = [row for row in found if row["state"] == "pruned"]
    assert pruned
    folder = bench.folder("pruned") / pruned[0]["folder"]
    assert pruned[0]["steps"] == 1
    assert record(folder)["status"] == "done"
    assert "pruned at step" in record(folder)["reason"]
    assert (folder / f"{folder.name}.safetensors").is_file()
    # By itself it is an ordinary run, which --resume trains to its end.
    assert main(["train", "--config", str(folder / "config.toml"), "--resume"]) == 0
    assert record(folder)["steps"] == 2


@pytest.mark.parametrize("together", [1, 4])
def test_trials_that_run_out_of_memory_or_diverge_are_recorded_and_not_fatal(together, search, bench, capsys):
    """Memory suffices for a LoRA of rank 2 only, and with the second learning rate the loss is not finite."""
    usual, error_of = loop.step_with_fallbacks, loss.squared_error
    configs: dict[int, Config] = {}  # of the run in each thread

    def step(run: Run, *arguments: Any) -> Any:
        configs[threading.get_ident()] = run.config
        return usual(run, *arguments)

    def squared_error(*arguments: Any) -> Any:
        config = configs.get(threading.get_ident())
        if config is not None and config.lora.rank > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        is_high = config is not None and config.optimizer.learning_rate > 1e-3
        return error_of(*arguments) * (math.nan if is_high else 1.0)

    space = '[parameters."optimizer.learning_rate"]\nchoices = [1e-3, 1e-2]\n'
    space += '[parameters."lora.rank"]\nchoices = [2, 4]\n'
    with patched(loop, "step_with_fallbacks", step), patched(loss, "squared_error", squared_error):
        extra = ("--sampler", "grid", "--together", str(together))
        assert search("bad", *extra, space=space, safeguards__on_nonfinite="stop") == 0
    trials = {tuple(row["values"].values()): row for row in document(bench.folder("bad"))["trials"]}
    assert {values: row["state"] for values, row in trials.items()} == {
        (1e-3, 2): "complete",
        (1e-2, 2): "failed",
        (1e-3, 4): "failed",
        (1e-2, 4): "failed",
    }
    assert "Out of memory" in trials[1e-3, 4]["reason"]
    assert "not finite" in trials[1e-2, 2]["reason"]
    for row in trials.values():
        assert record(bench.folder("bad") / row["folder"])["exit_code"] == (0 if row["state"] == "complete" else 5)
    assert "1 complete, 3 failed" in capsys.readouterr().out


def test_trials_and_seeds_on_one_base_have_the_results_that_they_have_alone(search, bench, capsys):
    """To the rounding of a batch in fp32, which Adam's first steps enlarge."""
    extra = ("--trials", "2", "--sampler", "random", "--pruner", "none", "--confirm", "2")
    with counted_passes() as alone:
        assert search("alone", *extra, validation__split=0.3) == 0
    with counted_passes() as joined:
        assert search("joined", *extra, "--together", "2", validation__split=0.3) == 0
    assert alone == []
    assert joined.count(2) > STEPS, "of the trials, then of --confirm; pairs with other images have other shapes"
    found, usual = (document(bench.folder(name)) for name in ("joined", "alone"))
    for mine, theirs in zip(found["trials"], usual["trials"], strict=True):
        assert (mine["number"], mine["state"], mine["values"]) == (theirs["number"], "complete", theirs["values"])
        assert mine["value"] == pytest.approx(theirs["value"], rel=1e-4)
    assert found["best"]["number"] == usual["best"]["number"]
    for mine, theirs in zip(found["confirmed"]["pairs"], usual["confirmed"]["pairs"], strict=True):
        assert (mine["seed"], mine["split_seed"]) == (theirs["seed"], theirs["split_seed"])
        assert [mine[arm] for arm in ("best", "default")] == pytest.approx(
            [theirs[arm] for arm in ("best", "default")], rel=1e-4
        )


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_trials_on_one_base_that_are_stopped_continue_as_if_they_were_not(search, bench, capsys):
    extra = ("--trials", "3", "--sampler", "random", "--pruner", "none", "--together", "2")
    assert search("whole", *extra) == 0
    write, seen = Trackers.steps, list[str]()

    def stop(trackers: Trackers, new: list[dict[str, Any]]) -> None:
        write(trackers, new)
        seen.extend(str(row["step"]) for row in new)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with patched(Trackers, "steps", stop):
        assert search("stopped", *extra) == 143
    assert "0 of 3 trials have ended" in capsys.readouterr().out
    assert search("stopped", *extra) == 0
    assert "2 were cut off and are continued" in capsys.readouterr().out
    for mine, theirs in zip(outcomes(bench.folder("stopped")), outcomes(bench.folder("whole")), strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2] == pytest.approx(theirs[2], rel=1e-4)
        assert mine[3] == theirs[3]
    steps = [[row["step"] for row in rows(bench.folder("stopped") / "trials" / f"{number:04d}")] for number in range(3)]
    assert steps == [[1, 2, 3]] * 3


def test_a_space_whose_trials_cannot_share_a_base_is_refused(search, bench, capsys):
    """Dropout needs a base of its own, unless some trials have none: these are joined."""
    dropout = '[parameters."lora.dropout"]\nchoices = [%s]\n'
    assert search("a", "--together", "2", space=SPACE + dropout % "0.1, 0.2") == 2
    assert search("a", "--together", "0") == 2
    problems = capsys.readouterr().err
    assert "--together is 2, but every trial would train on a base model of its own: lora.dropout" in problems
    assert "--together is 0, must be at least 1" in problems
    assert not bench.folder("a").exists()
    with counted_passes() as passes:
        assert search("a", "--together", "3", "--sampler", "grid", space=dropout % "0.0, 0.1, 0.2", steps=1) == 0
    assert set(passes) <= {1}
    assert [row["state"] for row in document(bench.folder("a"))["trials"]] == ["complete"] * 3


@pytest.mark.parametrize("confirm", [0, 2])
def test_the_objective_can_be_the_score_of_the_lora(confirm, search, bench, capsys):
    extra = ("--objective", "verdict", "--trials", "2" if confirm else "1", "--sampler", "random")
    extra += ("--confirm", str(confirm)) if confirm else ()
    assert search("scored", *extra, steps=1, gates__lora_check=None, validation__split=0.3) == 0
    found = document(bench.folder("scored"))
    assert (found["objective"], found["direction"]) == ("LoRA score", "maximize")
    scores = [record(bench.folder("scored") / row["folder"])["scores"]["lora"] for row in found["trials"]]
    assert [row["value"] for row in found["trials"]] == scores
    assert found["best"]["value"] == max(scores)
    assert bool(found["confirmed"]) == bool(confirm)
    assert "LoRA score" in capsys.readouterr().out
    assert "LoRA score" in (bench.folder("scored") / "report.html").read_text(encoding="utf-8")
    # Without a score there is nothing to maximize.
    assert search("off", "--objective", "verdict", gates__lora_check="off") == 2


def test_wrong_flags_are_all_named(search, bench, capsys, tmp_path):
    (bench.folder("run") / "kept").mkdir(parents=True)
    assert search("a", "--trials", "0", "--jobs", "0", "--confirm", "1", "--low", "1") == 2
    assert search("a", "--trials", "0", "--jobs", "0", "--confirm", "1", "--sampler", "grid", validation__split=0) == 2
    assert search("run") == 2
    problems = capsys.readouterr().err
    for text in (
        "--low is for search lr",
        "--trials is 0",
        "--jobs is 0",
        "--confirm is 1",
        "validation.split is 0",
        "grid needs single",
    ):
        assert text in problems
    assert "exists and has no study.db" in problems
    assert not bench.folder("a").exists()


@pytest.mark.slow
def test_the_range_test_suggests_a_learning_rate_and_keeps_no_weights(bench, capsys):
    arguments = bench.arguments(
        "range", "--low", "1e-4", "--high", "10", command="search", steps=20, validation__split=0.2
    )
    assert main(["search", "lr", *arguments[1:]]) == 0
    folder = bench.folder("range")
    found = json.loads((folder / "lr.json").read_text(encoding="utf-8"))
    learning_rates = [point["lr"] for point in found["points"]]
    assert learning_rates[0] == pytest.approx(1e-4)
    assert learning_rates == sorted(learning_rates)
    assert learning_rates[-1] < 10.1
    assert found["suggestion"] is None or 1e-4 < found["suggestion"] <= found["lowest_lr"]
    assert not [path for path in folder.rglob("*") if path.suffix == ".safetensors"]
    assert "learning rate" in (folder / "report.html").read_text(encoding="utf-8")
    assert "no weights are kept" in capsys.readouterr().out
    assert main(["search", "lr", *arguments[1:]]) == 2
    assert "exists already" in capsys.readouterr().err


def test_two_workers_share_a_search(search, bench):
    assert search("a", "--trials", "3", "--sampler", "random", "--jobs", "2") == 0
    found = document(bench.folder("a"))["trials"]
    assert [(row["number"], row["state"]) for row in found] == [(number, "complete") for number in range(3)]
    assert len({row["values"]["optimizer.learning_rate"] for row in found}) == 3
