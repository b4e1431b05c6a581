"""What a run with these settings needs, against this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.config.contradictions import from_user
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.imports import why_unusable
from lora_trainer.core.io import user_cache_folder
from lora_trainer.core.launch import cpu_requested
from lora_trainer.doctor.lines import Lines, error, ok, warning
from lora_trainer.memory_plan.estimate import GIB
from lora_trainer.models.attention.packages import lacking
from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.run.file_sizes import run_bytes
from lora_trainer.run.plans.plan import Plan, make_plan

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.config.schema import Config
    from lora_trainer.doctor.facts import MachineFacts

LEAST_HOST = GIB // 2  # bytes that are worth a line


@dataclass(frozen=True)
class Described:
    """The run that is described by the arguments: its settings, its plan, and the problems that prevent either."""

    resolved: Resolved | None = None
    plan: Plan | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def config(self) -> Config | None:
        return None if self.resolved is None else self.resolved.config


def describe_run(resolved: Resolved, facts: MachineFacts) -> Described:
    """Plan it for the GPU that trains, or without a limit on a CPU. Problems of model and data are kept, not raised.

    Without a torch that can be imported there is no plan: some models must be traced.
    """
    if facts.torch.failure:
        return Described(resolved)
    on_gpu = facts.torch.devices and facts.torch.build in ("cuda", "rocm") and not cpu_requested(facts.environment)
    gpu = None
    if on_gpu:
        from lora_trainer.run.choices import FIRST_GPU, Gpu, choose_training_device

        gpus = [Gpu(index, each.name, each.gib or 0.0) for index, each in enumerate(facts.torch.devices)]
        wanted = resolved.config.hardware.text_encoder_device
        gpu = facts.torch.devices[choose_training_device(wanted, FIRST_GPU, gpus).index].gib
    try:
        return Described(resolved, make_plan(resolved, gpu_gib=gpu, here=gpu is not None))
    except UsageError as problem:
        return Described(resolved, problems=problem.problems)


def written_places(described: Described) -> list[tuple[str, Path, int | None]]:
    """The folders of caches and runs, with the bytes that this run will write there where they are known."""
    config, plan = described.config, described.plan
    cache, output = user_cache_folder(), Path("runs")
    if config is not None:
        output = Path(config.run.output).expanduser()
    if config is not None and config.cache.dir:
        cache = Path(config.cache.dir).expanduser()
    if config is None or plan is None:
        return [("cache", cache, None), ("output", output, None)]
    of_run = run_bytes(config, plan.demand.shapes, plan.steps)
    of_caches = max(0, int(plan.disk_gib * GIB) - of_run)
    return [("cache", cache, of_caches), ("output", output, of_run)]


def needs(described: Described, facts: MachineFacts) -> Lines:
    """Libraries, memory, steps and attention of the run that is described."""
    for problem in described.problems:
        yield error("settings", problem.message, "settings that a run accepts", problem.fix)
    if described.resolved is None:
        return
    config = described.resolved.config
    library = OPTIMIZERS[config.optimizer.name].library
    if library is not None and (reason := why_unusable(library)) is not None:
        fix = f"pip install {library}, or set optimizer.name=adamw"
        yield error("optimizer", f"optimizer.name={config.optimizer.name}: {library} {reason}", library, fix)
    yield from wanted_attention(described.resolved, facts)
    precision, origin = config.memory.weight_dtype, described.resolved.origin["memory.weight_dtype"]
    if precision == "bf16" and from_user(origin) and any(not each.has_bf16 for each in facts.torch.devices):
        fix = "set memory.weight_dtype=fp16, which the run uses anyway"
        yield warning("precision", "memory.weight_dtype=bf16, and the GPU has no bf16 units", "fp16", fix)
    plan = described.plan
    if plan is None:
        return
    steps = "not known without images" if plan.steps is None else f"{plan.steps:,}"
    yield ok("this run", f"{plan.family} ({plan.model}), {plan.demand.resolution} px, steps: {steps}")
    limit = plan.demand.limit_gib
    if plan.fits is False:
        advice = plan.advice[0] if plan.advice else "`plan` shows which settings fit"
        yield error("GPU memory of this run", plan.shortages[0], f"at most {limit:.1f} GiB", advice)
    elif limit is not None:
        yield ok("GPU memory of this run", f"{plan.fit.parts.peak:.1f} of {limit:.1f} GiB, predicted")
    host = max(phase.host_gib for phase in plan.phases.values()) * GIB
    found = f"up to {host / GIB:.1f} GiB beside the program's own; {facts.system.memory_available / GIB:.1f} are free"
    if host > facts.memory_limit:
        fix = "use a smaller base model, or memory.weight_dtype with fewer bits"
        yield error("memory of this run", found, f"at most {facts.memory_limit / GIB:.1f} GiB", fix)
    elif host > facts.system.memory_available:
        yield warning("memory of this run", found, "that much free", "close other programs")
    elif host > LEAST_HOST:
        yield ok("memory of this run", found)


def wanted_attention(resolved: Resolved, facts: MachineFacts) -> Lines:
    """The backend that the settings name, where it is one."""
    name = resolved.config.hardware.attention_backend
    if name in ("auto", "fastest") or not from_user(resolved.origin["hardware.attention_backend"]):
        return
    missing, failure = lacking(name), facts.attention.get(name)
    if missing is not None:
        yield error("attention backend", missing.message, name, missing.fix)
    elif failure is not None:
        fix = "set hardware.attention_backend=auto"
        yield error("attention backend", failure, f"{name} runs forward and backward", fix)
