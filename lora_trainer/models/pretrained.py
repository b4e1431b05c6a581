"""Models of transformers in a folder, each by its own config: safetensors only, no network, no code of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError, is_out_of_memory
from lora_trainer.models.frozen import check_size, refuse_lacking

if TYPE_CHECKING:
    import torch

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # without the latter it asks


def load_pretrained(kind: Any, folder: Path, device: torch.device, stored_numbers: int, config: Any = None) -> Any:
    """A model with all of its weights, in eval mode. `kind` is a class such as AutoModel.

    `config` is that of the part to load, in place of the folder's own. Raises UsageError when the files, with
    `stored_numbers` numbers, lack weights.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, **LOCAL) if config is None else config
    check_size(lambda: kind.from_config(config, trust_remote_code=False), stored_numbers, folder)
    with without_progress_bars():
        model, found = kind.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, **LOCAL
        )
    refuse_lacking(folder, found["missing_keys"])
    return model.to(device).eval()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Without transformers' bar for each file inside the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def explaining_folder(folder: Path, architectures: Sequence[Any], expected: str) -> Iterator[None]:
    """Errors of transformers about a folder as UsageError, with `expected` as the fix."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # transformers raises every kind for a folder that is not what it expects
        if is_out_of_memory(error):
            raise
        named = str(architectures[0]) if architectures else "a model without a name"
        if "trust_remote_code" in str(error):
            message = f"{folder} ({named}) works only with Python code of its own, which is never run."
            raise UsageError(
                Problem("model_has_code", message, "Name a model that transformers knows by itself.")
            ) from error
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            Problem("model_not_loaded", f"{folder} ({named}) cannot be loaded: {reason}.", expected)
        ) from error
