"""Long lines in the console: wrapped at words on a terminal, whole elsewhere."""

from __future__ import annotations

import io

import pytest

from lora_trainer.monitor.console import Console

PATH = "/" + "/".join(["a-rather-long-folder"] * 6)
LINE = f"  note: {'the words of a finding ' * 6}in {PATH} and after it"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_line_is_wrapped_only_on_a_terminal(terminal: bool) -> None:
    page = io.StringIO()
    console = Console(
        file=page, width=80, force_terminal=terminal, color_system=None, highlight=False, markup=False, soft_wrap=True
    )
    console.print(LINE)
    console.print("short", LINE, soft_wrap=True)
    first, whole = page.getvalue().split("short ")
    assert whole == f"{LINE}\n"
    lines = first.splitlines()
    assert " ".join(line.strip() for line in lines) == LINE.strip()
    assert any(PATH in line for line in lines)
    if terminal:
        assert all(len(line) <= 80 or PATH in line for line in lines)
        assert all(line.startswith("  ") for line in lines)
    else:
        assert lines == [LINE]
