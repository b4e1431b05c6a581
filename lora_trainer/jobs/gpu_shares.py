"""The part of a GPU that each job of a batch needs, from its memory plan, so that several jobs can share one.

The plan is that of the job alone on the GPU: the fastest that fits. The share is what its peak needs of that GPU, rounded
up, and the job's run is then limited to its share. It chooses the same plan there, and cannot take the other jobs' memory.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lora_trainer.config.contradictions import from_user
from lora_trainer.core.errors import Problem, UsageError, UserError
from lora_trainer.core.findings import counted
from lora_trainer.memory_plan.estimate import LARGEST_SHARE, what_would_fit
from lora_trainer.run.plans.plan import Plan, make_plan

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved

# The shares, in order: 0.05, 0.1, … and 1/2, 1/3, …, in the four digits that Ray counts.
STEPS = tuple(sorted({jobs / 20 for jobs in range(1, 21)} | {10_000 // jobs / 10_000 for jobs in range(1, 21)}))
CHOICES = ("micro", "checkpointed", "precision", "swapped")  # of a plan for training
NO_PLACES = {"path": "", "captions_file": None}  # of a source: they change no plan
ORIGIN = "GPU share"  # of `memory.limit_gib` in a run's record
HIDDEN_GIB = 0.5  # of a GPU's size in its name: one of 24 GB shows a little less


@dataclass(frozen=True)
class GpuShare:
    """`gpus` is what the cluster is asked for. `gpu_gib` is the size of the GPU that it is a part of, where that is known:
    the job must not run on a smaller one. `peak_gib` is that of its plan, `limit_gib` what its run must fit into where its
    settings set no such limit."""

    gpus: float
    gpu_gib: float | None = None
    peak_gib: float | None = None
    limit_gib: float | None = None

    def describe(self, own_limit_gib: float | None = None) -> str:
        """`0.5 (plan: 9.8 GiB of 24 GiB)`."""
        of = f" of {self.gpu_gib:.3g} GiB" if self.gpu_gib else ""
        if own_limit_gib is not None and own_limit_gib <= (self.gpu_gib or math.inf) + HIDDEN_GIB:
            return f"{self.gpus:g} (memory.limit_gib={own_limit_gib:g}{of})"
        if self.peak_gib is not None:
            return f"{self.gpus:g} (plan: {self.peak_gib:.1f} GiB{of})"
        return f"{self.gpus:g}{f' ({of.strip()})' if of else ''}"


def share_of_limit(limit_gib: float | None, gpu_gib: float | None) -> float:
    """1 / the number of jobs with this limit that a GPU of this size holds; 1 where one is not known."""
    if limit_gib is None or gpu_gib is None:
        return 1.0
    return math.floor(10_000 / max(1, int((gpu_gib + HIDDEN_GIB) / limit_gib))) / 10_000


def limit_of(share: float, gpu_gib: float) -> float | None:
    """The memory limit of a run with this share; None where the whole GPU is its own."""
    return None if share >= 1.0 else math.floor(100.0 * share * gpu_gib) / 100.0


def limited(resolved: Resolved, limit_gib: float | None) -> Resolved:
    """The settings of a run that must fit into `limit_gib`, unless they set a lower limit."""
    own = resolved.config.memory.limit_gib
    if limit_gib is None or (own is not None and own <= limit_gib):
        return resolved
    memory = resolved.config.memory.model_copy(update={"limit_gib": limit_gib})
    config = resolved.config.model_copy(update={"memory": memory})
    return replace(resolved, config=config, origin={**resolved.origin, "memory.limit_gib": ORIGIN})


@dataclass
class GpuShares:
    """The shares of jobs on GPUs of these sizes in GiB. Each plan is made once for all jobs with equal settings."""

    sizes: Collection[float]
    found: dict[str, GpuShare | UsageError] = field(default_factory=dict)
    no_plan: Counter[str] = field(default_factory=Counter)  # jobs by why they have no plan
    unplanned: dict[str, str] = field(default_factory=dict)  # why, by the key of the settings

    def of(self, resolved: Resolved) -> GpuShare:
        """The share of a job. Raises UsageError where its plan fits no GPU."""
        # Jobs have one plan if all settings are equal but the run's name and where its images are.
        document = resolved.config.model_dump(mode="json", exclude={"run"})
        document["data"]["sources"] = [{**source, **NO_PLACES} for source in document["data"]["sources"]]
        key = json.dumps([document, from_user(resolved.origin["memory.weight_dtype"])], sort_keys=True)
        if key not in self.found:
            try:
                self.found[key] = self._chosen(resolved, key)
            except UsageError as error:
                self.found[key] = error
        if key in self.unplanned:
            self.no_plan[self.unplanned[key]] += 1
        if isinstance(found := self.found[key], UsageError):
            raise found
        return found

    def fixed(self, gpus: float) -> GpuShare:
        """A share that the user chose, of the smallest GPU."""
        smallest = min(self.sizes, default=None)
        if smallest is None or not 0.0 < gpus < 1.0:
            return GpuShare(gpus)
        return GpuShare(gpus, smallest, limit_gib=limit_of(gpus, smallest))

    def _chosen(self, resolved: Resolved, key: str) -> GpuShare:
        own, sizes = resolved.config.memory.limit_gib, sorted(set(self.sizes))
        if not sizes:
            self.unplanned[key] = "the memory of the GPUs is not known"
            return GpuShare(share_of_limit(own, None))
        if own is not None:  # it is to get that, where a GPU has it
            sizes = [size for size in sizes if size + HIDDEN_GIB >= own] or sizes[-1:]
        plan = None
        for size in sizes:
            try:
                plan = make_plan(resolved, gpu_gib=size, data=((), ()))
                share = share_of_plan(resolved, plan, size) if plan.fits is not False else None
            except UserError as error:
                self.unplanned[key] = str(error.problems[0].message if error.problems else error)
                return GpuShare(share_of_limit(own, sizes[0]))
            except Exception as error:  # noqa: BLE001  a batch must not end for want of a plan
                self.unplanned[key] = f"{type(error).__name__}: {error}"
                return GpuShare(share_of_limit(own, sizes[0]))
            if share is not None:
                alike = share.gpus == 1.0 and own is None and self.differ  # the same plan wherever the job continues
                return replace(share, limit_gib=size) if alike else share
        assert plan is not None
        fix = " ".join(what_would_fit(plan.demand))
        raise UsageError(
            Problem(
                "does_not_fit",
                f"{' '.join(plan.shortages)} The largest GPU of the cluster has {sizes[-1]:.3g} GiB.",
                fix,
            )
        )

    @property
    def differ(self) -> bool:
        """Whether the cluster has GPUs of several sizes."""
        return max(self.sizes, default=0.0) - min(self.sizes, default=0.0) > HIDDEN_GIB


def share_of_plan(resolved: Resolved, plan: Plan, gpu_gib: float) -> GpuShare:
    """The smallest step of a share in which a job trains by the same plan as on the whole GPU, and its other phases fit."""
    peak, own = plan.fit.parts.peak, resolved.config.memory.limit_gib
    if own is not None:
        return GpuShare(share_of_limit(own, gpu_gib), gpu_gib, peak)
    for share in STEPS:
        limit = limit_of(share, gpu_gib)
        if limit is None or peak > LARGEST_SHARE * limit:
            continue
        smaller = make_plan(limited(resolved, limit), gpu_gib=gpu_gib, data=((), ()))
        is_same = all(getattr(smaller.fit, name) == getattr(plan.fit, name) for name in CHOICES)
        if is_same and smaller.fits is not False:
            return GpuShare(share, gpu_gib, peak, limit)
    return GpuShare(1.0, gpu_gib, peak)


def lines_of(shares: Sequence[tuple[GpuShare, float | None]]) -> list[str]:
    """A line for each distinct share, with its jobs. Each comes with the job's own `memory.limit_gib`."""
    groups: dict[tuple[float, float | None, float | None], list[GpuShare]] = {}
    for share, own in shares:
        groups.setdefault((share.gpus, share.gpu_gib, own), []).append(share)
    found = []
    for (_, _, own), group in sorted(groups.items(), key=lambda item: -item[0][0]):
        largest = max(group, key=lambda share: share.peak_gib or 0.0)
        found.append(f"GPU share: {largest.describe(own)}, {counted(len(group), 'job')}")
    return found
