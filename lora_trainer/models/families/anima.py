"""Anima: Cosmos-Predict2's transformer of 2 billion weights (arXiv:2501.03575), for illustrations, with a text encoder of its own.

Captions are read twice: Qwen3's states and T5's token ids, of which a small text conditioner makes what the transformer
attends to. It is frozen, so caches hold its output. diffusers has Anima as modular blocks alone (`models/modular.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.layouts import Rule
from lora_trainer.models.autoencoder import VIDEO, drawing_vae, load_whole_image_encoder, vae_facts
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
from lora_trainer.models.flow_schedule import make_process, make_scheduler, read_flow_schedule
from lora_trainer.models.folder import COPY, check_components, read_config
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.published import public_architecture
from lora_trainer.models.qwen3 import QWEN, TOKENIZER, check_qwen3, load_qwen3
from lora_trainer.models.single.stored import Part, Stored, by_layout, renamed
from lora_trainer.models.t5 import check_t5_tokenizer, load_t5_tokenizer
from lora_trainer.models.transformer import (
    PATCH,
    refuse_widths,
    thinner,
    transformer_config,
    transformer_functions,
)
from lora_trainer.models.weighting import padded_tokens, tokens_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

KIND, CONDITIONER = "CosmosTransformer3DModel", "text_conditioner"
T5, T5_TOKENIZER = "t5_text_encoder", "t5_tokenizer"  # whose tokens alone are read: there is no such text encoder
TOKENS = 512  # of a caption; the transformer attends to as many, zeros behind the text among them
SIDE = 128  # of the latents that the model was trained for
TIMESTEPS = 1000
THINNESS = "a quarter of its width and a quarter of its layers"
IN_ATTENTION = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "output_proj"}
ATTENTION = tuple(f"transformer_blocks.*.{part}.{name}" for part in ("attn1", "attn2") for name in IN_ATTENTION)
FEED_FORWARD = tuple(f"transformer_blocks.*.ff.net.{layer}" for layer in ("0.proj", "2"))
PARTS = {"self_attn": ("attn1", "norm1"), "cross_attn": ("attn2", "norm2"), "mlp": ("ff", "norm3")}  # of a block
LAYOUT = (
    *(
        Rule(f"transformer_blocks.{{}}.{ours}.{name}", f"blocks.{{}}.{theirs}.{other}")
        for theirs, (ours, _) in PARTS.items()
        for name, other in ({"net.0.proj": "layer1", "net.2": "layer2"} if ours == "ff" else IN_ATTENTION).items()
    ),
    *(
        Rule(f"transformer_blocks.{{}}.{norm}.linear_{number}", f"blocks.{{}}.adaln_modulation_{theirs}.{number}")
        for theirs, (_, norm) in PARTS.items()
        for number in (1, 2)
    ),
    *(Rule(f"norm_out.linear_{number}", f"final_layer.adaln_modulation.{number}") for number in (1, 2)),
    *(Rule(f"time_embed.t_embedder.linear_{number}", f"t_embedder.1.linear_{number}") for number in (1, 2)),
    Rule("patch_embed.proj", "x_embedder.proj.1"),
    Rule("proj_out", "final_layer.linear"),
)
REST = (
    *(
        Rule(f"transformer_blocks.{{}}.{ours}.norm_{name}.weight", f"blocks.{{}}.{theirs}.{name}_norm.weight")
        for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for name in ("q", "k")
    ),
    Rule("time_embed.norm.weight", "t_embedding_norm.weight"),
)
OF_CONDITIONER = "llm_adapter."  # begins the names of the text conditioner's tensors
# Tables of positions and counters of Cosmos's first code, which are computed or never read.
UNUSED_OF_COSMOS = ("pos_embedder.seq", "dim_spatial_range", "dim_temporal_range", "_extra_state")
COUNTERS_OF_COSMOS = (
    "accum_video_sample_counter",
    "accum_image_sample_counter",
    "accum_iteration",
    "accum_train_in_hours",
)


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    needs = ("num_attention_heads", "num_layers", "rope_scale")
    config: dict[str, Any] = {"in_channels": 16, "text_embed_dim": 1024}
    config |= {"patch_size": [1, PATCH, PATCH], "max_size": [128, 240, 240]}
    config |= transformer_config(folder, KIND, needs)
    channels, downscale = vae_facts(folder, VIDEO)
    read_flow_schedule(folder)
    check_components(folder, ("transformer", "vae", QWEN, CONDITIONER))
    check_qwen3(folder)
    check_t5_tokenizer(folder, T5)
    others = ("controlnet_block_every_n", "img_context_dim_in", "use_crossattn_projection")
    if config["in_channels"] != channels or any(config.get(name) for name in others):
        message = f"{folder} takes more than noisy latents and text: a Cosmos model for videos or control."
        raise UsageError(Problem("model_unsupported", message, "Use Anima's base model."))
    usual = {"source_dim": 1024, "target_dim": 1024, "min_sequence_length": TOKENS}
    conditioner = usual | read_config(folder, f"{CONDITIONER}/config.json")
    refuse_widths(folder, "text", config["text_embed_dim"], conditioner["target_dim"])
    refuse_widths(
        folder, "states", conditioner["source_dim"], read_config(folder, f"{QWEN}/config.json").get("hidden_size")
    )
    if conditioner["min_sequence_length"] != TOKENS:
        message = (
            f"{folder / CONDITIONER}: min_sequence_length is {conditioner['min_sequence_length']}, must be {TOKENS}."
        )
        raise UsageError(Problem("model_config_invalid", message, "Use the text conditioner that the model came with."))
    patches, sizes = [1, PATCH, PATCH], config["max_size"]
    if config["patch_size"] != patches or not isinstance(sizes, list) or [type(size) for size in sizes] != [int] * 3:
        message = f"{folder}/transformer: patch_size is {str(config['patch_size'])[:40]}, max_size {str(sizes)[:40]}; {patches} and three whole numbers are meant."
        raise UsageError(Problem("model_config_invalid", message, COPY))
    tokens = max(size // patch for size, patch in zip(sizes, patches, strict=True))
    return ModelFacts(
        path=folder,
        family="anima",
        resolution=SIDE * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * PATCH,
        prediction="flow",
        caption_tokens=TOKENS,
        largest_side=tokens * PATCH * downscale,
    )


def check_text(folder: Path, options: TextOptions) -> None:
    """Raise UsageError for CLIP's options, and for more tokens than the transformer attends to in training."""
    refuse_clip_options("Anima", options)
    if (options.t5_tokens or 0) > TOKENS:
        message = f"text_encoder.max_sequence_length={options.t5_tokens}: Anima reads at most {TOKENS} tokens."
        raise UsageError(Problem("value_out_of_range", message, f"Set {TOKENS} or less."))


def load_texts(folder: Path, dtype: torch.dtype | None, device: torch.device, _: Collection[str] = (), /) -> TextParts:
    """Qwen3 and the text conditioner, frozen, on the device, and both tokenizers."""
    from diffusers import AnimaTextConditioner

    qwen = load_qwen3(folder, dtype, device)
    conditioner = load_frozen(AnimaTextConditioner, folder / CONDITIONER, dtype, device)
    return TextParts(
        {**qwen.encoders, CONDITIONER: conditioner},
        {**qwen.tokenizers, T5: load_t5_tokenizer(folder, T5, TOKENS)},
    )


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, 512, D]: what the text conditioner makes of T5's tokens, then zeros, which count as well.

    Weights are those of T5's tokens, as in ComfyUI: Qwen3 reads the text without them.
    """
    import torch

    size, device, (qwen, t5) = (
        options.t5_tokens or TOKENS,
        parts.device,
        (parts.tokenizers[name] for name in (QWEN, T5)),
    )
    rows = [tokens_of(qwen, caption)[:size] for caption in captions]
    read, here = padded_tokens(qwen, captions, rows, size, device)
    # Of an empty caption one state is read, a zero: attention to nothing would be no number.
    mask = here | (torch.arange(size, device=device) == 0)
    states = parts.encoders[QWEN](input_ids=read.ids, attention_mask=mask, use_cache=False).last_hidden_state
    rows = [[*tokens_of(t5, caption)[: size - 1], (int(t5.eos_token_id), 1.0)] for caption in captions]
    asking, there = padded_tokens(t5, captions, rows, TOKENS, device)
    embeds = parts.encoders[CONDITIONER](states.masked_fill(~here[..., None], 0.0), asking.ids, there, mask)
    return {"embeds": asking.weigh(embeds)}


def cosmos_transformer(kind: str = KIND) -> Any:
    """diffusers' class, which resizes a mask of zeros with torchvision: without it, torch does the same."""
    from diffusers.models.transformers import transformer_cosmos
    from torch.nn.functional import interpolate

    if not hasattr(transformer_cosmos, "transforms"):
        vars(transformer_cosmos)["transforms"] = SimpleNamespace(
            InterpolationMode=SimpleNamespace(NEAREST="nearest"),
            functional=SimpleNamespace(
                resize=lambda mask, size, interpolation: interpolate(mask, size, mode=interpolation)
            ),
        )
    return getattr(transformer_cosmos, kind)


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, 512, D]. No place of the image is padding."""
    velocity = denoiser(
        noisy.unsqueeze(2),
        (t + 1).float() / TIMESTEPS,
        cond["embeds"],
        padding_mask=noisy.new_zeros(1, 1, *noisy.shape[2:]),
        return_dict=False,
    )[0]
    return cast("Tensor", velocity.squeeze(2))


def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' blocks with the base model's parts, for generating images."""
    from lora_trainer.models.modular import AnimaPipeline

    texts = load_texts(folder, None, device)
    pipeline = AnimaPipeline()
    pipeline.update_components(
        vae=drawing_vae(folder, dtype, device),
        text_encoder=texts.encoders[QWEN],
        text_conditioner=texts.encoders[CONDITIONER],
        tokenizer=texts.tokenizers[QWEN],
        t5_tokenizer=texts.tokenizers[T5],
        transformer=load_transformer(folder, dtype, device),
        scheduler=make_scheduler(folder),
    )
    return pipeline


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    return {"embeds": (TOKENS, int(config.get("text_embed_dim", 1024)))}


def denoiser_part(stored: Stored) -> Part:
    """Config and places of Anima's transformer, among whose tensors its text conditioner lies."""
    own = replace(
        stored, shapes={name: shape for name, shape in stored.shapes.items() if not name.startswith(OF_CONDITIONER)}
    )
    heads = "blocks.0.self_attn"
    config = dict(public_architecture("anima").denoiser) | {
        "_class_name": KIND,
        "out_channels": stored.side("final_layer.linear.weight", 0) // PATCH**2,
        "num_layers": stored.count("blocks."),
        "attention_head_dim": stored.side(f"{heads}.q_norm.weight", 0),
        "num_attention_heads": stored.side(f"{heads}.q_proj.weight", 0) // stored.side(f"{heads}.q_norm.weight", 0),
        "text_embed_dim": stored.side("blocks.0.cross_attn.k_proj.weight", 1),
        "adaln_lora_dim": stored.side("blocks.0.adaln_modulation_mlp.1.weight", 0),
    }
    layout = (*LAYOUT, *REST)
    return Part(config, by_layout(own, layout, (*UNUSED_OF_COSMOS, *COUNTERS_OF_COSMOS)))


def conditioner_part(stored: Stored) -> Part:
    """Config and places of Anima's text conditioner, which has diffusers' names."""
    own = stored.inside(OF_CONDITIONER)
    width = own.side("blocks.0.self_attn.q_proj.weight", 0)
    config = {
        "_class_name": "AnimaTextConditioner",
        "source_dim": own.side("blocks.0.cross_attn.k_proj.weight", 1),
        "target_dim": own.side("embed.weight", 1),
        "model_dim": width,
        "num_layers": own.count("blocks."),
        "num_attention_heads": width // own.side("blocks.0.self_attn.q_norm.weight", 0),
        "mlp_ratio": own.side("blocks.0.mlp.0.weight", 0) / width,
        "target_vocab_size": own.side("embed.weight", 0),
        "min_sequence_length": 512,
    }
    return Part(config, renamed(own, lambda name: name))


load_transformer, make_denoiser = transformer_functions(KIND, cosmos_transformer)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    check=check_text,
)
FAMILY = Family(
    name="anima",
    read_facts=describe,
    denoiser=DenoiserSpec(
        component="transformer",
        load=load_transformer,
        make=make_denoiser,
        make_process=make_process,
        predict=predict,
        lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
        thin=thinner(4, 4),
        thinness=THINNESS,
    ),
    encoders=encoders_from(
        load_whole_image_encoder, TEXT, one_encoder_keys(parts=(QWEN, TOKENIZER, CONDITIONER, T5_TOKENIZER))
    ),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name="AnimaModularPipeline",
        make=make_pipeline,
        sampling_defaults=lambda folder: SamplingDefaults(steps=50),
    ),
    lora_files=LoraFileSpec(
        base_names=lambda facts: ("anima", "anima/lora"),
        prefixes={"transformer": "lora_unet", "text_encoder": "lora_te"},
        layout=LAYOUT,
        readers=(
            "diffusers: original",
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
        ),
    ),
    checkpoint=CheckpointSpec(
        mark="llm_adapter.out_proj.weight", denoiser=denoiser_part, beside={"text_conditioner": conditioner_part}
    ),
)
