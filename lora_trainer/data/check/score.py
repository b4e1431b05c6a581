"""The score: arithmetic on findings. Formula and proof stand in docs/scores.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_trainer.core.findings import Finding
from lora_trainer.data.sample import Sample

FACTORS = {"error": 0.0, "warning": 0.85, "note": 1.0}
ENOUGH_PICTURES = 5
PAIR_COST = 0.2  # of one file's share
UNCHARGED = frozenset({"near_duplicate"})  # counted by `variety` instead


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
    """(score, parts). `found` holds each check's findings, `paths` the files that count, `pairs` of them look the same."""
    count = max(1, len(paths))
    factors = {name: _factors(group, paths) for name, group in found.items()}
    worth = dict.fromkeys(paths, 1.0)
    for each in factors.values():
        for path, factor in each.items():
            worth[path] *= factor
    enough, variety = _enough(samples, files), 1.0 - PAIR_COST * pairs / count
    parts = {name: 1.0 + sum(factor - 1.0 for factor in each.values()) / count for name, each in factors.items()}
    score = enough * variety * sum(worth.values()) / count if paths else 0.0
    return score, parts | {"variety": variety, "count": enough}


def _factors(found: Sequence[Finding], paths: Sequence[Path]) -> dict[Path, float]:
    """The worst factor that a check's findings give to each file that it names."""
    factors: dict[Path, float] = {}
    counted = frozenset(paths)
    for finding in found:
        if finding.path in counted and finding.code not in UNCHARGED:
            factors[finding.path] = min(factors.get(finding.path, 1.0), FACTORS[finding.severity])
    return factors


def _enough(samples: Sequence[Sample], files: dict[Path, tuple[Finding, ...]]) -> float:
    """Regularisation pictures teach nothing new and do not count."""
    learned = [sample for sample in samples if not sample.regularisation]
    usable = len({sample.content for sample in learned if not has_error(files[sample.path])})
    return 0.0 if usable == 0 else min(1.0, 0.5 + 0.1 * usable)
