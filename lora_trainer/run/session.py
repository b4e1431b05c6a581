"""A session: what was asked and read, with the choices for this machine; and its caches."""

from __future__ import annotations

import hashlib
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_trainer.config.schema import Config, TrainSection
from lora_trainer.config.toml import shown
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.hardware import describe_idle_gpus
from lora_trainer.core.launch import cpu_requested
from lora_trainer.data.caches.filling import ALONE, Share
from lora_trainer.data.caches.pruning import keep_limit
from lora_trainer.data.caches.sharing import USERS, in_use
from lora_trainer.monitor.tracker_thread import TrackerThreads
from lora_trainer.optim.schedules import first_swa_step
from lora_trainer.run.caching import CachePlans, fill_caches, plan_caches
from lora_trainer.run.choices import Choices, cap_memory, choose, processes_on_their_gpus
from lora_trainer.run.find_micro import find_micro
from lora_trainer.run.generation import with_class_images
from lora_trainer.run.inputs import Inputs, arithmetic, largest_of, own_architecture
from lora_trainer.run.messages import refuse_without_validation
from lora_trainer.run.preserved_prompts import refuse_preservation
from lora_trainer.run.start import find_start, fixed_settings
from lora_trainer.run_folder.record import Record
from lora_trainer.training.network_weights import check_lora_files
from lora_trainer.training.torch_settings import rounds_alike_anywhere, set_hardware

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.data.loader import CachedData
    from lora_trainer.data.steps import StepArithmetic
    from lora_trainer.run.order import Order
    from lora_trainer.training.checkpoints.checkpoint import Checkpoint
    from lora_trainer.training.processes import Processes
    from lora_trainer.training.step import StepContext

UNEVEN_PRODUCTS = (
    "warning: matrix products of this process round by the memory address of their operands, so results differ in "
    "rounding from run to run. Import lora_trainer before anything is computed, or set MKL_CBWR=AUTO,STRICT."
)


@dataclass(frozen=True)
class Session:
    """What was asked, what was read, and what this machine makes of it."""

    order: Order
    inputs: Inputs
    processes: Processes
    choices: Choices
    steps: StepArithmetic
    cache_seconds: float = 0.0  # to generate class images and fill the caches
    threads: TrackerThreads = field(default_factory=TrackerThreads)  # of `run.trackers`

    @property
    def config(self) -> Config:
        return self.order.config

    @property
    def folder(self) -> Path:
        return self.order.folder

    @property
    def console(self) -> Console:
        return self.order.console


def open_session(order: Order, inputs: Inputs) -> Session:
    """Join the processes and choose for the hardware; loads no model. Class images are planned ones until they are generated."""
    processes = processes_on_their_gpus(order.config)
    if crowded := cap_memory(order.config, processes.device):
        order.console.print(crowded)
    largest = largest_of(order.config, inputs.train, inputs.train_plan, processes.world)
    choices = choose(
        order.resolved, inputs.family, own_architecture(inputs), processes.device, processes.world, largest
    )
    if processes.world > 1:
        effective = order.config.train.effective_batch_size
        order.console.print(
            f"processes: {processes.world}, which share the {counted(effective, 'sample')} of each step"
        )
        if (idle_processes := processes.world - effective) > 0:
            order.console.print(
                f"warning: {idle_processes} of {processes.world} processes never get a sample: set"
                f" train.effective_batch_size={processes.world} or a multiple, or start {counted(effective, 'process')}"
            )
    threads = set_hardware(order.config, processes.device, earlier_threads(order.folder) if order.resume else None)
    if processes.device.type == "cpu":
        if order.verbose or not order.console.is_terminal:
            order.console.print(f"threads: {threads.count} ({threads.reason})")
        if not rounds_alike_anywhere():
            order.console.print(UNEVEN_PRODUCTS)
    for name in ("gradient_compression", "process_timeout_minutes"):
        value = getattr(order.config.train, name)
        if processes.world == 1 and value != TrainSection.model_fields[name].default:  # a run may continue with several
            order.console.print(f"train.{name}={shown(value)}: does nothing in a run of one process")
    another = "Train another LoRA there: put CUDA_VISIBLE_DEVICES={gpu} before its command. One run on all: docs/several-gpus.md"
    used = {choices.device.index or 0, choices.encodes_on.index or 0}
    if processes.world == 1 and not cpu_requested() and (idle := describe_idle_gpus(used, another)):
        order.console.print(idle)
    steps = arithmetic(order.config, inputs.train, choices.micro, processes.world)
    return Session(order, inputs, processes, choices, steps)


def checked_start(
    order: Order, inputs: Inputs, choices: Choices, steps: StepArithmetic
) -> tuple[dict[str, Any], Checkpoint | None]:
    """The settings that a run's checkpoints depend on, and the one to resume from. For a session and a dry run.

    Raises UsageError for all that needs no model in memory. Without the model's weights, as in a dry run, nothing is resumed.
    """
    refuse_unsuited(order.config, choices, steps.total)
    check_lora_files(order.config, inputs.family, inputs.facts)
    refuse_without_validation(order.config, inputs)
    refuse_preservation(order.config, inputs.train)
    if not inputs.facts.whole:
        return {}, None
    settings = fixed_settings(order.config, inputs, choices)
    if not order.resume:
        return settings, None
    return settings, find_start(order.folder, settings, order.console, order.config, inputs.manifest.samples)


def refuse_unsuited(config: Config, choices: Choices, total_steps: int) -> None:
    """Raise UsageError for stochastic rounding of weights that are not bf16, SWA that would average nothing, and a torch without FSDP's new parts."""
    problems, first = [], first_swa_step(config.train, total_steps)
    if config.optimizer.stochastic_rounding and choices.dtype != torch.bfloat16:
        computed = str(choices.dtype).removeprefix("torch.")
        message = f"optimizer.stochastic_rounding rounds bf16 weights, and this run computes in {computed} ({choices.precision.reason})."
        problems.append(
            Problem(
                "rounding_needs_bf16", message, "Set memory.weight_dtype=bf16, or remove optimizer.stochastic_rounding."
            )
        )
    if first is not None and (left := max(0, total_steps - first)) < (every := config.train.swa_every_n_steps):
        message = f"train.swa_start={shown(config.train.swa_start)} leaves {left} of {total_steps} steps, and SWA averages the weights of every {every}th."
        problems.append(
            Problem(
                "swa_too_late", message, "Set train.swa_start lower, such as 0.75, or train.swa_every_n_steps lower."
            )
        )
    if config.memory.fsdp:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_custom_all_gather"):
            message = f"memory.fsdp={config.memory.fsdp} needs a newer torch than {torch.__version__}."
            problems.append(Problem("torch_too_old", message, "pip install --upgrade torch, or remove memory.fsdp."))
    if problems:
        raise UsageError(problems)


def with_generated_images(session: Session) -> Session:
    """The session with its class images, generated now where they are not there. Raises UserError."""
    if not session.config.data.num_class_images:
        return session
    began = time.monotonic()
    inputs = with_class_images(session.config, session.inputs, session.choices, session.console)
    steps = arithmetic(session.config, inputs.train, session.choices.micro, session.processes.world)
    return replace(session, inputs=inputs, steps=steps, cache_seconds=time.monotonic() - began)


def with_found_micro(session: Session, context: StepContext, data: CachedData) -> Session:
    """The session with the micro-batch size that `train.auto_find_micro_batch_size` finds, which is logged.

    No micro-batch has more samples than a step has of one bucket. A resumed run keeps its size: another would change its
    rounding.
    """
    config, inputs, processes = session.config, session.inputs, session.processes
    if not config.train.auto_find_micro_batch_size:
        return session
    most = largest_of(config, inputs.train, inputs.train_plan, processes.world).in_bucket
    most = min(most, config.train.max_micro_batch_size or most)
    earlier = Record.read(session.folder) if session.order.resume else None
    if earlier is not None and (batch := earlier.arithmetic.get("batch")) is not None:
        micro, reason = min(int(batch), most), "as at the start of the run (train.auto_find_micro_batch_size)"
    else:
        with nullcontext() if context.compiled is None else context.compiled.off():
            micro, reason = find_micro(config, inputs, context, data, most)
        micro = processes.smallest(micro)
    choices = replace(session.choices, micro=micro, micro_reason=reason)
    session.console.print(choices.lines[-1])
    steps = arithmetic(config, inputs.train, micro, processes.world)
    return replace(session, choices=choices, steps=steps)


def fill(session: Session) -> CachePlans:
    """Fill the missing entries of the caches, divided among the processes of the run."""
    console, processes = session.console, session.processes
    plans = plan_caches(session.config, session.inputs, session.choices)
    for line in plans.lines:
        console.print(line)
    try:
        with in_use(plans.latents.folder) as note:
            share = share_of(processes, plans, note)
            fill_caches(session.config, session.inputs, session.choices, plans, share, console)
    except (KeyboardInterrupt, SystemExit):
        for plan in plans.kinds:
            total = plan.filled.reused + plan.filled.rebuilt
            console.print(
                f"cache: {total - len(plan.still_missing().missing)} of {total} {plan.filled.kind} are there and kept"
            )
        raise
    if processes.is_main and any(plan.missing for plan in plans.kinds):
        keep_cache_limit(session, plans.latents.folder)
    return plans


def share_of(processes: Processes, plans: CachePlans, note: str) -> Share:
    """Which part of the caches this process fills, among those that need the same entries in the same folder.

    A process of another machine may have a folder of the same name on a disk of its own: its note is not seen here.
    """
    keys = "".join(key for plan in plans.kinds for key in plan.keys)
    digest, users = hashlib.sha256(keys.encode("ascii")).digest(), plans.latents.folder / USERS
    own = bytes.fromhex(note) + digest
    together = [
        each
        for each in gather_bytes(processes, own)
        if each.endswith(digest) and (users / each.removesuffix(digest).hex()).exists()
    ]
    return Share(together.index(own), len(together), processes.wait_until) if own in together else ALONE


def gather_bytes(processes: Processes, own: bytes) -> list[bytes]:
    """The bytes of every process of the run, as many of each, in the order of their ranks."""
    if processes.gather is None:
        return [own]
    sent = torch.tensor(list(own), dtype=torch.uint8, device=processes.device)
    received = sent.new_empty(processes.world * len(own))
    processes.gather(received, sent)
    processes.await_gpu()
    return [bytes(row) for row in received.view(processes.world, -1).tolist()]


def keep_cache_limit(session: Session, folder: Path) -> None:
    """Keep the cache within `cache.limit_gb`. Tidying ends no run: a cache that may not be written to is used as it is."""
    try:
        kept = keep_limit(folder, int(session.config.cache.limit_gb * 10**9))
    except OSError:
        return
    if kept.removed or kept.needed:
        for line in kept.lines:
            session.console.print(f"cache: {line}")


def earlier_threads(folder: Path) -> int | None:
    """The threads at the start of the run, from its record; None where it has no such number."""
    record = Record.read(folder)
    count = None if record is None else record.hardware.get("threads")
    return count if isinstance(count, int) and count > 0 else None
