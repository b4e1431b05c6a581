"""The memory of a model without a stored memory profile: traced when first needed, and stored in the cache folder.

Torch is loaded only for what is not stored yet.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.io import read_json, write_json
from lora_trainer.core.version import __version__
from lora_trainer.memory_plan.profiles import FORM_OF, Footprint, MemoryModel, Sizes

if TYPE_CHECKING:
    from lora_trainer.adapters.base import AdapterOptions
    from lora_trainer.config.schema import CheckpointingMode, Precision
    from lora_trainer.memory_plan.trace import Subject
    from lora_trainer.models.family import Architecture, Family

STEPS_OF_CHECKPOINTING = 6  # numbers of checkpointed blocks to try


def traced_memory_model(
    family: Family,
    architecture: Architecture,
    targets: str | tuple[str, ...],
    folder: Path,
    rank: int,
    *,
    products: bool = False,
    kind: str = "lora",
    options: AdapterOptions | None = None,
) -> MemoryModel:
    """A memory model that traces on the meta device and stores its results below `folder`, first for `rank`.

    `products`: int8 weights are multiplied in int8. `options` are the adapter's, for any rank. Raises UsageError for targets that match nothing.
    """
    remembered = _memory(
        folder / "plans" / f"{_key(family, architecture, targets, kind, options, products=products)}.json"
    )

    subject = cache(partial(_subject, family, architecture, targets, products, kind, options))

    def shapes(rank: int) -> list[tuple[int, ...]]:
        found = remembered(f"shapes {rank}", lambda: [list(shape) for shape in subject(rank, "bf16").shapes])
        return [tuple(shape) for shape in found]

    def freed(precision: str) -> list[int]:
        found: list[int] = remembered(f"freed {precision}", lambda: subject(rank, precision).freed)
        return found

    def weights(precision: str) -> int:
        kept = "bf16" if precision == "fp16" else precision
        found: int = remembered(f"weights {kept}", lambda: subject(rank, kept).weights)
        return found

    def footprint(sizes: Sizes, precision: str) -> Footprint:
        kept = "bf16" if precision == "fp16" else precision
        resident = replace(sizes, swapped=0)
        # All quantized weights are dequantized alike, except int8 that is multiplied in int8.
        is_alike = FORM_OF[kept] == "narrow" and not (products and kept == "int8")
        form = "fp8" if is_alike else kept

        def measure() -> dict[str, int]:
            return asdict(traced_footprint(subject(sizes.rank, form), resident))

        found = Footprint(**remembered(f"{form} {resident}", measure))
        less = freed(kept) if sizes.swapped else [0]
        away = less[min(sizes.swapped, len(less) - 1)]  # in 4 bits a tiny model has fewer blocks that are worth a swap
        return replace(found, weights=weights(kept) - away)

    blocks = remembered("blocks", lambda: subject(rank, "bf16").blocks)
    stride = max(1, blocks // STEPS_OF_CHECKPOINTING)
    most = len(freed("bf16")) - 1
    facts = architecture.facts  # named by its family where no model is: the published one
    source = "traced on this model" if facts.name != facts.family else "traced on the published model"
    return MemoryModel(source, blocks, stride, most, shapes, weights, footprint, traced=True)


def _subject(
    family: Family,
    architecture: Architecture,
    targets: str | tuple[str, ...],
    products: bool,
    kind: str,
    options: AdapterOptions | None,
    rank: int,
    precision: str,
) -> Subject:
    import torch

    from lora_trainer.memory_plan.trace import make_subject

    return make_subject(
        family,
        architecture,
        rank=rank,
        targets=targets,
        dtype=torch.float32 if precision == "fp32" else torch.bfloat16,
        stored=cast("Precision", precision),
        products=products and precision == "int8",
        kind=kind,
        options=options,
    )


def _memory(path: Path) -> Callable[[str, Callable[[], Any]], Any]:
    """A function that computes each named value once and keeps it in the file."""
    known = _read(path)

    def remembered(name: str, make: Callable[[], Any]) -> Any:
        if name not in known:
            known[name] = make()
            with suppress(OSError):  # a value that cannot be stored is computed again
                write_json(path, known)
        return known[name]

    return remembered


def traced_footprint(subject: Subject, sizes: Sizes) -> Footprint:
    """The peak by one trace; gradients that exist at the peak count as activations.

    The latents are a square, or where the denoiser cannot read one, a rectangle that it can: of that area, else a little more.
    """
    from lora_trainer.memory_plan.trace import trace

    step = subject.architecture.facts.pixel_step // subject.architecture.facts.downscale
    most = max(1, math.isqrt(sizes.area) // step) * step
    height = next((side for side in range(most, most // 2, -step) if sizes.area % (side * step) == 0), most)
    found = trace(
        subject,
        micro=sizes.micro,
        height=height,
        width=math.ceil(sizes.area / height / step) * step,
        checkpointed=sizes.checkpointed,
        recompute=cast("CheckpointingMode", sizes.recompute),
        offloaded=sizes.offloaded,
    )
    return Footprint(found.weights, found.copies, 0, found.peak, found.flops)


def _key(
    family: Family,
    architecture: Architecture,
    targets: str | tuple[str, ...],
    kind: str,
    options: AdapterOptions | None,
    *,
    products: bool,
) -> str:
    texts = family.text.cond_shapes(architecture.denoiser)
    parts = [__version__, family.name, dict(architecture.denoiser), targets, kind, products, texts]
    if options is not None:
        parts.append([options.initialization, list(options.ranks.items())])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()[:32]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
