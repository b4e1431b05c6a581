"""`batch ROOT`: one LoRA for each dataset folder. `batch work|status|cancel|retry`: another worker, and its jobs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lora_trainer.cli.arguments import add_run_arguments, explained, layers_from, settled
from lora_trainer.core.errors import DONE, Problem, UsageError, nearest
from lora_trainer.core.findings import printable

EXAMPLES = """examples:
  lora-trainer batch ./customers --preset 12gb --model ./my-sd15 --output night
  lora-trainer batch ./customers --preset 12gb --output night --together 4
  lora-trainer batch --configs rank8.toml rank32.toml --output night
  lora-trainer batch ./customers --preset 12gb --output night --resume
  lora-trainer batch status night --json
  lora-trainer batch cancel night ash birch
  lora-trainer batch retry night

On a cluster, 8 jobs at once (docs/deploy.md):
  lora-trainer batch ./customers --preset 12gb --output night --executor ray \\
      --jobs 8
  lora-trainer batch ./customers --preset 12gb --output night --executor slurm \\
      --executor-option partition=gpu --executor-option time=04:00:00 --jobs 8

Workers on several machines that share a folder:
  lora-trainer batch ./customers --preset 12gb --output night --jobs 0
  lora-trainer batch work night

A folder's own lora.toml overrides everything for that folder, flags too.
"""
ACTIONS = ("work", "status", "cancel", "retry")
NAMES = ("cancel", "retry")  # take names of jobs
NOT_HERE = {
    "data.sources": Problem(
        "flag_not_for_command", "--data is not for a batch.", "The folders under ROOT are the datasets."
    ),
    "run.name": Problem(
        "flag_not_for_command",
        "--name is not for a batch.",
        "Runs are named after their folders, by [run] name in lora.toml, or after their config files.",
    ),
}


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "root",
        nargs="?",
        metavar="ROOT",
        help="folder with one folder of images for each LoRA; `work` takes jobs of the batch in FOLDER until none "
        "waits, `status` shows them, `cancel` stops some, `retry` runs some again",
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=Path, help="of these: the batch's --output")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="cancel, retry: jobs; retry without names takes all that failed, were refused or cancelled",
    )
    group = parser.add_argument_group("the batch")
    group.add_argument(
        "--configs",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="one LoRA for each config file, in place of ROOT; each names its data, and the run has the file's name",
    )
    group.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="jobs at once, each with its own copy of the base model (1); 0 only fills the queue for `work`",
    )
    group.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="K",
        help="LoRAs that each of these trains at once on one base model, whose layers run once for all of them (1)",
    )
    group.add_argument("--json", action="store_true", help="status: one JSON document on stdout")
    group.add_argument(
        "--executor",
        default="local",
        metavar="NAME",
        help="where the jobs run: local, or on a cluster with ray or slurm, one task for each job (local)",
    )
    group.add_argument(
        "--executor-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the executor, several times if needed: ray: address, gpus, cpus; slurm: those of sbatch",
    )
    group.add_argument(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="attempts at a job whose training failed, after the first: 1, 2, 4, … minutes later (0)",
    )
    group.add_argument("--job", metavar="NAME", help="work: this job alone, once; exits with its code")
    add_run_arguments(parser, hidden=("--data", "--name"))  # they are refused below


def batch_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Run the batch; returns the largest exit code of its jobs. Raises UsageError for mistakes that affect all jobs."""
    if arguments.root in ACTIONS:
        return queue_command(arguments, unknown)
    problems = list(unknown)
    values = vars(arguments)
    if arguments.folder is not None:
        problems.append(
            Problem("unknown_action", f"Unknown action {arguments.root}.", nearest(arguments.root, ACTIONS))
        )
    refused = NOT_HERE.keys() - ({"data.sources"} if arguments.configs else set())  # several configs of one dataset
    problems.extend(problem for name, problem in NOT_HERE.items() if name in refused and values[name])
    if arguments.root is not None and arguments.configs:
        problems.append(
            Problem(
                "flags_exclude_each_other",
                f"batch takes ROOT ({arguments.root}) or --configs, not both.",
                "Remove one.",
            )
        )
    if arguments.root is None and not arguments.configs:
        problems.append(
            Problem(
                "argument_missing", "batch needs ROOT.", "For example: lora-trainer batch ./customers --preset 12gb"
            )
        )
    chosen = [tuple(option.split("=", 1)) for option in arguments.executor_option]
    if wrong := [option for option, pair in zip(arguments.executor_option, chosen, strict=True) if len(pair) < 2]:
        problems.append(
            Problem(
                "executor_option_invalid",
                f"--executor-option {wrong[0]} is not KEY=VALUE.",
                "For example: partition=gpu",
            )
        )
    if arguments.job is not None:
        problems.append(
            Problem(
                "flag_not_for_command",
                "--job is for batch work.",
                "For example: lora-trainer batch work night --job ash",
            )
        )
    if arguments.json:
        problems.append(
            Problem(
                "flag_not_for_command", "--json is for batch status.", "A batch writes batch.json into its --output."
            )
        )
    presets, user = layers_from(arguments, problems)
    resolved = settled(presets, user, problems)
    if explained(arguments, resolved):
        return DONE
    from lora_trainer.jobs.batch import BatchOrder, run_batch, show_batch
    from lora_trainer.jobs.executors import ExecutorOptions
    from lora_trainer.jobs.folders import Shared
    from lora_trainer.run.order import plain_console

    shared = Shared(tuple(presets), tuple(user), arguments.resume)
    options = ExecutorOptions(arguments.jobs, dict(chosen))
    order = BatchOrder(
        Path(arguments.root) if arguments.root else None,
        shared,
        resolved,
        options,
        executor=arguments.executor,
        together=arguments.together,
        retries=arguments.retries,
        configs=tuple(arguments.configs),
    )
    return (show_batch if arguments.dry_run else run_batch)(order, plain_console())


def queue_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """`batch work|status FOLDER`, `batch cancel|retry FOLDER NAME…`: the settings are those of the batch. Raises UsageError."""
    problems = list(unknown)
    if arguments.folder is None:
        example = f"lora-trainer batch {arguments.root} night"
        problems.append(
            Problem(
                "output_missing", f"batch {arguments.root} needs the --output of a batch.", f"For example: {example}"
            )
        )
    usual = {"jobs": 1, "together": 1, "retries": 0, "executor": "local", "executor_option": [], "configs": []}
    flags = {**usual, "resume": False, "dry_run": False, "explain": False}
    wrong = [name for name, value in flags.items() if vars(arguments)[name] != value]
    wrong += ["json"] if arguments.json and arguments.root != "status" else []
    for name in wrong:
        message = f"--{name.replace('_', '-')} is not for batch {arguments.root}."
        problems.append(
            Problem("flag_not_for_command", message, "Leave it out: the batch was started with what it uses.")
        )
    if any(layers_from(arguments, problems)):
        problems.append(
            Problem("settings_not_taken", f"batch {arguments.root} takes no settings.", "They are those of the batch.")
        )
    if arguments.names and arguments.root not in NAMES:
        message = f"batch {arguments.root} takes no names of jobs: {' '.join(arguments.names)}."
        problems.append(Problem("names_not_taken", message, f"They are for batch {' and batch '.join(NAMES)}."))
    if arguments.job is not None and arguments.root != "work":
        problems.append(
            Problem(
                "flag_not_for_command",
                "--job is for batch work.",
                "cancel and retry take names: batch cancel night ash",
            )
        )
    if problems:
        raise UsageError(problems)
    if arguments.root == "status":
        return show_status(arguments.folder, as_json=arguments.json)
    from lora_trainer.jobs.changes import cancel_jobs, retry_jobs
    from lora_trainer.run.order import plain_console

    if arguments.root == "work":
        from lora_trainer.jobs.batch import run_worker

        return run_worker(arguments.folder, plain_console(), arguments.job)
    return (cancel_jobs if arguments.root == "cancel" else retry_jobs)(
        arguments.folder, arguments.names, plain_console()
    )


WIDTH_OF_FILES = 160  # columns of a table that is no terminal's


def show_status(output: Path, *, as_json: bool) -> int:
    """Print the jobs of the batch in this folder, as they are now. Raises UsageError where there is none."""
    from rich.console import Console

    from lora_trainer.jobs.job_state import ROOT
    from lora_trainer.jobs.job_store import open_batch
    from lora_trainer.jobs.live_table import table
    from lora_trainer.jobs.summary import summary

    store = open_batch(output)
    jobs = store.read_jobs()
    if as_json:
        print(json.dumps(summary(jobs, output, store.read_note(ROOT)), indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, WIDTH_OF_FILES)
        console.print(table(jobs, jobs, with_reasons=False))
        for job in jobs:
            if job.reason:
                console.print(printable(f"{job.name}: {job.reason}"), markup=False, soft_wrap=True)
    return DONE
