"""Recognize a `.safetensors` or GGUF file by its header: a model's family and variant, or why it is no base model. No torch."""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.gguf_file import read_weights_header
from lora_trainer.core.tensorfile import METADATA, data_begins
from lora_trainer.models.folder import refuse_quantized
from lora_trainer.models.single.scaled import values_of_formats
from lora_trainer.models.single.stored import Stored, refuse_not_read, stored_form

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "")
USE_BASE = "Name a base model with --model: a checkpoint, a folder in diffusers' layout or a hub id."
SD2_TEXT_WIDTH, REFINER_TEXT_WIDTH = 1024, 1280
UNUSUAL_CHANNELS = {5: "a depth model", 7: "an upscaler", 8: "a model of instructions", 9: "an inpainting model"}
# This norm spreads more in 2.x models that predict velocity than in those that predict noise (ComfyUI uses it, too).
SD2_NORM, SD2_SPREAD = "output_blocks.11.1.transformer_blocks.0.norm1.bias", 0.09
KONTEXT = "kontext"
ZERO_FOR_CONTROLS = "__index_timestep_zero__"  # an empty tensor that marks Qwen-Image-Edit 2511 in ComfyUI's files
QWEN_IMAGES = ("base", "edit", "edit-2509", "edit-2511")
# Models with the same keys, by the family and the variant that is assumed where the user says nothing.
OF_ONE_FORM = {
    **dict.fromkeys((("z_image", "turbo"), ("krea2", "base"), ("krea2", "turbo")), ("base", "turbo")),
    **dict.fromkeys((("qwen_image21", "base"), ("qwen_image21", "turbo")), ("base", "turbo")),
    **dict.fromkeys((("flux", "dev"), ("flux", KONTEXT)), ("dev", KONTEXT)),
    **dict.fromkeys((("flux2", "base"), ("flux2", "distilled")), ("base", "distilled")),
    **{("qwen_image", name): QWEN_IMAGES for name in QWEN_IMAGES},
}
MOST_SPANS = 64  # of formats; they lie together in files that safetensors wrote
FIRST_OF_FLUX = 64  # input channels of the plain model: 16 of latents, of four places
# Ends of names, and what such a file is. The first that is found counts.
OTHER_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("lora_down.weight", "lora_A.weight", "lora_up.weight", "lora_A.default.weight", "hada_w1_a"),
        "a LoRA",
    ),
    (  # before peft
        ("lora.down.weight", "lora1.down.weight", "lora_linear_layer.down.weight", ":0:down"),
        "a LoRA",
    ),
    (
        ("lokr_w1", "lokr_w1_a", "oft_blocks", "oft_diag", "dora_scale", ".diff", "oft_R.weight"),
        "a LoRA of another kind",
    ),
    (
        ("input_hint_block.0.weight", "controlnet_cond_embedding.conv_in.weight", "controlnet_blocks.0.weight"),
        "a ControlNet",
    ),
    (("image_proj.proj.weight", "image_proj.latents"), "an IP-Adapter"),
    (("emb_params", "string_to_param"), "an embedding of words"),
)
TITLE, PREDICTION = "modelspec.title", "modelspec.prediction_type"
LONGEST_TITLE = 200  # characters that are read
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


@dataclass(frozen=True)
class SingleFile:
    """A base model in one file. `denoiser` holds its tensors; `header` is that of the file."""

    file: Path
    family: str
    denoiser: Stored
    header: Mapping[str, Any]
    prediction: str | None = None  # of models with a noise schedule
    prediction_by: str = ""  # what in the file shows the prediction, for people
    zero_terminal: bool = False  # the last step of the schedule holds no signal
    variant: str = ""  # which of the models of one form, where that is another schedule
    note: str = ""  # an assumption that the file does not confirm, and the fix if it is wrong
    form: str = ""  # in which quantized form the denoiser is stored, for people

    @property
    def title(self) -> str:
        """What the file's metadata calls the model (ModelSpec); empty where it has none."""
        return str((self.header.get(METADATA) or {}).get(TITLE, ""))[:LONGEST_TITLE]

    def part(self, prefix: str) -> Stored:
        """The tensors of one part."""
        return Stored.of(self.file, self.header, prefix)


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
        for first, known in KNOWN.items():
            if prefix + first in header:
                denoiser = Stored.of(file, header, prefix) if prefix else _own(Stored.of(file, header, prefix))
                refuse_not_read(denoiser)
                found = replace(known(SingleFile(file, "", denoiser, header)), form=stored_form(denoiser))
                return _of_prediction(_of_variant(found, variant), prediction)
    refuse_quantized(file, {name: header[name]["dtype"] for name in names})
    raise UsageError(_unknown(file, names))


def _of_variant(found: SingleFile, variant: str | None) -> SingleFile:
    """The checkpoint with the user's variant. Raises UsageError where keys decide, or its family has no such model."""
    if variant is None:
        return found
    marked = ZERO_FOR_CONTROLS in found.denoiser.shapes
    variants = (found.variant,) if marked else OF_ONE_FORM.get((found.family, found.variant), ())
    if variant not in variants:
        message = f"model.flavor = {variant}: the keys of {found.file} already decide it."
        if variants and not marked:
            message = f"model.flavor = {variant}: {found.file} may be {' or '.join(variants)}."
        raise UsageError(
            Problem("flavor_ambiguous", message, "Remove model.flavor." if not variants else f"Set {variants[0]}.")
        )
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
    numbers = [tuple(entry["data_offsets"]) for name, entry in header.items() if name.endswith(SD2_NORM)]
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
    families = (
        "Stable Diffusion 1.x, 2.x, XL, 3 and 3.5, FLUX.1, FLUX.2 klein, Chroma, Z-Image, Qwen-Image, Qwen-Image 2.1, "
        "Krea 2 and Anima"
    )
    return Problem(
        "architecture_unknown",
        f"{file} is of no known architecture: it holds {seen}.",
        f"What can be read: {families}.",
    )


def _unet(found: SingleFile) -> SingleFile:
    """A U-Net: 1.x, 2.x or XL by the width of the text that it reads."""
    stored, file = found.denoiser, found.file
    if any(".time_stack." in name or "motion_modules" in name for name in stored.shapes):
        raise UsageError(Problem("model_unsupported", f"{file} makes videos.", USE_BASE))
    channels = stored.side("input_blocks.0.0.weight", 1)
    if channels in UNUSUAL_CHANNELS:
        message = f"{file} is {UNUSUAL_CHANNELS[channels]}: {channels} input channels in place of 4."
        raise UsageError(Problem("model_unsupported", message, "Use the base model that it was made from."))
    reads = next((name for name in stored.shapes if name.endswith("attn2.to_k.weight")), "attn2.to_k.weight")
    width = stored.side(reads, 1)
    if "label_emb.0.0.weight" not in stored.shapes:
        family = "sd2" if width == SD2_TEXT_WIDTH else "sd15"
    elif width == SD2_TEXT_WIDTH:
        raise UsageError(Problem("model_unsupported", f"{file} is an unCLIP model, which reads images, too.", USE_BASE))
    elif width == REFINER_TEXT_WIDTH or "conditioner.embedders.0.model.text_projection" in found.header:
        raise UsageError(Problem("model_unsupported", f"{file} is the refiner of SDXL.", "Use the base model of SDXL."))
    else:
        family = "sdxl"
    for key in ("edm_mean", "edm_vpred.sigma_max"):
        if key in found.header:
            raise UsageError(
                Problem(
                    "scheduler_unsupported", f"{file} has a noise schedule that is not supported ({key}).", USE_BASE
                )
            )
    prediction = str((found.header.get(METADATA) or {}).get(PREDICTION, ""))
    shown_by = {
        "its key v_pred": "v_pred" in found.header,
        f"its metadata, {PREDICTION} = {prediction}": prediction.lower() in ("v", "v_prediction", "v-prediction"),
        "its weights": family == "sd2" and prediction == "" and _spreads(found),
    }
    velocity = next((by for by, is_shown in shown_by.items() if is_shown), "")
    zero_terminal = bool(velocity) and "ztsnr" in found.header
    return SingleFile(
        file,
        family,
        stored,
        found.header,
        prediction="v_prediction" if velocity else "epsilon",
        prediction_by=velocity + (" and its key ztsnr" if zero_terminal else ""),
        zero_terminal=zero_terminal,
    )


def _spreads(found: SingleFile) -> bool:
    """Whether a 2.x model predicts velocity, by a norm of its last block."""
    if SD2_NORM not in found.denoiser.shapes:
        return False
    entry = found.header[found.denoiser.prefix + SD2_NORM]
    with open(found.file, "rb") as file:
        file.seek(data_begins(found.file) + entry["data_offsets"][0])
        data = file.read(entry["data_offsets"][1] - entry["data_offsets"][0])
    return statistics.pstdev(_numbers(data, entry["dtype"])) > SD2_SPREAD


def _numbers(data: bytes, dtype: str) -> tuple[float, ...]:
    if dtype == "BF16":  # the first half of fp32
        data = b"".join(b"\0\0" + data[place : place + 2] for place in range(0, len(data), 2))
    if dtype == "F8_E5M2":  # the first half of fp16
        dtype, data = "F16", b"".join(bytes((0, each)) for each in data)
    if dtype == "F8_E4M3":
        return tuple(_e4m3(each) for each in data)
    form, size = {"F64": ("d", 8), "F16": ("e", 2)}.get(dtype, ("f", 4))
    return struct.unpack(f"<{len(data) // size}{form}", data)


def _e4m3(stored: int) -> float:
    """One number of a sign, 4 bits of exponent and 3 of fraction (finite ones only)."""
    exponent, fraction = stored >> 3 & 15, stored & 7
    size = math.ldexp(8 + fraction if exponent else fraction, max(exponent, 1) - 10)
    return -size if stored & 128 else size


def _sd3(found: SingleFile) -> SingleFile:
    return SingleFile(found.file, "sd3", found.denoiser, found.header)


def _flux(found: SingleFile) -> SingleFile:
    stored = found.denoiser
    if "single_stream_modulation.lin.weight" in stored.shapes:
        return _flux2(found)
    if "distilled_guidance_layer.in_proj.bias" in stored.shapes and "txt_in.weight" in stored.shapes:
        if "img_in.weight" not in stored.shapes or stored.side("img_in.weight", 1) != FIRST_OF_FLUX:
            message = f"{found.file} is a Chroma model that takes pixels (Radiance), or more than noisy latents."
            raise UsageError(Problem("model_unsupported", message, "Use Chroma1-Base or Chroma1-HD."))
        return SingleFile(found.file, "chroma", stored, found.header)
    if "txt_in.weight" not in stored.shapes or "vector_in.in_layer.weight" not in stored.shapes:
        message = f"{found.file} has FLUX.1's blocks but another text input."
        raise UsageError(Problem("model_unsupported", message, USE_BASE))
    channels = stored.side("img_in.weight", 1)
    if channels > FIRST_OF_FLUX and channels % FIRST_OF_FLUX == 0:
        message = f"{found.file} is a Fill or Control model: {channels} input channels in place of {FIRST_OF_FLUX}."
        raise UsageError(Problem("model_unsupported", message, "Use FLUX.1 dev or schnell."))
    variant = "dev" if "guidance_in.in_layer.weight" in stored.shapes else "schnell"
    if variant == "dev" and KONTEXT in found.file.name.lower():  # as in the published file's name
        variant = KONTEXT
    return SingleFile(found.file, "flux", stored, found.header, variant=variant)


def _flux2(found: SingleFile) -> SingleFile:
    stored, name = found.denoiser, found.file.name.lower()
    if "guidance_in.in_layer.weight" in stored.shapes:
        message = f"{found.file} is FLUX.2 dev, whose text encoder (Mistral Small 3.1) is not supported."
        raise UsageError(
            Problem("model_unsupported", message, "Use FLUX.2 klein, base or distilled, of 4 or 9 billion weights.")
        )
    variant = "base" if "base" in name else "distilled"  # as in the published files' names
    note = f"{found.file.name} is assumed to be distilled (4 steps, no guidance): FLUX.2 klein and its base have the same keys."
    return SingleFile(
        found.file,
        "flux2",
        stored,
        found.header,
        variant=variant,
        note="" if variant == "base" or "klein" in name else f"{note} If it is the base, set model.flavor=base.",
    )


def _z_image(found: SingleFile) -> SingleFile:
    named_turbo = "turbo" in found.file.name.lower()  # as in the published file's name
    note = (
        f"{found.file.name} is assumed to be Z-Image Turbo (9 steps, no guidance): base and Turbo have the same keys."
    )
    fix = "If it is the base, set model.flavor=base."
    return SingleFile(
        found.file,
        "z_image",
        found.denoiser,
        found.header,
        variant="turbo",
        note="" if named_turbo else f"{note} {fix}",
    )


def _qwen_image(found: SingleFile) -> SingleFile:
    """Models that edit have the same keys but for 2511's mark, so the file's name decides which one it is."""
    stored, name = found.denoiser, found.file.name.lower()
    others = {
        "makes images in layers": "time_text_embed.addition_t_embedding.weight" in stored.shapes,
        "lacks layers": "transformer_blocks.0.attn.to_q.weight" not in stored.shapes
        or "transformer_blocks.0.attn.add_q_proj.weight" not in stored.shapes,
    }
    if what := next((what for what, is_so in others.items() if is_so), None):
        message = f"{found.file} {what} by its keys, and such single files are not read."
        raise UsageError(
            Problem(
                "single_file_unsupported", message, "Use Qwen-Image, Qwen-Image 2512, or Qwen-Image-Edit (2509, 2511)."
            )
        )
    if ZERO_FOR_CONTROLS in stored.shapes:
        return SingleFile(found.file, "qwen_image", stored, found.header, variant="edit-2511")
    edits, dated = "edit" in name, next((date for date in ("2509", "2511") if date in name), "")
    variant = "-".join(filter(None, ("edit", dated))) if edits else "base"
    note = (
        f"{found.file.name} is assumed to be {'the first Qwen-Image-Edit' if edits else 'Qwen-Image without control images'}: "
        f"the edit models have the same keys. If it is another one, set model.flavor={'edit-2509' if edits else 'edit'}."
    )
    named = dated if edits else "qwen_image" in name.replace("-", "_")
    return SingleFile(found.file, "qwen_image", stored, found.header, variant=variant, note="" if named else note)


def _qwen_image21(found: SingleFile) -> SingleFile:
    variant, names = "turbo" if "turbo" in found.file.name.lower() else "base", ("turbo", "base", "qwen_image_2.1")
    note = (
        f"{found.file.name} is assumed to be Qwen-Image 2.1, not its Turbo (few steps): both have the same keys. "
        "If it is Turbo, set model.flavor=turbo."
    )
    is_named = any(name in found.file.name.lower().replace("-", "_") for name in names)
    return replace(found, family="qwen_image21", variant=variant, note="" if is_named else note)


def _krea2(found: SingleFile) -> SingleFile:
    name = found.file.name.lower()  # published as raw.safetensors and turbo.safetensors
    note = (
        f"{found.file.name} is assumed to be Krea 2 Raw (28 steps, guidance): Raw and Turbo have the same keys. "
        "If it is Turbo, set model.flavor=turbo."
    )
    variant, is_named = "turbo" if "turbo" in name else "base", any(word in name for word in ("turbo", "raw", "base"))
    return SingleFile(found.file, "krea2", found.denoiser, found.header, variant=variant, note="" if is_named else note)


def _anima(found: SingleFile) -> SingleFile:
    return SingleFile(found.file, "anima", found.denoiser, found.header)


KNOWN: dict[str, Callable[[SingleFile], SingleFile]] = {
    "input_blocks.0.0.weight": _unet,
    "joint_blocks.0.x_block.attn.qkv.weight": _sd3,
    "double_blocks.0.img_attn.qkv.weight": _flux,
    "cap_pad_token": _z_image,
    "txt_norm.weight": _qwen_image,
    "txt_in.text_norm.weight": _qwen_image21,
    "txtfusion.projector.weight": _krea2,
    "llm_adapter.out_proj.weight": _anima,
}
