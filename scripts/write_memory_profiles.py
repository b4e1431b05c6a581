"""Trace a published model's training step and write its memory to `lora_trainer/models/memory_profiles/FAMILY.json`.

    python scripts/write_memory_profiles.py FAMILY…

It takes minutes for each family and needs neither weights nor a GPU. Run it again when the training step, checkpointing,
diffusers or peft change what stays in memory: tests that trace a step then fail.

The step is traced once for each stored number of checkpointed blocks, at sizes that share no factor with any width of the
model. So the factors of a tensor's bytes show which sizes it is a product of; where text and image are joined, a factor
of their sum shows it. Of all moments, those that are the peak somewhere in `RANGE` are kept.
"""

from __future__ import annotations

import json
import math
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from lora_trainer.config.schema import CheckpointingMode, Precision
from lora_trainer.core.io import write_text
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.memory_plan.profiles import Sizes
from lora_trainer.memory_plan.trace import Split, Subject, make_subject, trace
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory.checkpointing import checkpointable_blocks
from lora_trainer.models.published import public_architecture

FOLDER = Path(__file__).resolve().parents[1] / "lora_trainer" / "models" / "memory_profiles"
TARGETS = ("attention", "attention+ff")
STORED: dict[str, Precision] = {"half": "bf16", "fp8": "fp8", "int8": "int8", "nf4": "nf4"}
STRIDE = 8  # between traced numbers of blocks of the same kind
RANK, MICRO, SIDES = 29, 19, (13, 17)
AREA = SIDES[0] * SIDES[1]
# Powers of (rank, micro, area) in a size, in the order of `Sizes.terms`.
KINDS = {(0, 0, 0): 0, (1, 0, 0): 1, (0, 1, 0): 2, (1, 1, 0): 3, (0, 1, 1): 4, (1, 1, 1): 5, (0, 1, 2): 6}
RANGE = tuple(product((1, 4, 16, 64, 128, 256), (1, 2, 4, 8, 16), (32**2, 64**2, 96**2, 128**2, 192**2)))


def split_of(family: str) -> Split:
    """A function that splits a number of bytes or operations into kinds of `Sizes.terms` and their shares."""
    texts = FAMILIES[family].text.cond_shapes(public_architecture(family).denoiser)["embeds"][0]
    height, width = latents_of(family)
    tokens = height * width // patch_of(family) ** 2
    together, share = largest_prime(tokens + texts), tokens / (tokens + texts)

    @cache
    def split(size: int) -> tuple[tuple[int, float], ...]:
        if not size:
            return ()
        rank, micro = int(size % RANK == 0), int(size % MICRO == 0)
        area = 2 if size % AREA**2 == 0 else int(size % AREA == 0)
        both = (2 if size % together**2 == 0 else int(size % together == 0)) if transformer else 0
        # All samples share one table of positions. No kind expresses that, so it counts once for each sample.
        factor = 1 if micro else MICRO
        if both == 2:
            parts = {(rank, 1, 2): share**2, (rank, 1, 1): 2 * share * (1 - share), (rank, 1, 0): (1 - share) ** 2}
        elif both and area:  # an image's tokens that attend to all
            parts = {(rank, 1, 2): share, (rank, 1, 1): 1 - share}
        elif both:
            parts = {(rank, 1, 1): share * factor, (rank, 1, 0): (1 - share) * factor}
        else:
            parts = {(rank, 1, area): 1.0 * factor} if area else {(rank, micro, 0): 1.0}
        return tuple((KINDS[powers], part) for powers, part in parts.items())

    transformer = FAMILIES[family].denoiser.component == "transformer"
    return split


def latents_of(family: str) -> tuple[int, int]:
    """The height and width that are traced. The area's prime factors are those of SIDES and 2.

    U-Nets halve the sides of the latents several times, so both are multiples of 8. Some transformers pad their tokens, of two
    by two latents, to multiples of 32, so one is a multiple of 16 then.
    """
    is_unet = FAMILIES[family].denoiser.component == "unet"
    return 8 * (2 if is_unet else patch_of(family)) * SIDES[0], 8 * SIDES[1]


@cache
def patch_of(family: str) -> int:
    """How many latents wide a token of a transformer is."""
    spec = FAMILIES[family].denoiser
    with torch.device("meta"):
        blocks = spec.features(spec.make(spec.thin(public_architecture(family).denoiser)))
    return next(iter(blocks.values())).patch


def largest_prime(number: int) -> int:
    """The largest prime factor."""
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return factor


def step(
    subject: Subject, checkpointed: int, recompute: CheckpointingMode, split: Split
) -> tuple[list[list[int]], list[int]]:
    """The moments that can be the peak, and the operations, with `checkpointed` blocks."""
    height, width = latents_of(subject.family.name)
    traced = trace(
        subject,
        micro=MICRO,
        height=height,
        width=width,
        checkpointed=checkpointed,
        recompute=recompute,
        split=split,
        kinds=len(KINDS),
    )
    terms = np.array(Sizes(RANK, MICRO, height * width, 0).terms)
    moments = np.array(traced.live) / terms
    flops = [round(count / term) for count, term in zip(traced.flops, terms.tolist(), strict=True)]
    return largest_somewhere(moments), flops


def largest_somewhere(moments: np.ndarray) -> list[list[int]]:
    """The moments, in bytes, that are the largest at one point of RANGE or more."""
    points = np.array([Sizes(*point, 0).terms for point in RANGE], dtype=float)
    kept = sorted(set((moments @ points.T).argmax(axis=0).tolist()))
    return [[math.ceil(value) for value in moments[index].tolist()] for index in kept]


def counts_of(subject: Subject, *, few: bool) -> list[int]:
    """The numbers of checkpointed blocks to trace: every one of a U-Net, else each STRIDE-th and where the kind changes."""
    blocks = checkpointable_blocks(subject.denoiser)
    if subject.family.denoiser.component == "unet" and not few:
        return list(range(len(blocks) + 1))
    kinds = [(type(block), sum(weight.numel() for weight in block.parameters())) for block in blocks]
    ends = [place for place in range(1, len(blocks)) if kinds[place] != kinds[place - 1]]
    places = {0, 1, len(blocks) - 1, len(blocks), *range(0, len(blocks), STRIDE)}
    if subject.family.denoiser.component == "transformer":
        places |= {near for end in ends for near in (end - 1, end, end + 1)}
    return sorted(places)


def steps_of(family: str, targets: str, stored: Precision) -> tuple[dict[str, Any], list[list[int]]]:
    """The step's memory in both checkpointing modes, as JSON values; and the adapted layers."""
    subject = subject_of(family, targets, stored)
    split, found = split_of(family), {}
    for recompute in get_args(CheckpointingMode):
        counts = counts_of(subject, few=recompute == "selective")
        print(f"{family} {targets} {stored} {recompute}: {counts}", flush=True)
        steps = [step(subject, count, recompute, split) for count in counts]
        found[recompute] = {
            "counts": counts,
            "moments": [moments for moments, _ in steps],
            "flops": [flops for _, flops in steps],
        }
    return found, layers_of(subject.shapes)


def subject_of(family: str, targets: str, stored: Precision) -> Subject:
    return make_subject(
        FAMILIES[family],
        public_architecture(family),
        rank=RANK,
        targets=targets,
        dtype=torch.bfloat16,
        stored=stored,
    )


def stored_as(family: str, stored: Precision) -> dict[str, Any]:
    """The bytes of all weights, and those that block swap removes from the GPU."""
    subject = subject_of(family, "attention", stored)
    return {"weights": subject.weights, "freed": subject.freed}


def layers_of(shapes: list[tuple[int, ...]]) -> list[list[int]]:
    """(in, out, count) of the adapted linear layers, from pairs of [rank, in] and [out, rank]."""
    pairs = [(down[1], up[0]) for down, up in zip(shapes[::2], shapes[1::2], strict=True)]
    return [[*pair, pairs.count(pair)] for pair in sorted(set(pairs))]


def write_memory_profile(family: str) -> None:
    """Trace every case and write the family's file."""
    architecture = public_architecture(family)
    with torch.device("meta"):
        config = dict(FAMILIES[family].denoiser.make(architecture.denoiser).config)  # type: ignore[arg-type]
    config |= architecture.denoiser  # the model builds a smaller table of positions than the file has
    document: dict[str, Any] = {
        "config": {key: value for key, value in sorted(config.items()) if not key.startswith("_")},
        "set": sorted(key for key in architecture.denoiser if key != "sample_size"),
        "stored": {name: stored_as(family, stored) for name, stored in STORED.items()},
        "targets": {},
    }
    for targets in TARGETS:
        half, layers = steps_of(family, targets, "bf16")
        narrow, _ = steps_of(family, targets, "int8")
        document["targets"][targets] = {"layers": layers, "half": half, "narrow": narrow}
    write_text(FOLDER / f"{family}.json", json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    quieten_libraries()
    for name in sys.argv[1:]:
        write_memory_profile(name)
