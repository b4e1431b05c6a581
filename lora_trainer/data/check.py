"""The dataset gate: what is wrong with a data set, and one score in [0, 1].

    score = enough × mean over files of (product of the file's findings)

The files are the samples, and whatever should have been one and is not. An error counts
0, a warning 0.85, a note 1, each check at most once per file: a set with half its files
broken scores at most 0.5. `enough` is 1 from five distinct usable pictures on and
0.5 + 0.1 n below (0 without any). Breaking one more file never raises the score: the
file's own term falls to 0, and the most that another can gain is one warning (a copy of
the broken file is a copy no longer), which is less than the file lost.

`parts` gives for each check the mean of its own factor over the files, and for `count`
the value of `enough`, so the score is never above any part.

To add a check: one function `(Looked) -> list[Finding]` and one entry in CHECKS.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import Finding
from lora_trainer.data.buckets import Fit
from lora_trainer.data.images import ENDINGS_OF_FORMAT
from lora_trainer.data.look import look_at
from lora_trainer.data.measures import Seen
from lora_trainer.data.sample import Manifest, Sample
from lora_trainer.data.views import BucketPlan, Framing, plan_views
from lora_trainer.data.workers import Progress

FACTORS = {"error": 0.0, "warning": 0.85, "note": 1.0}
ENOUGH_PICTURES = 5
UPSCALE_LIMIT = 2.0  # enlarged further, a picture teaches its own blur
CROP_LIMIT = 0.5  # less of the picture than this is left by the crop
UNIFORM_SPREAD = 2.0  # standard deviation of grey values, 0 to 255


@dataclass(frozen=True)
class Looked:
    """All that checks may look at. `fits` and `seen` stand in the order of the samples."""

    samples: tuple[Sample, ...]
    fits: tuple[Fit, ...]
    framings: tuple[Framing, ...]  # of each source
    seen: tuple[Seen, ...]
    read_findings: tuple[Finding, ...]
    allow_upscale: bool
    caption_limit: int | None


@dataclass(frozen=True)
class DataReport:
    """The verdict. `files` holds every file that was read, clean ones with no findings."""

    score: float
    gate: float
    parts: dict[str, float]
    samples: tuple[Sample, ...]  # those without an error
    plan: BucketPlan  # of all samples of the manifest, in its order
    counted: int  # files that the score is a mean over
    files: dict[Path, tuple[Finding, ...]]
    general: tuple[Finding, ...]  # findings about the set as a whole
    notes: tuple[str, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.general, *(finding for found in self.files.values() for finding in found))

    def name_of(self, path: Path) -> str:
        """A file's path below the folder that holds all that were read, so that equal names can be told apart."""
        try:
            return path.relative_to(os.path.commonpath([each.parent for each in self.files])).as_posix()
        except ValueError:  # several drives, or no file
            return str(path)

    @property
    def refusals(self) -> tuple[Problem, ...]:
        """Why this cannot be trained on; empty when it can. One problem for each kind of error."""
        grouped: dict[str, list[Finding]] = {}
        for finding in self.findings:
            if finding.severity == "error":
                grouped.setdefault(finding.code, []).append(finding)
        problems = [self.refusal(code, group) for code, group in grouped.items()]
        if not self.samples:
            problems.append(Problem("No picture of the data can be used.", "Mend or replace the pictures."))
        return tuple(problems)

    @property
    def passed(self) -> bool:
        return self.score >= self.gate and not self.refusals

    def refusal(self, code: str, group: Sequence[Finding]) -> Problem:
        """One kind of error as a problem: how many files have it, and the first."""
        if group[0].path is None:
            return Problem(group[0].message, group[0].fix)
        text = MANY.get(code, "have an error: " + code.replace("_", " "))
        first = f"(first: {self.name_of(group[0].path)} {group[0].message.rstrip('.')})"
        if len(group) == 1:
            text = text.replace("have ", "has ", 1).replace("are ", "is ", 1).replace("list ", "lists ", 1)
        return Problem(f"{len(group)} of {self.counted} files {text} {first}.", group[0].fix)

    def to_json(self, steps: dict[str, Any]) -> dict[str, Any]:
        """The document of `check --json`; `steps` is the step arithmetic."""
        return {
            "score": round(self.score, 6),
            "passed": self.passed,
            "gate": self.gate,
            "samples": len(self.samples),
            "parts": {name: round(value, 6) for name, value in self.parts.items()},
            "files": [
                {"path": str(path), "findings": [finding.to_json() for finding in found]}
                for path, found in self.files.items()
            ],
            "findings": [finding.to_json() for finding in self.general],
            "refusals": [{"message": problem.message, "fix": problem.fix} for problem in self.refusals],
            "buckets": {str(bucket): count for bucket, count in sorted(self.plan.counts.items())},
            "notes": list(self.notes),
            "steps": steps,
        }


MANY = {
    "unreadable": "cannot be read",
    "too_large": "are too large",
    "missing_caption": "have no caption",
    "empty_caption": "have an empty caption",
    "unreadable_caption": "have a caption that is not text",
    "bad_metadata": "list captions wrongly",
    "bad_weight": "have a weight that no loss can be multiplied by",
    "damaged_tar": "are damaged",
    "mask_differs": "have a mask of another shape",
    "unreadable_mask": "have a mask that cannot be read",
    "too_small": "are far smaller than they would be trained at",
}


def check_dataset(
    manifest: Manifest,
    read_findings: Sequence[Finding],
    *,
    framings: Sequence[Framing],
    allow_upscale: bool = False,
    caption_limit: int | None = None,
    gate: float = 0.8,
    progress: Progress | None = None,
) -> DataReport:
    """Decode every picture and judge the set. `framings` says of each source how it is
    trained, `caption_limit` is in tokens with start and end.
    """
    plan = plan_views(manifest.samples, framings)
    seen = look_at(manifest.samples, progress)
    looked = Looked(
        manifest.samples, plan.fits, tuple(framings), seen, tuple(read_findings), allow_upscale, caption_limit
    )
    found = {name: check(looked) for name, check in CHECKS.items()}
    everything = [finding for group in found.values() for finding in group]
    files = _by_file(manifest.samples, everything)
    places = frozenset(sample.path for sample in manifest.samples)
    paths = [path for path, found_here in files.items() if path in places or _has_error(found_here)]
    return DataReport(
        score=_score(found, paths, manifest.samples, files),
        gate=gate,
        parts=_parts(found, paths) | {"count": _enough(manifest.samples, files)},
        samples=tuple(sample for sample in manifest.samples if not _has_error(files[sample.path])),
        plan=plan,
        counted=len(paths),
        files=files,
        general=tuple(finding for finding in everything if finding.path is None),
        notes=manifest.notes,
    )


def _by_file(samples: Sequence[Sample], findings: Sequence[Finding]) -> dict[Path, tuple[Finding, ...]]:
    """Every file that is a sample or has a finding, sorted by path."""
    named: dict[Path, list[Finding]] = {sample.path: [] for sample in samples}
    for finding in findings:
        if finding.path is not None:
            named.setdefault(finding.path, []).append(finding)
    return {path: tuple(named[path]) for path in sorted(named)}


def _has_error(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def _factors(found: Sequence[Finding], paths: Sequence[Path]) -> dict[Path, float]:
    factors = dict.fromkeys(paths, 1.0)
    for finding in found:
        if finding.path in factors:
            factors[finding.path] = min(factors[finding.path], FACTORS[finding.severity])
    return factors


def _parts(found: dict[str, list[Finding]], paths: Sequence[Path]) -> dict[str, float]:
    count = max(1, len(paths))
    return {name: sum(_factors(group, paths).values()) / count for name, group in found.items()}


def _enough(samples: Sequence[Sample], files: dict[Path, tuple[Finding, ...]]) -> float:
    learned = [sample for sample in samples if not sample.regularisation]
    usable = len({sample.content for sample in learned if not _has_error(files[sample.path])})
    return 0.0 if usable == 0 else min(1.0, 0.5 + 0.1 * usable)


def _score(
    found: dict[str, list[Finding]],
    paths: Sequence[Path],
    samples: Sequence[Sample],
    files: dict[Path, tuple[Finding, ...]],
) -> float:
    if not paths:
        return 0.0
    worth = dict.fromkeys(paths, 1.0)
    for group in found.values():
        for path, factor in _factors(group, paths).items():
            worth[path] *= factor
    return _enough(samples, files) * sum(worth.values()) / len(paths)


READING_CODES = {
    "unreadable",
    "too_large",
    "damaged_tar",
    "two_pictures",
    "missing_mask",
    "mask_differs",
    "unreadable_mask",
}


def _readable(looked: Looked) -> list[Finding]:
    read = [finding for finding in looked.read_findings if finding.code in READING_CODES]
    foreign = [finding for finding in looked.read_findings if finding.code == "foreign_format"]
    broken = []
    for sample, seen in zip(looked.samples, looked.seen, strict=True):
        if seen.broken is not None:
            code, message, fix = seen.broken
            broken.append(Finding(code, "error", message, fix, path=sample.path))
    return [*read, *foreign, *broken]


CAPTION_CODES = {
    "missing_caption", "empty_caption", "unreadable_caption", "two_captions", "orphan_caption",
    "bad_metadata", "bad_weight", "absent_picture",
}  # fmt: skip


def _captions(looked: Looked) -> list[Finding]:
    found = [finding for finding in looked.read_findings if finding.code in CAPTION_CODES]
    if looked.caption_limit is not None:
        for sample in looked.samples:
            tokens = estimate_tokens(sample.caption)
            if tokens > looked.caption_limit:
                message = f"has a caption of about {tokens} tokens; the model reads {looked.caption_limit}."
                found.append(
                    Finding("long_caption", "note", message, "Shorten it; what matters first.", path=sample.path)
                )
    captions = {sample.caption for sample in looked.samples if not sample.regularisation}
    if len(looked.samples) > 1 and len(captions) == 1 and captions != {""}:
        message = f"All {len(looked.samples)} pictures have the same caption."
        fix = "Fine for one subject; varied captions keep surroundings apart from it."
        found.append(Finding("same_caption", "note", message, fix))
    return found


def estimate_tokens(caption: str) -> int:
    """About how many tokens a CLIP tokenizer makes of a caption, with start and end.

    Words of up to eight letters are mostly one token, longer ones one more for each five
    letters; letters outside Latin are about one each.
    """
    words = re.findall(r"\w+|[^\w\s]", caption)
    return 2 + sum(1 + max(0, len(word) - 4) // 5 if word.isascii() else len(word) for word in words)


def _sizes(looked: Looked) -> list[Finding]:
    found = []
    for sample, fit in zip(looked.samples, looked.fits, strict=True):
        factor = fit.scale_from(sample.width, sample.height)
        size = f"{sample.width}×{sample.height}"
        framing = looked.framings[sample.source]
        if framing.no_upscale and min(sample.width, sample.height) < framing.step:
            message = (
                f"is {size}; a bucket's sides are at least {framing.step} px, and data.no_upscale enlarges nothing."
            )
            fix = "Remove such pictures, or set data.no_upscale=false."
            found.append(Finding("too_small", "error", message, fix, path=sample.path))
        elif factor > 1.0:
            message = f"is {size}, smaller than {fit.bucket}; enlarged {factor:.2f} times."
            fix = "Replace it by a larger one, remove it, or set data.resolution lower."
            severe = factor > UPSCALE_LIMIT and not looked.allow_upscale
            if severe:
                fix = "Remove such pictures, set data.resolution lower, or set data.allow_upscale=true."
            code = "too_small" if severe else "upscaled"
            found.append(Finding(code, "error" if severe else "warning", message, fix, path=sample.path))
        if fit.kept < CROP_LIMIT:
            message = f"is {size}; the crop to {fit.bucket} keeps {fit.kept:.0%} of it."
            fix = "Crop it by hand, or set data.max_aspect higher."
            found.append(Finding("cropped", "warning", message, fix, path=sample.path))
    return found


def beside(other: Path, path: Path) -> str:
    """How a file is named from where another lies: its name alone in the same folder."""
    try:
        return Path(os.path.relpath(other, path.parent)).as_posix()
    except ValueError:  # on another drive
        return str(other)


def _distinct(looked: Looked) -> list[Finding]:
    first: dict[str, Sample] = {}
    found = []
    for sample in looked.samples:
        original = first.setdefault(sample.content, sample)
        # The same picture in two sources is one that is trained twice on purpose.
        if original is not sample and (original.path, original.span) != (sample.path, sample.span):
            message = f"is the same file as {beside(original.path, sample.path)}."
            fix = "Remove one; to weigh pictures use folders such as 10_name."
            found.append(Finding("duplicate", "warning", message, fix, path=sample.path))
    return found


def _contents(looked: Looked) -> list[Finding]:
    found = []
    for sample, seen in zip(looked.samples, looked.seen, strict=True):
        if seen.broken is None and seen.spread < UNIFORM_SPREAD:
            message = f"is nearly one colour (spread {seen.spread:.1f} of 255)."
            found.append(Finding("uniform", "warning", message, "Remove it unless it is meant.", path=sample.path))
    return found


def _formats(looked: Looked) -> list[Finding]:
    found = []
    for sample, seen in zip(looked.samples, looked.seen, strict=True):
        if seen.broken is not None:
            continue
        if seen.frames > 1:
            message = f"has {seen.frames} frames; only the first is used."
            found.append(Finding("animated", "note", message, "Save the frame that is meant.", path=sample.path))
        if sample.path.suffix.lower() not in ENDINGS_OF_FORMAT.get(seen.format, ()):
            message = f"is a {seen.format} file, whatever its ending says."
            found.append(Finding("wrong_ending", "note", message, "Rename it.", path=sample.path))
    return found


def _count(looked: Looked) -> list[Finding]:
    distinct = len({sample.content for sample in looked.samples if not sample.regularisation})
    if 0 < distinct < ENOUGH_PICTURES:
        message = f"There are {distinct} distinct pictures; {ENOUGH_PICTURES} are the least that train well."
        return [Finding("few_pictures", "warning", message, "Add pictures.")]
    return []


CHECKS: dict[str, Callable[[Looked], list[Finding]]] = {
    "readable": _readable,
    "captions": _captions,
    "sizes": _sizes,
    "distinct": _distinct,
    "contents": _contents,
    "formats": _formats,
    "count": _count,
}
