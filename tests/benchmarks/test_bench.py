"""`bench step` through the command: the rows that the contract names, of a run's model and of an architecture alone."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lora_trainer.benchmarks import (
    bench_adapters,
    bench_loader,
    bench_model,
    bench_step,
    compare_settings,
    fastest_settings,
    interleaved,
    measures,
)
from lora_trainer.benchmarks.measures import COLUMNS, SMALL, SUBJECTS, Report, Row, change
from lora_trainer.cli.bench import legend, tables_that_fit
from lora_trainer.cli.bench_checks import settings_of
from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.options import suited
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import Problem
from lora_trainer.core.gpu_rates import rate_of_gpu
from lora_trainer.models import unet
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.published import public_architecture
from lora_trainer.run.settings import settle
from lora_trainer.training import fallbacks, feed
from tests.recipes.recipe import Bench, draw_images, patched, save_tiny_model

TINY_SD15 = {"model": {"family": "sd15"}, "data": {"resolution": 64}, "memory": {"weight_dtype": "fp32"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    return Bench(save_tiny_model(folder), draw_images(folder / "data", 4), folder / "runs", folder / "cache")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_step, bench_loader, compare_settings, interleaved):
        monkeypatch.setattr(module, "WARM_UP", 1)
    monkeypatch.setattr(bench_step, "PEAK_STEPS", 1)
    monkeypatch.setattr(compare_settings, "FIRST", 5)


def measured(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main([*arguments, "--json", "--steps", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"]
    assert document["versions"]["torch"]
    return {row["name"]: row for row in document["rows"]}


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "bf16", "fp8"))]
)
def test_every_variant_of_a_step_is_measured_next_to_the_plain_one(place, precision, capsys):
    arguments = place.arguments("x", command="bench", memory__weight_dtype=precision)
    rows = measured([arguments[0], "step", *arguments[1:]], capsys)
    assert list(rows) == ["bare", "ours", "usual", "usual_cached"]
    lines = list(legend(bench_step.ABOUT, list(rows), COLUMNS))
    assert [line.split()[0] for line in lines] == [*rows, "ratio", "p10,"]
    assert rows["bare"]["ratio"] == 1.0
    assert [row["encodes"] for row in rows.values()] == [False, False, True, False]
    for row in rows.values():
        assert row["model"] == place.model.name
        assert 0 < row["seconds_p10"] <= row["seconds_median"] <= row["seconds_p90"]
        assert (row["peak_gib"] is None) if row["encodes"] else row["peak_gib"] > 0
        assert row["tflops"] == pytest.approx(row["tflop"] / row["seconds_median"])
        assert row["mfu"] > 0
        assert row["cpu_ratio"] > 0
    assert rows["bare"]["cpu_ratio"] == 1.0
    assert not place.folder("x").exists()


def test_the_reference_loop_encodes_the_same_captions(place, monkeypatch, tmp_path):
    """Several image variants with several sizes: each micro-batch has the same images at the same sizes."""
    settings = {
        "data__resolutions": "[64,128]",
        "data__flip": "true",
        "train__effective_batch_size": 4,
        "train__max_micro_batch_size": 2,
    }
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", **settings)
    seen: list[object] = []
    monkeypatch.setattr(bench_step, "measure", lambda request: seen.append(request) or Report([], {}))
    assert main([arguments[0], "step", *arguments[1:]]) == 0
    model = bench_model.build_bench_model(seen[0].resolved, tmp_path)
    encode = model.load_encoders()
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    monkeypatch.setattr(feed, "make_micro_batch", lambda batch, *_: batch)
    sizes = set()
    for number in range(4):
        for (latents, cond), batch in zip(encode(number), model.micros(number), strict=True):
            assert torch.allclose(latents, batch.mean.float(), atol=1e-2)
            assert cond.keys() == batch.cond.keys()
            assert all(torch.allclose(value, batch.cond[name].float(), atol=1e-2) for name, value in cond.items())
            sizes.add(latents.shape[-2:])
    assert len(sizes) > 1


def test_random_samples_do_not_depend_on_splitting(tmp_path):
    whole, parts = (
        bench_model.public_model(
            settle(
                [],
                [Layer("test", {**TINY_SD15, "train": {"effective_batch_size": 4, "max_micro_batch_size": micro}})],
                builtin_if_none=False,
            ),
            "sd15",
            tmp_path,
            tiny=True,
        ).micros(3)
        for micro in (4, 1)
    )
    assert (len(whole), len(parts)) == (1, 4)
    assert torch.equal(whole[0].latents, torch.cat([micro.latents for micro in parts]))
    for name, value in whole[0].cond.items():
        assert torch.equal(value, torch.cat([micro.cond[name] for micro in parts]))


@pytest.mark.skipif(os.name != "posix", reason="os.kill ends the process elsewhere")
@pytest.mark.parametrize(("number", "code", "at"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 4)])
def test_a_signal_in_a_measured_step_ends_the_command(place, number, code, at, monkeypatch, capsys):
    """In the first step, and in one of those that are timed."""
    train_step, taken = fallbacks.train_step, []

    def step_then_signal(*args: object) -> object:
        taken.append(None)
        if len(taken) == at:
            os.kill(os.getpid(), number)
        return train_step(*args)

    monkeypatch.setattr(fallbacks, "train_step", step_then_signal)
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", data__resolution=64)
    assert main([arguments[0], "step", *arguments[1:], "--steps", "4"]) == code
    assert "bug" not in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="os.kill ends the process elsewhere")
def test_a_signal_in_a_trained_run_ends_the_command(place, monkeypatch, capsys):
    train_step, make_order, orders = fallbacks.train_step, bench_adapters.make_order, []

    def step_then_signal(*args: object) -> object:
        if orders:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*args)

    def note_order(*args: object, **named: object) -> object:
        orders.append(None)
        return make_order(*args, **named)

    monkeypatch.setattr(fallbacks, "train_step", step_then_signal)
    monkeypatch.setattr(bench_adapters, "make_order", note_order)
    arguments = place.arguments("x", command="bench", data__resolution=64)
    wanted = ["--steps", "4", "--filter", "oft", "--subject", "own"]
    assert main([arguments[0], "adapters", *arguments[1:], *wanted]) == 143
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["train.seed=2", "train.effective_batch_size=2", "data.resolution=64", "model.family=sdxl"]
)
def test_settings_that_change_the_training_result_are_not_compared(text, capsys):
    assert main(["bench", "step", "--compare", text]) == 2
    assert "changes what is trained" in capsys.readouterr().err


def test_a_family_without_a_model_is_its_public_architecture(capsys):
    settings = ["model.family=sd15", "data.resolution=64", "lora.rank=4", "compile.enabled=auto"]
    with patched(unet, "THINNER", 10):
        arguments = ["bench", "step", "--tiny", *(p for s in settings for p in ("--set", s)), "--steps", "2", "--json"]
        assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["rows"]] == ["bare", "ours", "usual"]
    assert not document["rows"][-1]["encodes"]  # an architecture alone has no encoders
    assert any("not compiled" in note for note in document["notes"])


def test_the_device_name_includes_the_number_of_threads(monkeypatch, capsys):
    before = torch.get_num_threads()
    monkeypatch.setattr(bench_step, "measure", lambda request: Report([], {}))
    try:
        assert main(["bench", "step", "--json", "--set", f"hardware.threads={before + 1}"]) == 0
    finally:
        torch.set_num_threads(before)
    assert json.loads(capsys.readouterr().out)["device"].endswith(f" {before + 1} threads")


@pytest.mark.slow
def test_several_models_are_measured_in_one_call(place, capsys):
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", data__resolution=64)
    small = bench_model.small_unet()
    narrow = replace(small, denoiser={**small.denoiser, "block_out_channels": [32, 32, 32, 32]})
    with patched(bench_model, "small_unet", lambda: narrow):
        assert main([arguments[0], "step", *arguments[1:], *"--subject own --subject small --steps 2".split()]) == 0
    output = capsys.readouterr().out
    assert output.index(f"{place.model.name} on ") < output.index("U-Net of 30 M weights")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tiny_model_takes_small_images_of_its_own_step(name):
    whole = public_architecture(name)
    thin = bench_model.thin_architecture(whole).facts
    assert thin.pixel_step <= thin.resolution <= whole.facts.resolution / 8
    assert thin.resolution % thin.pixel_step == 0


def test_the_small_model_has_the_size_in_its_name():
    small = bench_model.small_unet()
    with torch.device("meta"):
        denoiser = FAMILIES[small.facts.family].denoiser.make(small.denoiser)
    assert f"{small.facts.resolution} px" in SUBJECTS[SMALL]
    assert round(sum(each.numel() for each in denoiser.parameters()) / 1e6) == 30


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA GeForce RTX 3060", 25.5),
        ("NVIDIA H100 80GB HBM3", 790.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Radeon", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name, rate):
    assert rate_of_gpu(name) == rate


def test_a_setting_is_shown_with_its_gain_and_cost(place, capsys):
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", data__resolution=64)
    extra = ["--compare", "memory.gradient_checkpointing=true", "--compare", "memory.weight_dtype=bf16", "--seeds", "2"]
    rows = measured([arguments[0], "step", *arguments[1:], *extra], capsys)
    assert list(rows) == ["ours", "memory.gradient_checkpointing=true", "memory.weight_dtype=bf16"]
    exact, rounded = rows["memory.gradient_checkpointing=true"], rows["memory.weight_dtype=bf16"]
    assert (rows["ours"]["ratio"], rows["ours"]["loss_mean"], rows["ours"]["loss_most"]) == (1.0, 0.0, 0.0)
    assert exact["loss_most"] < 1e-4
    assert abs(exact["loss_change"]) < 1e-4
    assert 1e-4 < rounded["loss_mean"] <= rounded["loss_most"] < 0.5
    assert rounded["peak_gib"] < exact["peak_gib"] < rows["ours"]["peak_gib"]


@pytest.mark.slow
def test_a_setting_that_loses_quality_fails(place, capsys):
    """A learning rate that learns nothing, over several seeds; one that only recomputes loses nothing."""
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", data__resolution=64)
    extra = ["--compare", "optimizer.learning_rate=1e-9", "--seeds", "3", "--steps", "40", "--json"]
    assert main([arguments[0], "step", *arguments[1:], *extra]) == 5
    output = capsys.readouterr()
    (message,) = json.loads(output.out)["worse"]
    assert message.startswith(
        f"optimizer.learning_rate=1e-9 of {place.model.name} loses quality: the loss changes by +"
    )
    assert "95 % over 3 seeds" in message
    assert "loses quality" in output.err


def test_quality_is_judged_by_the_interval_over_seeds():
    row = Row("a=1", "m", 1.0, 1.0, 1.0, 1.0)
    base = [[1.0, 1.0, 0.5, 0.5], [1.0, 1.0, 0.6, 0.6], [1.0, 1.0, 0.4, 0.4]]

    def judged(*factors: float) -> tuple[int, int]:
        """Numbers of problems and notes of losses that are so much higher in the later half, seed by seed."""
        pairs = [([9.0, 9.0, f * each[2], f * each[3]], each) for f, each in zip(factors, base, strict=True)]
        lost, notes = compare_settings.judge_quality([compare_settings.add_seeds(row, pairs)])
        return len(lost), len(notes)

    assert judged(1.05, 1.051, 1.049) == (1, 0)
    assert judged(1.001, 1.0, 0.999) == (0, 0)
    assert judged(0.8, 0.81, 0.79) == (0, 0), "better"
    assert judged(1.05, 0.9, 1.2) == (0, 1), "the seeds do not decide it"
    assert compare_settings.judge_quality([row]) == ([], []), "one seed has no interval"
    spoiled = compare_settings.add_seeds(row, [([1.0, 1.0, None, 0.5], base[0]), (base[1], base[1])])
    (problem,) = compare_settings.judge_quality([spoiled])[0]
    assert "the loss is not finite" in problem.message


def test_the_best_settings_are_a_config_file(place, tmp_path, capsys):
    """A setting without gain is skipped; one that is faster and learns the same is written with its figures."""

    def row(name: str, ratio: float, off: float) -> Row:
        figures = {"loss_mean": off, "loss_most": off}
        return Row(name, "m", ratio, ratio, ratio, ratio, ratio - 0.05, ratio + 0.05, peak_gib=1.0, figures=figures)

    found = [row("ours", 1.0, 0.0), row("compile.enabled=true", 0.8, 0.001), row("memory.weight_dtype=int8", 0.5, 0.2)]
    found += [row("memory.gradient_checkpointing=false", 0.96, 0.0), row("loss.min_snr_gamma=5", 0.7, 0.0)]
    file = tmp_path / "best.toml"
    asked = [row.name for row in found[1:]]
    extra = [*(part for name in asked for part in ("--compare", name)), "--export-preset", str(file)]
    with patched(fastest_settings, "compare_all", lambda *_, **__: (found, [])):
        assert main([*place.arguments("x", command="bench")[:1], "step", *extra, "--steps", "2"]) == 0
    assert "best.toml: compile.enabled=true" in capsys.readouterr().out
    text = file.read_text()
    assert "loss.min_snr_gamma" not in text.partition("# Tried beside:")[0], "it changes what is learned"
    passed = text.partition("# Tried beside:")[2]
    assert "memory.gradient_checkpointing=false: 0.960 (0.910 to 1.010) of the time" in passed
    assert "[compile]\n# 0.800 (0.750 to 0.850) of the time, +0.000 GiB, losses 0.10% off\nenabled = true" in text
    assert "#   memory.weight_dtype=int8: 0.500 (0.450 to 0.550) of the time" in text
    assert main(["train", "--config", str(file), "--explain"]) == 0
    assert "--config" in capsys.readouterr().out


def test_the_best_settings_are_measured(place, tmp_path, capsys):
    file = tmp_path / "best.toml"
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", data__resolution=64)
    extra = [
        "--compare",
        "memory.gradient_checkpointing=true",
        "--compare",
        "memory.weight_dtype=fp16",
        "--export-preset",
        str(file),
    ]
    rows = measured([arguments[0], "step", *arguments[1:], *extra], capsys)
    assert set(rows) >= {"ours", "memory.gradient_checkpointing=true"}
    assert "# Measured on" in file.read_text()


@pytest.mark.parametrize(("seconds", "pays_from"), [(0.75, 120), (1.0, None), (1.25, None)])
def test_compiled_blocks_pay_from_the_steps_that_were_measured(seconds, pays_from):
    def side(seconds: float, compile_seconds: float | None) -> compare_settings.Side:
        return compare_settings.Side("m", [seconds] * 10, [0.1] * 12, compile_seconds=compile_seconds)

    _, row = compare_settings.compare_sides({"ours": side(1.0, None), "compile.enabled=true": side(seconds, 30.0)})
    assert (row["compile_seconds"], row["pays_from"]) == (30.0, pays_from)
    note = compare_settings.describe_break_even(row)
    assert ("compile.min_steps=120" in note) == (pays_from == 120)
    _, row = compare_settings.compare_sides({"ours": side(1.0, 30.0), "memory.weight_dtype=int8": side(0.5, 30.0)})
    assert row["compile_seconds"] is None, "both are compiled"


def test_a_training_preset_is_compared_by_its_own_settings(capsys):
    problems: list[Problem] = []
    found = settings_of(["preset=quality", "preset=speed"], problems)
    assert problems == []
    assert (found["preset=quality"]["train.ema_decay"], found["preset=speed"]["loss.min_snr_gamma"]) == (0.999, "none")
    base = resolve([Layer("--set", {"model": {"family": "flux"}})])
    with_preset = change(base, found["preset=quality"], "preset=quality")
    assert with_preset.origin["train.ema_decay"] == "preset quality"
    assert suited(with_preset, "flow").config.loss.min_snr_gamma is None, "dropped as in a run"
    assert main(["bench", "step", "--compare", "preset=12gb", "--compare", "preset=qualty"]) == 2
    err = capsys.readouterr().err
    assert "preset=12gb" in err
    assert "Did you mean quality?" in err


def test_training_presets_are_compared_by_time_alone(place, capsys):
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", data__resolution=64)
    rows = measured([arguments[0], "step", *arguments[1:], "--compare", "preset=speed"], capsys)
    row = rows["preset=speed"]
    assert row["ratio"] > 0
    assert (row["loss_mean"], row["loss_change"], row["seeds"]) == (None, None, 1), "it learns in another way"


def test_process_wide_settings_are_measured_alone(place, capsys):
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", data__resolution=64)
    assert main([arguments[0], "step", *arguments[1:], "--compare", "hardware.threads=1", "--steps", "2"]) == 0
    assert "it holds for a whole process" in capsys.readouterr().out


def test_a_setting_without_effect_has_no_figures(place, tmp_path, capsys):
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32", data__resolution=64)
    file = tmp_path / "best.toml"
    extra = ["--compare", "hardware.tf32=false", "--export-preset", str(file)]
    row = measured([arguments[0], "step", *arguments[1:], *extra], capsys)["hardware.tf32=false"]
    assert row["not_run"] == "it is for GPUs, and there is none"
    assert (row["ratio"], row["seconds_median"], row["loss_mean"]) == (None, None, None)
    assert "tf32" not in file.read_text(), "nothing is recommended of it"


def test_blocks_that_were_not_compiled_are_not_measured(tmp_path):
    whole = Config()
    wanted = whole.model_copy(update={"compile": whole.compile.model_copy(update={"enabled": True})})

    def why(compiled: object) -> str | None:
        built = SimpleNamespace(notes=("not compiled: no blocks",))
        context = SimpleNamespace(compiled=compiled, built=built)
        resolved = SimpleNamespace(config=wanted)
        model = SimpleNamespace(context=context, device=torch.device("cpu"), resolved=resolved)
        return compare_settings.explain_no_effect(model, whole, tmp_path)

    assert why(None) == "not compiled: no blocks"
    assert why(SimpleNamespace(on=True)) is None
    event = {"step": 1, "kind": "compile", "message": "compiled blocks failed"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")
    assert why(SimpleNamespace(on=False)) == "compiled blocks failed"


def test_a_table_that_is_too_wide_is_wrapped_and_not_truncated():
    columns = [[f"column {number}", "1.234"] for number in range(9)]
    found = tables_that_fit(["step", "usual_cached"], columns, 80)
    assert [column for piece in found for column in piece] == columns
    assert [len(piece) for piece in found] == [5, 4]
    assert tables_that_fit(["step"], [], 80) == [[]]


def test_differences_within_noise_are_marked():
    def row(name: str, low: float, ratio: float, high: float) -> Row:
        return Row(name, "m", 1.0, 1.0, 1.0, ratio, low, high)

    rows = [row("bare", 1.0, 1.0, 1.0), row("ours", 0.9, 0.97, 1.2), row("usual", 1.1, 1.2, 1.3)]
    assert measures.too_noisy(rows) == ["ours: now quicker, now slower than bare: " + measures.NOISY]
    assert bench_step.quicker_than_bare(rows) == ["ours: quicker than bare, which does the least: " + measures.NOISY]
    assert measures.too_noisy([rows[0], rows[2]]) == bench_step.quicker_than_bare([rows[0], rows[2]]) == []


def test_a_wrong_setting_to_compare_is_named_with_the_nearest(capsys):
    assert main(["bench", "step", "--compare", "nonsense", "--compare", "compile.enable=true"]) == 2
    output = capsys.readouterr().err
    assert "--compare nonsense is not of the form section.key=value" in output
    assert "Did you mean compile.enabled?" in output


def test_a_flag_of_another_measurement_is_refused(capsys):
    assert main(["bench", "cache", "--tiny", "--subject", "small"]) == 2
    output = capsys.readouterr().err
    assert "bench cache has no --tiny" in output
    assert "bench cache has no --subject" in output


def test_the_loader_is_measured_next_to_steps_without_it(place, capsys):
    arguments = place.arguments("x", command="bench", memory__weight_dtype="fp32")
    before = threading.active_count()
    rows = measured([arguments[0], "loader", *arguments[1:]], capsys)
    assert threading.active_count() == before
    assert list(rows) == [
        *("resident", "cached", "uncached", "cached_wait", "cached_alone", "uncached_wait", "uncached_alone"),
        "decoded_alone",
    ]
    assert rows.keys() | {"ratio"} == bench_loader.ABOUT.keys()
    assert rows["resident"]["ratio"] == 1.0
    assert rows["cached_wait"]["ratio"] >= 0
    assert all((row["per_second"] or 0) > 0 for name, row in rows.items() if name.endswith("_alone"))


def test_an_architecture_without_data_is_fed_random_entries(capsys):
    settings = ["model.family=sd15", "data.resolution=64", "lora.rank=4"]
    with patched(unet, "THINNER", 10):
        rows = measured(["bench", "loader", "--tiny", *(p for s in settings for p in ("--set", s))], capsys)
    assert list(rows) == ["resident", "cached", "cached_wait", "cached_alone"]


def test_tiny_needs_a_family_without_a_model(place, capsys):
    assert main(["bench", "step", "--tiny", "--model", str(place.model), "--data", str(place.data)]) == 2
    assert "--set model.family=sdxl --tiny" in capsys.readouterr().err
