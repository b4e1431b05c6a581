"""Options of training on the loop: latents' precision, refusals, layers in the log, one sum of gradients for each step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.core.errors import UsageError
from lora_trainer.optim.schedules import momentum_at
from lora_trainer.run.order import plain_console
from lora_trainer.run.start import find_start
from lora_trainer.training.checkpoints.checkpoint import save_checkpoint
from lora_trainer.training.checkpoints.save import take
from lora_trainer.training.state import TrainState
from lora_trainer.training.training_run import Run
from tests.training.tiny_run import TinyPlace, together


def test_cached_latents_are_rounded_to_their_dtype(place: TinyPlace):
    """In one cache folder, so the dtype is part of the key. Steps compute with them in fp32."""
    found = {
        dtype: place.run(dtype, steps=1, cache__latents_dtype=dtype).feed.micros(0)[0].latents
        for dtype in ("fp32", "bf16", "fp16")
    }
    assert {each.dtype for each in found.values()} == {torch.float32}
    for dtype, most in (("bf16", 2.0**-8), ("fp16", 2.0**-10)):
        change = (found[dtype] - found["fp32"]).norm() / found["fp32"].norm()
        assert 0.0 < float(change) < most


def test_stochastic_rounding_is_refused_where_a_run_does_not_compute_in_bf16(place: TinyPlace):
    with pytest.raises(UsageError, match=r"rounds bf16 weights, and this run computes in float32 \(CPU default\)"):
        place.run("a", steps=2, optimizer__stochastic_rounding=True, memory__weight_dtype=None)


def test_swa_that_would_average_nothing_is_refused(place: TinyPlace):
    with pytest.raises(UsageError, match=r"swa_start=3 leaves 3 of 6 steps, and SWA averages the weights of every 4th"):
        place.run("a", steps=6, train__swa_start=3, train__swa_every_n_steps=4)


def test_a_resumed_run_must_begin_swa_at_the_same_step(place: TinyPlace):
    """A share of more steps is another step; as a number it is the same one."""
    swa = {"train__swa_every_n_steps": 1, "validation__every_n_steps": 0}
    first = place.run("a", steps=4, train__swa_start=0.5, **swa)
    place.train(first)
    longer = place.run("a", steps=6, train__swa_start=0.5, **swa)
    with pytest.raises(UsageError, match=r"first step of SWA was 2 and is now 3 .*Set train.swa_start=2, or start"):
        find_start(longer.folder, longer.settings, plain_console(quiet=True), longer.config)
    same = place.run("a", steps=6, train__swa_start=2, **swa)
    assert find_start(same.folder, same.settings, plain_console(quiet=True), same.config) is not None


def test_a_run_says_which_layers_learn_at_which_rate(place: TinyPlace):
    run = place.run("a", steps=2, optimizer__layer_learning_rates={"mid_block.*": 0.5})
    (line,) = [note for note in run.context.built.notes if note.startswith("learning rate x 0.5: ")]
    assert "'mid_block.*' (mid_block." in line
    with pytest.raises(UsageError, match=r"'middle.\*' matches none of \d+ layers"):
        place.run("b", steps=2, optimizer__layer_learning_rates={"middle.*": 0.5})


@pytest.mark.parametrize("name", ["layer_learning_rates", "layer_weight_decay"])
def test_a_resumed_run_must_have_the_patterns_of_layers_in_the_same_order(name: str, place: TinyPlace):
    """The last one that matches counts, and the optimizer's state is stored by groups."""
    rates = {"down_blocks.*": 0.5, "*.to_k": 2.0}
    run = place.run("a", steps=2, **{f"optimizer__{name}": rates})
    save_checkpoint(run.checkpoints, take(run, TrainState(step=1)))
    start = find_start(run.folder, run.settings, plain_console(quiet=True), run.config)
    assert start is not None
    turned = run.settings | {f"optimizer.{name}": dict(reversed(rates.items()))}
    with pytest.raises(UsageError, match=rf"optimizer\.{name} was .*0\.5.*2\.0.* and is now .*2\.0.*0\.5"):
        find_start(run.folder, turned, plain_console(quiet=True), run.config)


def test_the_optimizer_has_the_momentum_of_the_newest_step(place: TinyPlace):
    run = place.run("a", steps=4, lr_scheduler__name="one_cycle", lr_scheduler__cycle_momentum=True)
    place.train(run)
    expected = momentum_at(run.config, 3, 4)
    assert {group["betas"] for group in run.context.optimizer.param_groups} == {(expected, 0.999)}


def test_a_resumed_run_that_cycles_momentum_no_more_has_beta1_as_set(place: TinyPlace):
    """The checkpoint's optimizer has the last one of the cycle."""
    place.train(place.run("a", steps=2, lr_scheduler__name="one_cycle", lr_scheduler__cycle_momentum=True))
    run = place.run("a", steps=3, lr_scheduler__name="one_cycle")
    place.resume(run)
    assert {group["betas"] for group in run.context.optimizer.param_groups} == {(0.9, 0.999)}


def count_sums(run: Run) -> tuple[Run, list[int]]:
    """The same run, and the number of values in each of its sums over processes."""
    sizes: list[int] = []
    reduce = run.context.reduce
    assert reduce is not None

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return reduce(tensor)

    return replace(run, context=replace(run.context, reduce=counted)), sizes


SPLIT = {"train__effective_batch_size": 8, "data__max_aspect": 1.0, "validation__every_n_steps": 0}


@pytest.mark.parametrize("micro", [4, 1])
def test_gradients_are_summed_once_a_step_however_often_they_are_accumulated(micro: int, place: TinyPlace):
    """Simulated processes: one sum of all gradients, losses and the loss, with one and with four micro-batches."""
    runs = [place.run("a", steps=2, processes=each, train__max_micro_batch_size=micro, **SPLIT) for each in together(2)]
    passes = [len(micros) for micros in (runs[0].feed.micros(0), runs[0].feed.micros(1))]
    assert max(passes) == (4 if micro == 1 else 1)
    counted = [count_sums(run) for run in runs]
    place.resume_together([run for run, _ in counted])
    values = sum(master.numel() for master in runs[0].context.masters)
    for _, sizes in counted:
        assert len(sizes) == 2
        assert all(size > values for size in sizes)


# Trains two steps as one of two processes and prints the sizes of its collective sums over gloo, by what they sum.
PROGRAM = """
import json, sys
from pathlib import Path
import torch.distributed
from lora_trainer.training import processes as rooms
sizes, true = [], torch.distributed.all_reduce
def counted(tensor, **named):
    sizes.append(tensor.numel())
    return true(tensor, **named)
rooms.all_reduce = counted  # the real one, counted
from tests.training.tiny_run import TinyPlace
place = TinyPlace(*map(Path, sys.argv[1:5]))
run = place.run("gloo", steps=2, train__max_micro_batch_size=int(sys.argv[5]), **json.loads(sys.argv[6]))
sizes.clear()
place.train(run)
values = sum(master.numel() for master in run.context.masters)
passes = max(len(run.feed.micros(step)) for step in range(2))
backend = torch.distributed.get_backend()
print(json.dumps({"passes": passes, "gradients": sum(size > values for size in sizes), "backend": backend,
                  "largest other": max(size for size in sizes if size <= values)}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="gloo as on Linux")
@pytest.mark.parametrize("micro", [4, 1])
def test_two_processes_over_gloo_sum_gradients_once_a_step(micro: int, place: TinyPlace, checkout: Path):
    """Two real processes: the number of all-reduces does not depend on the accumulation steps."""
    place.run("fills the caches", steps=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {
        "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'scripts'}",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    places = [str(each) for each in (place.model, place.data, place.folder, place.cache)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *places, str(micro), json.dumps(SPLIT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    for process, (out, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
        found = json.loads(out.strip().splitlines()[-1])
        assert found["backend"] == "gloo"
        assert found["passes"] == 4 // micro
        assert found["gradients"] == 2, "one for each of two steps"
        assert found["largest other"] < 20, "votes, of one number each"
