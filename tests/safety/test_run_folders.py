"""Untrusted run folders, batches and tables: no access outside their folder, and harmless reports."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.images.images import BrokenImageError, load_rgb
from lora_trainer.data.manifest import read_manifest
from lora_trainer.run.order import LONGEST_NAME, run_folder
from tests.recipes.recipe import draw_images

EVIL = "<script>alert(1)</script>\x1b[31m\u202e"
RECORDS: dict[str, Any] = {
    "names everywhere": {
        "name": "../../" + EVIL,
        "status": EVIL,
        "steps": 10**400,
        "started": 1e300,
        "files": {"kohya": "../../../etc/passwd", "diffusers": "/etc/passwd", "report": EVIL, "before_after": EVIL},
        "config": {EVIL: {EVIL: EVIL}, "gates": {"lora": "x"}, "model": 5},
        "dataset": {
            "findings": [{"code": EVIL, "message": EVIL, "path": EVIL, "severity": EVIL}],
            "buckets": {EVIL: 3},
        },
        "versions": {EVIL: EVIL},
        "hardware": {EVIL: [EVIL]},
        "events": [{"kind": EVIL, "message": EVIL, "step": EVIL}, 5, None],
        "seconds": {"total": 10**400},
        "samples": [EVIL, "../../x.json"],
        "choices": [EVIL, {}],
        "model": {"path": EVIL, "family": EVIL},
        "lora": {"parts": {EVIL: 0.5}, "findings": 7, "numbers": []},
        "released": {"step": "x", "reason": EVIL},
        "sample_counts": {"line": EVIL},
    },
    "wrong kinds": dict.fromkeys("name status steps files config dataset versions events seconds samples".split(), 5),
    "lists": {key: [[]] for key in "name status steps files config dataset versions events seconds samples".split()},
}


@pytest.mark.parametrize("document", RECORDS.values(), ids=RECORDS)
def test_the_report_of_a_strangers_run_is_harmless(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(document), encoding="utf-8")
    rows = [{"step": 1, "loss": 0.5}, {"step": 10**400, "loss": 10**400}, {"step": 2, "loss": EVIL}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "events.jsonl").write_text(json.dumps({"step": 1, "kind": EVIL, "message": EVIL}) + "\n", "utf-8")
    (folder / "validation.jsonl").write_text("[" * 100_000, encoding="utf-8")
    recipe = {"images": [{"prompt": EVIL, "seed": 10**400}, 5]}
    for name in ("step-000001.json", "before_after.json"):
        (folder / "samples" / name).write_text(json.dumps(recipe), encoding="utf-8")
    if os.name == "posix":  # links need rights on Windows
        (folder / "samples" / "step-000001_00_with.png").symlink_to("/etc/passwd")
    has_settings = isinstance(document["config"], dict)  # without them a record is damaged
    assert main(["report", str(folder)]) == (0 if has_settings else 2), capsys.readouterr().err
    if not has_settings:
        assert not (folder / "report.html").exists()
        return
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "root:" not in page
    assert "\x1b" not in page
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "5", "{", "\x00", "null"])
def test_an_invalid_record(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(text, encoding="utf-8")
    assert main(["report", str(folder)]) in (0, 2)
    output = capsys.readouterr().err
    assert "bug" not in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "name",
    ["..", ".", "a/b", "a\\b", "/etc", "two\nlines", "\x1b[31m", "nul\0", "turned\u202e", "end ", "é" * 101],
)
def test_names_of_runs_stay_in_the_output_folder(name: str, tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"output": str(tmp_path), "name": name}})
    with pytest.raises(UsageError, match="--name"):
        run_folder(config)


@pytest.mark.parametrize("name", ["-rf", "[red]", "<b>", "cat.v2", ".hidden", "x" * LONGEST_NAME])
def test_names_that_only_look_dangerous_are_accepted(name: str, tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"output": str(tmp_path), "name": name}})
    folder = run_folder(config)
    assert folder.parent == tmp_path
    folder.mkdir()
    (folder / f"{name}.diffusers.safetensors").touch()


def test_a_batch_of_hostile_folders(sound_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    for name in ("-rf", "\x1b[31mred", "[red]mark", "<b>bold", "two\nlines"):
        (root / name).mkdir(parents=True)
    settings = {"-rf": 'name = ".."', "<b>bold": 'offline = false\noutput = "/tmp/elsewhere"'}
    for name, text in settings.items():
        (root / name / "lora.toml").write_text(f"[run]\n{text}\n", encoding="utf-8")
    draw_images(root / "[red]mark", 2)
    before = {path for path in tmp_path.rglob("*") if "runs" not in path.parts}
    arguments = [
        "batch",
        str(root),
        "--model",
        str(sound_model),
        "--output",
        str(tmp_path / "runs"),
        "--max-steps",
        "1",
    ]
    code = main([*arguments, "--set", f"cache.dir={tmp_path / 'runs' / 'cache'}", "--dry-run"])
    output = capsys.readouterr()
    assert code in (2, 3)
    assert "run.offline" in output.out + output.err
    assert "run.output" in output.out + output.err
    assert "bug" not in output.err
    for text in (output.out, output.err):
        assert "\x1b" not in text
    assert {path for path in tmp_path.rglob("*") if "runs" not in path.parts} == before


def test_a_table_cannot_name_network_or_impossible_paths(tmp_path: Path) -> None:
    data = draw_images(tmp_path / "far" / "away", 2)
    rows = [
        {"file_name": "far/away/image_0.png", "text": "a"},
        {"file_name": "../" + tmp_path.name + "/far/../far/away/image_1.png", "text": "b"},
        {"file_name": "a\0b/c.png", "text": "c"},
        {"file_name": "\udce9\ud800/c.png", "text": "d"},
        {"file_name": "x" * 5000 + ".png", "text": "e"},
    ]
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    manifest, _ = read_manifest([SourceSection(path=str(table))], allow_missing_captions=True)
    assert {sample.path for sample in manifest.samples} >= set(data.glob("*.png"))
    inner = tmp_path / "inner"
    inner.mkdir()
    shutil.move(table, inner / "rows.jsonl")
    rows = [{"file_name": "../far/away/image_0.png", "text": "a"}]
    (inner / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    manifest, _ = read_manifest([SourceSection(path=str(inner / "rows.jsonl"))], allow_missing_captions=True)
    assert any("lie outside" in note for note in manifest.notes)
    for share in ("\\\\evil\\share\\a.png", "//evil/share/a.png"):
        (inner / "rows.jsonl").write_text(json.dumps({"file_name": share, "text": "a"}), encoding="utf-8")
        with pytest.raises(UsageError, match="address"):
            read_manifest([SourceSection(path=str(inner / "rows.jsonl"))], allow_missing_captions=True)


@pytest.mark.parametrize(
    "start", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"8BPS\0\1", b"<svg/>", b"%PDF-1.4\n"]
)
def test_no_other_program_is_called_for_an_image(start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr("subprocess.Popen", lambda *arguments, **_: called.append(arguments))
    monkeypatch.setattr("subprocess.check_call", lambda *arguments, **_: called.append(arguments))
    path = tmp_path / "a.png"
    path.write_bytes(start + bytes(200))
    with pytest.raises(BrokenImageError):
        load_rgb(path)
    assert called == []
