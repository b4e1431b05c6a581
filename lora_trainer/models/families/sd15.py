"""Stable Diffusion 1.x: one CLIP text encoder, a U-Net on 4-channel latents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.keys import KOHYA_PREFIXES
from lora_trainer.models.autoencoder import image_encoder, load_vae
from lora_trainer.models.clip import LAST, check_clip, encode_clip
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
from lora_trainer.models.folder import fingerprint
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.noise_schedule import make_process, make_scheduler, sampling_defaults
from lora_trainer.models.single.unet import CLASSES, MARK, read_unet, reads_text_of, unet_part
from lora_trainer.models.unet import (
    CLIP_TARGETS,
    CLIP_TOKENS,
    LORA_READERS,
    LORA_TARGETS,
    PASSED_OVER,
    SD2_TEXT_WIDTH,
    THINNESS,
    is_sd2,
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


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    facts = unet_facts(folder, "sd15")
    if is_sd2(folder):
        raise UsageError(
            Problem("family_differs", f"{folder} is a Stable Diffusion 2.x model.", "Leave model.family empty.")
        )
    refuse_other_texts(folder)
    return facts


def encoder_keys(folder: Path, dtype: torch.dtype, text: TextOptions = PLAIN, /) -> tuple[str, str]:
    """Names of the image and the text encoder's weights, without loading them."""
    return (
        f"{fingerprint(folder, 'vae')}-{dtype}",
        f"{fingerprint(folder, 'text_encoder', 'tokenizer')}-{dtype}{text.key}",
    )


def load_image_encoder(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return image_encoder(load_vae(folder, dtype, device), device)


def load_texts(
    folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
) -> TextParts:
    """The text encoder, frozen, on the device, and its tokenizer."""
    encoder, tokenizer = load_text_encoder(folder, dtype, device), load_tokenizer(folder, "text_encoder")
    return TextParts({"text_encoder": encoder}, {"text_encoder": tokenizer})


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, 77 for each chunk, D]: the text encoder's last state, or that of an earlier layer, normed."""
    return {"embeds": encode_clip(parts, "text_encoder", captions, options, own=LAST, normed=True).states}


def check_text(folder: Path, options: TextOptions) -> None:
    check_clip(folder, ("text_encoder",), options)


def load_text_encoder(folder: Path, dtype: torch.dtype | None, device: torch.device) -> Any:
    from transformers import CLIPTextModel

    return load_frozen(CLIPTextModel, folder / "text_encoder", dtype, device)


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The U-Net's prediction [B, 4, h, w] for noisy latents at t [B] under cond["embeds"] [B, L, D]."""
    return cast("Tensor", denoiser(noisy, t, cond["embeds"], return_dict=False)[0])


def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' pipeline of the base model, for generating images."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline(
        vae=load_vae(folder, dtype, device),
        text_encoder=load_text_encoder(folder, dtype, device),
        tokenizer=load_tokenizer(folder, "text_encoder"),
        unet=load_unet(folder, dtype, device),
        scheduler=make_scheduler(folder),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    return {"embeds": (CLIP_TOKENS * text.chunks, int(config["cross_attention_dim"]))}


def base_names(facts: ModelFacts) -> tuple[str, str]:
    return "sd_v1", "stable-diffusion-v1/lora"


TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    targets={"text_encoder": CLIP_TARGETS},
    check=check_text,
)
FAMILY = Family(
    name="sd15",
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
    encoders=encoders_from(load_image_encoder, TEXT, encoder_keys),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name="StableDiffusionPipeline",
        make=make_pipeline,
        sampling_defaults=sampling_defaults,
    ),
    lora_files=LoraFileSpec(
        base_names=base_names,
        prefixes=KOHYA_PREFIXES,
        readers=LORA_READERS,
        passed_over=PASSED_OVER,
    ),
    recognizes=lambda folder: not is_sd2(folder),
    checkpoint=CheckpointSpec(
        mark=MARK,
        denoiser=partial(unet_part, family="sd15"),
        fits=lambda stored: CLASSES not in stored.shapes and not reads_text_of(stored, SD2_TEXT_WIDTH),
        read=read_unet,
    ),
)
