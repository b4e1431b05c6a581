"""Print the memory planner's table against published figures, as docs/memory.md has it.

    python scripts/compare_reference.py

One step with a LoRA of rank 16 on attention, bf16: base model, adapter with its fp32 masters, and activations. It reads
the stored memory profiles and takes a second.
"""

from __future__ import annotations

from lora_trainer.memory_plan.profiles import Footprint, Sizes, stored_memory_model
from lora_trainer.models.published import public_architecture

GIB = 2**30
DOWNSCALE = 8  # pixels on a side of one latent
# Computed without this code, on meta tensors: live GiB and TFLOP without checkpointing and with all blocks.
FIGURES = [
    ("sd15", 512, 1, (2.39, 1.83), (1.72, 2.32)),
    ("sdxl", 768, 1, (7.89, 5.20), (7.5, 10.8)),
    ("sdxl", 1024, 1, (10.19, 5.42), (14.2, 19.3)),
    ("sdxl", 1024, 4, (26.0, 6.96), (4 * 14.2, 4 * 19.3)),
    ("flux", 1024, 1, (44.2, 24.5), (164, 238)),
    ("sd3", 1024, 1, (12.10, 5.70), (26.5, 37.8)),
]


def live(found: Footprint) -> float:
    """GiB of base model, adapter with its fp32 masters, and activations."""
    return (found.weights + 3 * found.copies + found.gradients + found.activations) / GIB


def main() -> None:
    print("| model | live GiB, no checkpointing / all blocks | against the reference | TFLOP | against the reference |")
    print("|---|---|---|---|---|")
    for family, side, micro, gib, tflop in FIGURES:
        memory_model = stored_memory_model(public_architecture(family), "attention")
        assert memory_model is not None
        steps = [
            memory_model.footprint(Sizes(16, micro, (side // DOWNSCALE) ** 2, blocks), "bf16")
            for blocks in (0, memory_model.blocks)
        ]
        cells = [f"{family} {side}, {micro}"]
        for sizes, known, places in (
            ([live(each) for each in steps], gib, 2),
            ([each.flops / 1e12 for each in steps], tflop, 1),
        ):
            cells.append(" / ".join(f"{size:.{places}f}" for size in sizes))
            cells.append(
                " / ".join(f"{size / reference - 1:+.1%}" for size, reference in zip(sizes, known, strict=True))
            )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
