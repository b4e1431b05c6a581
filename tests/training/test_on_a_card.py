"""What only a GPU can show: the step is the CPU's, it stays under its cap, and attention is probed there."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import PartialState

from lora_trainer.cli.main import main
from lora_trainer.models.attention import choose_attention
from tests.recipes.recipe import Bench, draw_pictures, losses, patched, save_tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("card")
    return Bench(save_tiny_model(folder), draw_pictures(folder / "data"), folder / "runs", folder / "cache")


def test_a_run_on_the_card_is_the_run_on_the_processor(place):
    """fp32, the same draws by position: six steps differ by rounding only."""
    assert place.run("card", data__resolution=64) == 0
    PartialState._reset_state()  # the device is chosen once a process
    with patched(torch.accelerator, "is_available", lambda: False):
        assert place.run("processor", data__resolution=64) == 0
    PartialState._reset_state()
    assert losses(place.folder("card")) == pytest.approx(losses(place.folder("processor")), rel=1e-3)


def test_the_step_stays_under_the_tier_that_it_is_given(capsys):
    arguments = ["bench", "step", "--preset", "6gb", "--set", "model.family=sd15", "--set", "data.resolution=512"]
    assert main([*arguments, "--steps", "2", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)["rows"][1]
    assert 0.0 < ours["peak_gib"] < 6.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fast_attention_passes_its_probe(dtype):
    chosen = choose_attention("auto", ("xformers", "sdpa", "math"), dtype, torch.device("cuda"), (40, 64, 80))
    assert chosen.name in {"xformers", "sdpa"}, chosen.reason
