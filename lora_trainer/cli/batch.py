"""`batch ROOT`: one LoRA for each dataset folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_trainer.cli.arguments import add_run_arguments, explained, layers_from, settled
from lora_trainer.core.errors import DONE, Problem

EXAMPLES = """examples:
  lora-trainer batch ./customers --preset 12gb --model ./my-sd15 --output night
  lora-trainer batch ./customers --preset 12gb --output night --resume

A folder's own lora.toml overrides everything for that folder, flags too.
"""
NOT_HERE = {
    "data.sources": Problem("--data is not for a batch.", "The folders under ROOT are the datasets."),
    "run.name": Problem(
        "--name is not for a batch.", "Runs are named after their folders, or by [run] name in lora.toml."
    ),
}


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", nargs="?", metavar="ROOT", help="folder with one folder of images for each LoRA")
    group = parser.add_argument_group("the batch")
    group.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="jobs at once, each with its own copy of the base model (1)"
    )
    group.add_argument("--executor", default="local", metavar="local", help="where the jobs run (local)")
    add_run_arguments(parser, hidden=("--data", "--name"))  # they are refused below


def batch_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Run the batch; returns the largest exit code of its jobs. Raises UsageError for mistakes that affect all jobs."""
    problems = list(unknown)
    values = vars(arguments)
    problems.extend(problem for name, problem in NOT_HERE.items() if values[name])
    if arguments.root is None:
        problems.append(Problem("batch needs ROOT.", "For example: lora-trainer batch ./customers --preset 12gb"))
    presets, user = layers_from(arguments, problems)
    resolved = settled(presets, user, problems)
    if explained(arguments, resolved):
        return DONE
    from lora_trainer.batch.batch import BatchOrder, run_batch, show_batch
    from lora_trainer.batch.folders import Shared
    from lora_trainer.run.order import plain_console

    shared = Shared(tuple(presets), tuple(user), arguments.resume)
    order = BatchOrder(Path(arguments.root), shared, resolved, arguments.jobs, arguments.executor)
    return (show_batch if arguments.dry_run else run_batch)(order, plain_console())
