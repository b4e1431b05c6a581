"""A file that another program has open for a moment, as a virus scanner does on Windows, is replaced all the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_trainer.core import io


@pytest.mark.parametrize("refusals", [0, 2, 3])
def test_a_refused_rename_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    rename, left = os.replace, [refusals]

    def refuse(source: Path, target: Path) -> None:
        if left[0]:
            left[0] -= 1
            raise PermissionError(13, "in use", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(io, "REPLACE_TRIES", 3)
    monkeypatch.setattr(io, "REPLACE_EVERY", 0.0)
    (tmp_path / "run.json").write_text("old", encoding="utf-8")
    if refusals == 3:
        with pytest.raises(PermissionError):
            io.write_text(tmp_path / "run.json", "new")
    else:
        io.write_text(tmp_path / "run.json", "new")
    assert (tmp_path / "run.json").read_text("utf-8") == ("old" if refusals == 3 else "new")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
