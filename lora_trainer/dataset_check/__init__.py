"""The dataset gate: what is wrong with a dataset, and one score in [0, 1].

    score = enough × 0.8 ^ (faults per file)

A fault counts 1 over the share of the files at which it alone is just accepted (score.py has the table): blur in 30 % of
them, an error in 10 %. So a fault in few files warns and one in most refuses. `enough` is 1 from five distinct usable images
on and 0.5 + 0.1 n below (0 without any). docs/scores.md has the proof that breaking one more file never raises the score.

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
