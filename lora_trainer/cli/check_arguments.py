"""Arguments of `lora-trainer check`, and the model that the data is checked for."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.cli.arguments import add_offline_argument, add_settings_arguments, resolved_from, say

if TYPE_CHECKING:
    from lora_trainer.core.errors import Problem

EXAMPLES = (
    "examples:\n  lora-trainer check ./images\n  lora-trainer check ./images --html page.html\n"
    "  lora-trainer check ./images --clean-copy ./cleaned\n  lora-trainer check ./images --model ./my-sd15 --html page.html\n"
)


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="*", metavar="DATA", help="folders or files (default: the built-in dataset)")
    parser.add_argument(
        "--model",
        dest="model.path",
        metavar="MODEL",
        help="check for this model, and ask it whether captions suit their images (default: Stable Diffusion 1.5 at 512 px, not asked)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write an HTML page with the images that have problems"
    )
    parser.add_argument("--quick", action="store_true", help="only headers and captions: decode no image")
    parser.add_argument(
        "--clean-copy", metavar="DIR", type=Path, help="write a cleaned copy; the data itself is not changed"
    )
    add_offline_argument(parser)
    add_settings_arguments(parser)


def check(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Check the data for the model that is named, else for a usual one."""
    vars(arguments)["data.sources"] = arguments.data
    from lora_trainer.builtin import DATA_FOLDER
    from lora_trainer.cli.check import check_command
    from lora_trainer.models.families import FAMILIES
    from lora_trainer.models.family import MOST_CONTROLS, USUAL_FAMILY
    from lora_trainer.models.published import public_architecture
    from lora_trainer.run.inputs import read_model, trained_framings
    from lora_trainer.run.reading import text_options

    # The built-in images fit the built-in base model; your own are checked for a usual model, or the one named.
    builtin = all(Path(source).resolve() == DATA_FOLDER for source in arguments.data)
    config = resolved_from(arguments, unknown, builtin_if_none=builtin).config
    if builtin and not arguments.data and config.data.sources:  # your own, named in --config
        builtin, config = False, resolved_from(arguments, builtin_if_none=False).config
    if config.model.path or (builtin and config.model.family is None):
        facts = read_model(config, weights=False)[1]
    else:
        facts = public_architecture(config.model.family or USUAL_FAMILY).facts
        options = text_options(config, FAMILIES[facts.family])
        # A family alone does not tell whether its model edits images.
        controls = MOST_CONTROLS if FAMILIES[facts.family].pipeline.edits_images else 0
        facts = replace(facts, caption_tokens=options.longest(facts.caption_tokens), most_controls=controls)
    sides = sorted({side for framing in trained_framings(config, facts) for side in framing.resolutions})
    named = f"any {facts.family} model"
    if config.model.path:
        named = f"{facts.family} ({config.model.path})"
    elif builtin and config.model.family is None:
        named = "the built-in base model"
    say(
        f"checked for {named} at {', '.join(map(str, sides))} px{'' if config.model.path else '; name your model with --model'}"
    )
    if not (builtin or config.model.path):
        say("note: `train` without --model uses the built-in model of 128 px, so its buckets differ")
    decode = not arguments.quick
    return check_command(config, arguments.json, facts, arguments.html, arguments.clean_copy, decode=decode)
