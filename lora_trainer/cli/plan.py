"""`lora-trainer plan`: what a run will take, before anything is loaded."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from lora_trainer.cli.arguments import say
from lora_trainer.config.layers import Resolved
from lora_trainer.core.errors import DONE, WRONG_USAGE
from lora_trainer.production.plan import make_plan
from lora_trainer.production.plan_table import plans_page
from lora_trainer.production.plan_view import show_plan


def plan_command(resolved: Resolved, card_gib: float | None, *, as_json: bool) -> int:
    """Print the plan; exit code 2 when nothing fits, with what would fit among the advice."""
    if resolved.config.model.path is None and resolved.config.model.family is None:
        say("No --model: planning for the built-in base. --set model.family=NAME plans for a family's published model.")
    plan = make_plan(resolved, card_gib=card_gib)
    if as_json:
        sys.stdout.write(json.dumps(plan.to_json(), indent=2) + "\n")
    else:
        show_plan(plan, Console(highlight=False))
    return DONE if plan.fit.fits else WRONG_USAGE


def all_command() -> int:
    """The plan of every tier, goal and family as Markdown."""
    sys.stdout.write(plans_page())
    return DONE
