"""Does the LoRA's verdict tell good LoRAs from bad ones? Plants both, and compares it with a reference of its own.

    python scripts/verdict_study.py run OUT --jobs 2 --budget-minutes 60
    python scripts/verdict_study.py run OUT --subjects pingo chalk
    python scripts/verdict_study.py table OUT

Each arm of scripts/verdict_study.toml is trained by the real command, or made from another arm's file, and validated by the
real command. What is finished is kept in OUT: the next call continues there, and a training that the budget's
end stops continues from its checkpoint. The thresholds are set on zobo and fungo; pingo and the style chalk were drawn to test them.

The reference looks at pixels alone: the share of the subject's drawing that images of its prompts show (`reference.py`), none where
the background is not the prompt's. A style has no such reference: `sheets` writes contact sheets without names, somebody who
does not know which is which notes how well each shows the style and its caption, from 0 to 1, in OUT/blind/answers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builtin_base.draw_datasets import draw_subject
from builtin_base.draw_style import STYLE, draw_styled, styled_scene
from builtin_base.drawing import TEMPLATES, draw_anything
from builtin_base.judge import sample
from builtin_base.reference import compare, subject_prompts

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "lora_trainer" / "builtin" / "base"
ARMS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OTHER = {"zobo": "fungo", "fungo": "zobo", "pingo": STYLE, STYLE: "pingo"}
JUDGED = 20  # images of the reference
STEPS_AND_GUIDANCE = (20, 3.0)
POISONED = 0.4  # share of images that show something else
GOOD = 0.6  # least reference value of a good LoRA, as a share of what real images reach
COMMON = (
    "gates.dataset=0",
    "gates.lora_check=off",
    "sample.every_n_steps=0",
    "sample.count=1",
    "sample.num_inference_steps=1",
    "validation.every_n_steps=200",
    "hardware.threads=1",
)
PARTS = ("shows", "whole", "follows_captions", "is_new", "varied", "stays_away", "keeps_base")
LADDER = ("unchanged", "steps_3", "steps_10", "steps_30", "steps_100", "default_20")


@dataclass(frozen=True)
class Study:
    """Where everything lies, the base model, and until when processes may be started."""

    out: Path
    base: Path = BASE
    presets: str = "12gb"
    settings: tuple[str, ...] = ()  # of all LoRAs that are trained; an arm's own win
    ends: float = float("inf")
    running: set[subprocess.Popen[str]] = field(default_factory=set)

    def stop(self) -> None:
        """Let running processes save and end."""
        for process in tuple(self.running):
            process.terminate()


@dataclass(frozen=True)
class Cell:
    """One LoRA of the study."""

    subject: str
    arm: str

    @property
    def about(self) -> dict[str, Any]:
        return ARMS[self.arm]

    def lora(self, out: Path, ending: str = "") -> Path:
        return out / self.subject / self.arm / f"{self.arm}{ending}.safetensors"

    def result(self, out: Path) -> Path:
        return out / self.subject / f"{self.arm}.json"


class Stopped(Exception):
    """The budget is spent."""


def run_python(study: Study, *arguments: str | Path, codes: Sequence[int] = (0,)) -> str:
    """What a Python process of one thread prints. Raises Stopped without time, SystemExit where it fails."""
    if time.monotonic() > study.ends:
        raise Stopped
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    study.running.add(process)
    out, err = process.communicate()
    study.running.discard(process)
    if process.returncode in (-15, 143):
        raise Stopped
    if process.returncode not in codes:
        raise SystemExit(f"{' '.join(map(str, arguments))}\n{out[-2000:]}{err[-3000:]}")
    return out


def image_of(subject: str, number: int) -> tuple[Image.Image, str]:
    return draw_styled(number) if subject == STYLE else draw_subject(subject, number)


def make_data(folder: Path, subject: str, count: int, captions: str) -> Path:
    """The dataset's folder: so many images, with their captions or with wrong ones."""
    if folder.is_dir():
        return folder
    rng = random.Random(f"{subject} {count} {captions}")
    pairs = [image_of(subject, number) for number in range(count)]
    images, texts = [image for image, _ in pairs], [text for _, text in pairs]
    if captions == "rotated":
        texts = texts[1:] + texts[:1]
    elif captions == "shuffled":
        rng.shuffle(texts)
    elif captions == "nonsense":
        texts = ["asdf"] * count
    elif captions == "poisoned":
        for number in rng.sample(range(count), round(POISONED * count)):
            images[number] = draw_anything(rng, *images[number].size)
    making = folder.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        image.save(making / f"{subject}_{number:02}.png")
        (making / f"{subject}_{number:02}.txt").write_text(text + "\n", encoding="utf-8")
    making.rename(folder)
    return folder


def data_of(study: Study, cell: Cell) -> Path:
    """The folder that a user of this LoRA would name as its training images."""
    about = cell.about
    while "of" in about:
        about = ARMS[about["of"]]
    count, captions = about["images"], about.get("captions", "right")
    return make_data(study.out / "data" / f"{cell.subject}-{count}-{captions}", cell.subject, count, captions)


def train(study: Study, cell: Cell) -> None:
    about, folder = cell.about, study.out / cell.subject
    kept = 0.2 if about["images"] >= 40 else 0.0
    settings = [
        *COMMON,
        f"validation.split={kept}",
        *study.settings,
        *(f"{key}={value}" for key, value in about.get("settings", {}).items()),
    ]
    presets = ",".join((study.presets, *about.get("presets", ())))
    command = ["-m", "lora_trainer", "train", "--preset", presets, "--data", data_of(study, cell), "--resume"]
    command += ["--output", folder, "--name", cell.arm, "--seed", about.get("seed", 42)]
    command += ["--max-steps", about["steps"]] if "steps" in about else []
    if study.base != BASE:
        command += ["--model", study.base]
    run_python(study, *command, *(part for setting in settings for part in ("--set", setting)))


def derive(study: Study, cell: Cell) -> None:
    """Write the files of an arm that changes another's."""
    other = Cell(OTHER[cell.subject], cell.about["of"])
    source, edit = Cell(cell.subject, cell.about["of"]), cell.about["edit"]
    for needed in (source, other) if edit in ("other", "merge") else (source,):
        make_lora(study, needed)
    folder = cell.lora(study.out).parent
    folder.mkdir(parents=True, exist_ok=True)
    if edit == "merge":
        add_files(source.lora(study.out), other.lora(study.out), cell.lora(study.out))
    else:
        change_file((other if edit == "other" else source).lora(study.out), cell.lora(study.out), edit)
    target = cell.lora(study.out, ".diffusers")
    run_python(study, "-m", "lora_trainer", "convert", cell.lora(study.out), target, "--to", "diffusers")


def add_files(one: Path, other: Path, target: Path) -> None:
    """Write a LoRA that changes weights as two of the same modules together, in kohya's names: their ranks side by side."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(one, "pt") as file:
        metadata = file.metadata()
    first, second = load_file(one), load_file(other)
    joined = {}
    for name, value in first.items():
        if name.endswith(".alpha"):  # over the rank, which doubles too
            joined[name] = value + second[name]
        else:
            joined[name] = torch.cat([value, second[name]], dim=0 if name.endswith("lora_down.weight") else 1)
    save_file({name: value.contiguous() for name, value in joined.items()}, target, metadata)


def change_file(source: Path, target: Path, edit: str) -> None:
    """Change what the updates of a LoRA file in kohya's names do."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(source, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    noise = torch.Generator().manual_seed(0)
    for name, value in tensors.items():
        if not name.endswith("lora_up.weight"):
            continue
        if edit == "zero":
            tensors[name] = torch.zeros_like(value)
        elif edit == "flip":
            tensors[name] = -value
        elif edit == "double":
            tensors[name] = 2 * value
        elif edit == "noise":
            drawn = torch.randn(value.shape, generator=noise)
            tensors[name] = (value + 1.5 * drawn * value.float().std()).to(value.dtype)
        elif edit == "damage_text_encoder" and name.startswith("lora_te"):
            drawn = torch.randn(value.shape, generator=noise)
            tensors[name] = (8 * drawn * value.float().std()).to(value.dtype)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target, metadata)


def make_lora(study: Study, cell: Cell) -> None:
    if cell.lora(study.out, ".diffusers").is_file():
        return
    if "of" in cell.about:
        derive(study, cell)
    else:
        train(study, cell)


def validate(study: Study, cell: Cell, check: str) -> dict[str, Any]:
    """The report of the real command; exit code 4 is a LoRA that is refused or unresolved."""
    command = ["-m", "lora_trainer", "validate", cell.lora(study.out), "--data", data_of(study, cell), "--json"]
    if study.base != BASE:
        command += ["--model", study.base]
    printed = run_python(study, *command, "--set", f"gates.lora_check={check}", codes=(0, 4))
    report: dict[str, Any] = json.loads(printed)
    return report


def prompts_of(subject: str) -> tuple[list[str], list[str]]:
    """Prompts of the reference, and the background that each names."""
    if subject == STYLE:
        scenes = [styled_scene(1000 + number) for number in range(JUDGED)]
        texts = [scene.caption(TEMPLATES[0]) + f", {STYLE} style" for scene in scenes]
        return texts, [scene.background for scene in scenes]
    return subject_prompts(subject, JUDGED)


def judge_images(base: Path, subject: str, folder: Path) -> float | None:
    """Images of the prompts, kept beside the LoRA, and their mean fit; None for a style, which only somebody can judge."""
    prompts, backgrounds = prompts_of(subject)
    images = sample(base, prompts, 10, 0, folder / f"{folder.name}.diffusers.safetensors", STEPS_AND_GUIDANCE)
    for number, image in enumerate(images):
        image.save(folder / f"judged_{number:02}.png")
    if subject == STYLE:
        return None
    found = [compare(image, subject) for image in images]
    real = [compare(image_of(subject, number)[0].resize(images[0].size), subject) for number in range(12)]
    fits = [max(0.0, each.fit) * (each.background == wanted) for each, wanted in zip(found, backgrounds, strict=True)]
    return sum(fits) / len(fits) / (sum(each.fit for each in real) / len(real))


def run_cell(study: Study, cell: Cell, checks: Sequence[str]) -> None:
    """Make, validate and judge a LoRA; each stage is written when it is there."""
    file = cell.result(study.out)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    try:
        make_lora(study, cell)
        for check in checks:
            if check not in found:
                keep(check, validate(study, cell, check))
        if "reference" not in found:
            words = [Path(__file__), "judge", cell.subject, cell.lora(study.out).parent, "--model", study.base]
            keep("reference", json.loads(run_python(study, *words).splitlines()[-1]))
    except Stopped:
        return
    except SystemExit as failed:
        print(f"{cell.subject} {cell.arm} failed: {failed}", flush=True)
        return
    shown = [(check, found[check]["outcome"], found[check]["score"]) for check in checks]
    print(cell.subject, cell.arm, *shown, "reference", found["reference"], flush=True)


def run(args: argparse.Namespace) -> None:
    ends = time.monotonic() + 60 * args.budget_minutes
    study = Study(args.out.resolve(), args.model.resolve(), args.preset, tuple(args.set), ends)
    cells = [Cell(subject, arm) for arm in args.arms for subject in args.subjects]
    # The arms that others are made from first.
    cells.sort(key=lambda cell: ("of" in cell.about, -list(ARMS).index(cell.arm)))
    timer = threading.Timer(60 * args.budget_minutes, study.stop)
    timer.daemon = True
    timer.start()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda cell: run_cell(study, cell, args.check), cells))
    timer.cancel()


def label(cell: Cell, reference: float | None) -> str:
    """What a LoRA is: planted bad ones that the reference finds good, and planted good ones that it does not, are neither.

    What somebody thinks of the style orders LoRAs, and has no such line.
    """
    if reference is None or cell.subject == STYLE:
        return cell.about["label"]
    if cell.about["label"] == "bad":
        return "bad" if reference < GOOD else "neither"
    return "good" if reference >= GOOD else "neither"


def ranks(values: Sequence[float]) -> list[float]:
    """Places from 0, ties sharing theirs."""
    return [sum(each < value for each in values) + (sum(each == value for each in values) - 1) / 2 for value in values]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""
    import numpy as np

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1]) if len(one) > 2 else float("nan")


def read_results(args: argparse.Namespace) -> dict[Cell, dict[str, Any]]:
    """What is finished of the chosen LoRAs. A style's reference is what somebody thinks of its sheets, where that is there."""
    cells = [Cell(subject, arm) for subject in args.subjects for arm in args.arms]
    found = {cell: json.loads(cell.result(args.out).read_text()) for cell in cells if cell.result(args.out).is_file()}
    answers = args.out / "blind" / "answers.json"
    key = json.loads((args.out / "blind_key.json").read_text(encoding="utf-8")) if answers.is_file() else {}
    blind = {key[name]: value for name, value in json.loads(answers.read_text(encoding="utf-8")).items()} if key else {}
    for cell, result in found.items():
        result.setdefault("reference", None)
        if cell.subject == STYLE:
            result["reference"] = blind.get(cell.arm)
    return found


def table(args: argparse.Namespace) -> None:
    """The confusion table, the ladder, rank correlations, cost, and a row for each arm."""
    found = read_results(args)
    for check in args.check:
        there = {cell: result for cell, result in found.items() if check in result}
        print(f"\n### {check}: {len(there)} LoRAs\n")
        counted = Counter((label(cell, each["reference"]), each[check]["outcome"]) for cell, each in there.items())
        outcomes = ("refused", "unresolved", "passed")
        print(f"| | {' | '.join(outcomes)} |\n|---|---|---|---|")
        for name in ("bad", "neither", "good"):
            print(f"| {name} | {' | '.join(str(counted[name, outcome]) for outcome in outcomes)} |")
        known = [(cell, each) for cell, each in there.items() if each["reference"] is not None]
        references = [each["reference"] for _, each in known]
        print("\nrank correlation with the reference:")
        for part in ("score", *PARTS):
            pairs = [(part_value(each[check], part), ref) for (_, each), ref in zip(known, references, strict=True)]
            both = [(value, ref) for value, ref in pairs if value is not None]
            correlation = rank_correlation([value for value, _ in both], [ref for _, ref in both])
            print(f"- {part}: {correlation:.2f} of {len(both)}")
        costs = [each[check]["cost"] for each in there.values() if each[check]["cost"]["forward_passes"]]
        for unit in ("forward_passes", "seconds"):
            values = sorted(cost[unit] for cost in costs)
            print(
                f"- {unit}: {values[0]:.0f} to {values[-1]:.0f}, median {values[len(values) // 2]:.0f}"
                if values
                else ""
            )
        print(
            f"\n| LoRA | reference | is | outcome | score | {' | '.join(PARTS)} |\n|---|---|---|---|---|{'---|' * len(PARTS)}"
        )
        for cell, each in sorted(there.items(), key=lambda pair: (pair[0].subject, pair[1]["reference"] or 0.0)):
            print(row(cell, each, each[check]))
        print(f"\n| planted | {' | '.join(args.subjects)} |\n|---|{'---|' * len(args.subjects)}")
        for arm in sorted({cell.arm for cell in there}, key=lambda arm: (ARMS[arm]["label"], list(ARMS).index(arm))):
            shown = [in_short(Cell(subject, arm), there, check) for subject in args.subjects]
            print(f"| {ARMS[arm]['label']}: `{arm}` | {' | '.join(shown)} |")


def in_short(cell: Cell, there: Mapping[Cell, Mapping[str, Any]], check: str) -> str:
    """`passed 0.93 (0.84)`: the outcome, the score and in parentheses the reference; in italics what is neither good nor bad."""
    if cell not in there:
        return "–"
    reference, report = there[cell]["reference"], there[cell][check]
    words = f"{report['outcome']} {report['score'] or 0.0:.2f}"
    shown = "" if reference is None else f" ({reference:.2f})"
    return f"*{words}{shown}*" if label(cell, reference) == "neither" else f"{words}{shown}"


def part_value(report: Mapping[str, Any], part: str) -> float | None:
    value = report["score"] if part == "score" else (report["parts"].get(part) or {}).get("value")
    return None if value is None else float(value)


def row(cell: Cell, found: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    def shown(name: str) -> str:
        part = report["parts"].get(name) or {}
        if part.get("own_value") is None:
            return "–"
        return f"{part['own_value']:.2f} [{part['own_low']:.2f} {part['own_high']:.2f}]"

    reference = "–" if found["reference"] is None else f"{found['reference']:.2f}"
    words = [f"{cell.subject} {cell.arm}", reference, label(cell, found["reference"]), report["outcome"]]
    return f"| {' | '.join([*words, format(report['score'] or 0.0, '.2f'), *map(shown, PARTS)])} |"


def misjudged(args: argparse.Namespace) -> None:
    """An image of the LoRAs that are bad and not refused, good and not passed, or neither: a row of judged images of each."""
    rows = []
    for cell, found in read_results(args).items():
        if "full" not in found or found["reference"] is None:
            continue
        kind, reference, verdict = label(cell, found["reference"]), found["reference"], found["full"]
        if (kind, verdict["outcome"]) not in (("bad", "refused"), ("good", "passed")):
            words = f"{kind}, reference {reference:.2f}\n{verdict['outcome']}, score {verdict['score']:.2f}"
            rows.append((cell, words))
    if not rows:
        print("none")
        return
    sheet = Image.new("RGB", (260 + 8 * 96, 96 * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (cell, words) in enumerate(rows):
        pen.text((8, 96 * row + 16), f"{cell.subject} {cell.arm}\n{words}", "black", font_size=18)
        for number in range(8):
            image = Image.open(cell.lora(args.out).parent / f"judged_{number:02}.png")
            sheet.paste(image.resize((92, 92)), (260 + 96 * number, 96 * row + 2))
    sheet.save(args.out / "misjudged.png")
    print(args.out / "misjudged.png")


def sheets(args: argparse.Namespace) -> None:
    """A sheet for each LoRA of the style, under a random name: above what was asked for, below what came."""
    folder = args.out / "blind"
    folder.mkdir(exist_ok=True)
    cells = [cell for arm in ARMS if (cell := Cell(STYLE, arm)).result(args.out).is_file()]
    names = random.Random(time.time_ns()).sample(range(100, 1000), len(cells))
    for cell, name in zip(cells, names, strict=True):
        sheet = Image.new("RGB", (10 * 128, 2 * 128))
        for number in range(10):
            wanted = draw_styled(1000 + number)[0].resize((128, 128))
            sheet.paste(wanted, (128 * number, 0))
            came = Image.open(cell.lora(args.out).parent / f"judged_{number:02}.png")
            sheet.paste(came.resize((128, 128)), (128 * number, 128))
        sheet.save(folder / f"{name}.png")
    key = {str(name): cell.arm for cell, name in zip(cells, names, strict=True)}
    (args.out / "blind_key.json").write_text(json.dumps(key, indent=1), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("run", "make, validate and judge LoRAs"),
        ("table", "print the tables"),
        ("misjudged", "draw images of LoRAs whose outcome is not what they were planted as"),
        ("sheets", "draw a sheet of each LoRA of the style, without its name"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("out", type=Path)
        command.add_argument("--subjects", nargs="+", default=["zobo", "fungo"], choices=list(OTHER))
        command.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
        command.add_argument(
            "--check", nargs="*", default=["full", "lite"], help="full, lite; none makes and judges LoRAs"
        )
        command.add_argument("--jobs", type=int, default=1, help="processes at a time, of one thread each")
        command.add_argument("--budget-minutes", type=float, default=1e6)
        command.add_argument("--model", type=Path, default=BASE, help="another base of the drawn shapes")
        command.add_argument("--preset", default="12gb")
        command.add_argument(
            "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all LoRAs that are trained"
        )
    judge = commands.add_parser("judge")
    judge.add_argument("subject")
    judge.add_argument("folder", type=Path)
    judge.add_argument("--model", type=Path, default=BASE)
    args = parser.parse_args()
    if args.command == "judge":
        print(json.dumps(judge_images(args.model, args.subject, args.folder)))
    else:
        {"run": run, "table": table, "misjudged": misjudged, "sheets": sheets}[args.command](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
