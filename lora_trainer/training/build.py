"""Build what a step works on from a config: denoiser, LoRA, attention, checkpointing and optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS, adapter_kind, add_adapter, denoiser_options
from lora_trainer.adapters.averages import make_average, shown_weights
from lora_trainer.adapters.masters import make_adapter
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.diffusion.loss import make_loss
from lora_trainer.diffusion.process import Process, zero_terminal_alphas
from lora_trainer.diffusion.timesteps import flow_times
from lora_trainer.lora_format.weights import shapes_of
from lora_trainer.models.base_loras import loras_line
from lora_trainer.models.memory.block_swap import block_swap_note, move_to_device, swap_blocks
from lora_trainer.models.memory.checkpointing import checkpoint_blocks, checkpointable_blocks
from lora_trainer.models.memory.offload import offload_note, offloaded
from lora_trainer.models.memory.phases import count_of, no_more
from lora_trainer.models.memory.sharding import shard_base
from lora_trainer.models.quantization.store import counted_products, int8_products, make_quantizer
from lora_trainer.optim.clipping import make_clip
from lora_trainer.optim.layers import layer_notes
from lora_trainer.optim.optimizers import OPTIMIZERS, make_optimizer, shares_of
from lora_trainer.optim.random_updates import make_bf16_step, make_gradient_noise
from lora_trainer.training.attention import set_up_attention
from lora_trainer.training.compiling import compile_if_enabled
from lora_trainer.training.layer_options import layer_option_notes, limit_timestep_ranks, option_notes, with_loraplus
from lora_trainer.training.network_weights import add_training_adapter, start_from_file
from lora_trainer.training.step import Built, Guard, StepContext, cached_conditioning, nothing_more
from lora_trainer.training.texts import build_texts
from lora_trainer.training.torch_settings import hardware_note, set_memory_order, try_convolutions

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.models.compiled import Compiled
    from lora_trainer.models.family import Family, ModelFacts
    from lora_trainer.training.denoiser_layout import Layout
    from lora_trainer.training.processes import Processes


def build_step_context(
    config: Config,
    family: Family,
    facts: ModelFacts,
    layout: Layout,
    processes: Processes,
    *,
    is_attention_requested: bool,
) -> StepContext:
    """Load the denoiser frozen, put the LoRA on it and make its optimizer; with trained text encoders, where they are.

    Raises UsageError for targets that match nothing, a requested attention backend that does not work, or an optimizer
    that is not installed.
    """
    device, dtype = processes.device, layout.dtype
    denoiser, parameters, compiled, built = build_denoiser(
        config, family, facts, layout, processes, is_attention_requested=is_attention_requested
    )
    texts = build_texts(config, family, facts, dtype=dtype, device=device, checkpointed=built.checkpointed > 0)
    is_rounded = config.optimizer.stochastic_rounding
    kind = adapter_kind(config)
    adapter = make_adapter(
        {**parameters, **(texts.parameters if texts else {})},
        dtype,
        has_masters=not is_rounded,
        fixed={**kind.fixed(denoiser), **(texts.fixed if texts else {})},
    )
    other_lrs = with_loraplus(parameters, texts.lrs if texts else (), config, kind.is_up)
    optimizer = make_optimizer(adapter.masters, config.optimizer, other_lrs)
    average = make_average(config, adapter)
    process = trained_process(family.denoiser.make_process(facts.path), config, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    moves = config.memory.offload_activations and device.type == "cuda"
    size = f"{built.modules} modules, {adapter.size:,} trainable parameters"
    stored = ", in bf16 with stochastic rounding" if is_rounded else ""
    spec = ADAPTERS[config.lora.type]
    line = f"{spec.title}: rank {config.lora.rank}, {size}{', text encoders included' if texts else ''}{stored}"
    read = (f"{spec.title} files: {readers}",) if (readers := spec.read_by(family.lora_files.readers)) else ()
    rates = (f"{spec.title}: {spec.learning_rate}",) if spec.learning_rate else ()
    lines = (line, *read, *rates, *option_notes(config.lora), *layer_notes(adapter.masters, config.optimizer))
    if texts:
        built = replace(built, shapes={**built.shapes, **texts.shapes}, notes=(*texts.notes, *built.notes))
    return StepContext(
        denoiser=denoiser,
        predict=offloaded(family.denoiser.predict, device, denoiser) if moves else family.denoiser.predict,
        process=process,
        loss=make_loss(config.loss, process),
        adapter=adapter,
        average=average,
        shown=shown_weights(optimizer, adapter, average, config.optimizer.name),
        optimizer=optimizer,
        scaler=scaler,
        reduce=processes.reduce,
        device=device,
        dtype=dtype,
        clip=make_clip(config.optimizer),
        guard=choose_guard(config, device, scaled=scaler.is_enabled()),
        compiled=compiled,
        optimizer_waits=OPTIMIZERS[config.optimizer.name].waits_for_gpu,
        await_gpu=processes.await_gpu,
        rank=processes.rank,
        world=processes.world,
        compressed_to={"fp16": torch.float16, "bf16": torch.bfloat16}.get(config.train.gradient_compression or ""),
        texts=texts,
        shares=shares_of(adapter.masters, config.optimizer, other_lrs),
        conditioning=texts.conditioning if texts else cached_conditioning,
        limit_rank=limit_timestep_ranks(config, denoiser, process),
        add_noise=make_gradient_noise(adapter.masters, config.optimizer, config.train.seed) or nothing_more,
        bf16_step=make_bf16_step(optimizer, adapter.masters, config.train.seed) if is_rounded else None,
        built=replace(built, notes=(*lines, *built.notes)),
    )


def build_denoiser(
    config: Config,
    family: Family,
    facts: ModelFacts,
    layout: Layout,
    processes: Processes,
    *,
    is_attention_requested: bool,
) -> tuple[nn.Module, dict[str, nn.Parameter], Compiled | None, Built]:
    """The denoiser in its layout with the LoRA on it, the LoRA's parameters, its compiled blocks, and what was chosen.

    Weights are quantized one layer at a time, so that the full model is never in memory.
    """
    device = processes.device
    products, no_products = int8_products(config.memory.int8_matmul, layout.stored, device)
    quantize = make_quantizer(layout.stored, products=products, by=device)
    gather = processes.gather if config.memory.fsdp else None
    load_device = torch.device("cpu") if layout.swapped or gather else device
    denoiser = family.denoiser.load(facts.path, layout.dtype, load_device, quantize)
    shapes = shapes_of({family.denoiser.component: denoiser})
    channels_last = gather is None and set_memory_order(denoiser, config, device)  # gathered weights are in plain order
    has_benchmark = try_convolutions(config, device, layout.shapes)
    names = target_modules(denoiser, family.denoiser, config.lora.target_modules)
    files = [f"merged into the base model: {loras_line(family.loras)} (model.loras)"] if family.loras else []
    if config.model.training_adapter is not None:
        files.append(add_training_adapter(denoiser, config, family, layout.dtype, load_device))
    attention = set_up_attention(denoiser, config, family, layout, processes, is_requested=is_attention_requested)
    layer_lines = layer_option_notes(denoiser, names, denoiser_options(config))
    parameters = add_adapter(denoiser, names, config, denoiser_options(config))
    if config.lora.network_weights is not None:
        files.append(start_from_file(config, family.denoiser.component, names, parameters, denoiser_options(config)))
    swapped = swap_blocks(denoiser, layout.swapped, device)
    blocks = len(checkpointable_blocks(denoiser))
    checkpointed = count_of(layout.checkpointing, blocks)
    checkpoint_blocks(denoiser, checkpointed, config.memory.checkpointing_mode)
    compiled, compile_notes = compile_if_enabled(denoiser, config, layout, device)
    shard_notes = (
        [f"memory.fsdp={config.memory.fsdp}: one process, which holds all weights"] if config.memory.fsdp else []
    )
    if config.memory.fsdp and gather:
        shard_notes = [shard_base(denoiser, config.memory.fsdp, device, processes.world, gather)]
    move_to_device(denoiser.train(), device)
    # No warning for a backend that is not installed; one that is and fails may make each step slower.
    absent = [failure for failure in attention.failures if "not installed" in failure or "cannot be used" in failure]
    broken = [failure for failure in attention.failures if failure not in absent]
    attention_line = f"attention backend: {attention.name} ({attention.reason})"
    # On a CPU torch's own is in use, whatever else exists, unless the user chose.
    shows_attention = device.type != "cpu" or config.hardware.attention_backend != "auto"
    notes = (
        *layer_lines,
        *files,
        *([attention_line] if shows_attention else []),
        f"gradient checkpointing: {checkpointed} of {blocks} blocks{no_more(layout.checkpointing, blocks)}",
        *([counted_products(denoiser)] if products else [no_products] if no_products else []),
        *shard_notes,
        *block_swap_note(denoiser, layout.swapped),
        *offload_note(config.memory.offload_activations, device),
        *compile_notes,
        *(
            [f"warning: an attention does not work here: {'; '.join(broken)}"]
            if broken and device.type != "cpu"
            else []
        ),
    )
    details = (
        *([] if shows_attention else [attention_line]),
        hardware_note(config, device, channels_last=channels_last, has_benchmark=has_benchmark),
        *([f"not used for attention: {'; '.join(absent)}"] if absent else []),
    )
    shards = processes.world if gather else 1
    built = Built(shapes, attention.name, len(names), checkpointed, swapped, shards, notes, details)
    return denoiser, parameters, compiled, built


def choose_guard(config: Config, device: torch.device, *, scaled: bool) -> Guard:
    """How to skip an update that is not finite without waiting for the GPU in every step.

    A CPU has nothing to wait for. torch's fused AdamW skips by itself. For the others the host must wait: with fp16,
    where overflows are common, it does; else a bad step is found late.
    """
    if device.type == "cpu":
        return "ahead"
    if OPTIMIZERS[config.optimizer.name].skips_nonfinite and config.safeguards.on_nonfinite == "skip":
        return "on_device"
    return "ahead" if scaled else "late"


def trained_process(process: Process, config: Config, device: torch.device) -> Process:
    """The model's process with the settings applied, on the device, so that no step copies it there."""
    alphas = process.alphas_cumprod
    if config.noise.zero_terminal_snr:
        alphas = zero_terminal_alphas(alphas)
    times = flow_times(config.flow, process.times.shift) if process.prediction == "flow" else process.times
    return replace(process, alphas_cumprod=alphas.to(device), times=times)
