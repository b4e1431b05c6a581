"""Record tensor hashes and losses of many tiny runs, to compare the code before and after a change.

    python scripts/record_runs.py before.json
    python scripts/record_runs.py after.json --against before.json
    python scripts/record_runs.py before-files.json --files

Runs every family with every training preset: straight through, resumed in the middle, and with split steps; then every
family in two processes. `--files` trains every family with every adapter kind instead, and records both LoRA files in
the default type: their tensors, and how far images with the LoRA are from those of the base model.
Both files must come from the same machine. Ends with 1 if a run differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "scripts")]

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from lora_trainer.adapters.adapter_kinds import ADAPTERS  # noqa: E402
from lora_trainer.cli.main import main as lora_trainer  # noqa: E402
from lora_trainer.models.families import FAMILIES  # noqa: E402
from tests.recipes.recipe import Bench, draw_images, exported, losses, rows, save_tiny_model  # noqa: E402

PRESETS = ("speed", "balanced", "quality")
STEPS = 4
# Every random decision of a run, so that a changed purpose or position shows.
SETTINGS: dict[str, object] = {
    "data__resolution": 64,
    "data__color_variants": 1,
    "data__crop": "random",
    "data__flip": "true",
    "validation__split": 0.2,
    "captions__shuffle": "true",
    "captions__dropout": 0.3,
    "lora__dropout": 0.1,
    "train__effective_batch_size": 4,
    "validation__every_n_steps": 2,
    "checkpoint__every_n_steps": 2,
    "compile__enabled": "false",
}
SPLIT: dict[str, object] = {"train__max_micro_batch_size": 1}


def tensor_hashes(folder: Path) -> dict[str, str]:
    """One hash of all tensors for each LoRA file of a run."""
    hashes = {}
    for form, tensors in exported(folder).items():
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name])
        hashes[form] = digest.hexdigest()
    return hashes


def summary(folder: Path) -> dict[str, Any]:
    """Hashes of both LoRA files' tensors, and all losses."""
    validation = [row["loss"] for row in rows(folder, "validation.jsonl")]
    return {"tensors": tensor_hashes(folder), "losses": losses(folder), "validation": validation}


def drawn_with(lora: Path, model: Path, output: Path) -> dict[str, Any]:
    """What `sample` draws with a file: its exit code, a hash of the pixels, and their mean distance from the base model's.

    The distance is in levels of 255.
    """
    command = ["sample", str(lora), "--model", str(model), "--prompt", "a ring", "--seed", "1"]
    code = lora_trainer([*command, "--num-inference-steps", "2", "--size", "64x64", "--output", str(output)])
    if code:
        return {"exit_code": code}
    drawn = [np.asarray(Image.open(next(output.glob(f"*_{way}.png"))), np.float32) for way in ("with", "without")]
    distance = float(np.abs(drawn[0] - drawn[1]).mean())
    return {"exit_code": 0, "pixels": hashlib.sha256(drawn[0].tobytes()).hexdigest(), "distance": round(distance, 4)}


def record_files(family: str, root: Path) -> dict[str, dict[str, Any]]:
    """Both LoRA files of every adapter kind, in the default type, and what they change in an image."""
    model = save_tiny_model(root / family, family)
    data = root / "data"
    bench = Bench(model, data if data.is_dir() else draw_images(data), root / family / "runs", root / "cache")
    found: dict[str, dict[str, Any]] = {}
    for kind in ADAPTERS:
        settings = {"lora__type": kind, "lora__target_modules": "attention+ff", "optimizer__learning_rate": 1e-2}
        if code := bench.run(kind, steps=STEPS, data__resolution=64, compile__enabled="false", **settings):
            raise SystemExit(f"{family} {kind} ended with {code}")
        hashes = tensor_hashes(bench.folder(kind))
        for form, ending in (("kohya", ".safetensors"), ("diffusers", ".diffusers.safetensors")):
            drawn = drawn_with(bench.folder(kind) / f"{kind}{ending}", model, root / family / f"{kind} {form}")
            found[f"{family} {kind} {form}"] = {"tensors": hashes[form], **drawn}
    return found


def run_two_processes(bench: Bench, name: str, preset: str) -> None:
    """Run it in two processes."""
    arguments = bench.arguments(name, "--preset", preset, steps=STEPS, **SETTINGS)
    config = str(CHECKOUT / "accelerate_configs" / "cpu_2.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config]
    script = str(CHECKOUT / "scripts" / "train_lora.py")
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*launch, script, *arguments[1:]], check=True, stdout=subprocess.DEVNULL, env=environment)


def record_family(family: str, root: Path) -> dict[str, dict[str, Any]]:
    """Summaries of every run of one family, by name."""
    model = save_tiny_model(root / family, family)
    data = root / "data"
    bench = Bench(model, data if data.is_dir() else draw_images(data), root / family / "runs", root / "cache")
    found = {}

    def run(name: str, preset: str, *extra: str, steps: int = STEPS, **settings: object) -> None:
        if code := bench.run(name, "--preset", preset, *extra, steps=steps, **SETTINGS | settings):
            raise SystemExit(f"{family} {name} ended with {code}")
        found[f"{family} {name}"] = summary(bench.folder(name))

    for preset in PRESETS:
        run(f"{preset} straight", preset)
        run(f"{preset} resumed", preset, steps=2)
        run(f"{preset} resumed", preset, "--resume")
        run(f"{preset} split", preset, **SPLIT)
    run_two_processes(bench, "two processes", "balanced")
    found[f"{family} two processes"] = summary(bench.folder("two processes"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--families", nargs="*", default=[*FAMILIES])
    parser.add_argument("--files", action="store_true", help="record the LoRA files of every adapter kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LORA_TRAINER_CACHE"] = str(Path(folder, "user cache"))
        found = {}
        for family in arguments.families:
            record = record_files if arguments.files else record_family
            found |= record(family, Path(folder))
    arguments.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text(encoding="utf-8"))
    changed = [name for name in found if found[name] != before.get(name)]
    print(f"{len(found) - len(changed)} of {len(found)} runs are the same", *changed, sep="\n")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
