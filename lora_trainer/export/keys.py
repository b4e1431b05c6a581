"""Names of LoRA weights: module names <-> diffusers keys <-> kohya keys.

A module is named as diffusers names it, with its component first:
`unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q`. A kohya name is the
component's kohya prefix and the rest with dots turned into underscores, so the way back
needs to know which underscores belong to a name: that is what `COMPOUND` lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lora_trainer.export.layout import Names

# Components of a pipeline with one text encoder and the prefix of each in kohya's files.
KOHYA_PREFIXES: Mapping[str, str] = {"unet": "lora_unet", "text_encoder": "lora_te"}
ONE_TEXT_ENCODER = Names("sd15", "unet", KOHYA_PREFIXES)
# Every prefix that is read. Where there are two text encoders, kohya numbers both.
COMPONENT_OF_PREFIX: Mapping[str, str] = {
    "lora_unet": "unet",
    "lora_te": "text_encoder",
    "lora_te1": "text_encoder",
    "lora_te2": "text_encoder_2",
}

DIFFUSERS_DOWN, DIFFUSERS_UP = ".lora_A.weight", ".lora_B.weight"
KOHYA_DOWN, KOHYA_UP, KOHYA_ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"

# Parts of module names that hold underscores of their own, in U-Nets, transformers and CLIP.
COMPOUND = frozenset(
    "down_blocks up_blocks mid_block transformer_blocks single_transformer_blocks to_q to_k to_v to_out to_add_out "
    "add_q_proj add_k_proj add_v_proj ff_context proj_in proj_out proj_mlp conv_in conv_out conv_shortcut "
    "time_emb_proj time_embedding add_embedding linear_1 linear_2 norm_q norm_k text_model self_attn q_proj k_proj "
    "v_proj out_proj text_projection x_embedder context_embedder time_text_embed".split()
)
_LONGEST = max(name.count("_") for name in COMPOUND) + 1

# diffusers does not know SDXL's size embedding by its own name in kohya's form, only by the first SDXL code's.
SPECIAL: Mapping[str, str] = {"add_embedding.linear_1": "label_emb_0_0", "add_embedding.linear_2": "label_emb_0_2"}
_SPECIAL_BACK = {kohya: module for module, kohya in SPECIAL.items()}


def kohya_name(module: str, prefixes: Mapping[str, str] = KOHYA_PREFIXES) -> str:
    """`unet.mid_block.attentions.0.proj_in` -> `lora_unet_mid_block_attentions_0_proj_in`.

    Raises KeyError when the module's component has no kohya prefix.
    """
    component, _, rest = module.partition(".")
    return f"{prefixes[component]}_{SPECIAL.get(rest) or rest.replace('.', '_')}"


def module_of_kohya(name: str) -> str | None:
    """The module that a kohya name stands for; None when no component has its prefix."""
    for prefix, component in COMPONENT_OF_PREFIX.items():
        if name.startswith(prefix + "_"):
            rest = name.removeprefix(prefix + "_")
            return f"{component}.{_SPECIAL_BACK.get(rest) or _dotted(rest)}"
    return None


def _dotted(underscored: str) -> str:
    """Put the dots back, taking the longest known compound at each place."""
    words = underscored.split("_")
    parts: list[str] = []
    at = 0
    while at < len(words):
        for length in range(min(_LONGEST, len(words) - at), 0, -1):
            part = "_".join(words[at : at + length])
            if length == 1 or part in COMPOUND:
                break
        parts.append(part)
        at += length
    return ".".join(parts)


def ambiguous_names(modules: Iterable[str], prefixes: Mapping[str, str] = KOHYA_PREFIXES) -> list[str]:
    """Modules whose kohya name does not lead back to them: these must not be written in kohya's form."""
    return [module for module in modules if module_of_kohya(kohya_name(module, prefixes)) != module]
