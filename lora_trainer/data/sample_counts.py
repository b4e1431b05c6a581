"""How often each image, caption and bucket was trained. No torch.

It follows from the plan and the number of steps alone: nothing is counted while training
and nothing is kept in a checkpoint, so it is right after any stop and any resume.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.findings import Finding, counted
from lora_trainer.core.io import atomic_path
from lora_trainer.data.steps import Ref, StepPlan

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample

FILE = "sample_counts.csv"
NEVER_TRAINED = "images_never_trained"
BucketOf = Callable[[Ref], object]
TextOf = Callable[[Ref, int], str | None]  # of a sample in a step; None where its caption was dropped


@dataclass(frozen=True)
class SampleCounts:
    """What `steps` steps trained. `times` are in the order of the samples.

    `captions` counts texts as the model read them, `dropped` the samples that were trained
    on the empty caption in place of their own.
    """

    steps: int
    samples: Sequence[Sample]
    times: tuple[int, ...]
    captions: Mapping[str, int]
    buckets: Mapping[str, int]
    dropped: int

    @property
    def line(self) -> str:
        """`every image 12-13 times, regularization 3 times; captions dropped 10.2 %`."""
        parts = []
        for name, kept in (("image", False), ("regularization image", True)):
            times = [
                count
                for count, sample in zip(self.times, self.samples, strict=True)
                if sample.regularization == kept and count
            ]
            if times:
                parts.append(f"every {name} {_range(times)} {'time' if max(times) == 1 else 'times'}")
        if never := self.times.count(0):
            parts.append(f"but {never} of {len(self.times)} never")
        share = self.dropped / max(sum(self.times), 1)
        return ", ".join(parts) + (f"; captions dropped {share:.1%}".replace("%", " %") if self.dropped else "")

    def to_json(self) -> dict[str, Any]:
        """The summary for the run's record; the file has all counts."""
        total = sum(self.times)
        return {
            "steps": self.steps,
            "samples": total,
            "images": {
                "count": len(self.times),
                "least": min(self.times),
                "most": max(self.times),
                "never": self.times.count(0),
            },
            "captions": {
                "texts": len(self.captions),
                "dropped": self.dropped,
                "dropped_share": round(self.dropped / total, 4) if total else 0.0,
            },
            "buckets": dict(self.buckets),
            "line": self.line,
        }


def _range(times: Sequence[int]) -> str:
    least, most = min(times), max(times)
    return str(least) if least == most else f"{least}–{most}"


def count_trained(plan: StepPlan, steps: int, bucket_of: BucketOf, text_of: TextOf) -> SampleCounts:
    """Walk the first `steps` steps. `bucket_of` and `text_of` are what the loader reads by."""
    times = [0] * len(plan.samples)
    captions: Counter[str] = Counter()
    buckets: Counter[str] = Counter()
    dropped = 0
    for step in range(steps):
        for ref in plan.refs(step):
            text = text_of(ref, step)
            times[ref.index] += 1
            captions[text or ""] += 1
            buckets[str(bucket_of(ref))] += 1
            dropped += text is None
    ranked = sorted(buckets.items(), key=lambda entry: (-entry[1], entry[0]))
    return SampleCounts(steps, plan.samples, tuple(times), captions, dict(ranked), dropped)


def never_trained(plan: StepPlan, released: int, trained: int) -> Finding | None:
    """The error for a LoRA that has not seen every image: that of step `released`, of a run of `trained` steps.

    Validation images are not in the plan, and regularization images need not all be seen.
    """
    images = {index for index, sample in enumerate(plan.samples) if not sample.regularization}
    waiting, times, step = set(images), 0, 0
    while waiting and step < released:
        shown = [ref.index for ref in plan.refs(step) if ref.index in images]
        waiting.difference_update(shown)
        times, step = times + len(shown), step + 1
    if not waiting:
        return None
    never, first = len(waiting), plan.samples[min(waiting)].path.name
    while waiting:
        waiting.difference_update(ref.index for ref in plan.refs(step))
        step += 1
    message = (
        f"{counted(len(images), 'image')}, {counted(times, 'sample')} trained in {counted(released, 'step')}:"
        f" {counted(never, 'image was', 'images were')} never trained (first: {first})."
    )
    fix = f"{step} steps train each at least once: set train.max_steps higher, or remove it for train.total_repeats."
    if trained >= step:
        fix = (
            f"Validation loss was lowest at step {released} of {trained}: lower optimizer.learning_rate,"
            " or set checkpoint.export_weights=last."
        )
    return Finding(NEVER_TRAINED, "error", message, fix)


def write_sample_counts(folder: Path, counts: SampleCounts) -> str:
    """Write all counts as a table of kind, times and name; its file's name. Raises OSError."""
    with (
        atomic_path(folder / FILE) as path,
        open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("kind", "times", "name"))
        for sample, count in zip(counts.samples, counts.times, strict=True):
            table.writerow(("regularization" if sample.regularization else "image", count, sample.path))
        table.writerows(("caption", count, text) for text, count in sorted(counts.captions.items()))
        table.writerows(("bucket", count, bucket) for bucket, count in counts.buckets.items())
    return FILE
