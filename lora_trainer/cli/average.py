"""`average FILE FILE …` or `average RUN`: the mean of LoRAs, or of the states of one run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.cli.lora_output import (
    MOST_RANK,
    add_output_arguments,
    number,
    percent,
    print_result,
    ranks_of,
    run_write,
    target_of,
)
from lora_trainer.cli.merge_files import read_all, weights_of
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import counted

if TYPE_CHECKING:
    from lora_trainer.lora_tools.lora_inputs import LoraTarget, ToolResult

UPDATES, PARAMETERS = "updates", "parameters"
EXAMPLES = (
    "examples:\n  lora-trainer average a.safetensors b.safetensors --output mean.safetensors\n"
    "  lora-trainer average runs/cat --steps 500..2000 --output mean.safetensors\n"
    "  lora-trainer average runs/cat --decay 0.8 --output cat-ema.safetensors\n\n"
    "Files are averaged by their updates (exact; ranks add up unless --rank is set).\n"
    "A run's checkpoints are averaged by their parameters, as EMA and SWA do; this is\n"
    "valid for states of one run only: --of parameters does it for files.\n"
)


def add_average_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="FILE|RUN", help="LoRA files, or the folder of one run")
    parser.add_argument(
        "--weights", nargs="+", metavar="W", help="the weight of each file; they are divided by their sum"
    )
    parser.add_argument("--decay", metavar="D", help="weights of an EMA over the inputs, oldest first: D^age")
    parser.add_argument("--steps", metavar="A..B", help="of a run: the checkpoints of these steps (default: all)")
    text = "average the layers' updates (exact for any files) or the parameters (states of one run; the rank stays)"
    parser.add_argument("--of", metavar=f"{UPDATES}|{PARAMETERS}", help=text)
    parser.add_argument("--rank", metavar="N", help="of updates: the highest rank of a layer, by SVD")
    add_output_arguments(parser)


def average_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write OUT and describe it. Raises UsageError with all problems before anything is written."""
    problems, paths = list(unknown), [Path(each) for each in arguments.inputs]
    is_run = any(path.is_dir() for path in paths)
    rank = number(arguments, "rank", int, lambda value: 1 <= value <= MOST_RANK, problems)
    decay = number(arguments, "decay", float, lambda value: 0.0 < value <= 1.0, problems)
    _contradictions(arguments, paths, is_run, problems)
    # A run may be named by its `checkpoints`; nothing is written into the run then either.
    read = [path.parent if path.is_dir() and path.name == "checkpoints" else path for path in paths]
    target = target_of(arguments, read, problems)
    if is_run:
        return _run(arguments, paths[0], decay, target, problems)
    weights = _weights(arguments.weights, decay, len(paths), problems)
    inputs = read_all(paths, problems, arguments.family, any_kind=arguments.of == PARAMETERS)

    def write() -> ToolResult:
        from lora_trainer.lora_format.low_rank import RankLimits
        from lora_trainer.lora_tools.combining import average_of_parameters, combine, unchanged_rows
        from lora_trainer.lora_tools.lora_inputs import (
            common_header,
            origin_of,
            with_weight,
            write_changes,
            write_result,
        )

        used, shares, notes = with_weight(inputs, weights)
        details = {"weights": shares, "of": arguments.of or UPDATES, "rank": rank}
        header = common_header(used) | origin_of("average", used, **details)
        if arguments.of == PARAMETERS:
            states = [each.weights for each in used]
            mean = average_of_parameters([each.path.name for each in used], states, shares)
            result = write_changes(mean, unchanged_rows(mean.modules), used[0].file, header, target)
        else:
            keep = None if rank is None else RankLimits(rank=rank)
            combined = combine([each.pairs for each in used], shares, keep)
            result = write_result(combined, used[0].file, header, target)
        return replace(result, notes=(*notes, *result.notes))

    result = run_write(target.path, write)
    what = arguments.of or UPDATES
    headline = _headline(result, what, counted(sum(map(bool, weights)), "file"))
    print_result(arguments, result, headline, shrinks=rank is not None, of=what, weights=weights)
    return DONE


def _contradictions(
    arguments: argparse.Namespace, paths: Sequence[Path], is_run: bool, problems: list[Problem]
) -> None:
    if arguments.of not in (None, UPDATES, PARAMETERS):
        problems.append(
            Problem("value_unknown", f"--of {arguments.of} is not known.", f"One of: {UPDATES}, {PARAMETERS}.")
        )
    if is_run and len(paths) > 1:
        problems.append(
            Problem(
                "average_takes_one_run", "A run is averaged by itself.", "Name one run's folder, or LoRA files alone."
            )
        )
    elif not is_run and len(paths) < 2:
        problems.append(
            Problem("average_needs_files", "One file has no average.", "Name two or more files, or a run's folder.")
        )
    if is_run and arguments.of == UPDATES:
        problems.append(
            Problem("average_of_parameters", "A run's checkpoints are averaged by their parameters.", "Remove --of.")
        )
    if is_run and arguments.weights is not None:
        problems.append(Problem("flag_not_for_run", "--weights is for files.", "Use --decay for a run's checkpoints."))
    if not is_run and arguments.steps is not None:
        problems.append(
            Problem("flag_not_for_files", "--steps is for a run's folder.", "Name the files, without --steps.")
        )
    if arguments.weights is not None and arguments.decay is not None:
        problems.append(
            Problem("flags_exclude_each_other", "--weights and --decay exclude each other.", "Remove one of them.")
        )
    if arguments.rank is not None and (is_run or arguments.of == PARAMETERS):
        problems.append(
            Problem(
                "flag_has_no_effect",
                "--rank does not apply: an average of parameters keeps the rank.",
                "Remove --rank.",
            )
        )


def _weights(texts: list[str] | None, decay: float | None, count: int, problems: list[Problem]) -> list[float]:
    """The weight of each file, which sum to 1. Adds problems."""
    if decay is not None:
        from lora_trainer.lora_tools.combining import ema_weights

        return ema_weights(count, decay)
    found = weights_of(texts, count, problems)
    if not problems and sum(found) <= 0:
        problems.append(
            Problem("weights_sum_to_zero", f"--weights sum to {sum(found):g}.", "Give weights with a sum above 0.")
        )
    return [weight / sum(found) for weight in found] if sum(found) > 0 else found


def _run(
    arguments: argparse.Namespace, named: Path, decay: float | None, target: LoraTarget, problems: list[Problem]
) -> int:
    from lora_trainer.core.errors import gathering
    from lora_trainer.lora_format.metadata import EMA_DECAY, SWA_START
    from lora_trainer.lora_tools.combining import ema_weights, parse_steps
    from lora_trainer.lora_tools.lora_inputs import origin_of, write_changes
    from lora_trainer.run.average_run import average_run

    steps: tuple[int, int | None] = (0, None)
    if arguments.steps is not None:
        with gathering(problems):
            steps = parse_steps(arguments.steps)
    if problems:
        raise UsageError(problems)
    found = average_run(named, steps, lambda count: ema_weights(count, decay or 1.0))
    details = {"run": found.name, "steps": list(found.steps), "decay": decay, "of": PARAMETERS}
    # Of the run's own average: that of this file is in its origin.
    entries = {key: each for key, each in found.like.weights.metadata.items() if key not in (EMA_DECAY, SWA_START)}
    header = {**entries, "ss_steps": str(max(found.steps)), **origin_of("average", [], **details)}
    result = run_write(target.path, lambda: write_changes(found.weights, found.layers, found.like, header, target))
    states = f"{counted(len(found.steps), 'checkpoint')} (steps {', '.join(map(str, found.steps))})"
    headline = _headline(result, PARAMETERS, states)
    print_result(arguments, result, headline, shrinks=False, of=PARAMETERS, steps=list(found.steps))
    return DONE


def _headline(result: ToolResult, what: str, of: str) -> str:
    kind = "valid for states of one run" if what == PARAMETERS else "exact for any files"
    rank = ranks_of([layer.rank for layer in result.layers])
    error = percent(result.worst.error)
    return f"average of the {what} ({kind}) of {of}: {counted(len(result.layers), 'layer')} of rank {rank}, error {error} at most"
