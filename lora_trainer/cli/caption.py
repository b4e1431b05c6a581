"""`lora-trainer caption`: captions or tags for images by a model on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.cli.arguments import add_offline_argument, say
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.terminal import is_terminal
from lora_trainer.models.known_captioners import KNOWN_CAPTIONERS

if TYPE_CHECKING:
    from lora_trainer.models.captioner import CaptionOptions
    from lora_trainer.run.captioning import Captioned, OverwriteJournal, Wanted, Watch

EXAMPLES = """examples:
  lora-trainer caption --list
  lora-trainer caption ./images --model florence-2-base --in-place
  lora-trainer caption ./images --model wd-swinv2-v3 --blacklist solo --in-place
  lora-trainer caption ./images --model ./blip --trigger-word sks --in-place

Images with a caption in .txt, .caption or metadata.jsonl, .csv or .parquet are
skipped; captions with other endings are ignored. No caption is overwritten
without --overwrite. A stopped run continues where it stopped.
"""
SHOWN = 10  # files of one kind that are named
LINES = 10  # of progress where there is no terminal


def add_caption_arguments(parser: argparse.ArgumentParser) -> None:
    """The images, the model, what it should write, and where."""
    parser.add_argument("data", nargs="*", metavar="DATA", help="folders of images")
    parser.add_argument("--list", action="store_true", help="the models that are known by name: size, license, hub id")
    parser.add_argument(
        "--model",
        metavar="NAME_OR_DIR",
        help="a name of --list, or a local folder of a captioner, a chat model that sees images, or a tagger",
    )
    parser.add_argument("--yes", action="store_true", help="download the model without a question")
    parser.add_argument("--output", metavar="DIR", help="write the captions here, in the same subfolders as the images")
    parser.add_argument("--in-place", action="store_true", help="write each caption beside its image")
    parser.add_argument("--overwrite", action="store_true", help="caption all images, and overwrite existing captions")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="images at once (8)")
    parser.add_argument(
        "--prefix", default="", metavar="TEXT", help="what each caption begins with; may hold [trigger]"
    )
    parser.add_argument(
        "--trigger-word", metavar="WORD", help="a word that each caption gets in front, or in the place of [trigger]"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="captions: what the model is asked, or how its sentence begins"
    )
    parser.add_argument("--length", choices=("short", "medium", "long"), help="captions: how long (medium)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="captions: where a text is cut (60, 120 or 300)")
    parser.add_argument(
        "--candidates", type=int, metavar="N", help="captions: so many for each image, as lines of its file (1)"
    )
    parser.add_argument("--threshold", type=float, metavar="X", help="tags: least probability of a label (0.35)")
    parser.add_argument("--blacklist", metavar="TAGS", help="tags: those that are left out, separated by commas")
    add_offline_argument(parser)


def caption_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Caption the images without a caption. Raises UsageError for wrong arguments, data or model."""
    problems = unknown + ([] if arguments.list else _wrong_arguments(arguments))
    if problems:
        raise UsageError(problems)
    if arguments.list:
        width = max(map(len, KNOWN_CAPTIONERS))
        for name, each in KNOWN_CAPTIONERS.items():
            print(f"{name:{width}}  {each.gigabytes:4.1f} GB  {each.writes:8}  {each.repository}, {each.license}")
        print("Any other is named by its folder. Sizes are about those of the download.")
        return DONE
    from lora_trainer.models.captioner import CaptionOptions, check_options
    from lora_trainer.models.tagger import import_onnxruntime
    from lora_trainer.run.bases.find import go_offline
    from lora_trainer.run.captioner_files import find_captioner, known_captioner
    from lora_trainer.run.captioning import OverwriteJournal, find_wanted

    if arguments.offline:
        go_offline()
    blacklist = tuple(tag for tag in map(str.strip, (arguments.blacklist or "").split(",")) if tag)
    options = CaptionOptions(
        arguments.prompt,
        arguments.length,
        arguments.max_tokens,
        arguments.candidates,
        arguments.threshold,
        blacklist,
    )
    if (known := known_captioner(arguments.model)) is not None:
        check_options(known.writes, options)
        if known.writes == "tags":
            import_onnxruntime()
    folders, output = [Path(folder) for folder in arguments.data], arguments.output and Path(arguments.output)
    journal = None
    if arguments.overwrite:
        places = [folder.resolve() for folder in folders], output and output.resolve()
        journal = OverwriteJournal.of_command(
            places, arguments.model, options, arguments.prefix, arguments.trigger_word
        )
    wanted, existing, unusable = find_wanted(folders, output, journal)
    if journal is None:
        say(f"{counted(len(wanted) + existing, 'image')}: {existing} with a caption, {len(wanted)} to caption")
    else:
        before = f" of {len(wanted) + existing}: a stopped run captioned the others" if existing else ""
        say(f"{counted(len(wanted), 'image')} to caption{before}")
    if unusable:
        _print_some("unchanged", [f"{path} {why}" for path, why in unusable])
        say("  training refuses these: fix the caption, or remove it to get a new one")
    if not wanted:
        say("Nothing to caption; --overwrite captions images that have a caption, too.")
        return DONE
    folder = find_captioner(
        arguments.model, offline=arguments.offline, consent=lambda about: _agrees(arguments.yes, about), say=say
    )
    done = _caption(arguments, folder, options, wanted, journal)
    _print_some("no caption", [str(path) for path in done.silent])
    _print_some("unusable", [f"{path} {why}" for path, why in done.broken])
    print(
        f"{done.written} captions written, {existing + done.existing} existed, {len(done.silent)} images without a caption, "
        f"{len(done.broken)} unusable images"
    )
    if options.candidates and options.candidates > 1:
        say("To train one of an image's lines each time: --set captions.wildcards=true")
    return DONE


def _wrong_arguments(arguments: argparse.Namespace) -> list[Problem]:
    from lora_trainer.run.captioner_files import known_captioner

    problems: list[Problem] = []
    if not arguments.data:
        problems.append(Problem("data_missing", "No images are named.", "Name a folder of images."))
    if not arguments.model:
        fix = "Name one with --model; `lora-trainer caption --list` lists those that are known by name."
        problems.append(Problem("model_missing", "No model is named.", fix))
    else:
        try:
            known_captioner(arguments.model)
        except UsageError as error:
            problems.extend(error.problems)
    if bool(arguments.output) == arguments.in_place:
        fix = "--output DIR writes into another folder, --in-place beside the images."
        problems.append(Problem("output_missing", "Choose where to write captions: --output or --in-place.", fix))
    counts = {
        "--batch-size": arguments.batch_size,
        "--max-tokens": arguments.max_tokens,
        "--candidates": arguments.candidates,
    }
    for flag, count in counts.items():
        if count is not None and count < 1:
            problems.append(Problem("count_out_of_range", f"{flag} {count} is out of range.", "It is at least 1."))
    if arguments.threshold is not None and not 0.0 < arguments.threshold < 1.0:
        message = f"--threshold {arguments.threshold:g} is out of range."
        problems.append(Problem("threshold_out_of_range", message, "It lies between 0 and 1."))
    return problems


def _agrees(beforehand: bool, about: str) -> bool:
    """Whether the user says yes, or did so `beforehand`; where there is no terminal nobody is asked."""
    if beforehand:
        return True
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        return False
    print(f"{about} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _caption(
    arguments: argparse.Namespace,
    folder: Path,
    options: CaptionOptions,
    wanted: Sequence[Wanted],
    journal: OverwriteJournal | None,
) -> Captioned:
    import torch

    from lora_trainer.models.captioner import load_captioner
    from lora_trainer.run.captioning import caption_images, finisher

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    captioner = load_captioner(folder, device, options)
    say(f"{arguments.model} writes {captioner.kind} on {device.type}")
    with _progress(len(wanted)) as watch:
        return caption_images(
            wanted,
            captioner.describe,
            batch=arguments.batch_size,
            finish=finisher(arguments.prefix, arguments.trigger_word, several=(options.candidates or 1) > 1),
            journal=journal,
            watch=watch,
        )


@contextmanager
def _progress(total: int) -> Iterator[Watch]:
    """A bar in a terminal, elsewhere a line for each tenth."""
    from rich.console import Console
    from rich.progress import Progress

    if is_terminal(sys.stderr):
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("captioning", total=total)
            yield lambda done, of: bar.update(task, completed=done, total=of)
        return
    said = 0

    def print_tenths(done: int, of: int) -> None:
        nonlocal said
        if done * LINES // of > said:
            said = done * LINES // of
            say(f"captioned {done} of {of} images")

    yield print_tenths


def _print_some(title: str, lines: Sequence[str]) -> None:
    for line in lines[:SHOWN]:
        say(f"{title}: {line}")
    if len(lines) > SHOWN:
        say(f"{title}: {len(lines) - SHOWN} more")
