"""Faults outside of the disk, installed in a child before its command starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import CLIPTextModel

from lora_trainer.monitor.trackers import Trackers
from lora_trainer.run import after_training
from lora_trainer.run_folder import progress
from tests.faults.disk import Page
from tests.recipes.recipe import delete_under_a_run

PAGES: list[Page] = []
SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB."
PLACES: dict[str, tuple[Any, str]] = {
    "denoiser": (UNet2DConditionModel, "forward"),  # of a step, a validation, the gate and an image
    "backward": (torch.Tensor, "backward"),
    "encoding": (AutoencoderKL, "encode"),
    "decoding": (AutoencoderKL, "decode"),
    "text": (CLIPTextModel, "forward"),
}


def report_to(page: Page) -> None:
    """Set the page on which a fault is recorded."""
    PAGES[:] = [page]


def happened() -> None:
    PAGES[0].happened = 1


def before(owner: Any, name: str, act: Callable[[int], None]) -> None:
    """Call `act(n)` before the n-th call of a function, counted from 1."""
    true, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        act(calls[0])
        return true(*args, **kwargs)

    setattr(owner, name, counted)


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_release() -> None:
    """SIGKILL after training and saving."""
    before(after_training, "choose_released", die)


def out_of_memory(place: str, at: int) -> None:
    """The `at`-th call at a place runs out of memory, once."""

    def raise_at(call: int) -> None:
        if call == at:
            happened()
            raise torch.OutOfMemoryError(SHORT)

    if place == "optimizer":
        calls = [0]

        def count(*_: Any) -> None:
            calls[0] += 1
            raise_at(calls[0])

        register_optimizer_step_pre_hook(count)
    else:
        before(*PLACES[place], raise_at)


def not_finite(place: str, at: int) -> None:
    """The `at`-th call at a place gives NaN; of a backward pass, its loss does; of an update, the weights do."""
    if place == "optimizer":
        updates = [0]

        def ruin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            updates[0] += 1
            if updates[0] == at:
                happened()
                optimizer.param_groups[0]["params"][0].data.view(-1)[0] = float("nan")

        register_optimizer_step_post_hook(ruin)
        return
    owner, name = PLACES[place]
    true, calls = getattr(owner, name), [0]

    def spoiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != at:
            return true(self, *args, **kwargs)
        happened()
        if place == "backward":
            return true(self * float("nan"), *args, **kwargs)
        for parameter in self.parameters():
            if parameter.is_floating_point():
                kept = parameter.detach().clone()
                with torch.no_grad():
                    parameter.fill_(float("nan"))
                try:
                    return true(self, *args, **kwargs)
                finally:
                    with torch.no_grad():
                        parameter.copy_(kept)
        raise AssertionError("no weight to spoil")

    setattr(owner, name, spoiled)


def signalled(at: int, *numbers: int) -> None:
    """These signals come one after the other at the `at`-th call of the denoiser."""

    def send(call: int) -> None:
        if call == at:
            happened()
            for number in numbers:
                os.kill(os.getpid(), number)

    before(*PLACES["denoiser"], send)


def after_step(step: int, act: Callable[[], Any]) -> None:
    """Act when the numbers of a step are about to be written."""
    written = Trackers.steps

    def steps(trackers: Trackers, found: list[dict[str, Any]]) -> None:
        if any(row["step"] == step for row in found):
            act()
        written(trackers, found)

    Trackers.steps = steps  # type: ignore[method-assign]


def vanish(folder: str, step: int) -> None:
    """The run's folder is deleted after a step."""
    after_step(step, lambda: delete_under_a_run(Path(folder)))


def beat_often() -> None:
    """A run of half a second writes its progress more than once."""
    progress.BEAT_SECONDS = 0.002


TROUBLES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (die_before_release, out_of_memory, not_finite, signalled, vanish, beat_often)
}
