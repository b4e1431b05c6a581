"""Finds the image encoder of `gates.encoder`: a folder on this disk, or a model of a hub. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.folder import without_weights
from lora_trainer.models.vision_encoder import SETTING, EncoderFolder, check_vision_encoder
from lora_trainer.run.bases.find import on_stderr
from lora_trainer.run.bases.hub_files import ENCODER
from lora_trainer.run.bases.names import as_hub_part, local_path, page_of_the_web

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config


def find_encoder(
    config: Config, *, weights: bool = True, say: Callable[[str], None] = on_stderr
) -> EncoderFolder | None:
    """The encoder by which the verdict also compares images; None without one.

    Without `weights` only configs are downloaded. Raises UsageError for what is no image encoder, here or on the hub.
    """
    named = config.gates.encoder
    if not named:
        return None
    if page := page_of_the_web(named, SETTING):
        raise UsageError(page)
    hub = as_hub_part(named, (ENCODER,), SETTING)
    if hub is None:
        found = EncoderFolder(local_path(named), named)
    elif hub.file is not None:
        raise UsageError(
            Problem("encoder_missing", f"{SETTING}: {named} is one file.", f"Set it to the whole model: {hub.name}.")
        )
    else:
        from lora_trainer.run.bases.hub import find_snapshot

        snapshot = find_snapshot(hub, weights=weights, without_t5=False, offline=config.run.offline, say=say)
        found = EncoderFolder(snapshot.folder, f"{hub.name}@{snapshot.commit}")
        weights = snapshot.whole
    with contextlib.nullcontext() if weights or hub is None else without_weights():
        check_vision_encoder(found.path)
    return found
