"""Why a GPU is idle, and which setting to try: pure functions of what was measured. No torch.

The evidence decides, in the order of `causes_of`: steps that are fine, then data, swapping, launches, other programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal, TypeGuard

from lora_trainer.monitor.slowness import waiting_limit

BUSY, AIM = 0.85, 0.90  # GPU utilization: below the first a GPU is idle
FULL_MEMORY = 0.7  # of the memory that the run may use; below, a larger micro-batch may fit
BUSY_THREAD = 0.85  # of one core, for the thread that launches the GPU's work
BUSY_CPU = 0.95
SWAPPING_MB_S = 1.0
THROTTLED = 0.2  # of the samples
MOSTLY_STEPS = 0.95  # of an interval, for one that is counted as steps alone
BEHIND = 0.9  # of the median clock of the other GPUs
OTHERS_GIB = 1.0
RECENT_ROWS = 30  # of system.jsonl, in which the cause of an idle GPU is looked for while a run trains

CauseName = Literal[
    "elsewhere", "data", "swap", "block_swap", "launches", "throttled", "slow_gpu", "other_programs", "unknown"
]  # "launches" of a run that is compiled, or on a CPU: its operators are too small


@dataclass(frozen=True)
class IdleSetup:
    """Settings of a run that explain an idle GPU. `largest_micro` is the micro-batch that fits, if it is known."""

    cached: bool = True
    compiled: bool = False
    swapped: int = 0  # blocks
    weight_dtype: str = "bf16"  # of the frozen weights
    micro: int = 1
    samples: int = 1  # of a step in one process
    largest_micro: int | None = None


@dataclass(frozen=True)
class IdleCause:
    """Why a GPU is idle or slow: `what` with its figures, `to_do` in words, and a setting to try, as typed."""

    name: CauseName
    what: str
    to_do: str
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.what}. {self.to_do}"


def means_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The means of rows of system.jsonl, over their time. Shares stay from 0 to 1; what no row has is missing.

    `gpu_in_steps` is the GPU utilization of those rows in which nothing but steps ran; `gpu_celsius_most` the highest.
    """
    sums, times, hottest = dict[str, float](), dict[str, float](), list[float]()
    for row in rows:
        seconds, numbers = row.get("seconds"), {name: value for name, value in row.items() if is_number(value)}
        if not is_number(seconds) or seconds <= 0:
            continue
        if numbers.get("in_steps", 0.0) >= MOSTLY_STEPS and "gpu_utilization" in numbers:
            numbers["gpu_in_steps"] = numbers["gpu_utilization"]
        hottest += [numbers["gpu_celsius"]] if "gpu_celsius" in numbers else []
        for name, value in numbers.items():
            if name not in ("step", "seconds"):
                sums[name] = sums.get(name, 0.0) + value * seconds
                times[name] = times.get(name, 0.0) + seconds
    means = {name: round(sums[name] / times[name], 4) for name in sums}
    return means | ({"gpu_celsius_most": max(hottest)} if hottest else {})


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def clocks_of(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """The mean clock of each GPU in MHz, of the rows that have several; empty where one has none."""
    found = [
        [gpu.get("clock_mhz") for gpu in gpus if isinstance(gpu, dict)]
        for row in rows
        if isinstance(gpus := row.get("gpus"), list)
    ]
    whole = [clocks for clocks in found if len(clocks) > 1 and all(map(is_number, clocks))]
    if not whole or len({len(clocks) for clocks in whole}) > 1:
        return []
    return [fmean(clocks) for clocks in zip(*whole, strict=True)]


def causes_of(means: Mapping[str, float], setup: IdleSetup, clocks: Sequence[float] = ()) -> tuple[IdleCause, ...]:
    """Why the GPU does less than it could, the likeliest first; empty where it is busy or was not measured.

    `means` are those of `means_of`, `clocks` those of `clocks_of`.
    """
    used = means.get("gpu_utilization")
    if used is None:
        return ()
    slowed = (*throttling(means), *slowest_gpu(clocks))
    if used >= BUSY:
        return slowed
    found = (
        *time_elsewhere(means),
        *waits(means, setup),
        *slowed,
        *other_programs(means),
    )
    unknown = IdleCause(
        "unknown",
        "neither data, nor the CPU, nor swapping explains it",
        "A run with --profile shows where a step's time is spent.",
    )
    return found or (unknown,)


def time_elsewhere(means: Mapping[str, float]) -> list[IdleCause]:
    steps, busy = means.get("in_steps"), means.get("gpu_in_steps")
    if steps is None or busy is None or busy < BUSY or steps >= MOSTLY_STEPS:
        return []
    what = (
        f"in steps the GPU is {busy:.0%} busy, but {1 - steps:.0%} of the time is spent on validation, images and "
        "checkpoints"
    )
    to_do = "Make them rarer with validation.every_n_steps, sample.every_n_steps and checkpoint.every_n_steps."
    return [IdleCause("elsewhere", what, to_do)]


def waits(means: Mapping[str, float], setup: IdleSetup) -> list[IdleCause]:
    """For data, for memory that is swapped, or for the CPU that launches the work."""
    found = list[IdleCause]()
    if (waited := means.get("data_wait", 0.0)) > waiting_limit(cached=setup.cached):
        found.append(slow_data(waited, setup))
    if (moved := means.get("swap_mb_s", 0.0)) >= SWAPPING_MB_S:
        used = f"{means.get('system_memory', 0.0):.0%} in use"
        what = f"the system moves {moved:.0f} MB/s between memory and swap ({used})"
        found.append(IdleCause("swap", what, "Close other programs, or swap fewer blocks (memory.blocks_to_swap)."))
    busy = means.get("main_thread", 0.0)
    if setup.swapped and busy < BUSY_THREAD:  # copies do not keep the CPU busy
        blocks = "1 block is" if setup.swapped == 1 else f"{setup.swapped} blocks are"
        what = f"{blocks} swapped between CPU and GPU, and the GPU waits for the copies"
        found.append(IdleCause("block_swap", what, *fix_of("block_swap", setup)))
    if busy >= BUSY_THREAD:
        what = f"the CPU launches the GPU's work too slowly: the training thread uses {busy:.0%} of one core"
        found.append(IdleCause("launches", what, *fix_of("launches", setup)))
    return found


def slow_data(waited: float, setup: IdleSetup) -> IdleCause:
    """Steps that wait this share of their time for data, which is more than `waiting_limit`, and the fix."""
    what = f"steps wait {waited:.1%} of their time for data, more than {waiting_limit(cached=setup.cached):.0%}"
    return IdleCause("data", what, *fix_of("data", setup))


def fix_of(name: CauseName, setup: IdleSetup) -> tuple[str, str]:
    """What to do against a cause, in words, and the setting to try, as typed. A profile gives the same advice."""
    if name == "data" and not setup.cached:
        return "Set cache.latents=true.", "cache.latents=true"
    if name == "data":
        return "Put cache.dir on a faster disk, and check what else uses the CPU.", ""
    if name == "block_swap":
        smaller = {"fp8": "nf4", "int8": "nf4", "nf4": ""}.get(setup.weight_dtype, "fp8")
        setting = f"memory.weight_dtype={smaller}" if smaller else ""
        return f"Set {setting or 'a lower data.resolution'}, so that fewer blocks have to be swapped.", setting
    if name == "launches" and not setup.compiled:
        return "Set compile.enabled=true.", "compile.enabled=true"
    # Fewer and larger operators.
    fits = setup.largest_micro
    if setup.micro < setup.samples and (fits is None or fits > setup.micro):
        words = larger_micro(setup) or "Set train.max_micro_batch_size higher, if the memory allows."
        return words, f"train.max_micro_batch_size={min(fits or setup.samples, setup.samples)}"
    words = larger_micro(setup) or "Raise train.effective_batch_size, which changes what is learned."
    return words, f"train.effective_batch_size={2 * setup.samples}"


def throttling(means: Mapping[str, float]) -> list[IdleCause]:
    share = means.get("gpu_throttled", 0.0)
    if share < THROTTLED:
        return []
    heat = f" (up to {means['gpu_celsius_most']:.0f} degrees)" if "gpu_celsius_most" in means else ""
    what = f"heat or power lowered the GPU's clock in {share:.0%} of the samples{heat}"
    return [IdleCause("throttled", what, "Cool it, clean its fans, and check its power limit and cables.")]


def slowest_gpu(clocks: Sequence[float]) -> list[IdleCause]:
    """The GPU that all others wait for: its clock is far below theirs."""
    if len(clocks) < 2:
        return []
    slow = min(range(len(clocks)), key=lambda index: clocks[index])
    usual = median(clock for index, clock in enumerate(clocks) if index != slow)
    if clocks[slow] >= BEHIND * usual:
        return []
    what = f"GPU {slow} runs at {clocks[slow]:.0f} MHz, the others at {usual:.0f}: every step waits for it"
    return [IdleCause("slow_gpu", what, "Check its cooling, its power limit and what else uses it.")]


def other_programs(means: Mapping[str, float]) -> list[IdleCause]:
    found = []
    if (cpu := means.get("cpu", 0.0)) >= BUSY_CPU:
        found.append(f"the CPU is {cpu:.0%} busy, {means.get('main_thread', 0.0):.0%} of one core with training")
    if (held := means.get("gpu_other_gib", 0.0)) >= OTHERS_GIB:
        found.append(f"other programs hold {held:.1f} GiB of the GPU and may compute on it")
    return [IdleCause("other_programs", " and ".join(found), "Close other programs.")] if found else []


def larger_micro(setup: IdleSetup) -> str:
    """A sentence that names the micro-batch that fits and how to get it; empty where it is used or not known."""
    fits, micro = setup.largest_micro, setup.micro
    if fits is None or fits <= micro:
        return ""
    if micro < setup.samples:
        most = min(fits, setup.samples)
        return f"A micro-batch of {most} fits: set train.max_micro_batch_size={most}."
    return (
        f"A micro-batch of {fits} fits, and a step has {setup.samples}: train.effective_batch_size may be raised,"
        " which changes what is learned."
    )
