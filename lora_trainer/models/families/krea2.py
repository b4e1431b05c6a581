"""Krea 2: a transformer of 12.8 billion weights that reads text and image as one sequence, with gated attention.

Its text encoder is the language model of Qwen3-VL, of which it reads the states of every third layer. Two kinds: `raw`,
and `turbo`, which is distilled from it and samples in eight steps without guidance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.layouts import Rule, fused
from lora_trainer.models.autoencoder import VIDEO, load_whole_image_encoder, vae_facts
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
from lora_trainer.models.flow_schedule import make_process as make_flow_process
from lora_trainer.models.flow_schedule import read_flow_schedule
from lora_trainer.models.folder import check_components, read_config, whole_number
from lora_trainer.models.published import public_architecture
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
from lora_trainer.models.single.stored import Part, SingleFile, Stored, by_layout
from lora_trainer.models.transformer import (
    MOST_LAYERS,
    PATCH,
    one_encoder_pipeline,
    packed,
    refuse_widths,
    token_places,
    transformer_config,
    transformer_functions,
    unpacked,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lora_trainer.diffusion.process import Process

PIPELINE = "Krea2Pipeline"
KIND = "Krea2Transformer2DModel"
TOKENS = 512  # of a caption, the end of the template among them
FIRST_STATE, STATES_APART = 2, 3  # of the text encoder's layers, whose states are read
SIDE = 128  # of the latents that the model was trained for
TIMESTEPS = 1000
TURBO_MU = 1.15  # at every size
THINNER_HEADS, FEWER_LAYERS = 12, 7
THINNESS = "a twelfth of its width and a seventh of its layers"
STREAM = ("to_q", "to_k", "to_v", "to_gate", "to_out.0")
ATTENTION = tuple(f"transformer_blocks.*.attn.{name}" for name in STREAM)
FEED_FORWARD = tuple(f"transformer_blocks.*.ff.{name}" for name in ("up", "down"))
BLOCKS = {
    "transformer_blocks": "blocks",
    **{f"text_fusion.{name}_blocks": f"txtfusion.{name}_blocks" for name in ("layerwise", "refiner")},
}
IN_BLOCK = {"attn.to_q": "attn.wq", "attn.to_k": "attn.wk", "attn.to_v": "attn.wv", "attn.to_gate": "attn.gate"}
IN_BLOCK |= {"attn.to_out.0": "attn.wo", "ff.gate": "mlp.gate", "ff.up": "mlp.up", "ff.down": "mlp.down"}
LAYOUT = (
    *(Rule(f"{ours}.{{}}.{name}", f"{theirs}.{{}}.{other}") for ours, theirs in BLOCKS.items() for name, other in IN_BLOCK.items()),
    Rule("img_in", "first"),
    Rule("final_layer.linear", "last.linear"),
    Rule("time_embed.linear_1", "tmlp.0"),
    Rule("time_embed.linear_2", "tmlp.2"),
    Rule("time_mod_proj", "tproj.1"),
    Rule("txt_in.linear_1", "txtmlp.1"),
    Rule("txt_in.linear_2", "txtmlp.3"),
    Rule("text_fusion.projector", "txtfusion.projector"),
)  # fmt: skip

# SimpleTuner trains attention as diffusers fuses it; the blocks of the image have a key and a value for four queries.
ALSO = tuple(
    rule
    for block in BLOCKS
    for rule in fused(
        f"{block}.{{}}.attn.to_qkv",
        *(f"{block}.{{}}.attn.to_{name}" for name in "qkv"),
        shares=(4, 1, 1) if block == "transformer_blocks" else (),
    )
)
REST = (
    *(
        Rule(f"{ours}.{{}}.{name}.weight", f"{theirs}.{{}}.{other}.scale")
        for ours, theirs in BLOCKS.items()
        for name, other in (
            ("attn.norm_q", "attn.qknorm.qnorm"),
            ("attn.norm_k", "attn.qknorm.knorm"),
            ("norm1", "prenorm"),
            ("norm2", "postnorm"),
        )
    ),
    Rule("transformer_blocks.{}.scale_shift_table", "blocks.{}.mod.lin"),
    Rule("final_layer.scale_shift_table", "last.modulation.lin"),
    Rule("final_layer.norm.weight", "last.norm.scale"),
    Rule("txt_in.norm.weight", "txtmlp.0.scale"),
)
HEAD = 128  # channels


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    needs = ("in_channels", "text_hidden_dim", "num_text_layers")
    config = transformer_config(folder, KIND, needs)
    channels, downscale = vae_facts(folder, VIDEO)
    read_flow_schedule(folder)
    check_components(folder, ("transformer", "vae", QWEN))
    check_tokenizer(folder / TOKENIZER)
    text, index = text_config(folder / QWEN), read_config(folder, "model_index.json")
    refuse_widths(folder, "text", config["text_hidden_dim"], text.get("hidden_size"))
    states = states_read(whole_number(folder / QWEN / "config.json", text, "num_hidden_layers", 1, MOST_LAYERS))
    chosen = index.get("text_encoder_select_layers") or states
    if config["in_channels"] != PATCH * PATCH * channels or index.get("patch_size", PATCH) != PATCH:
        message = f"{folder} takes {config['in_channels']} input channels in place of {PATCH * PATCH * channels}."
        raise UsageError(Problem("model_config_invalid", message, "Use the text-to-image base model with its own VAE."))
    if chosen != states or config["num_text_layers"] != len(states):
        message = f"{folder} reads the text encoder's states {str(chosen)[:80]}; {states} can be followed."
        raise UsageError(Problem("model_config_invalid", message, "Use the published model with its own text encoder."))
    return ModelFacts(
        path=folder,
        family="krea2",
        resolution=SIDE * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * PATCH,
        prediction="flow",
        caption_tokens=TOKENS,
        variant="turbo" if is_turbo(folder) else "raw",
        distilled_from="Krea 2 Raw" if is_turbo(folder) else "",
    )


def is_turbo(folder: Path) -> bool:
    """Whether it is the distilled model, as its pipeline's config says."""
    return bool(read_config(folder, "model_index.json").get("is_distilled"))


def states_read(layers: int) -> list[int]:
    """Which states of a text encoder with so many layers are read, 0 being its input: 2, 5, … 35 of 36."""
    return [*range(FIRST_STATE, layers, STATES_APART)]


def make_process(folder: Path) -> Process:
    """The process for training and validation; Turbo's times are shifted alike at every size."""
    process = make_flow_process(folder)
    if not is_turbo(folder):
        return process
    shift = replace(process.times.shift, factor=math.exp(TURBO_MU), by_size=False)
    return replace(process, times=replace(process.times, shift=shift))


def sampling_defaults(folder: Path) -> SamplingDefaults:
    return SamplingDefaults(steps=8, guided=False, negative=False) if is_turbo(folder) else SamplingDefaults(steps=28)


def prompted(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The pipeline's arguments. It has one table of positions for both prompts, so both keep their whole length."""
    arguments: dict[str, Any] = {"max_sequence_length": cond["embeds"].shape[1]}
    for beginning, text in (("", cond), ("negative_", negative)):
        if text is not None:
            here = (text["padding"] < 0.5).to(text["embeds"].device)
            arguments |= {f"{beginning}prompt_embeds": text["embeds"], f"{beginning}prompt_embeds_mask": here}
    return arguments


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, T, 12, D]: states of twelve layers; `padding` [B, T], bool: where there is no text.

    The model has no order of text tokens, so the padding is at the end, where the pipeline has it before the end of the
    template. As bool it stays on the CPU while training, so that `predict` reads lengths without waiting for a GPU.
    """
    import torch

    size = options.t5_tokens or TOKENS
    tokens, mask = read_template(parts.tokenizers[QWEN], captions, size, parts.device, whole_end=True)
    encoder = parts.encoders[QWEN]
    output = encoder(input_ids=tokens.ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
    chosen = states_read(int(cast("Any", encoder.config).num_hidden_layers))
    states = torch.stack([tokens.weigh(output.hidden_states[layer][:, CUT:]) for layer in chosen], dim=2)
    return {
        "embeds": states.masked_fill(~mask[:, CUT:, None, None], 0.0),
        "padding": torch.logical_not(mask[:, CUT:]),
    }


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, T, 12, D] without cond["padding"] [B, T]."""
    import torch

    text, mask = as_long_as_needed(cond["embeds"], cond["padding"])
    words = torch.zeros(text.shape[1], 3, device=noisy.device)
    places = torch.cat([words, token_places(noisy, axes=3)])
    velocity = denoiser(packed(noisy), text, (t + 1).float() / TIMESTEPS, places, mask, return_dict=False)[0]
    return unpacked(velocity, noisy)


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    tokens = text.t5_tokens or TOKENS
    return {"embeds": (tokens, int(config["num_text_layers"]), int(config["text_hidden_dim"])), "padding": (tokens,)}


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """A twelfth of the heads and of the feed-forward's width, a seventh of the layers, and one text block of each kind."""
    wide = {key: max(1, int(config[key]) // THINNER_HEADS) for key in ("num_attention_heads", "num_key_value_heads")}
    inner = {key: int(config[key]) // THINNER_HEADS for key in ("intermediate_size", "text_intermediate_size")}
    blocks = dict.fromkeys(("num_layerwise_text_blocks", "num_refiner_text_blocks"), 1)
    return {**config, **wide, **inner, **blocks, "num_layers": max(1, int(config["num_layers"]) // FEWER_LAYERS)}


def denoiser_part(stored: Stored) -> Part:
    """Config and places of Krea 2's transformer."""
    text = "txtfusion.layerwise_blocks"
    config = dict(public_architecture("krea2").denoiser) | {
        "_class_name": KIND,
        "in_channels": stored.side("first.weight", 1),
        "num_layers": stored.count("blocks."),
        "num_attention_heads": stored.side("blocks.0.attn.wq.weight", 0) // HEAD,
        "num_key_value_heads": stored.side("blocks.0.attn.wk.weight", 0) // HEAD,
        "intermediate_size": stored.side("blocks.0.mlp.up.weight", 0),
        "timestep_embed_dim": stored.side("tmlp.0.weight", 1),
        "text_hidden_dim": stored.side("txtmlp.1.weight", 1),
        "num_text_layers": stored.side("txtfusion.projector.weight", 1),
        "text_num_attention_heads": stored.side(f"{text}.0.attn.wq.weight", 0) // HEAD,
        "text_num_key_value_heads": stored.side(f"{text}.0.attn.wk.weight", 0) // HEAD,
        "text_intermediate_size": stored.side(f"{text}.0.mlp.up.weight", 0),
        "num_layerwise_text_blocks": stored.count(f"{text}."),
        "num_refiner_text_blocks": stored.count("txtfusion.refiner_blocks."),
    }
    return Part(config, by_layout(stored, (*LAYOUT, *REST)))


def read_checkpoint(found: SingleFile) -> SingleFile:
    """Raw or Turbo, as far as the file's name says it."""
    name = found.file.name.lower()  # published as raw.safetensors and turbo.safetensors
    note = (
        f"{found.file.name} is assumed to be Krea 2 Raw (28 steps, guidance): Raw and Turbo have the same keys. "
        "If it is Turbo, set model.flavor=turbo."
    )
    variant, is_named = "turbo" if "turbo" in name else "base", any(word in name for word in ("turbo", "raw", "base"))
    return replace(found, variant=variant, flavors=("base", "turbo"), note="" if is_named else note)


load_texts = language_model("Qwen3VLTextModel")
load_transformer, make_denoiser = transformer_functions(KIND)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    check=lambda folder, options: refuse_clip_options("Krea 2", options),
)
FAMILY = Family(
    name="krea2",
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
        make=one_encoder_pipeline(
            PIPELINE, load_texts, load_transformer, ("is_distilled", "text_encoder_select_layers")
        ),
        sampling_defaults=sampling_defaults,
        prompted=prompted,
    ),
    lora_files=LoraFileSpec(
        base_names=lambda facts: ("krea2", "Krea-2/lora"),
        prefixes={"transformer": "lora_unet"},
        layout=LAYOUT,
        also=ALSO,
        readers=(
            "diffusers: original",
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
    ),
    checkpoint=CheckpointSpec(mark="txtfusion.projector.weight", denoiser=denoiser_part, read=read_checkpoint),
)
