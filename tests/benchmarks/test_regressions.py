"""`make regressions`: each kind of regression, planted, fails the command; noise does not, and is not passed silently."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import check_regressions
from check_regressions import (
    BASELINE,
    GOLDEN,
    PARTS,
    RATIOS,
    TOLERANCE,
    GoldenRun,
    compare_losses,
    compare_ratios,
    describe_machine,
    golden_losses,
    main,
)
from lora_trainer.benchmarks import bench_cache, bench_step, interleaved
from lora_trainer.data.caches.entries import Store
from lora_trainer.diffusion import loss
from lora_trainer.memory_plan import estimate
from lora_trainer.training import fallbacks

CACHE = {"cache: ours over mapped": [1.15, 1.14, 1.16], "cache: ours over file_each": [0.2, 0.19, 0.21]}


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BASELINE.read_text("utf-8"))
    return found


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """The stored one as if it were of this machine, with ratios of the cache that anything here is better than."""
    path = tmp_path / "baseline.json"
    easy = {name: [100 * each for each in ratios] for name, ratios in CACHE.items()}
    path.write_text(json.dumps(stored() | {"measured": {"speed": describe_machine()}, "speed": easy}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, list[float] | None]]:
    """What every plan says, which takes half a second to find out."""
    return check_regressions.memory()


@pytest.fixture
def known_plans(plans: dict[str, dict[str, list[float] | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_regressions, "memory", lambda: plans)


@pytest.fixture
def few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cache, "ENTRIES", 16)


def test_the_stored_baseline_has_every_part_and_states_its_origin() -> None:
    document = stored()
    assert set(document) == {"measured", *PARTS}
    assert set(document["measured"]) == set(PARTS)
    for origin in document["measured"].values():
        assert set(origin) == {"device", "cpu", "cores", "versions", "commit"}
    assert set(document["losses"]) == set(GOLDEN)
    assert {name.partition(":")[0] for name in document["speed"]} == set(RATIOS)
    assert all(len(ratios) >= 2 for ratios in document["speed"].values())


@pytest.mark.slow
def test_the_memory_plans_are_those_of_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "memory"]) == 0
    assert "plans: at most +0.0% of memory and operations" in capsys.readouterr().out


@pytest.mark.slow
def test_a_bigger_plan_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted: what a process holds beside the allocator. Small GPUs recompute more, or nothing fits."""
    monkeypatch.setattr(estimate, "CONTEXT_GIB", estimate.CONTEXT_GIB + 5.4)
    assert main(["--only", "memory"]) == 5
    output = capsys.readouterr().out
    assert "worse         plan of sd15, 24gb speed: 11.05 GiB where it was 5.65, +95.5%" in output
    assert "TFLOP a step where it was" in output, "more is recomputed"
    assert "worse         plan of sdxl, 6gb speed: does not fit any more" in output


@pytest.mark.usefixtures("few_entries")
@pytest.mark.slow  # the clock decides, and a busy machine leaves it open
def test_slower_reading_fails(
    baseline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "speed", "--filter", "cache", "--repeats", "3", "--steps", "2", "--baseline", str(baseline)]
    assert main(arguments) == 0
    read = Store.read

    def slow(store: Store, *arguments: Any) -> Any:
        time.sleep(0.01)
        return read(store, *arguments)

    monkeypatch.setattr(Store, "read", slow)
    assert main(arguments) == 5
    output = capsys.readouterr().out
    assert "worse         cache: ours over mapped: " in output
    assert output.splitlines()[-1].startswith("regressions: ")


@pytest.mark.slow
def test_a_slower_step_fails(
    baseline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: a sleep in the step of the trainer's own loop, as long as the step."""
    for module, name in ((bench_step, "WARM_UP"), (interleaved, "WARM_UP"), (bench_step, "PEAK_STEPS")):
        monkeypatch.setattr(module, name, 1)
    document = json.loads(baseline.read_text("utf-8")) | {"speed": stored()["speed"]}
    baseline.write_text(json.dumps(document), encoding="utf-8")
    true = fallbacks.train_step

    def slow(*arguments: Any) -> Any:
        time.sleep(1.0)
        return true(*arguments)

    monkeypatch.setattr(fallbacks, "train_step", slow)
    arguments = ["--only", "speed", "--filter", "step", "--repeats", "3", "--steps", "3", "--baseline", str(baseline)]
    assert main(arguments) == 5
    output = capsys.readouterr().out
    assert "worse         step: ours over bare: " in output
    assert "worse         step: ours over usual: " in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factor", "code"),
    [
        ("tiny sdxl", 1.0 + 10 * TOLERANCE, 5),
        pytest.param("built-in base model", 1.0 + 3 * TOLERANCE, 5, marks=pytest.mark.slow),
        pytest.param("tiny sd3", 1.0, 0, marks=pytest.mark.slow),
    ],
)
def test_a_changed_loss_fails(
    name: str, factor: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: an error measure that is a little larger."""
    mse = loss.ERRORS["mse"]
    monkeypatch.setitem(loss.ERRORS, "mse", lambda *arguments: scaled(mse(*arguments), factor))
    assert main(["--only", "losses", "--filter", name]) == code
    assert f"{'worse' if code else 'ok':12}  losses of {name}: at most " in capsys.readouterr().out


def scaled(error: Any, factor: float) -> Any:
    """The error measure, scaled."""
    return lambda *arguments: factor * error(*arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("known_plans")
def test_what_is_missing_is_inconclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.json"
    document = stored()
    document["memory"].pop("flux")
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["--only", "memory", "--baseline", str(path)]) == 0
    assert "inconclusive  plan of flux, 6gb speed: not in the baseline" in capsys.readouterr().out
    assert main(["--only", "memory", "--baseline", str(path), "--strict"]) == 5
    assert main(["--only", "memory", "--baseline", str(tmp_path / "none.json")]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("known_plans")
def test_an_update_keeps_the_parts_that_are_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "base.json"
    elsewhere = {"speed": {"cpu": "another"}, "memory": {"cpu": "another"}}
    path.write_text(json.dumps({"measured": elsewhere, "losses": {"a": 1}, "memory": {}}), encoding="utf-8")
    assert main(["--update", "--only", "memory", "--baseline", str(path)]) == 0
    written = json.loads(path.read_text("utf-8"))
    assert written["losses"] == {"a": 1}
    assert written["memory"] == stored()["memory"]
    assert written["measured"] == {"speed": {"cpu": "another"}, "memory": describe_machine()}
    assert main(["--only", "memory", "--baseline", str(path)]) == 0


def test_a_filter_leaves_the_other_entries_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An update keeps them, and `--strict` does not ask for them."""
    path = tmp_path / "base.json"
    path.write_text(json.dumps(stored()), encoding="utf-8")
    nothing = ["--only", "losses", "--filter", "no such run", "--baseline", str(path)]
    assert main([*nothing, "--strict"]) == 0
    assert "0 inconclusive" in capsys.readouterr().out
    assert main([*nothing, "--update"]) == 0
    written = json.loads(path.read_text("utf-8"))
    assert {part: written[part] for part in PARTS} == {part: stored()[part] for part in PARTS}
    assert written["measured"] == stored()["measured"] | {"losses": describe_machine()}


def test_ratios_of_two_cpus_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "base.json"
    document = stored()
    document["measured"]["speed"]["cpu"] = "another"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["--update", "--only", "speed", "--filter", "cache", "--baseline", str(path)]) == 2
    assert "of another CPU" in capsys.readouterr().err
    assert json.loads(path.read_text("utf-8")) == document


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ([0.5, None, 0.4], [0.5, None, 0.4], "ok"),
        ([0.5, 0.5, 0.4], [0.5, None, 0.4], "worse"),
        ([0.5, None, 0.4], [0.5, 0.5, 0.4], "worse"),
    ],
)
def test_a_skipped_step_has_no_loss(before: list[float | None], now: list[float | None], verdict: str) -> None:
    pair = [{"run": {"losses": losses, "val_loss": 0.3}} for losses in (before, now)]
    (line,) = compare_losses(*pair, same=True)
    assert line.verdict == verdict


@pytest.mark.slow
def test_a_golden_run_may_skip_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: no number at the second step."""
    mse, calls = loss.ERRORS["mse"], list[int]()

    def ruined(*arguments: Any) -> Any:
        error = mse(*arguments)

        def of(*values: Any) -> Any:
            calls.append(1)
            return (math.nan if len(calls) == 2 else 1.0) * error(*values)

        return of

    monkeypatch.setitem(loss.ERRORS, "mse", ruined)
    found = golden_losses(GoldenRun(3, "sdxl"), tmp_path)["losses"]
    assert [each is None for each in found] == [False, True, False]


@pytest.mark.parametrize(
    ("now", "same", "verdict"),
    [
        ([1.00, 1.01, 0.99, 1.0], True, "ok"),
        ([1.20, 1.21, 1.19, 1.2], True, "worse"),
        ([1.20, 1.21, 1.19, 1.2], False, "inconclusive"),  # on another CPU
        ([1.40, 1.41, 1.39, 1.4], False, "worse"),
        ([1.20, 1.90, 0.80, 1.2], True, "inconclusive"),  # too noisy to tell
        ([1.05, 1.06, 1.04, 1.05], True, "inconclusive"),
        ([0.50, 0.51, 0.49, 0.5], True, "ok"),
        ([1.2], True, "inconclusive"),
    ],
)
def test_the_interval_decides(now: list[float], same: bool, verdict: str) -> None:
    assert compare_ratios("x", [1.0, 1.01, 0.99, 1.0], now, same).verdict == verdict


@given(
    ratios=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=8),
    factor=st.floats(0.2, 5.0),
    unit=st.sampled_from([0.125, 0.5, 2.0, 8.0]),
)
def test_only_a_larger_ratio_can_be_worse(ratios: list[float], factor: float, unit: float) -> None:
    """Whatever its unit; and what is worse stays worse when it grows."""
    now = [factor * ratio for ratio in ratios]
    found = compare_ratios("x", ratios, now, same=True).verdict
    assert factor > 1.05 - 1e-9 or found != "worse"
    if found == "worse":
        assert compare_ratios("x", ratios, [2 * each for each in now], same=True).verdict == "worse"
    if abs(math.log(factor / 1.05)) > 1e-6:
        pair = [unit * each for each in ratios], [unit * each for each in now]
        assert {compare_ratios("x", *pair, same=True).verdict, found} != {"ok", "worse"}
