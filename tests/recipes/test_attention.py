"""`hardware.attention_backend` of whole runs: all learn the same; the fastest is timed once, logged, and kept on resume."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from lora_trainer.config.schema import Config
from lora_trainer.config.toml import read_toml
from lora_trainer.models.attention.shapes import AttentionShape
from lora_trainer.training.attention import timed_attentions
from tests.recipes.recipe import Bench, losses, record


def attention_of(bench: Bench, name: str) -> tuple[str, dict[str, Any]]:
    """The line with the chosen backend, and the record."""
    document = record(bench.folder(name))
    (line,) = [line for line in document["choices"] if line.startswith("attention backend")]
    return str(line), document


def test_losses_are_the_same_with_every_attention_backend(bench):
    found = []
    for name in ("sdpa", "flash", "math"):
        assert bench.run(name, steps=3, hardware__attention_backend=name) == 0
        found.append(losses(bench.folder(name)))
    for each in found[1:]:
        assert each == pytest.approx(found[0], abs=1e-6)


def test_the_fastest_attention_backend_is_timed_once_and_kept_on_resume(bench, capsys):
    """Either may win. The recorded choice is then swapped: timing again would not follow it."""
    assert bench.run("timed", steps=1, hardware__attention_backend="fastest") == 0
    line, document = attention_of(bench, "timed")
    fastest = document["hardware"]["timed_attention"]
    times = {name: float(ms) for name, ms in re.findall(r"(\w+) ([\d.]+) ms", line)}
    assert line.startswith(f"attention backend: {fastest} (forward and backward in all layers: {fastest} ")
    assert {"sdpa", "math"} <= times.keys()
    assert times[fastest] == min(times.values())
    assert "xformers" not in line
    (left,) = [line for line in document["choices"] if line.startswith("not used for attention")]
    assert "xformers" in left
    assert left not in capsys.readouterr().out, "what is not here is of no concern"
    assert read_toml(bench.folder("timed") / "config.toml")["hardware"]["attention_backend"] == fastest

    slower = max(times, key=times.__getitem__)
    document["hardware"]["timed_attention"] = slower
    (bench.folder("timed") / "run.json").write_text(json.dumps(document), encoding="utf-8")
    capsys.readouterr()
    assert bench.run("timed", "--resume", steps=2, hardware__attention_backend="fastest") == 0
    assert f"attention backend: {slower} (the fastest at the start of the run" in capsys.readouterr().out
    line, document = attention_of(bench, "timed")
    assert line.startswith(f"attention backend: {slower} (works")
    assert document["hardware"]["timed_attention"] == slower


def test_unavailable_backends_are_one_line_of_verbose_output(bench, capsys):
    assert bench.run("verbose", "-v", steps=1, hardware__attention_backend="fastest") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not used for attention")]
    assert "xformers" in line


def test_an_unavailable_attention_backend_is_refused_with_the_available_ones(bench, capsys):
    assert bench.run("asked", steps=1, hardware__attention_backend="flash3") == 2
    output = capsys.readouterr().err
    assert "hardware.attention_backend=flash3" in output
    assert "Set hardware.attention_backend=auto" in output or "set hardware.attention_backend=auto" in output


@pytest.mark.parametrize(("tokens", "device", "tried"), [(64, "cpu", True), (4096, "cpu", False), (64, "cuda", False)])
def test_backends_that_store_all_scores_are_timed_only_at_small_sizes(tokens, device, tried):
    shapes = [AttentionShape(1, 8, tokens, tokens, 40)]
    assert ("math" in timed_attentions(Config(), torch.device(device), shapes, torch.float32)) is tried
