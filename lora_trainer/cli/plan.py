"""`lora-trainer plan`: predict what a run needs before anything is loaded."""

from __future__ import annotations

import argparse
import json
import sys

from lora_trainer.cli.arguments import add_run_arguments, explained, gpu_if_auto, layers_from, say, settled
from lora_trainer.core.errors import DONE, WRONG_USAGE, Problem
from lora_trainer.run.settings import settle

EXAMPLES = """examples:
  lora-trainer plan --preset 12gb,quality --set model.family=sdxl
  lora-trainer plan --preset 24gb --set model.family=sdxl --together 8
  lora-trainer plan --preset 8gb --model ./my-sd15 --data ./images --json
"""
ALLOWED_WITH_ALL = ("all", "offline", "debug", "together")
WHAT_IF = "show what each single change would gain; takes half a minute or more"


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of the run, and how to show the plan."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--all", action="store_true", help="every VRAM preset, training preset and family as a Markdown page"
    )
    parser.add_argument("--what-if", action="store_true", help=WHAT_IF)
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="K",
        help="also plan K such runs on one base model (batch --together)",
    )
    add_run_arguments(parser, hidden=("--resume", "--dry-run", "--profile"))


def plan_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Print the plan. Returns 2 if the run does not fit; the advice then names what would fit."""
    problems = list(unknown)
    if arguments.all and any(value for name, value in vars(arguments).items() if name not in ALLOWED_WITH_ALL):
        message = (
            "--all writes a Markdown page of every VRAM preset, training preset and family, and uses no other flag."
        )
        problems.append(
            Problem("flags_exclude_each_other", message, "Remove the other flags, or remove --all to plan one run.")
        )
    if arguments.together < 1:
        problems.append(
            Problem(
                "together_out_of_range", f"--together is {arguments.together}, must be at least 1.", "1 plans one run."
            )
        )
    presets, user = layers_from(arguments, problems)
    model = settle(presets, user, problems).config.model
    if arguments.all:
        from lora_trainer.run.plans.page import plans_page

        sys.stdout.write(plans_page())
        return DONE
    if model.path is None and model.family is None:
        say(
            "No --model: planning for the built-in base model. --set model.family=NAME plans for a family's published model."
        )
    # The settings of the built-in base model do not apply to a published model.
    resolved = settled(presets, user, [], builtin_if_none=model.family is None)
    if explained(arguments, resolved):
        return DONE
    from lora_trainer.core.imports import OPTIONAL, hide
    from lora_trainer.jobs.joint_jobs import settings_against
    from lora_trainer.run.plans.plan import make_plan

    hide(OPTIONAL)  # a trace does not need them
    gpu = gpu_if_auto(arguments.preset, user)
    plan = make_plan(resolved, gpu_gib=gpu, every_setting=arguments.what_if, here=gpu is not None)
    together = arguments.together if arguments.together > 1 else 0
    if together and (settings := settings_against(resolved.config)):
        say(f"batch --together trains such a run alone: {settings}")
        together = 0
    if arguments.json:
        sys.stdout.write(json.dumps(plan.to_json(together), indent=2) + "\n")
    else:
        from lora_trainer.monitor.console import Console
        from lora_trainer.run.plans.view import show_plan

        show_plan(plan, Console(highlight=False), together)
    return WRONG_USAGE if plan.fits is False else DONE
