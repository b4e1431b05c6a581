"""`request RUN save|sample|prompts`: ask a run that trains to do something at its next step."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_trainer.cli.arguments import say
from lora_trainer.core.errors import DONE, Problem, UsageError, nearest
from lora_trainer.training.requests import KINDS

EXAMPLES = """examples:
  lora-trainer request runs/cat save
  lora-trainer request runs/cat sample
  lora-trainer request runs/cat prompts --prompt "a cat at sea" --prompt "a cat"
"""


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run that trains now")
    parser.add_argument(
        "do",
        metavar="save|sample|prompts",
        help="save a checkpoint and export the LoRA, generate sample images, or use other prompts for them until the run ends",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="prompts: a prompt (repeatable); [trigger] is replaced by the trigger word",
    )


def request_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Write the request and print the path of its answer. Raises UsageError."""
    from lora_trainer.run.requesting import send_request

    problems = list(unknown)
    if arguments.do not in KINDS:
        problems.append(
            Problem("unknown_request", f"There is no request {arguments.do}.", nearest(arguments.do, KINDS))
        )
    if problems:
        raise UsageError(problems)
    answer = send_request(arguments.run, arguments.do, arguments.prompt)
    say(f"requested: {arguments.do}. It is done after a step; its answer will be in this file:")
    print(answer)
    return DONE
