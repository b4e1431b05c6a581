"""The list of checks, and the report on a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.data.alike import Alike, find_alike
from lora_trainer.data.images.decode import measure_images
from lora_trainer.data.images.measures import Seen
from lora_trainer.data.views import BucketPlan, Framing, plan_views
from lora_trainer.dataset_check.caption_checks import check_captions
from lora_trainer.dataset_check.context import Check, CheckContext
from lora_trainer.dataset_check.data_report import BucketRow, DataReport
from lora_trainer.dataset_check.image_checks import (
    check_borders,
    check_compression,
    check_contents,
    check_distinct,
    check_formats,
    check_pixels,
    check_readable,
    check_sharpness,
    check_sizes,
)
from lora_trainer.dataset_check.repeated import check_repeated
from lora_trainer.dataset_check.score import by_file, has_error, score_of
from lora_trainer.dataset_check.whole_set import check_count, check_variety, likeness_of

if TYPE_CHECKING:
    from lora_trainer.config.schema import CaptionsSection
    from lora_trainer.core.findings import Finding
    from lora_trainer.data.buckets import Bucket
    from lora_trainer.data.images.workers import Progress
    from lora_trainer.data.sample import Manifest, Sample

HEADERS_ONLY = "only headers and captions were checked; check without --quick decodes the images, too."

CHECKS: dict[str, Check] = {
    "readable": check_readable,
    "captions": check_captions,
    "sizes": check_sizes,
    "distinct": check_distinct,
    "contents": check_contents,
    "sharpness": check_sharpness,
    "pixels": check_pixels,
    "compression": check_compression,
    "borders": check_borders,
    "formats": check_formats,
    "variety": check_variety,
    "repeated": check_repeated,
    "count": check_count,
}


@dataclass(frozen=True)
class DatasetGate:
    """What a dataset is checked against: the settings that it will be trained with, and the least score.

    `framings` and `rules` are the image and caption settings of each source; `caption_limit` is in tokens with start and
    end; `learned_tokens` must be in captions, each as `num_vectors` tokens. `known_words` are frequent words in lower case, by which captions of random letters are found;
    none are where it is empty. `count_tokens` returns how many tokens a text encoder makes of a text; where it is None, captions
    in any script count as read.
    """

    framings: Sequence[Framing]
    allow_upscale: bool = False
    caption_limit: int | None = None
    rules: Sequence[CaptionsSection] = ()
    learned_tokens: Sequence[str] = ()
    num_vectors: int = 1
    minimum: float = 0.8
    known_words: frozenset[str] = frozenset()
    count_tokens: Callable[[str], int] | None = None


def check_dataset(
    manifest: Manifest,
    read_findings: Sequence[Finding],
    gate: DatasetGate,
    *,
    decode: bool = True,
    progress: Progress | None = None,
) -> DataReport:
    """Decode every image and check the dataset. Without `decode` only headers and captions are checked, and a note
    says so.
    """
    samples = manifest.samples
    plan = plan_views(samples, gate.framings)
    seen = measure_images(samples, progress) if decode else (Seen(),) * len(samples)
    alike = alike_of(samples, seen) if decode else Alike((), (), 0)
    context = CheckContext(
        samples,
        plan.fits,
        tuple(gate.framings),
        seen,
        tuple(read_findings),
        alike,
        gate.allow_upscale,
        gate.caption_limit,
        tuple(gate.rules),
        tuple(gate.learned_tokens),
        gate.num_vectors,
        gate.known_words,
        gate.count_tokens,
        measure_masks(samples) if decode else {},
    )
    found = {name: check(context) for name, check in CHECKS.items()}
    everything = [finding for group in found.values() for finding in group]
    files = by_file(samples, everything)
    places = frozenset(sample.path for sample in samples)
    paths = [path for path, found_here in files.items() if path in places or has_error(found_here)]
    score, parts = score_of(found, paths, samples, files, alike.pairs)
    return DataReport(
        score=score,
        gate=gate.minimum,
        parts=parts,
        samples=tuple(sample for sample in samples if not has_error(files[sample.path])),
        plan=plan,
        counted=len(paths),
        files=files,
        general=tuple(finding for finding in everything if finding.path is None),
        notes=manifest.notes if decode else (*manifest.notes, HEADERS_ONLY),
        groups=groups_of(samples, alike),
        kin={samples[place].content: samples[leader].content for place, leader in alike.leaders.items()},
        likeness=likeness_of(context),
        rows=bucket_rows(samples, plan),
        borders={sample.path: each.borders for sample, each in zip(samples, seen, strict=True) if each.borders},
    )


def measure_masks(samples: Sequence[Sample]) -> dict[str, Seen]:
    """The measures of mask files, by their content."""
    files = {
        sample.mask.content: replace(
            sample, path=sample.mask.path, content=sample.mask.content, span=sample.mask.span, mask=None
        )
        for sample in samples
        if sample.mask is not None and sample.mask.path is not None
    }
    return dict(zip(files, measure_images(list(files.values()), are_masks=True), strict=True))


def alike_of(samples: Sequence[Sample], seen: Sequence[Seen]) -> Alike:
    """Which samples look the same; copies of one file are compared once, by the first's place."""
    first: dict[str, int] = {}
    for place, sample in enumerate(samples):
        first.setdefault(sample.content, place)
    places = list(first.values())
    found = find_alike([seen[place] for place in places])
    return Alike(
        tuple(tuple(places[each] for each in group) for group in found.groups),
        tuple((places[one], places[other]) for one, other in found.mirrored),
        found.pairs,
    )


def groups_of(samples: Sequence[Sample], alike: Alike) -> tuple[tuple[Path, ...], ...]:
    """Files that look the same: exact copies, near ones, and copies of those."""
    leader = {samples[place].content: samples[group[0]].content for group in alike.groups for place in group}
    groups: dict[str, dict[Path, None]] = {}
    for sample in samples:
        groups.setdefault(leader.get(sample.content, sample.content), {})[sample.path] = None
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def bucket_rows(samples: Sequence[Sample], plan: BucketPlan) -> tuple[BucketRow, ...]:
    """Each bucket with its samples and what they are resized by, the fullest first."""
    factors: dict[Bucket, list[float]] = {}
    for sample, views in zip(samples, plan.views, strict=True):
        for bucket in {view.fit.bucket for view in views}:
            factors.setdefault(bucket, []).append(max(bucket.width / sample.width, bucket.height / sample.height))
    rows = [BucketRow(bucket, len(found), min(found), max(found)) for bucket, found in factors.items()]
    return tuple(sorted(rows, key=lambda row: (-row.samples, row.bucket)))
