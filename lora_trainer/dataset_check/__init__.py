"""The dataset gate: what is wrong with a dataset, and one score in [0, 1].

    score = enough × variety × common × mean over files of (product of the file's findings)

The files are the samples, and whatever should have been one and is not. An error counts
0, a warning 0.85, a note 1, each check at most once per file: a set with half its files
broken scores at most 0.5. `enough` is 1 from five distinct usable images on and
0.5 + 0.1 n below (0 without any). `variety` is 1 − 0.2 × pairs / files, where images
that look the same are paired off. `common` is 1 − 0.25 × share² of the most frequent fault: what most
files have is learned as part of the subject. docs/scores.md has the proof that breaking one more
file never raises the score.

To add a check: one function `(CheckContext) -> list[Finding]` and one entry in CHECKS.
"""

from lora_trainer.dataset_check.caption_checks import estimate_tokens
from lora_trainer.dataset_check.checks import CHECKS, DatasetGate, check_dataset
from lora_trainer.dataset_check.context import CheckContext
from lora_trainer.dataset_check.data_report import BucketRow, DataReport
from lora_trainer.dataset_check.whole_set import check_buckets, check_plan

__all__ = [
    "CHECKS",
    "BucketRow",
    "CheckContext",
    "DataReport",
    "DatasetGate",
    "check_buckets",
    "check_dataset",
    "check_plan",
    "estimate_tokens",
]
