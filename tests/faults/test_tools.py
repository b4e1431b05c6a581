"""Each tool for LoRA files dies, or its disk fails, at each operation: outputs are whole or absent, inputs are never touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.lora_format.keys import KOHYA_UP
from lora_trainer.lora_format.kinds.dora import SCALE
from lora_trainer.lora_format.writing import write_lora
from tests.faults.disk import Mode, unavailable
from tests.faults.ground import Ended, Forks
from tests.faults.test_disk import FAULTS, KINDS
from tests.faults.tries import KILLS, Row, Tried, wrong_end
from tests.lora_format.tiny import facts, random_lora
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.recipes.recipe import contents

MODES = (Mode.FAIL, Mode.FULL, Mode.LOCKED, Mode.SHORT, Mode.KILL, Mode.TORN, Mode.CUT)
STRIDE = int(os.environ.get("FAULT_STRIDE", "1"))
# Words beginning with `in/` and `out/` are files of the place; `out/old.safetensors` exists before.
TOOLS = {
    "merge": "merge in/cat.safetensors in/style.safetensors --output out/old.safetensors --overwrite",
    "merge into a file": "merge in/cat.safetensors --into in/base.safetensors --output out/old.safetensors --overwrite",
    "merge into a folder": "merge in/cat.safetensors --into in/base --output out/merged",
    "resize with a learned token": "resize in/token.safetensors --rank 1 --to diffusers --output out/old.safetensors --overwrite",
    "extract": "extract in/base.safetensors in/tuned.safetensors --rank 2 --output out/old.safetensors --overwrite",
    "extract a LoKr": "extract in/base in/tuned.safetensors --type lokr --rank 2 --output out/new.safetensors",
    "average": "average in/cat.safetensors in/style.safetensors --rank 2 --output out/new.safetensors",
    "convert": "convert in/cat.safetensors out/old.safetensors --to diffusers --overwrite",
    "convert to a LoRA": "convert in/dora.safetensors out/new.safetensors --to lora --rank 2 --model in/base.safetensors",
}


WARM = ("merge into a folder", "resize with a learned token")  # they import what all of them need


@dataclass
class Tools(Forks):
    """A process that has run some tools, its inputs, and the files and operations of each tool undisturbed."""

    tries: int = 0
    wanted: dict[str, dict[str, str]] = field(default_factory=dict)
    operations: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = make_inputs(self.folder / "made")
        self.unchanged = contents(self.inputs)
        warm = self.new_place()
        self.start([self.words(tool, self.new_place()) for tool in WARM])
        self.before = contents(warm / "out")

    def run_undisturbed(self, tool: str) -> None:
        """Once for each tool: its files and operations."""
        if tool in self.wanted:
            return
        place = self.new_place()
        ended = self.run_command(place, self.words(tool, place))
        assert ended.exit == 0, ended.output
        self.wanted[tool] = contents(place / "out")
        self.operations[tool] = ended.operations
        assert self.wanted[tool] != self.before

    def new_place(self) -> Path:
        """A folder with the inputs, and an older output."""
        self.tries += 1
        place = self.folder / "tries" / f"{self.tries:05d}"
        shutil.copytree(self.inputs, place / "in")
        (place / "user").mkdir()
        (place / "out").mkdir()
        shutil.copyfile(place / "in" / "style.safetensors", place / "out" / "old.safetensors")
        return place

    def words(self, tool: str, place: Path) -> list[str]:
        return [str(place / word) if word.startswith(("in/", "out/")) else word for word in TOOLS[tool].split()]

    def try_at(self, tool: str, at: int, mode: Mode) -> Tried:
        """Disturb a tool at one operation, compare its files, and run it again on what it left."""
        place = self.new_place()
        ended = self.run_command(place, self.words(tool, place), at=at, mode=mode)
        codes = (0,) if mode == Mode.SHORT else (0, 2)
        problems = [*wrong_end(ended, mode, codes), *self.torn(tool, place, ended, mode)]
        again = self.run_command(place, self.words(tool, place))
        is_kept = again.exit == 2 and "exists already" in again.output  # a new output is not overwritten
        if again.exit != 0 and not is_kept:
            problems.append(f"the same command ended with {again.exit or again.signal} then: {again.output[-200:]}")
        if kept(place / "out") != self.wanted[tool]:
            problems.append("after the same command there are other bytes")
        named = self.operations[tool][at] if at < len(self.operations[tool]) else "the end"
        if not problems:
            shutil.rmtree(place)
        return Tried(f"{place.name} {tool} {mode.name} {at} ({named})", 0, problems)

    def torn(self, tool: str, place: Path, ended: Ended, mode: Mode) -> list[str]:
        """What is neither the old file nor the new one, inputs that changed, and what a failure left."""
        found, wanted = kept(place / "out"), self.wanted[tool]
        problems = [
            f"torn: {name}" for name, each in found.items() if each not in (self.before.get(name), wanted.get(name))
        ]
        problems += [f"gone: {name}" for name in self.before if name not in found]
        if "merged" in {name.partition("/")[0] for name in found}:
            problems += [f"incomplete: {name}" for name in wanted if name not in found]
        if ended.exit == 0 and found != wanted:
            problems.append("ended with 0, without its whole output")
        hidden = [path.name for path in (place / "out").iterdir() if path.name.startswith(".")]
        if hidden and mode not in (*KILLS, Mode.LOCKED):  # nothing can be removed then
            problems.append(f"left over: {', '.join(hidden)}")
        problems += ["an input changed"] if contents(place / "in") != self.unchanged else []
        return problems


def kept(folder: Path) -> dict[str, str]:
    """The files below a folder, without the hidden ones that a killed command was writing."""
    return {name: each for name, each in contents(folder).items() if not name.startswith(".")}


def make_inputs(folder: Path) -> Path:
    """Two LoRAs, one with a learned token, a DoRA, and a base model as a folder and as a file, before and after its training."""
    pipeline = tiny_pipeline(folder / "words", "sd15")
    place = folder / "in"
    pipeline.save_pretrained(place / "base")
    write(unet_checkpoint(pipeline, "sd15"), place / "base.safetensors")
    endings = ("attn1.to_q", "conv_in")
    for seed, name in enumerate(("cat", "style")):
        torch.manual_seed(seed)
        write_lora(place, name, random_lora(pipeline.unet, rank=2 + seed, endings=endings), facts(name=name))
        (place / f"{name}.diffusers.safetensors").unlink()
    tensors = load_file(place / "cat.safetensors")
    header = {"ss_base_model_version": "sd_v1"}
    word = {"bundle_emb.zobo.string_to_param.*": torch.ones(2, 8)}
    save_file(tensors | word, place / "token.safetensors", metadata=header)
    ups = {key.removesuffix(KOHYA_UP): each for key, each in tensors.items() if key.endswith(KOHYA_UP)}
    magnitudes = {f"{name}.{SCALE}": torch.ones(len(up), *[1] * (up.ndim - 1)) for name, up in ups.items()}
    save_file(tensors | magnitudes, place / "dora.safetensors", metadata=header)
    pipeline.unet.conv_in.weight.data += 0.1
    pipeline.unet.down_blocks[0].resnets[0].conv1.weight.data += torch.randn_like(
        pipeline.unet.down_blocks[0].resnets[0].conv1.weight
    )
    write(unet_checkpoint(pipeline, "sd15"), place / "tuned.safetensors")
    return place


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    if reason := unavailable():
        pytest.skip(reason)
    made = Tools(tmp_path_factory.mktemp("tools"))
    yield made
    made.close()


def places(tools: Tools, tool: str, mode: Mode) -> list[int]:
    """The operations at which this fault can happen, and one after the last."""
    tools.run_undisturbed(tool)
    kinds = KINDS.get(mode)
    names = tools.operations[tool]
    return [*(at for at, name in enumerate(names) if kinds is None or name.split(" ")[0] in kinds), len(names)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_every_operation_of_each_tool(mode: Mode, tools: Tools, tell: Callable[[Row], None]) -> None:
    row = Row(FAULTS[mode], f"{'every' if STRIDE == 1 else f'each {STRIDE}th'} of each tool for LoRA files")
    for tool in TOOLS:
        for at in places(tools, tool, mode)[::STRIDE]:
            row.add(tools.try_at(tool, at, mode))
    tell(row)
