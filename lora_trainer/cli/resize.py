"""`resize IN`: the best LoRA of lower ranks, layer by layer, by SVD."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.cli.lora_output import (
    add_keep_arguments,
    add_output_arguments,
    keep_of,
    print_result,
    ranks_of,
    run_write,
    target_of,
)
from lora_trainer.cli.merge_files import read_all
from lora_trainer.core.errors import DONE, Problem
from lora_trainer.core.findings import counted

if TYPE_CHECKING:
    from lora_trainer.lora_format.low_rank import RankLimits
    from lora_trainer.lora_tools.lora_inputs import LoraInput, LoraTarget, ToolResult

EXAMPLES = (
    "examples:\n  lora-trainer resize cat.safetensors --rank 8 --output cat-8.safetensors\n"
    "  lora-trainer resize cat.safetensors --frobenius 0.95 --rank 32 \\\n    --output cat-small.safetensors\n\n"
    "Each limit gives every layer a rank; the layer gets the smallest of them.\n"
    "So --rank and --ratio may keep less than --energy or --frobenius asks for:\n"
    "the number of these layers is printed.\nThe format stays that of IN.\n"
)


def add_resize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", metavar="IN", help="a LoRA file of any program")
    add_keep_arguments(parser)
    add_output_arguments(parser)


def resize_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write OUT and print what each layer kept. Raises UsageError with all problems before anything is written."""
    problems, path = list(unknown), Path(arguments.lora)
    wrong = len(problems)
    keep = keep_of(arguments, problems)
    if keep is None and len(problems) == wrong:
        problems.append(
            Problem("limit_missing", "resize needs a limit.", "Add --rank, --energy, --frobenius or --ratio.")
        )
    target = target_of(arguments, [path], problems)
    (source,) = read_all([path], problems, arguments.family)
    assert keep is not None
    result = run_write(target.path, lambda: _resize(source, keep, target))
    before = ranks_of([layer.rank_before for layer in result.layers])
    if all(layer.rank == layer.rank_before for layer in result.layers):
        headline = f"nothing changes: every layer already is within the limits (rank {before})"
        print_result(arguments, result, headline, shrinks=False)
        return DONE
    size = result.paths[0].stat().st_size / path.stat().st_size
    ranks = f"rank {before} -> {ranks_of([layer.rank for layer in result.layers])}"
    print_result(arguments, result, f"{counted(len(result.layers), 'layer')}, {ranks}, {size:.0%} of the file's size")
    return DONE


def _resize(source: LoraInput, keep: RankLimits, target: LoraTarget) -> ToolResult:
    from dataclasses import asdict, replace

    from lora_trainer.lora_format.low_rank import below_share
    from lora_trainer.lora_tools.combining import combine
    from lora_trainer.lora_tools.lora_inputs import common_header, origin_of, with_comment, write_result

    combined = combine([source.pairs], [1.0], keep)
    limits = {key: value for key, value in asdict(keep).items() if value is not None}
    words = ", ".join(f"{key} {value:g}" for key, value in limits.items())
    header = with_comment(common_header([source]), f"resized to {words}") | origin_of("resize", [source], **limits)
    result = write_result(combined, source.file, header, target)
    return replace(result, notes=(*below_share(result.layers, keep), *result.notes))
