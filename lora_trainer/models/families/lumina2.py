"""Lumina-Image 2.0: a transformer of 2.6 billion weights that reads text and image as one sequence (arXiv:2503.21758).

Its text encoder is a language model, Gemma 2, which reads a caption behind a system prompt; captions keep their own lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
    TextKind,
    TextOptions,
    TextParts,
    TextSpec,
    refuse_clip_options,
)
from lora_trainer.models.flow_schedule import make_process, read_flow_schedule
from lora_trainer.models.folder import COPY, check_components, read_config
from lora_trainer.models.frozen import load_frozen, load_tokenizer_folder
from lora_trainer.models.published import public_architecture
from lora_trainer.models.qwen_text import as_long_as_needed
from lora_trainer.models.single.stored import Part, Stored, by_layout, refuse_sides, renamed
from lora_trainer.models.transformer import (
    PATCH,
    one_encoder_pipeline,
    refuse_widths,
    transformer_config,
    transformer_functions,
)
from lora_trainer.models.weighting import padded_tokens, tokens_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PIPELINE, KIND = "Lumina2Pipeline", "Lumina2Transformer2DModel"
GEMMA, TOKENIZER = "text_encoder", "tokenizer"
TOKENS = 256  # of a caption, the system prompt among them
BEFORE = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based on "
    "textual prompts or user prompts. <Prompt Start>"
)
SIDE = 128  # of the latents that the model was trained for
TIMESTEPS = 1000
SHARES = (3, 1, 1)  # of the rows of a fused layer: three queries have one key and one value
THINNER_HEADS, FEWER_LAYERS = 8, 6
THINNESS = "an eighth of its width and a sixth of its layers"
MODULATED, PLAIN_BLOCKS = ("layers", "noise_refiner"), ("context_refiner",)
ATTENTION = tuple(f"*.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
FEED_FORWARD = tuple(f"*.feed_forward.linear_{number}" for number in (1, 2, 3))
LAYOUT = (
    *(
        rule
        for block in (*MODULATED, *PLAIN_BLOCKS)
        for rule in (
            *fused(
                f"{block}.{{}}.attention.qkv",
                *(f"{block}.{{}}.attn.to_{name}" for name in "qkv"),
                shares=SHARES,
                ratio=sum(SHARES) / SHARES[0],
            ),
            Rule(f"{block}.{{}}.attn.to_out.0", f"{block}.{{}}.attention.out"),
            *(
                Rule(f"{block}.{{}}.feed_forward.linear_{number}", f"{block}.{{}}.feed_forward.w{number}")
                for number in (1, 2, 3)
            ),
        )
    ),
    *(Rule(f"{block}.{{}}.norm1.linear", f"{block}.{{}}.adaLN_modulation.1") for block in MODULATED),
    Rule("x_embedder", "x_embedder"),
    Rule("time_caption_embed.caption_embedder.1", "cap_embedder.1"),
    Rule("time_caption_embed.timestep_embedder.linear_1", "t_embedder.mlp.0"),
    Rule("time_caption_embed.timestep_embedder.linear_2", "t_embedder.mlp.2"),
    Rule("norm_out.linear_1", "final_layer.adaLN_modulation.1"),
    Rule("norm_out.linear_2", "final_layer.linear"),
)
# Norms, which no LoRA changes.
REST = (
    *(
        Rule(f"{block}.{{}}.{ours}", f"{block}.{{}}.{theirs}")
        for block in (*MODULATED, *PLAIN_BLOCKS)
        for ours, theirs in (
            ("attn.norm_q", "attention.q_norm"),
            ("attn.norm_k", "attention.k_norm"),
            ("norm1.norm" if block in MODULATED else "norm1", "attention_norm1"),
            ("norm2", "attention_norm2"),
            ("ffn_norm1", "ffn_norm1"),
            ("ffn_norm2", "ffn_norm2"),
        )
    ),
    Rule("time_caption_embed.caption_embedder.0", "cap_embedder.0"),
)
UNUSED = ("norm_final.weight",)  # which the first code keeps and never uses
FIRST = "noise_refiner.0.attention.qkv.weight"
OF_GEMMA = "pre_feedforward_layernorm.weight"  # which Gemma 1 and Qwen lack


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    config = transformer_config(folder, KIND, ("in_channels", "cap_feat_dim", "axes_lens"))
    channels, downscale = vae_facts(folder)
    read_flow_schedule(folder)
    check_components(folder, ("transformer", "vae", GEMMA))
    if not (folder / TOKENIZER / "tokenizer.json").is_file():
        fix = f"Copy the tokenizer of the model, or of Gemma 2, to {folder / TOKENIZER}."
        raise UsageError(Problem("file_missing", f"{folder / TOKENIZER / 'tokenizer.json'} is missing.", fix))
    if config["in_channels"] != channels or config.get("out_channels") not in (None, channels):
        message = f"{folder} takes more than noisy latents ({config['in_channels']} channels in place of {channels})."
        raise UsageError(Problem("model_unsupported", message, "Use the text-to-image base model."))
    gemma = read_config(folder, f"{GEMMA}/config.json")
    refuse_widths(folder, "text", config["cap_feat_dim"], gemma.get("hidden_size"))
    words, *sides = _most_places(folder, config)
    if words <= TOKENS:
        message = f"{folder}: the transformer has {words} places for text, and a caption has {TOKENS} tokens."
        raise UsageError(Problem("model_config_invalid", message, COPY))
    return ModelFacts(
        path=folder,
        family="lumina2",
        resolution=SIDE * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * PATCH,
        prediction="flow",
        caption_tokens=TOKENS,
        largest_side=min(sides) * PATCH * downscale,
    )


def _most_places(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """How many places its tables have for text, rows and columns. Raises UsageError for anything else."""
    places = config["axes_lens"]
    if not isinstance(places, list) or [type(each) for each in places] != [int] * 3 or min(places) < 1:
        message = f"{folder}/transformer: axes_lens is {str(places)[:40]}; three whole numbers are meant."
        raise UsageError(Problem("model_config_invalid", message, COPY))
    return places


def check_text(folder: Path, options: TextOptions) -> None:
    """Raise UsageError for CLIP's options, and for more tokens than the transformer has places for."""
    refuse_clip_options("Lumina 2", options)
    most = _most_places(folder, read_config(folder, "transformer/config.json", ("axes_lens",)))[0] - 1
    if (options.t5_tokens or 0) > most:
        message = f"text_encoder.max_sequence_length={options.t5_tokens}: this model reads at most {most} tokens."
        raise UsageError(Problem("value_out_of_range", message, f"Set {most} or less."))


def load_texts(folder: Path, dtype: torch.dtype | None, device: torch.device, _: Collection[str] = (), /) -> TextParts:
    """The language model, frozen, on the device, and its tokenizer."""
    from transformers import Gemma2Model, GemmaTokenizerFast

    encoder = load_frozen(Gemma2Model, folder / GEMMA, dtype, device)
    return TextParts({GEMMA: encoder}, {GEMMA: load_tokenizer_folder(GemmaTokenizerFast, folder / TOKENIZER)})


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, T, D]: the last state but one; `padding` [B, T], bool: where there is no text.

    An empty caption has no system prompt: it is what guidance compares with, here and in diffusers' pipeline. As bool the
    padding stays on the CPU while training, so that `predict` reads lengths without waiting for a GPU.
    """
    import torch

    tokenizer, size = parts.tokenizers[GEMMA], options.t5_tokens or TOKENS
    begin = (int(tokenizer.bos_token_id), 1.0)
    rows = [[begin, *tokens_of(tokenizer, _with_system_prompt(caption))][:size] for caption in captions]
    tokens, here = padded_tokens(tokenizer, captions, rows, size, parts.device)
    output = parts.encoders[GEMMA](
        input_ids=tokens.ids, attention_mask=here, use_cache=False, output_hidden_states=True
    )
    states = tokens.weigh(output.hidden_states[-2])
    return {"embeds": states.masked_fill(~here[..., None], 0.0), "padding": torch.logical_not(here)}


def _with_system_prompt(caption: Caption) -> Caption:
    """The space before the caption belongs to its first token."""
    if isinstance(caption, str):
        return f"{BEFORE} {caption}" if caption else caption
    (first, weight), *rest = caption
    return ((BEFORE, 1.0), (f" {first}", weight), *rest)


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, T, D] without cond["padding"] [B, T].

    The model's own time runs from noise, 0, to the image, 1, and its velocity with it. Its positions depend on the lengths
    of captions, which it reads from a mask: from one on the CPU, so that no GPU is waited for.
    """
    import torch

    text, mask = as_long_as_needed(cond["embeds"], cond["padding"])
    here = (
        torch.ones(text.shape[:2], dtype=torch.bool, device="cpu")
        if mask is None
        else cond["padding"][:, : text.shape[1]] < 0.5
    )
    positions = cast("nn.Module", denoiser.rope_embedder)
    with positions.register_forward_pre_hook(lambda _, inputs: (inputs[0], here)):
        velocity = denoiser(noisy, (TIMESTEPS - 1 - t) / TIMESTEPS, text, mask, return_dict=False)[0]
    return cast("Tensor", -velocity)


def sampling_defaults(folder: Path) -> SamplingDefaults:
    return SamplingDefaults(steps=30)


def prompted(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The pipeline's arguments."""
    arguments: dict[str, Any] = {}
    for beginning, text in (("", cond), ("negative_", negative)):
        if text is not None:
            here = (text["padding"] < 0.5).to(text["embeds"].device)
            arguments |= {f"{beginning}prompt_embeds": text["embeds"], f"{beginning}prompt_attention_mask": here}
    return arguments


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    tokens = text.t5_tokens or TOKENS
    return {"embeds": (tokens, int(config["cap_feat_dim"])), "padding": (tokens,)}


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """An eighth of the heads, each of the same size, and a sixth of the layers."""
    heads, groups = (max(1, int(config[key]) // THINNER_HEADS) for key in ("num_attention_heads", "num_kv_heads"))
    width = int(config["hidden_size"]) // int(config["num_attention_heads"]) * heads
    layers = {"num_layers": max(1, int(config["num_layers"]) // FEWER_LAYERS), "num_refiner_layers": 1}
    return {**config, **layers, "num_attention_heads": heads, "num_kv_heads": groups, "hidden_size": width}


def denoiser_part(stored: Stored) -> Part:
    """Config and places of the transformer. Raises UsageError where its queries are not three to a key."""
    width, head = stored.side("x_embedder.weight", 0), stored.side("layers.0.attention.q_norm.weight", 0)
    if stored.side(FIRST, 0) * SHARES[0] != width * sum(SHARES):
        refuse_sides(stored, FIRST)
    config = dict(public_architecture("lumina2").denoiser) | {
        "_class_name": KIND,
        "in_channels": stored.side("x_embedder.weight", 1) // PATCH**2,
        "hidden_size": width,
        "num_layers": stored.count("layers."),
        "num_refiner_layers": stored.count("noise_refiner."),
        "num_attention_heads": width // head,
        "num_kv_heads": width // head // SHARES[0],
        "cap_feat_dim": stored.side("cap_embedder.1.weight", 1),
    }
    return Part(config, by_layout(stored, (*LAYOUT, *REST), UNUSED))


def is_gemma(stored: Stored) -> bool:
    return any(name.endswith(OF_GEMMA) for name in stored.shapes)


def gemma_part(stored: Stored) -> Part:
    """Config and places of Gemma 2, by transformers' names behind `model.`; the output head and ComfyUI's copy of the
    tokenizer are skipped."""
    begin = "model." if "model.embed_tokens.weight" in stored.shapes else ""
    parts = tuple(f"{begin}{name}" for name in ("embed_tokens.", "layers.", "norm."))
    attention, head = f"{begin}layers.0.self_attn", 256  # channels, in every published one up to 9 billion weights
    config = {
        "architectures": ["Gemma2Model"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": head,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": stored.side(f"{begin}embed_tokens.weight", 1),
        "intermediate_size": stored.side(f"{begin}layers.0.mlp.gate_proj.weight", 0),
        "max_position_embeddings": 8192,
        "num_attention_heads": stored.side(f"{attention}.q_proj.weight", 0) // head,
        "num_hidden_layers": stored.count(f"{begin}layers."),
        "num_key_value_heads": stored.side(f"{attention}.k_proj.weight", 0) // head,
        "query_pre_attn_scalar": head,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": stored.side(f"{begin}embed_tokens.weight", 0),
    }
    return Part(config, renamed(stored, lambda name: name.removeprefix(begin) if name.startswith(parts) else None))


load_transformer, make_denoiser = transformer_functions(KIND)
TEXT = TextSpec(load=load_texts, encode=encode_text, shapes=cond_shapes, check=check_text)
FAMILY = Family(
    name="lumina2",
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
        base_names=lambda facts: ("lumina2", "lumina-2/lora"),
        prefixes={"transformer": "lora_unet"},
        layout=LAYOUT,
        readers=(
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: LyCORIS",
            "sd-scripts: kohya",
        ),
    ),
    checkpoint=CheckpointSpec(
        mark=FIRST,
        denoiser=denoiser_part,
        fits=lambda stored: "cap_pad_token" not in stored.shapes,
        text_kinds={"gemma2": TextKind("Gemma 2", is_gemma, gemma_part)},
    ),
)
