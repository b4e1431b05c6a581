"""`extract BASE TUNED`: a LoRA of the difference of two models."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from lora_trainer.cli.arguments import say
from lora_trainer.cli.lora_output import MOST_RANK, add_output_arguments, number, print_result, run_write, target_of
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import counted

EXAMPLES = (
    "examples:\n  lora-trainer extract base.safetensors tuned.safetensors --rank 64 \\\n    --output tuned-lora.safetensors\n"
    "  lora-trainer extract ./base ./tuned --rank 32 --frobenius 0.9 \\\n    --output tuned-lora.safetensors\n\n"
    "Both are single checkpoints or diffusers folders of one family, in any type.\nThe result is a LoRA.\n"
)


def add_extract_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="the model before its training: a file, or a diffusers folder")
    parser.add_argument("tuned", metavar="TUNED", help="the model after it")
    parser.add_argument("--rank", metavar="N", required=True, help="the highest rank of a layer")
    parser.add_argument(
        "--frobenius", metavar="SHARE", help="lower a layer's rank to keep this share of its change's norm"
    )
    text = "cut numbers off at this quantile, as sd-scripts does with 0.99 (default: off, which is exact)"
    parser.add_argument("--clamp-quantile", metavar="Q", help=text)
    add_output_arguments(parser, to="kohya", dtype="fp16", reads=False)


def extract_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write OUT and print what each layer kept. Raises UsageError with all problems before anything is written."""
    import torch

    from lora_trainer.export.convert import SourceFile
    from lora_trainer.export.weights import LoraWeights
    from lora_trainer.lora_files.extraction import extract
    from lora_trainer.lora_files.lora_inputs import MERGED_FROM, origin_of, write_result
    from lora_trainer.lora_files.low_rank import RankLimits, below_share

    problems, base, tuned = list(unknown), Path(arguments.base), Path(arguments.tuned)
    rank = number(arguments, "rank", int, lambda value: 1 <= value <= MOST_RANK, problems)
    share = number(arguments, "frobenius", float, lambda value: 0.0 < value <= 1.0, problems)
    clamp = number(arguments, "clamp-quantile", float, lambda value: 0.0 < value <= 1.0, problems)
    target = target_of(arguments, [base, tuned], problems)
    if problems:
        raise UsageError(problems)
    assert rank is not None
    limits_of_rank = RankLimits(rank, frobenius=share)
    found = extract(base, tuned, limits_of_rank, rank, clamp)
    limits = {"rank": rank, "frobenius": share, "clamp_quantile": clamp, "base": base.name, "tuned": tuned.name}
    header = {**origin_of("extract", [], **limits), MERGED_FROM: f"{tuned.name} - {base.name}"}
    like = SourceFile(LoraWeights({}, family=found.family), "kohya")
    target = replace(target, dtype=target.dtype or torch.float16)
    result = run_write(target.path, lambda: write_result(found.combined, like, header, target))
    result = replace(result, notes=(*found.notes, *below_share(result.layers, limits_of_rank), *result.notes))
    print_result(result, arguments.json, components=list(found.components), unchanged=found.unchanged)
    say(
        f"{counted(len(result.layers), 'layer')} of {', '.join(found.components)}; {found.unchanged} without a difference"
    )
    return DONE
