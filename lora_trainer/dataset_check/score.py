"""The score: arithmetic on findings. Formula and proof are in docs/scores.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_trainer.core.findings import Finding
    from lora_trainer.data.sample import Sample

LINE = 0.8  # the score of a dataset with one fault in just the share of its files that is accepted
# The largest accepted share of the files with a warning, by its code; one above 1 never refuses a dataset alone.
SHARES = {
    "damaged_tar": 0.2,  # files that hold samples, of which some are lost
    "uniform": 0.2,
    "black_mask": 0.25,
    "garbled_caption": 0.25,
    "meaningless_caption": 0.25,
    "placeholder_caption": 0.25,
    "file_name_caption": 0.25,
    "refusal_caption": 0.25,
    "url_caption": 0.25,
    "parameters_caption": 0.25,
    "markup_caption": 0.25,
    "error_caption": 0.25,
    "numbers_caption": 0.25,
    "escaped_brackets": 1.25,  # the words are all there
    "literal_weights": 1.25,
    "literal_wildcards": 1.25,
    "literal_trigger": 1.25,
    "literal_syntax": 1.25,
    "random_caption": 0.25,
    "unread_caption": 0.25,
    "doubtful_caption": 0.3,
    "blurred": 0.3,
    "collage": 0.3,
    "over_compressed": 0.4,
    "border": 0.5,
    "cropped": 0.5,
    "near_duplicate": 0.5,  # both images of each pair count
    "duplicate": 0.45,  # every image twice is half of the images
    "upscaled": 1.25,  # as far as it is allowed
}
OTHER_SHARE = 0.3
ERROR_SHARE = 0.1
LEAST_SHARE = 0.2  # of a file with several warnings: half as bad as an error
ENOUGH_IMAGES = 5
PAIRED = "near_duplicate"  # named once for each group: the pairs are counted instead
CUT_SHORT = "damaged_tar"


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
    """(score, parts), each in [0, 1]. `found` holds each check's findings, `paths` the files that count, `pairs` of them
    look the same. A part is the score that the dataset would have if nothing but this check had found anything.
    """
    count = max(1, len(paths))
    lost = {each.path for group in found.values() for each in group if each.code == CUT_SHORT} - set(paths)
    cut = len(lost) / (count + len(lost)) / SHARES[CUT_SHORT]
    similar = 2 * pairs / count / SHARES[PAIRED]
    enough = _enough(samples, files)
    parts = {}
    for name, group in found.items():
        own = by_file((), group)
        tars = cut if any(each.code == CUT_SHORT for each in group) else 0.0
        parts[name] = _worth(sum(faults(own.get(path, ())) for path in paths) / count + tars)
    whole = sum(faults(files[path]) for path in paths) / count + cut + similar
    score = enough * _worth(whole) if paths else 0.0
    return score, parts | {"variety": _worth(similar), "count": enough}


def faults(findings: Sequence[Finding]) -> float:
    """How bad one file is: the share of such files at which a dataset is just accepted is one over this."""
    if has_error(findings):
        return 1.0 / ERROR_SHARE
    codes = {finding.code for finding in findings if finding.severity == "warning"} - {PAIRED}
    return min(1.0 / LEAST_SHARE, math.fsum(1.0 / SHARES.get(code, OTHER_SHARE) for code in codes))


def _worth(faults_per_file: float) -> float:
    """`LINE` for 1, less for more. Rounded, so that six of twenty files are exactly 0.3 of them."""
    return float(round(LINE**faults_per_file, 9))


def _enough(samples: Sequence[Sample], files: dict[Path, tuple[Finding, ...]]) -> float:
    """Regularization images teach nothing new and do not count."""
    learned = [sample for sample in samples if not sample.regularization]
    usable = len({sample.content for sample in learned if not has_error(files[sample.path])})
    return 0.0 if usable == 0 else min(1.0, 0.5 + 0.1 * usable)
