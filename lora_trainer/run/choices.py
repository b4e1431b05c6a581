"""What the hardware decides, each with a reason: device, precision, micro-batch size, gradient checkpointing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from lora_trainer.config.contradictions import from_user
from lora_trainer.core import hardware
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import cuda_memory_gib
from lora_trainer.core.launch import cpu_requested, processes_here
from lora_trainer.memory_plan.estimate import (
    CONTEXT_GIB,
    GIB,
    LARGEST_SHARE,
    WHOLE_BUCKET,
    WHOLE_STEP,
    Demand,
    choose_fit,
    largest_micro,
    refuse_what_does_not_fit,
    usable_gib,
)
from lora_trainer.memory_plan.host import base_note, host_note, host_of, weight_bytes
from lora_trainer.models.quantization.four_bits import need_library
from lora_trainer.monitor.memory import set_allocator
from lora_trainer.monitor.system import system_memory
from lora_trainer.run.plans.plan import make_demand, storable_here
from lora_trainer.training.denoiser_layout import QUANTIZED, Layout
from lora_trainer.training.processes import Processes, join_processes

if TYPE_CHECKING:
    from lora_trainer.config.layers import Layer, Resolved
    from lora_trainer.config.schema import Blocks, Config, Precision
    from lora_trainer.data.steps import LargestStep
    from lora_trainer.models.family import Architecture, Family

# What is computed in, where a GPU has bf16 units; weights in fewer bits are dequantized for it.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32} | dict.fromkeys(
    QUANTIZED, torch.bfloat16
)
LARGEST_MICRO_ON_CPU = 4  # more gains nothing there
ENCODER_DTYPE = torch.float32  # encoders run once and their output is kept: exactness matters more than speed
OUTSIDE_GIB = 0.6  # GPU memory that CUDA takes outside of torch's allocator
AS_SET = "as set"
FIRST_GPU = torch.device("cuda", 0)
LARGEST_ALIKE = 0.97  # of the largest GPU's memory: a GPU with so much is as large
LEFT_GIB = 0.2  # of a GPU's free memory, for kernels that are loaded later


@dataclass(frozen=True)
class Choice:
    """A value and why."""

    value: str
    reason: str


@dataclass(frozen=True)
class Choices:
    """What this machine makes of the settings; `samples` are those of a step in one process."""

    device: torch.device
    dtype: torch.dtype
    encoder_dtype: torch.dtype
    precision: Choice
    micro: int
    micro_reason: str
    checkpointing: Blocks
    checkpointing_reason: str
    predicted: str | None = None  # the peak, on a GPU
    swapped: int = 0  # blocks swapped between CPU and GPU
    samples: int = 1
    largest_micro: int | None = None  # that fits the GPU, if the plan knows it
    encoder_device: Choice | None = None  # where images and captions are encoded, if not on `device`

    @property
    def encodes_on(self) -> torch.device:
        """Where the VAE and frozen text encoders are."""
        return self.device if self.encoder_device is None else torch.device(self.encoder_device.value)

    @property
    def layout(self) -> Layout:
        """The choices for the denoiser."""
        return Layout(self.dtype, cast("Precision", self.precision.value), self.checkpointing, swapped=self.swapped)

    @property
    def lines(self) -> tuple[str, ...]:
        accumulation = math.ceil(self.samples / self.micro)
        why = "" if self.micro_reason == WHOLE_STEP else f": {self.micro_reason}"
        return (
            *([self.predicted] if self.predicted else []),
            f"precision: {self.precision.value} ({self.precision.reason})",
            *(
                [f"images and captions are encoded on {where.value} ({where.reason})"]
                if (where := self.encoder_device)
                else []
            ),
            f"micro-batch size: {self.micro} (gradient accumulation steps: {accumulation}){why}",
        )


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees."""

    index: int
    name: str
    gib: float


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process sees."""
    found = [(index, torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
    return [Gpu(index, properties.name, properties.total_memory / GIB) for index, properties in found]


def processes_on_their_gpus(config: Config) -> Processes:
    """Join the processes of the run, each with the device on which it trains, which becomes torch's current one."""
    hardware.training_gpu = 0  # another run of this Python process may have trained on another one
    processes = join_processes(config.train.process_timeout_minutes)
    if processes.device.type != "cuda" or processes.world > 1:
        return processes
    device = choose_training_device(config.hardware.text_encoder_device, processes.device, visible_gpus())
    hardware.training_gpu = device.index or 0
    torch.cuda.set_device(device)
    return replace(processes, device=device)


def choose_training_device(wanted: str | None, device: torch.device, gpus: Sequence[Gpu]) -> torch.device:
    """The GPU on which a single process trains: `device`, the first one, unless the smaller one is to encode.

    With `hardware.text_encoder_device=auto` it is the largest GPU, of equal ones the first.
    """
    if wanted != "auto":
        return device
    largest = max((gpu.gib for gpu in gpus), default=0.0)
    # GPUs of one model differ by what their drivers keep.
    equal = [gpu for gpu in gpus if gpu.gib >= LARGEST_ALIKE * largest]
    return torch.device("cuda", equal[0].index) if equal else device


def gpu_gib_for_auto(layers: Sequence[Layer]) -> float | None:
    """The memory of the GPU on which a single process would train by the user's layers, for `--preset auto`."""
    gpus = visible_gpus()
    if not gpus:
        return None
    wanted = None
    for layer in layers:
        values = layer.values.get("hardware")
        if isinstance(values, Mapping):
            wanted = values.get("text_encoder_device", wanted)
    device = choose_training_device(wanted, FIRST_GPU, gpus)
    return gpus[device.index].gib


def choose_encoder_device(wanted: str | None, device: torch.device, gpus: Sequence[Gpu], world: int) -> Choice | None:
    """Where images and captions are encoded, by `hardware.text_encoder_device`; None where the run trains, on `device`.

    Raises UsageError for a GPU that is not there, and for one GPU that several processes would share.
    """
    if wanted in (None, "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"):
        return None
    others = [gpu for gpu in gpus if device.type != "cuda" or gpu.index != (device.index or 0)]
    if wanted == "auto":
        if world > 1 or not others or device.type != "cuda":  # a CPU was asked for, or there is nothing else
            return None
        chosen = min(others, key=lambda gpu: gpu.gib)
        return Choice(
            f"cuda:{chosen.index}", f"{chosen.name}, {chosen.gib:.0f} GiB: the smallest GPU that does not train"
        )
    if wanted == "cpu":
        return Choice("cpu", AS_SET)
    message = f"hardware.text_encoder_device={wanted}"
    if world > 1:
        fix = "Remove the setting: each process encodes its share on its own GPU."
        raise UsageError(
            Problem("encoder_device_unusable", f"{message}, and {world} processes would share that GPU.", fix)
        )
    for gpu in others:
        if wanted == f"cuda:{gpu.index}":
            return Choice(wanted, f"{gpu.name}, {gpu.gib:.0f} GiB: {AS_SET}")
    known = ", ".join(f"cuda:{gpu.index}" for gpu in gpus)
    seen = f"this machine shows only {known}" if known else "this machine shows no GPU"
    raise UsageError(Problem("encoder_device_unusable", f"{message}, and {seen}.", "Set it to auto, or remove it."))


def choose(
    resolved: Resolved,
    family: Family,
    architecture: Architecture,
    device: torch.device,
    world: int,
    largest: LargestStep | None = None,
) -> Choices:
    """Decide for a device: on a GPU by the memory plan, on a CPU by the settings. `largest` is the largest step of the data,
    where that is known.

    Raises UsageError, with settings that would fit, when no choice left to the plan makes the run fit the GPU, for nf4
    without bitsandbytes, and as `choose_encoder_device` does.
    """
    config = resolved.config
    encodes_on = choose_encoder_device(config.hardware.text_encoder_device, device, visible_gpus(), world)
    is_set = asked_by_user(resolved, "memory.weight_dtype")
    precision = choose_precision(config.memory.weight_dtype, device, is_set=is_set)
    origin = Path(resolved.origin["memory.weight_dtype"].removeprefix("--config "))
    if precision.reason == AS_SET and origin.name == "config.toml":  # a run's own config.toml has its choices
        precision = replace(precision, reason=f"as in {origin}")
    if precision.value == "nf4":
        need_library()
    if device.type != "cuda":
        samples = largest.samples if largest else math.ceil(config.train.effective_batch_size / world)
        micro, reason = choose_micro(config, samples, largest.in_bucket if largest else samples)
        checkpointing = (
            False if config.memory.gradient_checkpointing == "auto" else config.memory.gradient_checkpointing
        )
        why = AS_SET if checkpointing == config.memory.gradient_checkpointing else "no GPU: memory is not short"
        held_bytes = weight_bytes(family, architecture.facts, precision.value)
        return Choices(
            device,
            DTYPES[precision.value],
            ENCODER_DTYPE,
            precision,
            micro,
            reason,
            checkpointing,
            why,
            base_note(held_bytes, processes_here(world), *system_memory()),
            swapped=config.memory.blocks_to_swap if isinstance(config.memory.blocks_to_swap, int) else 0,
            samples=samples,
            encoder_device=encodes_on,
        )
    demand = make_demand(resolved, family, architecture, gpu_gib(config), world=world, precision=precision.value)
    if largest is not None:
        demand = replace(demand, samples=largest.samples, in_bucket=largest.in_bucket)
    # All processes of a run must choose the same, and free memory differs between GPUs.
    left = left_gib(device) if world == 1 else None
    planned = planned_choices(storable_here(demand), precision, device, left, processes_here(world))
    return replace(planned, encoder_device=encodes_on)


def planned_choices(
    demand: Demand, precision: Choice, device: torch.device, left: float | None = None, processes: int = 1
) -> Choices:
    """The memory plan's choices for a GPU; `processes` share the system. Raises UsageError when nothing fits.

    `left`: other programs leave as much memory as a GPU of so many GiB has. The micro-batch is chosen for that, but
    weights are stored as on the whole GPU: other programs must not change what a run computes.
    """
    fit, crowded = choose_fit(demand), ""
    refuse_what_does_not_fit(demand, fit)
    if left is not None and demand.limit_gib is not None and left < demand.limit_gib:
        crowded = f", which other programs leave of {demand.limit_gib:.1f}"
        demand = replace(demand, limit_gib=left, precisions=(fit.precision,))
        precision = precision if fit.precision == precision.value else Choice(fit.precision, fit.reasons[2])
        fit = choose_fit(demand)  # the smallest where none fits: memory may become free, and a run has fallbacks
    dtype = computed_in(fit.precision, device)
    if fit.precision != precision.value:
        precision = Choice(fit.precision, fit.reasons[2])
    predicted = f"predicted peak {fit.parts.peak:.1f} GiB" + (f" of {demand.limit_gib:.1f}" if demand.limit_gib else "")
    predicted += crowded + host_note(host_of(demand, fit), processes, *system_memory())
    return Choices(
        device,
        dtype,
        ENCODER_DTYPE,
        precision,
        fit.micro,
        fit.reasons[0],
        fit.checkpointed,
        fit.reasons[1],
        predicted,
        fit.swapped,
        demand.samples,
        largest_micro(demand, fit),
    )


def asked_by_user(resolved: Resolved, name: str) -> bool:
    """Whether a setting comes from the user's file or flags rather than from defaults and presets."""
    return from_user(resolved.origin[name])


def choose_precision(wanted: str, device: torch.device, *, is_set: bool) -> Choice:
    """The wanted precision where the device suits it."""
    if device.type == "cpu":
        return Choice(wanted, AS_SET) if wanted == "fp32" or is_set else Choice("fp32", "CPU default")
    if wanted == "bf16" and not has_bf16(device):
        return Choice("fp16", "this GPU has no bf16 units; with a loss scaler")
    return Choice(wanted, AS_SET if is_set else "preset")


def computed_in(precision: str, device: torch.device) -> torch.dtype:
    """The forward pass's precision: fp16, with a loss scaler, in place of bf16 on a GPU without bf16 units."""
    dtype = DTYPES[precision]
    return torch.float16 if dtype == torch.bfloat16 and not has_bf16(device) else dtype


def evaluated_on(config: Config) -> tuple[torch.device, torch.dtype]:
    """Where a base model runs outside of training, the GPU unless there is none or the CPU is requested; its precision."""
    device = torch.device("cuda" if torch.cuda.is_available() and not cpu_requested() else "cpu")
    return device, computed_in(choose_precision(config.memory.weight_dtype, device, is_set=False).value, device)


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 can be computed in: everywhere but on older GPUs."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def choose_micro(config: Config, samples: int, in_bucket: int) -> tuple[int, str]:
    """Samples per forward pass on a CPU, of a step of `samples` with at most `in_bucket` in one bucket."""
    wanted = config.train.max_micro_batch_size
    if wanted is not None and wanted <= in_bucket:
        return wanted, "train.max_micro_batch_size"
    if wanted is not None or in_bucket <= LARGEST_MICRO_ON_CPU:
        return in_bucket, WHOLE_STEP if in_bucket == samples else WHOLE_BUCKET
    return LARGEST_MICRO_ON_CPU, "more gains nothing on a CPU; train.max_micro_batch_size changes it"


def compiling_pays(config: Config, device: torch.device, steps: int) -> bool:
    """Whether blocks are compiled: as set, or with `auto` on a GPU, in a run of enough steps.

    All steps of the run count, so that a resumed run decides as at its start. On a CPU `auto` never compiles: no gain
    was measured.
    """
    enabled = config.compile.enabled
    return enabled if enabled != "auto" else device.type == "cuda" and steps >= config.compile.min_steps


def cap_memory(config: Config, device: torch.device) -> str | None:
    """Limit torch's allocator to the preset's limit, 90 % of the GPU, and what is free there.

    So nothing spills to system memory: the allocator raises instead. Returns a line to print where the memory of
    other programs sets the limit. Configures the allocator's segments first.
    """
    if device.type != "cuda":
        return None
    set_allocator(expandable=config.memory.expandable_segments)
    free, total = free_and_total(device)
    share = capped_share(config.memory.limit_gib, free, total)
    torch.cuda.set_per_process_memory_fraction(share, device)
    if share >= capped_share(config.memory.limit_gib, total, total):
        return None
    others = (total - free) / GIB
    numbers = f"other programs hold {others:.1f} of the GPU's {total / GIB:.1f} GiB"
    return f"{numbers}: this run stays under {share * total / GIB:.1f}"


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU that are free or this process's own, without its context, which exists by now; and all."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device), total


def left_gib(device: torch.device) -> float | None:
    """The size of a GPU on which a run may use as much as other programs leave here, in GiB; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    usable = free_and_total(device)[0] / GIB - LEFT_GIB
    return math.floor(10.0 * max(usable + CONTEXT_GIB, 0.0) / LARGEST_SHARE) / 10.0


def capped_share(limit_gib: float | None, free: int, total: int) -> float:
    """The share of a GPU's `total` bytes that torch's allocator may hold, of which `free` are free or its own."""
    preset = total if limit_gib is None else max(limit_gib - OUTSIDE_GIB, 0.0) * GIB
    return min(LARGEST_SHARE, preset / total, max(free - LEFT_GIB * GIB, 0.0) / total)


def gpu_gib(config: Config) -> float | None:
    """The memory that may be used: the preset's limit or the GPU's, whichever is smaller; None without either."""
    gpu = cuda_memory_gib()
    limit = config.memory.limit_gib
    return gpu if gpu is None or limit is None else min(gpu, limit)


def usable_bytes(config: Config, device: torch.device) -> int | None:
    """Bytes of a GPU's memory left for the next phase; None where nothing limits it."""
    limit = gpu_gib(config)
    if device.type != "cuda" or limit is None:
        return None
    if device.index is not None and device.index != hardware.training_gpu:
        limit = min(limit, torch.cuda.get_device_properties(device).total_memory / GIB)
    return max(0, int(usable_gib(limit) * GIB) - torch.cuda.memory_allocated(device))
