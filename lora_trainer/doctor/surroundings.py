"""Checks of the system around torch: versions, memory, disks, limits, clocks, environment variables, the hub."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from lora_trainer.core.disk import size_words
from lora_trainer.core.findings import counted
from lora_trainer.doctor.lines import Lines, error, ok, warning
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
    if system.bits != 64:
        yield error("python", found, "64 bits", "install a 64-bit Python: torch has no other builds")
    elif system.python[:2] < OLDEST_PYTHON:
        yield error("python", found, "3.11 or newer", "make the environment again with Python 3.11 or newer")
    elif system.python[:2] > NEWEST_TESTED_PYTHON:
        yield warning("python", found, "3.11 to 3.13", "use a tested version if a package fails to install")
    else:
        yield ok("python", found)


def versions(facts: MachineFacts) -> Lines:
    """Installed packages against what this package requires, and against the versions that the tests run with."""
    required = {}
    for text in facts.requires:
        try:
            each = Requirement(text)
        except InvalidRequirement:
            continue
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            required[each.name.lower()] = each.specifier
    other, same = [], 0
    for name, version in facts.versions.items():
        try:
            here, tested = Version(version), Version(facts.tested.get(name, version))
        except InvalidVersion:
            continue
        if name in required and not required[name].contains(here, prereleases=True):
            fix = f"pip install '{name}{f'=={tested}' if name in facts.tested else required[name]}'"
            yield error("versions", f"{name} {version}", f"{name}{required[name]}", fix)
        elif here.release[:2] != tested.release[:2]:
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
        if system.cpus_available < 1:
            fix = "give it at least one CPU (docker run --cpus 4)"
            yield warning("container", f"{inside}: {cpus}, {memory}", "at least one CPU", fix)
        else:
            yield ok("container", f"{inside}: {cpus}, {memory}")


def memory(facts: MachineFacts) -> Lines:
    """The memory that this process may use, and what is free of it."""
    system, limit = facts.system, facts.memory_limit
    found = f"{limit / GIB:.1f} GiB, {system.memory_available / GIB:.1f} free, swap {system.swap / GIB:.1f}"
    if limit < LEAST_MEMORY:
        larger = (
            "give the container more (docker run --memory 16g)" if limit < system.memory else "use a larger machine"
        )
        yield error(
            "memory", found, f"{LEAST_MEMORY / GIB:.0f} GiB or more", f"{larger}; `plan` shows what a run needs"
        )
    elif system.memory_available < LEAST_FREE_MEMORY:
        yield warning("memory", found, f"{LEAST_FREE_MEMORY / GIB:.0f} GiB free", "close other programs")
    else:
        yield ok("memory", found)


def cpus(facts: MachineFacts) -> Lines:
    """CPUs that other programs leave free."""
    system = facts.system
    usable = system.cpus_available
    found = f"{usable:g} of {system.cpus} to use, {system.cpus_busy:.1f} busy"
    if system.cpus_busy > 0.8 * usable:
        yield warning("CPUs", found, "free CPUs", "close other programs: steps and their times suffer")
    else:
        yield ok("CPUs", found)
    if system.threads:
        yield ok("threads", system.threads)


def disks(facts: MachineFacts) -> Lines:
    """Folders of the caches and of runs: whether they can be written to, their room and their speed."""
    for disk in facts.disks:
        name, setting = f"{disk.use} disk", {"cache": "cache.dir", "output": "run.output"}.get(disk.use, "a folder")
        there = f"{disk.folder}: {size_words(disk.free)} free"
        if disk.failure:
            fix = f"name another folder with {setting}, or make this one writable"
            yield error(name, f"{disk.folder}: {disk.failure}", "a folder that can be written to", fix)
            continue
        if disk.needed is not None and disk.needed > disk.free:
            fix = f"free space there, or name another disk with {setting}"
            yield error(name, there, f"{size_words(disk.needed)} for this run", fix)
        elif disk.free < LEAST_DISK:
            yield error(name, there, size_words(LEAST_DISK), f"free space there, or name another disk with {setting}")
        elif disk.free < LITTLE_DISK:
            fix = f"free space there, or name another disk with {setting}; `plan` shows what a run needs"
            yield warning(name, there, size_words(LITTLE_DISK), fix)
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
    files = system.open_files
    if files is not None and files < FEW_FILES:
        line, hard = error if files < FEWEST_FILES else warning, system.open_files_hard
        fix = "ulimit -n 4096"
        if hard is not None and hard < FEW_FILES:
            fix = f"raise the hard limit of {hard}: limits.conf, LimitNOFILE=4096 of a service, or docker run --ulimit nofile=4096"
        yield line("open files", f"{files}", f"{FEW_FILES} or more", fix)
    elif files is not None or system.system == "Linux":
        yield ok("open files", "no limit" if files is None else f"{files}")
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
        why = "for several GPUs" if gpus > 1 else "only several processes need more"
        fix = "docker run --shm-size 8g (or --ipc host)"
        yield warning("shared memory", f"{found}; {why}", f"{SMALL_SHARED_MEMORY / 2**20:,.0f} MiB", fix)
    else:
        yield ok("shared memory", found)


def clock(facts: MachineFacts) -> Lines:
    """A clock that is wrong, moved or slow: of the times of steps, of files, and of requests that check certificates."""
    system = facts.system
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
        yield ok("clock", f"steady{f', {system.clock_source}' if system.clock_source else ''}")


def variables(facts: MachineFacts) -> Lines:
    """Each variable that is set: what it does, and what is wrong with it."""
    ours = []
    for name, value in facts.environment.items():
        variable = VARIABLES[name]
        shown = (
            "set"
            if variable.secret
            else "empty"
            if not value.strip()
            else value
            if len(value) < 80
            else f"{value[:77]}…"
        )
        complaint = variable.judge(value, facts) if variable.judge else None
        if complaint is not None:
            level, effect, fix = complaint
            line = error if level == "error" else warning
            yield line(name, f"{shown}, {effect}", "not set" if "unset" in fix else "another value", fix)
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
    found, offline = facts.hub, is_offline(facts)
    token = "a token is there" if found.has_token else "no token: gated models, such as FLUX.1-dev, need one"
    if offline:
        yield ok("hub", "HF_HUB_OFFLINE is set: models come from local folders only")
    elif not found.asked:
        yield ok("hub", f"not asked, which --online does; {token}")
    elif found.failure:
        fix = "check network, proxy and HF_ENDPOINT; without a network use --offline and local models"
        yield warning("hub", f"{found.failure} ({found.endpoint})", "an answer", fix)
    else:
        yield ok("hub", f"answered in {found.seconds or 0.0:.1f} s ({found.endpoint}); {token}")
