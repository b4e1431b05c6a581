"""`convert IN`: write a LoRA file in another program's format, exactly, or as a plain LoRA of a lower rank."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.cli.lora_output import (
    FORMS,
    MOST_RANK,
    add_output_arguments,
    number,
    percent,
    print_result,
    run_write,
    target_of,
)
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import counted

if TYPE_CHECKING:
    from lora_trainer.lora_tools.lora_inputs import LoraTarget

LORA = "lora"  # of any kind of adapter, in the format of IN
COMFYUI = "comfyui"  # of a DoRA, which ComfyUI computes differently
TARGETS = (*FORMS, LORA, COMFYUI)
NEEDED = {
    LORA: ("rank", "For example --rank 32."),
    COMFYUI: ("model", "Name the base model that the DoRA was trained on. Other kinds need no conversion for ComfyUI."),
}
TAKEN = {  # options, the targets that they are for, and why not for others
    "rank": ((LORA,), "other formats are exact"),
    "model": ((LORA, COMFYUI), "other formats need no base model"),
    "dtype": ((*FORMS, LORA), "ComfyUI's magnitudes are all that changes"),
}
EXAMPLES = (
    "examples:\n  lora-trainer convert downloaded.safetensors --to kohya \\\n    --output cat.safetensors\n"
    "  lora-trainer convert cat.safetensors --to diffusers \\\n    --output cat.diffusers.safetensors\n"
    "  lora-trainer convert lokr.safetensors --to lora --rank 32 \\\n    --output lora.safetensors\n"
    "  lora-trainer convert dora.safetensors --to lora --rank 32 \\\n"
    "    --model base.safetensors --output lora.safetensors\n"
    "  lora-trainer convert dora.safetensors --to comfyui \\\n"
    "    --model base.safetensors --output dora.comfyui.safetensors\n\n"
    "ComfyUI, A1111, Forge and sd-scripts load kohya's format,\n"
    "load_lora_weights loads diffusers' format.\nOUT may also follow IN, without --output.\n"
)


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lora",
        metavar="IN",
        help="a LoRA file of any program; with --to lora also DoRA, LoKr, LoHa and OFT; with --to comfyui DoRA",
    )
    parser.add_argument("target", nargs="?", metavar="OUT", help="the same as --output OUT")
    parser.add_argument("--rank", metavar="N", help="with --to lora: the highest rank of a layer")
    text = "with --to lora and comfyui: the base model, which DoRA and OFT need: a .safetensors checkpoint, or a diffusers folder"
    parser.add_argument("--model", metavar="BASE", help=text)
    add_output_arguments(parser, to="always needed", dtype="unchanged", forms=TARGETS, rows="with --to lora: ")


def convert_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write OUT and describe it. Raises UsageError with all problems before anything is written."""
    source, problems = Path(arguments.lora), list(unknown)
    if arguments.target is not None and arguments.output is not None:
        problems.append(Problem("output_twice", "OUT is named twice.", f"Remove {arguments.target}, or --output."))
    arguments.output = arguments.output or arguments.target
    if arguments.to is None:
        problems.append(Problem("flag_missing", "--to is missing.", f"One of: {', '.join(TARGETS)}."))
    rank = number(arguments, "rank", int, lambda value: 1 <= value <= MOST_RANK, problems)
    if arguments.to == COMFYUI and (kind := _exact_in_comfyui(source)):
        message = f"{source.name} is {kind}, without magnitudes of outputs that ComfyUI computes differently."
        problems.append(Problem("no_magnitudes", message, "Use --to kohya, which ComfyUI reads."))
    elif (needed := NEEDED.get(arguments.to)) and getattr(arguments, needed[0]) is None:
        problems.append(Problem("flag_missing", f"--to {arguments.to} needs --{needed[0]}.", needed[1]))
    for name, (targets, why) in TAKEN.items():
        if getattr(arguments, name) is not None and arguments.to in TARGETS and arguments.to not in targets:
            listed = " and ".join(filter(None, [", ".join(targets[:-1]), targets[-1]]))
            problems.append(
                Problem("flag_not_for_command", f"--{name} is for --to {listed}: {why}.", f"Remove --{name}.")
            )
    base = None if arguments.model is None else Path(arguments.model)
    target = target_of(arguments, [source] if base is None else [source, base], problems, TARGETS)
    if problems:
        raise UsageError(problems)
    if rank is not None:
        return _as_lora(arguments, source, rank, base, target)
    if base is not None:
        return _for_comfyui(arguments, source, base, target)
    from lora_trainer.lora_tools.lora_inputs import ToolResult
    from lora_trainer.models.lora_names import convert_lora

    done = run_write(
        target.path,
        lambda: convert_lora(source, target.path, arguments.to, family=arguments.family, dtype=target.dtype),
    )
    exact = "bit for bit" if done.difference == 0 else f"an update differs by {percent(done.difference)} at most"
    headline = f"{counted(done.modules, 'layer')} in {arguments.to} format, compared with {source.name}: {exact}"
    result = ToolResult(done.paths, (), done.notes)
    print_result(arguments, result, headline, modules=done.modules, difference=done.difference)
    return DONE


def _exact_in_comfyui(source: Path) -> str | None:
    """The kind of a LoRA file that ComfyUI computes as it is meant; None for one that it does not, and for what is no LoRA file."""
    from lora_trainer.lora_format.kinds import KINDS
    from lora_trainer.models.lora_facts import read_lora_facts

    try:
        kind = read_lora_facts(source)[0].kind
    except UsageError:  # reading the file whole says why
        return None
    is_rewritten = any(each.rewritten and each.title in (kind or "") for each in KINDS.values())
    return None if is_rewritten else kind


def _for_comfyui(arguments: argparse.Namespace, source: Path, base: Path, target: LoraTarget) -> int:
    """Write a DoRA with the magnitudes that ComfyUI needs, and by how much it would have differed."""
    from lora_trainer.lora_format.reading import values
    from lora_trainer.lora_tools.lora_inputs import LoraInput, ToolResult, origin_of
    from lora_trainer.lora_tools.to_comfyui import to_comfyui
    from lora_trainer.models.lora_names import read_source

    file = read_source(source)
    if problems := values(source.name, file.weights):
        raise UsageError(problems)
    header = {**file.weights.metadata, **origin_of("convert", [LoraInput(source, file)], base=base.name)}
    done = run_write(target.path, lambda: to_comfyui(source, file, target.path, base, header, target.family))
    headline = (
        f"{counted(done.layers, 'layer')} with ComfyUI's magnitudes; of {source.name} it would have computed "
        f"an update that differs by {percent(done.difference_before)} at most"
    )
    note = "for ComfyUI alone. LyCORIS and diffusers would compute another update."
    result = ToolResult((target.path,), (), (note,))
    print_result(arguments, result, headline, modules=done.layers, difference_before=done.difference_before)
    return DONE


def _as_lora(arguments: argparse.Namespace, source: Path, rank: int, base: Path | None, target: LoraTarget) -> int:
    """Write a plain LoRA of a file of any kind, and how much of each layer's update is lost."""
    from lora_trainer.lora_format.reading import values
    from lora_trainer.lora_tools.lora_inputs import LoraInput, origin_of, with_comment, write_result
    from lora_trainer.lora_tools.to_lora import to_lora
    from lora_trainer.models.lora_names import read_source

    file = read_source(source)
    if problems := values(source.name, file.weights):
        raise UsageError(problems)
    combined = to_lora(source.name, file.weights, rank, base)
    header = with_comment(file.weights.metadata, f"converted to a LoRA of rank {rank}")
    header |= origin_of("convert", [LoraInput(source, file)], rank=rank, base=base and base.name)
    result = run_write(target.path, lambda: write_result(combined, file, header, target))
    headline = f"{counted(len(result.layers), 'layer')} as a LoRA of rank {rank} or less"
    print_result(arguments, result, f"{headline}: error {percent(result.error)} of the whole update")
    return DONE
