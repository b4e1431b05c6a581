"""The public names: they exist, are typed and documented, load no torch, and are all that a night in a notebook needs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lora_trainer
from lora_trainer.config.toml import parse_value
from tests.recipes.recipe import QUICK, brief_verdicts, draw_images, save_tiny_model

NAMES = ("ProductionTrainer", "check_dataset", "load_config", "plan", "train", "validate_lora")


def test_the_public_names_are_these() -> None:
    assert tuple(lora_trainer.__all__) == NAMES
    assert set(NAMES) <= set(dir(lora_trainer))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        lora_trainer.trian  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_each_is_documented_and_typed(name: str) -> None:
    public = getattr(lora_trainer, name)
    assert inspect.getdoc(public)
    function = public.__init__ if inspect.isclass(public) else public
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    untyped = [each.name for each in signature.parameters.values() if each.annotation is inspect.Parameter.empty]
    assert set(untyped) <= {"self"}


def test_importing_them_loads_no_torch() -> None:
    program = f"import sys\nfrom lora_trainer import {', '.join(NAMES)}\nload_config()\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


def test_a_night_in_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = save_tiny_model(tmp_path), draw_images(tmp_path / "data")
    settings = {key: parse_value(value) if isinstance(value, str) else value for key, value in QUICK.items()}
    settings |= {"train.max_steps": 2, "cache.dir": str(tmp_path / "cache")}
    options = {"settings": settings, "output": tmp_path / "runs", "name": "cat"}
    assert lora_trainer.load_config(model, data, **options).train.max_steps == 2
    assert lora_trainer.check_dataset(data, model, settings=settings).passed
    assert lora_trainer.plan(model, data, **options).to_json()["steps"] == 2
    result = lora_trainer.train(model, data, **options)
    assert result.exit_code == 0
    quick = {"cache.dir": str(tmp_path / "cache"), "gates.lora_check": "lite"}
    with brief_verdicts():
        report = lora_trainer.validate_lora(result.files["kohya"], model, settings=quick)
    assert 0.0 <= report.score <= 1.0
    assert capsys.readouterr().out == ""
