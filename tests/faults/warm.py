"""A process with everything imported that forks a copy of itself for each try: `python -m tests.faults.warm`.

Reads one JSON object per line: the run and its fault. Writes one per run: how it ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tqdm
from torch.optim.optimizer import register_optimizer_step_post_hook

from lora_trainer.cli.main import main
from lora_trainer.evaluation import lora_check, prediction
from lora_trainer.evaluation.evidence import Effort
from lora_trainer.run import after_training
from tests.faults.disk import Mode, Page, loaded_page
from tests.faults.phases import phase_of
from tests.faults.troubles import TROUBLES, report_to

CRASHED = 70  # exit code of a child whose command raised an unexpected exception
REPORTS: list[Any] = []  # the newest of the gate


def warm_up(commands: list[list[str]]) -> None:
    """Run commands, so that all imports and first-time work happen before forking."""
    tqdm.tqdm.monitor_interval = 0  # it would start a thread
    lora_check.TIMESTEPS, prediction.PREDICTED_AT_ONCE = 1, 16  # forward passes of the gate: other tests cover them
    lora_check.LORA_CHECKS = {**lora_check.LORA_CHECKS, "full": Effort(2, 2, 1, 1)}
    lora_check.base_visits = partial(lora_check.base_visits, steps=1)
    torch.set_num_threads(1)
    after_training.judge_lora = partial(judged, after_training.judge_lora)
    for arguments in commands:
        if main(arguments) != 0:
            raise SystemExit(f"the undisturbed command failed: {' '.join(arguments)}")
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"{threads} threads are alive: what is forked from here could hang")


def judged(true: Callable[..., Any], *args: Any) -> Any:
    """The report of the gate, kept for children that do not run it again."""
    REPORTS[:] = [true(*args)]
    return REPORTS[0]


def be_brief() -> None:
    """Skip the gate and the images, half of a try's time, where they are not under test."""

    def left_out(*_: Any, **__: Any) -> None:
        raise RuntimeError("left out in this try")

    after_training.judge_lora = lambda *_, **__: REPORTS[0]
    after_training.draw_comparison = left_out  # type: ignore[assignment]


def child(request: dict[str, Any], page: Page) -> None:
    """Run the requested command, and exit without the parent's cleanup."""
    code = CRASHED
    try:
        out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["LORA_TRAINER_CACHE"] = request["user"]
        register_optimizer_step_post_hook(lambda *_: count_step(page))
        if request["brief"]:
            be_brief()
        if request["trouble"]:
            report_to(page)
            name, *args = request["trouble"]
            TROUBLES[name](*args)
        page.arm(Path(request["root"]), request["at"], Mode(request["mode"]), request["number"], request["progress"])
        code = main(request["arguments"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001  whatever it is, the parent must hear of it
        traceback.print_exc()
    finally:
        page.armed = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def count_step(page: Page) -> None:
    page.steps += 1


def tried(request: dict[str, Any], page: Page) -> dict[str, Any]:
    """Fork, wait, and return how the child ended. A child that takes too long is killed and reported."""
    page.armed = 0
    began = time.monotonic()
    number = os.fork()
    if number == 0:
        child(request, page)
    late, until = False, began + request["seconds"]
    while True:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            break
        if request["phase"] and phase_of(page.last()) == request["phase"]:
            request["phase"], until = None, time.monotonic() + request["delay"]
        if not late and time.monotonic() > until:
            os.kill(number, signal.SIGKILL)
            late = True
        time.sleep(0.001)
    return {
        "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "late": late,
        "fired": bool(page.fired),
        "steps": page.steps,
        "count": page.count,
        "happened": bool(page.happened),
        "last": page.last(),
        "operations": page.operations() if request["mode"] == Mode.COUNT else [],
        "seconds": time.monotonic() - began,
    }


def serve() -> None:
    page = loaded_page()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the warm-up prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        answer = tried(request, page) if "arguments" in request else warm_up(request["warm_up"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
