"""`train.deterministic`: allow only deterministic operations; the error names one that is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.training.checkpoints.checkpoint import resume_hint

LACKING = "does not have a deterministic implementation"
# cuBLAS sums in one order only with a workspace of a fixed size; read at the first computation on a GPU.
WORKSPACE, ITS_SIZE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def fix_workspace(wanted: bool) -> None:
    """Let cuBLAS sum in one order only, where that is `wanted`; before the first computation on a GPU."""
    if wanted:
        os.environ.setdefault(WORKSPACE, ITS_SIZE)


@contextmanager
def only_deterministic(wanted: bool, checkpoints: Path) -> Iterator[None]:
    """Inside the block torch is deterministic, where that is `wanted`; afterwards it is set as before.

    Raises TrainingFailed for an operation that cannot be. `checkpoints` is named in the message.
    """
    if not wanted:
        yield
        return
    fix_workspace(wanted)
    cudnn, before = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    chosen = cudnn.deterministic, cudnn.benchmark
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    memory.fill_uninitialized_memory = False  # finds mistakes, and costs time
    try:
        yield
    except RuntimeError as error:
        if LACKING not in str(error) and WORKSPACE not in str(error):
            raise
        what = str(error).partition(LACKING)[0].strip() if LACKING in str(error) else "cuBLAS"
        raise TrainingFailed(
            Problem(
                "not_deterministic",
                f"{what} is not deterministic, and train.deterministic allows nothing else.",
                f"{resume_hint(checkpoints)} Set train.deterministic=false, or hardware.attention_backend=math where "
                "attention is meant.",
            )
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
        cudnn.deterministic, cudnn.benchmark = chosen
        memory.fill_uninitialized_memory = filled
