"""Shared by the families with a transformer on patches of two by two latents: facts from the configs, text parts, checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.autoencoder import drawing_vae, vae_facts
from lora_trainer.models.family import LoadDenoiser, LoadTexts, ModelFacts
from lora_trainer.models.flow_schedule import make_scheduler, read_flow_schedule
from lora_trainer.models.folder import check_components, read_config
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.t5 import check_t5_tokenizer
from lora_trainer.models.unet import caption_tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lora_trainer.models.quantization.store import Narrow

STREAMS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
MOST_WIDTH, MOST_LAYERS = 1 << 20, 1000  # of any honest config
PATCH = 2  # places of the latents along a side of one token


def transformer_config(folder: Path, kind: str, needs: tuple[str, ...]) -> dict[str, Any]:
    """The transformer's config. Raises UsageError when it is missing, damaged or of another class than `kind`."""
    config = read_config(folder, "transformer/config.json", needs)
    if config.get("_class_name") != kind:
        message = f"{folder}/transformer is a {config.get('_class_name') or 'nameless part'}, not a {kind}."
        raise UsageError(
            Problem("model_unsupported", message, "Use a text-to-image base model; model.family chooses the family.")
        )
    return config


def class_of_diffusers(kind: str) -> Any:
    """Imported when it is needed, since that costs seconds."""
    import diffusers

    return getattr(diffusers, kind)


def transformer_functions(
    kind: str, find: Callable[[str], Any] = class_of_diffusers
) -> tuple[LoadDenoiser, Callable[[Mapping[str, Any]], nn.Module]]:
    """`load` and `make` of a `DenoiserSpec`, for a transformer of diffusers' class `kind`, which each finds when it runs."""

    def load(folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None, /) -> nn.Module:
        return cast("nn.Module", load_frozen(find(kind), folder / "transformer", dtype, device, narrow))

    def make(config: Mapping[str, Any]) -> nn.Module:
        return cast("nn.Module", find(kind).from_config(dict(config)))

    return load, make


def thinner(heads: int, layers: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """`thin` of a `DenoiserSpec`: one of so many heads, each of the same size, and one of so many layers of each kind."""

    def thin(config: Mapping[str, Any]) -> dict[str, Any]:
        parts = {"num_attention_heads": heads, "num_layers": layers, "num_single_layers": layers}
        return {**config, **{key: max(1, int(config[key]) // part) for key, part in parts.items() if key in config}}

    return thin


def one_encoder_pipeline(
    kind: str, load_texts: LoadTexts, load_transformer: LoadDenoiser, settings: Sequence[str] = ()
) -> Callable[[Path, torch.dtype, torch.device], Any]:
    """`make` of a `PipelineSpec`, for diffusers' class `kind` with one text encoder.

    `settings` are those that the class takes from model_index.json.
    """

    def make(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
        texts = load_texts(folder, None, device)
        index = read_config(folder, "model_index.json") if settings else {}
        pipeline = class_of_diffusers(kind)(
            vae=drawing_vae(folder, dtype, device),
            text_encoder=texts.encoders["text_encoder"],
            tokenizer=texts.tokenizers["text_encoder"],
            transformer=load_transformer(folder, dtype, device),
            scheduler=make_scheduler(folder),
            **{name: index[name] for name in settings if name in index},
            **({} if texts.image_processor is None else {"processor": texts.image_processor}),
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return make


def transformer_facts(
    folder: Path,
    family: str,
    *,
    clips: Sequence[str],
    t5: str | None,
    t5_tokens: int,
    per_latent: int,
    side: int,
    variant: str,
) -> ModelFacts:
    """Facts from the config files. `per_latent` input channels of the transformer are one of the latents. Either CLIPs or T5
    read captions, or both.

    `side`: of the latents that the model was trained for. Raises UsageError when a part is missing, damaged or of another kind.
    """
    config = read_config(folder, "transformer/config.json", ("in_channels",))
    channels, downscale = vae_facts(folder)
    read_flow_schedule(folder)
    clip_tokens = min((caption_tokens(folder, name) for name in clips), default=t5_tokens)
    check_components(folder, ("transformer", "vae", *clips, *([t5] if t5 else [])))
    if t5:
        check_t5_tokenizer(folder, t5)
    if config["in_channels"] != per_latent * channels:
        message = f"{folder} takes more than noisy latents ({config['in_channels']} input channels in place of {per_latent * channels})"
        raise UsageError(
            Problem(
                "model_unsupported",
                f"{message}: a model for inpainting, control or editing.",
                "Use the text-to-image base model.",
            )
        )
    return ModelFacts(
        path=folder,
        family=family,
        resolution=side * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * PATCH,
        prediction="flow",
        caption_tokens=t5_tokens if t5 else clip_tokens,
        variant=variant,
    )


def refuse_widths(folder: Path, what: str, expected: object, provided: object) -> None:
    """Raise UsageError where the transformer's text width is not that of the encoders."""
    if expected != provided:
        message = f"{folder}: the transformer takes {what} {expected} wide, the text encoders give {provided}."
        raise UsageError(Problem("model_config_invalid", message, "Use the text encoders that the model came with."))


def packed(latents: Tensor) -> Tensor:
    """Latents [B, C, h, w] as tokens [B, h * w / 4, 4 C]: four neighboring places are one, row by row."""
    samples, channels, height, width = latents.shape
    split = latents.view(samples, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpacked(tokens: Tensor, latents: Tensor) -> Tensor:
    """Tokens as latents of the same shape as `latents`: the other way of `packed`."""
    samples, channels, height, width = latents.shape
    split = tokens.reshape(samples, height // PATCH, width // PATCH, channels, PATCH, PATCH)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)


def token_places(latents: Tensor, axes: int, number: int = 0) -> Tensor:
    """The positions [h * w / 4, axes] of the tokens of latents: the image's number, row and column on the first axes."""
    import torch

    rows, columns = latents.shape[2] // PATCH, latents.shape[3] // PATCH
    places = torch.zeros(rows, columns, axes, device=latents.device)
    places[..., 0] = number
    places[..., 1] += torch.arange(rows, device=latents.device)[:, None]
    places[..., 2] += torch.arange(columns, device=latents.device)
    return places.flatten(0, 1)
