"""The environment of the fault suite: model, images, caches, the undisturbed run, and each try."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusers import UNet2DConditionModel

from tests.faults.disk import Mode, compiled
from tests.lora_format.tiny import tiny_pipeline
from tests.recipes.recipe import Bench, draw_images

CHECKOUT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 4, 2
NEVER = -1
SHORT = {
    "lora.rank": 1,
    "lora.target_modules": '["*.attn2.to_k"]',
    "optimizer.learning_rate": 0.05,
    "checkpoint.every_n_steps": EVERY,
    "checkpoint.wait_minutes": 0,
    "validation.every_n_steps": EVERY,
    "sample.every_n_steps": 0,
    "gates.lora_check": "full",
    "sample.num_inference_steps": 1,
    "sample.count": 1,
}


def save_least_model(folder: Path) -> Path:
    """A pipeline whose denoiser is as small as one can be: a try is half of a second."""
    pipeline = tiny_pipeline(folder / "made")
    pipeline.unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        norm_num_groups=4,
        cross_attention_dim=32,
        attention_head_dim=4,
    )
    pipeline.save_pretrained(folder / "model", safe_serialization=True)
    return folder / "model"


@dataclass(frozen=True)
class Ended:
    """How a try ended. `steps` were trained in it; `count` operations touched its disk, the `last` before the end."""

    exit: int | None
    signal: int | None
    late: bool
    fired: bool
    happened: bool  # the requested fault happened
    steps: int
    count: int
    last: str
    operations: tuple[str, ...]
    seconds: float
    output: str


@dataclass
class Forks:
    """One process that has run some commands, and forks a copy of itself for each try. `close` it at the end."""

    folder: Path

    def start(self, commands: Sequence[Sequence[str]]) -> None:
        """Start the process, and run the commands in it."""
        environment = os.environ | {
            "LD_PRELOAD": str(compiled()),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join((str(CHECKOUT), str(CHECKOUT / "scripts"))),
            "LORA_TRAINER_CACHE": str(self.folder / "user"),
        }
        self._log = open(self.folder / "warm.txt", "w", encoding="utf-8")  # noqa: SIM115  open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=CHECKOUT,
            text=True,
        )
        try:
            self.ask({"warm_up": commands})
        except BaseException:
            self.close()
            raise

    def ask(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError((self.folder / "warm.txt").read_text("utf-8")[-3000:])
        return json.loads(line)

    def output_of(self, place: Path) -> Path:
        """The output file of a place: not on the disk under test."""
        return self.folder / f"said-{hashlib.sha256(str(place).encode()).hexdigest()[:12]}.txt"

    def run_command(
        self, place: Path, words: Sequence[str], *, at: int = NEVER, mode: Mode = Mode.COUNT, **more: Any
    ) -> Ended:
        """Run a command in a forked child; the operation below `place` that is numbered `at` fails as `mode` says.

        It is killed after `seconds`, or `delay` seconds after a `phase` began. A `brief` run skips the gate and the images at its end.
        """
        out = self.output_of(place)
        start = out.stat().st_size if out.exists() else 0
        usual = {
            "number": 0,
            "trouble": None,
            "seconds": 60.0,
            "phase": None,
            "delay": 0.0,
            "brief": False,
            "progress": 0,
        }
        places = {"root": str(place), "user": str(place / "user"), "out": str(out)}
        answer = self.ask({"arguments": list(words), "at": at, "mode": int(mode), **places, **usual, **more})
        output = out.read_text("utf-8", errors="replace")[start:]
        return Ended(**answer | {"operations": tuple(answer["operations"])}, output=output)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)
        self._log.close()


@dataclass
class Ground(Forks):
    """A process that has trained, and the data of its children."""

    settings: dict[str, object] = field(default_factory=dict)
    tries: int = 0

    def __post_init__(self) -> None:
        self.model = save_least_model(self.folder / "tiny")
        self.data = draw_images(self.folder / "images", 8)
        first = self.arguments(self.folder)
        self.start([first, [*first, "--name", "again"]])  # images are cached once they are some seconds old

    def arguments(self, place: Path, *extra: str, command: str = "train", **settings: object) -> list[str]:
        bench = Bench(self.model, self.data, place / "runs", place / "cache")
        values = {name.replace(".", "__"): value for name, value in (SHORT | self.settings).items()}
        return bench.arguments("first", *extra, command=command, steps=STEPS, **(values | settings))

    def new_place(self, *, cached: bool = True) -> Path:
        """A folder for a try, with caches that are full or empty."""
        self.tries += 1
        place = self.folder / "tries" / f"{self.tries:05d}"
        self.furnish(place, cached=cached)
        return place

    def furnish(self, place: Path, *, cached: bool) -> None:
        """Put caches into a folder."""
        place.mkdir(parents=True, exist_ok=True)
        if cached:
            shutil.copytree(self.folder / "cache", place / "cache", ignore=shutil.ignore_patterns("users"))
        shutil.copytree(self.folder / "user", place / "user")

    def run(
        self,
        place: Path,
        *extra: str,
        at: int = NEVER,
        mode: Mode = Mode.COUNT,
        number: int = 0,
        trouble: list[Any] | None = None,
        seconds: float = 60.0,
        phase: str | None = None,
        delay: float = 0.0,
        brief: bool = False,
        progress: int = 0,
        command: str = "train",
        **settings: object,
    ) -> Ended:
        """Train in a forked child, as `run_command` does."""
        words = self.arguments(place, *extra, command=command, **settings)
        more = {"number": number, "trouble": trouble, "seconds": seconds, "phase": phase, "delay": delay}
        return self.run_command(place, words, at=at, mode=mode, brief=brief, progress=progress, **more)
