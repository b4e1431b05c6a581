"""Tiny models with original key names, converted from diffusers' in reverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer.lora_format.layouts import Layout, rule_of
from lora_trainer.models.families.anima import LAYOUT as ANIMA
from lora_trainer.models.families.anima import REST as ANIMA_REST
from lora_trainer.models.families.chroma import LAYOUT as CHROMA
from lora_trainer.models.families.chroma import REST as CHROMA_REST
from lora_trainer.models.families.flux import REST as FLUX_REST
from lora_trainer.models.families.flux2 import LAYOUT as FLUX2
from lora_trainer.models.families.krea2 import LAYOUT as KREA2
from lora_trainer.models.families.z_image import LAYOUT as Z_IMAGE

Tensors = dict[str, Tensor]
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}


def unet_original(unet: Any) -> Tensors:
    """By the block numbers of the original code."""
    layers, levels = unet.config.layers_per_block, len(unet.config.block_out_channels)
    names = dict(UNET_ENDS)
    for level in range(levels):
        for layer in range(layers):
            number = (layers + 1) * level + layer + 1
            names[f"down_blocks.{level}.resnets.{layer}"] = f"input_blocks.{number}.0"
            names[f"down_blocks.{level}.attentions.{layer}"] = f"input_blocks.{number}.1"
        names[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{(layers + 1) * (level + 1)}.0.op"
        for layer in range(layers + 1):
            number = (layers + 1) * level + layer
            names[f"up_blocks.{level}.resnets.{layer}"] = f"output_blocks.{number}.0"
            names[f"up_blocks.{level}.attentions.{layer}"] = f"output_blocks.{number}.1"
        attended = unet.config.up_block_types[level].startswith("Cross")
        names[f"up_blocks.{level}.upsamplers.0.conv"] = f"output_blocks.{number}.{2 if attended else 1}.conv"
    return _by_prefix(unet.state_dict(), names, lambda rest: _swapped(rest, RESNET))


def vae_original(vae: Any) -> Tensors:
    levels, names = len(vae.config.block_out_channels), dict[str, str]()
    for side in ("encoder", "decoder"):
        names |= {f"{side}.{end}": f"{side}.{end}" for end in ("conv_in", "conv_out")}
        names[f"{side}.conv_norm_out"] = f"{side}.norm_out"
        names[f"{side}.mid_block.attentions.0"] = f"{side}.mid.attn_1"
        names |= {f"{side}.mid_block.resnets.{number}": f"{side}.mid.block_{number + 1}" for number in (0, 1)}
    for level in range(levels):
        names |= {f"encoder.down_blocks.{level}.resnets.{n}": f"encoder.down.{level}.block.{n}" for n in range(3)}
        names[f"encoder.down_blocks.{level}.downsamplers.0"] = f"encoder.down.{level}.downsample"
        last = levels - 1 - level
        names |= {f"decoder.up_blocks.{level}.resnets.{n}": f"decoder.up.{last}.block.{n}" for n in range(3)}
        names[f"decoder.up_blocks.{level}.upsamplers.0"] = f"decoder.up.{last}.upsample"
    names |= {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    inner = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    inner["conv_shortcut"] = "nin_shortcut"
    found = _by_prefix(vae.state_dict(), names, lambda rest: _swapped(rest, inner))
    attention = [name for name in found if ".attn_1." in name and found[name].ndim == 2]
    return found | {name: found[name][:, :, None, None].contiguous() for name in attention}


def open_clip_original(encoder: Any, *, unused_layer: bool = False) -> Tensors:
    state = {name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}
    found = {
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
        "logit_scale": torch.tensor(1.0),
    }
    width = len(found["ln_final.weight"])
    projection = state.get("text_projection.weight", torch.zeros(width, width))
    found["text_projection"] = projection.t().contiguous()
    layers = encoder.config.num_hidden_layers
    for layer in range(layers + unused_layer):
        ours, theirs = f"encoder.layers.{min(layer, layers - 1)}", f"transformer.resblocks.{layer}"
        for leaf in ("weight", "bias"):
            rows = [state[f"{ours}.self_attn.{name}_proj.{leaf}"] for name in ("q", "k", "v")]
            found[f"{theirs}.attn.in_proj_{leaf}"] = torch.cat(rows)
            for one, other in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
            ):
                found[f"{theirs}.{other}.{leaf}"] = state[f"{ours}.{one}.{leaf}"].clone()
    return found


def clip_original(encoder: Any) -> Tensors:
    found = {f"text_model.{name.removeprefix('text_model.')}": each for name, each in encoder.state_dict().items()}
    if "text_model.text_projection.weight" in found:
        found["text_projection.weight"] = found.pop("text_model.text_projection.weight")
    return found | {"text_model.embeddings.position_ids": torch.arange(77)[None]}


def unet_checkpoint(pipeline: Any, family: str) -> Tensors:
    """All parts of a pipeline in one state dict, as the original code of its family saves them."""
    texts = {
        "sd15": lambda: {"cond_stage_model.transformer.": clip_original(pipeline.text_encoder)},
        "sd2": lambda: {"cond_stage_model.model.": open_clip_original(pipeline.text_encoder, unused_layer=True)},
        "sdxl": lambda: {
            "conditioner.embedders.0.transformer.": clip_original(pipeline.text_encoder),
            "conditioner.embedders.1.model.": open_clip_original(pipeline.text_encoder_2),
        },
    }[family]()
    parts = {"model.diffusion_model.": unet_original(pipeline.unet), "first_stage_model.": vae_original(pipeline.vae)}
    extra = {"alphas_cumprod": torch.ones(1000), "model_ema.decay": torch.tensor(0.9999)}
    return joined(parts | texts) | extra


STREAMS = {"img": ("to_q", "to_k", "to_v"), "txt": ("add_q_proj", "add_k_proj", "add_v_proj")}
EMBEDDERS = {"timestep_embedder": "time_in", "text_embedder": "vector_in", "guidance_embedder": "guidance_in"}


def flux_original(transformer: Any) -> Tensors:
    state, found = transformer.state_dict(), Tensors()

    def put(theirs: str, *ours: str, leaves: tuple[str, ...] = ("weight", "bias")) -> None:
        for leaf in leaves:
            found[f"{theirs}.{leaf}"] = torch.cat([state[f"{name}.{leaf}"] for name in ours])

    def norms(theirs: str, ours: str, kind: str = "norm") -> None:
        found[f"{theirs}.query_norm.scale"] = state[f"{ours}.{kind}_q.weight"]
        found[f"{theirs}.key_norm.scale"] = state[f"{ours}.{kind}_k.weight"]

    for ours, theirs in EMBEDDERS.items():
        if f"time_text_embed.{ours}.linear_1.weight" in state:
            put(f"{theirs}.in_layer", f"time_text_embed.{ours}.linear_1")
            put(f"{theirs}.out_layer", f"time_text_embed.{ours}.linear_2")
    put("img_in", "x_embedder")
    put("txt_in", "context_embedder")
    put("final_layer.linear", "proj_out")
    for leaf in ("weight", "bias"):
        found[f"final_layer.adaLN_modulation.1.{leaf}"] = halves_swapped(state[f"norm_out.linear.{leaf}"])
    for layer in range(transformer.config.num_layers):
        block, ours = f"double_blocks.{layer}", f"transformer_blocks.{layer}"
        for stream, names in STREAMS.items():
            plain = stream == "img"
            put(f"{block}.{stream}_attn.qkv", *(f"{ours}.attn.{name}" for name in names))
            put(f"{block}.{stream}_attn.proj", f"{ours}.attn.{'to_out.0' if plain else 'to_add_out'}")
            put(f"{block}.{stream}_mod.lin", f"{ours}.{'norm1' if plain else 'norm1_context'}.linear")
            put(f"{block}.{stream}_mlp.0", f"{ours}.{'ff' if plain else 'ff_context'}.net.0.proj")
            put(f"{block}.{stream}_mlp.2", f"{ours}.{'ff' if plain else 'ff_context'}.net.2")
            norms(f"{block}.{stream}_attn.norm", f"{ours}.attn", "norm" if plain else "norm_added")
    for layer in range(transformer.config.num_single_layers):
        block, ours = f"single_blocks.{layer}", f"single_transformer_blocks.{layer}"
        put(f"{block}.linear1", *(f"{ours}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")))
        put(f"{block}.linear2", f"{ours}.proj_out")
        put(f"{block}.modulation.lin", f"{ours}.norm.linear")
        norms(f"{block}.norm", f"{ours}.attn")
    return found


def sd3_original(transformer: Any) -> Tensors:
    state = transformer.state_dict()
    found = {"pos_embed": state["pos_embed.pos_embed"]}

    def put(theirs: str, *ours: str, swapped: bool = False) -> None:
        for leaf in ("weight", "bias"):
            if f"{ours[0]}.{leaf}" in state:
                whole = torch.cat([state[f"{name}.{leaf}"] for name in ours])
                found[f"{theirs}.{leaf}"] = halves_swapped(whole) if swapped else whole

    put("x_embedder.proj", "pos_embed.proj")
    put("context_embedder", "context_embedder")
    put("final_layer.linear", "proj_out")
    put("final_layer.adaLN_modulation.1", "norm_out.linear", swapped=True)
    for number, layer in ((1, 0), (2, 2)):
        put(f"t_embedder.mlp.{layer}", f"time_text_embed.timestep_embedder.linear_{number}")
        put(f"y_embedder.mlp.{layer}", f"time_text_embed.text_embedder.linear_{number}")
    layers = transformer.config.num_layers
    for layer in range(layers):
        block, ours = f"joint_blocks.{layer}", f"transformer_blocks.{layer}"
        for attention in ("attn", "attn2"):
            put(f"{block}.x_block.{attention}.qkv", *(f"{ours}.{attention}.{name}" for name in STREAMS["img"]))
            put(f"{block}.x_block.{attention}.proj", f"{ours}.{attention}.to_out.0")
            put(f"{block}.x_block.{attention}.ln_q", f"{ours}.{attention}.norm_q")
            put(f"{block}.x_block.{attention}.ln_k", f"{ours}.{attention}.norm_k")
        put(f"{block}.context_block.attn.qkv", *(f"{ours}.attn.{name}" for name in STREAMS["txt"]))
        put(f"{block}.context_block.attn.proj", f"{ours}.attn.to_add_out")
        put(f"{block}.context_block.attn.ln_q", f"{ours}.attn.norm_added_q")
        put(f"{block}.context_block.attn.ln_k", f"{ours}.attn.norm_added_k")
        put(f"{block}.x_block.adaLN_modulation.1", f"{ours}.norm1.linear")
        last = layer == layers - 1
        put(f"{block}.context_block.adaLN_modulation.1", f"{ours}.norm1_context.linear", swapped=last)
        for side, name in (("x_block", "ff"), ("context_block", "ff_context")):
            put(f"{block}.{side}.mlp.fc1", f"{ours}.{name}.net.0.proj")
            put(f"{block}.{side}.mlp.fc2", f"{ours}.{name}.net.2")
    return found


def halves_swapped(tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def flow_checkpoint(pipeline: Any, *, bare: bool = False) -> Tensors:
    """All parts in one state dict with original keys, or the bare transformer without a prefix."""
    flux = "Flux" in type(pipeline).__name__
    transformer = (flux_original if flux else sd3_original)(pipeline.transformer)
    if bare:
        return transformer
    clip = clip_original(pipeline.text_encoder)
    clip.pop("text_projection.weight", None)
    t5 = pipeline.text_encoder_2 if flux else pipeline.text_encoder_3
    parts = {
        "model.diffusion_model.": transformer,
        "vae." if flux else "first_stage_model.": vae_original(pipeline.vae),
        "text_encoders.clip_l.transformer.": clip,
        "text_encoders.t5xxl.transformer.": {n: each.clone() for n, each in t5.state_dict().items()},
    }
    if not flux:
        parts["text_encoders.clip_g.transformer."] = clip_original(pipeline.text_encoder_2)
    return joined(parts)


def flux2_original(transformer: Any) -> Tensors:
    return _by_rules(transformer, FLUX2, FLUX_REST)


def chroma_original(transformer: Any) -> Tensors:
    return _by_rules(transformer, CHROMA, CHROMA_REST)


def _by_rules(transformer: Any, layout: Layout, rest: Layout) -> Tensors:
    parts: dict[str, dict[int, Tensor]] = {}
    for name, weight in transformer.state_dict().items():
        module, _, leaf = name.rpartition(".")
        ruled = rule_of(layout, module)
        if ruled is None:
            parts[rule_of(rest, name)[1]] = {0: weight}  # type: ignore[index]
        else:
            value = halves_swapped(weight) if ruled[0].swapped else weight
            parts.setdefault(f"{ruled[1]}.{leaf}", {})[ruled[0].part] = value
    return {name: torch.cat([tensors[part] for part in sorted(tensors)]) for name, tensors in parts.items()}


def flux2_vae(vae: Any) -> Tensors:
    """By the first code's names: each of the two outer convolutions is inside of its half."""
    statistics = {name: each for name, each in vae.state_dict().items() if name.startswith("bn.")}
    names = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
    found = vae_original(vae)
    for name in list(found):
        for ours, theirs in names.items():
            if name.startswith(ours):
                found[name.replace(ours, theirs)] = found.pop(name)
    return found | statistics


def z_image_original(transformer: Any) -> Tensors:
    parts: dict[str, dict[int, Tensor]] = {"norm_final.weight": {0: torch.ones(4)}}
    for name, weight in transformer.state_dict().items():
        module, _, leaf = name.rpartition(".")
        ruled = rule_of(Z_IMAGE, module)
        if ruled is None:
            parts[name] = {0: weight}
        else:
            parts.setdefault(f"{ruled[1]}.{leaf}", {})[ruled[0].part] = weight
    return {name: torch.cat([tensors[part] for part in sorted(tensors)]) for name, tensors in parts.items()}


def flux2_checkpoint(pipeline: Any, *, bare: bool = False) -> Tensors:
    """As `flow_checkpoint`."""
    transformer = flux2_original(pipeline.transformer)
    if bare:
        return transformer
    texts = {f"model.{name}": each for name, each in pipeline.text_encoder.state_dict().items()}
    prefix = "text_encoders.qwen3_4b.transformer."
    return joined({"model.diffusion_model.": transformer, "vae.": flux2_vae(pipeline.vae), prefix: texts})


def chroma_checkpoint(pipeline: Any, *, bare: bool = False) -> Tensors:
    """As `flow_checkpoint`."""
    transformer = chroma_original(pipeline.transformer)
    if bare:
        return transformer
    texts = {name: each.clone() for name, each in pipeline.text_encoder.state_dict().items()}
    prefix = "text_encoders.t5xxl.transformer."
    return joined({"model.diffusion_model.": transformer, "vae.": vae_original(pipeline.vae), prefix: texts})


def z_image_checkpoint(pipeline: Any, *, bare: bool = False) -> Tensors:
    """As `flow_checkpoint`."""
    transformer = z_image_original(pipeline.transformer)
    if bare:
        return transformer
    return joined(
        {
            "model.diffusion_model.": transformer,
            "vae.": vae_original(pipeline.vae),
            "text_encoders.qwen3_4b.transformer.": {
                f"model.{name}": each for name, each in pipeline.text_encoder.state_dict().items()
            },
        }
    )


def video_vae_original(vae: Any) -> Tensors:
    """By the names of Wan's first code, whose decoder counts residual blocks and upsampling of all levels together."""
    inner = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
    inner["conv_shortcut"] = "shortcut"
    names: dict[str, str] = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
    for side in ("encoder", "decoder"):
        names |= {f"{side}.conv_in": f"{side}.conv1", f"{side}.norm_out": f"{side}.head.0"}
        names |= {f"{side}.conv_out": f"{side}.head.2", f"{side}.mid_block.attentions.0": f"{side}.middle.1"}
        names |= {f"{side}.mid_block.resnets.{number}": f"{side}.middle.{2 * number}" for number in (0, 1)}
    names |= {f"encoder.down_blocks.{number}": f"encoder.downsamples.{number}" for number in range(32)}
    of_level = vae.config.num_res_blocks + 2
    for level in range(len(vae.config.dim_mult)):
        block, first = f"decoder.up_blocks.{level}", of_level * level
        names |= {f"{block}.resnets.{n}": f"decoder.upsamples.{first + n}" for n in range(of_level - 1)}
        names[f"{block}.upsamplers.0"] = f"decoder.upsamples.{first + of_level - 1}"
    return _by_prefix(vae.state_dict(), names, lambda rest: _swapped(rest, inner))


def qwen_image_checkpoint(pipeline: Any, *, bare: bool = False) -> Tensors:
    """As `flow_checkpoint`; the text encoder with the half that sees images, by the names of its first version.

    Of Edit 2511 with the mark that ComfyUI's files have.
    """
    transformer = dict(pipeline.transformer.state_dict())
    if pipeline.transformer.config.zero_cond_t:
        transformer["__index_timestep_zero__"] = torch.zeros(0)
    if bare:
        return transformer
    text = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): each.clone()
        for name, each in pipeline.text_encoder.state_dict().items()
    }
    return joined(
        {
            "model.diffusion_model.": transformer,
            "vae.": video_vae_original(pipeline.vae),
            "text_encoders.qwen25_7b.transformer.": text,
        }
    )


def rgba_vae_original(vae: Any) -> Tensors:
    """By the names of Wan 2.2's first code, as ComfyUI's file of 2.1 has them: kernels over one frame."""
    inner = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
    inner["conv_shortcut"] = "shortcut"
    names: dict[str, str] = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
    for side, way in (("encoder", "down"), ("decoder", "up")):
        names |= {f"{side}.conv_in": f"{side}.conv1", f"{side}.norm_out": f"{side}.head.0"}
        names |= {f"{side}.conv_out": f"{side}.head.2", f"{side}.mid_block.attentions.0": f"{side}.middle.1"}
        names |= {f"{side}.mid_block.resnets.{number}": f"{side}.middle.{2 * number}" for number in (0, 1)}
        blocks = vae.config.num_res_blocks + (side == "decoder")
        for level in range(len(vae.config.dim_mult)):
            ours, theirs = f"{side}.{way}_blocks.{level}", f"{side}.{way}samples.{level}.{way}samples"
            names |= {f"{ours}.resnets.{number}": f"{theirs}.{number}" for number in range(blocks)}
            names[f"{ours}.{way}sampler"] = f"{theirs}.{blocks}"
    causal = {name for name, each in vae.named_modules() if type(each).__name__ == "QwenImage21CausalConv3d"}
    state = {
        name: each.unsqueeze(2) if name.endswith("weight") and name.removesuffix(".weight") in causal else each
        for name, each in vae.state_dict().items()
    }
    return _by_prefix(state, names, lambda rest: _swapped(rest, inner))


def qwen_image21_original(transformer: Any) -> Tensors:
    """With two layers of each block as one, the gate first."""
    found = dict(transformer.state_dict())
    for name in [name for name in found if name.endswith("gate_layer.weight")]:
        other = name.replace("gate_layer", "proj")
        found[name.replace("gate_layer", "gate_up")] = torch.cat([found.pop(name), found.pop(other)])
    return found


def qwen_image21_checkpoint(pipeline: Any, *, bare: bool = False) -> Tensors:
    """As `qwen_image_checkpoint`."""
    transformer = qwen_image21_original(pipeline.transformer)
    if bare:
        return transformer
    text = {name: each.clone() for name, each in pipeline.text_encoder.state_dict().items()}
    return joined(
        {
            "model.diffusion_model.": transformer,
            "vae.": rgba_vae_original(pipeline.vae),
            "text_encoders.qwen3vl_8b.transformer.": text,
        }
    )


def krea2_original(transformer: Any) -> Tensors:
    """The transformer by its first code's names, tables of the blocks in one row."""
    norms = {
        "attn.norm_q": "attn.qknorm.qnorm",
        "attn.norm_k": "attn.qknorm.knorm",
        "norm1": "prenorm",
        "norm2": "postnorm",
    }
    outside = {"final_layer.scale_shift_table": "last.modulation.lin", "final_layer.norm.weight": "last.norm.scale"}
    outside["txt_in.norm.weight"] = "txtmlp.0.scale"
    found: Tensors = {}
    for name, weight in transformer.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if name in outside:
            found[outside[name]] = weight
        elif leaf == "scale_shift_table":
            found[module.replace("transformer_blocks", "blocks") + ".mod.lin"] = weight.flatten()
        elif ruled := rule_of(KREA2, module):
            found[f"{ruled[1]}.{leaf}"] = weight
        else:
            block, norm = next(
                (module.removesuffix(f".{end}"), own) for end, own in norms.items() if module.endswith(end)
            )
            block = block.replace("transformer_blocks", "blocks").replace("text_fusion", "txtfusion")
            found[f"{block}.{norm}.scale"] = weight
    return found


def krea2_checkpoint(pipeline: Any, *, bare: bool = False) -> Tensors:
    """As `qwen_image_checkpoint`."""
    transformer = krea2_original(pipeline.transformer)
    if bare:
        return transformer
    text = {f"model.{name}": each.clone() for name, each in pipeline.text_encoder.state_dict().items()}
    return joined(
        {
            "model.diffusion_model.": transformer,
            "vae.": video_vae_original(pipeline.vae),
            "text_encoders.qwen3vl_4b.transformer.": text,
        }
    )


def anima_original(pipeline: Any) -> Tensors:
    """The transformer and the text conditioner by the first code's names, with its tables and counters."""
    found: Tensors = {"pos_embedder.seq": torch.arange(8.0), "accum_iteration": torch.zeros(1)}
    for name, weight in pipeline.transformer.state_dict().items():
        module, _, leaf = name.rpartition(".")
        whole = rule_of(ANIMA_REST, name)
        ruled = rule_of(ANIMA, module)
        found[whole[1] if whole else f"{ruled[1]}.{leaf}"] = weight  # type: ignore[index]
    conditioner = pipeline.text_conditioner.state_dict()
    return found | {f"llm_adapter.{name}": weight for name, weight in conditioner.items()}


def anima_checkpoint(pipeline: Any, *, bare: bool = False) -> Tensors:
    """As `qwen_image_checkpoint`; alone with the prefix of the published files."""
    if bare:
        return joined({"net.": anima_original(pipeline)})
    text = {f"model.{name}": each.clone() for name, each in pipeline.text_encoder.state_dict().items()}
    return joined(
        {
            "model.diffusion_model.": anima_original(pipeline),
            "vae.": video_vae_original(pipeline.vae),
            "text_encoders.qwen3_06b.transformer.": text,
        }
    )


def joined(parts: Mapping[str, Tensors]) -> Tensors:
    return {prefix + name: tensor for prefix, tensors in parts.items() for name, tensor in tensors.items()}


def write(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path


def _swapped(rest: str, names: Mapping[str, str]) -> str:
    module, _, leaf = rest.rpartition(".")
    return f"{names.get(module, module)}.{leaf}" if module else rest


def _by_prefix(state: Tensors, names: Mapping[str, str], inner: Callable[[str], str]) -> Tensors:
    found = {}
    for name, tensor in state.items():
        if name.startswith("bn."):  # FLUX.2's statistics
            continue
        longest = max((prefix for prefix in names if name.startswith(prefix + ".")), key=len)
        found[f"{names[longest]}.{inner(name[len(longest) + 1 :])}"] = tensor.clone()
    return found
