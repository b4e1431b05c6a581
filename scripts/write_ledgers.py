"""Write `lora_trainer/models/ledgers/FAMILY.json`: the memory of a published model's training step, by traces.

    python scripts/write_ledgers.py sd15 sd2 sdxl

It takes minutes for each family and needs neither weights nor a GPU. Run it again when the trainer's step, the way of
checkpointing, diffusers or peft change what is kept in memory: tests that trace say so.

For each number of checkpointed blocks the step is traced once, at sizes that share no factor with any width of a
model. So a tensor's bytes say by their factors what they are a product of. Of all moments those are kept that are the
largest somewhere in the range of `RANGE`.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lora_trainer.core.io import write_text
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import public_architecture
from lora_trainer.models.memory.ledger import Sizes
from lora_trainer.training.memory.trace import Subject, make_subject, trace

FOLDER = Path(__file__).resolve().parents[1] / "lora_trainer" / "models" / "ledgers"
TARGETS = ("attention", "attention+ff")
RANK, MICRO, SIDES = 23, 19, (13, 17)
# Sides of latents are halved several times, so they are multiples of 8; the area's factors are those of SIDES.
HEIGHT, WIDTH = (8 * side for side in SIDES)
AREA = SIDES[0] * SIDES[1]
# (rank, micro, area) by the power in which each stands in a size, as `Sizes.terms` orders them.
KINDS = {(0, 0, 0): 0, (1, 0, 0): 1, (0, 1, 0): 2, (1, 1, 0): 3, (0, 1, 1): 4, (1, 1, 1): 5, (0, 1, 2): 6}
RANGE = tuple(product((1, 4, 16, 64, 128, 256), (1, 2, 4, 8, 16), (32**2, 64**2, 96**2, 128**2, 192**2)))


def kind(size: int) -> int:
    """Which of `Sizes.terms` a number of bytes or operations is a multiple of. Raises KeyError for a size of no kind."""
    area = 2 if size % AREA**2 == 0 else int(size % AREA == 0)
    return KINDS[int(size % RANK == 0), int(size % MICRO == 0), area] if size else 0


def step(subject: Subject, checkpointed: int) -> tuple[list[list[int]], list[int], int]:
    """The moments that can be the peak, the operations, and the weights' bytes, with so many blocks checkpointed."""
    traced = trace(
        subject, micro=MICRO, height=HEIGHT, width=WIDTH, checkpointed=checkpointed, kind=kind, kinds=len(KINDS)
    )
    terms = np.array(Sizes(RANK, MICRO, HEIGHT * WIDTH, 0).terms)
    moments = np.array(traced.live) / terms
    flops = [round(count / term) for count, term in zip(traced.flops, terms.tolist(), strict=True)]
    return largest_somewhere(moments), flops, traced.weights


def largest_somewhere(moments: np.ndarray) -> list[list[int]]:
    """The moments that hold most at one point of RANGE at least, in bytes."""
    points = np.array([Sizes(*point, 0).terms for point in RANGE], dtype=float)
    kept = sorted(set((moments @ points.T).argmax(axis=0).tolist()))
    return [[math.ceil(value) for value in moments[index].tolist()] for index in kept]


def half_or_fp8(family: str, targets: str, *, fp8: bool) -> tuple[dict[str, Any], list[list[int]]]:
    """A ledger as JSON values, and the adapted layers."""
    architecture = public_architecture(family)
    subject = make_subject(
        FAMILIES[family],
        architecture,
        rank=RANK,
        targets=targets,
        dtype=torch.bfloat16,
        stored="fp8" if fp8 else "bf16",
    )
    steps = []
    for checkpointed in range(subject.blocks + 1):
        steps.append(step(subject, checkpointed))
        print(f"{family} {targets} {'fp8' if fp8 else 'half'}: {checkpointed} of {subject.blocks} blocks", flush=True)
    ledger = {"weights": steps[0][2], "moments": [each[0] for each in steps], "flops": [each[1] for each in steps]}
    return ledger, layers_of(subject.shapes)


def layers_of(shapes: list[tuple[int, ...]]) -> list[list[int]]:
    """(in, out, count) of the adapted linear layers, from pairs of [rank, in] and [out, rank]."""
    pairs = [(down[1], up[0]) for down, up in zip(shapes[::2], shapes[1::2], strict=True)]
    return [[*pair, pairs.count(pair)] for pair in sorted(set(pairs))]


def write_ledger(family: str) -> None:
    """Trace everything and write the family's file."""
    architecture = public_architecture(family)
    with torch.device("meta"):
        config = dict(FAMILIES[family].make_denoiser(architecture.denoiser).config)  # type: ignore[arg-type]
    document: dict[str, Any] = {
        "config": {key: value for key, value in sorted(config.items()) if not key.startswith("_")},
        "told": sorted(key for key in architecture.denoiser if key != "sample_size"),
        "targets": {},
    }
    for targets in TARGETS:
        half, layers = half_or_fp8(family, targets, fp8=False)
        fp8, _ = half_or_fp8(family, targets, fp8=True)
        document["targets"][targets] = {"layers": layers, "half": half, "fp8": fp8}
    write_text(FOLDER / f"{family}.json", json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    quieten_libraries()
    for name in sys.argv[1:]:
        write_ledger(name)
