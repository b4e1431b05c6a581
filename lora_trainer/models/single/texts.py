"""Text encoders of checkpoints: CLIP by transformers' names or by OpenCLIP's, T5, Qwen3, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.families import families
from lora_trainer.core.io import atomic_path
from lora_trainer.lora_format.layouts import Layout, Rule, fused
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.places import Place, laid_out_models
from lora_trainer.models.single.stored import Part, Stored, by_layout, refuse_not_read, refuse_sides, renamed

if TYPE_CHECKING:
    from lora_trainer.models.family import TextKind

TITLES = {"t5": "T5", "qwen3": "Qwen3", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}
HEAD = 64  # channels, in every published CLIP and T5
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
PROJECTION = "text_projection.weight"
PUBLISHED: dict[str, Any] = {
    "bos_token_id": 49406,
    # As published: it makes transformers take the token with the highest number for a caption's end.
    "eos_token_id": 2,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 77,
    "pad_token_id": 1,
}
LAYER = "text_model.encoder.layers.{}"
LAYER_NUMBER = re.compile(r"text_model\.encoder\.layers\.(\d{1,3})\.", re.ASCII)
BLOCK = "transformer.resblocks.{}"
OPEN_CLIP: Layout = (
    *(
        rule
        for leaf in ("weight", "bias")
        for rule in fused(
            f"{BLOCK}.attn.in_proj_{leaf}", *(f"{LAYER}.self_attn.{name}_proj.{leaf}" for name in ("q", "k", "v"))
        )
    ),
    Rule(f"{LAYER}.self_attn.out_proj", f"{BLOCK}.attn.out_proj"),
    Rule(f"{LAYER}.mlp.fc1", f"{BLOCK}.mlp.c_fc"),
    Rule(f"{LAYER}.mlp.fc2", f"{BLOCK}.mlp.c_proj"),
    Rule(f"{LAYER}.layer_norm1", f"{BLOCK}.ln_1"),
    Rule(f"{LAYER}.layer_norm2", f"{BLOCK}.ln_2"),
    Rule("text_model.final_layer_norm", "ln_final"),
    Rule("text_model.embeddings.token_embedding", "token_embedding"),
    Rule("text_model.embeddings.position_embedding.weight", "positional_embedding"),
    Rule(PROJECTION, "text_projection"),
)
LAYERS_OF_H = 24  # the CLIP of 2.x, between the two others
QWEN_NORM, QWEN2_BIAS = "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_proj.bias"
QWEN_HEAD = 128  # channels, in every published one of both
EYES = "visual."  # begins the names of the half of Qwen-VL that sees images
PATCHES = f"{EYES}patch_embed.proj.weight"
EYES_HEAD = 80  # channels, in every published Qwen2.5-VL
ROPES = {
    "qwen2_5_vl": {"mrope_section": [16, 24, 24], "rope_theta": 1000000.0},
    "qwen3_vl": {"mrope_section": [24, 20, 20], "rope_theta": 5000000.0, "mrope_interleaved": True},
}
BEFORE_LAYERS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")  # over the years
NOT_WEIGHTS = ("logit_scale", "attn_mask", "position_ids")
TEXT_MODEL = ("embeddings.", "encoder.", "final_layer_norm.")  # of CLIP, whose other half reads images
WIDEST = 8192  # channels of a CLIP; published ones have up to 1280


def text_encoders_of(family: str) -> dict[str, tuple[str, str]]:
    """Kind and prefix of each text encoder in a checkpoint of a family, by component."""
    listed = families().get(family, {}).get("single_file", {}).get("text_encoders", {})
    return {component: (kind, prefix) for component, (kind, prefix) in listed.items()}


def tokenizers_alone(family: str) -> dict[str, str]:
    """The tokenizers of a family that belong to no text encoder, and of which kind each is."""
    return dict(families().get(family, {}).get("single_file", {}).get("tokenizers", {}))


def own_kinds() -> dict[str, TextKind]:
    """The kinds of text encoders that one family alone has."""
    kinds: dict[str, TextKind] = {}
    for family in FAMILIES.values():
        if family.checkpoint is not None:
            kinds |= family.checkpoint.text_kinds
    return kinds


def title_of(kind: str) -> str:
    """What people call a kind of text encoder."""
    return own_kinds()[kind].title if kind in own_kinds() else TITLES[kind]


def text_part(kind: str, stored: Stored, *, sees: bool = False) -> Part:
    """Config and places of a text encoder of a kind, of Qwen2.5-VL with the half that sees images where it `sees`.

    Raises UsageError for one that is quantized, or damaged.
    """
    refuse_not_read(stored)
    if own := own_kinds().get(kind):
        return own.lay_out(stored)
    if kind == "t5":
        return t5_part(stored)
    if kind == "qwen3":
        return qwen_part(stored)
    if kind in ROPES:
        return qwen_vl_part(stored, kind, sees=sees and kind == "qwen2_5_vl")
    if any(name.startswith("transformer.resblocks.") for name in stored.shapes):
        return open_clip_part(stored, projected=kind != "open_clip_h")
    activation = "quick_gelu" if kind.startswith("clip_l") else "gelu"
    as_it_is = kind == "clip_l_projected"
    return clip_part(stored, activation, projected=as_it_is or kind.endswith("clip_g"), as_it_is=as_it_is)


def kind_of_file(stored: Stored) -> str | None:
    """The kind of a text encoder in a file of its own, as ComfyUI keeps them: `clip_l`, `clip_g`, `t5`, `qwen3`, `qwen3_vl` or `qwen2_5_vl`."""
    for kind, own in own_kinds().items():
        if own.fits(stored):
            return kind
    if BIAS in stored.shapes:
        return "t5"
    for begin in BEFORE_LAYERS:
        if f"{begin}{QWEN_NORM}" in stored.shapes:
            sees = "language_model" in begin or any("visual." in name for name in stored.shapes)
            return "qwen3_vl" if sees else "qwen3"
    if any(f"{begin}{QWEN2_BIAS}" in stored.shapes for begin in BEFORE_LAYERS):
        return "qwen2_5_vl"
    layers = max(stored.count("text_model.encoder.layers."), stored.count("transformer.resblocks."))
    if not layers:
        return None
    return "clip_g" if layers > LAYERS_OF_H else "clip_l" if layers < LAYERS_OF_H - 1 else None


def clip_part(stored: Stored, activation: str, *, projected: bool, as_it_is: bool = False) -> Part:
    """CLIP by transformers' names, with or without `text_model.` before them.

    `as_it_is`: its summary is projected by ones on the diagonal, whatever the file holds. SD3's first encoder is read
    so, whose checkpoints lack a projection, or have CLIP's own, which no program reads.
    """

    def rename(name: str) -> str | None:
        if name == PROJECTION:
            return name if projected and not as_it_is else None
        own = name.removeprefix("text_model.")
        return f"text_model.{own}" if own.startswith(TEXT_MODEL) and not own.endswith(NOT_WEIGHTS) else None

    places = renamed(stored, rename)
    if as_it_is:
        places[PROJECTION] = identity(_width(stored, places))
    return _clip(stored, places, activation, PROJECTION if projected and not as_it_is else "")


def open_clip_part(stored: Stored, *, projected: bool) -> Part:
    """OpenCLIP by its own names. Without the projection it is that of 2.x, whose last layer is never read."""
    places = by_layout(stored, OPEN_CLIP, NOT_WEIGHTS)
    if PROJECTION in places:
        places[PROJECTION] = replace(places[PROJECTION], transposed=True)
    if not projected:
        places.pop(PROJECTION, None)
        last = stored.count("transformer.resblocks.") - 1
        places = {name: place for name, place in places.items() if not name.startswith(LAYER.format(last) + ".")}
    return _clip(stored, places, "gelu", "text_projection" if projected else "")


def _width(stored: Stored, places: dict[str, Place]) -> int:
    words = _name(stored, places, "text_model.embeddings.token_embedding.weight")
    if (width := stored.side(words, 1)) > WIDEST:  # a projection of as many squared is written for it
        refuse_sides(stored, words)
    return width


def _name(stored: Stored, places: dict[str, Place], ours: str) -> str:
    place = places.get(ours)
    return ours if place is None else place.key.removeprefix(stored.prefix)


def _clip(stored: Stored, places: dict[str, Place], activation: str, projection: str) -> Part:
    """`projection`: its name in the file, where it must hold one."""
    words = _name(stored, places, "text_model.embeddings.token_embedding.weight")
    width = stored.side(words, 1)
    layers = 1 + max((int(found[1]) for name in places if (found := LAYER_NUMBER.match(name))), default=-1)
    projected_to = width
    if projection:
        sides = stored.side(projection, 0), stored.side(projection, 1)
        projected_to = sides[places[PROJECTION].transposed]
    config = {
        **PUBLISHED,
        "architectures": ["CLIPTextModelWithProjection" if PROJECTION in places else "CLIPTextModel"],
        "model_type": "clip_text_model",
        "hidden_act": activation,
        "hidden_size": width,
        "intermediate_size": stored.side(_name(stored, places, "text_model.encoder.layers.0.mlp.fc1.weight"), 0),
        "max_position_embeddings": stored.side(
            _name(stored, places, "text_model.embeddings.position_embedding.weight"), 0
        ),
        "num_attention_heads": max(1, width // HEAD),
        "num_hidden_layers": layers,
        "projection_dim": projected_to,
        "vocab_size": stored.side(words, 0),
    }
    return Part(config, places)


def t5_part(stored: Stored) -> Part:
    """The encoder of T5 1.1, by transformers' names."""
    known = {name: name for name in stored.shapes if name.startswith(("encoder.", "shared."))}
    width, heads = stored.side("encoder.final_layer_norm.weight", 0), stored.side(BIAS, 1)
    words = "shared.weight" if "shared.weight" in known else "encoder.embed_tokens.weight"
    config = {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "d_ff": stored.side("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 0),
        "d_kv": stored.side("encoder.block.0.layer.0.SelfAttention.q.weight", 0) // heads,
        "d_model": width,
        "num_layers": stored.count("encoder.block."),
        "num_decoder_layers": stored.count("encoder.block."),
        "num_heads": heads,
        "relative_attention_num_buckets": stored.side(BIAS, 0),
        "relative_attention_max_distance": 128,
        "vocab_size": stored.side(words, 0),
        "feed_forward_proj": "gated-gelu",
        "dense_act_fn": "gelu_new",
        "is_gated_act": True,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "layer_norm_epsilon": 1e-06,
        "dropout_rate": 0.1,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    return Part(config, renamed(stored, known.get))


def identity(width: int) -> Place:
    """An identity matrix, in a small file of the cache, for a projection that changes nothing."""
    path = laid_out_models() / f"identity-{width}.safetensors"
    if not path.exists():
        one, nothing = struct.pack("<e", 1.0), bytes(2)
        data = b"".join(nothing * row + one + nothing * (width - row - 1) for row in range(width))
        entry = {"dtype": "F16", "shape": [width, width], "data_offsets": [0, len(data)]}
        header = json.dumps({PROJECTION: entry}).encode()
        header += b" " * (math.ceil(len(header) / 8) * 8 - len(header))
        with atomic_path(path) as temporary:
            Path(temporary).write_bytes(struct.pack("<Q", len(header)) + header + data)
    return Place(path, PROJECTION)


def qwen_part(stored: Stored) -> Part:
    """Qwen3 by transformers' names, with or without `model.` before them; the output head is skipped."""
    begin = "model." if "model.embed_tokens.weight" in stored.shapes else ""
    places = renamed(
        stored, lambda name: name.removeprefix(begin) if name.startswith(begin) and "lm_head" not in name else None
    )
    attention = f"{begin}layers.0.self_attn"
    head = stored.side(f"{attention}.q_norm.weight", 0)
    config = {
        "architectures": ["Qwen3Model"],
        "model_type": "qwen3",
        "head_dim": head,
        "hidden_act": "silu",
        "hidden_size": stored.side(f"{begin}embed_tokens.weight", 1),
        "intermediate_size": stored.side(f"{begin}layers.0.mlp.gate_proj.weight", 0),
        "max_position_embeddings": 40960,
        "num_attention_heads": stored.side(f"{attention}.q_proj.weight", 0) // head,
        "num_hidden_layers": stored.count(f"{begin}layers."),
        "num_key_value_heads": stored.side(f"{attention}.k_proj.weight", 0) // head,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "vocab_size": stored.side(f"{begin}embed_tokens.weight", 0),
    }
    return Part(config, places)


def qwen_vl_part(stored: Stored, kind: str, *, sees: bool = False) -> Part:
    """The language model of Qwen2.5-VL or Qwen3-VL, by transformers' names of any version.

    What sees images is skipped, unless the model `sees` control images, as Qwen-Image-Edit does with Qwen2.5-VL.
    """
    mark = QWEN2_BIAS if kind == "qwen2_5_vl" else QWEN_NORM
    begin = next((each for each in BEFORE_LAYERS if f"{each}{mark}" in stored.shapes), "")
    parts = ("embed_tokens.", "layers.", "norm.")
    eyes = next((each for each in ("model.", "") if f"{each}{PATCHES}" in stored.shapes), "")

    def rename(name: str) -> str | None:
        if sees and name.startswith(f"{eyes}{EYES}"):
            return name.removeprefix(eyes)
        own = name.removeprefix(begin)
        return own if name.startswith(begin) and own.startswith(parts) else None

    attention = f"{begin}layers.0.self_attn"
    config = {
        "hidden_act": "silu",
        "hidden_size": stored.side(f"{begin}embed_tokens.weight", 1),
        "intermediate_size": stored.side(f"{begin}layers.0.mlp.gate_proj.weight", 0),
        "max_position_embeddings": 128000,
        "num_attention_heads": max(1, stored.side(f"{attention}.q_proj.weight", 0) // QWEN_HEAD),
        "num_hidden_layers": stored.count(f"{begin}layers."),
        "num_key_value_heads": max(1, stored.side(f"{attention}.k_proj.weight", 0) // QWEN_HEAD),
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", **ROPES[kind]},
        **({"use_sliding_window": False} if kind == "qwen2_5_vl" else {"head_dim": QWEN_HEAD}),
        "vocab_size": stored.side(f"{begin}embed_tokens.weight", 0),
    }
    whole = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration" if kind == "qwen2_5_vl" else "Qwen3VLModel"],
        "model_type": kind,
        "text_config": {**config, "model_type": f"{kind}_text"},
        **({"vision_config": _eyes_config(stored, eyes)} if sees else {}),
    }
    return Part(whole, renamed(stored, rename))


def _eyes_config(stored: Stored, begin: str) -> dict[str, Any]:
    """The half of Qwen2.5-VL that sees images. Raises UsageError where the file lacks it."""
    if f"{begin}{PATCHES}" not in stored.shapes:
        message = f"{stored.file} holds Qwen2.5-VL without the half that sees images, which an edit model needs."
        raise UsageError(
            Problem(
                "text_encoder_incomplete",
                message,
                "Name ComfyUI's qwen_2.5_vl_7b file, or the text encoder of an edit model.",
            )
        )
    width = stored.side(f"{begin}{PATCHES}", 0)
    return {
        "model_type": "qwen2_5_vl",
        "depth": stored.count(f"{begin}{EYES}blocks."),
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": stored.side(f"{begin}{EYES}blocks.0.mlp.gate_proj.weight", 0),
        "num_heads": max(1, width // EYES_HEAD),
        "in_channels": stored.side(f"{begin}{PATCHES}", 1),
        "out_hidden_size": stored.side(f"{begin}{EYES}merger.mlp.2.weight", 0),
        "patch_size": stored.side(f"{begin}{PATCHES}", -1),
        "spatial_merge_size": 2,
        "temporal_patch_size": stored.side(f"{begin}{PATCHES}", 2),
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "window_size": 112,
    }
