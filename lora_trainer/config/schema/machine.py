"""How the GPU and the CPU hold and compute the model."""

from __future__ import annotations

from typing import Literal

from lora_trainer.config.schema.types import (
    ON,
    AttentionName,
    Blocks,
    CheckpointingMode,
    CompileMode,
    Count,
    CountOrZero,
    DeviceName,
    FsdpStrategy,
    Positive,
    Precision,
    Section,
    setting,
)


class MemorySection(Section):
    """How the model fits into the GPU's memory."""

    limit_gib: Positive | None = setting(None, "changes rounding", "GPU memory that the run must fit into")
    gradient_checkpointing: Blocks = setting(
        "auto",
        "changes rounding",
        "`true` for all blocks, `false` for none, a number of blocks, or `auto`, as few as fit on the GPU",
    )
    checkpointing_mode: CheckpointingMode = setting(
        "full",
        "changes rounding",
        "what a checkpointed block recomputes: `full` all of it, `selective` everything but attention and matmuls",
        needs={"memory.gradient_checkpointing": ON},
    )
    weight_dtype: Precision = setting(
        "bf16",
        "fixed in effect",
        "precision of the frozen base model and of the forward pass; `fp8` and `int8` store weights in 8 bits and `nf4` in 4, and compute in bf16 or fp16",
    )
    int8_matmul: bool = setting(
        False,
        "changes rounding",
        "also multiply in int8 if the base model is stored in int8: faster on GeForce GPUs",
        needs={"memory.weight_dtype": ("int8",)},
    )
    blocks_to_swap: Literal["auto"] | CountOrZero = setting(
        "auto",
        "changes rounding",
        "frozen blocks swapped between CPU and GPU: a number, 0 for none, or `auto`, as few as needed",
    )
    fsdp: FsdpStrategy | None = setting(
        None,
        "changes rounding",
        "with several processes, each holds a part of the frozen base model (FSDP2): `full_shard` gathers a block for its forward and again for its backward pass, `shard_grad_op` keeps it in between; empty: each holds all of it",
    )
    offload_activations: bool = setting(
        False, "changes rounding", "keep what the backward pass needs in system memory until then"
    )
    expandable_segments: bool = setting(
        True, "changes nothing", "let PyTorch's GPU memory pool grow in place, against fragmentation"
    )
    oom_recovery_steps: CountOrZero = setting(
        1000,
        "changes rounding",
        "steps after an out-of-memory error before larger micro-batches are tried again; 0 never does",
    )


class CompileSection(Section):
    """torch.compile."""

    enabled: bool | Literal["auto"] = setting(
        False, "changes rounding", "compile the denoiser's blocks; `auto` on a GPU, in runs of `min_steps` or more"
    )
    min_steps: Count = setting(
        1500,
        "changes rounding",
        "steps of a run from which `auto` compiles, an estimate; `bench step --compare compile.enabled=true` measures from how many it pays on your GPU",
        needs={"compile.enabled": ("auto",)},
    )
    mode: CompileMode = setting("default", "changes rounding", "mode of torch.compile", needs={"compile.enabled": ON})
    dynamic: bool | Literal["auto"] = setting(
        "auto",
        "changes rounding",
        "one compilation for all sizes; `auto` compiles each size while they are few",
        needs={"compile.enabled": ON},
    )
    fullgraph: bool = setting(
        False, "changes rounding", "treat a graph break as an error", needs={"compile.enabled": ON}
    )


class HardwareSection(Section):
    """How the GPU and the CPU compute."""

    attention_backend: AttentionName = setting(
        "auto",
        "changes rounding",
        "attention backend; `auto` tests what works and explains its choice, `fastest` times all that work at this run's sizes",
    )
    tf32: bool = setting(
        True, "changes rounding", "fp32 matmuls in TF32 on GPUs that have it; does not affect bf16 and fp16"
    )
    cudnn_benchmark: bool | Literal["auto"] = setting(
        "auto", "changes rounding", "let cuDNN time its convolutions for each size; `auto` where sizes are few"
    )
    channels_last: bool | Literal["auto"] = setting(
        "auto", "changes rounding", "channels-last memory format for convolutions; `auto` for a U-Net on a GPU"
    )
    onednn: bool = setting(
        True,
        "changes rounding",
        "let oneDNN compute a CPU's convolutions and matmuls; without it PyTorch's own code does",
    )
    text_encoder_device: DeviceName | None = setting(
        None,
        "changes rounding",
        "where the VAE and frozen text encoders encode images and captions: `cpu`, `cuda:1`, or `auto`, where the largest GPU trains and the smallest other one encodes; empty: where the run trains",
    )
    threads: Count | None = setting(
        None,
        "changes rounding",
        "CPU threads for computing; empty means OMP_NUM_THREADS if set, else what the run began with, else the CPUs that other programs leave free, at most 8",
    )
