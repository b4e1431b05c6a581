"""`train.deterministic`: equal numbers, torch unchanged afterwards, and a message for unsupported operations."""

from __future__ import annotations

import pytest
import torch

from lora_trainer.training import step
from lora_trainer.training.determinism import only_deterministic
from tests.recipes.recipe import Bench, patched
from tests.training.tiny_run import TinyPlace, outcome


def put(*_: object) -> torch.Tensor:
    """An operation without a deterministic implementation, also on a CPU."""
    return torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def test_the_command_names_the_operation_and_the_setting(place: TinyPlace, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(place.model, place.data, place.folder, place.cache)
    with patched(step, "backward", put):
        assert bench.run("exact", train__deterministic="true") == 5
    output = capsys.readouterr().err
    assert "put_ is not deterministic, and train.deterministic allows nothing else" in output
    assert "Traceback" not in output
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_on_a_cpu_it_changes_nothing(place: TinyPlace) -> None:
    usual, exact = place.run("usual", steps=2), place.run("exact", steps=2, train__deterministic=True)
    place.train(usual)
    with only_deterministic(True, exact.checkpoints):
        place.train(exact)
    assert outcome(usual) == outcome(exact)


def test_torch_is_set_to_deterministic_algorithms(tmp_path) -> None:
    before = torch.backends.cudnn.deterministic
    with only_deterministic(True, tmp_path):
        assert torch.are_deterministic_algorithms_enabled()
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic == before
    with only_deterministic(False, tmp_path):
        put()
    with pytest.raises(RuntimeError, match="something else"), only_deterministic(True, tmp_path):
        raise RuntimeError("something else")
