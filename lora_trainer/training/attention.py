"""Choose a run's attention backend: which are tried, at which sizes, and which is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lora_trainer.models.attention.backends import BACKENDS, set_attention_backend
from lora_trainer.models.attention.choose import AttentionChoice, choose_attention, fastest_attention
from lora_trainer.models.attention.shapes import AttentionShape, shapes_of, small_shapes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lora_trainer.config.schema import Config
    from lora_trainer.models.family import Family
    from lora_trainer.training.denoiser_layout import Layout
    from lora_trainer.training.processes import Processes

ALIKE = ("sdpa", "flash", "math")  # can give the same bits each time (train.deterministic)
TORCH_ALONE = ("auto", "sdpa", "math")  # on a CPU these do not depend on this run's sizes

MOST_SCORES = 2**26  # bytes of one attention; a step keeps several such tensors for each of its layers


def set_up_attention(
    denoiser: nn.Module,
    config: Config,
    family: Family,
    layout: Layout,
    processes: Processes,
    *,
    is_requested: bool,
) -> AttentionChoice:
    """Choose the attention at the layout's size and install it; with `fastest`, all processes take the same.

    Raises UsageError where the backend that the user requested (`is_requested`) does not work, or none does.
    """
    wanted, device, dtype = config.hardware.attention_backend, processes.device, layout.dtype
    shapes: tuple[AttentionShape, ...]
    if device.type == "cuda" or wanted not in TORCH_ALONE:
        cond = family.text.cond_shapes(dict(denoiser.config))  # type: ignore[arg-type]  # diffusers' own
        shapes = shapes_of(denoiser, family.denoiser.predict, layout.latents, cond, dtype)
    else:
        shapes = small_shapes(denoiser)
    if wanted == "fastest":
        names = timed_attentions(config, device, shapes, dtype)
        choice = fastest_attention(names, dtype, device, shapes, processes.reduce)
    else:
        choice = choose_attention(wanted, attention_order(config, is_requested=is_requested), dtype, device, shapes)
    set_attention_backend(denoiser, choice.name)
    return choice


def attention_order(config: Config, *, is_requested: bool) -> tuple[str, ...]:
    """What to try where the configured backend fails; nothing where the user requested it."""
    if is_requested and config.hardware.attention_backend != "auto":
        return ()
    if config.train.deterministic:  # xformers does not promise the same bits each time
        return ("sdpa", "math")
    if config.hardware.attention_backend == "xformers":
        return ("xformers", "sdpa", "math")
    return ("sdpa", "xformers", "math")


def timed_attentions(
    config: Config, device: torch.device, shapes: Sequence[AttentionShape], dtype: torch.dtype
) -> tuple[str, ...]:
    """What `fastest` tries. `math` keeps every score: never on a GPU, whose memory plan has no room for them."""
    names = ALIKE if config.train.deterministic else tuple(BACKENDS)
    scores = max((shape.batch * shape.heads * shape.queries * shape.keys for shape in shapes), default=0)
    keeps = device.type != "cuda" and scores * dtype.itemsize <= MOST_SCORES
    return tuple(name for name in names if keeps or name != "math")
