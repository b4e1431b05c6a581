"""Lumina 2 in miniature, and what tests over all families expect of it."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from torch import Tensor
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from tests.models.single.originals import joined, vae_original

MILLIONS = 2610  # of weights, as published
HEADER = ("lumina2", "False", "lumina-2/lora", None)
TEXT_KEY = "adeced5b477616af18d45624a9ade9fe-torch.float16"
OTHER_TRAINERS = (("lumina2",), ("lumina2",), ())  # ai-toolkit, SimpleTuner, OneTrainer
WIDTH = 64  # of the text
HEADS = {"num_attention_heads": 3, "num_kv_heads": 1}


def tiny_pipeline() -> Lumina2Pipeline:
    return Lumina2Pipeline(
        transformer=tiny_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=tiny_vae(block_out_channels=(8, 16, 16, 16), norm_num_groups=4, scaling_factor=0.5, shift_factor=0.1),
        text_encoder=tiny_gemma(),
        tokenizer=gemma_tokenizer(),
    )


def tiny_transformer(**other: Any) -> Lumina2Transformer2DModel:
    """Of heads of 16 channels; `other` are published values that a checkpoint does not store."""
    sizes = {"hidden_size": 48, "num_layers": 2, "num_refiner_layers": 1, "cap_feat_dim": WIDTH, "multiple_of": 16}
    places = {"axes_dim_rope": (4, 6, 6), "axes_lens": (300, 64, 64)}
    return Lumina2Transformer2DModel(**{**sizes, **places, **HEADS, "in_channels": 16, **other})


def published_tiny_pipeline() -> Lumina2Pipeline:
    """With published places, head sizes and scales, which no single file stores."""
    pipeline = tiny_pipeline()
    heads = {"hidden_size": 3 * 96, "axes_dim_rope": (32, 32, 32), "axes_lens": (300, 512, 512), "multiple_of": 256}
    pipeline.transformer = tiny_transformer(**heads)
    pipeline.text_encoder = tiny_gemma(head_dim=256, query_pre_attn_scalar=256)
    pipeline.vae = tiny_vae(block_out_channels=(32, 32, 32, 64), scaling_factor=0.3611, shift_factor=0.1159)
    return pipeline


def original_names(transformer: Lumina2Transformer2DModel) -> dict[str, Tensor]:
    """Its weights by the names of the first code, as the published single file has them."""
    renamed = {
        "time_caption_embed.caption_embedder": "cap_embedder",
        "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
        "norm1.linear": "adaLN_modulation.1",
        "norm1.norm": "attention_norm1",
        ".norm1.": ".attention_norm1.",
        ".norm2.": ".attention_norm2.",
        "attn.to_out.0": "attention.out",
        "attn.norm_": "attention.norm_",
        "norm_q": "q_norm",
        "norm_k": "k_norm",
        "linear_1": "w1",
        "linear_2": "w2",
        "linear_3": "w3",
    }
    found: dict[str, Tensor] = {"norm_final.weight": torch.ones(transformer.config.hidden_size)}
    state = transformer.state_dict()
    for name, weight in state.items():
        if ".attn.to_q." in name:
            parts = [state[name.replace("to_q", each)] for each in ("to_q", "to_k", "to_v")]
            found[name.replace("attn.to_q", "attention.qkv")] = torch.cat(parts)
        elif ".attn.to_k." not in name and ".attn.to_v." not in name:
            for ours, theirs in renamed.items():
                name = name.replace(ours, theirs)
            found[name] = weight
    return found


def checkpoint(pipeline: Lumina2Pipeline, *, bare: bool = False) -> dict[str, Tensor]:
    """A single file as ComfyUI has it: the transformer alone, or with its text encoder and VAE."""
    transformer = original_names(pipeline.transformer)
    if bare:
        return transformer
    text = {f"model.{name}": each.clone() for name, each in pipeline.text_encoder.state_dict().items()}
    parts = {
        "model.diffusion_model.": transformer,
        "vae.": vae_original(pipeline.vae),
        "text_encoders.gemma2_2b.transformer.": text,
    }
    return joined(parts) | {"text_encoders.spiece_model": torch.zeros(8, dtype=torch.uint8)}


def tiny_vae(**other: Any) -> AutoencoderKL:
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return AutoencoderKL(**kinds, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, **other)


def tiny_gemma(**other: Any) -> Gemma2Model:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 16}
    config = Gemma2Config(**{**sizes, **heads, **other}, vocab_size=len(gemma_tokenizer()))
    return Gemma2Model(config).eval()


def gemma_tokenizer() -> GemmaTokenizer:
    """A tokenizer of letters and a few words, with Gemma's special tokens at its ids."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = ["▁", *map(chr, range(33, 127))]
    merges = [("r", "i"), ("n", "g"), ("ri", "ng"), ("ring", "▁"), ("r", "e"), ("re", "d"), ("red", "▁")]
    words = ["".join(pair) for pair in merges]
    vocabulary = {token: place for place, token in enumerate([*special, *letters, *words])}
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
