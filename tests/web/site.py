"""A folder of runs that were never trained, and the server of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient

from lora_trainer.config.layers import resolve
from lora_trainer.config.toml import to_toml
from lora_trainer.core.io import write_json
from lora_trainer.run_folder.record import Record
from lora_trainer.web.app import make_app
from lora_trainer.web.safety import Token
from lora_trainer.web.server_state import ServerOptions

ADDRESS = "http://127.0.0.1:7860"


def write_run(folder: Path, *, status: str = "done", steps: int = 40, **more: Any) -> Path:
    """A run's folder as a finished run leaves it: record, config, metrics, validation, an event and samples."""
    resolved = resolve([])
    config = resolved.config.model_dump(mode="json")
    record = asdict(Record(folder.name, started=more.pop("started", 1000.0), steps=steps, config=config))
    record |= {"status": status, "origins": dict(resolved.origin), "arithmetic": {"total": steps}}
    record |= {"scores": {"dataset": 0.97, "lora": 0.91}, "model": {"family": "sd15"}, **more}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", record)
    (folder / "config.toml").write_text(to_toml(resolved.config), encoding="utf-8")
    rows = [{"step": step, "loss": 1.0 / step, "lr": 1e-4, "seconds": 0.5} for step in range(1, steps + 1)]
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "validation.jsonl", [{"step": 0, "loss": 0.3}, {"step": steps, "loss": 0.1}])
    write_lines(folder / "events.jsonl", [{"step": 3, "kind": "disk", "message": "<b>waited</b>"}])
    samples = folder / "samples"
    samples.mkdir(exist_ok=True)
    recipe = {"images": [{"prompt": "<script>alert(1)</script>", "seed": 7}], "strengths": [1.0]}
    write_json(samples / "step-000020.json", recipe)
    for name in ("without", "with"):
        Image.new("RGB", (64, 48), "teal").save(samples / f"step-000020_00_{name}.png")
    (folder / f"{folder.name}.safetensors").write_bytes(b"weights")
    (folder / "report.html").write_text("<!doctype html><title>report</title>", encoding="utf-8")
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def site(output: Path, *roots: Path, token: Token | None = None) -> TestClient:
    """A browser of the server of these runs, which are at its own address."""
    return TestClient(make_app(ServerOptions(output, roots, token)), base_url=ADDRESS, raise_server_exceptions=False)


def app_of(client: TestClient) -> FastAPI:
    assert isinstance(client.app, FastAPI)
    return client.app


def problems_of(document: Mapping[str, Any]) -> list[str]:
    """The messages of a refusal; each has a fix or says all."""
    assert set(document) == {"problems"}
    return [each["message"] for each in document["problems"]]
