"""`ui`: serve the page and its REST."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lora_trainer.cli.arguments import say
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.imports import why_unusable

EXAMPLES = """examples:
  lora-trainer ui
  lora-trainer ui --port 0 --output night --root ./models --root ./datasets
  lora-trainer ui --host my-server
"""
PORT, HOST, OUTPUT, DATASETS = 7860, "127.0.0.1", Path("runs"), Path("datasets")
NEEDED = ("fastapi", "uvicorn")


def add_ui_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"0 takes a free one ({PORT})")
    parser.add_argument(
        "--host",
        default=HOST,
        help="address to listen at (default: reachable from this computer alone); another one asks for a token, "
        "which is printed once",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help=f"folder of runs ({OUTPUT})")
    parser.add_argument(
        "--datasets",
        type=Path,
        default=DATASETS,
        metavar="DIR",
        help=f"folder of the datasets that the page may edit ({DATASETS}); other images are only read",
    )
    parser.add_argument(
        "--root",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="folder of models and images that the page may read (repeatable; default: your home folder and the "
        "current one)",
    )


def ui_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Serve until a signal comes. Raises UsageError."""
    problems = [
        *unknown,
        *(
            Problem("folder_missing", f"{root} is not a folder.", "Name a folder.")
            for root in arguments.root
            if not root.is_dir()
        ),
    ]
    if not 0 <= arguments.port <= 65535:
        problems.append(
            Problem("port_out_of_range", f"--port {arguments.port} is no port.", f"Use 0 to 65535, such as {PORT}.")
        )
    for flag, folder in (("--output", arguments.output), ("--datasets", arguments.datasets)):
        if folder.exists() and not folder.is_dir():
            problems.append(Problem("folder_missing", f"{folder} is not a folder.", f"Choose another {flag}."))
    if unusable := [f"{name} {reason}" for name in NEEDED if (reason := why_unusable(name)) is not None]:
        problems.append(Problem("library_missing", f"{' and '.join(unusable)}.", "pip install 'lora-trainer[ui]'"))
    if problems:
        raise UsageError(problems)
    from lora_trainer.web.serve import serve
    from lora_trainer.web.server_state import ServerOptions

    home = Path(os.path.expanduser("~"))  # stays "~" for a user without one
    roots = tuple(arguments.root or [*([home] if home.is_absolute() else []), Path.cwd()])
    serve(arguments.host, arguments.port, ServerOptions(arguments.output, roots, None, arguments.datasets), say)
    return DONE
