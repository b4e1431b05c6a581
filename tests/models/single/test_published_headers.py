"""Headers of published files, from sources of their own: recognized, and every key read exactly once.

The other tests turn diffusers' models into the original layout by our own tables. These lists come from the models' first
code or from listings of the files; each names its source. Nothing is stored in a file but its header.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AnimaTextConditioner,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    SD3Transformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from lora_trainer.core.tensorfile import BITS, data_begins, read_tensor_header
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.anima import conditioner_part
from lora_trainer.models.places import Place, stored_weights
from lora_trainer.models.published import public_architecture, public_forms
from lora_trainer.models.single.lay_out import vae_of_file
from lora_trainer.models.single.recognize import recognize
from lora_trainer.models.single.stored import Part, Stored
from lora_trainer.models.single.texts import kind_of_file, text_part
from lora_trainer.models.single.vae import vae_part

UNREAD = (".comfy_quant", "scaled_fp8", ".input_scale", ".scale_input")
HEADERS = Path(__file__).parent / "published_headers"
RANGE = re.compile(r"\{([\d,-]+)\}")
Listed = dict[str, tuple[list[int], str]]


def listed(name: str) -> Listed:
    """Shape and type of each tensor. A line has a name, whose numbers may be ranges, and both; `-` is a shape without sides."""
    found: Listed = {}
    for line in (HEADERS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        pattern, shape, dtype = line.split()
        parts = RANGE.split(pattern)
        choices = [numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        for each in itertools.product(*choices):
            found["".join(each)] = ([int(side) for side in shape.split("x") if side != "-"], dtype)
    return found


def numbers(ranges: str) -> list[str]:
    """`0-2,5` as 0, 1, 2, 5."""
    pairs = [each.partition("-")[::2] for each in ranges.split(",")]
    return [str(number) for first, last in pairs for number in range(int(first), int(last or first) + 1)]


def sparse(path: Path, tensors: Listed, values: Collection[bytes] = ()) -> Path:
    """A file with this header, and zeros as its data; each `comfy_quant` holds that of the `values` which has its length."""
    header, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    with open(path, "r+b") as file:
        for name, entry in header.items():
            if name.endswith(".comfy_quant"):
                file.seek(data_begins(path) + entry["data_offsets"][0])
                size = entry["data_offsets"][1] - entry["data_offsets"][0]
                file.write(next(each for each in values if len(each) == size))
    return path


DENOISERS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "flux-dev": ("flux", "dev", 780, {"guidance_embeds": True, "num_layers": 19, "num_single_layers": 38}),
    "flux-schnell": ("flux", "schnell", 776, {"guidance_embeds": False, "num_layers": 19}),
    "flux-dev-kontext": ("flux", "kontext", 780, {"guidance_embeds": True, "in_channels": 64}),
    "flux-dev-int8-convrot": ("flux", "dev", 1312, {"guidance_embeds": True, "joint_attention_dim": 4096}),
    "flux2-klein-4b": ("flux2", "distilled", 149, dict(public_forms("flux2")[0])),
    "flux2-klein-base-4b": ("flux2", "base", 149, dict(public_forms("flux2")[0])),
    "flux2-klein-9b": ("flux2", "distilled", 201, public_forms("flux2")[1]),
    "chroma": ("chroma", "", 643, dict(public_architecture("chroma").denoiser)),
    "flux-dev-fp8-scaled": ("flux", "dev", 1409, {"guidance_embeds": True, "joint_attention_dim": 4096}),
    "flux2-klein-4b-fp8": ("flux2", "distilled", 309, dict(public_forms("flux2")[0])),
    "flux2-klein-9b-int8": ("flux2", "distilled", 425, public_forms("flux2")[1]),
    "krea2-turbo-int8-convrot": ("krea2", "turbo", 878, dict(public_architecture("krea2").denoiser)),
    "anima-fp8": ("anima", "", 1524, dict(public_architecture("anima").denoiser)),
    "qwen_image_edit_bf16": ("qwen_image", "edit", 1933, dict(public_architecture("qwen_image").denoiser)),
    "qwen_image_edit_2509_bf16": ("qwen_image", "edit-2509", 1933, dict(public_architecture("qwen_image").denoiser)),
    "qwen_image_edit_2511_bf16": ("qwen_image", "edit-2511", 1934, dict(public_architecture("qwen_image").denoiser)),
    "qwen-image": ("qwen_image", "base", 1933, dict(public_architecture("qwen_image").denoiser)),
    "qwen_image_2.1": ("qwen_image21", "base", 265, dict(public_architecture("qwen_image21").denoiser)),
    "qwen-image-2.1-turbo": ("qwen_image21", "turbo", 265, {"num_layers": 32}),
    "krea2": ("krea2", "base", 430, dict(public_architecture("krea2").denoiser)),
    "krea2-turbo": ("krea2", "turbo", 430, dict(public_architecture("krea2").denoiser)),
    "anima": ("anima", "", 685, dict(public_architecture("anima").denoiser)),
    "sd3.5-medium": ("sd3", "", 665, {"dual_attention_layers": [*range(13)], "qk_norm": "rms_norm", "num_layers": 24}),
    "sd15": ("sd15", "", 686, {"block_out_channels": [320, 640, 1280, 1280], "cross_attention_dim": 768}),
    "sdxl": ("sdxl", "", 1680, {"transformer_layers_per_block": [1, 2, 10], "projection_class_embeddings_input_dim": 2816}),
    "z-image-turbo": ("z_image", "turbo", 453, {"n_layers": 30, "n_refiner_layers": 2, "cap_feat_dim": 2560, "dim": 3840}),
    "z-image-turbo-fp8-scaled": ("z_image", "turbo", 662, {"n_layers": 30, "n_heads": 30}),
}  # fmt: skip
# Models whose files differ from another's in their values and names alone.
SAME = {
    **dict.fromkeys(("qwen_image_2.1", "qwen-image-2.1-turbo"), "qwen-image-2.1"),
    "flux-dev-kontext": "flux-dev",
    "flux2-klein-base-4b": "flux2-klein-4b",
    "krea2-turbo": "krea2",
    # Named as Comfy-Org publishes them. musubi-tuner at 30c658c builds all from one class, and drops the mark of 2511 which ComfyUI's
    # files add (its pull request 11362); a converter of them has met it as a number without sides.
    **dict.fromkeys((f"qwen_image_edit{name}_bf16" for name in ("", "_2509", "_2511")), "qwen-image"),
}
MARKS: dict[str, Listed] = {"qwen_image_edit_2511_bf16": {"__index_timestep_zero__": ([], "F32")}}
FORMS = {
    **dict.fromkeys(("flux-dev-int8-convrot", "krea2-turbo-int8-convrot"), "int8 rotated with scales"),
    "flux2-klein-9b-int8": "int8 with scales",
    **dict.fromkeys(("flux-dev-fp8-scaled", "flux2-klein-4b-fp8", "anima-fp8"), "fp8 e4m3 with scales"),
    "z-image-turbo-fp8-scaled": "fp8 e4m3 with scales",
}
VALUES = (
    b'{"format": "int8_tensorwise", "per_row": true, "convrot": true, "convrot_groupsize": 256}',
    b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}',
    b'{"format": "int8_tensorwise"}',
    b'{"format": "float8_e4m3fn", "full_precision_matrix_mult": false}',
    b'{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}',
)


@pytest.mark.parametrize("name", DENOISERS)
def test_every_key_of_a_published_denoiser_is_read_once(name: str, tmp_path: Path) -> None:
    family, variant, count, facts = DENOISERS[name]
    tensors = listed(SAME.get(name, name)) | MARKS.get(name, {})
    assert len(tensors) == count
    file = sparse(tmp_path / f"{name}.safetensors", tensors, VALUES)
    found = recognize(file)
    assert (found.family, found.variant, found.form) == (family, variant, FORMS.get(name, ""))
    part = FAMILIES[family].checkpoint.denoiser(found.denoiser)
    assert facts.items() <= {key: value for key, value in part.config.items() if key in facts}.items()
    with torch.device("meta"):
        # SD3's own `make` keeps the middle of the positions alone.
        make = SD3Transformer2DModel.from_config if family == "sd3" else FAMILIES[family].denoiser.make
        parts = [(part, make(dict(part.config)))]
        if family == "anima":
            beside = conditioner_part(found.denoiser)
            parts.append((beside, AnimaTextConditioner.from_config(dict(beside.config))))
    covered(parts, {key: each for key, each in tensors.items() if key not in MARKS.get(name, {})})
    scaled = [place.scaled for place in part.places.values() if place.scaled is not None]
    assert {each.rotated for each in scaled} <= {256 if "rotated" in FORMS.get(name, "") else 0}
    assert bool(scaled) == (name in FORMS)


VAES: dict[str, tuple[type[Any], int, dict[str, Any]]] = {
    "vae": (AutoencoderKL, 4, {"block_out_channels": [128, 256, 512, 512]}),
    "flux-ae": (AutoencoderKL, 16, {"block_out_channels": [128, 256, 512, 512]}),
    "flux2-ae": (AutoencoderKLFlux2, 32, {"block_out_channels": [128, 256, 512, 512]}),
    "flux2-vae": (AutoencoderKLFlux2, 32, {"block_out_channels": [128, 256, 512, 512]}),
    "qwen-image-vae": (AutoencoderKLQwenImage, 16, {"base_dim": 96, "dim_mult": [1, 2, 4, 4]}),
}


@pytest.mark.parametrize("name", VAES)
def test_every_key_of_a_published_vae_is_read_once(name: str, tmp_path: Path) -> None:
    kind, channels, facts = VAES[name]
    tensors = listed(name)
    file = sparse(tmp_path / "vae.safetensors", tensors)
    part = vae_of_file(file, {})
    assert part.config["z_dim" if "base_dim" in facts else "latent_channels"] == channels
    assert facts.items() <= dict(part.config).items()
    with torch.device("meta"):
        model = kind.from_config(dict(part.config))
    covered([(part, model)], tensors)
    prefix = "first_stage_model." if name == "vae" else ""
    if name != "qwen-image-vae":
        assert vae_part(Stored.of(file, read_tensor_header(file), prefix), {}).places == part.places


def test_every_key_of_a_published_text_encoder_that_sees_is_read_once(tmp_path: Path) -> None:
    """But the output head, which makes words."""
    tensors = listed("qwen2.5-vl-7b-fp8-scaled")
    assert len(tensors) == 1446
    file = sparse(tmp_path / "qwen_2.5_vl_7b_fp8_scaled.safetensors", tensors)
    stored = Stored.of(file, read_tensor_header(file), "")
    assert kind_of_file(stored) == "qwen2_5_vl"
    part = text_part("qwen2_5_vl", stored, sees=True)
    assert all(
        (place.scaled is None) == (f"{place.key[:-6]}scale_weight" not in tensors) for place in part.places.values()
    )
    with torch.device("meta"):
        model = Qwen2_5_VLModel(Qwen2_5_VLConfig(**part.config))
    del tensors["lm_head.weight"]
    covered([(part, model)], tensors)
    # An image of a million pixels is read in windows, but for four blocks of 32; these numbers are in no file.
    ours, usual = part.config["vision_config"], Qwen2_5_VLConfig().vision_config
    assert ours["fullatt_block_indexes"] == [*usual.fullatt_block_indexes]
    for key in ("depth", "window_size", "spatial_merge_size", "num_heads", "temporal_patch_size"):
        assert ours[key] == getattr(usual, key)


def covered(parts: list[tuple[Part, torch.nn.Module]], tensors: Listed) -> None:
    """Each weight of diffusers' models has its shape, and each row of each stored tensor is in one weight.

    Krea 2's tables are stored as one row, which loading divides.
    """
    read: dict[str, list[Place]] = defaultdict(list)
    for part, model in parts:
        stored = {key: tuple(each["shape"]) for key, each in stored_weights(part.places).items()}
        shapes = {
            key: (each.numel(),) if key.endswith("scale_shift_table") and len(stored[key]) == 1 else tuple(each.shape)
            for key, each in model.state_dict().items()
        }
        shapes = {key.removeprefix("language_model."): each for key, each in shapes.items()}
        assert stored == shapes
        for place in part.places.values():
            read[place.key].append(place)
    places = [place for part, _ in parts for place in part.places.values()]
    scales = {place.scaled.key for place in places if place.scaled is not None}
    companions = scales | {key for key in tensors if key.endswith(UNREAD)}
    assert read.keys() | companions == tensors.keys()
    assert not read.keys() & companions
    for key, places in read.items():
        rows = tensors[key][0][0] if tensors[key][0] else 1
        spans = sorted(span for place in places for span in place.rows or ((0, rows),))
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])], key
        assert spans[-1][1] == rows, key
