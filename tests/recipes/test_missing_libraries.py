"""What a machine lacks is refused, or given up where only a preset wants it, before anything is encoded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core import imports
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.run import caching
from lora_trainer.run.bases import find
from tests.recipes.recipe import Bench, patched, record


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding anything is an error."""

    def encode(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(caching, "fill_latents", encode)


@pytest.fixture
def without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


@pytest.mark.usefixtures("without_bitsandbytes")
def test_a_presets_8_bit_adamw_becomes_adamw(bench, capsys):
    assert bench.run("run", "--preset", "balanced", steps=1, train__effective_batch_size=1) == 0
    document = record(bench.folder("run"))
    assert document["config"]["optimizer"]["name"] == "adamw"
    assert document["origins"]["optimizer.name"].startswith("default")
    assert capsys.readouterr().out.count("bitsandbytes") == 1
    # The same again is the same run.
    assert bench.run("run", "--preset", "balanced", "--resume", steps=2, train__effective_batch_size=1) == 0


@pytest.mark.usefixtures("without_bitsandbytes", "untouched")
@pytest.mark.parametrize("command", ["train", "produce"])
@pytest.mark.parametrize("name", ["adamw8bit", "paged_adamw8bit"])
def test_the_users_8_bit_adamw_is_refused(bench, capsys, command, name):
    assert bench.run("run", command=command, optimizer__name=name) == 2
    assert "pip install bitsandbytes" in capsys.readouterr().err
    assert not bench.folder("run").exists()


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("library", "settings"),
    [
        ("pytorch_optimizer", {"optimizer__name": "prodigy", "optimizer__learning_rate": 1.0}),
        ("pytorch_optimizer", {"optimizer__name": "lion"}),
        ("xformers", {"hardware__attention_backend": "xformers"}),
        ("flash_attn", {"hardware__attention_backend": "flash2"}),
        ("wandb", {"run__trackers": '["wandb"]'}),
        ("tensorboard", {"run__trackers": '["tensorboard"]'}),
        ("bitsandbytes", {"memory__weight_dtype": "nf4"}),
    ],
)
def test_every_missing_library_is_refused_before_work(bench, monkeypatch, capsys, library, settings):
    monkeypatch.setitem(sys.modules, library, None)
    assert bench.run("run", **settings) == 2
    assert capsys.readouterr().err.startswith("error:")
    assert not bench.folder("run").exists()


@pytest.fixture
def broken_bitsandbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is installed, and its import fails."""
    (tmp_path / "broken" / "bitsandbytes").mkdir(parents=True)
    text = f"raise {getattr(request, 'param', 'RuntimeError')}('no CUDA here')"
    (tmp_path / "broken" / "bitsandbytes" / "__init__.py").write_text(text, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    del sys.modules["bitsandbytes"]
    monkeypatch.setattr(imports, "_broken", {})
    monkeypatch.syspath_prepend(tmp_path / "broken")


@pytest.mark.usefixtures("untouched", "broken_bitsandbytes")
@pytest.mark.parametrize(
    "broken_bitsandbytes", ["RuntimeError", "OSError", "AttributeError", "ImportError", "SystemExit"], indirect=True
)
def test_a_library_that_does_not_load_is_refused_before_work(bench, capsys):
    for settings in ({"optimizer__name": "adamw8bit"}, {"memory__weight_dtype": "nf4"}):
        assert bench.run("run", **settings) == 2
        assert "no CUDA here" in capsys.readouterr().err
        assert not bench.folder("run").exists()


@pytest.mark.usefixtures("untouched", "broken_bitsandbytes")
def test_what_is_left_of_a_library_is_not_used(bench, tmp_path):
    (tmp_path / "broken" / "bitsandbytes" / "__init__.py").write_text("", encoding="utf-8")
    assert bench.run("run", optimizer__name="adamw8bit") == 2


@pytest.mark.usefixtures("broken_bitsandbytes")
def test_a_presets_library_that_does_not_load_is_given_up(bench, capsys):
    assert bench.run("run", "--dry-run", "--preset", "balanced") == 0
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith('optimizer.name = "adamw8bit"') and "no CUDA here" in line for line in shown) == 1


@pytest.mark.usefixtures("broken_bitsandbytes")
def test_doctor_names_a_library_that_does_not_load(capsys):
    main(["doctor", "--json"])
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert [line["level"] for line in lines if line["name"] == "bitsandbytes"] == ["warning"]


@pytest.mark.usefixtures("without_bitsandbytes", "untouched")
def test_a_batch_is_refused_as_a_whole(bench: Bench, capsys):
    arguments = [str(bench.data.parent), "--model", str(bench.model), "--output", str(bench.output)]
    assert main(["batch", *arguments, "--set", "optimizer.name=adamw8bit"]) == 2
    assert "pip install bitsandbytes" in capsys.readouterr().err
    assert not bench.output.exists()


def test_a_quantized_gguf_file_is_refused_before_it_is_loaded(monkeypatch, tmp_path):
    header: dict[str, Any] = {"__metadata__": {}, "x": {"dtype": "Q4_0"}, "y": {"dtype": "F16"}}
    files = [tmp_path / "packed.gguf", tmp_path / "plain.gguf"]
    for file in files:
        file.write_bytes(b"GGUF")
    monkeypatch.setattr(find, "read_gguf_header", lambda path: header if path == files[0] else {"y": header["y"]})
    monkeypatch.setitem(sys.modules, "gguf", None)
    find.refuse_without_gguf(files[1:])
    with pytest.raises(UsageError):
        find.refuse_without_gguf(files)


def test_a_local_models_weights_are_looked_at_before_work(bench, monkeypatch, untouched, capsys):
    """Its configs were enough for everything before."""
    asked: list[Path] = []

    def refuse(files: Any) -> None:
        asked.extend(files)
        raise UsageError(Problem("planted", "it cannot be dequantized here"))

    with patched(find, "refuse_without_gguf", refuse):
        assert bench.run("run") == 2
    assert asked[0] == Path(find.find_base(ModelSection(path=str(bench.model))).folder)
    assert not bench.folder("run").exists()
