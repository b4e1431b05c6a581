"""What `accelerate launch` was asked for, as settings: a layer above the presets and below the user's own.

It hands its flags and its config file on as environment variables (`accelerate/utils/launch.py`). They count whoever
set them, as in accelerate itself; `no`, `NO` and 1 are what it exports where nothing was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from lora_trainer.config.layers import Layer
from lora_trainer.config.toml import parse_value, shown
from lora_trainer.core.errors import Problem
from lora_trainer.core.launch import launched

NAME = "accelerate"  # of the layer: `from accelerate` in messages
PRECISIONS = ("fp16", "bf16", "fp8")
SHARDING = {  # of FSDP 1, by name or by number, as `memory.fsdp`
    **dict.fromkeys(("full_shard", "1"), "full_shard"),
    **dict.fromkeys(("shard_grad_op", "2"), "shard_grad_op"),
    **dict.fromkeys(("no_shard", "3"), None),
}
ONE_OF_OURS = "Launch with distributed_type NO or MULTI_GPU, and set memory.fsdp=full_shard to divide the model"
NOT_HERE = {  # variable -> what it stands for, and what to do
    "USE_DEEPSPEED": ("DeepSpeed", f"{ONE_OF_OURS}, and optimizer.max_grad_norm for its gradient_clipping."),
    "USE_MEGATRON_LM": ("Megatron-LM", f"{ONE_OF_OURS}."),
    "IN_TPU_POD": ("TPUs", "Train on a GPU or a CPU."),
}
PARALLEL = {"TP_SIZE": "tensor parallelism", "CP_SIZE": "context parallelism", "SP_SIZE": "sequence parallelism"}


def accelerate_layers(problems: list[Problem], environment: Mapping[str, str] = os.environ) -> list[Layer]:
    """The layer of what accelerate was asked for; none where that is nothing. What cannot be done is added to `problems`."""

    def read(name: str, prefix: str = "ACCELERATE_") -> str:
        return environment.get(prefix + name, "").strip().lower()

    for name, (what, fix) in NOT_HERE.items():
        if is_true(read(name)):
            problems.append(
                Problem("launch_unsupported", f"accelerate was launched for {what}, which is not supported.", fix)
            )
    for name, what in PARALLEL.items():
        if is_true(read("USE_PARALLELISM_CONFIG")) and read(name, "PARALLELISM_CONFIG_") not in ("", "1"):
            problems.append(
                Problem(
                    "launch_unsupported",
                    f"accelerate was launched for {what}, which is not supported.",
                    "Remove parallelism_config.",
                )
            )
    values: dict[str, dict[str, Any]] = {}
    if precision := precision_of(read("MIXED_PRECISION"), problems):
        values["memory"] = {"weight_dtype": precision}
    if read("DYNAMO_BACKEND") not in ("", "no"):
        values["compile"] = compiling(read, problems)
    if is_true(read("USE_FSDP")):
        values["memory"] = {**values.get("memory", {}), **sharding(read, problems)}
    if (most := read("GRADIENT_CLIPPING") or launcher_flag("gradient_clipping")) not in ("", "auto"):
        values["optimizer"] = {"max_grad_norm": parse_value(most)}
    refuse_accumulation(read("GRADIENT_ACCUMULATION_STEPS") or launcher_flag("gradient_accumulation_steps"), problems)
    return [Layer(NAME, values)] if values else []


def is_true(value: str) -> bool:
    return value in ("1", "true", "t", "yes", "y", "on")


def precision_of(asked: str, problems: list[Problem]) -> str | None:
    if asked in ("", "no"):
        return None
    if asked not in PRECISIONS:
        message = f"accelerate was launched with mixed_precision={asked}, which is not one of {', '.join(PRECISIONS)}."
        problems.append(Problem("launch_unsupported", message, "Set memory.weight_dtype, and mixed_precision to no."))
        return None
    return asked


def compiling(read: Any, problems: list[Problem]) -> dict[str, Any]:
    """`[compile]` of the options that begin with `dynamo_`. Only what is not their default is set."""
    if (backend := read("DYNAMO_BACKEND")) != "inductor":
        message = f"accelerate was launched with dynamo_backend={backend}; blocks are compiled by inductor alone."
        problems.append(Problem("launch_unsupported", message, "Set dynamo_backend to inductor, or to no."))
    values: dict[str, Any] = {"enabled": True}
    if (mode := read("DYNAMO_MODE")) not in ("", "default", "none"):
        values["mode"] = mode
    if is_true(read("DYNAMO_USE_DYNAMIC")):
        values["dynamic"] = True
    if is_true(read("DYNAMO_USE_FULLGRAPH")):
        values["fullgraph"] = True
    return values


def sharding(read: Any, problems: list[Problem]) -> dict[str, Any]:
    """`[memory]` of the options that begin with `fsdp_`."""
    strategy = read("SHARDING_STRATEGY", "FSDP_") or "full_shard"
    if read("VERSION", "FSDP_") == "2":
        strategy = "shard_grad_op" if read("RESHARD_AFTER_FORWARD", "FSDP_") == "false" else "full_shard"
    if strategy not in SHARDING:
        message = f"accelerate was launched with fsdp_sharding_strategy={strategy.upper()}, which is not supported."
        problems.append(Problem("launch_unsupported", message, "Set it to FULL_SHARD, SHARD_GRAD_OP or NO_SHARD."))
    if is_true(read("OFFLOAD_PARAMS", "FSDP_")):
        message = "accelerate was launched with fsdp_offload_params, which is not supported."
        problems.append(
            Problem(
                "launch_unsupported", message, "Set it to false, or swap blocks in one process (memory.blocks_to_swap)."
            )
        )
    values: dict[str, Any] = {"fsdp": SHARDING[strategy]} if SHARDING.get(strategy) else {}
    if is_true(read("ACTIVATION_CHECKPOINTING", "FSDP_")):
        values["gradient_checkpointing"] = True
    return values


def refuse_accumulation(steps: str, problems: list[Problem]) -> None:
    """A problem for more than one step: here accumulation follows from the samples of a step and the memory."""
    if steps in ("", "1", "auto"):
        return
    message = f"accelerate was launched with gradient_accumulation_steps={steps}; here accumulation is chosen."
    fix = (
        "Remove it, and set train.effective_batch_size: the samples of one step, of all micro-batches and processes "
        f"together, such as {steps} for {steps} micro-batches of 1 in one process."
    )
    problems.append(Problem("launch_unsupported", message, fix))


def launcher_flag(name: str) -> str:
    """The value of a flag of `accelerate launch` that it exports to DeepSpeed alone; empty where it has none."""
    if not launched():
        return ""
    try:
        words: list[str] = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # not readable
        return ""
    launcher = next((place for place, word in enumerate(words[:3]) if Path(word).name.startswith("accelerate")), None)
    if launcher is None:
        return ""
    own = words[launcher + 1 :]
    for word, following in zip(own, [*own[1:], ""], strict=True):
        if word.endswith(".py"):  # the script: what comes behind it is for the script
            break
        flag, has_value, value = word.partition("=")
        if flag.lstrip("-").replace("-", "_") == name:
            return value if has_value else following
    return ""


def as_note(layer: Layer) -> str:
    """For the log: `from accelerate: memory.weight_dtype=fp16`, before the user's own settings."""
    named = [
        f"{section}.{key}={value if isinstance(value, str) else shown(value)}"
        for section, own in layer.values.items()
        for key, value in own.items()
    ]
    fp8 = layer.values.get("memory", {}).get("weight_dtype") == "fp8"
    return f"from accelerate: {', '.join(named)}{' (weights stored in fp8, computed in 16 bits)' if fp8 else ''}"
