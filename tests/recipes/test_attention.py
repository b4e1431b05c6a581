"""`memory.attention` of whole runs: the fastest is timed once, said, and kept on resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_trainer.config.schema import Config
from lora_trainer.config.toml import read_toml
from lora_trainer.models.attention import choose
from lora_trainer.models.attention.shapes import AttentionShape
from lora_trainer.monitor.watches import Say, Watches
from lora_trainer.training.attention import timed_attentions
from tests.recipes.recipe import Bench, record


def attention_of(bench: Bench, name: str) -> tuple[str, dict[str, Any]]:
    """The line that says what was chosen, and the record."""
    told = record(bench.folder(name))
    (line,) = [line for line in told["choices"] if line.startswith("attention")]
    return str(line), told


def test_the_fastest_is_timed_once_and_kept_on_resuming(bench, monkeypatch, capsys):
    seconds = {"sdpa": 0.2, "flash": 0.3, "math": 0.1}
    asked = list[int]()

    def race(names, dtype, device, shape, steps):
        asked.append(shape.queries)
        return {name: [seconds[name]] * steps for name in names}

    with monkeypatch.context() as patch:
        patch.setattr(choose, "race", race)
        assert bench.run("timed", steps=1, memory__attention="fastest") == 0
    line, told = attention_of(bench, "timed")
    assert line.startswith("attention math: forward and backward in all layers: math")
    assert "xformers" not in line
    (left,) = [line for line in told["choices"] if line.startswith("not used for attention")]
    assert "xformers" in left
    assert left not in capsys.readouterr().out, "what is not here is of no concern"
    assert len(asked) == len(set(asked)) * 2, "self and cross at each size"
    assert told["hardware"]["timed_attention"] == "math"
    assert read_toml(bench.folder("timed") / "config.toml")["memory"]["attention"] == "math"

    def never(*_: object) -> None:
        raise AssertionError("timed again")

    with monkeypatch.context() as patch:
        patch.setattr(choose, "race", never)
        capsys.readouterr()
        assert bench.run("timed", "--resume", steps=2, memory__attention="fastest") == 0
    assert "attention math: the fastest when the run began" in capsys.readouterr().out
    line, told = attention_of(bench, "timed")
    assert line.startswith("attention math: works")
    assert told["hardware"]["timed_attention"] == "math"


def test_an_attention_that_cannot_be_had_is_refused_with_what_would_do(bench, capsys):
    assert bench.run("asked", steps=1, memory__attention="flash3") == 2
    said = capsys.readouterr().err
    assert "memory.attention=flash3" in said
    assert "Set memory.attention=auto" in said or "set memory.attention=auto" in said


def test_a_run_says_what_was_seen_of_its_machine(bench, monkeypatch):
    looks = list[tuple[float, float]]()

    def look(watch: Watches, seconds: float, waited: float, say: Say, way: object) -> None:
        looks.append((seconds, waited))
        watch.memory.look()
        say("slow", "a step takes long")

    monkeypatch.setattr(Watches, "look", look)
    assert bench.run("seen", steps=2) == 0
    assert len(looks) == 2
    assert all(0.0 <= waited <= seconds for seconds, waited in looks)
    assert [event["kind"] for event in record(bench.folder("seen"))["events"]] == ["slow", "slow"]
    told = record(bench.folder("seen"))
    assert 0.0 < told["seen"]["system_memory"] <= 1.0
    assert told["memory"]["peak_gib"] > 0.0
    assert "The machine" in (bench.folder("seen") / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("tokens", "device", "tried"), [(64, "cpu", True), (4096, "cpu", False), (64, "cuda", False)])
def test_what_keeps_every_score_is_timed_where_they_are_few(tokens, device, tried):
    shapes = [AttentionShape(1, 8, tokens, tokens, 40)]
    assert ("math" in timed_attentions(Config(), torch.device(device), shapes, torch.float32)) is tried
