"""Serve the page until a signal comes: the address, and the token of an address that others can reach."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.interrupt import listening as interrupts
from lora_trainer.web.app import make_app
from lora_trainer.web.run_list import OWN
from lora_trainer.web.safety import Token, token_of
from lora_trainer.web.server_state import ServerOptions

LEAVE_SECONDS = 2  # for open pages when the server ends


def serve(host: str, port: int, folders: ServerOptions, say: Callable[[str], None]) -> None:
    """Serve the runs in `output` of `folders` at an address; port 0 takes a free one. Runs that it starts do not end with it.

    Raises UsageError for an address that cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        message = f"{host}:{port} cannot be used ({(error.strerror or str(error)).lower()})."
        raise UsageError(
            Problem("address_unusable", message, "Use another --port, such as 0 for a free one, or another --host.")
        ) from error
    with listening:
        number = listening.getsockname()[1]
        token = None if is_loopback(host) else token_for(folders.output / OWN / "token", say)
        roots = tuple(root.resolve() for root in folders.roots)
        datasets = folders.datasets and folders.datasets.resolve()
        options = ServerOptions(folders.output.resolve(), roots, token, datasets)
        shown = f"[{host}]" if ":" in host else host
        say(f"page: http://{shown}:{number}/ (runs in {options.output}; Ctrl+C ends it, not the runs)")
        if "SSH_CONNECTION" in os.environ and token is None:
            say(f"on your own computer: ssh -L {number}:{host}:{number} {getpass.getuser()}@{socket.gethostname()}")
        app = make_app(options)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=LEAVE_SECONDS,
        )
        server = uvicorn.Server(config)
        app.state.server.watcher.is_leaving = lambda: server.should_exit
        with interrupts() as interrupt:
            interrupt.silent = True  # what it says of a signal is of training
            try:
                server.run(sockets=[listening])
            finally:
                live = sum(row["is_live"] for row in app.state.server.run_rows.rows())
                runs = f"; {live} {'run continues' if live == 1 else 'runs continue'}" if live else ""
                say(f"the page has ended{runs}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def token_for(path: Path, say: Callable[[str], None]) -> Token:
    """The token of other addresses. It is printed when it is made, and never again."""
    try:
        token, text = token_of(path)
    except OSError as error:
        message = f"{path} cannot be read or written ({(error.strerror or str(error)).lower()})."
        raise UsageError(Problem("file_unreadable", message, "Choose another --output.")) from error
    say(
        f"token: {text} (shown once; its hash is in {path})"
        if text
        else f"token: as printed before (delete {path} for a new one)"
    )
    say("warning: the connection is not encrypted. Use a tunnel (ssh -L) or a proxy with TLS in an open network.")
    return token
