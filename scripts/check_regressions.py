"""Compare speed, memory and losses with the stored baseline; exit code 5 where something is worse.

    make regressions
    make regressions-update

- **speed**: ratios of rows that one process measures in turn (`bench step`, `loader`, `cache`), never seconds. Each
  measurement is repeated, and repeated again while nothing is decided. A ratio is worse if the 95 % interval of its
  change lies beyond 5 %, and as before if it lies below; anything else is reported as inconclusive.
- **memory**: the predicted peak of every family, VRAM preset and training preset. Worse: over 5 % more, or a plan that
  fitted and does not. A prediction has no noise.
- **losses**: short runs with fixed seeds by the whole command. Worse: a loss of the curve, or the last validation loss,
  that differs by more than TOLERANCE.

The baseline states the device, versions and commit of each part. Write it again where a change is meant, and say so in
the commit. `--update` replaces what it measures: with `--only` that part, with `--filter` those measurements and runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the tests' tiny models are made with scripts/builtin_base
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lora_trainer.benchmarks.baseline import WORSE
from lora_trainer.benchmarks.device import device_measured
from lora_trainer.benchmarks.measures import MEASURES, RequestedMeasure
from lora_trainer.cli.main import main as lora_trainer
from lora_trainer.config.layers import Layer
from lora_trainer.core.errors import DONE, TRAINING_FAILED, UserError
from lora_trainer.core.hardware import package_versions
from lora_trainer.core.intervals import MOST_VALUES, T_QUANTILES
from lora_trainer.core.io import read_json, write_text
from lora_trainer.run.inputs import data_in_use
from lora_trainer.run.plans.page import every_plan
from lora_trainer.run.settings import settle

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "tests" / "regressions.json"
PARTS = ("speed", "memory", "losses")
GPU = "gpu"  # rows of a GPU: scripts/gpu_minutes.py writes and compares them
THREADS = 2  # sums on a CPU are split by it, and ratios depend on it
REPEATS, MOST_REPEATS, STEPS = 4, 8, 10
SPEED_SECONDS = 150.0  # no further repeats after it
# On another CPU than the baseline's a ratio may differ by more than noise: what the steps compute and what surrounds them
# do not scale alike. Only more than this fails there; from 5 % on it is inconclusive.
ELSEWHERE = 1.25
# Relative, of each loss. CPUs of other vendors take other kernels, which sum in another order; training makes the
# difference grow with the steps. With other instruction sets and numbers of threads (docs/benchmarks.md): at most 5e-5.
TOLERANCE = 1e-3
RATIOS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "step": (("ours", "bare"), ("ours", "usual"), ("ours", "usual_cached")),
    "loader": (("cached", "resident"), ("uncached", "resident")),
    "cache": (("ours", "mapped"), ("ours", "file_each")),
}


@dataclass(frozen=True)
class GoldenRun:
    """A short run: of the built-in base model, or of a tiny one with random weights of a `family`."""

    steps: int
    family: str | None = None
    arguments: tuple[str, ...] = ()


GOLDEN: Mapping[str, GoldenRun] = {
    "built-in base model": GoldenRun(30),
    "built-in base model, 12gb, quality": GoldenRun(
        30, arguments=("--preset", "12gb,quality", "--set", "optimizer.learning_rate=1e-3", "--set", "lora.rank=8")
    ),
    "tiny sdxl": GoldenRun(20, "sdxl", ("--set", "loss.min_snr_gamma=5", "--set", "noise.offset=0.05")),
    "tiny sd3": GoldenRun(20, "sd3"),
    "tiny flux": GoldenRun(20, "flux", ("--set", "lora.type=lora", "--set", "optimizer.name=adafactor")),
}


@dataclass(frozen=True)
class Line:
    """One comparison: `ok`, `inconclusive` or `worse`."""

    verdict: str
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and compare or write. The exit code: 0, or 5 where something is worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE", help="tests/regressions.json")
    parser.add_argument("--update", action="store_true", help="write the baseline")
    parser.add_argument("--only", action="append", choices=PARTS, help="repeatable: one of the parts (all)")
    parser.add_argument(
        "--filter", default="", metavar="TEXT", help="only measurements of speed and runs with this in their names"
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help=f"of each measurement of speed ({REPEATS})"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"timed steps of a repeat ({STEPS})")
    parser.add_argument("--strict", action="store_true", help="exit code 5 also where something is inconclusive")
    chosen = parser.parse_args(arguments)
    parts, began = chosen.only or PARTS, time.monotonic()
    stored = read_json(chosen.baseline) if chosen.baseline.is_file() else {}
    if not stored and not chosen.update:
        print(f"{chosen.baseline} does not exist. Write it with: make regressions-update", file=sys.stderr)
        return 2
    machine, origins = describe_machine(), stored.get("measured", {})
    same = origins.get("speed", {}).get("cpu") == machine["cpu"]
    left_out = {part: filtered_out(stored.get(part, {}), chosen.filter) for part in parts if part != "memory"}
    if chosen.update and left_out.get("speed") and not same:
        print(
            "The other ratios of speed are of another CPU. Update them without --filter, or add --only.",
            file=sys.stderr,
        )
        return 2
    found: dict[str, Any] = {}
    if "memory" in parts:
        found["memory"] = memory()
    if "losses" in parts:
        found["losses"] = losses(chosen.filter)
    if "speed" in parts:
        before = {} if chosen.update else stored.get("speed", {})
        found["speed"] = speed(before, chosen.repeats, chosen.steps, chosen.filter, same=same)
    if chosen.update:
        found = {part: {**left_out.get(part, {}), **values} for part, values in found.items()}
        origins = {**origins, **dict.fromkeys(found, machine)}
        write_text(chosen.baseline, document_text({**stored, "measured": origins, **found}))
        print(f"{chosen.baseline}: written after {time.monotonic() - began:.0f} s")
        return DONE
    lines = []
    for part in [part for part in PARTS if part in found]:
        kept = {name: value for name, value in stored.get(part, {}).items() if name not in left_out.get(part, {})}
        lines += COMPARE[part](kept, found[part], same)
    for part, of in [(part, origins[part]) for part in found if part in origins]:
        versions = f"torch {of['versions']['torch']}"
        print(f"baseline of {part}: commit {of['commit']}, {of['device']} ({of['cpu']}), {versions}")
    if "speed" in found and not same:
        print(
            f"this CPU is another: {machine['cpu']}. Ratios fail from {ELSEWHERE - 1:.0%} on; up to that they are inconclusive."
        )
    return print_verdict(lines, time.monotonic() - began, strict=chosen.strict)


def print_verdict(lines: Sequence[Line], seconds: float, *, strict: bool) -> int:
    """Print the comparisons and their counts. The exit code."""
    for verdict in ("ok", "inconclusive", "worse"):  # what matters most is printed last
        for line in lines:
            if line.verdict == verdict:
                print(f"{verdict:12}  {line.text}")
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in ("ok", "inconclusive", "worse")}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"regressions: {summary}, after {seconds:.0f} s")
    return TRAINING_FAILED if counts["worse"] or (strict and counts["inconclusive"]) else DONE


def describe_machine() -> dict[str, Any]:
    """What the figures are of."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=8"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    cpuinfo, name = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if cpuinfo.is_file() and (found := re.search(r"model name\s*: (.+)", cpuinfo.read_text("utf-8"))):
        name = found[1].strip()
    return {
        "device": device_measured(settle([], [threads()]).config),
        "cpu": name,
        "cores": os.cpu_count(),
        "versions": package_versions(),
        "commit": commit,
    }


def filtered_out(entries: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    """The entries of a part that `--filter` leaves out, by the measurement or run that their names begin with."""
    return {name: value for name, value in entries.items() if wanted not in name.partition(":")[0]}


def threads() -> Layer:
    return Layer("check_regressions", {"hardware": {"threads": THREADS}})


# ---- speed


def speed(
    before: Mapping[str, Sequence[float]], repeats: int, steps: int, wanted: str, *, same: bool
) -> dict[str, list[float]]:
    """The ratios of each repeat. Where a baseline is given, measurements are repeated while something is open."""
    found: dict[str, list[float]] = {}
    began = time.monotonic()
    resolved = settle([], [threads()])
    for number in range(MOST_REPEATS if before else repeats):
        for what in [what for what in RATIOS if wanted in what]:
            names = [name for name in found if name.startswith(f"{what}: ")]
            open_ones = [
                name
                for name in names
                if compare_ratios(name, before.get(name), found[name], same).verdict == "inconclusive"
            ]
            late = time.monotonic() - began > SPEED_SECONDS
            if number >= repeats and (late or not open_ones):
                continue
            report = f"repeat {number + 1} of bench {what}"
            print(report, file=sys.stderr, flush=True)
            with data_in_use(), contextlib.redirect_stderr(io.StringIO()):
                rows = MEASURES[what](RequestedMeasure(resolved, steps)).rows
            for name, ratio in ratios_of(what, {row.name: row for row in rows}).items():
                found.setdefault(name, []).append(round(ratio, 4))
    return found


def ratios_of(what: str, rows: Mapping[str, Any]) -> dict[str, float]:
    """The ratios of one repeat: by the clock, and of CPU time, which other programs change less."""
    found = {}
    for name, over in RATIOS[what]:
        if name in rows and over in rows:
            found[f"{what}: {name} over {over}"] = rows[name]["ratio"] / rows[over]["ratio"]
            cpu, cpu_over = rows[name]["cpu_ratio"], rows[over]["cpu_ratio"]
            if cpu and cpu_over:
                found[f"{what}: {name} over {over}, CPU time"] = cpu / cpu_over
    return found


def compare_speed(before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> list[Line]:
    gone = [Line("inconclusive", f"{name}: in the baseline only") for name in before if name not in now]
    return [compare_ratios(name, before.get(name), ratios, same) for name, ratios in now.items()] + gone


def compare_ratios(name: str, before: Sequence[float] | None, now: Sequence[float], same: bool) -> Line:
    """The change of the geometric mean, with Student's 95 % interval from the repeats of both."""
    if before is None:
        return Line("inconclusive", f"{name}: not in the baseline")
    count = min(len(before), len(now), MOST_VALUES)
    if count < 2:
        return Line("inconclusive", f"{name}: one repeat has no interval")
    logs = [[math.log(ratio) for ratio in ratios] for ratios in (now, before)]
    change = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in logs))
    reach = T_QUANTILES[count - 2] * error
    low, high = math.exp(change - reach), math.exp(change + reach)
    text = (
        f"{name}: {statistics.geometric_mean(now):.3f} where it was {statistics.geometric_mean(before):.3f}, "
        f"{math.exp(change) - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%} in {len(now)} repeats)"
    )
    if low > (WORSE if same else ELSEWHERE):
        return Line("worse", text)
    return Line("ok" if high <= WORSE else "inconclusive", text)


# ---- memory


def memory() -> dict[str, dict[str, list[float] | None]]:
    """Predicted peak in GiB and TFLOP of a step, by family and presets; None where the plan does not fit."""
    found: dict[str, dict[str, list[float] | None]] = {}
    for family, tier, goal, plan in every_plan():
        parts = plan.fit.parts
        figures = None if plan.fits is False else [round(parts.peak, 3), round(parts.tflop, 2)]
        found.setdefault(family, {})[f"{tier} {goal}"] = figures
    return found


def compare_memory(before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> list[Line]:
    """A plan whose memory grows may also recompute more to fit: so its operations count, too."""
    then = {f"plan of {family}, {presets}": plan for family, plans in before.items() for presets, plan in plans.items()}
    found = {f"plan of {family}, {presets}": plan for family, plans in now.items() for presets, plan in plans.items()}
    lines, most = [Line("inconclusive", f"{name}: in the baseline only") for name in then if name not in found], 0.0
    for name, plan in found.items():
        if name not in then:
            lines.append(Line("inconclusive", f"{name}: not in the baseline"))
        elif then[name] is None:
            continue
        elif plan is None:
            lines.append(Line("worse", f"{name}: does not fit any more (was {then[name][0]:.2f} GiB)"))
        else:
            for unit, figure, earlier in zip(("GiB", "TFLOP a step"), plan, then[name], strict=True):
                most = max(most, figure / earlier - 1)
                if figure > WORSE * earlier:
                    figures = f"{figure:.2f} {unit} where it was {earlier:.2f}, {figure / earlier - 1:+.1%}"
                    lines.append(Line("worse", f"{name}: {figures}"))
    if not any(line.verdict == "worse" for line in lines):
        lines.append(
            Line("ok", f"{len(then.keys() & found.keys())} plans: at most {most:+.1%} of memory and operations")
        )
    return lines


# ---- losses


def losses(wanted: str) -> dict[str, dict[str, Any]]:
    """The loss curve and the last validation loss of each short run."""
    found = {}
    for name in [name for name in GOLDEN if wanted in name]:
        print(f"golden run: {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = golden_losses(GOLDEN[name], Path(folder))
    return found


def golden_losses(golden: GoldenRun, folder: Path) -> dict[str, Any]:
    """Train by the command. Raises UserError as it does, and SystemExit where it fails."""
    settings = {
        "hardware.threads": THREADS,
        "cache.dir": folder / "cache",
        "validation.every_n_steps": golden.steps,
        "validation.split": 0.2,
        "sample.every_n_steps": 0,
        "gates.lora_check": "off",
        "run.trackers": "[]",
        "run.system_every_seconds": 0,
        "memory.weight_dtype": "fp32",
    }
    arguments = ["--seed", "42", "--max-steps", str(golden.steps), "--output", str(folder), "--name", "golden"]
    if golden.family is not None:
        from tests.recipes.recipe import draw_images, save_tiny_model

        settings |= {"lora.rank": 4, "optimizer.learning_rate": 1e-2, "data.resolution": 64}
        arguments += [
            "--model",
            str(save_tiny_model(folder, golden.family)),
            "--data",
            str(draw_images(folder / "data")),
        ]
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = lora_trainer(["train", *arguments, *chosen, *golden.arguments])
    if code != DONE:
        raise SystemExit(f"a golden run ended with exit code {code}:\n{printed.getvalue()}")
    rows = {
        name: [json.loads(line) for line in (folder / "golden" / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("metrics", "validation")
    }
    return {
        # A skipped step has no loss.
        "losses": [None if row["loss"] is None else float(f"{row['loss']:.6g}") for row in rows["metrics"]],
        "val_loss": float(f"{rows['validation'][-1]['loss']:.6g}"),
    }


def compare_losses(before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> list[Line]:
    lines = [Line("inconclusive", f"losses of {name}: in the baseline only") for name in before if name not in now]
    for name, run in now.items():
        if name not in before:
            lines.append(Line("inconclusive", f"losses of {name}: not in the baseline"))
            continue
        pairs = list(zip(run["losses"], before[name]["losses"], strict=False))
        apart = [
            (0.0 if loss is earlier else math.inf) if None in (loss, earlier) else abs(loss - earlier) / abs(earlier)
            for loss, earlier in pairs
        ]
        step = max(range(len(apart)), key=apart.__getitem__)
        loss, loss_before = ["skipped" if each is None else f"{each:.5g}" for each in pairs[step]]
        val_loss, earlier = run["val_loss"], before[name]["val_loss"]
        change = val_loss / earlier - 1
        text = (
            f"losses of {name}: at most {apart[step]:.2%} off, at step {step + 1} ({loss} where it was "
            f"{loss_before}); validation loss {val_loss:.5g} where it was {earlier:.5g}, {change:+.2%}"
        )
        whole = len(run["losses"]) == len(before[name]["losses"])
        lines.append(Line("ok" if whole and max(apart[step], abs(change)) <= TOLERANCE else "worse", text))
    return lines


COMPARE: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], bool], list[Line]]] = {
    "speed": compare_speed,
    "memory": compare_memory,
    "losses": compare_losses,
}


def document_text(document: Mapping[str, Any]) -> str:
    """JSON with each list of numbers on one line, so that a change of the file can be read."""
    text = json.dumps({name: document[name] for name in ("measured", *PARTS, GPU) if name in document}, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
