"""How the card and the processor hold and compute the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_trainer.config.schema.types import (
    AttentionName,
    CompileMode,
    Count,
    CountOrZero,
    Positive,
    Precision,
    Recompute,
    Section,
)


class MemorySection(Section):
    limit_gib: Positive | None = Field(None, description="memory of the card, GPU memory that the run must fit")
    checkpointing: Literal["none", "all", "auto"] | CountOrZero = Field(
        "auto",
        description="gradient checkpointing: `none`, `all`, a number of blocks, or `auto`, as few as fit the card",
    )
    base_precision: Precision = Field(
        "bf16",
        description="precision of the frozen base and of the forward pass; `fp8` and `int8` store in 8 bits and `nf4` in 4, and compute in bf16 or fp16",
    )
    int8_products: bool = Field(
        False, description="multiply in int8 as well where the base is stored so: quicker on GeForce cards"
    )
    recompute: Recompute = Field(
        "all",
        description="what a checkpointed block computes again: `all`, or `cheap`, all but attention and matrix products",
    )
    streaming: Literal["none", "auto"] | Count = Field(
        "auto",
        description="frozen blocks that visit the card one after the other: `none`, a number, or `auto`, as few as must",
    )
    offload_activations: bool = Field(
        False, description="what the backward pass needs waits in system memory meanwhile"
    )
    expandable_segments: bool = Field(
        True, description="let the card's memory pool grow in place, against fragmentation"
    )
    compile: bool | Literal["auto"] = Field(
        False, description="compile the blocks of the denoiser; `auto` on a card, in runs of 1,500 steps or more"
    )
    compile_mode: CompileMode = Field("default", description="torch.compile's own modes")
    compile_dynamic: bool | Literal["auto"] = Field(
        "auto", description="one compilation for all sizes; `auto` compiles each size while they are few"
    )
    compile_fullgraph: bool = Field(False, description="an error in place of a graph break")
    attention: AttentionName = Field(
        "auto",
        description="attention implementation; `auto` probes and explains, `fastest` times all that work on this run's sizes",
    )
    grow_after_steps: CountOrZero = Field(
        1000,
        description="good steps after which a run that was out of memory tries larger micro batches again; 0 never does",
    )


class HardwareSection(Section):
    """How the card and the processor compute."""

    tf32: bool = Field(True, description="fp32 products in TF32 on cards that have it; bf16 and fp16 are not concerned")
    cudnn_benchmark: bool | Literal["auto"] = Field(
        "auto", description="let cuDNN time its convolutions for each size; `auto` where sizes are few"
    )
    channels_last: bool | Literal["auto"] = Field(
        "auto", description="memory order of pictures that convolutions like; `auto` for a U-Net on a card"
    )
    onednn: bool = Field(
        True, description="let oneDNN do a CPU's convolutions and products; without it torch's own code does them"
    )
    threads: Count | None = Field(
        None,
        description="threads that compute on a CPU; empty means as OMP_NUM_THREADS says, else what the run began with, else the available CPUs that others leave, at most 8",
    )
