"""`lora-trainer doctor`: a measured checklist of this machine, and of a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lora_trainer.cli.arguments import add_settings_arguments, resolved_from
from lora_trainer.core.errors import Problem, UsageError

EXAMPLES = """examples:
  lora-trainer doctor
  lora-trainer doctor --config cat.toml
  lora-trainer doctor runs/cat

Exit code 0, or 2 if a line is an error.
"""


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The run to look at, and the settings of one to come."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="folder of a run: what it does now if it is training, else how it ended"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--online", action="store_true", help="also ask the Hugging Face hub whether it answers")
    add_settings_arguments(parser)


def doctor_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Print the checklist; 2 if a line is an error. Raises UsageError for wrong arguments."""
    folder = Path(arguments.run) if arguments.run else None
    if folder is not None and folder.is_file():  # a run may be named by one of its files
        folder = folder.parent
    if folder is not None and not folder.is_dir():
        unknown = [
            *unknown,
            Problem("folder_missing", f"There is no folder {folder}.", "Name the folder of a run, such as runs/cat."),
        ]
    if unknown:
        raise UsageError(unknown)
    from lora_trainer.doctor.examine import diagnose, read_facts
    from lora_trainer.doctor.lines import TITLES, plain_text, table_of
    from lora_trainer.doctor.this_run import Described, describe_run

    facts = read_facts()  # before anything else sets a variable
    described = Described()
    if arguments.config or arguments.preset or arguments.set:
        vars(arguments)["offline"] = not arguments.online
        try:
            described = describe_run(resolved_from(arguments), facts)
        except UsageError as error:
            described = Described(problems=tuple(error.problems))
    diagnosis = diagnose(facts, described, folder, online=arguments.online)
    if arguments.json:
        sys.stdout.write(json.dumps(diagnosis.to_json(), indent=2, ensure_ascii=False) + "\n")
        return diagnosis.exit_code
    from lora_trainer.monitor.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        sys.stdout.write("\n".join(plain_text(diagnosis)) + "\n")
        return diagnosis.exit_code
    for part, lines in diagnosis.shown:
        console.print(TITLES[part], style="bold")
        console.print(table_of(lines))
    console.print(diagnosis.summary, style="bold")
    return diagnosis.exit_code
