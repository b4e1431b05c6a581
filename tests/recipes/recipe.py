"""A tiny random model, a small dataset, and the command in this process."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from safetensors import safe_open

from lora_trainer.cli.main import main
from lora_trainer.evaluation import choice, judge, likeness, lora_check, sample_rates
from lora_trainer.evaluation.lora_check import LORA_CHECKS
from tests.lora_format.tiny import tiny_pipeline

COLORS = ("red", "green", "blue", "orange", "purple", "teal", "brown", "navy", "olive", "maroon")
QUICK = {
    "lora.rank": "4",
    "train.effective_batch_size": "2",
    "memory.weight_dtype": "fp32",
    "optimizer.learning_rate": "1e-2",
    "validation.every_n_steps": "0",
    "validation.split": "0.1",
    "sample.num_inference_steps": "2",
    "sample.count": "1",
    "sample.every_n_steps": "0",
    "gates.lora_check": "off",  # it takes most of a tiny run's time: tests of it enable it
    "train.grace_seconds": "3600",  # on a busy machine a tiny step exceeds the default grace time
}


def save_tiny_model(folder: Path, family: str = "sd15") -> Path:
    """A tiny pipeline of a family as a diffusers folder."""
    pipeline = tiny_pipeline(folder / "made", family)
    pipeline.save_pretrained(folder / "model", safe_serialization=True)
    return folder / "model"


def draw_images(folder: Path, count: int = 10) -> Path:
    """Captioned images of two shapes, for two buckets at 64 px."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        width, height = ((96, 96), (120, 72))[index % 2]
        image = Image.new("RGB", (width, height), COLORS[index % len(COLORS)])
        pen = ImageDraw.Draw(image)
        pen.ellipse((10 + index, 12, 50 + index, 52 + index), fill="white", outline="black")
        pen.line((0, height, width, index * 5), fill="yellow", width=6)
        image.save(folder / f"image_{index}.png")
        caption = f"a ring on a {COLORS[index % len(COLORS)]} background, picture {index}"
        (folder / f"image_{index}.txt").write_text(caption, encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Bench:
    """Where a test's model, data, runs and caches are."""

    model: Path
    data: Path
    output: Path
    cache: Path

    def arguments(
        self, name: str, *extra: str, command: str = "train", steps: int = 6, **settings: object
    ) -> list[str]:
        """The command's arguments. Settings have two underscores: `lora__rank=8`. None omits one."""
        values = QUICK | {"cache.dir": str(self.cache)}
        if command == "produce":  # enforcing the gate needs its score
            values["gates.lora_check"] = "lite"
        values |= {key.replace("__", "."): str(value) for key, value in settings.items()}
        if "sample.prompts" in values:  # as many as it names
            del values["sample.count"]
        chosen = [part for key, value in values.items() if value != "None" for part in ("--set", f"{key}={value}")]
        inputs = ["--model", str(self.model), "--data", str(self.data)]
        run = ["--output", str(self.output), "--name", name, "--max-steps", str(steps)] if command != "bench" else []
        return [command, *inputs, *run, *chosen, *extra]

    def run(self, name: str, *extra: str, command: str = "train", steps: int = 6, **settings: object) -> int:
        return main(self.arguments(name, *extra, command=command, steps=steps, **settings))

    def folder(self, name: str) -> Path:
        return self.output / name


def record(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return document


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder)]


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """The bytes of each tensor; numpy, without bf16, cannot read all of them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no dict
    return {name: value.flatten().view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


def stored_as(lora: Path) -> set[str]:
    """The dtypes of a file's tensors, without alphas."""
    with safe_open(lora, framework="numpy") as file:
        keys = [key for key in file.keys() if not key.endswith(".alpha")]  # noqa: SIM118  safe_open is no dict
        return {file.get_slice(key).get_dtype() for key in keys}


def header_of(lora: Path) -> dict[str, str]:
    """The header of a file in kohya format. Its ranks and alphas must be those of its tensors."""
    with safe_open(lora, framework="numpy") as file:
        header, keys = dict(file.metadata()), list(file.keys())
        stored = [
            (
                key.startswith("lora_te"),
                file.get_slice(f"{module}.lora_down.weight").get_shape()[0],
                file.get_tensor(key),
            )
            for key in keys
            if (module := key.removesuffix(".alpha")) != key
        ]
    args = json.loads(header["ss_network_args"])
    of_texts = (args.get("text_encoder_dim"), args.get("text_encoder_alpha"))
    of_denoiser = (int(header["ss_network_dim"]), float(header["ss_network_alpha"]))
    for texts, (rank, alpha) in ((True, of_texts), (False, of_denoiser)):
        own = [(dim, float(value)) for of_text, dim, value in stored if of_text == texts]
        assert not own or (rank, alpha) in own
        assert all(value / dim == alpha / rank for dim, value in own)  # fused layers have the sum of both
    return header


def exported(folder: Path) -> dict[str, dict[str, bytes]]:
    """The tensors of both exported files, by file."""
    name = folder.name
    return {
        "kohya": tensor_bytes(folder / f"{name}.safetensors"),
        "diffusers": tensor_bytes(folder / f"{name}.diffusers.safetensors"),
    }


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def delete_under_a_run(folder: Path) -> None:
    """Like `rm -rf`: lists again what the run's writer thread creates meanwhile."""
    while folder.exists():
        with suppress(OSError):
            shutil.rmtree(folder)
            return  # it may be created again at once


@contextmanager
def brief_verdicts(draws: int = likeness.DRAWS) -> Iterator[None]:
    """Samples of a lite verdict take two steps instead of eight; intervals come from so many draws, and each fault is planted
    into two images.

    On a tiny model these take most of a verdict's time. Its autoencoder, of random weights, keeps nothing of an image.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (likeness, choice, sample_rates):
            patch.setattr(module, "DRAWS", draws)
        patch.setattr(judge, "MOST_PLANTED", 2)
        patch.setattr(lora_check, "LEAST_DECIBELS", float("-inf"))
        patch.setitem(LORA_CHECKS, "lite", replace(LORA_CHECKS["lite"], steps=2))
        yield


@contextmanager
def patched(target: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield
