"""Compiled blocks: the same learning, one compilation for a form, and a step that is done again where they fail.

What regions are by themselves is held by `tests/models/test_compiled.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.errors import TrainingFailed
from lora_trainer.models import compiled
from lora_trainer.models.compiled import Compiled
from lora_trainer.monitor.trackers import EVENTS, read_lines
from lora_trainer.production.compiling import compiling_pays
from lora_trainer.training import build, compiling
from lora_trainer.training.job import Job
from lora_trainer.training.layout import Layout
from tests.export.tiny import tiny_unet
from tests.training.tiny_job import TinyPlace, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it traces


def blocks_of(job: Job) -> Compiled:
    assert job.learner.compiled is not None
    return job.learner.compiled


def said(job: Job) -> list[str]:
    return [event["message"] for event in read_lines(job.folder / EVENTS) if event["kind"] == "compile"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_where_it_fails_the_step_is_done_again_without(
    place: TinyPlace, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(function, **_):
        def region(*arguments, **named):
            given = function(*arguments, **named)
            if where == "forward":
                raise RuntimeError("no such instruction")
            if given.requires_grad:
                given.register_hook(fail)
            return given

        return region

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("no such instruction")

    usual = place.job("usual", steps=3)
    place.train(usual)
    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(compiled, "COMPILERS", ("/test_compiling.py",))
    job = place.job("failing", steps=3, memory__compile=True, checkpoint__every_steps=1)
    state, _ = place.train(job)
    assert (state.step, state.fit.eager, blocks_of(job).on) == (3, True, False)
    assert len(said(job)) == 1
    assert "no such instruction" in said(job)[0]
    for name, value in usual.learner.adapter.masters.items():
        assert torch.equal(value, job.learner.adapter.masters[name])
    again = place.job("failing", steps=4, memory__compile=True)
    assert place.resume(again)[0].step == 4  # it knows, and says nothing more
    assert len(said(again)) == 1


class Wrong(torch.autograd.Function):
    """What passes through comes back with a gradient that is a little off."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Wrong.factor

    factor = 1.0


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("precision", "factor", "eager"), [("fp32", 1.001, True), ("fp32", 1.0, False), ("bf16", 1.2, True)]
)
def test_gradients_are_held_against_eagers_before_the_first_step(
    place: TinyPlace, monkeypatch: pytest.MonkeyPatch, precision: str, factor: float, eager: bool, dropout: float
) -> None:
    def off(function, **_):
        def region(*arguments, **named):
            given = function(*arguments, **named)
            return Wrong.apply(given) if given.requires_grad else given

        return region

    settings = {"memory__base_precision": precision, "checkpoint__every_steps": 1, "lora__dropout": dropout}
    usual = place.job("usual", steps=3, **settings)
    place.train(usual)
    monkeypatch.setattr(Wrong, "factor", factor)
    monkeypatch.setattr(torch, "compile", off)
    job = place.job("off", steps=2, memory__compile=True, **settings)
    state, _ = place.train(job)
    assert (state.fit.eager, blocks_of(job).on) == (eager, not eager)
    assert len([line for line in said(job) if "gradients are" in line and "rounding gives" in line]) == 1
    again = place.job("off", steps=3, memory__compile=True, **settings)
    assert place.resume(again)[0].fit.eager is eager
    assert len(said(again)) == (1 if eager else 2)  # what holds is held against eager again
    # The check leaves nothing behind: an adapter's values, gradients and draws are as without it.
    for name, value in usual.learner.adapter.masters.items():
        assert torch.equal(value, again.learner.adapter.masters[name])


def test_a_graph_break_ends_the_run_where_none_is_wanted(place: TinyPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.resnet import ResnetBlock2D

    def breaking(*arguments, **named):
        torch._dynamo.graph_break("a reason")

    torch._dynamo.reset()
    monkeypatch.setattr(ResnetBlock2D, "forward", breaking)
    strict = place.job("strict", steps=1, memory__compile=True, memory__compile_fullgraph=True, data__held_out=0.0)
    with pytest.raises(TrainingFailed, match="cannot be compiled whole"):
        place.train(strict)
    torch._dynamo.reset()


def test_without_a_compiler_blocks_stay_as_they_are(place: TinyPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "why_not", lambda denoiser, device: "no C++ compiler found")
    notes: list[str] = []

    def told(*arguments):
        found, said = build_compiled(*arguments)
        notes.extend(said)
        return found, said

    build_compiled = build.compiled_as_wanted
    monkeypatch.setattr(build, "compiled_as_wanted", told)
    job = place.job("none", steps=1, memory__compile=True)
    assert job.learner.compiled is None
    assert notes == ["not compiled: no C++ compiler found"]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled, and no other run's compiling is changed."""
    import torch._inductor.config as inductor

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "kept elsewhere")
    with inductor.patch(deterministic=False):
        yield


def lines_of(layout: Layout, **settings: object) -> tuple[str, ...]:
    config = resolve([Layer("test", {"memory": {"compile": True, **settings}})]).config
    return compiling.compiled_as_wanted(tiny_unet("sd15"), config, layout, torch.device("cpu"))[1]


@pytest.mark.usefixtures("kept")
def test_the_same_bits_are_wanted_of_the_run_that_asks_for_them_alone(place: TinyPlace) -> None:
    import torch._inductor.config as inductor

    for wanted in (True, False):
        place.job(f"same {wanted}", steps=1, memory__compile=True, train__deterministic=wanted)
        assert inductor.deterministic is wanted


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("shapes", "dynamic", "said"), [(33, False, True), (32, False, False), (33, "auto", False)])
def test_sizes_that_are_too_many_to_compile_each_for_itself_are_said(shapes: int, dynamic: object, said: bool) -> None:
    layout = Layout(torch.float32, "fp32", "none", compiled=True, shapes=shapes)
    lines = lines_of(layout, compile_dynamic=dynamic)
    assert any(line.startswith(f"{shapes} sizes of micro batch are more") for line in lines) is said


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("precision", "beginnings"), [("bf16", 8), ("fp32", 2)])
def test_graphs_begin_anew_with_each_micro_batch_where_its_gradients_are_copied_out(
    place: TinyPlace, monkeypatch: pytest.MonkeyPatch, precision: str, beginnings: int
) -> None:
    settings = {"memory__compile": True, "memory__compile_mode": "reduce-overhead", "memory__base_precision": precision}
    job = place.job(precision, steps=2, batch__effective=4, batch__max_micro=1, **settings)
    marks = list[None]()
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(None))
    place.train(job)
    assert len(marks) == beginnings


def test_auto_decides_by_the_steps_of_the_run_and_its_device() -> None:
    def compiles(device: str, steps: int, **memory: object) -> bool:
        config = resolve([Layer("test", {"memory": memory})]).config
        return compiling_pays(config, torch.device(device), steps)

    assert not compiles("cuda", 10**6)
    assert compiles("cpu", 1, compile=True)
    assert [compiles("cuda", steps, compile="auto") for steps in (1499, 1500)] == [False, True]
    assert not compiles("cpu", 10**6, compile="auto")


@pytest.mark.slow
def test_compiled_for_real_it_learns_the_same_and_resumes_to_the_bit(
    place: TinyPlace, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    settings = {"memory__compile": True, "checkpoint__every_steps": 2}
    usual, straight = place.job("usual", steps=4), place.job("straight", steps=4, **settings)
    place.train(usual)
    place.train(straight)
    for name, value in usual.learner.adapter.masters.items():
        torch.testing.assert_close(straight.learner.adapter.masters[name], value, rtol=1e-3, atol=1e-5)
    place.train(place.job("broken", steps=2, **settings))
    torch._dynamo.reset()  # a process that begins anew reads what is kept
    second = place.job("broken", steps=4, **settings)
    place.resume(second)
    assert outcome(straight)["tensors"] == outcome(second)["tensors"]
    assert "read from the cache" in said(second)[-1]
