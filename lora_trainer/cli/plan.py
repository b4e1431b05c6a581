"""`lora-trainer plan`: what a run will take, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import sys

from lora_trainer.cli.arguments import add_run_arguments, explained, gpu_if_auto, layers_from, say, settled
from lora_trainer.core.errors import DONE, WRONG_USAGE, Problem
from lora_trainer.production.settings import settle

EXAMPLES = """examples:
  lora-trainer plan --preset 12gb,quality --set model.family=sdxl
  lora-trainer plan --preset 8gb --model ./my-sd15 --data ./images --json
"""
UNHEEDED = ("all", "offline", "debug")  # of no concern to the page of --all
SETTINGS = "what each single change buys, also where it must be traced for that: half a minute or more"


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What a run takes, and how to show it."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--all", action="store_true", help="every tier, goal and family as a Markdown page")
    parser.add_argument("--what-if", action="store_true", help=SETTINGS)
    add_run_arguments(parser, hidden=("--resume", "--dry-run"))


def plan_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Print the plan; exit code 2 when nothing fits, with what would fit among the advice."""
    problems = list(unknown)
    if arguments.all and any(given for name, given in vars(arguments).items() if name not in UNHEEDED):
        message = "--all writes one page of Markdown of every tier, goal and family, whatever else is set."
        problems.append(Problem(message, "Leave out the other flags, or leave out --all for the plan of one run."))
    presets, user = layers_from(arguments, problems)
    model = settle(presets, user, problems).config.model
    if arguments.all:
        from lora_trainer.production.plans.table import plans_page

        sys.stdout.write(plans_page())
        return DONE
    if model.path is None and model.family is None:
        say("No --model: planning for the built-in base. --set model.family=NAME plans for a family's published model.")
    # A published model has none of the built-in base's settings.
    resolved = settled(presets, user, [], builtin_if_none=model.family is None)
    if explained(arguments, resolved):
        return DONE
    from lora_trainer.core.imports import OPTIONAL, hide
    from lora_trainer.production.plans.plan import make_plan

    hide(OPTIONAL)  # a trace has no use for them
    gpu = gpu_if_auto(arguments)
    plan = make_plan(resolved, gpu_gib=gpu, every_setting=arguments.what_if, here=gpu is not None)
    if arguments.json:
        sys.stdout.write(json.dumps(plan.to_json(), indent=2) + "\n")
    else:
        from lora_trainer.monitor.console import Console
        from lora_trainer.production.plans.view import show_plan

        show_plan(plan, Console(highlight=False))
    return WRONG_USAGE if plan.fits is False else DONE
