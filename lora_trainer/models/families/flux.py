"""FLUX.1: a transformer of 12 billion weights on latents packed by two (arXiv:2403.03206 describes its blocks).

Two kinds differ in the transformer's config: `dev` has a guidance input, which was distilled into it; `schnell` has none,
reads half the text and samples in four steps. `kontext` (arXiv:2506.15742) is built like `dev` and edits: it reads a
control image as further tokens. Its pipeline's name tells it, or `model.flavor`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.conditioning import controls_of
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.layouts import Rule, fused
from lora_trainer.models.autoencoder import drawing_vae, load_whole_image_encoder, vae_dtype
from lora_trainer.models.clip import LAST, check_clip, encode_clip
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
from lora_trainer.models.folder import fingerprint, read_config
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.stored import USE_BASE, Part, SingleFile, Stored, by_layout
from lora_trainer.models.t5 import T5_TARGETS, load_t5, load_t5_tokenizer, read_t5_tokens
from lora_trainer.models.transformer import (
    PATCH,
    STREAMS,
    packed,
    refuse_widths,
    thinner,
    token_places,
    transformer_config,
    transformer_facts,
    transformer_functions,
    unpacked,
)
from lora_trainer.models.unet import CLIP_TARGETS, load_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

KIND = "FluxTransformer2DModel"
CLIP, T5 = "text_encoder", "text_encoder_2"
DEV_TOKENS, SCHNELL_TOKENS = 512, 256
SIDE = 128  # of the latents that the model was made for
TIMESTEPS = 1000
KONTEXT = "kontext"
TOKEN = 64  # input channels of the plain model: 16 of latents, of four places
KONTEXT_PIPELINE = "FluxKontextPipeline"
GUIDANCE = 1.0  # input of a distilled model while it is trained: as if it were not guided
THINNESS = "a twelfth of its width and a sixth of its layers"
ATTENTION = tuple(f"*transformer_blocks.*.attn.{name}" for name in STREAMS)
FEED_FORWARD = (
    *(f"transformer_blocks.*.{name}" for name in ("net.0.proj", "net.2")),
    *(f"single_transformer_blocks.*.{name}" for name in ("proj_mlp", "proj_out")),
)


LAYOUT = (
    *fused("double_blocks.{}.img_attn.qkv", *(f"transformer_blocks.{{}}.attn.{name}" for name in STREAMS[:3])),
    *fused("double_blocks.{}.txt_attn.qkv", *(f"transformer_blocks.{{}}.attn.{name}" for name in STREAMS[4:7])),
    Rule("transformer_blocks.{}.attn.to_out.0", "double_blocks.{}.img_attn.proj"),
    Rule("transformer_blocks.{}.attn.to_add_out", "double_blocks.{}.txt_attn.proj"),
    Rule("transformer_blocks.{}.ff.net.0.proj", "double_blocks.{}.img_mlp.0", ratio=4.0),
    Rule("transformer_blocks.{}.ff.net.2", "double_blocks.{}.img_mlp.2", ratio=1 / 4),
    Rule("transformer_blocks.{}.ff_context.net.0.proj", "double_blocks.{}.txt_mlp.0", ratio=4.0),
    Rule("transformer_blocks.{}.ff_context.net.2", "double_blocks.{}.txt_mlp.2", ratio=1 / 4),
    Rule("transformer_blocks.{}.norm1.linear", "double_blocks.{}.img_mod.lin"),
    Rule("transformer_blocks.{}.norm1_context.linear", "double_blocks.{}.txt_mod.lin"),
    *fused(
        "single_blocks.{}.linear1",
        *(f"single_transformer_blocks.{{}}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        shares=(1, 1, 1, 4),
        ratio=7.0,
    ),
    Rule("single_transformer_blocks.{}.proj_out", "single_blocks.{}.linear2", ratio=1 / 5),
    Rule("single_transformer_blocks.{}.norm.linear", "single_blocks.{}.modulation.lin"),
    Rule("x_embedder", "img_in"),
    Rule("context_embedder", "txt_in"),
    *(
        Rule(f"time_text_embed.{ours}.linear_{number}", f"{theirs}.{layer}")
        for ours, theirs in (
            ("timestep_embedder", "time_in"),
            ("text_embedder", "vector_in"),
            ("guidance_embedder", "guidance_in"),
        )
        for number, layer in ((1, "in_layer"), (2, "out_layer"))
    ),
    Rule("norm_out.linear", "final_layer.adaLN_modulation.1", swapped=True),
    Rule("proj_out", "final_layer.linear"),
)
# What is read as well: XLabs' names, of attention alone, and each part of a fused layer by its number, as in OMI's.
ALSO = (
    *fused("double_blocks.{}.processor.qkv_lora1", *(f"transformer_blocks.{{}}.attn.{name}" for name in STREAMS[:3])),
    *fused("double_blocks.{}.processor.qkv_lora2", *(f"transformer_blocks.{{}}.attn.{name}" for name in STREAMS[4:7])),
    Rule("transformer_blocks.{}.attn.to_out.0", "double_blocks.{}.processor.proj_lora1"),
    Rule("transformer_blocks.{}.attn.to_add_out", "double_blocks.{}.processor.proj_lora2"),
    *fused("single_blocks.{}.processor.qkv", *(f"single_transformer_blocks.{{}}.attn.to_{name}" for name in "qkv")),
    # ComfyUI's name of the first three parts of linear1.
    *fused("single_blocks.{}.linear1_qkv", *(f"single_transformer_blocks.{{}}.attn.to_{name}" for name in "qkv")),
    Rule("single_transformer_blocks.{}.proj_out", "single_blocks.{}.processor.proj"),
    *(Rule(rule.ours, f"{rule.original}.{rule.part}") for rule in LAYOUT if len(rule.shares) > 1),
    Rule("x_embedder", "img_in.proj"),
)
REST = (
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


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    needs = ("in_channels", "joint_attention_dim", "pooled_projection_dim")
    config = transformer_config(folder, KIND, needs)
    facts = transformer_facts(
        folder,
        "flux",
        clips=(CLIP,),
        t5=T5,
        t5_tokens=_tokens(config),
        per_latent=PATCH * PATCH,
        side=SIDE,
        variant=_variant(folder, config),
    )
    pooled, width = (read_config(folder, f"{name}/config.json") for name in (CLIP, T5))
    refuse_widths(folder, "a summary", config["pooled_projection_dim"], pooled.get("hidden_size"))
    refuse_widths(folder, "text", config["joint_attention_dim"], width.get("d_model"))
    distilled_from = "FLUX.1-dev" if facts.variant == "schnell" else ""
    return replace(facts, distilled_from=distilled_from, most_controls=1 if facts.variant == KONTEXT else 0)


def _variant(folder: Path, config: Mapping[str, Any]) -> str:
    """`kontext` by the pipeline's name: nothing else in the configs differs from `dev`."""
    if read_config(folder, "model_index.json").get("_class_name") == KONTEXT_PIPELINE:
        return KONTEXT
    return "dev" if config.get("guidance_embeds") else "schnell"


def _tokens(config: Mapping[str, Any]) -> int:
    """How many tokens the transformer was trained to read."""
    return DEV_TOKENS if config.get("guidance_embeds") else SCHNELL_TOKENS


def encoder_keys(folder: Path, dtype: torch.dtype, text: TextOptions = PLAIN, /) -> tuple[str, str]:
    """Names of the image and the text encoders' weights, without loading them."""
    texts = fingerprint(folder, CLIP, "tokenizer", T5, "tokenizer_2")
    tokens = _tokens(read_config(folder, "transformer/config.json"))  # the same text encoders serve both kinds
    image = f"{fingerprint(folder, 'vae')}-{vae_dtype(folder, dtype)}"
    return image, f"{texts}-{dtype}-{tokens}{text.key}"


def load_texts(
    folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
) -> TextParts:
    """Both text encoders, frozen, on the device, and their tokenizers; without T5 only CLIP."""
    return _texts(folder, dtype, dtype, device, without)


def _texts(
    folder: Path, dtype: torch.dtype | None, t5: torch.dtype | None, device: torch.device, without: Collection[str] = ()
) -> TextParts:
    """The same, T5 in a precision of its own."""
    from transformers import CLIPTextModel

    encoders: dict[str, Any] = {CLIP: load_frozen(CLIPTextModel, folder / CLIP, dtype, device)}
    tokenizers = {CLIP: load_tokenizer(folder, CLIP)}
    if T5 not in without:
        longest = _tokens(read_config(folder, "transformer/config.json"))
        encoders[T5], tokenizers[T5] = load_t5(folder, T5, t5, device), load_t5_tokenizer(folder, T5, longest)
    return TextParts(encoders, tokenizers)


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, 512 or 256, D]: T5's last state; `pooled` [B, P]: CLIP's summary.

    `pooled` alone of parts without T5.
    """
    output = encode_clip(parts, CLIP, captions, PLAIN, own=LAST, normed=True)
    if T5 not in parts.encoders:
        return {"pooled": output.pooled}
    tokenizer = parts.tokenizers[T5]
    words = read_t5_tokens(tokenizer, captions, options.t5_tokens or tokenizer.model_max_length, parts.device)
    return {"embeds": words.weigh(parts.encoders[T5](words.ids)[0]), "pooled": output.pooled}


def joined_text(current: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CLIP's new summary, and T5's cached states."""
    return {**known, **current}


def check_text(folder: Path, options: TextOptions) -> None:
    """Only CLIP's summary is used: of its last layer, of one chunk."""
    rejected = {"clip_skip": options.clip_skip, "max_tokens": options.clip_tokens if options.chunks > 1 else None}
    problems = [
        Problem(
            "setting_not_for_model",
            f"text_encoder.{name}={value}: FLUX.1 takes only a summary from CLIP; T5 reads the text.",
            "Remove it.",
        )
        for name, value in rejected.items()
        if value is not None
    ]
    if problems:
        raise UsageError(problems)
    check_clip(folder, (CLIP,), options, t5=True)


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Guidance is an input of the model, where it has one: one forward pass a step, and no negative prompt."""
    guided = bool(read_config(folder, "transformer/config.json").get("guidance_embeds"))
    return SamplingDefaults(steps=50 if guided else 4, guided=guided, negative=False)


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, 512 or 256, 4096] and cond["pooled"] [B, 768].

    Four neighboring places of the latents are one token; the position of each is its number, 0, its row and its column.
    Tokens of a control image follow, with its number. The module rounds a time to the precision of the latents before it
    embeds it, in bf16 by up to 3 of 1000 timesteps, so its embedding gets the exact one.
    """
    import torch

    images = (noisy, *(control.to(noisy) for control in controls_of(cond).values()))
    tokens = torch.cat([packed(image) for image in images], dim=1)
    places = torch.cat([token_places(image, axes=3, number=number) for number, image in enumerate(images)])
    embeds = cond["embeds"]
    guided = getattr(denoiser.config, "guidance_embeds", False)
    exact, embed = (t + 1).float(), cast("nn.Module", denoiser.time_text_embed)
    with embed.register_forward_pre_hook(lambda _, rounded: (exact, *rounded[1:])):
        velocity = denoiser(
            tokens,
            embeds,
            cond["pooled"],
            exact / TIMESTEPS,
            places,
            torch.zeros(embeds.shape[1], 3, device=noisy.device),
            torch.full((len(noisy),), GUIDANCE, device=noisy.device) if guided else None,
            return_dict=False,
        )[0]
    return unpacked(velocity[:, : packed(noisy).shape[1]], noisy)


def with_controls(pipeline: Any, size: tuple[int, int], controls: Sequence[Tensor]) -> dict[str, Any]:
    """What the edit pipeline needs besides: it changes a size to an area of its own, and a control image to one of its
    sizes unless it comes as latents."""
    if type(pipeline).__name__ != KONTEXT_PIPELINE:
        return {}
    return {"max_area": size[0] * size[1], "image": controls[0] if controls else None}


def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' pipeline of the base model, for generating images."""
    import diffusers

    texts = _texts(folder, dtype, None, device)
    kind = str(read_config(folder, "model_index.json").get("_class_name"))
    pipeline = getattr(diffusers, KONTEXT_PIPELINE if kind == KONTEXT_PIPELINE else "FluxPipeline")(
        vae=drawing_vae(folder, dtype, device),
        text_encoder=texts.encoders[CLIP],
        text_encoder_2=texts.encoders[T5],
        tokenizer=texts.tokenizers[CLIP],
        tokenizer_2=texts.tokenizers[T5],
        transformer=load_transformer(folder, dtype, device),
        scheduler=make_scheduler(folder),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    return {
        "embeds": (text.t5_tokens or _tokens(config), int(config["joint_attention_dim"])),
        "pooled": (int(config["pooled_projection_dim"]),),
    }


def denoiser_part(stored: Stored) -> Part:
    """Config and places of FLUX.1's transformer: dev has a guidance input, schnell has none."""
    config = dict(public_architecture("flux").denoiser) | {
        "_class_name": KIND,
        "in_channels": stored.side("img_in.weight", 1),
        "num_layers": stored.count("double_blocks."),
        "num_single_layers": stored.count("single_blocks."),
        "num_attention_heads": stored.side("img_in.weight", 0) // 128,
        "joint_attention_dim": stored.side("txt_in.weight", 1),
        "pooled_projection_dim": stored.side("vector_in.in_layer.weight", 1),
        "guidance_embeds": "guidance_in.in_layer.weight" in stored.shapes,
    }
    return Part(config, by_layout(stored, (*LAYOUT, *REST)))


def is_checkpoint(stored: Stored) -> bool:
    """Whether a file with these blocks is of FLUX.1, not of a family that has them, too."""
    return "single_stream_modulation.lin.weight" not in stored.shapes and not has_modulation_network(stored)


def has_modulation_network(stored: Stored) -> bool:
    """Whether one network makes the modulations of all blocks, as in a family that was made from schnell."""
    return "distilled_guidance_layer.in_proj.bias" in stored.shapes and "txt_in.weight" in stored.shapes


def read_checkpoint(found: SingleFile) -> SingleFile:
    """dev, schnell or Kontext. Raises UsageError for Fill and Control, and for models with another text input."""
    stored = found.denoiser
    if "txt_in.weight" not in stored.shapes or "vector_in.in_layer.weight" not in stored.shapes:
        message = f"{found.file} has FLUX.1's blocks but another text input."
        raise UsageError(Problem("model_unsupported", message, USE_BASE))
    channels = stored.side("img_in.weight", 1)
    if channels > TOKEN and channels % TOKEN == 0:
        message = f"{found.file} is a Fill or Control model: {channels} input channels in place of {TOKEN}."
        raise UsageError(Problem("model_unsupported", message, "Use FLUX.1 dev or schnell."))
    if "guidance_in.in_layer.weight" not in stored.shapes:
        return replace(found, variant="schnell")
    variant = KONTEXT if KONTEXT in found.file.name.lower() else "dev"  # as in the published file's name
    return replace(found, variant=variant, flavors=("dev", KONTEXT))


def base_names(facts: ModelFacts) -> tuple[str, str]:
    return "flux1", f"flux-1-{facts.variant}/lora"


load_transformer, make_denoiser = transformer_functions(KIND)
thin = thinner(12, 6)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    targets={CLIP: CLIP_TARGETS, T5: T5_TARGETS},
    check=check_text,
    cached=(T5,),
    join=joined_text,
)
FAMILY = Family(
    name="flux",
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
        class_name="FluxPipeline",
        edit_class_names=(KONTEXT_PIPELINE,),
        with_controls=with_controls,
        make=make_pipeline,
        sampling_defaults=sampling_defaults,
    ),
    lora_files=LoraFileSpec(
        base_names=base_names,
        prefixes={"transformer": "lora_unet", "text_encoder": "lora_te1"},
        layout=LAYOUT,
        also=ALSO,
        readers=(
            "diffusers: kohya",
            "diffusers: original, kohya's halves",
            "diffusers: XLabs",
            "diffusers: diffusers, alpha keys",
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: diffusers",
            "ComfyUI: diffusers, kohya's halves",
            "ComfyUI: OneTrainer",
            "ComfyUI: LyCORIS",
            "ComfyUI: no prefix",
            "sd-scripts: kohya",
        ),
        passed_over={
            "diffusers": ("x_embedder", "context_embedder", "time_text_embed.", "norm_out.", "proj_out"),
            "sd-scripts": ("norm_out.", "proj_out"),
        },
    ),
    checkpoint=CheckpointSpec(
        mark="double_blocks.0.img_attn.qkv.weight", denoiser=denoiser_part, fits=is_checkpoint, read=read_checkpoint
    ),
)
