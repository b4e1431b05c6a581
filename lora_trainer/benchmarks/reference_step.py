"""The step as the field's scripts do it, to be measured beside ours.

accelerate prepares model, optimizer and schedule; the LoRA stays in fp32 under autocast;
noise and timesteps come from the device's generator; loss is gathered and read, and the
progress line redrawn, in every step. With `encode` the images are read and encoded in
every step too, as diffusers' example scripts do.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from tqdm import tqdm  # type: ignore[import-untyped]

from lora_trainer.adapters.injection import ADAPTER

if TYPE_CHECKING:
    from lora_trainer.benchmarks.bench_model import BenchModel, Encode
    from lora_trainer.benchmarks.interleaved import Way
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.step import StepContext

REFERENCE = "usual"  # its LoRA, and its row
AUTOCAST = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


class WrappedDenoiser(nn.Module):
    """The denoiser behind one call, so that accelerate's autocast wraps this and not the denoiser itself."""

    def __init__(self, context: StepContext) -> None:
        super().__init__()
        self.denoiser = context.denoiser
        self.predict = context.predict

    def forward(self, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        return self.predict(self.denoiser, noisy, t, cond, sizes)


def add_reference_adapter(denoiser: nn.Module) -> list[nn.Parameter]:
    """A second LoRA of the same rank on the same modules, in fp32; its parameters."""
    wrapped = {name: module for name, module in denoiser.named_modules() if isinstance(module, BaseTunerLayer)}
    rank: int = next(iter(wrapped.values())).r[ADAPTER]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are meant
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(wrapped)), denoiser, REFERENCE)
    parameters = [parameter for name, parameter in denoiser.named_parameters() if f".{REFERENCE}." in name]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    return parameters


def use_adapter(denoiser: nn.Module, name: str) -> None:
    """Let one LoRA work and be trained, the others rest."""
    for module in denoiser.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(name)


def reference_step(
    model: BenchModel,
    parameters: list[nn.Parameter],
    inputs: Sequence[list[MicroBatch]],
    encode: Encode | None,
) -> Way:
    """The step, by its number. With `encode` None, latents and conditioning are taken ready from `inputs`, in turn."""
    context = model.context
    device, dtype, process = context.device, context.dtype, context.process
    AcceleratorState._reset_state()  # its precision is fixed for a process, and several may be measured in one
    accelerator = Accelerator(mixed_precision=AUTOCAST[dtype])
    optimizer = torch.optim.AdamW(parameters, lr=1e-8, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    denoiser, optimizer, schedule = accelerator.prepare(WrappedDenoiser(context), optimizer, schedule)
    line = tqdm(file=io.StringIO())

    def step(number: int) -> None:
        micros = inputs[number % len(inputs)]
        encoded = encode(number) if encode else [(micro.latents, micro.cond) for micro in micros]
        average = 0.0
        for (ready, cond), micro in zip(encoded, micros, strict=True):
            latents = ready.to(device)
            noise = torch.randn_like(latents)
            t = torch.randint(0, process.timesteps, (len(latents),), device=device)
            noisy = process.add_noise(latents, noise, t).to(dtype)
            moved = {name: value.to(device, dtype) for name, value in cond.items()}
            predicted = denoiser(noisy, t, moved, micro.sizes.to(device, dtype))
            loss = mse_loss(predicted.float(), process.target(latents, noise, t).float())
            average += accelerator.gather(loss.detach().repeat(len(latents))).mean().item() / len(micros)
            accelerator.backward(loss / len(micros))
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        line.update(1)
        line.set_postfix(step_loss=average, lr=schedule.get_last_lr()[0])

    return step
