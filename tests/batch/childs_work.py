"""The work of a child process in tests, in its own module so that it loads nothing."""

from __future__ import annotations

import time


def end_at_once(path: str) -> None:
    raise SystemExit(9)


def sleep(path: str) -> None:
    time.sleep(60)
