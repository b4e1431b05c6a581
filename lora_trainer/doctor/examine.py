"""The checklist: every check in its order, and what reads the facts that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.imports import OPTIONAL, is_installed, why_unusable
from lora_trainer.core.io import user_cache_folder
from lora_trainer.doctor import devices, surroundings
from lora_trainer.doctor.lines import Diagnosis, DoctorLine, Lines
from lora_trainer.doctor.measure import ask_hub, known_answers, measure_disk, read_torch, run_attention
from lora_trainer.doctor.this_machine import read_machine
from lora_trainer.doctor.this_run import Described, needs, written_places
from lora_trainer.models.attention.packages import MODULES as ATTENTION
from lora_trainer.monitor.tracker_kinds import TRACKERS
from lora_trainer.optim.optimizers import OPTIMIZERS

if TYPE_CHECKING:  # they load torch, which may be what is broken
    from lora_trainer.doctor.facts import MachineFacts
    from lora_trainer.doctor.run_facts import RunFacts

Places = Sequence[tuple[str, Path, int | None]]  # folders with their use, and the bytes that a run needs there
BEFORE: tuple[Callable[[MachineFacts], Lines], ...] = (
    surroundings.python,
    surroundings.versions,
    surroundings.libraries,
    surroundings.container,
    surroundings.clock,
    devices.torch_build,
    devices.gpu_in_use,
    devices.driver,
    devices.architectures,
    devices.gpu_condition,
    devices.precisions,
    devices.right_answers,
    devices.attention_backends,
    surroundings.cpus,
    surroundings.memory,
    surroundings.disks,
    surroundings.limits,
    surroundings.shared_memory,
    surroundings.variables,
    surroundings.hub,
)


OPTIONAL_LIBRARIES = dict.fromkeys(
    (
        *OPTIONAL,
        *ATTENTION.values(),
        *(spec.library for spec in OPTIMIZERS.values() if spec.library not in (None, "transformers")),
        *(kind.library for kind in TRACKERS.values()),
        "gguf",
    )
)


def read_facts() -> MachineFacts:
    """The machine and torch's devices: what is read, before anything is measured."""
    facts = replace(read_machine(), torch=read_torch())
    if facts.torch.failure:  # without it the others do not load either
        return facts
    reasons = {name: why_unusable(name) for name in OPTIONAL_LIBRARIES if is_installed(name)}
    facts = replace(facts, broken={name: reason for name, reason in reasons.items() if reason is not None})
    if facts.torch.build != "cuda" or not facts.torch.devices:
        return facts
    import torch

    from lora_trainer.monitor.gpu import open_gpus

    samplers, _ = open_gpus([torch.device("cuda")])
    return replace(facts, sample=samplers[0]() if samplers else None)


def measure_machine(
    facts: MachineFacts, described: Described, places: Places, *, online: bool, on_gpu: bool = True
) -> MachineFacts:
    """The same facts with what is measured here: answers, attention, the disks of `places`, the hub.

    Without `on_gpu` nothing is computed on a GPU, where a run may need all of its memory.
    """
    torch_facts = facts.torch if on_gpu else replace(facts.torch, devices=())
    offline, dtype = surroundings.is_offline(facts), ""
    if described.config is not None:  # every other precision computes in bf16 on a GPU
        dtype = {"fp32": "float32", "fp16": "float16"}.get(described.config.memory.weight_dtype, "")
    if on_gpu or not facts.torch.devices:
        backends, place = run_attention(torch_facts, dtype)
        facts = replace(facts, attention=backends, attention_on=place)
    return replace(
        facts,
        answers=known_answers(torch_facts),
        disks=tuple(measure_disk(use, folder, needed) for use, folder, needed in places),
        hub=ask_hub(online=online and not offline),
    )


def before(facts: MachineFacts, described: Described | None = None) -> tuple[DoctorLine, ...]:
    """The lines about a machine, and about the run that is described."""
    lines = [line for check in BEFORE for line in check(facts)]
    return tuple(lines if described is None else [*lines, *needs(described, facts)])


def diagnose(facts: MachineFacts, described: Described, folder: Path | None, *, online: bool = False) -> Diagnosis:
    """Measure and examine. A run's folder gives its own cache and output disks where no settings are described.

    Raises UsageError for a folder that holds no run.
    """
    if folder is None or facts.torch.failure:
        facts = measure_machine(facts, described, written_places(described), online=online)
        return Diagnosis((("before", before(facts, described)),))
    from lora_trainer.doctor.after import after_lines
    from lora_trainer.doctor.during import during_lines
    from lora_trainer.doctor.run_facts import read_run_facts

    run = read_run_facts(folder)
    places: Places = written_places(described)
    if described.resolved is None and (config := run.report.record.read_config()) is not None:
        cache = Path(config.cache.dir).expanduser() if config.cache.dir else user_cache_folder()
        places = [("cache", cache, None), ("output", folder, None)]
    facts = measure_machine(facts, described, places, online=online, on_gpu=run.live is None)
    if run.live is None:
        return Diagnosis((("after", tuple(after_lines(run))), ("before", before(facts, described))))
    facts = leave_out_run(run, facts)
    return Diagnosis((("during", tuple(during_lines(run, run.live, facts))), ("before", before(facts, described))))


def leave_out_run(run: RunFacts, facts: MachineFacts) -> MachineFacts:
    """The machine without what the run itself uses, which is no fault: its CPUs, and the GPU's memory."""
    used = facts.system.cpus_busy if run.process_cpus is None else run.process_cpus
    system = replace(facts.system, cpus_busy=max(0.0, facts.system.cpus_busy - used))
    return replace(facts, system=system, smi=tuple(replace(gpu, memory_used=None) for gpu in facts.smi))
