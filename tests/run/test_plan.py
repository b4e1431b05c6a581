"""Plans: every preset and user setting is kept, and a refusal names settings that fit."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer
from lora_trainer.config.presets import preset_layers
from lora_trainer.config.toml import parse_assignment
from lora_trainer.core.errors import UsageError
from lora_trainer.core.gpu_rates import OTHER_TFLOPS, USUAL, least_seconds
from lora_trainer.data.sample import Sample
from lora_trainer.memory_plan.estimate import (
    LARGEST_SHARE,
    Demand,
    candidate_plans,
    choose_fit,
    parts_of,
    refuse_what_does_not_fit,
)
from lora_trainer.memory_plan.profiles import stored_families
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.plans.page import every_plan
from lora_trainer.run.plans.plan import Plan, computed_in, make_plan
from lora_trainer.run.plans.view import duration, lines
from lora_trainer.run.settings import settle

PARTS = ("weights_gib", "adapter_gib", "optimizer_gib", "activations_gib", "overhead_gib")
ALL_COMBINATIONS = 6 * 3 * len(stored_families())


def plan_for(*presets: str, family: str = "sdxl", **settings: object) -> Plan:
    """A plan for a family's published model. Settings have two underscores."""
    values: dict[str, dict[str, object]] = {"model": {"family": family}}
    for name, value in settings.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return make_plan(settle(preset_layers(presets).layers, [Layer("--set", values)], builtin_if_none=False))


def test_a_micro_batch_is_no_larger_than_the_data() -> None:
    """Of six images in buckets of four and two, no step has more than four at once."""
    sizes = [(1024, 1024)] * 4 + [(832, 1216)] * 2
    train = tuple(
        Sample(Path(f"{number}.png"), "a cat", *size, content=str(number)) for number, size in enumerate(sizes)
    )
    values = [Layer("--set", {"model": {"family": "sdxl"}, "train": {"effective_batch_size": 64}})]
    plan = make_plan(settle([], values, builtin_if_none=False), data=(train, ()))
    assert (plan.fit.micro, plan.fit.accumulation, plan.demand.samples) == (4, 2, 6)
    smaller = [Layer("--set", {"model": {"family": "sdxl"}, "train": {"effective_batch_size": 4}})]
    same = make_plan(settle([], smaller, builtin_if_none=False), data=(train, ()))
    assert plan.fit.parts.activations == same.fit.parts.activations


def test_every_preset_fits_every_family() -> None:
    found = list(every_plan())
    assert len(found) == ALL_COMBINATIONS
    for family, tier, goal, plan in found:
        limit = float(tier.removesuffix("gb"))
        assert plan.demand.limit_gib == limit, (family, tier, goal)
        assert plan.fits, (family, tier, goal)
        largest = ("sd3", "flux", "chroma", "z_image", "qwen_image", "qwen_image21", "krea2")
        assert not plan.fit.swapped or family in largest, "only the largest must visit"
        assert plan.fit.parts.peak <= LARGEST_SHARE * limit
        assert plan.fit.micro * plan.fit.accumulation >= plan.demand.samples
        assert (plan.demand.limit_gib - plan.fit.parts.peak) > 0


def test_small_gpus_get_smaller_plans() -> None:
    plans = [plan_for(tier, "speed", data__resolution=1024) for tier in ("6gb", "8gb", "12gb", "24gb")]
    assert [plan.fit.fits for plan in plans] == [True] * 4
    assert plans[0].fit.precision == "fp8"
    assert [plan.fit.precision for plan in plans[1:]] == ["bf16"] * 3
    assert plans[1].fit.checkpointed > 0 == plans[3].fit.checkpointed
    assert plans[3].fit.micro >= plans[2].fit.micro


def test_as_few_swapped_blocks_as_fit() -> None:
    plan = plan_for("8gb", data__resolution=1024)
    fit, demand = plan.fit, plan.demand
    assert 0 < fit.checkpointed < fit.blocks
    fewer = parts_of(demand, fit.micro, fit.checkpointed - 1, fit.precision)
    assert fewer.peak > LARGEST_SHARE * 8.0 >= fit.parts.peak


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"memory__gradient_checkpointing": False}, {"checkpointed": 0}),
        ({"memory__gradient_checkpointing": True}, {"checkpointed": 18}),
        ({"memory__gradient_checkpointing": 5}, {"checkpointed": 5}),
        ({"train__max_micro_batch_size": 2}, {"micro": 2, "accumulation": 2}),
        ({"memory__weight_dtype": "fp8"}, {"precision": "fp8"}),
        ({"memory__weight_dtype": "fp32"}, {"precision": "fp32"}),
    ],
)
def test_settings_of_the_user_are_kept(settings: dict[str, object], expected: dict[str, object]) -> None:
    fit = plan_for(family="sdxl", train__effective_batch_size=4, memory__limit_gib=80.0, **settings).fit
    assert {name: getattr(fit, name) for name in expected} == expected
    assert fit.fits


@pytest.mark.parametrize(
    "settings",
    [
        {"memory__gradient_checkpointing": False},
        {"memory__weight_dtype": "bf16"},
        {"memory__weight_dtype": "bf16", "memory__gradient_checkpointing": 0},
        {"lora__rank": 4096},
        {"data__resolution": 4096},
        {"optimizer__name": "prodigy", "lora__rank": 512},
    ],
)
def test_a_refusal_names_settings_that_fit(settings: dict[str, object]) -> None:
    settings = {"memory__blocks_to_swap": 0, **settings}
    plan = plan_for("6gb", **settings)
    assert not plan.fit.fits
    with pytest.raises(UsageError) as refused:
        refuse_what_does_not_fit(plan.demand, plan.fit)
    problem = refused.value.problems[0]
    assert f"{plan.fit.parts.peak:.1f} GiB" in problem.message
    assert "5.4" in problem.message, "what a GPU of 6 GiB has to use"
    sentence = problem.fix.split(". ")[0].rstrip(".")
    named = re.findall(r"--set (\S+)", sentence)
    assert named, problem.fix
    changed = dict(settings)
    for text in named:
        section, key, value = parse_assignment(text)  # type: ignore[misc]
        changed[f"{section}__{key}"] = value
    assert plan_for("6gb", **changed).fit.fits, problem.fix


def test_a_gpu_that_is_too_small_is_refused_with_its_size() -> None:
    plan = plan_for(memory__limit_gib=0.9, data__resolution=256)
    assert not plan.fit.fits
    assert re.search(r"GPU of \d+ GiB", plan.advice[0])


def test_a_phase_that_does_not_fit_is_in_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """SDXL at 1024 px on 2 GiB: training swaps blocks, and encoding one image does not fit."""
    plan = plan_for(memory__limit_gib=2.0, lora__rank=16)
    assert plan.fit.fits
    assert not plan.fits
    assert plan.phases["cache"].peak_gib > 2.0
    (short,) = plan.shortages
    assert short.startswith("cache needs")
    (named,) = re.findall(r"--set data.resolution=(\d+)", plan.advice[0])
    assert plan_for(memory__limit_gib=2.0, data__resolution=int(named)).fits
    code, found = run_json(capsys, "--set", "model.family=sdxl", "--set", "memory.limit_gib=2")
    assert (code, found["fits"], found["advice"]) == (2, False, list(plan.advice))
    tiny = plan_for(memory__limit_gib=0.5)
    assert any("a GPU of 0.5 GiB has 0.45 to use" in sentence for sentence in tiny.shortages)
    (gpu,) = map(int, re.findall(r"GPU of (\d+) GiB", tiny.advice[0]))
    assert plan_for(memory__limit_gib=float(gpu), memory__blocks_to_swap="auto").fits


@given(samples=st.integers(1, 40), limit=st.floats(5.0, 200.0), most=st.none() | st.integers(1, 50))
def test_any_step_is_covered_and_within_its_limits(samples: int, limit: float, most: int | None) -> None:
    demand = replace(SD15, samples=samples, limit_gib=limit, max_micro=most)
    fit = choose_fit(demand)
    assert 1 <= fit.micro <= min(samples, most or samples)
    assert (fit.accumulation - 1) * fit.micro < samples <= fit.accumulation * fit.micro
    assert fit.fits == (fit.parts.peak <= LARGEST_SHARE * limit)
    assert fit.fits
    earlier = next(option for option in candidate_plans(demand) if option.fits)
    assert earlier == fit


SD15: Demand = plan_for(family="sd15", memory__limit_gib=80.0).demand


def test_parts_grow_with_what_they_depend_on() -> None:
    base = parts_of(SD15, 1, 0, "bf16")
    assert parts_of(replace(SD15, rank=128), 1, 0, "bf16").adapter > 3 * base.adapter
    one, four = (parts_of(replace(SD15, optimizer=name), 1, 0, "bf16").optimizer for name in ("lion", "prodigy"))
    assert four == pytest.approx(4 * one)
    steps_counted = 512 * len(SD15.memory_model.shapes(SD15.rank)) / 2**30
    assert base.optimizer == pytest.approx(2 * one + steps_counted)
    averaged = parts_of(replace(SD15, averaged=True), 1, 0, "bf16")
    assert averaged.optimizer == pytest.approx(base.optimizer + one)
    rounded = parts_of(replace(SD15, rounded=True), 1, 0, "bf16")
    assert rounded.adapter == pytest.approx(base.adapter - one), "no fp32 masters"
    assert rounded.optimizer == base.optimizer
    split = parts_of(replace(SD15, samples=4), 1, 0, "bf16")
    assert split.adapter > base.adapter, "gradients of the micro-batches before"
    assert split.tflop == pytest.approx(4 * base.tflop)
    assert parts_of(SD15, 4, 0, "bf16").activations == pytest.approx(4 * base.activations, rel=0.02)
    assert parts_of(SD15, 1, 0, "fp32").weights == pytest.approx(2 * base.weights)


def test_quantized_weights_come_before_block_swap() -> None:
    """FLUX.1: 8-bit weights if they fit, then 4 bits, then block swap; each as little as needed."""
    fits = {limit: plan_for(family="flux", memory__limit_gib=limit).fit for limit in (80.0, 24.0, 12.0, 8.0, 5.0)}
    assert [fit.precision for fit in fits.values()] == ["bf16", "fp8", "nf4", "nf4", "nf4"]
    assert [fit.swapped > 0 for fit in fits.values()] == [False, False, False, True, True]
    assert fits[8.0].swapped < fits[5.0].swapped < fits[5.0].swappable
    assert all(fit.fits for fit in fits.values())
    for limit in (8.0, 5.0):
        fit = fits[limit]
        demand = plan_for(family="flux", memory__limit_gib=limit).demand
        fewer = parts_of(demand, 1, fit.blocks, "nf4", fit.swapped - 1)
        assert fit.checkpointed == fit.blocks
        assert fewer.peak > LARGEST_SHARE * limit >= fit.parts.peak


def test_a_fixed_weight_dtype_swaps_blocks_when_needed() -> None:
    plan = plan_for("12gb", family="flux", memory__weight_dtype="fp8")
    assert (plan.fit.precision, plan.fit.fits) == ("fp8", True)
    assert plan.fit.swapped > 0
    kept = plan_for("12gb", family="flux", memory__weight_dtype="fp8", memory__blocks_to_swap=50)
    assert (kept.fit.swapped, kept.fit.reasons[3]) == (50, "as set")
    alone = plan_for("12gb", family="flux", memory__weight_dtype="fp8", memory__blocks_to_swap=0, lora__rank=64)
    assert not alone.fit.fits
    assert "memory.blocks_to_swap=auto" in alone.advice[0]


def test_a_refusal_names_the_settings_and_the_swapped_blocks() -> None:
    set_by_hand = plan_for("12gb", family="flux", memory__weight_dtype="fp8", memory__gradient_checkpointing=57)
    assert set_by_hand.fit.swapped > 0
    assert set_by_hand.fit.reasons[1] == "as set"
    left_open = plan_for("12gb", family="flux", memory__weight_dtype="fp8")
    assert left_open.fit.reasons[1] == "all of them, as block swap is slower"
    small = plan_for("6gb", family="flux", data__resolution=768)
    wide, own = (next(each for each in small.advice if key in each) for key in ("bf16 weights", "own 1024 px"))
    assert f"checkpointed and {small.fit.swapped} of 57 swapped." in wide
    assert re.search(r"57 of 57 blocks checkpointed and \d+ of 57 swapped: --set data.resolution=1024", own)


def test_each_setting_shows_its_gain() -> None:
    plan = plan_for("24gb", family="flux")
    bought = {each.setting: each for each in plan.settings}
    before = plan.fit.parts
    assert bought["memory.gradient_checkpointing=false"].parts.tflop < before.tflop
    assert bought["memory.gradient_checkpointing=false"].parts.peak > before.peak
    cheap = bought["memory.checkpointing_mode=selective"].parts
    assert before.peak < cheap.peak < bought["memory.gradient_checkpointing=false"].parts.peak
    assert cheap.tflop < before.tflop
    assert bought["memory.weight_dtype=nf4"].parts.weights < 0.6 * before.weights
    assert bought[f"memory.blocks_to_swap={plan.fit.swappable}"].parts.weights < 0.1 * before.weights
    assert bought["memory.weight_dtype=bf16"].fits is False
    options = plan.to_json()["settings"]
    assert [each["setting"] for each in options] == list(bought)
    assert set(options[0]) == {"setting", "peak_gib", "tflop", "fits"}


def test_the_minimum_time_is_that_of_the_compute_precision() -> None:
    def seconds(**settings: object) -> tuple[str, float]:
        found = plan_for(memory__limit_gib=80.0, **settings).to_json()
        return found["computed_in"], found["seconds_per_step_at_least"]["RTX 4090"] / found["train_tflop_per_step"]

    bf16 = seconds()
    assert bf16 == seconds(memory__weight_dtype="fp8") == ("bf16", pytest.approx(1 / 165, rel=1e-3))
    assert seconds(memory__weight_dtype="int8") == bf16
    assert seconds(memory__weight_dtype="fp32")[0] == "tf32"
    assert seconds(memory__weight_dtype="fp32", hardware__tf32=False) == ("fp32", pytest.approx(1 / 82.6, rel=1e-3))
    resolved = settle([], [Layer("--set", {"memory": {"weight_dtype": "int8", "int8_matmul": True}})])
    assert computed_in(resolved.config, "int8") == "int8"
    assert computed_in(resolved.config, "bf16") == "bf16"
    assert least_seconds(660.6, "int8")["RTX 4090"] == pytest.approx(1.0)
    assert set(OTHER_TFLOPS) == set(USUAL)


def test_no_fit_is_claimed_for_an_attention_backend_with_uncounted_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--set", "model.family=sdxl", "--set", "hardware.attention_backend=math", "--preset")
    code, found = run_json(capsys, *arguments, "8gb")
    assert (code, found["fits"]) == (0, None)
    assert "hardware.attention_backend=math keeps every score" in str(found["advice"])
    code, found = run_json(capsys, *arguments, "8gb", "--set", "memory.limit_gib=2")
    assert (code, found["fits"]) == (2, False)


def test_a_larger_micro_batch_is_not_a_setting() -> None:
    """`train.max_micro_batch_size` is a limit: raising it changes no choice below it."""
    fit = plan_for("8gb", train__effective_batch_size=4, memory__gradient_checkpointing=18)
    names = [each.setting for each in fit.settings]
    assert f"{2 * fit.fit.micro} samples at once" in names
    assert not any(
        name.startswith("train.max_micro_batch_size") and name != "train.max_micro_batch_size=1" for name in names
    )


@pytest.mark.parametrize("other", [["--json"], ["--explain"], ["--preset", "12gb"], ["--set", "lora.rank=8"]])
def test_the_page_of_all_plans_takes_no_other_flag(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--all", *other]) == 2
    shown = capsys.readouterr()
    assert "--all writes a Markdown page" in shown.err
    assert not shown.out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_resident_vae_is_counted() -> None:
    """Without cached latents: 84 M parameters in fp32, and the memory to encode one image."""
    cached, fresh = plan_for(), plan_for(cache__latents=False)
    assert fresh.fit.parts.weights - cached.fit.parts.weights == pytest.approx(0.31, abs=0.05)
    assert fresh.fit.parts.activations > cached.fit.parts.activations
    assert fresh.phases["train"].peak_gib == fresh.fit.parts.peak
    assert "VAE" in fresh.phases["train"].placement
    assert not any(cached.demand.encoder)


def test_json_has_the_fields_that_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "--preset", "12gb,quality", "--set", "model.family=sdxl", "--max-steps", "300")
    assert code == 0
    assert found["peak_gib"] == pytest.approx(sum(found[part] for part in PARTS), abs=1e-3)  # type: ignore[misc]
    expected = {"family": "sdxl", "resolution": 1024, "fits": True, "limit_gib": 12.0, "steps": 300}
    assert {name: found[name] for name in expected} == expected
    names = {
        "micro_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "weight_dtype",
        "train_tflop_per_step",
        "disk_gib",
    }
    assert {*names, "advice"} <= set(found)
    assert found["margin_gib"] > 1.2  # type: ignore[operator]


def test_the_peak_of_the_run_is_that_of_its_highest_phase() -> None:
    assert "peak of the run: 6.95 GiB (cache)" in lines(plan_for("12gb", family="sd2"))
    plan = plan_for("12gb", family="sdxl")
    assert f"peak of the run: {plan.fit.parts.peak:.2f} GiB (train)" in lines(plan)


def test_a_folder_named_like_a_family_is_not_taken_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it set the width of trained text encoders."""
    arguments = ["plan", "--json", "--set", "model.family=sdxl", "--set", "text_encoder.learning_rates=[1e-5]"]
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    published = capsys.readouterr().out
    (tmp_path / "sdxl" / "text_encoder").mkdir(parents=True)
    assert main(arguments) == 0
    assert capsys.readouterr().out == published


def test_a_plan_that_does_not_fit_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "6gb", "--set", "model.family=sdxl"]
    arguments += ["--set", "memory.gradient_checkpointing=false", "--set", "memory.blocks_to_swap=0"]
    code, found = run_json(capsys, *arguments)
    assert (code, found["fits"], found["steps"]) == (2, False, None)
    assert "--set" in str(found["advice"])
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "not known without images: name them with --data" in shown
    assert all(part in shown for part in ("weights", "adapter", "optimizer", "activations", "overhead", "margin"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_documented_sizes_of_a_lora_are_those_of_the_plan(family: str, checkout: Path) -> None:
    page = (checkout / "docs" / "families.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| `{family}` \| (\d.*) \|$", page, flags=re.MULTILINE)
    modules, *sizes = map(float, row.split(" | "))
    with_ff, *wider = sizes[3:]
    for targets, count, ranks, documented in (
        ("attention", modules, (32, 64, 128), sizes[:3]),
        ("attention+ff", with_ff, (16, 32), wider),
    ):
        shapes = plan_for(family=family, lora__target_modules=targets).demand.memory_model.shapes
        assert len(shapes(16)) == 2 * count
        assert [round(2 * sum(map(math.prod, shapes(rank))) / 1e6, 1) for rank in ranks] == documented


def test_no_limit_without_a_vram_preset(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "--set", "model.family=sd15", "--set", "train.effective_batch_size=6")
    assert (code, found["limit_gib"], found["fits"], found["micro_batch_size"]) == (0, None, True, 6)


def test_a_published_model_is_planned_without_torch() -> None:
    program = (
        "import sys; from lora_trainer.cli.main import main;"
        "code = main(['plan', '--preset', '8gb', '--set', 'model.family=sdxl', '--json']);"
        "print(code, {'torch', 'diffusers'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "0 set()"
    assert json.loads(done.stdout)["fits"]


def test_every_phase_fits_its_vram_preset(capsys: pytest.CaptureFixture[str]) -> None:
    for tier, side in (("6gb", 768), ("8gb", 768), ("24gb", 1024)):
        assert main(["plan", "--preset", tier, "--set", "model.family=sdxl", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert list(plan["phases"]) == ["cache", "train", "validate", "draw"]
        assert plan["phases"]["train"]["peak_gib"] == pytest.approx(plan["peak_gib"], abs=1e-3)
        assert all(0 < phase["peak_gib"] <= 0.9 * plan["limit_gib"] for phase in plan["phases"].values()), tier
        assert plan["resolution"] == side
        small = "layer by layer" in plan["phases"]["validate"]["placement"]
        assert small == (tier == "6gb")
    assert plan["phases"]["draw"]["placement"] == "everything on the GPU"


def test_a_plan_in_a_pipe_names_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--preset",
        "8gb",
        "--set",
        "model.family=sdxl",
        "--set",
        "memory.gradient_checkpointing=false",
        "--max-steps",
        "9",
    )
    assert main(["plan", *asked]) == 0
    output = capsys.readouterr().out
    assert "bf16 does not fit with 0 blocks checkpointed, as set" in output
    assert "the whole run takes at least" in output
    assert not [line for line in output.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(8.6e-6, "8.6 µs"), (0.0464, "46 ms"), (3.5, "3.5 s"), (114, "1.9 min"), (7200, "2.0 h")]
)
def test_times_have_fitting_units(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_advice_names_the_largest_saving_and_drops_the_small_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--set", "model.family=flux2"]) == 0
    advice = [line for line in capsys.readouterr().out.splitlines() if "would free" in line]
    assert len(advice) == 1
    assert advice[0].startswith("- memory.gradient_checkpointing=true would free ")


def test_weights_are_divided_among_the_gpus_that_share_them() -> None:
    """FLUX.1 in bf16 fits no GPU of 24 GiB without block swap. Over two each holds half of it and the gathered blocks."""
    whole = plan_for(family="flux", memory__weight_dtype="bf16", memory__fsdp="full_shard", memory__limit_gib=24.0)
    alone = replace(whole.demand, streaming=0, checkpointing=True)
    weights = [parts_of(replace(alone, shards=gpus), 1, whole.fit.blocks, "bf16").weights for gpus in (1, 2, 4)]
    assert weights[0] / 2 < weights[1] < 0.7 * weights[0]
    assert weights[0] / 4 < weights[2] < weights[1]
    assert not choose_fit(alone).fits
    assert choose_fit(replace(alone, shards=2)).fits
    kept = parts_of(replace(alone, shards=2, regathered=False), 1, whole.fit.blocks, "bf16").weights
    assert kept > weights[0], "blocks that wait for their backward pass are there beside the parts"
    assert any("on each of 2 GPUs" in line for line in whole.advice)
