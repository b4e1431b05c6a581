"""Stable Diffusion XL: two CLIP text encoders, a U-Net with time ids of sizes and crop (arXiv:2307.01952)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.autoencoder import drawing_vae, load_whole_image_encoder, vae_dtype
from lora_trainer.models.clip import LAST_BUT_ONE, check_clip, encode_clip
from lora_trainer.models.encoders import encoders_from
from lora_trainer.models.family import (
    PLAIN,
    Caption,
    CheckpointSpec,
    DenoiserSpec,
    Family,
    LoraFileSpec,
    ModelFacts,
    PipelineSpec,
    TextOptions,
    TextParts,
    TextSpec,
)
from lora_trainer.models.folder import fingerprint, read_config
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.noise_schedule import make_process, make_scheduler, sampling_defaults
from lora_trainer.models.single.stored import USE_BASE, SingleFile
from lora_trainer.models.single.unet import CLASSES, MARK, read_unet, reads_text_of, unet_part
from lora_trainer.models.unet import (
    CLIP_TARGETS,
    CLIP_TOKENS,
    LORA_READERS,
    LORA_TARGETS,
    PASSED_OVER,
    SD2_TEXT_WIDTH,
    THINNESS,
    load_tokenizer,
    load_unet,
    make_denoiser,
    refuse_other_texts,
    thin,
    unet_facts,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
STEPS = 30  # of sampling
REFINER_TEXT_WIDTH = 1280
SIZE_NUMBERS = 6  # original height, width, crop top, left, target height, width


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    facts = unet_facts(folder, "sdxl", TEXT_ENCODERS)
    unet = read_config(folder, "unet/config.json")
    kind = unet.get("addition_embed_type")
    if kind != "text_time":
        raise UsageError(
            Problem(
                "model_unsupported",
                f"{folder}: the U-Net takes no pooled text and sizes ({kind}).",
                "Use a base model of SDXL 1.0.",
            )
        )
    refuse_other_texts(folder, TEXT_ENCODERS)
    takes = unet.get("projection_class_embeddings_input_dim")
    gives = read_config(folder, f"{TEXT_ENCODERS[1]}/config.json").get("projection_dim") or 0
    if takes != (provided := SIZE_NUMBERS * unet.get("addition_time_embed_dim", 0) + gives):
        message = f"{folder}: the U-Net takes a summary with sizes {takes} wide, {TEXT_ENCODERS[1]} gives {provided}."
        raise UsageError(Problem("model_config_invalid", message, "Use the text encoders that the model came with."))
    return facts


def encoder_keys(folder: Path, dtype: torch.dtype, text: TextOptions = PLAIN, /) -> tuple[str, str]:
    """Names of the image and the text encoders' weights, without loading them."""
    texts = fingerprint(folder, "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return f"{fingerprint(folder, 'vae')}-{vae_dtype(folder, dtype)}", f"{texts}-{dtype}{text.key}"


def load_texts(
    folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
) -> TextParts:
    """Both text encoders, frozen, on the device, and their tokenizers."""
    encoders = load_text_encoders(folder, dtype, device)
    return TextParts(encoders, {name: load_tokenizer(folder, name) for name in encoders})


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, 77 for each chunk, D], both encoders' last state but one, or another layer's, side by side;
    `pooled` [B, P], the second one's projected summary of the first chunk.
    """
    import torch

    outputs = [encode_clip(parts, name, captions, options, own=LAST_BUT_ONE, normed=False) for name in TEXT_ENCODERS]
    return {"embeds": torch.cat([each.states for each in outputs], dim=-1), "pooled": outputs[-1].pooled}


def check_text(folder: Path, options: TextOptions) -> None:
    check_clip(folder, TEXT_ENCODERS, options)


def load_text_encoders(folder: Path, dtype: torch.dtype | None, device: torch.device) -> dict[str, Any]:
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    kinds = dict(zip(TEXT_ENCODERS, (CLIPTextModel, CLIPTextModelWithProjection), strict=True))
    return {name: load_frozen(kind, folder / name, dtype, device) for name, kind in kinds.items()}


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The U-Net's prediction [B, 4, h, w] at t [B] under cond["embeds"] [B, L, D], cond["pooled"] [B, P].

    `sizes` [B, 6] are the model's time ids; they stay in fp32, since bf16 would turn 1023 into 1024.
    """
    added = {"text_embeds": cond["pooled"], "time_ids": sizes}
    return cast("Tensor", denoiser(noisy, t, cond["embeds"], added_cond_kwargs=added, return_dict=False)[0])


def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' pipeline of the base model, for generating images."""
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline(
        vae=drawing_vae(folder, dtype, device),
        **load_text_encoders(folder, dtype, device),
        tokenizer=load_tokenizer(folder, "text_encoder"),
        tokenizer_2=load_tokenizer(folder, "text_encoder_2"),
        unet=load_unet(folder, dtype, device),
        scheduler=make_scheduler(folder),
        force_zeros_for_empty_prompt=False,  # an empty prompt is encoded, as in training, ComfyUI and A1111
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    sizes = SIZE_NUMBERS * int(config["addition_time_embed_dim"])
    pooled = int(config["projection_class_embeddings_input_dim"]) - sizes
    return {"embeds": (CLIP_TOKENS * text.chunks, int(config["cross_attention_dim"])), "pooled": (pooled,)}


def read_checkpoint(found: SingleFile) -> SingleFile:
    """Raises UsageError for the refiner, and for unCLIP models, which have this input, too."""
    found_unet, file = read_unet(found), found.file
    if reads_text_of(found.denoiser, SD2_TEXT_WIDTH):
        raise UsageError(Problem("model_unsupported", f"{file} is an unCLIP model, which reads images, too.", USE_BASE))
    has_one_encoder = "conditioner.embedders.0.model.text_projection" in found.header
    if has_one_encoder or reads_text_of(found.denoiser, REFINER_TEXT_WIDTH):
        raise UsageError(Problem("model_unsupported", f"{file} is the refiner of SDXL.", "Use the base model of SDXL."))
    return found_unet


def base_names(facts: ModelFacts) -> tuple[str, str]:
    """The same names for models that predict velocity: programs detect these by `modelspec.prediction_type`."""
    return "sdxl_base_v1-0", "stable-diffusion-xl-v1-base/lora"


TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    targets=dict.fromkeys(TEXT_ENCODERS, CLIP_TARGETS),
    check=check_text,
)
FAMILY = Family(
    name="sdxl",
    read_facts=describe,
    denoiser=DenoiserSpec(
        component="unet",
        load=load_unet,
        make=make_denoiser,
        make_process=make_process,
        predict=predict,
        lora_targets=LORA_TARGETS,
        thin=thin,
        thinness=THINNESS,
    ),
    encoders=encoders_from(load_whole_image_encoder, TEXT, encoder_keys),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name="StableDiffusionXLPipeline",
        make=make_pipeline,
        sampling_defaults=partial(sampling_defaults, steps=STEPS),
    ),
    lora_files=LoraFileSpec(
        base_names=base_names,
        prefixes={"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"},
        readers=(*LORA_READERS, "diffusers: kohya, first code", "sd-scripts: kohya, first code"),
        passed_over={"sd-scripts": (*PASSED_OVER["sd-scripts"], "text_projection")},
        needs_beside={"sd-scripts": ("down_blocks.", "up_blocks.")},  # without any it translates no name
    ),
    checkpoint=CheckpointSpec(
        mark=MARK,
        denoiser=partial(unet_part, family="sdxl"),
        fits=lambda stored: CLASSES in stored.shapes,
        read=read_checkpoint,
    ),
)
