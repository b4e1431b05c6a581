"""Chroma: FLUX.1's blocks without CLIP and without guidance; one small network makes all modulations.

T5's states of a caption are read as far as the first token of padding, which the model was trained with. diffusers' pipeline
makes a mask of ones and zeros for that, which its attention adds to the scores, so that padding still counts; the first
code and ComfyUI read none of it. Here the mask is bool, in training and in images.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.layouts import Rule
from lora_trainer.models.autoencoder import load_whole_image_encoder
from lora_trainer.models.encoders import encoders_from, one_encoder_keys
from lora_trainer.models.families import flux
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
from lora_trainer.models.flow_schedule import make_process
from lora_trainer.models.folder import read_config
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.stored import Part, SingleFile, Stored, by_layout
from lora_trainer.models.t5 import load_t5, load_t5_tokenizer, read_t5_tokens
from lora_trainer.models.transformer import (
    PATCH,
    one_encoder_pipeline,
    packed,
    refuse_widths,
    token_places,
    transformer_config,
    transformer_facts,
    transformer_functions,
    unpacked,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PIPELINE = "ChromaPipeline"
KIND = "ChromaTransformer2DModel"
T5 = "text_encoder"
TOKENS = 512
TIMESTEPS = 1000
GUIDING = "distilled_guidance_layer"  # the network that makes all modulations
LAYOUT = (
    *(rule for rule in flux.LAYOUT if not any(part in rule.ours for part in ("norm", "time_text_embed"))),
    *(Rule(f"{GUIDING}.{name}", f"{GUIDING}.{name}") for name in ("in_proj", "out_proj")),
    *(
        Rule(f"{GUIDING}.layers.{{}}.linear_{number}", f"{GUIDING}.layers.{{}}.{layer}")
        for number, layer in ((1, "in_layer"), (2, "out_layer"))
    ),
)
REST = (
    *flux.REST,
    *(
        Rule("distilled_guidance_layer.norms.{}.weight", f"distilled_guidance_layer.norms.{{}}.{leaf}")
        for leaf in ("scale", "weight")
    ),
)


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    config = transformer_config(folder, KIND, ("in_channels", "joint_attention_dim"))
    facts = transformer_facts(
        folder,
        "chroma",
        clips=(),
        t5=T5,
        t5_tokens=TOKENS,
        per_latent=PATCH * PATCH,
        side=flux.SIDE,
        variant="",
    )
    width = read_config(folder, f"{T5}/config.json").get("d_model")
    refuse_widths(folder, "text", config["joint_attention_dim"], width)
    return facts


def sampling_defaults(folder: Path) -> SamplingDefaults:
    return SamplingDefaults(steps=35)


def load_texts(folder: Path, dtype: torch.dtype | None, device: torch.device, _: Collection[str] = (), /) -> TextParts:
    """T5, frozen, on the device, and its tokenizer."""
    return TextParts({T5: load_t5(folder, T5, dtype, device)}, {T5: load_t5_tokenizer(folder, T5, TOKENS)})


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, T, D]: T5's last state; `padding` [B, T], bool: what is not read.

    As bool it stays on the CPU while training, so that `predict` reads lengths without waiting for a GPU.
    """
    import torch

    tokenizer = parts.tokenizers[T5]
    words = read_t5_tokens(tokenizer, captions, options.t5_tokens or tokenizer.model_max_length, parts.device)
    here = (words.ids != tokenizer.pad_token_id).flip(1).cummax(1).values.flip(1)
    states = words.weigh(parts.encoders[T5](words.ids, attention_mask=here)[0])
    lengths = here.sum(1, keepdim=True)
    return {"embeds": states, "padding": torch.arange(states.shape[1], device=states.device) > lengths}


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, T, D] without cond["padding"] [B, T].

    Captions are cut to the longest; a mask is needed only where others are shorter. The module rounds a time to the
    precision of the latents before it embeds it, so its embedding gets the exact one.
    """
    import torch

    padding = cond["padding"]
    ragged, longest = len(padding) > 1, padding.shape[1]
    if not padding.is_meta:
        lengths = (padding < 0.5).sum(1).tolist()
        ragged, longest = len(set(lengths)) > 1, max(1, *lengths)
    embeds, tokens = cond["embeds"][:, :longest], packed(noisy)
    mask = None
    if ragged:
        image = torch.ones(tokens.shape[:2], dtype=torch.bool, device=noisy.device)
        mask = torch.cat([(padding[:, :longest] < 0.5).to(noisy.device), image], dim=1)
    exact, embed = (t + 1).float(), cast("Any", denoiser.time_text_embed).time_proj
    with embed.register_forward_pre_hook(lambda *_: (exact,)), _checkpoints_with(denoiser, mask):
        velocity = denoiser(
            tokens,
            embeds,
            exact / TIMESTEPS,
            token_places(noisy, axes=3),
            torch.zeros(longest, 3, device=noisy.device),
            attention_mask=mask,
            return_dict=False,
        )[0]
    return unpacked(velocity, noisy)


@contextmanager
def _checkpoints_with(denoiser: Any, mask: Tensor | None) -> Iterator[None]:
    """Gradient checkpointing passes the mask to single blocks, too, which diffusers leaves out there."""
    own: Callable[..., Any] | None = getattr(denoiser, "_gradient_checkpointing_func", None)
    if mask is None or own is None or not denoiser.gradient_checkpointing:
        yield
        return
    single = {id(block) for block in denoiser.single_transformer_blocks}

    def checkpointed(block: nn.Module, *inputs: Any) -> Any:
        return own(block, *inputs, mask) if id(block) in single else own(block, *inputs)

    denoiser._gradient_checkpointing_func = checkpointed
    try:
        yield
    finally:
        denoiser._gradient_checkpointing_func = own


def prompted(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The pipeline's arguments, with bool masks, which it passes on as they are."""
    arguments: dict[str, Any] = {}
    for beginning, each in (("", cond), ("negative_", negative or {})):
        if each:
            arguments[f"{beginning}prompt_embeds"] = each["embeds"]
            arguments[f"{beginning}prompt_attention_mask"] = (each["padding"] < 0.5).to(each["embeds"].device)
    return arguments


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    tokens = text.t5_tokens or TOKENS
    return {"embeds": (tokens, int(config["joint_attention_dim"])), "padding": (tokens,)}


def denoiser_part(stored: Stored) -> Part:
    """Config and places of Chroma's transformer."""
    config = dict(public_architecture("chroma").denoiser) | {
        "_class_name": KIND,
        "in_channels": stored.side("img_in.weight", 1),
        "num_layers": stored.count("double_blocks."),
        "num_single_layers": stored.count("single_blocks."),
        "num_attention_heads": stored.side("img_in.weight", 0) // 128,
        "joint_attention_dim": stored.side("txt_in.weight", 1),
        "approximator_num_channels": stored.side("distilled_guidance_layer.in_proj.weight", 1),
        "approximator_hidden_dim": stored.side("distilled_guidance_layer.in_proj.weight", 0),
        "approximator_layers": stored.count("distilled_guidance_layer.layers."),
    }
    return Part(config, by_layout(stored, (*LAYOUT, *REST)))


def read_checkpoint(found: SingleFile) -> SingleFile:
    """Raises UsageError for models that take pixels, or more than noisy latents."""
    if "img_in.weight" not in found.denoiser.shapes or found.denoiser.side("img_in.weight", 1) != flux.TOKEN:
        message = f"{found.file} is a Chroma model that takes pixels (Radiance), or more than noisy latents."
        raise UsageError(Problem("model_unsupported", message, "Use Chroma1-Base or Chroma1-HD."))
    return found


def base_names(facts: ModelFacts) -> tuple[str, str]:
    return "chroma", "chroma/lora"


load_transformer, make_denoiser = transformer_functions(KIND)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    check=lambda folder, options: refuse_clip_options("Chroma", options),
)
FAMILY = Family(
    name="chroma",
    read_facts=describe,
    denoiser=DenoiserSpec(
        component="transformer",
        load=load_transformer,
        make=make_denoiser,
        make_process=make_process,
        predict=predict,
        lora_targets={"attention": flux.ATTENTION, "attention+ff": (*flux.ATTENTION, *flux.FEED_FORWARD)},
        thin=flux.thin,
        thinness=flux.THINNESS,
    ),
    encoders=encoders_from(load_whole_image_encoder, TEXT, one_encoder_keys("-masked")),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name=PIPELINE,
        make=one_encoder_pipeline(PIPELINE, load_texts, load_transformer),
        sampling_defaults=sampling_defaults,
        prompted=prompted,
    ),
    lora_files=LoraFileSpec(
        base_names=base_names,
        prefixes={"transformer": "lora_unet"},
        layout=LAYOUT,
        also=flux.ALSO,
        like="flux",
        readers=(
            "diffusers: kohya",
            "diffusers: original, kohya's halves",
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: diffusers",
            "ComfyUI: diffusers, kohya's halves",
            "ComfyUI: OneTrainer",
            "ComfyUI: LyCORIS",
            "ComfyUI: no prefix",
        ),
        passed_over={"diffusers": ("x_embedder", "context_embedder", "proj_out", f"{GUIDING}.")},
    ),
    checkpoint=CheckpointSpec(
        mark="double_blocks.0.img_attn.qkv.weight",
        denoiser=denoiser_part,
        fits=flux.has_modulation_network,
        read=read_checkpoint,
    ),
)
