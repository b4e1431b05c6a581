"""Qwen-Image 2.1: a transformer of 7 billion weights that reads text and image as one sequence, the text before the image.

The image attends to the text, which attends to itself alone and to what comes before (block-causal). Its text encoder is the
language model of Qwen3-VL, its VAE one of 64 channels at a sixteenth of the image, with opacity. Turbo is distilled from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.layouts import Rule, fused
from lora_trainer.models.autoencoder import RGBA, drawing_vae, load_whole_image_encoder, vae_facts
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
from lora_trainer.models.folder import COPY, check_components, read_config, tokenizer_folder
from lora_trainer.models.published import public_architecture
from lora_trainer.models.qwen_text import (
    QWEN,
    as_long_as_needed,
    check_tokenizer,
    language_model,
    read_template,
    text_config,
)
from lora_trainer.models.single.stored import Part, SingleFile, Stored, by_layout
from lora_trainer.models.transformer import (
    class_of_diffusers,
    refuse_widths,
    thinner,
    transformer_config,
    transformer_functions,
)
from lora_trainer.models.weighting import tokens_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PIPELINE, KIND = "QwenImage21Pipeline", "QwenImage21Transformer2DModel"
TOKENS = 512  # of a caption, the template's own after the system message among them
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"  # whose states are not read
BEFORE = f"{SYSTEM}<|im_start|>user\n"
SIDE = 64  # of the latents of 1024 px
SLOT = 2  # latents along a side of one of the image's slots in the sequence
TIMESTEPS = 1000
THINNER_HEADS, FEWER_LAYERS = 8, 4
THINNESS = "an eighth of its width and a quarter of its layers"
BLOCK = "transformer_blocks.{}"
IN_ATTENTION = tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
IN_FEED_FORWARD = tuple(f"img_mlp.{name}" for name in ("gate_layer", "proj", "out"))
FUSED = IN_FEED_FORWARD[:2]  # one layer in other programs
ATTENTION = tuple(BLOCK.format(f"*.{name}") for name in IN_ATTENTION)
FEED_FORWARD = tuple(BLOCK.format(f"*.{name}") for name in IN_FEED_FORWARD)
# ComfyUI and the trainers that follow it have diffusers' names, and two of the feed-forward layers as one.
LAYOUT = (
    *(Rule(f"{BLOCK}.{name}", f"{BLOCK}.{name}") for name in (*IN_ATTENTION, "img_mlp.out", "attn.norm_q", "attn.norm_k")),
    *fused(f"{BLOCK}.img_mlp.gate_up", *(f"{BLOCK}.{name}" for name in FUSED)),
    *(Rule(name, name) for name in ("img_in", "txt_in.text_norm", "txt_in.in_layer", "txt_in.out_layer")),
    *(Rule(f"time_text_embed.timestep_embedder.linear_{n}", f"time_text_embed.timestep_embedder.linear_{n}") for n in (1, 2)),
    *(Rule(name, name) for name in ("modulation.1", "norm_out.linear", "proj_out")),
)  # fmt: skip
# diffusers' own files have both layers by themselves.
APART = tuple(
    Rule(name, name) for name in (f"transformer_blocks.{{}}.img_mlp.{part}" for part in ("gate_layer", "proj"))
)


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    config = {"patch_size": 1, **transformer_config(folder, KIND, ("in_channels", "context_in_dim"))}
    channels, downscale = vae_facts(folder, RGBA)
    read_flow_schedule(folder)
    check_components(folder, ("transformer", "vae", QWEN))
    check_tokenizer(folder / tokenizer_folder(folder))
    refuse_widths(folder, "text", config["context_in_dim"], text_config(folder / QWEN).get("hidden_size"))
    if (config["patch_size"], config["in_channels"]) != (1, channels):
        message = f"{folder} takes {config['in_channels']} channels in patches of {config['patch_size']}, in place of {channels} in patches of 1."
        raise UsageError(Problem("model_config_invalid", message, "Use the published model with its own VAE."))
    sigmas = sample_sigmas(folder)
    return ModelFacts(
        path=folder,
        family="qwen_image21",
        resolution=SIDE * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * SLOT,
        prediction="flow",
        caption_tokens=TOKENS,
        variant="turbo" if sigmas else "",
        distilled_from="Qwen-Image 2.1" if sigmas else "",
    )


def sample_sigmas(folder: Path) -> list[float] | None:
    """The times of the few steps that Turbo was distilled for, from its pipeline's config; None of the base model.

    Raises UsageError for what is no list of times.
    """
    found = read_config(folder, "model_index.json").get("sample_sigmas")
    if found is None:
        return None
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(each, int | float) and 0 < each <= 1 for each in found)
    ):
        message = f"{folder}/model_index.json: sample_sigmas is {str(found)[:40]}; a list of times above 0, up to 1, is meant."
        raise UsageError(Problem("scheduler_invalid", message, COPY))
    return found


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Turbo takes the steps that it ships, without guidance."""
    sigmas = sample_sigmas(folder)
    return SamplingDefaults(steps=40) if sigmas is None else SamplingDefaults(len(sigmas), guided=False, negative=False)


def prompted(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The pipeline's arguments: states up to the longest prompt, and where they are of several lengths, which are text."""
    arguments: dict[str, Any] = {}
    for beginning, text in (("", cond), ("negative_", negative)):
        if text is not None:
            embeds, mask = as_long_as_needed(text["embeds"], text["padding"])
            arguments |= {f"{beginning}prompt_embeds": embeds, f"{beginning}prompt_embeds_mask": mask}
    return arguments


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, T, D]: states of the last layer before its norm; `padding` [B, T], bool: where there is no text.

    The padding is at the end, where the pipeline moves it. As bool it stays on the CPU while training, so that `predict`
    reads lengths without waiting for a GPU. An empty caption is a space, as in the pipeline.
    """
    import torch

    tokenizer = parts.tokenizers[QWEN]
    begin = BEFORE, len(tokens_of(tokenizer, SYSTEM))
    texts, size = [caption or " " for caption in captions], options.t5_tokens or TOKENS
    tokens, mask = read_template(tokenizer, texts, size, parts.device, begin=begin, whole_end=True)
    output = parts.encoders[QWEN](input_ids=tokens.ids, attention_mask=mask, use_cache=False)
    states, here = tokens.weigh(output.last_hidden_state[:, begin[1] :]), mask[:, begin[1] :]
    return {"embeds": states.masked_fill(~here[..., None], 0.0), "padding": torch.logical_not(here)}


def encoder_keys(folder: Path, dtype: torch.dtype, text: TextOptions = PLAIN, /) -> tuple[str, str]:
    """Names of the image and the text encoders' weights, without loading them."""
    return one_encoder_keys("-before norm", (QWEN, tokenizer_folder(folder)))(folder, dtype, text)


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 64, h, w] at t [B] under cond["embeds"] [B, T, D] without cond["padding"] [B, T].

    The image's position is the length of its text, so samples with captions of other lengths are other calls: padding
    would change the answer.
    """
    import torch

    padding, lengths = cond["padding"], [cond["embeds"].shape[1]] * len(noisy)
    if not padding.is_meta:
        lengths = (padding < 0.5).sum(dim=1).tolist()
    shape = (1, *noisy.shape[2:])
    answers: dict[int, Tensor] = {}
    for length in dict.fromkeys(lengths):
        rows = [row for row, own in enumerate(lengths) if own == length]
        alike, text, times = (torch.stack([each[row] for row in rows]) for each in (noisy, cond["embeds"], t))
        tokens, times = alike.flatten(2).transpose(1, 2), (times + 1).float() / TIMESTEPS
        velocity = denoiser(tokens, text[:, :length], times, [[shape]] * len(rows), return_dict=False)[0]
        answers |= dict(zip(rows, velocity[:, length:].transpose(1, 2).reshape(alike.shape), strict=True))
    return torch.stack([answers[row] for row in range(len(noisy))])


@dataclass(frozen=True)
class PromptReader:
    """In the place of what reads images and texts, which cannot be made without torchvision: the pipeline asks for the system
    message's tokens."""

    tokenizer: Any
    apply_chat_template: Callable[..., list[list[int]]]


def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' pipeline of the base model, for generating images."""
    texts = load_texts(folder, None, device)
    tokenizer = texts.tokenizers[QWEN]
    system = [tokenizer(SYSTEM, add_special_tokens=False).input_ids]
    pipeline = class_of_diffusers(PIPELINE)(
        vae=drawing_vae(folder, dtype, device),
        text_encoder=texts.encoders[QWEN],
        processor=PromptReader(tokenizer, lambda *_, **__: system),
        transformer=load_transformer(folder, dtype, device),
        scheduler=make_scheduler(folder),
        sample_sigmas=sample_sigmas(folder),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    tokens = text.t5_tokens or TOKENS
    return {"embeds": (tokens, int(config["context_in_dim"])), "padding": (tokens,)}


def denoiser_part(stored: Stored) -> Part:
    """Config and places of Qwen-Image 2.1's transformer, whose original names are diffusers' but for one fused layer."""
    head, out = stored.side("transformer_blocks.0.attn.norm_q.weight", 0), "transformer_blocks.0.img_mlp.out.weight"
    config = dict(public_architecture("qwen_image21").denoiser) | {
        "_class_name": KIND,
        "in_channels": stored.side("img_in.weight", 1),
        "out_channels": stored.side("proj_out.weight", 0),
        "num_layers": stored.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": stored.side("img_in.weight", 0) // head,
        "context_in_dim": stored.side("txt_in.text_norm.weight", 0),
        "mlp_ratio": stored.side(out, 1) // stored.side(out, 0),
    }
    return Part(config, by_layout(stored, (*LAYOUT, *APART)))


def read_checkpoint(found: SingleFile) -> SingleFile:
    """The base or Turbo, as far as the file's name says it."""
    variant, names = "turbo" if "turbo" in found.file.name.lower() else "base", ("turbo", "base", "qwen_image_2.1")
    note = (
        f"{found.file.name} is assumed to be Qwen-Image 2.1, not its Turbo (few steps): both have the same keys. "
        "If it is Turbo, set model.flavor=turbo."
    )
    is_named = any(name in found.file.name.lower().replace("-", "_") for name in names)
    return replace(found, variant=variant, flavors=("base", "turbo"), note="" if is_named else note)


load_transformer, make_denoiser = transformer_functions(
    KIND, lambda _: import_module("lora_trainer.models.text_then_image").TextThenImageTransformer
)


# diffusers' class with a forward pass of its own.
load_texts = language_model("Qwen3VLTextModel", final_norm=False)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    check=lambda folder, options: refuse_clip_options("Qwen-Image 2.1", options),
)
FAMILY = Family(
    name="qwen_image21",
    read_facts=describe,
    denoiser=DenoiserSpec(
        component="transformer",
        load=load_transformer,
        make=make_denoiser,
        make_process=partial(make_process, patch=1),
        predict=predict,
        lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
        thin=thinner(THINNER_HEADS, FEWER_LAYERS),
        thinness=THINNESS,
    ),
    encoders=encoders_from(load_whole_image_encoder, TEXT, encoder_keys),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name=PIPELINE,
        make=make_pipeline,
        sampling_defaults=sampling_defaults,
        prompted=prompted,
        guidance="true_cfg_scale",
    ),
    lora_files=LoraFileSpec(
        base_names=lambda facts: ("qwen_image21", "Qwen-Image-2.1/lora"),
        prefixes={"transformer": "lora_unet"},
        layout=LAYOUT,
        readers=(
            "diffusers: kohya",
            "diffusers: original",
            "diffusers: original, kohya's halves",
            "diffusers: original, diffusers' names",
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: diffusers",
            "ComfyUI: diffusers, kohya's halves",
            "ComfyUI: LyCORIS",
            "ComfyUI: no prefix",
        ),
        passed_over={"diffusers": (*(BLOCK.format(f"*.{name}") for name in FUSED), "txt_in.", "modulation.")},
    ),
    checkpoint=CheckpointSpec(mark="txt_in.text_norm.weight", denoiser=denoiser_part, read=read_checkpoint),
)
