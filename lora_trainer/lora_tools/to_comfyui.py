"""A file with magnitudes for ComfyUI, which divides by the norm of the base model's weight alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.convert import EARLIER, OF_ONE_FORM, SourceFile
from lora_trainer.lora_format.kinds import REWRITTEN
from lora_trainer.lora_format.layer_updates import titles
from lora_trainer.lora_format.metadata import with_hashes
from lora_trainer.lora_format.weights import AdapterWeights
from lora_trainer.lora_format.writing import plain_forms, write_tensors
from lora_trainer.lora_tools.base_layers import read_base_of
from lora_trainer.models.lora_names import names_for


@dataclass(frozen=True)
class ForComfyui:
    """What was written: the layers with new magnitudes, and the most by which ComfyUI computed one of their changes otherwise."""

    layers: int
    difference_before: float


def to_comfyui(
    source: Path, file: SourceFile, target: Path, base: Path, header: Mapping[str, str], family: str | None = None
) -> ForComfyui:
    """Write changes with magnitudes of outputs so that ComfyUI computes the same change, at every strength.

    ComfyUI computes m (W + D) / |W|, LyCORIS and diffusers m (W + D) / |W + D| (arXiv:2402.09353, equation 5). So m |W| / |W + D| is
    stored, and the header says so: this program reads the file as it was meant. `base` is the base model, a checkpoint or a
    diffusers folder, whose layers are read one after the other. Raises UsageError where no layer needs it, and for a base model that
    the file does not fit.
    """
    weights = file.weights
    named = {name: update for name, update in weights.modules.items() if update.in_comfyui is not update}
    if not named:
        kinds = titles(list(weights.modules.values()))
        message = f"{source.name} is {kinds}, without magnitudes of outputs that ComfyUI computes differently."
        raise UsageError(Problem("no_magnitudes", message, "Use it in ComfyUI as it is, or --to kohya."))
    layers = read_base_of(source.name, weights, base)
    modules, difference = dict(weights.modules), 0.0
    with layers.opened() as read:
        for name, update in named.items():
            weight = read(name)
            modules[name] = update.for_comfyui(weight)
            change = update.delta(weight)
            missed = (update.in_comfyui.delta(weight) - change).norm() / change.norm().clamp_min(1e-12)
            difference = max(difference, float(missed))
    found = AdapterWeights(modules, weights.metadata, weights.embeddings, weights.family or layers.family)
    tensors = plain_forms(found, names_for(source, found, family, file.numbered))[0].tensors
    kept = {key: value for key, value in header.items() if key not in (*OF_ONE_FORM, EARLIER)}
    write_tensors(target, tensors, with_hashes(tensors, {**kept, **REWRITTEN}))
    return ForComfyui(len(named), difference)
