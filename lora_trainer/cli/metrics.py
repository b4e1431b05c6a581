"""`metrics ROOT…`: the newest numbers of all runs below some folders, for Prometheus."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from lora_trainer.cli.arguments import say
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.imports import why_unusable

EXAMPLES = "examples:\n  lora-trainer metrics runs\n  lora-trainer metrics runs --port 9477\n"
PORT, HOST = 9477, "127.0.0.1"


def add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("roots", nargs="+", metavar="ROOT", type=Path, help="folders of runs, or runs")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"0 takes a free one ({PORT})")
    parser.add_argument(
        "--host",
        default=HOST,
        help="address to listen at (default: reachable from this computer alone; there is no password)",
    )


def metrics_command(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """Serve until a signal comes. Raises UsageError."""
    missing = [root for root in arguments.roots if not root.is_dir()]
    problems = [
        *unknown,
        *(Problem("folder_missing", f"{root} is not a folder.", "Name a folder of runs.") for root in missing),
    ]
    if not 0 <= arguments.port <= 65535:
        problems.append(
            Problem("port_out_of_range", f"--port {arguments.port} is no port.", f"Use 0 to 65535, such as {PORT}.")
        )
    if (reason := why_unusable("prometheus_client")) is not None:
        problems.append(
            Problem("library_missing", f"prometheus-client {reason}.", "pip install 'lora-trainer[metrics]'")
        )
    if problems:
        raise UsageError(problems)
    from lora_trainer.report.prometheus import find_runs, serve_metrics

    try:
        server = serve_metrics(arguments.roots, arguments.host, arguments.port)
    except OSError as error:
        message = f"{arguments.host}:{arguments.port} cannot be used ({error.strerror or error})."
        raise UsageError(Problem("address_unusable", message, "Use another --port or --host.")) from error
    address = f"http://{arguments.host}:{server.server_port}/metrics"
    say(f"{address}: {counted(len(find_runs(arguments.roots)), 'run')} now; Ctrl+C ends it")
    threading.Event().wait()  # a signal raises
    return DONE
