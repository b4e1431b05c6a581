"""What the tools for LoRA files share: their output's arguments and checks, the summary of layers, and JSON."""

from __future__ import annotations

import argparse
import glob
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lora_trainer.cli.arguments import say
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import printable_lines
from lora_trainer.core.io import finite

if TYPE_CHECKING:
    from lora_trainer.lora_format.low_rank import LayerRow, RankLimits
    from lora_trainer.lora_tools.lora_inputs import LoraTarget, ToolResult

FORMS = ("kohya", "diffusers")
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}  # torch's names
KEEP_FLAGS = ("rank", "energy", "frobenius", "ratio")
MOST_RANK = 4096
WORST_SHOWN = 3  # layers named in the summary

T = TypeVar("T")


def add_output_arguments(
    parser: argparse.ArgumentParser,
    *,
    to: str = "default: the first file's",
    dtype: str = "the first file's",
    forms: Sequence[str] = FORMS,
    reads: bool = True,
    rows: str = "",
) -> None:
    """The arguments of a command that writes one LoRA file, with its defaults in words.

    `reads`: it reads LoRA files. `rows`: when it has a row for each layer, if not always.
    """
    parser.add_argument("--output", metavar="OUT", help="the file to write, ending in .safetensors (always needed)")
    parser.add_argument("--to", metavar="|".join(forms), help=f"the format to write ({to})")
    parser.add_argument("--dtype", metavar="|".join(DTYPES), help=f"type of the weights (default: {dtype})")
    if reads:
        parser.add_argument("--family", metavar="FAMILY", help="model family, if the files do not say it")
    parser.add_argument("--overwrite", action="store_true", help="overwrite OUT")
    parser.add_argument("-v", "--verbose", action="store_true", help=f"{rows}print a row for each layer")
    parser.add_argument(
        "--json", action="store_true", help=f"one JSON document on stdout; {rows}with a row for each layer"
    )


def add_keep_arguments(parser: argparse.ArgumentParser) -> None:
    """The limits of `lora_format.low_rank.RankLimits`."""
    parser.add_argument("--rank", metavar="N", help="the highest rank of a layer")
    parser.add_argument("--energy", metavar="SHARE", help="keep this share of the sum of squared singular values")
    parser.add_argument("--frobenius", metavar="SHARE", help="keep this share of each update's Frobenius norm")
    parser.add_argument("--ratio", metavar="R", help="keep singular values of at least the largest / R")


def number(
    arguments: argparse.Namespace,
    flag: str,
    kind: Callable[[str], T],
    fits: Callable[[T], bool],
    problems: list[Problem],
) -> T | None:
    """The value of a flag; None where it is not set, or where a problem was added."""
    text = getattr(arguments, flag.replace("-", "_"))
    if text is None:
        return None
    words = {"rank": f"a whole number from 1 to {MOST_RANK}", "ratio": "a number of at least 1"}
    try:
        value = kind(text)
        if fits(value):
            return value
    except ValueError:
        pass
    problems.append(
        Problem(
            "value_out_of_range", f"--{flag} is {text}; it must be {words.get(flag, 'a number over 0 and at most 1')}."
        )
    )
    return None


def keep_of(arguments: argparse.Namespace, problems: list[Problem]) -> RankLimits | None:
    """What `--rank` and the other limits say; None where none is set. Adds problems."""
    from lora_trainer.lora_format.low_rank import RankLimits

    def is_share(value: float) -> bool:
        return 0.0 < value <= 1.0

    rank = number(arguments, "rank", int, lambda value: 1 <= value <= MOST_RANK, problems)
    energy = number(arguments, "energy", float, is_share, problems)
    frobenius = number(arguments, "frobenius", float, is_share, problems)
    ratio = number(arguments, "ratio", float, lambda value: 1.0 <= value < float("inf"), problems)
    keep = RankLimits(rank, energy, frobenius, ratio)
    return None if keep == RankLimits() else keep


def target_of(
    arguments: argparse.Namespace, inputs: Sequence[Path], problems: list[Problem], forms: Sequence[str] = FORMS
) -> LoraTarget:
    """The file to write. Adds problems of the arguments, among them an OUT that is missing, exists or is an input."""
    import torch

    from lora_trainer.lora_tools.lora_inputs import LoraTarget
    from lora_trainer.models.families import FAMILIES

    for flag, known in (("to", forms), ("dtype", DTYPES), ("family", FAMILIES)):
        value = getattr(arguments, flag, None)
        if value is not None and value not in known:
            problems.append(Problem("value_unknown", f"--{flag} {value} is not known.", f"One of: {', '.join(known)}."))
    path = output_of(arguments, problems)
    if arguments.output is not None:
        problems += output_problems(path, inputs, overwrite=arguments.overwrite)
    dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype in DTYPES else None
    to = arguments.to if arguments.to in FORMS else None
    return LoraTarget(path, inputs[0], to, dtype, getattr(arguments, "family", None))


def output_of(arguments: argparse.Namespace, problems: list[Problem]) -> Path:
    """The path of `--output`. Adds a problem where it is missing."""
    if arguments.output is None:
        problems.append(Problem("output_missing", "--output is missing.", "For example --output out.safetensors."))
    return Path(arguments.output or "")


def output_problems(path: Path, inputs: Sequence[Path], *, overwrite: bool) -> list[Problem]:
    """Why a LoRA or a checkpoint cannot be written there."""
    from lora_trainer.lora_format.reading import learned_tokens_beside

    if path.suffix != ".safetensors" or path.is_dir():
        return [
            Problem("not_safetensors_name", f"{path} does not name a .safetensors file.", "Programs need this ending.")
        ]
    if path.exists() and any(each.exists() and path.samefile(each) for each in inputs):
        return [
            Problem(
                "output_is_input",
                f"{path} is an input of this command, which is never overwritten.",
                "Name another file.",
            )
        ]
    if problems := inside_problems(path, inputs):
        return problems
    tokens = list(path.parent.glob(f"{glob.escape(path.stem)}.embedding-*.safetensors"))
    for each in inputs:
        if shared := [token for token in learned_tokens_beside(each) if token in tokens]:
            message = (
                f"{shared[0]} is a learned token of {each.name}, an input of this command, and would be one of OUT."
            )
            return [Problem("output_is_input", message, "Name another file.")]
    if not overwrite and (path.exists() or tokens):
        return [Problem("output_exists", f"{path} exists already.", "Name another file, or add --overwrite.")]
    return []


def inside_problems(path: Path, inputs: Sequence[Path]) -> list[Problem]:
    """Why nothing can be written at `path`: it lies inside a folder that the command reads."""
    parents = [parent for parent in path.resolve().parents if parent.exists()]
    for folder in filter(Path.is_dir, inputs):
        if any(parent.samefile(folder) for parent in parents):
            message = f"{path} lies inside {folder}, an input of this command, which is never changed."
            return [Problem("output_inside_input", message, "Name a place outside this folder.")]
    return []


def run_write(target: Path, write: Callable[[], T]) -> T:
    """The result of `write`. Raises UsageError where the disk refuses."""
    try:
        return write()
    except OSError as error:
        message = f"{target} was not written: {error.strerror or error}."
        raise UsageError(Problem("output_not_written", message, "Nothing was kept.")) from error


def print_result(
    arguments: argparse.Namespace, result: ToolResult, headline: str, *, shrinks: bool = True, **more: Any
) -> None:
    """Print the headline, a summary of the layers and notes on stderr and the files on stdout; or one JSON document.

    `shrinks`: the layers were approximated, so that what they kept is of interest. With `--verbose` each layer has a row.
    """
    say(headline)
    if arguments.json:
        document = {
            "files": [str(path) for path in result.paths],
            **more,
            "layers": [
                {key: getattr(each, key) for key in ("name", "rank_before", "rank", "kept", "error")}
                for each in result.layers
            ],
            "notes": list(result.notes),
        }
        print(json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False))
        return
    for line in (_table if arguments.verbose else _summary)(result.layers) if shrinks and result.layers else ():
        print(printable_lines(line), file=sys.stderr)
    for note in result.notes:
        say(f"note: {note}")
    for path in result.paths:
        print(printable_lines(str(path)))


def ranks_of(ranks: Sequence[int]) -> str:
    """`8`, or `2 to 8` where layers differ."""
    return f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"


def percent(share: float) -> str:
    """`21.0%`, `0.031%`, and `under 0.001%` for what rounding leaves."""
    if 0.0 < share < 1e-5:
        return "under 0.001%"
    return f"{share:.1%}" if share >= 0.01 or share == 0.0 else f"{share:.3%}"


def _summary(layers: Sequence[LayerRow]) -> list[str]:
    """What the layers kept of their updates' norms, and the worst of them."""
    worst = sorted(layers, key=lambda each: -each.error)[:WORST_SHOWN]
    middle = statistics.median(each.kept for each in layers)
    return [
        f"kept of a layer's update (its norm): median {middle:.1%}, worst {worst[0].kept:.1%} (error {percent(worst[0].error)})",
        *(f"  {each.kept:>6.1%} at rank {each.rank}: {each.name}" for each in worst),
        "--verbose prints a row for each layer",
    ]


def _table(layers: Sequence[LayerRow]) -> list[str]:
    """A row for each layer: ranks, the share of the norm that was kept, and the error, a share of the norm as well."""
    return [
        f"{'rank':>12} {'kept':>8} {'error':>8}  layer",
        *(
            f"{f'{each.rank_before} -> {each.rank}':>12} {each.kept:>8.2%} {each.error:>8.2%}  {each.name}"
            for each in layers
        ),
    ]
