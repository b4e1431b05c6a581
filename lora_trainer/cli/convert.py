"""`convert IN OUT`: write a LoRA file in another program's format, exactly."""

from __future__ import annotations

import argparse
import glob
from pathlib import Path

from lora_trainer.cli.arguments import say
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import printable_lines

FORMS, DTYPES = ("kohya", "diffusers"), ("fp16", "bf16", "fp32")
EXAMPLES = (
    "examples:\n  lora-trainer convert downloaded.safetensors cat.safetensors --to kohya\n"
    "  lora-trainer convert cat.safetensors cat.diffusers.safetensors --to diffusers\n\n"
    "ComfyUI, A1111, Forge and sd-scripts load kohya's format,\n"
    "load_lora_weights loads diffusers' format.\n"
)


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", metavar="IN", help="a LoRA file of any program")
    parser.add_argument("target", metavar="OUT", help="the file to write, ending in .safetensors")
    parser.add_argument("--to", required=True, metavar="|".join(FORMS), help="the format to write")
    parser.add_argument("--family", metavar="FAMILY", help="model family, if the file does not say it")
    parser.add_argument("--dtype", metavar="|".join(DTYPES), help="cast the weights (default: unchanged)")
    parser.add_argument("--overwrite", action="store_true", help="overwrite OUT")


def convert_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write OUT and describe it. Raises UsageError with all problems before anything is written."""
    from lora_trainer.models import FAMILIES

    source, target = Path(arguments.lora), Path(arguments.target)
    problems = list(unknown)
    for flag, known in (("to", FORMS), ("family", tuple(FAMILIES)), ("dtype", DTYPES)):
        value = getattr(arguments, flag)
        if value is not None and value not in known:
            problems.append(Problem(f"--{flag} {value} is not known.", f"One of: {', '.join(known)}."))
    if target.suffix != ".safetensors" or target.is_dir():
        problems.append(Problem(f"{target} does not name a .safetensors file.", "Programs need this ending."))
    elif not arguments.overwrite and (
        target.exists() or list(target.parent.glob(f"{glob.escape(target.stem)}.embedding-*.safetensors"))
    ):
        problems.append(Problem(f"{target} exists already.", "Name another file, or add --overwrite."))
    if problems:
        raise UsageError(problems)
    import torch

    from lora_trainer.models.lora_names import convert_lora

    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    try:
        done = convert_lora(
            source, target, arguments.to, family=arguments.family, dtype=dtypes.get(arguments.dtype or "")
        )
    except OSError as error:
        raise UsageError(
            Problem(f"{target} was not written: {error.strerror or error}.", "Nothing was kept.")
        ) from error
    exact = "bit for bit" if done.difference == 0 else f"largest difference {done.difference:.1e} of an update"
    say(f"{done.modules} modules in {arguments.to} format, compared with {source.name}: {exact}")
    for note in done.notes:
        say(f"note: {note}")
    for path in done.paths:
        print(printable_lines(str(path)))
    return DONE
