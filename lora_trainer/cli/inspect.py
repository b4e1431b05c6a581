"""`inspect FILE`: what a LoRA file contains, which layers learned, and which programs read all of it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import DONE, WRONG_USAGE, Problem, UsageError
from lora_trainer.core.findings import folded, printable_lines
from lora_trainer.core.io import finite

if TYPE_CHECKING:
    from lora_trainer.lora_format.inspection import Component, Inspected

EXAMPLES = "examples:\n  lora-trainer inspect cat.safetensors\n  lora-trainer inspect cat.safetensors --json\n"
PAIR = re.compile(r"\((\d+), (\d+)\)")  # width and height in kohya's headers
WIDTH, NAME, MOST_BARS = 80, 34, 40
HEADER = {  # keys of a header that are shown, and their names
    "ss_output_name": "name",
    "ss_base_model_version": "base model version",
    "ss_sd_model_name": "base model",
    "lora_trainer.base_model_form": "base stored as",
    "modelspec.architecture": "architecture",
    "modelspec.prediction_type": "prediction",
    "modelspec.trigger_phrase": "trigger word",
    "ss_network_dim": "rank",
    "ss_network_alpha": "alpha",
    "lora_trainer.alpha": "alpha as trained",
    "ss_network_args": "network",
    "ss_steps": "steps",
    "ss_epoch": "epochs",
    "ss_num_train_images": "images",
    "ss_resolution": "resolution",
    "ss_learning_rate": "learning rate",
    "ss_text_encoder_lr": "text encoder lr",
    "ss_optimizer": "optimizer",
    "ss_clip_skip": "clip skip",
    "ss_max_token_length": "caption tokens",
    "modelspec.date": "date",
    "ss_training_comment": "comment",
}


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", metavar="FILE", help="a LoRA file of any program")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def inspect_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Describe the file. Returns 0 for a valid LoRA, 2 if programs would load it wrongly or not at all."""
    if unknown:
        raise UsageError(unknown)
    from lora_trainer.models.lora_names import inspect_lora

    found = inspect_lora(Path(arguments.lora))
    if arguments.json:
        print(json.dumps(finite(document(found)), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        for line in lines(found):
            print(printable_lines(line))
    return WRONG_USAGE if found.errors else DONE


def document(found: Inspected) -> dict[str, Any]:
    """The JSON that scripts read."""
    from lora_trainer.models.lora_clients import clients

    return {
        "file": str(found.path),
        "kind": found.kind,
        "family": found.weights.family,
        "form": found.style,
        "modules": len(found.weights.modules),
        "tensors": found.tensors,
        "convolutions": found.convolutions,
        "ranks": {str(rank): count for rank, count in sorted(found.ranks.items())},
        "scales": {f"{scale:g}": count for scale, count in sorted(found.scales.items())},
        "alphas": sorted({each.alpha for each in found.weights.modules.values() if each.alpha is not None}),
        "dtypes": dict(found.dtypes),
        "learned_tokens": list(found.learned_tokens),
        "components": {
            name: {"modules": part.modules, "norm": part.norm, "blocks": dict(part.blocks)}
            for name, part in found.components.items()
        },
        "header": dict(found.weights.metadata),
        "hashes": {name: {"recorded": recorded, "found": real} for name, (recorded, real) in found.hashes.items()},
        "clients": [{"name": each.name, "reads": each.reads, "why": each.why} for each in clients(found)],
        "findings": [
            {"severity": severity, **vars(problem)}
            for severity, problems in (("error", found.errors), ("warning", found.warnings))
            for problem in problems
        ],
    }


def lines(found: Inspected) -> Iterator[str]:
    """The same as text, in 80 columns except for messages."""
    from lora_trainer.models.lora_clients import clients

    yield f"{found.path.name}: {found.kind}"
    yield f"  family     {found.weights.family or 'not recognized by names, header or shapes'}"
    yield f"  format     {found.style}, {len(found.weights.modules)} modules in {found.tensors} tensors"
    yield f"  rank       {_counted(found.ranks)}"
    yield f"  scale      {_counted(found.scales)} (alpha / rank; every program applies it)"
    if set(found.scales) != {1.0}:
        yield "             It is no strength: at strength 1 the LoRA acts in full."
    yield f"  stored as  {_counted(found.dtypes)}"
    if found.learned_tokens:
        yield f"  tokens     {', '.join(found.learned_tokens)}"
    for recorded, real in found.hashes.values():
        yield f"  checksum   {'is right' if recorded == real else 'is wrong: the file was changed after it was written'}"
    for name, part in found.components.items():
        yield ""
        yield f"{name}: {part.modules} modules, size of the update {part.norm:.3g}, by block:"
        yield from _bars(part)
    header = [
        (label, value) for key, label in HEADER.items() if (value := found.weights.metadata.get(key, "None")) != "None"
    ]
    if header:
        yield ""
        yield "header:"
        yield from (_cut(f"  {label:<20} {_plain(value)}") for label, value in header)
    yield ""
    yield "read by:"
    for client in clients(found):
        reads = "no" if client.reads == "not" else client.reads
        yield f"  {client.name:<13}{reads:<8} {folded(client.why, sys.stdout, 24)}".rstrip()
    for severity, problems in (("error", found.errors), ("warning", found.warnings)):
        for problem in problems:
            yield folded(f"{severity}: {problem}", sys.stdout)


def _bars(part: Component) -> Iterator[str]:
    blocks = dict(part.blocks)
    shown = dict(list(blocks.items())[:MOST_BARS])
    most = max((norm for norm in blocks.values() if norm == norm), default=0.0)
    room = WIDTH - NAME - 12
    for block, norm in shown.items():
        length = round(room * norm / most) if most and norm == norm else 0
        yield f"  {block[-NAME:]:<{NAME}}{norm:>8.3g}  {'#' * length}".rstrip()
    if len(blocks) > len(shown):
        yield f"  and {len(blocks) - len(shown)} more blocks (--json has all)"


def _counted(values: Mapping[Any, int]) -> str:
    """`16`, or `16 (280), 4 (12)` where they differ."""
    if len(values) == 1:
        return _short(next(iter(values)))
    ordered = sorted(values.items(), key=lambda item: -item[1])
    counts = ", ".join(f"{_short(value)} ({count})" for value, count in ordered[:5])
    return counts + (f" and {len(ordered) - 5} others" if len(ordered) > 5 else "") if counts else "none"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: str) -> str:
    """`64x64` of `(64, 64)`, and `algo: lora, dropout: 0.1` of a JSON object."""
    if size := PAIR.fullmatch(value):
        return f"{size[1]}x{size[2]}"
    try:
        read = json.loads(value) if value.startswith("{") else None
    except (ValueError, RecursionError):
        return value
    return ", ".join(f"{key}: {item}" for key, item in read.items()) if read else value


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
