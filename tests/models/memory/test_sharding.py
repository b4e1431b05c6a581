"""FSDP of the frozen base: two processes over gloo give one process's gradients, each with half of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.test_group import environment_of_two

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo as on Linux")

# Blocks of the name that diffusers' have; each process trains every second sample. One line of JSON for each case.
PROGRAM = """
import copy, json, sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from lora_trainer.models.memory.sharding import held_bytes, shard_base
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from lora_trainer.training.processes import join_processes

class BasicTransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 48), nn.Linear(48, 17, bias=False)
        self.back = nn.Linear(17, 16)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.recomputed = False

    def forward(self, x):
        return x + self.back(torch.tanh(self.narrow(torch.tanh(self.wide(x))))) + self.up(self.down(x))

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(BasicTransformerBlock() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if block.recomputed else block(x)
        return self.last(x)

def made(stored, recomputed):
    torch.manual_seed(0)
    denoiser = Denoiser().requires_grad_(False).to(torch.float64 if stored == "fp64" else torch.float32)
    if stored != "fp64":
        store_layers(denoiser, make_quantizer(stored))
    for block in denoiser.blocks:
        block.recomputed = recomputed
        block.down.requires_grad_(True)
        block.up.requires_grad_(True)
    return denoiser

def step(denoiser, inputs):
    loss = denoiser(inputs).square().sum()
    at_backward = held_bytes(denoiser)
    loss.backward()
    trained = [each for each in denoiser.parameters() if each.requires_grad]
    return loss.detach(), torch.cat([each.grad.flatten() for each in trained]), at_backward

processes = join_processes()
torch.manual_seed(1)
inputs = torch.randn(4, 3, 4, dtype=torch.float64)
for stored, strategy, recomputed in json.loads(sys.argv[1]):
    alone, sharded = made(stored, recomputed), made(stored, recomputed)
    here = inputs if stored == "fp64" else inputs.float()
    loss, gradient, whole = step(alone, here)
    line = shard_base(sharded, strategy, processes.device, processes.world, processes.gather)
    resting = held_bytes(sharded)
    own_loss, own_gradient, at_backward = step(sharded, here[processes.rank :: 2])
    held = torch.tensor([float(resting)])
    print(json.dumps({
        "loss": float(loss), "own": float(processes.sum_of_all(own_loss)),
        "off": float((processes.sum_of_all(own_gradient) - gradient).norm() / gradient.norm()),
        "whole": whole, "resting": resting, "of_both": float(processes.sum_of_all(held)),
        "at_backward": at_backward, "line": line,
    }))
"""
CASES = [
    ("fp64", "full_shard", False),
    ("fp64", "full_shard", True),
    ("fp64", "shard_grad_op", False),
    ("fp8", "full_shard", True),
    ("nf4", "full_shard", False),
]
ROUNDING = {"fp64": 1e-12}  # else fp32's


@pytest.mark.slow
def test_two_processes_with_half_of_the_weights_train_as_one_with_all(checkout: Path):
    """Sharded in its stored form, with and without gradient checkpointing. Both hold all weights once, together."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(CASES)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for environment in environment_of_two(checkout)
    ]
    ended = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended[0][1] + ended[1][1]
    for output, _ in ended:
        found = [json.loads(line) for line in output.splitlines()]
        assert len(found) == len(CASES)
        for (stored, strategy, _), each in zip(CASES, found, strict=True):
            assert each["own"] == pytest.approx(each["loss"], rel=ROUNDING.get(stored, 1e-5))
            assert each["off"] < ROUNDING.get(stored, 1e-5)
            assert each["of_both"] == each["whole"]
            assert 0.4 < each["resting"] / each["whole"] < 0.6
            waits = {"full_shard": each["resting"], "shard_grad_op": each["whole"]}
            assert each["at_backward"] == waits[strategy]
            assert f"FSDP ({strategy}): 4 blocks over 2 processes" in each["line"]
