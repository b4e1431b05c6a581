"""FLUX.2 klein: FLUX.1's kind of blocks with one modulation for all, on the latents of a VAE of its own.

Four models: 4 and 9 billion weights, each as a base (50 steps, guidance) and distilled (4 steps, none). Their text encoder
is Qwen3 with the caption as a chat message: the states after a quarter, a half and three quarters of its layers, side by
side. Padding is read like text. All four edit: they read control images as further tokens. FLUX.2 dev reads captions with
another language model and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.conditioning import controls_of
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.layouts import Rule, fused
from lora_trainer.models.autoencoder import load_whole_image_encoder, vae_facts
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
from lora_trainer.models.flow_schedule import make_process, read_flow_schedule
from lora_trainer.models.folder import check_components, read_config, whole_number
from lora_trainer.models.published import public_architecture
from lora_trainer.models.qwen3 import (
    QWEN,
    TOKENS,
    check_qwen3,
    load_qwen3,
    read_chat,
)
from lora_trainer.models.single.stored import Part, SingleFile, Stored, by_layout
from lora_trainer.models.transformer import (
    MOST_LAYERS,
    MOST_WIDTH,
    PATCH,
    STREAMS,
    one_encoder_pipeline,
    packed,
    refuse_widths,
    thinner,
    token_places,
    transformer_config,
    transformer_functions,
    unpacked,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PIPELINE = "Flux2KleinPipeline"
KIND = "Flux2Transformer2DModel"
VAE = "AutoencoderKLFlux2"
STATES = (9, 18, 27)  # of the language model's 36 layers, whose outputs are read
SIZES = {7680: "4b", 12288: "9b"}  # by the width of the text
SIDE = 128  # of the latents that the model was made for
TIMESTEPS = 1000
CONTROL_STEP = 10  # from one image's number to the next: 0 is the generated one, 10 the first control image
BLANK = (64, 64)  # the least width and height of a control image that the pipeline takes
THINNESS = "an eighth of its width and a fifth of its layers"
# A single block has one layer for queries, keys, values and its feed-forward part, and one on the way out.
ATTENTION = (
    *(f"transformer_blocks.*.attn.{name}" for name in STREAMS),
    *(f"single_transformer_blocks.*.attn.{name}" for name in ("to_qkv_mlp_proj", "to_out")),
)
FEED_FORWARD = tuple(
    f"transformer_blocks.*.{part}.{name}" for part in ("ff", "ff_context") for name in ("linear_in", "linear_out")
)
MODULATIONS = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")

LAYOUT = (
    *fused("double_blocks.{}.img_attn.qkv", *(f"transformer_blocks.{{}}.attn.{name}" for name in STREAMS[:3])),
    *fused("double_blocks.{}.txt_attn.qkv", *(f"transformer_blocks.{{}}.attn.{name}" for name in STREAMS[4:7])),
    Rule("transformer_blocks.{}.attn.to_out.0", "double_blocks.{}.img_attn.proj"),
    Rule("transformer_blocks.{}.attn.to_add_out", "double_blocks.{}.txt_attn.proj"),
    Rule("transformer_blocks.{}.ff.linear_in", "double_blocks.{}.img_mlp.0", ratio=6.0),
    Rule("transformer_blocks.{}.ff.linear_out", "double_blocks.{}.img_mlp.2", ratio=1 / 3),
    Rule("transformer_blocks.{}.ff_context.linear_in", "double_blocks.{}.txt_mlp.0", ratio=6.0),
    Rule("transformer_blocks.{}.ff_context.linear_out", "double_blocks.{}.txt_mlp.2", ratio=1 / 3),
    Rule("single_transformer_blocks.{}.attn.to_qkv_mlp_proj", "single_blocks.{}.linear1", ratio=9.0),
    Rule("single_transformer_blocks.{}.attn.to_out", "single_blocks.{}.linear2", ratio=1 / 4),
    Rule("x_embedder", "img_in"),
    Rule("context_embedder", "txt_in"),
    Rule("time_guidance_embed.timestep_embedder.linear_1", "time_in.in_layer"),
    Rule("time_guidance_embed.timestep_embedder.linear_2", "time_in.out_layer"),
    *(Rule(f"{name}.linear", f"{name}.lin") for name in MODULATIONS),
    Rule("norm_out.linear", "final_layer.adaLN_modulation.1", swapped=True),
    Rule("proj_out", "final_layer.linear"),
)


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    config = transformer_config(folder, KIND, ("in_channels", "joint_attention_dim"))
    channels, downscale = vae_facts(folder, VAE)
    read_flow_schedule(folder)
    check_components(folder, ("transformer", "vae", QWEN))
    check_qwen3(folder)
    if config["in_channels"] != PATCH * PATCH * channels or config.get("guidance_embeds"):
        message = f"{folder}: its transformer has other inputs than that of FLUX.2 klein."
        raise UsageError(
            Problem("model_unsupported", message, "Use FLUX.2 klein, base or distilled, of 4 or 9 billion weights.")
        )
    path, qwen = folder / QWEN / "config.json", read_config(folder, f"{QWEN}/config.json")
    if (layers := whole_number(path, qwen, "num_hidden_layers", 1, MOST_LAYERS)) < STATES[-1]:
        message = f"{folder}/{QWEN} has {layers} layers; the states after {', '.join(map(str, STATES))} are read."
        raise UsageError(Problem("model_config_invalid", message, "Use the text encoder that the model came with."))
    width = len(STATES) * whole_number(path, qwen, "hidden_size", 1, MOST_WIDTH)
    refuse_widths(folder, "text", config["joint_attention_dim"], width)
    distilled, size = is_distilled(folder), SIZES.get(width, "")
    return ModelFacts(
        path=folder,
        family="flux2",
        resolution=SIDE * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * PATCH,
        prediction="flow",
        caption_tokens=TOKENS,
        variant="-".join(part for part in ("klein", "" if distilled else "base", size) if part),
        distilled_from="-".join(part for part in ("FLUX.2-klein-base", size.upper()) if part) if distilled else "",
        most_controls=4,  # as its authors say of all four models
    )


def is_distilled(folder: Path) -> bool:
    """Whether it samples in four steps without guidance. Only the pipeline's own config says so."""
    return bool(read_config(folder, "model_index.json").get("is_distilled"))


def sampling_defaults(folder: Path) -> SamplingDefaults:
    return SamplingDefaults(steps=4, guided=False, negative=False) if is_distilled(folder) else SamplingDefaults(50)


def load_texts(folder: Path, dtype: torch.dtype | None, device: torch.device, _: Collection[str] = (), /) -> TextParts:
    """The language model, frozen, on the device, as far as its states are read, and its tokenizer."""
    return load_qwen3(folder, dtype, device, layers=STATES[-1])


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, T, 3 D]: three states of each token side by side, those of padding among them."""
    import torch

    size = options.t5_tokens or TOKENS
    tokens, mask = read_chat(parts.tokenizers[QWEN], captions, size, parts.device, thinking=False)
    output = parts.encoders[QWEN](input_ids=tokens.ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return {"embeds": tokens.weigh(torch.cat([output.hidden_states[layer] for layer in STATES], dim=-1))}


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 32, h, w] at t [B] under cond["embeds"] [B, T, 7680 or 12288].

    Four neighboring places of the latents are one token; the position of each is its row and column, and that of a
    caption's token is its number, on another axis. Tokens of control images follow, each with its image's number. The
    module rounds a time to the precision of the latents before it embeds it, in bf16 by up to 3 of 1000 timesteps, so its
    embedding gets the exact one.
    """
    import torch

    controls, embeds = [control.to(noisy) for control in controls_of(cond).values()], cond["embeds"]
    tokens = torch.cat([packed(image) for image in (noisy, *controls)], dim=1)
    places = torch.cat([token_places(noisy, axes=4), *control_places(controls)])
    words = torch.zeros(embeds.shape[1], 4, device=noisy.device)
    words[:, 3] = torch.arange(embeds.shape[1], device=noisy.device)
    exact, embed = (t + 1).float(), cast("Any", denoiser.time_guidance_embed).time_proj
    with embed.register_forward_pre_hook(lambda *_: (exact,)):
        velocity = denoiser(tokens, embeds, exact / TIMESTEPS, places, words, return_dict=False)[0]
    return unpacked(velocity[:, : packed(noisy).shape[1]], noisy)


def control_places(controls: Sequence[Tensor]) -> list[Tensor]:
    """The positions [h * w / 4, 4] of each control image's tokens, with its number on the first axis."""
    return [token_places(image, axes=4, number=CONTROL_STEP * number) for number, image in enumerate(controls, 1)]


def with_controls(pipeline: Any, size: tuple[int, int], controls: Sequence[Tensor]) -> dict[str, Any]:
    """What the pipeline needs besides, to read control images.

    It takes no latents: it would cut each image to a size of its own, encode it, and pass it to all samples of a batch. So
    it gets blank images, and the latents where it would encode them.
    """
    import torch
    from PIL import Image

    if not controls:
        return {}
    tokens = torch.cat([packed(image) for image in controls], dim=1)
    places = torch.cat(control_places(controls)).expand(len(tokens), -1, -1)

    def latents_of_controls(**_: object) -> tuple[Tensor, Tensor]:
        del pipeline.prepare_image_latents  # for one call: the next one has control images of its own
        return tokens, places

    pipeline.prepare_image_latents = latents_of_controls
    return {"image": [Image.new("RGB", BLANK) for _ in controls]}


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    return {"embeds": (text.t5_tokens or TOKENS, int(config["joint_attention_dim"]))}


def denoiser_part(stored: Stored) -> Part:
    """Config and places of FLUX.2 klein's transformer: 4 or 9 billion weights by its form."""
    config = dict(public_architecture("flux2").denoiser) | {
        "_class_name": KIND,
        "in_channels": stored.side("img_in.weight", 1),
        "num_layers": stored.count("double_blocks."),
        "num_single_layers": stored.count("single_blocks."),
        "num_attention_heads": stored.side("img_in.weight", 0) // 128,
        "joint_attention_dim": stored.side("txt_in.weight", 1),
        "timestep_guidance_channels": stored.side("time_in.in_layer.weight", 1),
    }
    return Part(config, by_layout(stored, (*LAYOUT, *flux.REST)))


def read_checkpoint(found: SingleFile) -> SingleFile:
    """Base or distilled, as far as the file's name says it. Raises UsageError for FLUX.2 dev."""
    stored, name = found.denoiser, found.file.name.lower()
    if "guidance_in.in_layer.weight" in stored.shapes:
        message = f"{found.file} is FLUX.2 dev, whose text encoder (Mistral Small 3.1) is not supported."
        raise UsageError(
            Problem("model_unsupported", message, "Use FLUX.2 klein, base or distilled, of 4 or 9 billion weights.")
        )
    variant = "base" if "base" in name else "distilled"  # as in the published files' names
    note = f"{found.file.name} is assumed to be distilled (4 steps, no guidance): FLUX.2 klein and its base have the same keys."
    return replace(
        found,
        variant=variant,
        flavors=("base", "distilled"),
        note="" if variant == "base" or "klein" in name else f"{note} If it is the base, set model.flavor=base.",
    )


def base_names(facts: ModelFacts) -> tuple[str, str]:
    return "flux2", f"flux-2-{facts.variant}/lora"


load_transformer, make_denoiser = transformer_functions(KIND)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    check=lambda folder, options: refuse_clip_options("FLUX.2", options),
)
FAMILY = Family(
    name="flux2",
    read_facts=describe,
    denoiser=DenoiserSpec(
        component="transformer",
        load=load_transformer,
        make=make_denoiser,
        make_process=make_process,
        predict=predict,
        lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
        thin=thinner(8, 5),
        thinness=THINNESS,
    ),
    encoders=encoders_from(load_whole_image_encoder, TEXT, one_encoder_keys(f"-{STATES}")),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name=PIPELINE,
        with_controls=with_controls,
        make=one_encoder_pipeline(PIPELINE, load_texts, load_transformer, ("is_distilled",)),
        sampling_defaults=sampling_defaults,
    ),
    lora_files=LoraFileSpec(
        base_names=base_names,
        prefixes={"transformer": "lora_unet"},
        layout=LAYOUT,
        readers=(
            "diffusers: LoKr",
            "diffusers: kohya",
            "diffusers: original",
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: diffusers",
            "ComfyUI: diffusers, kohya's halves",
            "ComfyUI: OneTrainer",
            "ComfyUI: LyCORIS",
            "ComfyUI: no prefix",
        ),
        # Of these diffusers reads the last one by the original's name with its halves in the wrong order.
        passed_over={"diffusers": (*MODULATIONS, "norm_out.")},
    ),
    checkpoint=CheckpointSpec(
        mark="double_blocks.0.img_attn.qkv.weight",
        denoiser=denoiser_part,
        fits=lambda stored: "single_stream_modulation.lin.weight" in stored.shapes,
        read=read_checkpoint,
    ),
)
