"""What goes wrong elsewhere than on the disk, put in place in a child before its command begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TROUBLES: dict[str, Callable[..., Any]] = {}
