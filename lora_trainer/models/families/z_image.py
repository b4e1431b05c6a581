"""Z-Image: a transformer of 6 billion weights that reads images and text as one sequence (arXiv:2511.22699).

Its text encoder is a language model, Qwen3, with the caption as a chat message; captions keep their own lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.layouts import Rule, fused
from lora_trainer.models.autoencoder import load_whole_image_encoder, vae_facts
from lora_trainer.models.encoders import encoders_from, one_encoder_keys
from lora_trainer.models.family import (
    PLAIN,
    Caption,
    CheckpointSpec,
    DenoiserSpec,
    Family,
    LoraFileSpec,
    ModelFacts,
    PipelineSpec,
    SamplingDefaults,
    TextOptions,
    TextParts,
    TextSpec,
    refuse_clip_options,
)
from lora_trainer.models.flow_schedule import make_process, read_flow_schedule
from lora_trainer.models.folder import check_components, read_config
from lora_trainer.models.published import public_architecture
from lora_trainer.models.qwen3 import QWEN, TOKENS, check_qwen3, load_qwen3, read_chat
from lora_trainer.models.single.stored import Part, SingleFile, Stored, by_layout
from lora_trainer.models.transformer import (
    PATCH,
    one_encoder_pipeline,
    refuse_widths,
    transformer_config,
    transformer_functions,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PIPELINE = "ZImagePipeline"
KIND = "ZImageTransformer2DModel"
SIDE = 128  # of the latents that the model was trained for
TIMESTEPS = 1000
TURBO_SHIFT = 3.0  # of its scheduler, where the base has 6
THINNER_HEADS, FEWER_LAYERS = 10, 6
THINNESS = "a tenth of its width and a sixth of its layers"
ATTENTION = tuple(f"*.attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
FEED_FORWARD = tuple(f"*.feed_forward.{name}" for name in ("w1", "w2", "w3"))
BLOCKS = ("layers", "noise_refiner", "context_refiner")
SAME = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")
NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")

LAYOUT = (
    *(
        rule
        for block in BLOCKS
        for rule in (
            *fused(f"{block}.{{}}.attention.qkv", *(f"{block}.{{}}.attention.to_{name}" for name in "qkv")),
            Rule(f"{block}.{{}}.attention.to_out.0", f"{block}.{{}}.attention.out"),
            Rule(f"{block}.{{}}.attention.norm_q", f"{block}.{{}}.attention.q_norm"),
            Rule(f"{block}.{{}}.attention.norm_k", f"{block}.{{}}.attention.k_norm"),
            *(Rule(f"{block}.{{}}.{name}", f"{block}.{{}}.{name}") for name in (*SAME, *NORMS)),
        )
    ),
    Rule("all_x_embedder.2-1", "x_embedder"),
    Rule("all_final_layer.2-1.linear", "final_layer.linear"),
    Rule("all_final_layer.2-1.adaLN_modulation.1", "final_layer.adaLN_modulation.1"),
    *(Rule(name, name) for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.0", "cap_embedder.1")),
)
REST = tuple(Rule(name, name) for name in ("x_pad_token", "cap_pad_token"))
UNUSED = ("norm_final.weight",)  # which the first code keeps and never uses


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    config = transformer_config(folder, KIND, ("in_channels", "cap_feat_dim"))
    channels, downscale = vae_facts(folder)
    read_flow_schedule(folder)
    check_components(folder, ("transformer", "vae", QWEN))
    check_qwen3(folder)
    if config["in_channels"] != channels or config.get("siglip_feat_dim") is not None:
        message = f"{folder} takes more than noisy latents: a model for control or editing."
        raise UsageError(Problem("model_unsupported", message, "Use the text-to-image base model."))
    qwen = read_config(folder, f"{QWEN}/config.json")
    refuse_widths(folder, "text", config["cap_feat_dim"], qwen.get("hidden_size"))
    return ModelFacts(
        path=folder,
        family="z_image",
        resolution=SIDE * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * PATCH,
        prediction="flow",
        caption_tokens=TOKENS,
        variant="turbo" if is_turbo(folder) else "base",
        distilled_from="Z-Image" if is_turbo(folder) else "",
    )


def is_turbo(folder: Path) -> bool:
    """Whether it is Turbo, which samples in nine steps without guidance. Nothing else in the configs differs."""
    return read_flow_schedule(folder).shift <= TURBO_SHIFT


def sampling_defaults(folder: Path) -> SamplingDefaults:
    return SamplingDefaults(steps=9, guided=False, negative=False) if is_turbo(folder) else SamplingDefaults(steps=50)


def prompted(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The pipeline's arguments: each caption's states in their own length. Without a negative prompt it is the caption."""
    embeds = _cut(cond["embeds"], cond["padding"])
    return {
        "prompt_embeds": embeds,
        "negative_prompt_embeds": embeds if negative is None else _cut(negative["embeds"], negative["padding"]),
    }


def _cut(embeds: Tensor, padding: Tensor) -> list[Tensor]:
    """The states of each caption [n, D], at least one."""
    if padding.is_meta:
        return list(embeds)
    lengths = [max(1, count) for count in (padding < 0.5).sum(1).tolist()]
    return [row[:length] for row, length in zip(embeds, lengths, strict=True)]


def load_texts(folder: Path, dtype: torch.dtype | None, device: torch.device, _: Collection[str] = (), /) -> TextParts:
    """The language model, frozen, on the device, and its tokenizer."""
    return load_qwen3(folder, dtype, device)


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, T, D]: the last state but one; `padding` [B, T], bool: where there is no text.

    As bool it stays on the CPU while training, so that `predict` reads lengths without waiting for a GPU.
    """
    import torch

    tokens, mask = read_chat(parts.tokenizers[QWEN], captions, options.t5_tokens or TOKENS, parts.device, thinking=True)
    output = parts.encoders[QWEN](input_ids=tokens.ids, attention_mask=mask, output_hidden_states=True)
    states = tokens.weigh(output.hidden_states[-2])
    return {"embeds": states.masked_fill(~mask[..., None], 0.0), "padding": torch.logical_not(mask)}


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, T, D] without cond["padding"] [B, T].

    The model's own time runs from noise, 0, to the image, 1, and its velocity with it.
    """
    import torch

    text = _cut(cond["embeds"], cond["padding"])
    images = list(noisy.unsqueeze(2).unbind(0))
    velocity = denoiser(images, (TIMESTEPS - 1 - t) / TIMESTEPS, text, return_dict=False)[0]
    return -torch.stack(velocity).squeeze(2)


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    tokens = text.t5_tokens or TOKENS
    return {"embeds": (tokens, int(config["cap_feat_dim"])), "padding": (tokens,)}


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """A tenth of the heads, each of the same size, and a sixth of the layers."""
    heads = max(1, int(config["n_heads"]) // THINNER_HEADS)
    width = int(config["dim"]) // int(config["n_heads"]) * heads
    layers = max(1, int(config["n_layers"]) // FEWER_LAYERS)
    return {**config, "n_heads": heads, "n_kv_heads": heads, "dim": width, "n_layers": layers, "n_refiner_layers": 1}


def denoiser_part(stored: Stored) -> Part:
    """Config and places of Z-Image's transformer."""
    width, head = stored.side("x_embedder.weight", 0), stored.side("layers.0.attention.q_norm.weight", 0)
    config = dict(public_architecture("z_image").denoiser) | {
        "_class_name": KIND,
        "in_channels": stored.side("x_embedder.weight", 1) // PATCH**2,
        "dim": width,
        "n_layers": stored.count("layers."),
        "n_refiner_layers": stored.count("noise_refiner."),
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "cap_feat_dim": stored.side("cap_embedder.1.weight", 1),
    }
    return Part(config, by_layout(stored, (*LAYOUT, *REST), UNUSED))


def read_checkpoint(found: SingleFile) -> SingleFile:
    """Turbo, as the published single file is, unless the user names the base."""
    note = (
        f"{found.file.name} is assumed to be Z-Image Turbo (9 steps, no guidance): base and Turbo have the same keys."
    )
    is_named = "turbo" in found.file.name.lower()
    fix = "If it is the base, set model.flavor=base."
    return replace(found, variant="turbo", flavors=("base", "turbo"), note="" if is_named else f"{note} {fix}")


def base_names(facts: ModelFacts) -> tuple[str, str]:
    return "z_image", f"z-image-{facts.variant}/lora"


load_transformer, make_denoiser = transformer_functions(KIND)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    check=lambda folder, options: refuse_clip_options("Z-Image", options),
)
FAMILY = Family(
    name="z_image",
    read_facts=describe,
    denoiser=DenoiserSpec(
        component="transformer",
        load=load_transformer,
        make=make_denoiser,
        make_process=make_process,
        predict=predict,
        lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
        thin=thin,
        thinness=THINNESS,
    ),
    encoders=encoders_from(load_whole_image_encoder, TEXT, one_encoder_keys()),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name=PIPELINE,
        make=one_encoder_pipeline(PIPELINE, load_texts, load_transformer),
        sampling_defaults=sampling_defaults,
        prompted=prompted,
    ),
    lora_files=LoraFileSpec(
        base_names=base_names,
        prefixes={"transformer": "lora_unet"},
        layout=LAYOUT,
        readers=(
            "diffusers: LoKr",
            "diffusers: kohya",
            "diffusers: kohya, diffusers' names",
            "diffusers: original, diffusers' names",
            "diffusers: original, diffusers' names, kohya's halves",
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: original, diffusers' names",
            "ComfyUI: original, diffusers' names, kohya's halves",
            "ComfyUI: diffusers",
            "ComfyUI: diffusers, kohya's halves",
            "ComfyUI: LyCORIS",
            "ComfyUI: no prefix",
        ),
        passed_over={"diffusers": ("all_x_embedder.", "all_final_layer.")},
    ),
    checkpoint=CheckpointSpec(mark="cap_pad_token", denoiser=denoiser_part, read=read_checkpoint),
)
