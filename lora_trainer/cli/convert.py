"""`convert IN OUT`: write a LoRA file in another program's format, exactly, or as a plain LoRA of a lower rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_trainer.cli.arguments import say
from lora_trainer.cli.lora_output import DTYPES, FORMS, MOST_RANK, number, output_problems, run_write
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import printable_lines

LORA = "lora"  # of any kind of adapter, in the format of IN
EXAMPLES = (
    "examples:\n  lora-trainer convert downloaded.safetensors cat.safetensors --to kohya\n"
    "  lora-trainer convert cat.safetensors cat.diffusers.safetensors --to diffusers\n"
    "  lora-trainer convert lokr.safetensors lora.safetensors --to lora --rank 32\n"
    "  lora-trainer convert dora.safetensors lora.safetensors --to lora --rank 32 \\\n    --model base.safetensors\n\n"
    "ComfyUI, A1111, Forge and sd-scripts load kohya's format,\n"
    "load_lora_weights loads diffusers' format.\n"
)


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lora", metavar="IN", help="a LoRA file of any program; with --to lora also DoRA, LoKr, LoHa and OFT"
    )
    parser.add_argument("target", metavar="OUT", help="the file to write, ending in .safetensors")
    parser.add_argument(
        "--to", required=True, metavar="|".join((*FORMS, LORA)), help="the format to write, or a plain LoRA"
    )
    parser.add_argument("--rank", metavar="N", help="with --to lora: the highest rank of a layer")
    text = "with --to lora: the base model, which DoRA and OFT need: a .safetensors checkpoint, or a diffusers folder"
    parser.add_argument("--model", metavar="BASE", help=text)
    parser.add_argument("--family", metavar="FAMILY", help="model family, if the file does not say it")
    parser.add_argument("--dtype", metavar="|".join(DTYPES), help="cast the weights (default: unchanged)")
    parser.add_argument("--overwrite", action="store_true", help="overwrite OUT")


def convert_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write OUT and describe it. Raises UsageError with all problems before anything is written."""
    from lora_trainer.models import FAMILIES

    source, target = Path(arguments.lora), Path(arguments.target)
    problems = list(unknown)
    for flag, known in (("to", (*FORMS, LORA)), ("family", tuple(FAMILIES)), ("dtype", DTYPES)):
        value = getattr(arguments, flag)
        if value is not None and value not in known:
            problems.append(Problem(f"--{flag} {value} is not known.", f"One of: {', '.join(known)}."))
    rank = number(arguments, "rank", int, lambda value: 1 <= value <= MOST_RANK, problems)
    if arguments.to == LORA and arguments.rank is None:
        problems.append(Problem("--to lora needs --rank.", "For example --rank 32."))
    if arguments.to != LORA and arguments.rank is not None:
        problems.append(Problem("--rank is for --to lora: other formats are exact.", "Remove --rank."))
    if arguments.to != LORA and arguments.model is not None:
        problems.append(Problem("--model is for --to lora: other formats need no base model.", "Remove --model."))
    read = [source] if arguments.model is None else [source, Path(arguments.model)]
    problems += output_problems(target, read, overwrite=arguments.overwrite)
    if problems:
        raise UsageError(problems)
    if rank is not None:
        return _as_lora(source, target, rank, arguments)
    import torch

    from lora_trainer.models.lora_names import convert_lora

    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    dtype = dtypes.get(arguments.dtype or "")
    done = run_write(target, lambda: convert_lora(source, target, arguments.to, family=arguments.family, dtype=dtype))
    exact = "bit for bit" if done.difference == 0 else f"largest difference {done.difference:.1e} of an update"
    say(f"{done.modules} modules in {arguments.to} format, compared with {source.name}: {exact}")
    for note in done.notes:
        say(f"note: {note}")
    for path in done.paths:
        print(printable_lines(str(path)))
    return DONE


def _as_lora(source: Path, target: Path, rank: int, arguments: argparse.Namespace) -> int:
    """Write a plain LoRA of a file of any kind, and how much of each layer's update is lost."""
    import torch

    from lora_trainer.export.reading import values
    from lora_trainer.lora_files.lora_inputs import (
        LoraInput,
        LoraTarget,
        origin_of,
        with_comment,
        write_result,
    )
    from lora_trainer.lora_files.to_lora import to_lora
    from lora_trainer.models.lora_names import read_source

    file = read_source(source)
    if problems := values(source.name, file.weights):
        raise UsageError(problems)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}.get(arguments.dtype or "")
    base = None if arguments.model is None else Path(arguments.model)
    combined = to_lora(source.name, file.weights, rank, base)
    header = with_comment(file.weights.metadata, f"converted to a LoRA of rank {rank}")
    header |= origin_of("convert", [LoraInput(source, file)], rank=rank, base=base and base.name)
    place = LoraTarget(target, source, None, dtype, arguments.family)
    result = run_write(target, lambda: write_result(combined, file, header, place))
    lost = f"error {result.error:.2%} of the update, {result.worst.error:.2%} in the worst layer ({result.worst.name})"
    say(f"{len(result.layers)} modules as a LoRA of rank {rank} or less: {lost}")
    for note in result.notes:
        say(f"note: {note}")
    for path in result.paths:
        print(printable_lines(str(path)))
    return DONE
