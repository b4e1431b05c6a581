"""`extract BASE TUNED`: a LoRA, DoRA or LoKr of the difference of two models."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from lora_trainer.cli.lora_output import (
    MOST_RANK,
    add_output_arguments,
    number,
    print_result,
    ranks_of,
    run_write,
    target_of,
)
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import counted

EXAMPLES = (
    "examples:\n  lora-trainer extract base.safetensors tuned.safetensors --rank 64 \\\n    --output tuned-lora.safetensors\n"
    "  lora-trainer extract ./base ./tuned --rank 32 --frobenius 0.9 \\\n    --output tuned-lora.safetensors\n"
    "  lora-trainer extract base.safetensors tuned.safetensors \\\n"
    "    --type lokr --rank 16 --output tuned-lokr.safetensors\n\n"
    "Both are single checkpoints or diffusers folders of one family, in any type.\n"
)


def add_extract_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="the model before its training: a file, or a diffusers folder")
    parser.add_argument("tuned", metavar="TUNED", help="the model after it")
    parser.add_argument("--rank", metavar="N", help="the highest rank of a layer (always needed)")
    parser.add_argument("--type", metavar="KIND", default="lora", help="lora (default), dora or lokr")
    parser.add_argument(
        "--frobenius", metavar="SHARE", help="of a LoRA: lower a layer's rank to keep this share of its change's norm"
    )
    text = "cut numbers off at this quantile, as sd-scripts does with 0.99 (default: off, which is exact)"
    parser.add_argument("--clamp-quantile", metavar="Q", help=text)
    add_output_arguments(parser, to="default: kohya", dtype="fp16", reads=False)


def extract_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write OUT and print what each layer kept. Raises UsageError with all problems before anything is written."""
    import torch

    from lora_trainer.adapters.adapter_kinds import ADAPTERS
    from lora_trainer.lora_format.convert import SourceFile
    from lora_trainer.lora_format.kinds import LORA
    from lora_trainer.lora_format.low_rank import below_share
    from lora_trainer.lora_format.weights import AdapterWeights
    from lora_trainer.lora_tools.extraction import Extraction, extract, extraction_problems
    from lora_trainer.lora_tools.lora_inputs import MERGED_FROM, origin_of, write_changes

    problems, base, tuned = list(unknown), Path(arguments.base), Path(arguments.tuned)
    rank = number(arguments, "rank", int, lambda value: 1 <= value <= MOST_RANK, problems)
    if arguments.rank is None:
        problems.append(Problem("flag_missing", "--rank is missing.", "For example --rank 32."))
    share = number(arguments, "frobenius", float, lambda value: 0.0 < value <= 1.0, problems)
    clamp = number(arguments, "clamp-quantile", float, lambda value: 0.0 < value <= 1.0, problems)
    kind = arguments.type
    target = target_of(arguments, [base, tuned], problems)
    target = replace(target, dtype=target.dtype or torch.float16)
    assert target.dtype is not None
    how = Extraction(rank or 1, share, clamp, kind, target.dtype)
    if kind not in ADAPTERS:
        problems.append(
            Problem("unknown_adapter_kind", f"--type {kind} is not known.", f"One of: {', '.join(ADAPTERS)}.")
        )
    problems += extraction_problems(how)
    if problems:
        raise UsageError(problems)
    found = extract(base, tuned, how)
    limits = {"rank": rank, "frobenius": share, "clamp_quantile": clamp, "base": base.name, "tuned": tuned.name}
    header = {
        **origin_of("extract", [], type=None if kind == LORA else kind, **limits),
        MERGED_FROM: f"{tuned.name} - {base.name}",
    }
    like = SourceFile(AdapterWeights({}, family=found.family), "kohya")
    result = run_write(target.path, lambda: write_changes(found.weights, found.layers, like, header, target))
    whole = (
        f"the {ADAPTERS[kind].title} differs from tuned - base by {result.error:.1%} of its size, all layers together"
    )
    result = replace(result, notes=(whole, *found.notes, *below_share(result.layers, how.keep), *result.notes))
    what = f"{counted(len(result.layers), 'layer')} of {', '.join(found.components)}; {found.unchanged} without a difference"
    ranks = ranks_of([layer.rank for layer in result.layers])
    components = list(found.components)
    print_result(arguments, result, f"{what}; rank {ranks}", components=components, unchanged=found.unchanged)
    return DONE
