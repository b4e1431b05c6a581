"""Transformers of the original layouts: SD3, FLUX.1, FLUX.2, Chroma, Z-Image, Qwen-Image, Qwen-Image 2.1, Krea 2 and Anima, by their families' tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lora_trainer.export.layout import Layout, Rule
from lora_trainer.models import FAMILIES
from lora_trainer.models.krea2 import BLOCKS as KREA2_BLOCKS
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.recognize import ZERO_FOR_CONTROLS
from lora_trainer.models.single.stored import Part, Stored, by_layout, renamed

PLACES_OF_A_TOKEN = 4  # of the latents
# Tensors that no LoRA changes, so that no family's table has them: norms, and SD3's table of positions. Whole names.
SD3_REST: Layout = (
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
FLUX_REST: Layout = (
    *(
        Rule(f"{ours}.weight", f"{theirs}.{leaf}")
        for leaf in ("scale", "weight")  # the first code's, and that of what ComfyUI saves
        for ours, theirs in (
            ("transformer_blocks.{}.attn.norm_q", "double_blocks.{}.img_attn.norm.query_norm"),
            ("transformer_blocks.{}.attn.norm_k", "double_blocks.{}.img_attn.norm.key_norm"),
            ("transformer_blocks.{}.attn.norm_added_q", "double_blocks.{}.txt_attn.norm.query_norm"),
            ("transformer_blocks.{}.attn.norm_added_k", "double_blocks.{}.txt_attn.norm.key_norm"),
            ("single_transformer_blocks.{}.attn.norm_q", "single_blocks.{}.norm.query_norm"),
            ("single_transformer_blocks.{}.attn.norm_k", "single_blocks.{}.norm.key_norm"),
        )
    ),
)


def sd3_part(stored: Stored) -> Part:
    """Config and places of SD3's transformer: 3.0, 3.5 medium (layers with a second attention) or 3.5 large by its form."""
    layers = stored.count("joint_blocks.")
    places = by_layout(stored, (*FAMILIES["sd3"].lora_files.layout, *SD3_REST))
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


def flux_part(stored: Stored) -> Part:
    """Config and places of FLUX.1's transformer: dev has a guidance input, schnell has none."""
    config = dict(public_architecture("flux").denoiser) | {
        "_class_name": "FluxTransformer2DModel",
        "in_channels": stored.side("img_in.weight", 1),
        "num_layers": stored.count("double_blocks."),
        "num_single_layers": stored.count("single_blocks."),
        "num_attention_heads": stored.side("img_in.weight", 0) // 128,
        "joint_attention_dim": stored.side("txt_in.weight", 1),
        "pooled_projection_dim": stored.side("vector_in.in_layer.weight", 1),
        "guidance_embeds": "guidance_in.in_layer.weight" in stored.shapes,
    }
    return Part(config, by_layout(stored, (*FAMILIES["flux"].lora_files.layout, *FLUX_REST)))


CHROMA_REST: Layout = (
    *FLUX_REST,
    *(
        Rule("distilled_guidance_layer.norms.{}.weight", f"distilled_guidance_layer.norms.{{}}.{leaf}")
        for leaf in ("scale", "weight")
    ),
)


def chroma_part(stored: Stored) -> Part:
    """Config and places of Chroma's transformer."""
    config = dict(public_architecture("chroma").denoiser) | {
        "_class_name": "ChromaTransformer2DModel",
        "in_channels": stored.side("img_in.weight", 1),
        "num_layers": stored.count("double_blocks."),
        "num_single_layers": stored.count("single_blocks."),
        "num_attention_heads": stored.side("img_in.weight", 0) // 128,
        "joint_attention_dim": stored.side("txt_in.weight", 1),
        "approximator_num_channels": stored.side("distilled_guidance_layer.in_proj.weight", 1),
        "approximator_hidden_dim": stored.side("distilled_guidance_layer.in_proj.weight", 0),
        "approximator_layers": stored.count("distilled_guidance_layer.layers."),
    }
    return Part(config, by_layout(stored, (*FAMILIES["chroma"].lora_files.layout, *CHROMA_REST)))


def flux2_part(stored: Stored) -> Part:
    """Config and places of FLUX.2 klein's transformer: 4 or 9 billion weights by its form."""
    config = dict(public_architecture("flux2").denoiser) | {
        "_class_name": "Flux2Transformer2DModel",
        "in_channels": stored.side("img_in.weight", 1),
        "num_layers": stored.count("double_blocks."),
        "num_single_layers": stored.count("single_blocks."),
        "num_attention_heads": stored.side("img_in.weight", 0) // 128,
        "joint_attention_dim": stored.side("txt_in.weight", 1),
        "timestep_guidance_channels": stored.side("time_in.in_layer.weight", 1),
    }
    return Part(config, by_layout(stored, (*FAMILIES["flux2"].lora_files.layout, *FLUX_REST)))


Z_IMAGE_REST: Layout = tuple(Rule(name, name) for name in ("x_pad_token", "cap_pad_token"))
UNUSED_OF_Z_IMAGE = ("norm_final.weight",)  # which the first code keeps and never uses


def z_image_part(stored: Stored) -> Part:
    """Config and places of Z-Image's transformer."""
    width, head = stored.side("x_embedder.weight", 0), stored.side("layers.0.attention.q_norm.weight", 0)
    config = dict(public_architecture("z_image").denoiser) | {
        "_class_name": "ZImageTransformer2DModel",
        "in_channels": stored.side("x_embedder.weight", 1) // PLACES_OF_A_TOKEN,
        "dim": width,
        "n_layers": stored.count("layers."),
        "n_refiner_layers": stored.count("noise_refiner."),
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "cap_feat_dim": stored.side("cap_embedder.1.weight", 1),
    }
    return Part(config, by_layout(stored, (*FAMILIES["z_image"].lora_files.layout, *Z_IMAGE_REST), UNUSED_OF_Z_IMAGE))


def qwen_image_part(stored: Stored) -> Part:
    """Config and places of Qwen-Image's transformer, whose original names are diffusers'; ComfyUI marks 2511 in them."""
    config = dict(public_architecture("qwen_image").denoiser) | {
        "_class_name": "QwenImageTransformer2DModel",
        "in_channels": stored.side("img_in.weight", 1),
        "out_channels": stored.side("proj_out.weight", 0) // PLACES_OF_A_TOKEN,
        "num_layers": stored.count("transformer_blocks."),
        "num_attention_heads": stored.side("img_in.weight", 0) // 128,
        "joint_attention_dim": stored.side("txt_in.weight", 1),
    }
    return Part(config, by_layout(stored, FAMILIES["qwen_image"].lora_files.layout, (ZERO_FOR_CONTROLS,)))


# diffusers' own files have both layers by themselves.
QWEN_IMAGE21_APART: Layout = tuple(
    Rule(name, name) for name in (f"transformer_blocks.{{}}.img_mlp.{part}" for part in ("gate_layer", "proj"))
)


def qwen_image21_part(stored: Stored) -> Part:
    """Config and places of Qwen-Image 2.1's transformer, whose original names are diffusers' but for one fused layer."""
    head, out = stored.side("transformer_blocks.0.attn.norm_q.weight", 0), "transformer_blocks.0.img_mlp.out.weight"
    config = dict(public_architecture("qwen_image21").denoiser) | {
        "_class_name": "QwenImage21Transformer2DModel",
        "in_channels": stored.side("img_in.weight", 1),
        "out_channels": stored.side("proj_out.weight", 0),
        "num_layers": stored.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": stored.side("img_in.weight", 0) // head,
        "context_in_dim": stored.side("txt_in.text_norm.weight", 0),
        "mlp_ratio": stored.side(out, 1) // stored.side(out, 0),
    }
    return Part(config, by_layout(stored, (*FAMILIES["qwen_image21"].lora_files.layout, *QWEN_IMAGE21_APART)))


KREA2_REST: Layout = (
    *(
        Rule(f"{ours}.{{}}.{name}.weight", f"{theirs}.{{}}.{other}.scale")
        for ours, theirs in KREA2_BLOCKS.items()
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
KREA2_HEAD = 128  # channels


def krea2_part(stored: Stored) -> Part:
    """Config and places of Krea 2's transformer."""
    text = "txtfusion.layerwise_blocks"
    config = dict(public_architecture("krea2").denoiser) | {
        "_class_name": "Krea2Transformer2DModel",
        "in_channels": stored.side("first.weight", 1),
        "num_layers": stored.count("blocks."),
        "num_attention_heads": stored.side("blocks.0.attn.wq.weight", 0) // KREA2_HEAD,
        "num_key_value_heads": stored.side("blocks.0.attn.wk.weight", 0) // KREA2_HEAD,
        "intermediate_size": stored.side("blocks.0.mlp.up.weight", 0),
        "timestep_embed_dim": stored.side("tmlp.0.weight", 1),
        "text_hidden_dim": stored.side("txtmlp.1.weight", 1),
        "num_text_layers": stored.side("txtfusion.projector.weight", 1),
        "text_num_attention_heads": stored.side(f"{text}.0.attn.wq.weight", 0) // KREA2_HEAD,
        "text_num_key_value_heads": stored.side(f"{text}.0.attn.wk.weight", 0) // KREA2_HEAD,
        "text_intermediate_size": stored.side(f"{text}.0.mlp.up.weight", 0),
        "num_layerwise_text_blocks": stored.count(f"{text}."),
        "num_refiner_text_blocks": stored.count("txtfusion.refiner_blocks."),
    }
    return Part(config, by_layout(stored, (*FAMILIES["krea2"].lora_files.layout, *KREA2_REST)))


ANIMA_REST: Layout = (
    *(
        Rule(f"transformer_blocks.{{}}.{ours}.norm_{name}.weight", f"blocks.{{}}.{theirs}.{name}_norm.weight")
        for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for name in ("q", "k")
    ),
    Rule("time_embed.norm.weight", "t_embedding_norm.weight"),
)
CONDITIONER = "llm_adapter."  # begins the names of Anima's text conditioner
# Tables of positions and counters of Cosmos's first code, which are computed or never read.
UNUSED_OF_COSMOS = ("pos_embedder.seq", "dim_spatial_range", "dim_temporal_range", "_extra_state")
COUNTERS_OF_COSMOS = (
    "accum_video_sample_counter",
    "accum_image_sample_counter",
    "accum_iteration",
    "accum_train_in_hours",
)


def anima_part(stored: Stored) -> Part:
    """Config and places of Anima's transformer, among whose tensors its text conditioner lies."""
    own = replace(
        stored, shapes={name: shape for name, shape in stored.shapes.items() if not name.startswith(CONDITIONER)}
    )
    heads = "blocks.0.self_attn"
    config = dict(public_architecture("anima").denoiser) | {
        "_class_name": "CosmosTransformer3DModel",
        "out_channels": stored.side("final_layer.linear.weight", 0) // PLACES_OF_A_TOKEN,
        "num_layers": stored.count("blocks."),
        "attention_head_dim": stored.side(f"{heads}.q_norm.weight", 0),
        "num_attention_heads": stored.side(f"{heads}.q_proj.weight", 0) // stored.side(f"{heads}.q_norm.weight", 0),
        "text_embed_dim": stored.side("blocks.0.cross_attn.k_proj.weight", 1),
        "adaln_lora_dim": stored.side("blocks.0.adaln_modulation_mlp.1.weight", 0),
    }
    layout = (*FAMILIES["anima"].lora_files.layout, *ANIMA_REST)
    return Part(config, by_layout(own, layout, (*UNUSED_OF_COSMOS, *COUNTERS_OF_COSMOS)))


def anima_conditioner_part(stored: Stored) -> Part:
    """Config and places of Anima's text conditioner, which has diffusers' names."""
    own = stored.inside(CONDITIONER)
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


TRANSFORMERS: dict[str, Callable[[Stored], Part]] = {
    "sd3": sd3_part,
    "flux": flux_part,
    "flux2": flux2_part,
    "chroma": chroma_part,
    "z_image": z_image_part,
    "qwen_image": qwen_image_part,
    "qwen_image21": qwen_image21_part,
    "krea2": krea2_part,
    "anima": anima_part,
}
# Other parts of a model that lie among its transformer's tensors, by component.
BESIDE: dict[str, dict[str, Callable[[Stored], Part]]] = {"anima": {"text_conditioner": anima_conditioner_part}}
