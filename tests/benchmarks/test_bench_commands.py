"""`bench memory` and related benchmarks through the command, on small models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lora_trainer.benchmarks import (
    bench_batch,
    bench_resolution,
    bench_scaling,
    bench_table,
    measure_row,
    scaling_process,
)
from lora_trainer.benchmarks.baseline import SavedRows
from lora_trainer.benchmarks.bench_model import build_bench_model
from lora_trainer.benchmarks.interleaved import time_in_turn
from lora_trainer.benchmarks.measure_row import RowSettings, settings_of
from lora_trainer.benchmarks.table_rows import SPECS, Spec
from lora_trainer.cli.main import main
from lora_trainer.models import unet
from lora_trainer.models.compiled import MOST_SHAPES
from tests.jobs.childs_work import end_at_once, sleep
from tests.recipes.recipe import Bench, draw_images, patched, save_tiny_model

THIN = ("model.family=sd15", "data.resolution=64", "lora.rank=16")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("trials")
    return Bench(save_tiny_model(folder), draw_images(folder / "data", 4), folder / "runs", folder / "cache")


def measured(what: str, capsys: pytest.CaptureFixture[str], *more: str, settings: tuple[str, ...] = THIN) -> Any:
    """The measurements of a tiny public architecture."""
    chosen = [part for setting in settings for part in ("--set", setting)]
    with patched(unet, "THINNER", 10):
        assert main(["bench", what, "--tiny", "--steps", "2", "--json", *chosen, *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "settings",
    [(), pytest.param(("memory.gradient_checkpointing=true", "train.effective_batch_size=2"), marks=pytest.mark.slow)],
)
def test_memory_is_predicted_part_by_part(settings, capsys):
    document = measured("memory", capsys, settings=(*THIN, *settings))
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["weights", "adapter", "optimizer", "activations", "peak"]
    for name, room in {"weights": 0.01, "adapter": 0.01, "activations": 0.1, "peak": 0.05}.items():
        assert rows[name]["ratio"] == pytest.approx(1.0, rel=room), name
    # The optimizer's step counters, 512 bytes per tensor, are large next to so small a LoRA.
    assert 1.0 <= rows["optimizer"]["ratio"] < 1.2
    parts = sum(row["measured_gib"] for name, row in rows.items() if name != "peak")
    assert rows["peak"]["measured_gib"] == pytest.approx(parts)
    assert rows["peak"]["per_step_gib"] == rows["activations"]["measured_gib"]
    assert "cannot be measured here" in document["notes"][1]


def test_memory_of_an_own_run(place, capsys):
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32")
    assert main([arguments[0], "memory", *arguments[1:], "--json", "--steps", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["model"] == place.model.name
    assert 0.95 < rows[-1]["ratio"] < 1.05


@pytest.mark.slow
def test_batches_grow_until_the_planned_limit(capsys):
    """The plan and the measurement agree on how many fit."""
    with patched(bench_batch, "MOST_ON_CPU", 2):
        document = measured("batch", capsys, settings=(*THIN, "memory.limit_gib=0.836"))
    rows = {row["name"]: row for row in document["rows"]}
    assert rows["1"]["ratio"] == 1.0
    assert all(row["peak_gib"] == pytest.approx(row["predicted_gib"], rel=0.05) for row in rows.values())
    assert all(row["samples_per_second"] == int(name) / row["seconds_median"] for name, row in rows.items())
    assert any("as the plan says" in note for note in document["notes"]), document["notes"]


def test_attention_is_measured_at_the_shapes_of_the_model(capsys):
    document = measured("attention", capsys)
    whole = {row["name"]: row for row in document["rows"] if row["shape"] == "all layers"}
    assert {"sdpa", "math"} <= whole.keys()
    assert whole["math"]["ratio"] == 1.0
    assert whole["math"]["layers"] == 32
    each = [row for row in document["rows"] if row["name"] == "sdpa" and row["shape"] != "all layers"]
    assert sum(row["layers"] for row in each) == 32
    assert sum(row["layers"] * row["seconds_median"] for row in each) == pytest.approx(whole["sdpa"]["seconds_median"])
    assert all(row["error"] < 1e-4 and row["peak_gib"] > 0 for row in document["rows"])
    assert any("flash3" in note for note in document["notes"]), "what does not work here is named"


@pytest.mark.slow
def test_a_resolution_shows_its_gain(place, tmp_path, capsys):
    enough = replace(place, data=draw_images(tmp_path / "data", 10))  # for one validation image
    arguments = enough.arguments("x", command="bench", memory__weight_dtype="fp32", validation__split=0.1)
    with patched(bench_resolution, "TRAINED", 2):
        assert main([arguments[0], "resolution", *arguments[1:], "--json", "--steps", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) > 1
    assert rows[0]["ratio"] == 1.0
    assert all(row["val_loss_before"] > 0 and row["val_loss_after"] > 0 for row in rows)
    assert all(row["peak_gib"] == pytest.approx(row["predicted_gib"], rel=0.1) for row in rows)


@pytest.mark.slow
def test_an_optimization_shows_its_cost_and_its_gain(capsys):
    (row,) = measured("ablation", capsys, "--filter", "checkpointing")["rows"]
    assert row["gain"] == pytest.approx(1 / row["ratio"])
    assert row["loss_most"] == 0.0
    assert row["memory_ratio"] <= 1.0
    assert "34-48 %" in row["claimed"]


@pytest.mark.parametrize("optimization", [pytest.param("background", marks=pytest.mark.slow), "fused optimizer"])
def test_optimizations_without_a_setting_are_measured_too(optimization, capsys):
    (row,) = measured("ablation", capsys, "--filter", optimization)["rows"]
    assert row["ratio"] > 0
    assert row["memory_ratio"] is None
    assert row["loss_mean"] is None


@pytest.mark.slow
def test_everything_together_is_measured_against_nothing(capsys):
    document = measured("ablation", capsys, "--filter", "all together")
    (row,) = document["rows"]
    assert row["left_out"] is None
    assert row["gain"] == pytest.approx(1 / row["ratio"])
    assert row["claimed"] == "2-3 x, 40-50 % less memory"
    assert 0.3 < row["memory_ratio"] < 0.95, "half the weights, and blocks that are recomputed"
    assert 1e-5 < row["loss_mean"] <= row["loss_most"] < 0.2, "the same samples and noise, in bf16"
    assert any(note.startswith("all together: the settings of all rows above") for note in document["notes"])


def test_measurements_that_need_a_gpu_are_named(capsys):
    document = measured("ablation", capsys, "--filter", "cuDNN")
    assert document["rows"][0]["seconds_median"] is None
    assert "cuDNN benchmark: needs a GPU." in document["notes"]
    assert main(["bench", "ablation", "--filter", "nonsense"]) == 2
    assert "There are: mixed precision, compile" in capsys.readouterr().err


def test_processes_are_launched_by_powers_of_two():
    assert [bench_scaling.process_counts(most) for most in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]
    assert bench_scaling.launch_config(2, on_gpus=True)["gpu_ids"] == "all"
    assert bench_scaling.launch_config(1, on_gpus=False)["distributed_type"] == "NO"


@pytest.mark.skipif(shutil.which("setsid") is None, reason="by a shell and its job")
def test_a_timeout_leaves_no_process(tmp_path):
    """Nor one in its own session, as the launcher starts them."""
    file = tmp_path / "number"
    start = "setsid sh -c 'echo $$; exec sleep 60'"  # there at once, also on a busy machine
    with pytest.raises(subprocess.TimeoutExpired):
        bench_scaling.run_command(["sh", "-c", f"{start} > {file} & wait"], os.environ, 3.0)
    left = int(file.read_text())
    with suppress(psutil.NoSuchProcess):  # there may be no parent to reap it
        process, end = psutil.Process(left), time.monotonic() + 300
        while process.status() != psutil.STATUS_ZOMBIE:  # it dies soon after the signal
            assert time.monotonic() < end
            time.sleep(0.05)


def test_the_order_of_two_variants_alternates():
    order: list[str] = []
    ways = {"one": lambda number: order.append("one"), "other": lambda number: order.append("other")}
    timed = time_in_turn(ways, 2, torch.device("cpu"))
    assert order[:4] == ["one", "other", "other", "one"]
    assert [len(each.seconds) for each in timed.values()] == [2, 2]


def test_scaling_is_of_a_public_architecture(capsys):
    assert main(["bench", "scaling"]) == 2
    assert "--set model.family=sdxl" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux")
def test_two_processes_are_compared_with_one(capsys):
    document = measured("scaling", capsys)
    one, two = document["rows"]
    assert one["efficiency"] == 1.0
    assert two["efficiency"] == pytest.approx(two["samples_per_second"] / 2 / one["samples_per_second"])
    assert (one["met"], two["met"]) == (None, two["efficiency"] >= two["target"])
    assert "threads of each process, also of the one alone: 1." in document["notes"][0]


@pytest.mark.parametrize(("step", "met"), [(0.1052, True), (0.1053, False)])
def test_scaling_is_compared_with_its_target(step, met, monkeypatch, capsys):
    """With steps of 0.1 s alone; nothing is launched."""

    def launch(order: object, count: int, *, on_gpus: bool) -> dict[str, Any]:
        seconds = [0.1] * 4 if count == 1 else [step - 0.01, step, step, step + 0.01]
        return {"model": "m", "once": seconds, "samples": count, "threads": 1}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(bench_scaling, "launch", launch)
    document = measured("scaling", capsys)
    one, two = document["rows"]
    assert (one["met"], two["met"], two["target"]) == (None, met, 0.95)
    assert two["efficiency_low"] < 0.95 < two["efficiency_high"]
    assert "2 processes: the interval contains 95%" in document["notes"][-1]
    assert main(["bench", "scaling", "--set", THIN[0]]) == 0
    assert f"{0.1 / step:.1%}" in (shown := capsys.readouterr().out)
    assert "95% reached" in shown
    assert ("yes" if met else "no") in shown


def test_gradients_averaged_between_micro_batches_come_to_the_same_sum():
    """For this process and another, whose first gradients are known here."""
    own, other = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])], [torch.tensor([7.0, 11.0])]
    summed = []

    def reduce(flat: torch.Tensor) -> torch.Tensor:
        summed.append(flat.clone())
        return flat.add_(other[0])

    master = torch.nn.Parameter(torch.zeros(2))
    context = SimpleNamespace(masters=[master], reduce=reduce, world=2)
    for gradient in scaling_process.average_between(context, own):
        master.grad = gradient.clone() if master.grad is None else master.grad + gradient
    assert [each.tolist() for each in summed] == [[1.0, 2.0]], "the last is left to the step itself"
    # Both add the mean once, and the later gradient: 2 * (1 + 7) / 2 + 3.
    shares = 2 * (master.grad - own[1]) + own[1]
    assert torch.equal(shares, own[0] + other[0] + own[1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's CPU path is tested on Linux")
def test_no_sync_is_measured_between_two_processes(capsys):
    (row,) = measured("ablation", capsys, "--filter", "no sync")["rows"]
    assert row["left_out"] is None
    assert row["gain"] == pytest.approx(1 / row["ratio"])
    assert row["seconds_median"] > 0


@pytest.mark.slow
def test_the_table_is_written_row_by_row_and_resumed(tmp_path, capsys):
    file = tmp_path / "rows.json"
    arguments = ["bench", "table", "--tiny", "--steps", "2", "--rows", str(file), "--filter"]
    assert main([*arguments, "sd15 512 batch 4"]) == 0
    output = capsys.readouterr()
    assert "sd15 512 batch 4" in output.out
    assert output.err.splitlines() == ["sd15 512 batch 4 …"]
    (first,) = json.loads(file.read_text("utf-8"))["rows"]
    assert main([*arguments, "sd15 512", "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines() == ["sd15 512 …"], "what is there already is not measured again"
    rows = json.loads(output.out)["rows"]
    assert [row["micro"] for row in rows] == [1, 4]
    assert rows[1]["seconds_median"] == first["seconds_median"]
    assert all(len(row["losses"]) == 3 and row["peak_gib"] > 0 for row in rows)  # one more warmed up
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"device": "another"}), encoding="utf-8")
    assert main([*arguments, "sd15 512"]) == 2
    assert "is of another" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failed_row_has_a_reason_and_stops_no_other(tmp_path):
    plain = {"data.resolution": 512, "train.effective_batch_size": 1}
    specs = [
        Spec("bad", "sd15", plain | {"lora.target_modules": ("nothing",)}),
        Spec("plain", "sd15", plain),
        Spec("again", "sd15", plain, like="plain"),
        Spec("checkpointed", "sd15", plain | {"memory.gradient_checkpointing": True}, like="plain"),
    ]
    saved = SavedRows(None, "table", "here", {})
    bench_table.fill_table(specs, saved, RowSettings(1, 2, tiny=True), 36_000.0)
    found = saved.rows
    assert "nothing" in found["bad"]["failed"]
    assert found["plain"]["ratio"] == 1.0
    assert found["again"]["loss_most"] == 0.0, "the same weights, samples and noise in every process"
    assert found["checkpointed"]["loss_most"] == 0.0, "checkpointing changes no loss"
    assert found["checkpointed"]["checkpointed"]
    assert found["checkpointed"]["ratio"] == found["checkpointed"]["seconds_median"] / found["plain"]["seconds_median"]
    bench_table.fill_table(specs, nothing := SavedRows(None, "table", "here", {}), RowSettings(), 0.0)
    assert nothing.rows == {}, "no time, no row"


def test_a_compiled_row_is_never_measured_uncompiled(tmp_path):
    import torch._inductor.config as inductor

    spec = Spec("compiled", "sd15", {"data.resolution": 512, "compile.enabled": True})
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        measure_row.measure_and_write(spec, RowSettings(1, 2, tiny=True), str(tmp_path / "row.json"))
    found = json.loads((tmp_path / "row.json").read_text("utf-8"))
    assert "Not compiled: " in found["failed"]
    assert "a CPU needs a C++ compiler" in found["failed"]
    assert found["seconds_median"] is None


def test_a_process_that_dies_or_times_out_is_a_failed_row(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_table, "PRELOADED", [])
    assert bench_table.run_in_child(end_at_once, (), tmp_path / "row", 60.0) == {
        "failed": "the process ended with code 9"
    }
    assert bench_table.run_in_child(sleep, (), tmp_path / "row", 0.5)["failed"] == "took longer than 0.5 s"


@pytest.mark.parametrize(("shapes", "dynamic"), [(MOST_SHAPES, False), (MOST_SHAPES + 1, True)])
def test_a_row_with_several_sizes_builds_them_all(shapes, dynamic, tmp_path):
    """Built, and not compiled before its first step."""
    spec = Spec("sizes", "sd15", {"data.resolution": 512, "compile.enabled": True})
    settings = settings_of(spec, RowSettings(tiny=True), torch.device("cpu"))
    blocks = build_bench_model(settings, tmp_path, tiny=True, shapes=shapes).context.compiled
    assert blocks is not None
    assert blocks.dynamic is dynamic


def test_a_row_of_a_small_gpu_is_capped_only_on_a_gpu():
    (spec,) = [spec for spec in SPECS if spec.name == "sdxl 1024 in 8 GB"]
    on_cpu = settings_of(spec, RowSettings(tiny=True), torch.device("cpu")).config
    assert on_cpu.memory.limit_gib is None
    assert on_cpu.data.resolution == 128
    on_gpu = settings_of(spec, RowSettings(), torch.device("cuda")).config
    assert (on_gpu.memory.limit_gib, on_gpu.data.resolution) == (8, 1024)


def test_rows_are_compared_with_an_earlier_row_of_the_same_model():
    names = [spec.name for spec in SPECS]
    assert len(set(names)) == len(names)
    family_of = {spec.name: spec.family for spec in SPECS}
    assert all(spec.like is None or family_of[spec.like] == spec.family for spec in SPECS)
    assert all(spec.like is None or spec.like in names[: names.index(spec.name)] for spec in SPECS)
