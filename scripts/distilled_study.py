"""Does training a LoRA on a distilled model undo the distillation, and which remedy prevents it?

    python scripts/builtin_base/distill.py --work student-work --out OUT/student
    python scripts/distilled_study.py run OUT
    python scripts/distilled_study.py distances OUT
    python scripts/distilled_study.py table OUT

The student of `builtin_base/distill.py` draws in four steps without a guidance scale. A LoRA is trained by the real
command in several ways, and each draws with the student in four steps: prompts of the base's own shapes, which the LoRA
should leave alone, and prompts of the robot zobo. The dataset `known` has nothing to learn: new scenes of the base's own
shapes, so that all that changes is the distillation. The dataset `zobo` is the robot: there a LoRA also shows the robot
where nobody wants it. The control is the LoRA of the base drawn with the base in its own 20 steps: what training costs
where nothing is distilled. Pixels alone are judged (`builtin_base/judge.py`, `reference.py`); `distances` adds, for every
LoRA drawn with the student, how far its four steps end from the teacher's eight guided ones of the same noise.
Each finished cell is a line of OUT/results.jsonl: the next call continues there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builtin_base.distill import distances, draw_trajectories, load
from builtin_base.drawing import TEMPLATES, draw, random_scene
from builtin_base.judge import fixed_prompts, judge, sample
from builtin_base.reference import compare, subject_prompts
from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.cli.main import main as lora_trainer

if TYPE_CHECKING:
    from PIL import Image

SUBJECT, DATA = "zobo", Path(__file__).resolve().parents[1] / "tests" / "data_sets" / "zobo"
STEPS_AND_GUIDANCE, OF_THE_BASE = (4, 0.0), (20, 3.0)
UNRELATED, RELATED = 48, 24  # prompts
SCENES, KNOWN = 200, 48  # images that the training adapter is made of, and of the dataset with nothing new
DATASETS = ("known", SUBJECT)
COMMON = {
    "lora.rank": 32,
    "lora.target_modules": '["*.attn*.to_*", "*.ff.net.*", "*.resnets.*.conv?"]',
    "optimizer.learning_rate": 1.5e-3,
    "lr_scheduler.name": "cosine",
    "train.effective_batch_size": 4,
    "data.resolution": 128,
    "memory.weight_dtype": "fp32",
    "gates.dataset": 0,
    "gates.lora_check": "off",
    "validation.every_n_steps": 0,
    "validation.split": 0,
    "sample.every_n_steps": 0,
    "sample.count": 1,
    "sample.num_inference_steps": 1,
    "hardware.threads": 1,
    "checkpoint.export_weights": "last",
}
# Whether it is trained on the student, and what is set beside the common settings.
ARMS: Mapping[str, tuple[bool, Mapping[str, Any]]] = {
    "plain": (True, {}),
    "base": (False, {}),
    "guidance": (True, {"loss.guidance_target": 3}),
    "adapter": (True, {"model.training_adapter": "ADAPTER"}),
    "both": (True, {"loss.guidance_target": 3, "model.training_adapter": "ADAPTER"}),
    "control": (False, {}),
}
TITLES = {
    "few": "the base in 4 steps without guidance",
    "none": "the student without a LoRA",
    "plain": "plain training on the student",
    "base": "trained on the base",
    "guidance": "`loss.guidance_target=3`",
    "adapter": "`model.training_adapter`",
    "both": "both of these",
    "untouched": "control: the base without a LoRA, 20 steps, guidance 3",
    "control": "control: trained on the base, drawn with it so",
}
DRAWS = 2000  # of the bootstrap
HELD, HELD_SEED = 192, 777  # trajectories of the teacher that the student was not made from


def train(out: Path, name: str, model: Path, data: Path, steps: int, seed: int, settings: Mapping[str, Any]) -> Path:
    """The LoRA file in diffusers' form, trained by the command; a stopped training continues."""
    found = out / "runs" / name / f"{name}.diffusers.safetensors"
    if not found.exists():
        values = {**COMMON, "train.max_steps": steps, "train.seed": seed, **settings}
        flags = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        where = ["--model", str(model), "--data", str(data), "--output", str(out / "runs"), "--name", name]
        resume = ["--resume"] if found.parent.exists() else []
        if code := lora_trainer(["train", *where, *flags, "--set", f"cache.dir={out / 'cache'}", *resume]):
            raise SystemExit(code)
    return found


def draw_scenes(folder: Path, count: int = SCENES) -> Path:
    """Captioned images of what the base knows: for the training adapter, and as a dataset with nothing new to learn."""
    if not folder.exists():
        rng, making = random.Random(folder.name), folder.with_suffix(".making")
        making.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            scene = random_scene(rng)
            draw(scene).save(making / f"{number:03}.png")
            (making / f"{number:03}.txt").write_text(scene.caption(rng.choice(TEMPLATES)), encoding="utf-8")
        making.rename(folder)
    return folder


def adapter_of(out: Path, steps: int) -> Path:
    """A LoRA that undoes the distillation: plain training of the student on what the base knows."""
    return train(
        out, "adapter", out / "student", draw_scenes(out / "scenes"), steps, 1, {"train.effective_batch_size": 8}
    )


def measure(
    model: Path, lora: Path | None, own: Sequence[Image.Image] | None, by: tuple[int, float] = STEPS_AND_GUIDANCE
) -> tuple[dict[str, Any], list[Any]]:
    """What a model draws with a LoRA, by prompt, and the images of unrelated prompts; `by`: steps and guidance scale.

    `right`: 1 where shape, color and background are the prompt's. `moved`: the root mean squared difference from
    `own`, the model's images without a LoRA of the same seeds, of 255. `subject`: the share of the robot's drawing that
    is there, 0 on another background than the prompt's.
    """
    prompts, scenes = fixed_prompts(UNRELATED)
    images = sample(model, prompts, lora=lora, steps_and_guidance=by)
    subject, backgrounds = subject_prompts(SUBJECT, RELATED)
    drawn = sample(model, subject, first_seed=500, lora=lora, steps_and_guidance=by)
    likeness = [compare(image, SUBJECT) for image in drawn]
    pixels = [np.asarray(image, np.float32) for image in images]
    before = pixels if own is None else [np.asarray(image, np.float32) for image in own]
    return {
        "right": [int(all(judge(image).right(scene))) for image, scene in zip(images, scenes, strict=True)],
        "moved": [
            round(float(np.sqrt(((one - other) ** 2).mean())), 3) for one, other in zip(pixels, before, strict=True)
        ],
        "subject": [
            round(max(0.0, each.fit) if each.background == wanted else 0.0, 4)
            for each, wanted in zip(likeness, backgrounds, strict=True)
        ],
    }, images


def read(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def run(
    out: Path, dataset: str, arms: Sequence[str], seeds: Sequence[int], lengths: tuple[int, int], minutes: float
) -> None:
    """Every cell that is not there yet, a seed at a time; `lengths` are the steps of a LoRA and of the adapter."""
    ends, student, (steps, adapter_steps) = time.monotonic() + 60 * minutes, out / "student", lengths
    there = {(row["arm"], row["seed"]) for row in read(out) if row["dataset"] in (dataset, "none")}
    cells = [cell for cell in ((arm, seed) for seed in seeds for arm in arms) if cell not in there]
    data = DATA if dataset == SUBJECT else draw_scenes(out / "known", KNOWN)
    before: dict[str, list[Any]] = {}  # images without a LoRA, by what they are drawn with

    def add(arm: str, seed: int, found: Mapping[str, Any], trained: float) -> None:
        of = dataset if arm in ARMS else "none"
        row = {"dataset": of, "arm": arm, "seed": seed, "steps": steps, "cpu_seconds": round(trained, 1), **found}
        with open(out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        means = {name: round(statistics.mean(found[name]), 3) for name in ("right", "moved", "subject")}
        print(f"{arm} {seed}: {means}", flush=True)

    for arm, seed in cells:
        if time.monotonic() > ends:
            print("the budget is spent: the next call continues")
            return
        of_base = arm == "control"
        model, by, none = (BASE_FOLDER, OF_THE_BASE, "untouched") if of_base else (student, STEPS_AND_GUIDANCE, "none")
        if none not in before:
            untouched, before[none] = measure(model, None, None, by)
            if (none, 0) not in there:
                add(none, 0, untouched, 0.0)
        on_student, settings = ARMS[arm]
        placed = {
            key: str(adapter_of(out, adapter_steps)) if value == "ADAPTER" else value for key, value in settings.items()
        }
        began, name = time.process_time(), f"{dataset}-{'base' if of_base else arm}-{seed}"
        lora = train(out, name, student if on_student else BASE_FOLDER, data, steps, seed, placed)
        trained = time.process_time() - began
        add(arm, seed, measure(model, lora, before[none], by)[0], trained)


def measure_distances(out: Path) -> None:
    """OUT/distances.json: `distances` by dataset, arm and seed; one that is there is not measured again."""
    path, base = out / "distances.json", load(BASE_FOLDER)
    found: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    held = draw_trajectories(base, HELD, HELD_SEED)
    files: dict[str, tuple[Path, Path | None]] = {"base": (BASE_FOLDER, None), "none": (out / "student", None)}
    for row in read(out):
        name = f"{row['dataset']}-{row['arm']}-{row['seed']}"
        lora = out / "runs" / name / f"{name}.diffusers.safetensors"
        if lora.exists() and row["arm"] != "control":
            files[name] = out / "student", lora
    for name, (model, lora) in files.items():
        if name not in found:
            pipeline = base if model == BASE_FOLDER else load(model)
            if lora is not None:
                pipeline.load_lora_weights(str(lora))
            found[name] = [round(each, 5) for each in distances(pipeline, held)]
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(f"{name}: {statistics.mean(found[name]):.4f}", flush=True)


def interval(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, float]:
    """The mean over seeds and prompts, and its 95 % interval: a bootstrap over seeds and over prompts (Efron 1979)."""
    values = np.array([row[name] for row in rows], float)  # [seeds, prompts]
    rng = np.random.default_rng(0)
    seeds, prompts = (rng.integers(0, count, (DRAWS, count)) for count in values.shape)
    means = values[seeds[:, :, None], prompts[:, None, :]].mean((1, 2))
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def table(out: Path, dataset: str) -> str:
    """A Markdown table of all arms of a dataset."""
    path = out / "distances.json"
    far: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = [row for row in read(out) if row["dataset"] in (dataset, "none")]
    for row in rows:
        row["far"] = far.get("none" if row["arm"] == "none" else f"{dataset}-{row['arm']}-{row['seed']}")
        plain = far.get(f"{dataset}-plain-{row['seed']}") if row["arm"] != "plain" else None
        paired = row["far"] is not None and plain is not None
        row["nearer"] = [other - own for other, own in zip(plain, row["far"], strict=True)] if paired else None
    if "base" in far:
        rows.append({**dict.fromkeys(("nearer", "right", "moved", "subject")), "arm": "few", "far": far["base"]})
    heads = (
        "",
        "seeds",
        "from the teacher",
        "nearer than plain training",
        "prompts right",
        "images moved",
        "robot drawn",
    )
    shown: list[tuple[str, Callable[[float], str]]] = [
        ("far", lambda value: f"{value:.3f}"),
        ("nearer", lambda value: f"{value:.3f}"),
        ("right", lambda value: f"{100 * value:.0f} %"),
        ("moved", lambda value: f"{value:.1f}"),
        ("subject", lambda value: f"{value:.2f}"),
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for arm, title in TITLES.items():
        own = [row for row in rows if row["arm"] == arm]
        if own:
            cells = []
            for name, form in shown:
                if any(row[name] is None for row in own):
                    cells.append("–")
                    continue
                mean, low, high = interval(own, name)
                cells.append(f"{form(mean)} ({form(low)} to {form(high)})" if high > low else form(mean))
            lines.append(f"| {title} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "distances", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--dataset", choices=DATASETS, default=DATASETS[0])
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--adapter-steps", type=int, default=80)
    parser.add_argument("--budget-minutes", type=float, default=60.0)
    args = parser.parse_args()
    if args.what == "run":
        lengths = (args.steps, args.adapter_steps)
        run(args.out, args.dataset, args.arms, args.seeds, lengths, args.budget_minutes)
    if args.what == "distances":
        measure_distances(args.out)
    print(table(args.out, args.dataset))


if __name__ == "__main__":
    main()
