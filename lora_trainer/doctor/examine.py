"""The checklist: every check in its order, and what reads the facts that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lora_trainer.doctor import devices, surroundings
from lora_trainer.doctor.after import after_lines
from lora_trainer.doctor.during import during_lines
from lora_trainer.doctor.facts import Facts
from lora_trainer.doctor.lines import Diagnosis, DoctorLine, Lines, Part
from lora_trainer.doctor.machine import read_machine
from lora_trainer.doctor.measure import ask_hub, known_answers, measure_disks, read_torch, run_attention
from lora_trainer.doctor.run_facts import RunFacts, read_run_facts, recorded_config
from lora_trainer.doctor.this_run import Described, needs, probed_dtype, written_places

BEFORE: tuple[Callable[[Facts], Lines], ...] = (
    surroundings.python,
    surroundings.versions,
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


def read_facts() -> Facts:
    """The machine and torch's devices: what is read, before anything is measured."""
    facts = replace(read_machine(), torch=read_torch())
    if facts.torch.build != "cuda" or not facts.torch.devices:
        return facts
    import torch

    from lora_trainer.monitor.gpu import open_gpu

    sample = open_gpu(torch.device("cuda"))
    return replace(facts, sample=sample() if sample else None)


def measured(facts: Facts, described: Described, *, online: bool) -> Facts:
    """The same facts with what is measured here: answers, attention, disks, the hub."""
    offline = bool(facts.environment.get("HF_HUB_OFFLINE"))
    attention, place = run_attention(facts.torch, probed_dtype(described.config))
    return replace(
        facts,
        answers=known_answers(facts.torch),
        attention=attention,
        attention_on=place,
        disks=measure_disks(written_places(described)),
        hub=ask_hub(online=online and not offline),
    )


def before(facts: Facts, described: Described | None = None) -> tuple[DoctorLine, ...]:
    """The lines about a machine, and about the run that is described."""
    lines = [line for check in BEFORE for line in check(facts)]
    return tuple(lines if described is None else [*lines, *needs(described, facts)])


def examine_run(run: RunFacts, facts: Facts) -> tuple[Part, tuple[DoctorLine, ...]]:
    """The lines about a run: during it where a live process trains it, else after it."""
    return ("during", tuple(during_lines(run, facts))) if run.is_live else ("after", tuple(after_lines(run)))


def diagnose(facts: Facts, described: Described, folder: Path | None, *, online: bool = False) -> Diagnosis:
    """Measure and examine. A run's folder gives its own cache and output disks where no settings are described.

    Raises UsageError for a folder that holds no run.
    """
    run = None if folder is None else read_run_facts(folder)
    parts: list[tuple[Part, tuple[DoctorLine, ...]]] = []
    facts = measured(facts, described, online=online)
    if run is not None and described.resolved is None and (config := recorded_config(run.report)) is not None:
        cache = Path(config.cache.dir).expanduser() if config.cache.dir else written_places(Described())[0][1]
        facts = replace(facts, disks=measure_disks([("cache", cache, None), ("output", run.report.folder, None)]))
    if run is not None and run.is_live:
        facts = beside(run, facts)
    parts.append(("before", before(facts, described)))
    if run is not None:
        parts.append(examine_run(run, facts))
    return Diagnosis(tuple(parts))


def beside(run: RunFacts, facts: Facts) -> Facts:
    """The machine without what the run itself uses, which is no fault: its CPUs, and the GPU's memory."""
    used = facts.system.cpus_busy if run.process_cpus is None else run.process_cpus
    system = replace(facts.system, cpus_busy=max(0.0, facts.system.cpus_busy - used))
    return replace(facts, system=system, smi=tuple(replace(gpu, memory_used=None) for gpu in facts.smi))
