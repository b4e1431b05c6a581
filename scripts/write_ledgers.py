"""Write `lora_trainer/models/ledgers/FAMILY.json`: the memory of a published model's training step, by traces.

    python scripts/write_ledgers.py sd15 sd2 sdxl

It takes minutes for each family and needs neither weights nor a GPU. Run it again when the trainer's step, the way of
checkpointing, diffusers or peft change what is kept in memory: tests that trace say so.

For each number of checkpointed blocks the step is traced at five sizes. Its operators come in the same order each
time, so each moment gives five equations for the coefficients of `Sizes.terms`. Of all moments those are kept that
are the largest somewhere in the range of `RANGE`.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch

from lora_trainer.core.io import write_text
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import public_architecture
from lora_trainer.models.ledger import Sizes
from lora_trainer.training.trace import Subject, Trace, make_subject, trace

FOLDER = Path(__file__).resolve().parents[1] / "lora_trainer" / "models" / "ledgers"
TARGETS = ("attention", "attention+ff")
# Rank, micro batch, height and width of latents. Not one sample: some copies are views then.
POINTS = ((16, 2, 64, 64), (64, 2, 64, 64), (16, 3, 64, 64), (16, 2, 64, 128), (64, 2, 64, 128))
RANGE = tuple(product((1, 4, 16, 64, 128, 256), (1, 2, 4, 8, 16), (32**2, 64**2, 96**2, 128**2, 192**2)))


def fitted(subjects: dict[int, Subject], checkpointed: int) -> tuple[list[list[int]], list[int]]:
    """The moments that can be the peak, and the operations, with so many blocks checkpointed."""
    traces = [
        trace(subjects[rank], micro=micro, height=height, width=width, checkpointed=checkpointed)
        for rank, micro, height, width in POINTS
    ]
    sizes = [Sizes(rank, micro, height * width, checkpointed) for rank, micro, height, width in POINTS]
    if len({len(each.live) for each in traces}) > 1:
        raise SystemExit("The traces do not have the same operators: the sizes cannot be compared.")
    moments = numpy.linalg.solve(
        numpy.array([size.terms for size in sizes], dtype=float), numpy.array([each.live for each in traces], dtype=float)
    ).T
    return largest_somewhere(moments), flop_coefficients(sizes, traces)


def flop_coefficients(sizes: list[Sizes], traces: list[Trace]) -> list[int]:
    """Coefficients of `Sizes.flop_terms`."""
    linear = numpy.linalg.lstsq(
        numpy.array([size.flop_terms[:-1] for size in sizes], dtype=float),
        numpy.array([each.flops for each in traces], dtype=float),
        rcond=None,
    )[0]
    square = traces[0].square_flops / sizes[0].flop_terms[-1]
    return [round(value) for value in (*linear, square)]


def largest_somewhere(moments: numpy.ndarray) -> list[list[int]]:
    """The moments that hold most at one point of RANGE at least, in bytes."""
    points = numpy.array([Sizes(*point, 0).terms for point in RANGE], dtype=float)
    kept = sorted(set((moments @ points.T).argmax(axis=0).tolist()))
    return [[round(float(value), 3) for value in moments[index]] for index in kept]


def half_or_fp8(family: str, targets: str, *, fp8: bool) -> tuple[dict[str, Any], list[list[int]]]:
    """A ledger as JSON values, and the adapted layers."""
    architecture = public_architecture(family)
    subjects = {
        rank: make_subject(FAMILIES[family], architecture, rank=rank, targets=targets, dtype=torch.bfloat16, fp8=fp8)
        for rank in {point[0] for point in POINTS}
    }
    first = subjects[POINTS[0][0]]
    steps = []
    for checkpointed in range(first.blocks + 1):
        steps.append(fitted(subjects, checkpointed))
        print(f"{family} {targets} {'fp8' if fp8 else 'half'}: {checkpointed} of {first.blocks} blocks", flush=True)
    weights = trace(first, micro=1, height=64, width=64, checkpointed=0).weights
    ledger = {"weights": weights, "moments": [step[0] for step in steps], "flops": [step[1] for step in steps]}
    return ledger, layers_of(first.shapes)


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
