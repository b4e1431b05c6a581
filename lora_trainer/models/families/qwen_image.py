"""Qwen-Image: a transformer of 20 billion weights with two streams, text and image, in every block (arXiv:2508.02324).

Its text encoder is the language model of Qwen2.5-VL, its VAE a video VAE of one frame. 2512 is the same architecture. The edit
models (Edit, Edit-2509, Edit-2511) read control images as further tokens, and their text encoder sees them with the caption.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.conditioning import EditCaption, controls_of
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.layouts import Rule
from lora_trainer.models.autoencoder import VIDEO, load_whole_image_encoder, vae_facts
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
from lora_trainer.models.flow_schedule import make_process, read_flow_schedule
from lora_trainer.models.folder import check_components, fingerprint, read_config
from lora_trainer.models.published import public_architecture
from lora_trainer.models.qwen_edit import (
    PLACE,
    READER,
    SETTINGS,
    TOKEN,
    encode_with_controls,
    load_reader,
)
from lora_trainer.models.qwen_text import (
    CUT,
    QWEN,
    TOKENIZER,
    as_long_as_needed,
    check_tokenizer,
    language_model,
    read_template,
    text_config,
)
from lora_trainer.models.single.stored import Part, SingleFile, Stored, by_layout
from lora_trainer.models.transformer import (
    PATCH,
    STREAMS,
    one_encoder_pipeline,
    packed,
    refuse_widths,
    thinner,
    transformer_config,
    transformer_functions,
    unpacked,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PIPELINE = "QwenImagePipeline"
KIND = "QwenImageTransformer2DModel"
TOKENS, MOST_TOKENS = 512, 1024  # of a caption: usually, and what the pipeline can read
SIDE = 128  # of the latents that the model was trained for
TIMESTEPS = 1000
EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
EDITS = {EDIT: "edit", PLUS: "edit-plus"}
SEEN_PIXELS = {EDIT: 1024 * 1024, PLUS: 384 * 384}  # of a control image, by the text encoder
MOST_CONTROLS = {EDIT: 1, PLUS: 3}  # as their authors say
BLANK = (64, 64)  # width and height of an image that a pipeline asks for and does not read
THINNESS = "a twelfth of its width and a sixth of its layers"
ATTENTION = tuple(f"transformer_blocks.*.attn.{name}" for name in STREAMS)
FEED_FORWARD = tuple(
    f"transformer_blocks.*.{part}_mlp.net.{layer}" for part in ("img", "txt") for layer in ("0.proj", "2")
)
# Options of the transformer's config for images as inputs, by what they make of it.
OF_OTHERS = {
    "zero_cond_t": "edits images",
    "use_additional_t_cond": "makes images in layers",
    "use_layer3d_rope": "makes images in layers",
}
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
# The original code, ComfyUI and kohya's trainer have diffusers' names.
LAYOUT = tuple(
    Rule(name, name)
    for name in (
        *(f"transformer_blocks.{{}}.attn.{name}" for name in (*STREAMS, *NORMS)),
        *(f"transformer_blocks.{{}}.{part}_mlp.net.{layer}" for part in ("img", "txt") for layer in ("0.proj", "2")),
        *(f"transformer_blocks.{{}}.{part}_mod.1" for part in ("img", "txt")),
        *("img_in", "txt_in", "txt_norm", "norm_out.linear", "proj_out"),
        *(f"time_text_embed.timestep_embedder.linear_{number}" for number in (1, 2)),
    )
)
ZERO_FOR_CONTROLS = "__index_timestep_zero__"  # an empty tensor that marks Qwen-Image-Edit 2511 in ComfyUI's files
FLAVORS = ("base", "edit", "edit-2509", "edit-2511")


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    config = transformer_config(folder, KIND, ("in_channels", "joint_attention_dim"))
    channels, downscale = vae_facts(folder, VIDEO)
    read_flow_schedule(folder)
    check_components(folder, ("transformer", "vae", QWEN))
    check_tokenizer(folder / TOKENIZER)
    kind = pipeline_of(folder)
    if kind in EDITS:
        if not (folder / SETTINGS).is_file():
            message = f"{folder}/{SETTINGS} is missing: the text encoder of an edit model sees the control images."
            raise UsageError(Problem("file_missing", message, f"Copy the folder {READER} that the model came with."))
        read_config(folder, SETTINGS)
        config = {**config, "zero_cond_t": False}
    if other := next((what for key, what in OF_OTHERS.items() if config.get(key)), None):
        raise UsageError(
            Problem(
                "model_config_invalid",
                f"{folder} {other}, which its pipeline ({kind}) does not.",
                "Use the whole folder of one model.",
            )
        )
    if config["in_channels"] != PATCH * PATCH * channels:
        message = f"{folder} takes {config['in_channels']} input channels in place of {PATCH * PATCH * channels}."
        raise UsageError(Problem("model_config_invalid", message, "Use the text-to-image base model with its own VAE."))
    refuse_widths(folder, "text", config["joint_attention_dim"], text_config(folder / QWEN).get("hidden_size"))
    return ModelFacts(
        path=folder,
        family="qwen_image",
        resolution=SIDE * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * PATCH,
        prediction="flow",
        caption_tokens=TOKENS,
        variant=EDITS.get(kind, ""),
        most_controls=MOST_CONTROLS.get(kind, 0),
        control_tokens=round(math.sqrt(SEEN_PIXELS.get(kind, 0)) / TOKEN) ** 2,
    )


def pipeline_of(folder: Path) -> str:
    """The name of the model's pipeline, which alone tells the edit models apart."""
    return str(read_config(folder, "model_index.json").get("_class_name"))


def check_text(folder: Path, options: TextOptions) -> None:
    """Raise UsageError for CLIP's options, and for more tokens than the pipeline reads."""
    refuse_clip_options("Qwen-Image", options)
    if (options.t5_tokens or 0) > MOST_TOKENS:
        message = (
            f"text_encoder.max_sequence_length={options.t5_tokens}: Qwen-Image reads at most {MOST_TOKENS} tokens."
        )
        raise UsageError(Problem("value_out_of_range", message, f"Set {MOST_TOKENS} or less."))


def prompted(cond: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The pipeline's arguments: states up to the longest prompt, and which of them are text."""
    import torch

    arguments: dict[str, Any] = {"max_sequence_length": min(cond["embeds"].shape[1], MOST_TOKENS)}
    for beginning, text in (("", cond), ("negative_", negative)):
        if text is not None:
            embeds, mask = as_long_as_needed(text["embeds"], text["padding"])
            if mask is None:  # the pipeline warns of none, and drops it where all of it is text
                mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
            arguments |= {f"{beginning}prompt_embeds": embeds, f"{beginning}prompt_embeds_mask": mask}
    return arguments


def encoder_keys(folder: Path, dtype: torch.dtype, text: TextOptions = PLAIN, /) -> tuple[str, str]:
    """Names of the image and the text encoders' weights, without loading them."""
    image, own = one_encoder_keys()(folder, dtype, text)
    kind = pipeline_of(folder)
    return image, f"{own}-{EDITS[kind]}-{fingerprint(folder, READER)}" if kind in EDITS else own


def load_texts(
    folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
) -> TextParts:
    """The language model, frozen, on the device, and its tokenizer; with the half that sees images for edit models alone."""
    kind = pipeline_of(folder)
    if kind not in EDITS:
        return language_model("Qwen2_5_VLTextModel")(folder, dtype, device, without)
    parts = language_model("Qwen2_5_VLModel")(folder, dtype, device, without)
    # The tokenizer knows it; a single file of weights does not.
    cast("Any", parts.encoders[QWEN]).config.image_token_id = parts.tokenizers[QWEN].convert_tokens_to_ids(PLACE)
    return replace(parts, image_processor=load_reader(folder, SEEN_PIXELS[kind], numbered=kind == PLUS))


def encode_text(parts: TextParts, captions: Sequence[Caption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """B captions -> `embeds` [B, T, D]: the last state; `padding` [B, T], bool: where there is no text.

    As bool it stays on the CPU while training, so that `predict` reads lengths without waiting for a GPU.
    """
    import torch

    if parts.image_processor is not None:
        return encode_edits(parts, [EditCaption(caption, ()) for caption in captions], options)
    tokens, mask = read_template(parts.tokenizers[QWEN], captions, options.t5_tokens or TOKENS, parts.device)
    output = parts.encoders[QWEN](input_ids=tokens.ids, attention_mask=mask, use_cache=False)
    states = tokens.weigh(output.last_hidden_state[:, CUT:])
    return {
        "embeds": states.masked_fill(~mask[:, CUT:, None], 0.0),
        "padding": torch.logical_not(mask[:, CUT:]),
    }


def encode_edits(parts: TextParts, captions: Sequence[EditCaption], options: TextOptions = PLAIN) -> dict[str, Tensor]:
    """The same of B captions of an edit model with their control images, whose tokens come first."""
    embeds, padding = encode_with_controls(parts, QWEN, captions, options.t5_tokens or TOKENS)
    return {"embeds": embeds, "padding": padding}


def unread(denoiser: nn.Module) -> list[str]:
    """The last block's layers of the text stream that come after the attention's keys and values."""
    last = f"transformer_blocks.{len(cast('nn.ModuleList', denoiser.transformer_blocks)) - 1}"
    return [f"{last}.{name}" for name in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")]


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, T, D] without cond["padding"] [B, T].

    Tokens of control images follow those of the image. The module rounds a time to the precision of the latents before it
    embeds it, so its embedding gets the exact one; that of 2511 gets 0, too, for the control images.
    """
    import torch

    images = (noisy, *(control.to(noisy) for control in controls_of(cond).values()))
    text, mask = as_long_as_needed(cond["embeds"], cond["padding"])
    exact, embed = (t + 1).float() / TIMESTEPS, cast("nn.Module", denoiser.time_text_embed)
    times = torch.cat([exact, torch.zeros_like(exact)])
    with embed.register_forward_pre_hook(lambda _, rounded: (times[: len(rounded[0])], *rounded[1:])):
        velocity = denoiser(
            torch.cat([packed(image) for image in images], dim=1),
            text,
            mask,
            exact,
            [image_shapes(images)] * len(noisy),
            return_dict=False,
        )[0]
    return unpacked(velocity[:, : packed(noisy).shape[1]], noisy)


def image_shapes(images: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Frames, rows and columns of the tokens of each of the latents [B, C, h, w]."""
    return [(1, image.shape[2] // PATCH, image.shape[3] // PATCH) for image in images]


def with_controls(pipeline: Any, size: tuple[int, int], controls: Sequence[Tensor]) -> dict[str, Any]:
    """What an edit pipeline needs besides: it takes no latents, and resizes each control image to a million pixels.

    So it gets a blank image, and for one call the latents where it would encode it, and their shapes where its transformer
    is called.
    """
    import torch
    from PIL import Image

    if type(pipeline).__name__ not in EDITS:
        return {}
    scale = pipeline.vae_scale_factor * PATCH
    shapes = [(1, size[1] // scale, size[0] // scale), *image_shapes(controls)]
    tokens = torch.cat([packed(image) for image in controls], dim=1) if controls else None

    def with_shapes(_: nn.Module, places: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        return places, {**named, "img_shapes": [shapes] * len(named["hidden_states"])}

    hook = pipeline.transformer.register_forward_pre_hook(with_shapes, with_kwargs=True)

    def latents_of_controls(_: object, *rest: object) -> tuple[Tensor, Tensor | None]:
        del pipeline.prepare_latents  # for one call: the next one has control images of its own
        noise: Tensor = pipeline.prepare_latents(None, *rest)[0]
        return noise, None if tokens is None else tokens.to(noise)

    def after_step(_: object, step: int, *__: object) -> dict[str, Any]:
        if step + 1 == pipeline.num_timesteps:
            hook.remove()
        return {}

    pipeline.prepare_latents = latents_of_controls
    return {"image": Image.new("RGB", BLANK), "callback_on_step_end": after_step}


def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' pipeline of the base model, for generating images."""
    kind = pipeline_of(folder)
    make = one_encoder_pipeline(kind if kind in EDITS else PIPELINE, load_texts, load_transformer)
    return make(folder, dtype, device)


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    tokens = text.t5_tokens or TOKENS
    return {"embeds": (tokens, int(config["joint_attention_dim"])), "padding": (tokens,)}


def denoiser_part(stored: Stored) -> Part:
    """Config and places of Qwen-Image's transformer, whose original names are diffusers'; ComfyUI marks 2511 in them."""
    config = dict(public_architecture("qwen_image").denoiser) | {
        "_class_name": KIND,
        "in_channels": stored.side("img_in.weight", 1),
        "out_channels": stored.side("proj_out.weight", 0) // PATCH**2,
        "num_layers": stored.count("transformer_blocks."),
        "num_attention_heads": stored.side("img_in.weight", 0) // 128,
        "joint_attention_dim": stored.side("txt_in.weight", 1),
    }
    return Part(config, by_layout(stored, LAYOUT, (ZERO_FOR_CONTROLS,)))


def read_checkpoint(found: SingleFile) -> SingleFile:
    """Models that edit have the same keys but for 2511's mark, so the file's name decides which one it is."""
    stored, name = found.denoiser, found.file.name.lower()
    others = {
        "makes images in layers": "time_text_embed.addition_t_embedding.weight" in stored.shapes,
        "lacks layers": "transformer_blocks.0.attn.to_q.weight" not in stored.shapes
        or "transformer_blocks.0.attn.add_q_proj.weight" not in stored.shapes,
    }
    if what := next((what for what, is_so in others.items() if is_so), None):
        message = f"{found.file} {what} by its keys, and such single files are not read."
        raise UsageError(
            Problem(
                "single_file_unsupported", message, "Use Qwen-Image, Qwen-Image 2512, or Qwen-Image-Edit (2509, 2511)."
            )
        )
    if ZERO_FOR_CONTROLS in stored.shapes:
        return replace(found, variant="edit-2511", flavors=("edit-2511",))
    edits, dated = "edit" in name, next((date for date in ("2509", "2511") if date in name), "")
    variant = "-".join(filter(None, ("edit", dated))) if edits else "base"
    note = (
        f"{found.file.name} is assumed to be {'the first Qwen-Image-Edit' if edits else 'Qwen-Image without control images'}: "
        f"the edit models have the same keys. If it is another one, set model.flavor={'edit-2509' if edits else 'edit'}."
    )
    named = dated if edits else "qwen_image" in name.replace("-", "_")
    return replace(found, variant=variant, flavors=FLAVORS, note="" if named else note)


def base_names(facts: ModelFacts) -> tuple[str, str]:
    return "qwen_image", "-".join(
        ("Qwen-Image", *(part.title() for part in facts.variant.split("-") if part))
    ) + "/lora"


load_transformer, make_denoiser = transformer_functions(KIND)
TEXT = TextSpec(
    load=load_texts,
    encode=encode_text,
    shapes=cond_shapes,
    check=check_text,
    encode_edits=encode_edits,
)
FAMILY = Family(
    name="qwen_image",
    read_facts=describe,
    denoiser=DenoiserSpec(
        component="transformer",
        load=load_transformer,
        make=make_denoiser,
        make_process=make_process,
        predict=predict,
        lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
        thin=thinner(12, 6),
        thinness=THINNESS,
        unread=unread,
    ),
    encoders=encoders_from(load_whole_image_encoder, TEXT, encoder_keys),
    text=TEXT,
    pipeline=PipelineSpec(
        class_name=PIPELINE,
        edit_class_names=tuple(EDITS),
        with_controls=with_controls,
        make=make_pipeline,
        sampling_defaults=lambda folder: SamplingDefaults(steps=50),
        prompted=prompted,
        guidance="true_cfg_scale",
        refused={"QwenImageLayeredPipeline": "a Qwen-Image model that makes images in layers"},
    ),
    lora_files=LoraFileSpec(
        base_names=base_names,
        prefixes={"transformer": "lora_unet"},
        layout=LAYOUT,
        readers=(
            "diffusers: kohya",
            "diffusers: original",
            "diffusers: original, kohya's halves",
            "ComfyUI: kohya",
            "ComfyUI: original",
            "ComfyUI: original, kohya's halves",
            "ComfyUI: diffusers",
            "ComfyUI: diffusers, kohya's halves",
            "ComfyUI: LyCORIS",
            "ComfyUI: no prefix",
        ),
    ),
    checkpoint=CheckpointSpec(mark="txt_norm.weight", denoiser=denoiser_part, read=read_checkpoint),
)
