"""The score: arithmetic on findings. Formula and proof are in docs/scores.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lora_trainer.core.findings import Finding
from lora_trainer.data.sample import Sample

FACTORS = {"error": 0.0, "warning": 0.85, "note": 1.0}
ENOUGH_IMAGES = 5
PAIR_COST = 0.2  # of one file's share
COMMON_COST = 0.25  # of the whole score, for a fault that every file has
CUT_SHORT = frozenset({"damaged_tar"})  # files that hold samples, of which some are lost
UNCHARGED = frozenset({"near_duplicate"})  # counted by `variety` instead
# A good set may have these throughout: enlarged as far as it may be, and copies, which train as repeats do.
MAY_BE_COMMON = frozenset({"upscaled", "duplicate"})


def by_file(samples: Sequence[Sample], findings: Sequence[Finding]) -> dict[Path, tuple[Finding, ...]]:
    """Every file that is a sample or has a finding, sorted by path."""
    named: dict[Path, list[Finding]] = {sample.path: [] for sample in samples}
    for finding in findings:
        if finding.path is not None:
            named.setdefault(finding.path, []).append(finding)
    return {path: tuple(named[path]) for path in sorted(named)}


def has_error(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def score_of(
    found: dict[str, list[Finding]],
    paths: Sequence[Path],
    samples: Sequence[Sample],
    files: dict[Path, tuple[Finding, ...]],
    pairs: int,
) -> tuple[float, dict[str, float]]:
    """(score, parts). `found` holds each check's findings, `paths` the files that count, `pairs` of them look the same.

    A file that holds samples and is cut short counts as one more, as good as the mean of all, with its warning:
    so it lowers the score of any set.
    """
    count = max(1, len(paths))
    factors = {name: _factors(group, paths) for name, group in found.items()}
    worth = dict.fromkeys(paths, 1.0)
    for each in factors.values():
        for path, factor in each.items():
            worth[path] *= factor
    enough, variety = _enough(samples, files), 1.0 - PAIR_COST * pairs / count
    common = 1.0 - COMMON_COST * common_share(found, paths, files) ** 2
    wholes = {name: _whole(group, paths) for name, group in found.items()}
    parts = {
        name: wholes[name] * (1.0 + sum(factor - 1.0 for factor in each.values()) / count)
        for name, each in factors.items()
    }
    mean = sum(worth.values()) / count * math.prod(wholes.values())
    score = enough * variety * common * mean if paths else 0.0
    return score, parts | {"variety": variety, "count": enough, "common": common}


def common_share(
    found: dict[str, list[Finding]], paths: Sequence[Path], files: dict[Path, tuple[Finding, ...]]
) -> float:
    """The share of the files that the most frequent fault has, one warning of each file that a check warns of.

    Files with an error count with every fault: breaking a file that has one makes the fault no rarer.
    """
    broken = {path for path in paths if has_error(files[path])}
    counted = frozenset(paths)
    faulty = [
        {
            finding.path
            for finding in group
            if finding.severity == "warning" and finding.code not in UNCHARGED | MAY_BE_COMMON
        }
        & counted
        for group in found.values()
    ]
    return max((len(each | broken) for each in faulty), default=0) / max(1, len(paths))


def _whole(found: Sequence[Finding], paths: Sequence[Path]) -> float:
    """The part of a mean over `paths` that files which a check finds cut short leave."""
    cut = {finding.path for finding in found if finding.code in CUT_SHORT} - set(paths)
    return 1.0 - (1.0 - FACTORS["warning"]) * len(cut) / max(1, len(paths) + len(cut))


def _factors(found: Sequence[Finding], paths: Sequence[Path]) -> dict[Path, float]:
    """The worst factor that a check's findings give to each file that it names."""
    factors: dict[Path, float] = {}
    counted = frozenset(paths)
    for finding in found:
        if finding.path in counted and finding.code not in UNCHARGED:
            factors[finding.path] = min(factors.get(finding.path, 1.0), FACTORS[finding.severity])
    return factors


def _enough(samples: Sequence[Sample], files: dict[Path, tuple[Finding, ...]]) -> float:
    """Regularization images teach nothing new and do not count."""
    learned = [sample for sample in samples if not sample.regularization]
    usable = len({sample.content for sample in learned if not has_error(files[sample.path])})
    return 0.0 if usable == 0 else min(1.0, 0.5 + 0.1 * usable)
