"""From a config to a learner: the denoiser with its LoRA, attention, checkpointing and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_trainer.config.schema import Config
from lora_trainer.core.randomness import position_key
from lora_trainer.diffusion.process import Process
from lora_trainer.export.weights import shapes_of
from lora_trainer.models.attention import choose_attention, head_sizes, install_attention
from lora_trainer.models.family import Family, ModelFacts
from lora_trainer.models.lora import inject_lora, target_modules
from lora_trainer.models.memory import blocks_to_checkpoint, checkpoint_blocks, checkpointable_blocks
from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.training.adapter import make_adapter
from lora_trainer.training.step import Learner


@dataclass(frozen=True)
class Built:
    """The learner, the weight shapes of the untouched denoiser by name, and what was decided, also as sentences."""

    learner: Learner
    shapes: dict[str, tuple[int, ...]]
    attention: str
    notes: tuple[str, ...]


def build_learner(
    config: Config,
    family: Family,
    facts: ModelFacts,
    *,
    dtype: torch.dtype,
    device: torch.device,
    reduce: Callable[[Tensor], Tensor] | None,
    card_gib: float | None,
    attention_asked: bool,
) -> Built:
    """Load the denoiser frozen, put the LoRA on it and make its optimizer.

    Raises UsageError for targets that match nothing, an attention that was asked for and
    does not work, or an optimizer that is not installed.
    """
    denoiser = family.load_denoiser(facts.path, dtype, device)
    shapes = shapes_of({family.denoiser_prefix: denoiser})
    names = target_modules(denoiser, family, config.lora.targets)
    attention = choose_attention(
        config.memory.attention, attention_order(config, attention_asked), dtype, device, head_sizes(denoiser)
    )
    install_attention(denoiser, attention.name)
    lora = config.lora
    parameters = inject_lora(
        denoiser,
        names,
        rank=lora.rank,
        alpha=lora.alpha or float(lora.rank),
        dropout=lora.dropout,
        seed=position_key(config.train.seed, "lora_init") % 2**32,
    )
    denoiser.to(device).train()
    blocks = len(checkpointable_blocks(denoiser))
    checkpointed, reason = blocks_to_checkpoint(config.memory.checkpointing, blocks, card_gib)
    checkpoint_blocks(denoiser, checkpointed)
    adapter = make_adapter(parameters, dtype)
    optimizer = OPTIMIZERS[config.optim.name](list(adapter.masters.values()), config.optim)
    scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None
    learner = Learner(
        denoiser=denoiser,
        predict=family.predict,
        process=on_device(family.make_process(facts.path), device),
        adapter=adapter,
        optimizer=optimizer,
        scaler=scaler,
        reduce=reduce,
        device=device,
        dtype=dtype,
        clip_norm=config.optim.clip_norm,
        min_snr_gamma=config.loss.min_snr_gamma,
    )
    notes = (
        f"LoRA rank {lora.rank} on {len(names)} modules: {adapter.size:,} trained parameters",
        f"attention {attention.name}: {attention.reason}",
        f"gradient checkpointing {checkpointed} of {blocks} blocks: {reason}",
    )
    return Built(learner, shapes, attention.name, notes)


def on_device(process: Process, device: torch.device) -> Process:
    """The schedule beside the model, so that no step copies it there."""
    return replace(process, alphas_cumprod=process.alphas_cumprod.to(device))


def attention_order(config: Config, asked: bool) -> tuple[str, ...]:
    """What to try when the wanted implementation fails; nothing when a user insisted on it."""
    if asked and config.memory.attention != "auto":
        return ()
    if config.memory.attention == "xformers":
        return ("xformers", "sdpa", "math")
    return ("sdpa", "xformers", "math")
