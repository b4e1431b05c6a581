"""Profile steps of a run into its folder `profile`: a trace, and how long each phase takes (docs/profile.md).

The run is composed with it when it is built (`run/prepare.py`): `phase` around the phases of a step, `after_step` as its
last hook. It changes nothing that is computed. With several processes the main one is profiled.
"""

from __future__ import annotations

import gzip
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from lora_trainer.core.errors import first_line
from lora_trainer.core.gpu_rates import rate_of_gpu
from lora_trainer.core.io import atomic_path, write_json, write_text
from lora_trainer.monitor.device_rates import copy_rate, matmul_rate
from lora_trainer.monitor.profile_files import PHASES, PROFILE
from lora_trainer.training.stack_sampler import StackSampler
from lora_trainer.training.step_phases import PhaseClock

if TYPE_CHECKING:
    from lora_trainer.config.schema import ProfileSection
    from lora_trainer.training.state import TrainState

MOST_TRACE = 2**28  # bytes of a trace before it is compressed: what Perfetto opens in a browser without trouble
MOST_ALLOCATIONS = 100_000  # of a memory snapshot, each with its Python stack
RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


@dataclass(frozen=True)
class ProfiledDevice:
    """What the run computes on, in which precision, and the model's operations of a step as the plan counts them."""

    device: torch.device
    dtype: torch.dtype
    tflop_per_step: float | None


class Profiler:
    """`with profiler:` around the loop. Files are whole or absent: a run that is stopped while recording writes no trace.

    Nothing that fails in it ends the run: that is logged once, and the profile ends.
    """

    def __init__(self, section: ProfileSection, run: Path, on: ProfiledDevice, say: Callable[[str], None]) -> None:
        self._section, self._folder, self._on, self._say = section, run / PROFILE, on, say
        self._on_gpu = on.device.type == "cuda"
        self._clock = PhaseClock(on.device)
        self.phase = self._clock.phase
        self._stacks = StackSampler()
        self._profile: Any = None
        self._step, self._recorded, self._cycles, self._traces = 0, 0, 0, 0
        self._device_facts: dict[str, Any] = {}
        self._failed = False

    def __enter__(self) -> Self:
        self._safely(self._start_cycle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorded:
            self._say(f"profile: stopped while recording, after step {self._step}: no trace of it was written")
        self._safely(self._stop)
        self._safely(self._write_phases)

    def end(self, *, complete: bool) -> None:
        """Training ended. Where it is `complete`, steps that were recorded are kept, though fewer than asked for."""
        if complete and self._recorded:
            self._safely(self._save)
        if complete and not self._traces:
            needed = self._section.wait + self._section.warmup + 1
            self._say(
                f"profile: the run ended before the profiler recorded a step; it needs at least {needed}. Set "
                "profile.wait=0 or more steps."
            )

    def after_step(self, state: TrainState) -> TrainState:
        """The last hook of each step."""
        self._step = state.step
        action = ProfilerAction.NONE if self._profile is None else self._profile.current_action
        self._recorded += action in RECORDING
        self._clock.end_step(profiled=action != ProfilerAction.NONE)
        if self._profile is not None:
            self._safely(self._next_step)
        return state

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  torch's profiler, the driver, the disk: no training depends on them
            self._profile, self._recorded = None, 0
            self._stacks.stop()
            # A profiler whose `step` failed may not be stopped: it would start what it did not prepare, and crash.
            if torch._C._autograd._profiler_enabled():
                torch._C._autograd._disable_profiler()
            if not self._failed:
                self._say(f"profile: failed and ends here; the training continues ({first_line(error)})")
            self._failed = True

    def _start_cycle(self) -> None:
        """A profiler for one repetition. Torch's own repetition warns that it forgets the events of the one before."""
        section = self._section
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=section.wait, warmup=section.warmup, active=section.active, repeat=1),
            record_shapes=True,  # operations and bytes are counted from them
            profile_memory=section.details,
        )
        self._profile.start()

    def _next_step(self) -> None:
        """Record the next step, write what was recorded, or start again."""
        current, action = self._profile, self._profile.current_action
        if action == ProfilerAction.RECORD_AND_SAVE:
            self._save()
            self._cycles += 1
            if self._cycles < self._section.repeat:
                self._start_cycle()
            self._clock.pause()  # what the profiler did until here is of no step
            return
        current.step()
        following = current.current_action
        if (action == ProfilerAction.NONE) != (following == ProfilerAction.NONE):
            self._clock.pause()
        if self._section.details and following in RECORDING and action not in RECORDING:
            self._stacks.start()
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")

    def _stop(self) -> None:
        """Stop recording, and write nothing."""
        current, self._profile, self._recorded = self._profile, None, 0
        self._stacks.stop()
        if current is not None:
            current.stop()
        if self._on_gpu and self._section.details:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _save(self) -> None:
        """Stop recording, and write the files of the steps that were recorded."""
        began, current, steps = time.perf_counter(), self._profile, self._recorded
        name = f"step-{self._step - steps + 1:06d}"
        if self._section.details and self._on_gpu:
            with atomic_path(self._folder / f"memory-{name}.pickle") as path:
                torch.cuda.memory._dump_snapshot(str(path))
        self._stop()
        if self._section.details:
            write_text(self._folder / f"stacks-{name}.txt", self._stacks.lines())
        self._write_trace(current, f"trace-{name}.json.gz")
        self._traces += 1
        if not self._device_facts:
            self._device_facts = device_facts(self._on)
        self._write_phases()
        took = time.perf_counter() - began
        self._say(
            f"profile: {steps} steps, the last is {self._step}, are in {self._folder} (written in {took:.1f} s); "
            f"`lora-trainer profile {self._folder.parent}` shows where the time went"
        )

    def _write_trace(self, recorded: Any, name: str) -> None:
        """Write the Chrome trace, unless it is too large to be opened."""
        self._folder.mkdir(parents=True, exist_ok=True)
        raw = self._folder / f".{name}.raw"
        try:
            recorded.export_chrome_trace(str(raw))
            if (size := raw.stat().st_size) > MOST_TRACE:
                limit = f"{size / 2**20:.0f} MiB, more than {MOST_TRACE / 2**20:.0f}"
                self._say(f"profile: the trace has {limit}, and was not kept. Set profile.active lower.")
                return
            with (
                atomic_path(self._folder / name) as path,
                raw.open("rb") as source,
                gzip.open(path, "wb", compresslevel=5) as target,
            ):
                shutil.copyfileobj(source, target)
        finally:
            raw.unlink(missing_ok=True)

    def _write_phases(self) -> None:
        write_json(self._folder / PHASES, {"version": 1, **self._clock.to_json(), "device": self._device_facts})


def device_facts(on: ProfiledDevice) -> dict[str, Any]:
    """The device and its rates: TFLOP/s of a large matmul and GB/s of a copy, measured now, and the known peak."""
    name = torch.cuda.get_device_name(on.device) if on.device.type == "cuda" else None
    is_16_bit = on.dtype in (torch.bfloat16, torch.float16)
    rates = dict[str, float]()
    with suppress(torch.OutOfMemoryError):
        rates = {"matmul_tflops": matmul_rate(on.device, on.dtype), "copy_gb_per_second": copy_rate(on.device)}
    return {
        "name": name,
        "dtype": str(on.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "peak_tflops": rate_of_gpu(name) if name and is_16_bit else None,
        "tflop_per_step": on.tflop_per_step,
        **rates,
    }
