"""Recognize a `.safetensors` or GGUF file by its header: a model's family and variant, or why it is no base model. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.families import titles
from lora_trainer.core.gguf_file import read_weights_header
from lora_trainer.core.tensorfile import METADATA
from lora_trainer.lora_format.kinds import KINDS
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import refuse_quantized
from lora_trainer.models.single.scaled import values_of_formats
from lora_trainer.models.single.stored import USE_BASE, SingleFile, Stored, refuse_not_read, stored_form

if TYPE_CHECKING:
    from lora_trainer.models.family import CheckpointSpec

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "")
MOST_SPANS = 64  # of formats; they lie together in files that safetensors wrote
# Ends of names, and what such a file is. The first that is found counts.
OTHER_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("lora_down.weight", "lora_A.weight", "lora_up.weight", "lora_A.default.weight"),
        "a LoRA",
    ),
    (  # before peft
        ("lora.down.weight", "lora1.down.weight", "lora_linear_layer.down.weight", ":0:down"),
        "a LoRA",
    ),
    (
        (
            *(f".{end}" for kind in KINDS.values() if kind.ends for end in kind.counted_by or kind.parts),
            "oft_diag",
            "oft_R.weight",
        ),
        "a LoRA of another kind",
    ),
    (
        ("input_hint_block.0.weight", "controlnet_cond_embedding.conv_in.weight", "controlnet_blocks.0.weight"),
        "a ControlNet",
    ),
    (("image_proj.proj.weight", "image_proj.latents"), "an IP-Adapter"),
    (("emb_params", "string_to_param"), "an embedding of words"),
)
DIFFUSERS = (
    "down_blocks.0.resnets.0.norm1.weight",
    "transformer_blocks.0.attn.to_q.weight",
    "all_x_embedder.2-1.weight",
)
LATER_KINDS = (
    (("encoder.conv_in.weight", "decoder.conv_in.weight", "decoder.head.0.gamma"), "a VAE", "Name it as model.vae, beside a base model."),
    (
        ("token_embedding.weight", "text_model.final_layer_norm.weight", "layer.0.SelfAttention.q.weight", "embed_tokens.weight"),
        "a text encoder",
        "Put it into the folder that model.text_encoders names, beside a base model.",
    ),
)  # fmt: skip


def recognize(file: Path, variant: str | None = None, prediction: str | None = None) -> SingleFile:
    """Family and variant of a checkpoint, from its header alone; `variant` and `prediction` are set by the user.

    Raises UsageError for a file that is damaged or a pickle, for models that cannot be trained, and for files that
    hold something else, naming what.
    """
    header = read_weights_header(file)
    names = [name for name in header if name != METADATA]
    for endings, kind in OTHER_KINDS:
        if any(name.endswith(endings) for name in names):
            raise UsageError(Problem("not_a_base_model", f"{file} is {kind}, no base model.", USE_BASE))
    for prefix in PREFIXES:
        marked = [(name, spec) for name, spec in checkpoints() if prefix + spec.mark in header]
        if not marked:
            continue
        denoiser = Stored.of(file, header, prefix) if prefix else _own(Stored.of(file, header, prefix))
        refuse_not_read(denoiser)
        for name, spec in marked:
            if spec.fits(denoiser):
                found = spec.read(SingleFile(file, name, denoiser, header, form=stored_form(denoiser)))
                return _of_prediction(_of_variant(found, variant), prediction)
    refuse_quantized(file, {name: header[name]["dtype"] for name in names})
    raise UsageError(_unknown(file, names))


def checkpoints() -> Iterator[tuple[str, CheckpointSpec]]:
    """The families whose single files are read, by name."""
    for name, family in FAMILIES.items():
        if family.checkpoint is not None:
            yield name, family.checkpoint


def _of_variant(found: SingleFile, variant: str | None) -> SingleFile:
    """The checkpoint with the user's variant. Raises UsageError where keys decide, or its family has no such model."""
    if variant is None:
        return found
    if variant not in found.flavors:
        message = f"model.flavor = {variant}: the keys of {found.file} already decide it."
        if len(found.flavors) > 1:
            message = f"model.flavor = {variant}: {found.file} may be {' or '.join(found.flavors)}."
        fix = f"Set {found.flavors[0]}." if found.flavors else "Remove model.flavor."
        raise UsageError(Problem("flavor_ambiguous", message, fix))
    return replace(found, variant=variant, note="")


def _of_prediction(found: SingleFile, prediction: str | None) -> SingleFile:
    """The checkpoint with the user's prediction type. Raises UsageError for a flow, which has none."""
    if prediction is None:
        return found
    if found.prediction is None:
        message = f"model.prediction_type = {prediction}: {found.file} is a flow model, which has one prediction type."
        raise UsageError(Problem("prediction_not_for_flow", message, "Remove model.prediction_type."))
    zero_terminal = prediction == "v_prediction" and "ztsnr" in found.header
    by = "model.prediction_type" + (" and its key ztsnr" if zero_terminal else "")
    return replace(found, prediction=prediction, prediction_by=by, zero_terminal=zero_terminal)


def values_read(header: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Spans in a file's data of the few values that `recognize` reads besides the header: first byte, byte after the last."""
    endings = tuple(ending for _, spec in checkpoints() for ending in spec.values)
    numbers = [tuple(entry["data_offsets"]) for name, entry in header.items() if name.endswith(endings)]
    return [*numbers, *values_of_formats(header)[:MOST_SPANS]]


def _own(denoiser: Stored) -> Stored:
    """The tensors of a bare transformer's file that belong to no other part."""
    others = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.", "model_ema.")
    shapes = {name: shape for name, shape in denoiser.shapes.items() if not name.startswith(others)}
    return replace(
        denoiser,
        shapes=shapes,
        types={name: kind for name, kind in denoiser.types.items() if name in shapes},
        scaled={name: how for name, how in denoiser.scaled.items() if name in shapes},
    )


def _unknown(file: Path, names: list[str]) -> Problem:
    """The problem of a file that is no checkpoint, naming what it is where that is known."""
    if any(name.endswith(DIFFUSERS) for name in names):
        message = f"{file} holds one part of a model, by diffusers' names."
        return Problem("one_part_of_model", message, "Name the folder that holds all parts, with model_index.json.")
    for endings, kind, fix in LATER_KINDS:
        if any(name.endswith(endings) for name in names):
            return Problem("not_a_base_model", f"{file} is {kind}, no base model.", fix)
    seen = ", ".join(sorted(names)[:3])[:200] or "nothing"
    return Problem(
        "architecture_unknown",
        f"{file} is of no known architecture: it holds {seen}.",
        f"What can be read: {titles()}.",
    )
