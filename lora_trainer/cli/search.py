"""`search`: hyperparameter search with Optuna; `search lr`: learning-rate range test."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.cli.arguments import add_run_arguments, explained, layers_from, settled
from lora_trainer.core.errors import DONE, Problem, UsageError, gathering, nearest

if TYPE_CHECKING:
    from lora_trainer.config.layers import Layer, Resolved

EXAMPLES = """examples:
  lora-trainer search --preset 12gb --data ./images --trials 20 --max-steps 400
  lora-trainer search --data ./images --space space.toml --confirm 3
  lora-trainer search lr --preset 12gb --data ./images

A search is in OUTPUT/NAME: its trials (each an ordinary run), study.db,
search.json, best.toml and report.html. The same command continues a search
that was stopped or killed.
"""
OF_SEARCH = ("space", "trials", "sampler", "pruner", "objective", "jobs", "together", "confirm", "confirm_data")
OF_RANGE = ("low", "high")


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", metavar="lr", help="learning-rate range test in place of a search")
    group = parser.add_argument_group("the search")
    group.add_argument(
        "--space",
        type=Path,
        metavar="FILE",
        help="TOML file of the settings to search (default: learning rate, rank, dropout, weight decay)",
    )
    group.add_argument(
        "--trials", type=int, metavar="N", help="runs to train (50 for tpe, 20 for random, all of a grid)"
    )
    group.add_argument("--sampler", choices=("tpe", "random", "grid"), help="how values are chosen (tpe)")
    group.add_argument(
        "--pruner",
        choices=("hyperband", "median", "none"),
        help="when a trial is ended by its validation loss (hyperband)",
    )
    group.add_argument(
        "--objective",
        choices=("validation", "verdict"),
        help="the lowest validation loss, or the highest score of the LoRA (validation)",
    )
    group.add_argument(
        "--jobs", type=int, metavar="N", help="trials at once, each a process with its own copy of the base model (1)"
    )
    group.add_argument(
        "--together",
        type=int,
        metavar="K",
        help="trials that each of these trains at once on one base model, whose layers run once for all of them (1)",
    )
    group.add_argument(
        "--confirm",
        type=int,
        metavar="K",
        help="train the best and the default setting again, with K new seeds and other validation images, and compare them",
    )
    group.add_argument(
        "--confirm-data",
        action="append",
        default=[],
        metavar="PATH",
        help="confirm on these images, which the search never saw (repeatable)",
    )
    group = parser.add_argument_group("the learning-rate range test (search lr)")
    group.add_argument("--low", type=float, metavar="LR", help="learning rate of the first step (1e-6)")
    group.add_argument("--high", type=float, metavar="LR", help="learning rate of the last step (1)")
    add_run_arguments(parser, hidden=("--resume", "--dry-run"))


def search_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Run the search or the range test. Raises UsageError for all mistakes at once."""
    problems = list(unknown)
    if arguments.what not in (None, "lr"):
        problems.append(Problem("unknown_action", f"Unknown action {arguments.what}.", nearest(arguments.what, ["lr"])))
    others = OF_SEARCH if arguments.what == "lr" else OF_RANGE
    kind = "a search, not for search lr" if arguments.what == "lr" else "search lr"
    wrong = [f"--{name.replace('_', '-')}" for name in others if vars(arguments)[name] not in (None, [])]
    problems.extend(Problem("flag_not_for_command", f"{flag} is for {kind}.", "Leave it out.") for flag in wrong)
    if arguments.dry_run:
        problems.append(
            Problem("flag_not_for_command", "--dry-run is not for a search.", "Use it with train, or --explain here.")
        )
    if arguments.confirm_data and arguments.confirm is None and arguments.what is None:
        problems.append(Problem("flag_missing", "--confirm-data needs --confirm.", "Add --confirm 3."))
    presets, user = layers_from(arguments, problems)
    if arguments.what == "lr":
        return range_command(arguments, settled(presets, user, problems))
    return search_with(arguments, presets, user, problems)


def search_with(arguments: argparse.Namespace, presets: list[Layer], user: list[Layer], problems: list[Problem]) -> int:
    from lora_trainer.search.space import DEFAULT_SPACE, Space, read_space

    space: Space = ()
    resolved: Resolved | None = None
    with gathering(problems):
        space = read_space(arguments.space or DEFAULT_SPACE)
    with gathering(problems):
        resolved = settled(presets, user, ())
    if problems or resolved is None:
        raise UsageError(problems)
    if explained(arguments, resolved):
        return DONE
    from lora_trainer.jobs.folders import Shared
    from lora_trainer.run.order import plain_console
    from lora_trainer.search.confirm import Confirmation
    from lora_trainer.search.searching import SearchOrder, run_search

    together = 1 if arguments.together is None else arguments.together
    data = tuple(arguments.confirm_data)
    wanted = None if arguments.confirm is None else Confirmation(arguments.confirm, data, together)
    order = SearchOrder(
        shared=Shared(tuple(presets), tuple(user)),
        resolved=resolved,
        space=space,
        sampler=arguments.sampler or "tpe",
        pruner=arguments.pruner or "hyperband",
        objective=arguments.objective or "validation",
        trials=arguments.trials,
        jobs=1 if arguments.jobs is None else arguments.jobs,
        together=together,
        confirmation=wanted,
    )
    return run_search(order, plain_console())


def range_command(arguments: argparse.Namespace, resolved: Resolved) -> int:
    if explained(arguments, resolved):
        return DONE
    from lora_trainer.run.order import plain_console
    from lora_trainer.search.lr_range import RangeOrder, run_range_test

    low, high = (1e-6 if arguments.low is None else arguments.low), (1.0 if arguments.high is None else arguments.high)
    return run_range_test(RangeOrder(resolved, low, high), plain_console())
