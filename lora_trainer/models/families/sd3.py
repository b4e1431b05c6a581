"""Stable Diffusion 3 and 3.5: a transformer that reads images and text side by side (arXiv:2403.03206).

Three text encoders: two of CLIP and T5, which is optional.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.lora_format.layouts import Rule, fused
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
    SamplingDefaults,
    TextOptions,
    TextParts,
    TextSpec,
)
from lora_trainer.models.flow_schedule import make_process, make_scheduler
from lora_trainer.models.folder import fingerprint, named_parts, read_config, tokenizer_of, whole_number
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.stored import Part, Stored, by_layout
from lora_trainer.models.t5 import T5_TARGETS, load_t5, load_t5_tokenizer, read_t5_tokens
from lora_trainer.models.transformer import (
    MOST_WIDTH,
    STREAMS,
    refuse_widths,
    transformer_config,
    transformer_facts,
)
from lora_trainer.models.unet import CLIP_TARGETS, CLIP_TOKENS, load_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lora_trainer.models.places import Place
    from lora_trainer.models.quantization.store import Narrow

CLIPS, T5 = ("text_encoder", "text_encoder_2"), "text_encoder_3"
T5_TOKENS = 256
# The stored table of positions is 384 patches wide, 0.84 GiB in fp32; no image needs more than its middle.
POSITIONS = "pos_embed.pos_embed"
LARGEST_SIDE = 128  # patches, of 16 pixels each
MOST_SIDE = 4096  # places of the latents, or of the table
THINNER_HEADS, FEWER_LAYERS = 12, 6
THINNESS = "a twelfth of its width and a sixth of its layers"
ATTENTION = tuple(f"transformer_blocks.*.attn*.{name}" for name in STREAMS)
FEED_FORWARD = tuple(f"transformer_blocks.*.{name}" for name in ("net.0.proj", "net.2"))
REST = (
    *(
        Rule(f"transformer_blocks.{{}}.{ours}.weight", f"joint_blocks.{{}}.{theirs}.weight")
        for ours, theirs in (
            ("attn.norm_q", "x_block.attn.ln_q"),
            ("attn.norm_k", "x_block.attn.ln_k"),
            ("attn.norm_added_q", "context_block.attn.ln_q"),
            ("attn.norm_added_k", "context_block.attn.ln_k"),
            ("attn2.norm_q", "x_block.attn2.ln_q"),
            ("attn2.norm_k", "x_block.attn2.ln_k"),
        )
    ),
    Rule("pos_embed.pos_embed", "pos_embed"),
)


def _stream(original: str, attention: str, names: tuple[str, str, str, str]) -> tuple[Rule, ...]:
    """The rules of one attention: its fused query, key and value, and what comes out."""
    ours = [f"transformer_blocks.{{}}.{attention}.{name}" for name in names]
    theirs = f"joint_blocks.{{}}.{original}"
    return (*fused(f"{theirs}.qkv", *ours[:3]), Rule(ours[3], f"{theirs}.proj"))


LAYOUT = (
    *_stream("x_block.attn", "attn", ("to_q", "to_k", "to_v", "to_out.0")),
    *_stream("context_block.attn", "attn", ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *_stream("x_block.attn2", "attn2", ("to_q", "to_k", "to_v", "to_out.0")),
    Rule("transformer_blocks.{}.ff.net.0.proj", "joint_blocks.{}.x_block.mlp.fc1"),
    Rule("transformer_blocks.{}.ff.net.2", "joint_blocks.{}.x_block.mlp.fc2"),
    Rule("transformer_blocks.{}.ff_context.net.0.proj", "joint_blocks.{}.context_block.mlp.fc1"),
    Rule("transformer_blocks.{}.ff_context.net.2", "joint_blocks.{}.context_block.mlp.fc2"),
    Rule("transformer_blocks.{}.norm1.linear", "joint_blocks.{}.x_block.adaLN_modulation.1"),
    Rule(
        "transformer_blocks.{}.norm1_context.linear",
        "joint_blocks.{}.context_block.adaLN_modulation.1",
        last_swapped=True,
    ),
    Rule("pos_embed.proj", "x_embedder.proj"),
    Rule("context_embedder", "context_embedder"),
    Rule("time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.0"),
    Rule("time_text_embed.timestep_embedder.linear_2", "t_embedder.mlp.2"),
    Rule("time_text_embed.text_embedder.linear_1", "y_embedder.mlp.0"),
    Rule("time_text_embed.text_embedder.linear_2", "y_embedder.mlp.2"),
    Rule("norm_out.linear", "final_layer.adaLN_modulation.1", swapped=True),
    Rule("proj_out", "final_layer.linear"),
)


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    needs = ("in_channels", "sample_size", "joint_attention_dim", "pos_embed_max_size")
    config = transformer_config(folder, "SD3Transformer2DModel", needs)
    path, t5 = folder / "transformer/config.json", T5 in text_encoders(folder)
    facts = transformer_facts(
        folder,
        "sd3",
        clips=CLIPS,
        t5=T5 if t5 else None,
        t5_tokens=T5_TOKENS,
        per_latent=1,
        side=whole_number(path, config, "sample_size", 1, MOST_SIDE),
        variant=_variant(config),
    )
    table = whole_number(path, config, "pos_embed_max_size", 1, MOST_SIDE)
    width = whole_number(path, config, "joint_attention_dim", 1, MOST_WIDTH)
    clips = {folder / name / "config.json": read_config(folder, f"{name}/config.json") for name in CLIPS}
    provided, pooled = (
        sum(whole_number(clip, clips[clip], key, 1, MOST_WIDTH) for clip in clips)
        for key in ("hidden_size", "projection_dim")
    )
    refuse_widths(folder, "a summary", config.get("pooled_projection_dim"), pooled)
    if provided > width:  # less is padded
        refuse_widths(folder, "text", width, provided)
    if t5:
        refuse_widths(folder, "text", width, read_config(folder, f"{T5}/config.json").get("d_model"))
    return replace(facts, largest_side=_cropped(table) * facts.pixel_step)


def _variant(config: Mapping[str, Any]) -> str:
    """As sd-scripts calls them: `medium` is 3.0, the others are 3.5."""
    if not config.get("qk_norm"):
        return "medium"
    return "5-medium" if config.get("dual_attention_layers") else "5-large"


def text_encoders(folder: Path) -> tuple[str, ...]:
    """Those that the model has: T5 is optional."""
    return (*CLIPS, *named_parts(folder, (T5,)))


def encoder_keys(folder: Path, dtype: torch.dtype, text: TextOptions = PLAIN, /) -> tuple[str, str]:
    """Names of the image and the text encoders' weights, without loading them."""
    names = [name for name in text_encoders(folder) if name not in text.without]
    texts = fingerprint(folder, *(part for name in names for part in (name, tokenizer_of(name))))
    return f"{fingerprint(folder, 'vae')}-{vae_dtype(folder, dtype)}", f"{texts}-{dtype}{text.key}"


def load_texts(
    folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
) -> TextParts:
    """The text encoders, frozen, on the device, and their tokenizers; T5 where the model has it and uses it."""
    return _texts(folder, dtype, dtype, device, without)


def _texts(
    folder: Path, dtype: torch.dtype | None, t5: torch.dtype | None, device: torch.device, without: Collection[str] = ()
) -> TextParts:
    """The same, T5 in a precision of its own."""
    encoders, tokenizers = load_clips(folder, dtype, device), {name: load_tokenizer(folder, name) for name in CLIPS}
    if T5 in text_encoders(folder) and T5 not in without:
        encoders[T5] = load_t5(folder, T5, t5, device)
        tokenizers[T5] = load_t5_tokenizer(folder, T5, T5_TOKENS)
    width = int(read_config(folder, "transformer/config.json")["joint_attention_dim"])
    return TextParts(encoders, tokenizers, width=width)


def load_clips(folder: Path, dtype: torch.dtype | None, device: torch.device) -> dict[str, Any]:
    from transformers import CLIPTextModelWithProjection

    return {name: load_frozen(CLIPTextModelWithProjection, folder / name, dtype, device) for name in CLIPS}


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, 77 for each chunk + 256, D]: both CLIPs' last state but one, or another layer's, side by
    side and padded to T5's width, then T5's. Without T5 there are zeros in its place.

    `pooled` [B, P]: both CLIPs' projected summaries of the first chunk.
    """
    import torch

    outputs = [encode_clip(parts, name, captions, options, own=LAST_BUT_ONE, normed=False) for name in CLIPS]
    clip = torch.cat([each.states for each in outputs], dim=-1)
    size = options.t5_tokens or T5_TOKENS
    if T5 in parts.encoders and T5 not in options.without:
        words = read_t5_tokens(parts.tokenizers[T5], captions, size, parts.device)
        long = words.weigh(parts.encoders[T5](words.ids)[0])
    else:
        long = clip.new_zeros(len(captions), size, parts.width)
    padded = torch.nn.functional.pad(clip, (0, long.shape[-1] - clip.shape[-1]))
    return {"embeds": torch.cat([padded, long], dim=-2), "pooled": torch.cat([each.pooled for each in outputs], dim=-1)}


def joined_text(current: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CLIP's new states, and T5's cached ones in place of zeros."""
    import torch

    embeds = current["embeds"]
    has_text = (embeds.detach() != 0).any(dim=-1, keepdim=True)
    return {**current, "embeds": torch.where(has_text, embeds, known["embeds"].to(embeds.dtype))}


def check_text(folder: Path, options: TextOptions) -> None:
    check_clip(folder, CLIPS, options, t5=T5 in text_encoders(folder) and T5 not in options.without)


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """As the authors of the medium model sample."""
    return SamplingDefaults(steps=40)


def make_denoiser(config: Mapping[str, Any]) -> nn.Module:
    """The transformer with random weights, on torch's current default device, its table of positions cropped."""
    from diffusers import SD3Transformer2DModel

    cropped = _cropped(int(config["pos_embed_max_size"]))
    return cast("nn.Module", SD3Transformer2DModel.from_config({**config, "pos_embed_max_size": cropped}))


def _cropped(side: int) -> int:
    """The side to crop to: the middle of the table gives the same positions for every size that still fits."""
    return LARGEST_SIDE if side > LARGEST_SIDE and side % 2 == 0 else side


def load_transformer(folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None) -> nn.Module:
    """The transformer, frozen, on the device, its table of positions cropped."""
    from diffusers import SD3Transformer2DModel

    return cast(
        "nn.Module", load_frozen(SD3Transformer2DModel, folder / "transformer", dtype, device, narrow, crop_positions)
    )


def crop_positions(model: nn.Module, places: dict[str, Place]) -> None:
    """Keep the middle of an empty transformer's table of positions, before it is read: the whole never gets to a GPU."""
    table: Any = model.pos_embed
    side = int(table.pos_embed_max_size)
    kept = _cropped(side)
    if kept < side:
        table.register_buffer("pos_embed", table.pos_embed[:, : kept * kept])
        table.pos_embed_max_size = kept
        places[POSITIONS] = replace(places[POSITIONS], middle=(side, kept))


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, 333, 4096] and cond["pooled"] [B, 2048].

    Timestep t is the model's t + 1, a thousandth of it the share of noise.
    """
    return cast("Tensor", denoiser(noisy, cond["embeds"], cond["pooled"], t + 1, return_dict=False)[0])


def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' pipeline of the base model, for generating images."""
    from diffusers import StableDiffusion3Pipeline

    texts = _texts(folder, dtype, None, device)
    named = (*CLIPS, T5)
    pipeline = StableDiffusion3Pipeline(
        vae=drawing_vae(folder, dtype, device),
        **{name: texts.encoders.get(name) for name in named},
        **{tokenizer_of(name): texts.tokenizers.get(name) for name in named},
        transformer=load_transformer(folder, dtype, device),
        scheduler=make_scheduler(folder),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    return {
        "embeds": (CLIP_TOKENS * text.chunks + (text.t5_tokens or T5_TOKENS), int(config["joint_attention_dim"])),
        "pooled": (int(config["pooled_projection_dim"]),),
    }


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """A twelfth of the heads, each of the same size, and a sixth of the layers of each kind."""
    heads = max(1, int(config["num_attention_heads"]) // THINNER_HEADS)
    width = heads * int(config["attention_head_dim"])
    dual = list(config["dual_attention_layers"])
    return {
        **config,
        "num_attention_heads": heads,
        "caption_projection_dim": width,
        "num_layers": max(1, int(config["num_layers"]) // FEWER_LAYERS),
        "dual_attention_layers": dual[: -(-len(dual) // FEWER_LAYERS)],
    }


def denoiser_part(stored: Stored) -> Part:
    """Config and places of SD3's transformer: 3.0, 3.5 medium (layers with a second attention) or 3.5 large by its form."""
    layers = stored.count("joint_blocks.")
    places = by_layout(stored, (*LAYOUT, *REST))
    # The last layer leaves the text as it is; diffusers keeps its norm as one at the end, scale before shift.
    for leaf in ("weight", "bias"):
        name = f"transformer_blocks.{layers - 1}.norm1_context.linear.{leaf}"
        if name in places:
            rows = stored.side(places[name].key.removeprefix(stored.prefix), 0)
            places[name] = replace(places[name], rows=((rows // 2, rows), (0, rows // 2)))
    width, patch = stored.side("x_embedder.proj.weight", 0), stored.side("x_embedder.proj.weight", -1)
    config = dict(public_architecture("sd3").denoiser) | {
        "_class_name": "SD3Transformer2DModel",
        "patch_size": patch,
        "in_channels": stored.side("x_embedder.proj.weight", 1),
        "out_channels": stored.side("final_layer.linear.weight", 0) // patch**2,
        "num_layers": layers,
        "num_attention_heads": width // 64,
        "joint_attention_dim": stored.side("context_embedder.weight", 1),
        "caption_projection_dim": stored.side("context_embedder.weight", 0),
        "pooled_projection_dim": stored.side("y_embedder.mlp.0.weight", 1),
        "pos_embed_max_size": math.isqrt(stored.side("pos_embed", 1)),
        "qk_norm": "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in stored.shapes else None,
        "dual_attention_layers": [
            layer for layer in range(layers) if f"joint_blocks.{layer}.x_block.attn2.proj.weight" in stored.shapes
        ],
    }
    return Part(config, places)


def base_names(facts: ModelFacts) -> tuple[str, str]:
    return "sd3", f"stable-diffusion-3-{facts.variant}/lora"


TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    targets={**dict.fromkeys(CLIPS, CLIP_TARGETS), T5: T5_TARGETS},
    check=check_text,
    optional=(T5,),
    cached=(T5,),
    join=joined_text,
)
FAMILY = Family(
    name="sd3",
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
    encoders=encoders_from(load_whole_image_encoder, TEXT, encoder_keys),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name="StableDiffusion3Pipeline",
        make=make_pipeline,
        sampling_defaults=sampling_defaults,
    ),
    lora_files=LoraFileSpec(
        base_names=base_names,
        prefixes={"transformer": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"},
        layout=LAYOUT,
        readers=(
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: diffusers",
            "ComfyUI: diffusers, kohya's halves",
            "ComfyUI: peft",
            "ComfyUI: OneTrainer",
            "ComfyUI: LyCORIS",
            "sd-scripts: kohya",
        ),
        passed_over={"sd-scripts": ("text_projection",)},
    ),
    checkpoint=CheckpointSpec(mark="joint_blocks.0.x_block.attn.qkv.weight", denoiser=denoiser_part),
)
