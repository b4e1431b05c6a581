"""Compare settings on the built-in base model: what the LoRA learned, and what the base still knows.

    python scripts/measure_settings.py scripts/settings_study.toml OUT --jobs 2

Each arm of the study is trained on the drawn subjects with three seeds. The verdict of each run counts its samples. Then
16 images of unrelated shapes are made from the exported file and judged by their pixels, by a judge that shares no code
with the verdict. Finished cells are kept in OUT and not run again.
The table's differences are paired with the first arm, or with that of --beside: same subject, same seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builtin_base.judge import fixed_prompts, judge, sample

if TYPE_CHECKING:
    from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "lora_trainer" / "builtin" / "base"
DATA = {"pomo": ROOT / "lora_trainer" / "builtin" / "pomo", "fungo": ROOT / "tests" / "data_sets" / "fungo"}
SEEDS = (42, 7, 1234)
IMAGES = 16
STEPS_AND_GUIDANCE = (20, 3.0)
COMMON = (
    "sample.every_n_steps=0",
    "sample.count=1",
    "sample.num_inference_steps=1",
    "gates.lora_check=full",
    "gates.unresolved=accept",
    "hardware.threads=1",
)
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}  # Student's t by the number of cells
MEASURES = {
    "shows": "shows it",
    "whole": "whole",
    "stays_away": "stays away",
    "keeps_base": "keeps the base",
    "shapes": "unrelated shapes right",
}
RATES = ("shows", "whole", "stays_away", "keeps_base")  # counted by the run's own verdict


@dataclass(frozen=True)
class Cell:
    """One training run of the study."""

    arm: str
    subject: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}/{self.subject}-{self.seed}"


def make_images(prompts: list[str], first_seed: int, lora: Path | None = None) -> list[Image.Image]:
    """Images of the base model, with a LoRA's file for diffusers if any."""
    return sample(BASE, prompts, 8, first_seed, lora, STEPS_AND_GUIDANCE)


def run_python(cell: Cell, arguments: list[str]) -> str:
    """What a Python process of one thread prints: two of them share two cores. Raises SystemExit where it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{cell.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def train(cell: Cell, arm: dict[str, Any], out: Path) -> Path:
    """Run the real command; returns the run's folder."""
    folder = out / cell.arm
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{cell.subject}-{cell.seed}"
    settings = [*COMMON, *(f"{key}={value}" for key, value in arm.get("settings", {}).items())]
    command = ["-m", "lora_trainer", "train", "--preset", arm.get("presets", "12gb")]
    command += ["--data", str(DATA[cell.subject]), "--output", str(folder), "--name", name, "--seed", str(cell.seed)]
    command += ["--resume", *(part for setting in settings for part in ("--set", setting))]
    run_python(cell, command)
    return folder / name


def measure(cell: Cell, run: Path) -> dict[str, float]:
    """What the exported file does, in shares of 1."""
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    lora = run / f"{run.name}.diffusers.safetensors"
    neutral, scenes = fixed_prompts(IMAGES)
    others = make_images(neutral, 0, lora)
    for number, image in enumerate(others):
        image.save(run / f"judged_{number:02}.png")
    right = [all(judge(image).right(scene)) for image, scene in zip(others, scenes, strict=True)]
    parts = record["lora"]["parts"]
    counted = {name: parts[name]["count"] / parts[name]["of"] for name in RATES}
    return {
        **counted,
        "shapes": sum(right) / IMAGES,
        "steps": record["steps"],
        "seconds": record["seconds"]["train"],
        "bytes": float(lora.stat().st_size),
    }


def run_cell(cell: Cell, arm: dict[str, Any], out: Path) -> dict[str, float]:
    """The cell's figures, from its file when it is finished."""
    file = out / f"{cell.name}.json"
    if not file.is_file():
        code = (
            "import sys, json, pathlib; sys.path.insert(0, sys.argv[1]); import measure_settings as m; "
            "cell = m.Cell(sys.argv[2], sys.argv[3], int(sys.argv[4])); "
            "print(json.dumps(m.measure(cell, pathlib.Path(sys.argv[5]))))"
        )
        run = train(cell, arm, out)
        words = [str(Path(__file__).parent), cell.arm, cell.subject, str(cell.seed), str(run.resolve())]
        printed = run_python(cell, ["-c", code, *words])
        file.write_text(printed.strip().splitlines()[-1] + "\n", encoding="utf-8")
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    print(cell.name, " ".join(f"{key}={value:.4g}" for key, value in found.items()), flush=True)
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval (Student's t)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, float("nan")
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, T_95[len(values)] * spread / math.sqrt(len(values))


def table(found: dict[Cell, dict[str, float]], arms: list[str], about: dict[str, Any]) -> str:
    """Means of each arm, and its paired difference from the first one with the 95 % interval."""
    lines = [
        f"| arm | steps | {' | '.join(MEASURES.values())} |",
        f"|---|---|{'---|' * len(MEASURES)}",
    ]
    for arm in arms:
        cells = [cell for cell in found if cell.arm == arm]
        if not cells:
            continue
        row = [f"{about[arm].get('title', arm)}", f"{found[cells[0]]['steps']:.0f}"]
        for key in MEASURES:
            mean = sum(found[cell][key] for cell in cells) / len(cells)
            text = f"{mean:.2f}"
            pairs = [(cell, Cell(arms[0], cell.subject, cell.seed)) for cell in cells]
            if arm != arms[0] and all(first in found for _, first in pairs):
                difference, half = interval([found[cell][key] - found[first][key] for cell, first in pairs])
                text += f" ({difference:+.3f} ± {half:.3f})"
            row.append(text)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--arms", default=".*", help="a regular expression")
    parser.add_argument("--subjects", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument(
        "--beside", metavar="ARM", help="the arm that the others are compared with (default: the first)"
    )
    parser.add_argument("--table", action="store_true", help="print the table of the finished cells")
    args = parser.parse_args()
    args.out = args.out.resolve()  # the runs have another working directory
    about = tomllib.loads(args.study.read_text(encoding="utf-8"))
    arms = [arm for arm in about if re.fullmatch(args.arms, arm)]
    if args.beside:
        arms = [args.beside, *(arm for arm in arms if arm != args.beside)]
    cells = [Cell(arm, subject, seed) for seed, subject, arm in product(SEEDS, args.subjects, arms)]
    args.out.mkdir(parents=True, exist_ok=True)
    if args.table:
        cells = [cell for cell in cells if (args.out / f"{cell.name}.json").is_file()]
    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip(cells, pool.map(lambda cell: run_cell(cell, about[cell.arm], args.out), cells), strict=True))
    print(table(found, arms, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
