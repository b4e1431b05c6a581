"""Settings that the length of a run, or the number of its processes, leaves without effect are named."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.errors import UsageError
from lora_trainer.data.steps import StepArithmetic
from lora_trainer.run import session
from lora_trainer.run.inputs import read_inputs
from lora_trainer.run.messages import length_lines
from lora_trainer.run.order import make_order
from lora_trainer.run.settings import settle
from lora_trainer.training.processes import Processes
from tests.config.test_contradictions import user

STEPS = StepArithmetic(10, 10, 0, 1, 1, 1, 1, steps_per_epoch=10, epochs=10, total=100)
OFTEN = {"validation__every_n_steps": 10}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, ()),
        ({"lr_scheduler__warmup_steps": 100}, ()),
        ({"lr_scheduler__warmup_steps": 101}, ("lr_scheduler.warmup_steps",)),
        ({"safeguards__early_stopping": True, **OFTEN, "safeguards__patience": 8}, ()),
        ({"safeguards__early_stopping": True, **OFTEN, "safeguards__patience": 9}, ("safeguards.early_stopping",)),
        ({"safeguards__reduce_lr_on_plateau": True, **OFTEN}, ("safeguards.reduce_lr_on_plateau",)),
        ({"checkpoint__export_every_n_steps": 101}, ("checkpoint.export_every_n_steps",)),
        ({"checkpoint__export_every_n_epochs": 10}, ()),
        ({"captions__dropout_every_n_epochs": 11}, ("captions.dropout_every_n_epochs",)),
        ({"sample__every_n_steps": 200, "validation__every_n_steps": 200}, ("sample.every_n_steps",)),
    ],
)
def test_what_a_run_is_too_short_for_is_named(settings: dict[str, Any], named: tuple[str, ...]) -> None:
    lines = length_lines(resolve([user(**settings)]), STEPS)
    assert [next(name for name in (*named, "") if name in line) for line in lines] == list(named)


@pytest.mark.parametrize("name", ["total_repeats", "step_ceiling"])
@pytest.mark.parametrize("cause", ["max_steps", "max_epochs"])
def test_a_length_beside_steps_or_epochs_is_refused_and_of_a_file_noted(name: str, cause: str) -> None:
    both = {"train": {name: 50, cause: 10}}
    with pytest.raises(UsageError) as refused:
        resolve([Layer("--set", both)])
    assert [name in problem.message for problem in refused.value.problems] == [True]
    (note,) = resolve([Layer("--config run.toml", both)]).notes
    assert name in note
    assert (
        resolve([Layer("preset speed", {"train": {name: 50}}), Layer("--max-steps", {"train": {cause: 10}})]).notes
        == ()
    )


@pytest.mark.parametrize(("effective", "warns"), [(1, True), (2, False)])
def test_processes_are_named_and_those_that_never_get_a_sample(
    effective: int, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(1, 2, torch.device("cpu"), None, lambda: None)
    monkeypatch.setattr(session, "processes_on_their_gpus", lambda config: processes)
    layer = user(train__effective_batch_size=effective, run__output=str(tmp_path), run__name="two")
    order = make_order(settle([], [layer]), console=Console(file=(shown := io.StringIO()), width=1000))
    session.open_session(order, read_inputs(order.config))
    assert "processes: 2" in shown.getvalue()
    assert ("warning: 1 of 2 processes" in shown.getvalue()) == warns
