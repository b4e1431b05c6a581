"""`lora-trainer caption`: captions or tags for images that have none, by a model on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_trainer.cli.arguments import add_offline_argument, say
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.terminal import is_terminal

EXAMPLES = """examples:
  lora-trainer caption ./images --model ./blip-large --output ./captions
  lora-trainer caption ./images --model ./tagger --threshold 0.5 --in-place

Images with a caption in .txt, .caption or metadata.jsonl, .csv or .parquet are
skipped; captions with other endings are ignored. No file is overwritten. A
stopped run continues where it stopped.
"""
SHOWN = 10  # files of one kind that are named


def add_caption_arguments(parser: argparse.ArgumentParser) -> None:
    """The images, the model, and where to write the captions."""
    parser.add_argument("data", nargs="+", metavar="DATA", help="folders of images")
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="a local folder: a captioner such as BLIP or GIT, or an image classifier with many labels",
    )
    parser.add_argument("--output", metavar="DIR", help="write the captions here, in the same subfolders as the images")
    parser.add_argument("--in-place", action="store_true", help="write each caption beside its image")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="images at once (8)")
    parser.add_argument(
        "--threshold", type=float, default=0.35, metavar="X", help="tags: least probability of a label (0.35)"
    )
    parser.add_argument("--max-tokens", type=int, default=60, metavar="N", help="captions: longest text (60)")
    add_offline_argument(parser)


def caption_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Caption the images without a caption. Raises UsageError for wrong arguments, data or model."""
    problems = list(unknown)
    if bool(arguments.output) == arguments.in_place:
        fix = "--output DIR writes into another folder, --in-place beside the images."
        problems.append(Problem("output_missing", "Choose where to write captions: --output or --in-place.", fix))
    for flag, count in (("--batch-size", arguments.batch_size), ("--max-tokens", arguments.max_tokens)):
        if count < 1:
            problems.append(Problem("count_out_of_range", f"{flag} {count} is out of range.", "It is at least 1."))
    if not 0.0 < arguments.threshold < 1.0:
        problems.append(
            Problem(
                "threshold_out_of_range",
                f"--threshold {arguments.threshold:g} is out of range.",
                "It lies between 0 and 1.",
            )
        )
    if problems:
        raise UsageError(problems)
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from lora_trainer.models.captioner import load_captioner
    from lora_trainer.run.bases.find import go_offline
    from lora_trainer.run.captioning import caption_images, find_wanted

    if arguments.offline:
        go_offline()
    folders = [Path(folder) for folder in arguments.data]
    wanted, existing, unusable = find_wanted(folders, Path(arguments.output) if arguments.output else None)
    say(f"{len(wanted) + existing} images: {existing} have a caption, {len(wanted)} have none")
    if unusable:
        _print_some("unchanged", [f"{path} {why}" for path, why in unusable])
        say("  training refuses these: fix the caption, or remove it to get a new one")
    if not wanted:
        return DONE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    captioner = load_captioner(
        Path(arguments.model), device, threshold=arguments.threshold, most_tokens=arguments.max_tokens
    )
    say(f"{arguments.model} writes {captioner.kind} on {device.type}")
    with Progress(console=Console(stderr=True), transient=True, disable=not is_terminal(sys.stderr)) as bar:
        task = bar.add_task("captioning", total=len(wanted))
        done = caption_images(
            wanted,
            captioner.describe,
            batch=arguments.batch_size,
            existing=existing,
            watch=lambda part, whole: bar.update(task, completed=part, total=whole),
        )
    _print_some("no caption", [str(path) for path in done.silent])
    _print_some("unusable", [f"{path} {why}" for path, why in done.broken])
    print(
        f"{done.written} captions written, {done.existing} existed, {len(done.silent)} images without a caption, "
        f"{len(done.broken)} unusable images"
    )
    return DONE


def _print_some(title: str, lines: Sequence[str]) -> None:
    for line in lines[:SHOWN]:
        say(f"{title}: {line}")
    if len(lines) > SHOWN:
        say(f"{title}: {len(lines) - SHOWN} more")
