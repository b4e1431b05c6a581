"""Checks of the system around torch: versions, memory, disks, limits, clocks, environment variables, the hub."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from lora_trainer.core.disk import size_words
from lora_trainer.core.findings import counted
from lora_trainer.doctor.lines import DoctorLine, Lines, error, first_fault, ok, warning
from lora_trainer.doctor.variables import OURS, VARIABLES

if TYPE_CHECKING:
    from lora_trainer.doctor.facts import MachineFacts

GIB = 2**30
OLDEST_PYTHON = (3, 11)
NEWEST_TESTED_PYTHON = (3, 13)
FEWEST_FILES, FEW_FILES = 256, 1024
SMALL_SHARED_MEMORY = 2**30  # bytes, for several GPUs; containers of docker have 64 MiB
LEAST_MEMORY, LEAST_FREE_MEMORY = 4 * GIB, 2 * GIB
LEAST_FILE = 2 * GIB
SLOW_DISK = 20e6  # bytes a second: below that, steps of large models wait for cached latents and text embeddings
LEAST_DISK, LITTLE_DISK = GIB, 5 * GIB
WRONG_RATE = 0.05  # of the calendar clock against the monotonic one
SLOW_CLOCKS = ("acpi_pm", "hpet", "jiffies", "xen")
DAY = 86_400.0


def python(facts: MachineFacts) -> Lines:
    """Version and width of Python."""
    system = facts.system
    version = ".".join(map(str, system.python))
    found = f"{version}, {system.bits} bits, {system.system} {system.release} on {system.machine}".replace("  ", " ")
    yield first_fault(
        "python",
        found,
        (system.bits != 64, "error", "64 bits", "install a 64-bit Python: torch has no other builds"),
        (
            system.python[:2] < OLDEST_PYTHON,
            "error",
            "3.11 or newer",
            "make the environment again with Python 3.11 or newer",
        ),
        (
            system.python[:2] > NEWEST_TESTED_PYTHON,
            "warning",
            "3.11 to 3.13",
            "use a tested version if a package fails to install",
        ),
    )


def versions(facts: MachineFacts) -> Lines:
    """Installed packages against what this package requires, and against the versions that the tests run with."""
    required: dict[str, SpecifierSet] = {}
    for text in facts.requires:
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required[requirement.name.lower()] = requirement.specifier
    other, same = [], 0
    for name, version in facts.versions.items():
        wanted, tested = required.get(name, SpecifierSet()), facts.tested.get(name, version)
        try:
            here, there = Version(version), Version(tested)
        except InvalidVersion:
            continue
        if not wanted.contains(here, prereleases=True):
            install = f"{name}=={tested}" if name in facts.tested else f"{name}{wanted}"
            yield error("versions", f"{name} {version}", f"{name}{wanted}", f"pip install '{install}'")
        elif here.release[:2] != there.release[:2]:
            other.append(f"{name} {version} (tested {tested})")
        else:
            same += 1
    if other:
        fix = "nothing if all works; else pip install -c constraints.txt -e . in the checkout"
        yield warning("versions", ", ".join(other), "the tested versions", fix)
    elif same:
        yield ok("versions", f"{counted(same, 'package')} as tested")


def libraries(facts: MachineFacts) -> Lines:
    """Optional libraries that are installed and do not load: a run does without them, or refuses settings that name them."""
    for name, reason in facts.broken.items():
        fix = f"pip install --upgrade {name}, or pip uninstall {name} if no setting of yours needs it"
        yield warning(name, f"{name} {reason}", "a library that loads, or none", fix)


def container(facts: MachineFacts) -> Lines:
    """WSL, containers, and the CPUs and memory that they leave."""
    system = facts.system
    if system.is_wsl:
        fix = "keep data and caches in the Linux file system, not under /mnt; .wslconfig sets memory"
        yield ok("WSL", f"WSL: {fix}")
    limited = system.memory_limit is not None and system.memory_limit < system.memory
    if system.container or limited or system.cpus_available < system.cpus:
        inside = system.container or "limits of control groups or affinity"
        cpus = f"{system.cpus_available:g} of {counted(system.cpus, 'CPU')}"
        memory = f"{facts.memory_limit / GIB:.1f} of {system.memory / GIB:.1f} GiB of memory"
        fix = "give it at least one CPU (docker run --cpus 4)"
        has_none = system.cpus_available < 1
        found = f"{inside}: {cpus}, {memory}"
        yield first_fault("container", found, (has_none, "warning", "at least one CPU", fix))


def memory(facts: MachineFacts) -> Lines:
    """The memory that this process may use, and what is free of it."""
    system, limit = facts.system, facts.memory_limit
    found = f"{limit / GIB:.1f} GiB, {system.memory_available / GIB:.1f} free, swap {system.swap / GIB:.1f}"
    larger = "use a larger machine"
    if limit < system.memory:
        larger = "give the container more (docker run --memory 16g)"
    least, free = f"{LEAST_MEMORY / GIB:.0f} GiB or more", f"{LEAST_FREE_MEMORY / GIB:.0f} GiB free"
    yield first_fault(
        "memory",
        found,
        (limit < LEAST_MEMORY, "error", least, f"{larger}; `plan` shows what a run needs"),
        (system.memory_available < LEAST_FREE_MEMORY, "warning", free, "close other programs"),
    )


def cpus(facts: MachineFacts) -> Lines:
    """CPUs that other programs leave free."""
    system = facts.system
    found = f"{system.cpus_available:g} of {system.cpus} to use, {system.cpus_busy:.1f} busy"
    is_busy, fix = system.cpus_busy > 0.8 * system.cpus_available, "close other programs: steps and their times suffer"
    yield first_fault("CPUs", found, (is_busy, "warning", "free CPUs", fix))
    if system.threads:
        yield ok("threads", system.threads)


def disks(facts: MachineFacts) -> Lines:
    """Folders of the caches and of runs: whether they can be written to, their room and their speed."""
    for disk in facts.disks:
        name, setting = f"{disk.use} disk", {"cache": "cache.dir", "output": "run.output"}.get(disk.use, "a folder")
        if disk.failure:
            fix = f"name another folder with {setting}, or make this one writable"
            yield error(name, f"{disk.folder}: {disk.failure}", "a folder that can be written to", fix)
            continue
        there, fix = (
            f"{disk.folder}: {size_words(disk.free)} free",
            f"free space there, or name another disk with {setting}",
        )
        if disk.needed is not None and disk.needed > disk.free:
            yield error(name, there, f"{size_words(disk.needed)} for this run", fix)
        elif disk.free < LEAST_DISK:
            yield error(name, there, size_words(LEAST_DISK), fix)
        elif disk.free < LITTLE_DISK:
            yield warning(name, there, size_words(LITTLE_DISK), f"{fix}; `plan` shows what a run needs")
        if disk.write is None or disk.read is None:
            continue
        speed = f"{there}, writes {disk.write / 1e6:,.0f} and reads {disk.read / 1e6:,.0f} MB/s"
        if min(disk.write, disk.read) < SLOW_DISK:
            fix = f"name a local SSD with {setting}, not a network or USB disk"
            yield warning(name, speed, f"{SLOW_DISK / 1e6:.0f} MB/s or more", fix)
        elif disk.free >= LITTLE_DISK:
            yield ok(name, speed)


def limits(facts: MachineFacts) -> Lines:
    """What the system lets one process use: open files, size of a file, address space."""
    system = facts.system
    files, hard, fix = system.open_files, system.open_files_hard, "ulimit -n 4096"
    if hard is not None and hard < FEW_FILES:
        fix = f"raise the hard limit of {hard}: limits.conf, LimitNOFILE=4096 of a service, or docker run --ulimit nofile=4096"
    if files is not None:
        wanted = f"{FEW_FILES} or more"
        too_few, few = files < FEWEST_FILES, files < FEW_FILES
        yield first_fault("open files", f"{files}", (too_few, "error", wanted, fix), (few, "warning", wanted, fix))
    elif system.system == "Linux":
        yield ok("open files", "no limit")
    if system.file_size is not None:
        line = error if system.file_size < LEAST_FILE else warning
        yield line("size of a file", f"at most {size_words(system.file_size)}", "no limit", "ulimit -f unlimited")
    if system.address_space is not None:
        line = error if facts.torch.devices else warning
        found = f"at most {system.address_space / GIB:.1f} GiB"
        yield line("address space", found, "no limit: CUDA reserves much more than it uses", "ulimit -v unlimited")


def shared_memory(facts: MachineFacts) -> Lines:
    """What several processes on GPUs exchange through; docker gives 64 MiB."""
    size, gpus = facts.system.shared_memory, len(facts.torch.devices)
    if size is None:
        return
    found = f"{size / 2**20:,.0f} MiB in /dev/shm"
    if size < SMALL_SHARED_MEMORY:
        found += "; for several GPUs" if gpus > 1 else "; only several processes need more"
    wanted, fix = f"{SMALL_SHARED_MEMORY / 2**20:,.0f} MiB", "docker run --shm-size 8g (or --ipc host)"
    yield first_fault("shared memory", found, (size < SMALL_SHARED_MEMORY, "warning", wanted, fix))


def clock(facts: MachineFacts) -> Lines:
    """A clock that is wrong, moved or slow: of the times of steps, of files, and of requests that check certificates."""
    system = facts.system
    source = f", {system.clock_source}" if system.clock_source else ""
    if system.clock_shift:
        fix = "start it without; times of steps, ages of cached files and --max-hours follow that clock"
        yield warning("clock", f"this process has another time: {system.clock_shift}", "the machine's time", fix)
    if system.newest_file > system.time + DAY:
        found = time.strftime("%Y-%m-%d", time.gmtime(system.time))
        yield error(
            "clock", f"{found}, before this package was installed", "today", "set the clock: timedatectl set-ntp true"
        )
    if not math.isclose(system.clock_rate, 1.0, rel_tol=WRONG_RATE):
        found = f"the calendar clock runs {system.clock_rate:.2f} times as fast as the monotonic one"
        yield warning("clock", found, "the same", "measured times are wrong; check the virtual machine's time settings")
    elif system.clock_source in SLOW_CLOCKS:
        found = f"{system.clock_source}: reading it takes microseconds"
        yield warning(
            "clock", found, "tsc or kvm-clock", "set clocksource=tsc for the kernel, if the machine supports it"
        )
    elif not system.clock_shift:
        yield ok("clock", f"steady{source}")


def variables(facts: MachineFacts) -> Lines:
    """Each variable that is set: what it does, and what is wrong with it."""
    ours = []
    for name, value in facts.environment.items():
        variable = VARIABLES[name]
        if variable.secret:
            shown = "set"
        elif not value.strip():
            shown = "empty"
        else:
            shown = value if len(value) < 80 else f"{value[:77]}…"
        complaint = variable.judge(value, facts) if variable.judge else None
        if complaint is not None:
            level, effect, fix = complaint
            wanted = "not set" if "unset" in fix else "another value"
            yield DoctorLine(name, level, f"{shown}, {effect}", wanted, fix)
        elif value == OURS.get(name):
            ours.append(f"{name}={value}")
        else:
            yield ok(name, f"{shown}, {variable.does}")
    if ours:
        yield ok("set by lora-trainer", ", ".join(ours))


def is_offline(facts: MachineFacts) -> bool:
    """Whether the environment forbids requests to the hub, as huggingface_hub reads it."""
    return facts.environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def hub(facts: MachineFacts) -> Lines:
    """Whether models can be downloaded; a request is made only with --online."""
    found = facts.hub
    token = "a token is there" if found.has_token else "no token: gated models, such as FLUX.1-dev, need one"
    if is_offline(facts):
        yield ok("hub", "HF_HUB_OFFLINE is set: models come from local folders only")
    elif not found.asked:
        yield ok("hub", f"not asked, which --online does; {token}")
    elif found.failure:
        fix = "check network, proxy and HF_ENDPOINT; without a network use --offline and local models"
        yield warning("hub", f"{found.failure} ({found.endpoint})", "an answer", fix)
    else:
        yield ok("hub", f"answered in {found.seconds or 0.0:.1f} s ({found.endpoint}); {token}")
