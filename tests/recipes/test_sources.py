"""One run with sources of every kind."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lora_trainer.cli.main import main
from tests.recipes.recipe import Bench, draw_images, exported, record


def lay_out(root: Path) -> Path:
    """A config whose sources are a kohya folder, a tar, a Parquet file, regularization and images with transparency."""
    images = draw_images(root / "made", 14)
    drawn = [(path, path.with_suffix(".txt").read_text("utf-8")) for path in sorted(images.glob("*.png"))]
    (root / "2_sks ring").mkdir()
    for path, _ in drawn[:3]:
        path.rename(root / "2_sks ring" / path.name)
    with tarfile.open(root / "shard-0.tar", "w") as tar:
        for path, caption in drawn[3:6]:
            tar.add(path, path.name)
            text = tarfile.TarInfo(path.with_suffix(".json").name)
            text.size = len(data := json.dumps({"caption": caption, "weight": 0.5}).encode())
            tar.addfile(text, io.BytesIO(data))
    rows = {"image": [path.read_bytes() for path, _ in drawn[6:9]], "text": [text for _, text in drawn[6:9]]}
    pq.write_table(pa.table(rows), root / "more.parquet")
    for name, some in (("class", drawn[9:12]), ("clear", drawn[12:14])):
        (root / name).mkdir()
        for path, caption in some:
            image = Image.open(path)
            if name == "clear":
                image.putalpha(Image.linear_gradient("L").resize(image.size))
            image.save(root / name / path.name)
            (root / name / path.with_suffix(".txt").name).write_text(caption, encoding="utf-8")
    config = root / "config.toml"
    tables = [
        'path = "2_sks ring"', 'path = "shard-{0..0}.tar"\nrepeats = 1.5', 'path = "more.parquet"\nloss_weight = 0.8',
        'path = "class"\nis_reg = true', 'path = "clear"\nmasks = "alpha"',
    ]  # fmt: skip
    config.write_text("".join(f"[[data.sources]]\n{table}\n" for table in tables), encoding="utf-8")
    return config


def test_a_run_with_mixed_sources_repeats_from_its_record(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = lay_out(tmp_path / "data")
    monkeypatch.chdir(config.parent)
    before = {path: path.stat().st_mtime_ns for path in config.parent.rglob("*")}

    def train(name: str, *extra: str, steps: int = 4) -> int:
        arguments = bench.arguments(name, *extra, steps=steps, checkpoint__every_n_steps=2)
        place = arguments.index("--data")
        del arguments[place : place + 2]
        return main(arguments)

    assert train("mixed", "--config", str(config)) == 0
    assert "regularization" in capsys.readouterr().out
    written = record(bench.folder("mixed"))
    assert (written["status"], written["dataset"]["samples"]) == ("done", 14)
    assert {path: path.stat().st_mtime_ns for path in config.parent.rglob("*")} == before
    monkeypatch.chdir(tmp_path)  # a run records absolute paths
    again = str(bench.folder("mixed") / "config.toml")
    assert train("again", "--config", again, steps=2) == 0
    assert train("again", "--config", again, "--resume") == 0
    kept = [list(exported(bench.folder(name)).values()) for name in ("mixed", "again")]
    assert kept[0] == kept[1]
