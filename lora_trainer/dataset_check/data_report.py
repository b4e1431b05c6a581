"""The gate's report on a dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import Finding, counted, printable
from lora_trainer.dataset_check.doubts import NOT_COMPARED, CaptionAgreement

if TYPE_CHECKING:
    from lora_trainer.data.buckets import Bucket
    from lora_trainer.data.images.measures import Borders
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.views import BucketPlan


@dataclass(frozen=True)
class BucketRow:
    """A bucket, its samples, and by which factors the least and most changed of them is resized; above 1 enlarged."""

    bucket: Bucket
    samples: int
    least: float
    most: float

    def to_json(self) -> dict[str, Any]:
        factors = {"least": round(self.least, 4), "most": round(self.most, 4)}
        return {"bucket": str(self.bucket), "samples": self.samples, "resized": factors}


@dataclass(frozen=True)
class DataReport:
    """The report. `files` holds every file that was read, clean ones with no findings."""

    score: float
    gate: float
    parts: dict[str, float]
    samples: tuple[Sample, ...]  # those without an error
    plan: BucketPlan  # of all samples of the manifest, in its order
    counted: int  # files that the score is a mean over
    files: dict[Path, tuple[Finding, ...]]
    general: tuple[Finding, ...]  # findings about the set as a whole
    notes: tuple[str, ...]
    groups: tuple[tuple[Path, ...], ...] = ()  # images that look the same
    kin: dict[str, str] = field(default_factory=dict)  # content -> that of the first image that looks the same
    likeness: float = 0.0  # mean correlation of two of its images, -1 to 1
    rows: tuple[BucketRow, ...] = ()
    borders: dict[Path, Borders] = field(default_factory=dict)  # of images that have any
    agreement: CaptionAgreement = NOT_COMPARED

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.general, *(finding for found in self.files.values() for finding in found))

    def name_of(self, path: Path) -> str:
        """A file's path below the folder that holds all of them, so that equal names differ."""
        try:
            return printable((path if self.root == path.anchor else path.relative_to(self.root)).as_posix())
        except ValueError:  # several drives, or no file
            return printable(str(path))

    @cached_property
    def root(self) -> str:
        """The folder that holds all files. Raises ValueError where there is none."""
        return os.path.commonpath({each.parent for each in self.files})

    @property
    def refusals(self) -> tuple[Problem, ...]:
        """Why this cannot be trained on; empty when it can. One problem for each kind of error."""
        grouped: dict[str, list[Finding]] = {}
        for finding in self.findings:
            if finding.severity == "error":
                grouped.setdefault(finding.code, []).append(finding)
        problems = [self.refusal(code, group) for code, group in grouped.items()]
        if not self.samples and not problems:
            problems.append(
                Problem("no_usable_image", "No image of the data can be used.", "Fix or replace the images.")
            )
        return tuple(problems)

    @property
    def passed(self) -> bool:
        return self.score >= self.gate and not self.refusals

    @property
    def why_refused(self) -> str:
        """In a few words: `2 errors, under the gate`."""
        errors = sum(finding.severity == "error" for finding in self.findings)
        reasons = [counted(errors, "error")] if errors else []
        reasons += ["no image that can be used"] if not self.samples else []
        reasons += ["under the gate"] if self.score < self.gate else []
        return ", ".join(reasons)

    @property
    def none_usable(self) -> str:
        """What is to be said of files of which none can be trained yet, in place of a score."""
        return f"{counted(self.counted, 'file')}, none of which can be trained as it is"

    def refusal(self, code: str, group: Sequence[Finding]) -> Problem:
        """One kind of error as a problem: how many files have it, and the first."""
        return Problem(code, self.message(code, group), group[0].fix)

    def heading(self, code: str, group: Sequence[Finding]) -> str:
        """How many files have one kind of finding: `3 of 20 files are blurred`."""
        if code == "near_duplicate":
            about = {finding.path for finding in group}
            found = [len(each) for each in self.groups if about.intersection(each)]
            one = "look the same" if len(found) == 1 else f"look the same, in {len(found)} groups"
            return f"{sum(found)} of {self.counted} files {one}"
        text = MANY.get(code, "have a finding: " + code.replace("_", " "))
        if len(group) == 1:
            for many, one in (
                ("have ", "has "),
                ("are ", "is "),
                ("list ", "lists "),
                ("look ", "looks "),
                ("show ", "shows "),
                ("begin ", "begins "),
                ("name ", "names "),
            ):
                if text.startswith(many):
                    text = one + text.removeprefix(many)
                    break
            text = text.replace("captions without", "a caption without").replace(
                "exact copies of others", "an exact copy of another"
            )
            text = text.replace("mirror images of others", "the mirror image of another")
        return f"{len(group)} of {max(self.counted, len(group))} files {text}"

    def message(self, code: str, group: Sequence[Finding]) -> str:
        """One kind of finding as a sentence: the finding itself where there is one, else how many files and the first."""
        first = group[0]
        if first.path is None:
            return first.message
        if len(group) == 1 and first.severity != "error":
            return f"{self.name_of(first.path)} {first.message}"
        return f"{self.heading(code, group)} (first: {self.name_of(first.path)} {first.message.rstrip('.')})."

    @property
    def grouped(self) -> list[tuple[str, tuple[Finding, ...]]]:
        """(code, findings) of each kind and severity, worst first, then the most frequent."""
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.severity, finding.code), []).append(finding)
        ranked = sorted(groups.items(), key=lambda each: (SEVERITIES.index(each[0][0]), -len(each[1]), each[0][1]))
        return [(code, tuple(found)) for (_, code), found in ranked]

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
            "refusals": [vars(problem) for problem in self.refusals],
            "buckets": {str(bucket): count for bucket, count in sorted(self.plan.counts.items())},
            "bucket_table": [row.to_json() for row in self.rows],
            "look_the_same": [[str(path) for path in group] for group in self.groups],
            "likeness": round(self.likeness, 4),
            "caption_agreement": self.agreement.to_json(),
            "notes": list(self.notes),
            "steps": steps,
        }


MANY = {
    "unreadable": "cannot be read",
    "too_large": "are too large",
    "cut_off": "may be cut off",
    "missing_caption": "have no caption",
    "empty_caption": "have an empty caption",
    "unreadable_caption": "have a caption that is not text",
    "bad_metadata": "list captions wrongly",
    "bad_weight": "have a weight that no loss can be multiplied by",
    "unusual_weight": "have a weight of 0 or of more than is usual",
    "damaged_tar": "are damaged",
    "mask_differs": "have a mask of another shape",
    "unreadable_mask": "have a mask that cannot be read",
    "too_small": "are far smaller than trained at",
    "foreign_format": "are in a format that is not read",
    "missing_mask": "have no mask",
    "missing_control": "have no control image",
    "unreadable_control": "have a control image that cannot be read",
    "identical_control": "are their own control image",
    "swapped_control": "are control images of others",
    "control_differs": "have a control image of another shape",
    "black_mask": "have a mask that is black everywhere",
    "white_mask": "have a mask that is white everywhere",
    "ambiguous_mask": "have a mask of which opacity or colors could be meant",
    "photo_mask": "have a mask that is an image itself",
    "dark_mask": "have a mask without white",
    "turned_mask": "have a mask that may be turned otherwise",
    "colored_mask": "have a mask in colors",
    "label_mask": "have a mask of class numbers",
    "two_masks": "have two masks",
    "shared_mask": "share a mask",
    "two_controls": "have two control images",
    "shared_control": "share a control image",
    "two_captions": "have two captions",
    "shared_caption": "share a caption",
    "no_caption_column": "have no column of captions",
    "mixed_columns": "have captions in several columns",
    "several_captions": "have several captions, of which the first is used",
    "orphan_caption": "are captions without an image",
    "absent_image": "name images that are not there",
    "garbled_caption": "have a caption with garbled letters",
    "meaningless_caption": "have a caption without a word",
    "hidden_characters": "have characters in their caption that show nothing",
    "placeholder_caption": "have a caption that was never written",
    "error_caption": "have a caption that is the error of a program",
    "numbers_caption": "have a caption that is numbers",
    "file_name_caption": "have a caption that is the name of a file",
    "refusal_caption": "have a caption in which a model refuses",
    "url_caption": "have a caption with an address on the web",
    "parameters_caption": "have a caption with parameters of a generated image",
    "markup_caption": "have a caption with markup or code",
    "chat_caption": "have a caption in which a model speaks to its user",
    "looping_caption": "have a caption that repeats itself",
    "cut_off_caption": "have a caption that ends in the middle of a sentence",
    "escaped_brackets": "have a caption with backslashes before brackets",
    "literal_weights": "have a caption with weights that are not read",
    "literal_wildcards": "have a caption with choices that are not read",
    "literal_trigger": "have a caption with a placeholder that is not read",
    "literal_syntax": "have a caption with what only another program reads",
    "doubtful_caption": "have a caption that another image's suits better",
    "random_caption": "have a caption of random letters",
    "unread_caption": "have a caption that the text encoder hardly reads",
    "long_caption": "have a caption longer than the model reads",
    "upscaled": "are smaller than trained at",
    "cropped": "are cut down to less than half",
    "duplicate": "are exact copies of others",
    "mirrored": "are mirror images of others",
    "series": "begin a series of images that hardly change",
    "collage": "are several images side by side, or may be",
    "text_on_image": "show text",
    "screenshot": "are screenshots of a phone",
    "uniform": "are nearly one color",
    "transparent": "are transparent in part, or translucent",
    "white_on_white": "are white where they meet their transparent background",
    "blurred": "are blurred",
    "motion_blur": "are blurred by motion",
    "noisy": "are noisy",
    "pixelated": "are enlarged without smoothing",
    "posterized": "have only four levels in each color channel",
    "underexposed": "are nearly black",
    "overexposed": "have large burnt-out areas",
    "over_compressed": "are compressed too far",
    "border": "have a border of one color",
    "animated": "have several frames",
    "dark_depth": "use a small part of their 16 bits",
    "damaged_profile": "have a color profile that cannot be used",
    "wrong_ending": "have the ending of another format",
}
SEVERITIES = ("error", "warning", "note")
