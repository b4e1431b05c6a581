"""Qwen-Image: a transformer of 20 billion weights with two streams, text and image, in every block (arXiv:2508.02324).

Its text encoder is the language model of Qwen2.5-VL, its VAE a video VAE of one frame. 2512 is the same architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.export.layout import Rule
from lora_trainer.models.autoencoder import VIDEO, load_whole_image_encoder, vae_facts
from lora_trainer.models.encoders import encoders_from, one_encoder_keys
from lora_trainer.models.family import (
    PLAIN,
    Caption,
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
from lora_trainer.models.folder import check_components
from lora_trainer.models.qwen_text import (
    CUT,
    QWEN,
    TOKENIZER,
    as_long_as_needed,
    check_tokenizer,
    language_model,
    read_template,
    text_config,
)
from lora_trainer.models.transformer import (
    PATCH,
    STREAMS,
    block_features,
    one_encoder_pipeline,
    packed,
    refuse_widths,
    transformer_config,
    transformer_functions,
    unpacked,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

PIPELINE = "QwenImagePipeline"
KIND = "QwenImageTransformer2DModel"
TOKENS, MOST_TOKENS = 512, 1024  # of a caption: usually, and what the pipeline can read
SIDE = 128  # of the latents that the model was trained for
TIMESTEPS = 1000
THINNER_HEADS, FEWER_LAYERS = 12, 6
THINNESS = "a twelfth of its width and a sixth of its layers"
ATTENTION = tuple(f"transformer_blocks.*.attn.{name}" for name in STREAMS)
FEED_FORWARD = tuple(
    f"transformer_blocks.*.{part}_mlp.net.{layer}" for part in ("img", "txt") for layer in ("0.proj", "2")
)
# Options of the transformer's config for images as inputs, by what they make of it.
OF_OTHERS = {
    "zero_cond_t": "edits images",
    "use_additional_t_cond": "makes images in layers",
    "use_layer3d_rope": "makes images in layers",
}
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
# The original code, ComfyUI and kohya's trainer have diffusers' names.
LAYOUT = tuple(
    Rule(name, name)
    for name in (
        *(f"transformer_blocks.{{}}.attn.{name}" for name in (*STREAMS, *NORMS)),
        *(f"transformer_blocks.{{}}.{part}_mlp.net.{layer}" for part in ("img", "txt") for layer in ("0.proj", "2")),
        *(f"transformer_blocks.{{}}.{part}_mod.1" for part in ("img", "txt")),
        *("img_in", "txt_in", "txt_norm", "norm_out.linear", "proj_out"),
        *(f"time_text_embed.timestep_embedder.linear_{number}" for number in (1, 2)),
    )
)


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    config = transformer_config(folder, KIND, ("in_channels", "joint_attention_dim"))
    channels, downscale = vae_facts(folder, VIDEO)
    read_flow_schedule(folder)
    check_components(folder, ("transformer", "vae", QWEN))
    check_tokenizer(folder / TOKENIZER)
    if other := next((what for key, what in OF_OTHERS.items() if config.get(key)), None):
        raise UsageError(
            Problem(f"{folder} {other}, which cannot be trained yet.", "Use the text-to-image base model.")
        )
    if config["in_channels"] != PATCH * PATCH * channels:
        message = f"{folder} takes {config['in_channels']} input channels in place of {PATCH * PATCH * channels}."
        raise UsageError(Problem(message, "Use the text-to-image base model with its own VAE."))
    refuse_widths(folder, "text", config["joint_attention_dim"], text_config(folder / QWEN).get("hidden_size"))
    return ModelFacts(
        path=folder,
        family="qwen_image",
        resolution=SIDE * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * PATCH,
        prediction="flow",
        caption_tokens=TOKENS,
    )


def check_text(folder: Path, options: TextOptions) -> None:
    """Raise UsageError for CLIP's options, and for more tokens than the pipeline reads."""
    refuse_clip_options("Qwen-Image", options)
    if (options.t5_tokens or 0) > MOST_TOKENS:
        message = (
            f"text_encoder.max_sequence_length={options.t5_tokens}: Qwen-Image reads at most {MOST_TOKENS} tokens."
        )
        raise UsageError(Problem(message, f"Set {MOST_TOKENS} or less."))


def prompted(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The pipeline's arguments: states up to the longest prompt, and which of them are text."""
    arguments: dict[str, Any] = {"max_sequence_length": cond["embeds"].shape[1]}
    for beginning, text in (("", cond), ("negative_", negative)):
        if text is not None:
            embeds, mask = as_long_as_needed(text["embeds"], text["padding"])
            arguments |= {f"{beginning}prompt_embeds": embeds, f"{beginning}prompt_embeds_mask": mask}
    return arguments


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, T, D]: the last state; `padding` [B, T], bool: where there is no text.

    As bool it stays on the CPU while training, so that `predict` reads lengths without waiting for a GPU.
    """
    import torch

    tokens, mask = read_template(parts.tokenizers[QWEN], captions, options.t5_tokens or TOKENS, parts.device)
    output = parts.encoders[QWEN](input_ids=tokens.ids, attention_mask=mask, use_cache=False)
    states = tokens.weigh(output.last_hidden_state[:, CUT:])
    return {
        "embeds": states.masked_fill(~mask[:, CUT:, None], 0.0),
        "padding": torch.logical_not(mask[:, CUT:]),
    }


def unread(denoiser: nn.Module) -> list[str]:
    """The last block's layers of the text stream that come after the attention's keys and values."""
    last = f"transformer_blocks.{len(cast('nn.ModuleList', denoiser.transformer_blocks)) - 1}"
    return [f"{last}.{name}" for name in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")]


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, T, D] without cond["padding"] [B, T].

    The module rounds a time to the precision of the latents before it embeds it, so its embedding gets the exact one.
    """
    text, mask = as_long_as_needed(cond["embeds"], cond["padding"])
    samples, _, height, width = noisy.shape
    exact, embed = (t + 1).float() / TIMESTEPS, cast("nn.Module", denoiser.time_text_embed)
    with embed.register_forward_pre_hook(lambda _, rounded: (exact, *rounded[1:])):
        velocity = denoiser(
            packed(noisy),
            text,
            mask,
            exact,
            [[(1, height // PATCH, width // PATCH)]] * samples,
            return_dict=False,
        )[0]
    return unpacked(velocity, noisy)


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    tokens = text.t5_tokens or TOKENS
    return {"embeds": (tokens, int(config["joint_attention_dim"])), "padding": (tokens,)}


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """A twelfth of the heads, each of the same size, and a sixth of the layers."""
    return {
        **config,
        "num_attention_heads": max(1, int(config["num_attention_heads"]) // THINNER_HEADS),
        "num_layers": max(1, int(config["num_layers"]) // FEWER_LAYERS),
    }


load_texts = language_model("Qwen2_5_VLTextModel")
load_transformer, make_denoiser = transformer_functions(KIND)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    check=check_text,
)
FAMILY = Family(
    name="qwen_image",
    read_facts=describe,
    denoiser=DenoiserSpec(
        component="transformer",
        load=load_transformer,
        make=make_denoiser,
        make_process=make_process,
        predict=predict,
        features=block_features("transformer_blocks"),
        lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
        thin=thin,
        thinness=THINNESS,
        unread=unread,
    ),
    encoders=encoders_from(load_whole_image_encoder, TEXT, one_encoder_keys()),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name=PIPELINE,
        make=one_encoder_pipeline(PIPELINE, load_texts, load_transformer),
        sampling_defaults=lambda folder: SamplingDefaults(steps=50),
        prompted=prompted,
        guidance="true_cfg_scale",
        refused={
            "QwenImageEditPipeline": "a Qwen-Image model that edits images",
            "QwenImageEditPlusPipeline": "a Qwen-Image model that edits images",
            "QwenImageLayeredPipeline": "a Qwen-Image model that makes images in layers",
            "QwenImage21Pipeline": "Qwen-Image 2.1",
        },
    ),
    lora_files=LoraFileSpec(
        base_names=lambda facts: ("qwen_image", "Qwen-Image/lora"),
        prefixes={"transformer": "lora_unet"},
        layout=LAYOUT,
        readers=(
            "diffusers: kohya",
            "diffusers: original",
            "diffusers: original, kohya's halves",
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: diffusers",
            "ComfyUI: diffusers, kohya's halves",
            "ComfyUI: LyCORIS",
            "ComfyUI: no prefix",
        ),
    ),
)
