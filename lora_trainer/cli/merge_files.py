"""`merge A B …`: one LoRA of several with weights, or a base model with LoRAs merged in."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.cli.lora_output import (
    add_keep_arguments,
    add_output_arguments,
    inside_problems,
    keep_of,
    output_of,
    output_problems,
    percent,
    print_result,
    ranks_of,
    run_write,
    target_of,
)
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import counted

if TYPE_CHECKING:
    from lora_trainer.lora_format.low_rank import RankLimits
    from lora_trainer.lora_tools.lora_inputs import LoraInput, LoraTarget, ToolResult

EXAMPLES = (
    "examples:\n  lora-trainer merge a.safetensors b.safetensors --weights 1 0.6 \\\n    --output both.safetensors\n"
    "  lora-trainer merge a.safetensors b.safetensors --rank 8 --output c.safetensors\n"
    "  lora-trainer merge cat.safetensors --into base.safetensors \\\n    --output base-cat.safetensors\n\n"
    "Without --rank, --energy, --frobenius or --ratio the merge is exact and the\n"
    "ranks add up; with one of them each layer gets the best lower rank (SVD).\n"
)


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "loras",
        nargs="+",
        metavar="FILE",
        help="LoRA files of any program, for one family of models; with --into also DoRA, LoKr, LoHa and OFT",
    )
    parser.add_argument("--weights", nargs="+", metavar="W", help="the weight of each file (default: 1)")
    add_keep_arguments(parser)
    text = "merge into this base model: a .safetensors checkpoint, or a diffusers folder; OUT has its layout and types"
    parser.add_argument("--into", metavar="BASE", help=text)
    add_output_arguments(parser)


def merge_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write OUT and describe it. Raises UsageError with all problems before anything is written."""
    problems, paths = list(unknown), [Path(each) for each in arguments.loras]
    weights = weights_of(arguments.weights, len(paths), problems)
    keep = keep_of(arguments, problems)
    if arguments.into is not None:
        return _into(arguments, paths, weights, keep is not None, problems)
    target = target_of(arguments, paths, problems)
    inputs = read_all(paths, problems, arguments.family)
    result = run_write(target.path, lambda: _merge(inputs, weights, keep, target))
    what = f"{counted(sum(map(bool, weights)), 'LoRA')} merged, {counted(len(result.layers), 'layer')}"
    ranks = ranks_of([layer.rank for layer in result.layers])
    rounding = f": rounding changes an update by {percent(result.worst.error)} at most ({result.worst.name})"
    headline = f"{what} of rank {ranks}{rounding if keep is None else ''}"
    print_result(arguments, result, headline, shrinks=keep is not None, weights=weights)
    return DONE


def weights_of(texts: list[str] | None, count: int, problems: list[Problem]) -> list[float]:
    """The weight of each file, 1 where none are set. Adds problems."""
    if texts is None:
        return [1.0] * count
    found = []
    for text in texts:
        try:
            found.append(float(text))
        except ValueError:
            problems.append(
                Problem("weight_not_a_number", f"--weights {text} is no number.", "For example --weights 1 0.6.")
            )
    if len(texts) != count:
        message = f"--weights has {counted(len(texts), 'weight')} for {counted(count, 'file')}."
        problems.append(Problem("weights_do_not_match", message, "Give one for each file, in their order."))
    elif len(found) == count and (not all(map(math.isfinite, found)) or not any(found)):
        problems.append(
            Problem(
                "weights_are_zero",
                f"--weights {' '.join(texts)} merge nothing.",
                "Give finite weights that are not all 0.",
            )
        )
    return found


def read_all(
    paths: list[Path], problems: list[Problem], family: str | None, *, any_kind: bool = False
) -> list[LoraInput]:
    """The LoRA files, with `any_kind` those of every readable kind, for `family` where the user names one.

    Raises UsageError with their problems and those of the arguments.
    """
    from lora_trainer.core.errors import gathering
    from lora_trainer.lora_tools.lora_inputs import read_inputs
    from lora_trainer.models.families import FAMILIES
    from lora_trainer.models.lora_names import wrong_family

    inputs: list[LoraInput] = []
    with gathering(problems):
        inputs = read_inputs(paths, any_kind=any_kind)
    if family in FAMILIES:  # another name is among the problems
        problems += [problem for each in inputs for problem in wrong_family(each.path, each.weights, family)]
    if problems:
        raise UsageError(problems)
    return inputs


def _merge(inputs: list[LoraInput], weights: list[float], keep: RankLimits | None, target: LoraTarget) -> ToolResult:
    from lora_trainer.lora_format.low_rank import below_share
    from lora_trainer.lora_tools.combining import combine
    from lora_trainer.lora_tools.lora_inputs import (
        MERGED_FROM,
        common_header,
        origin_of,
        trigger_words,
        with_weight,
        write_result,
    )

    inputs, weights, notes = with_weight(inputs, weights)
    combined = combine([each.pairs for each in inputs], weights, keep)
    header = {
        **common_header(inputs),
        **trigger_words(inputs),
        MERGED_FROM: ", ".join(each.path.name for each in inputs),
        **origin_of("merge", inputs, weights=weights),
    }
    result = write_result(combined, inputs[0].file, header, target)
    notes += () if keep is None else below_share(result.layers, keep)
    return replace(result, notes=(*notes, *result.notes))


def _into(
    arguments: argparse.Namespace, paths: list[Path], weights: list[float], has_rank: bool, problems: list[Problem]
) -> int:
    from lora_trainer.lora_tools.into_base import merge_into

    base, target = Path(arguments.into), output_of(arguments, problems)
    problems += [
        Problem(
            "flag_has_no_effect",
            f"--{flag} does not apply with --into: OUT is as the base model is.",
            f"Remove --{flag}.",
        )
        for flag in ("to", "dtype", "family")
        if getattr(arguments, flag) is not None
    ]
    if has_rank:
        problems.append(
            Problem(
                "flag_has_no_effect",
                "Ranks do not apply with --into: a base model has none.",
                "Remove --rank and the like.",
            )
        )
    if arguments.output is None:
        pass
    elif not base.is_dir():
        problems += output_problems(target, [base, *paths], overwrite=arguments.overwrite)
    elif target.exists():
        problems.append(
            Problem(
                "output_exists", f"{target} exists already, and a folder is never overwritten.", "Name another folder."
            )
        )
    else:
        problems += inside_problems(target, [base])
    inputs = read_all(paths, problems, arguments.family, any_kind=True)
    result = run_write(target, lambda: merge_into(base, inputs, weights, target))
    what = f"{counted(sum(map(bool, weights)), 'LoRA')} merged into {base.name}, {counted(len(result.layers), 'layer')}"
    rounding = f"rounding to its types changes an update by {percent(result.worst.error)} at most"
    headline = f"{what}: {rounding} ({result.worst.name})"
    print_result(arguments, result, headline, shrinks=False, weights=weights)
    return DONE
