"""What a run should reach on its machine, and what was seen of it."""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.report.chart import short
from lora_trainer.report.figures import waiting_share
from lora_trainer.report.read import RunReport, mapping, number

SECONDS_STALLED = 1.0


@dataclass(frozen=True)
class Target:
    """`met` is None where nothing was seen."""

    name: str
    aim: str
    seen: str
    met: bool | None


def targets_of(run: RunReport) -> list[Target]:
    """Those that were seen; on a CPU neither a GPU's, nor that the CPU has time to spare."""
    seen, found = run.part("seen"), list[Target]()
    on_gpu = str(run.part("hardware").get("device", "")).startswith("cuda")
    cached = mapping(mapping(run.record.get("config")).get("cache")).get("latents") is not False
    if on_gpu:
        found.append(share("GPU computes", number(seen.get("utilisation")), over=0.85))
        found.append(share("GPU's memory, of what is allowed", number(seen.get("memory")), over=0.7))
        found.append(share("CPU computes", number(seen.get("cpu")), under=0.8))
    found.append(share("system memory", number(seen.get("system_memory")), under=0.85))
    found.append(share("CPU waits for disks", number(seen.get("io_wait")), under=0.1))
    found.append(share("steps wait for data", waiting_share(run), under=0.01 if cached else 0.05))
    stall = number(mapping(run.part("checkpoints").get("stall_seconds")).get("median"))
    seen_stall = "" if stall is None else f"{short(1000 * stall)} ms"
    found.append(
        Target(
            "a checkpoint stops the steps",
            "under 1 s",
            seen_stall,
            stall < SECONDS_STALLED if stall is not None else None,
        )
    )
    return [target for target in found if target.met is not None]


def share(name: str, seen: float | None, *, over: float | None = None, under: float | None = None) -> Target:
    """A target for a share from 0 to 1."""
    aim = f"over {over:.0%}" if over is not None else f"under {under or 0.0:.0%}"
    if seen is None:
        return Target(name, aim, "", None)
    met = seen > over if over is not None else seen < (under or 0.0)
    return Target(name, aim, f"{100 * seen:.1f} %", met)
