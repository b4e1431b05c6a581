"""Compiled blocks: the same learning, one compilation per shape, and an eager retry where they fail.

`tests/models/test_compiled.py` tests the compiled regions alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.cudagraph_trees import MarkStepBox

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.errors import TrainingFailed
from lora_trainer.models.compiled import Compiled
from lora_trainer.monitor.trackers import EVENTS, read_lines
from lora_trainer.run.choices import compiling_pays
from lora_trainer.training import compiling
from lora_trainer.training.denoiser_layout import Layout
from lora_trainer.training.loop import read_steps
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.step import abort_step, backward
from lora_trainer.training.training_run import Run
from tests.lora_format.tiny import tiny_unet
from tests.training.tiny_run import TinyPlace, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # from torch, while it traces


def blocks_of(run: Run) -> Compiled:
    assert run.context.compiled is not None
    return run.context.compiled


def messages_of(run: Run) -> list[str]:
    return [event["message"] for event in read_lines(run.folder / EVENTS) if event["kind"] == "compile"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No compilations of other tests are used, and none remain, nor the process settings of compiling."""
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    with inductor.patch(deterministic=False, fallback_random=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def one_form(tiny_models: Callable[[str], Path], place: TinyPlace) -> TinyPlace:
    """A model with nearly equal blocks: tracing takes longer than training."""
    return replace(place, model=tiny_models("sd3"))


MARGIN = 4.0  # roundings: compiled blocks round elsewhere, and sum in another order
ONE_SIZE = {"compile__enabled": True, "data__max_aspect": 1.0}


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def fail(*_: object) -> Tensor:
    raise RuntimeError("no such instruction")


def use_compiler(
    monkeypatch: pytest.MonkeyPatch, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> None:
    """torch's compilation without its last part: the traced graph runs as it is, and `change` applies to each result.

    Faults then come from torch's interface for custom backends, where Inductor's would.
    """

    def making(change: Callable[[Tensor], Tensor]) -> Callable[..., Callable[..., object]]:
        def compiled(graph: torch.fx.GraphModule, examples: object) -> Callable[..., object]:
            return make_boxed_func(
                lambda *args: [change(each) if isinstance(each, Tensor) else each for each in graph(*args)]
            )

        return compiled

    backend = aot_autograd(
        fw_compiler=making(forward),
        bw_compiler=making(backward),
        partition_fn=min_cut_rematerialization_partition,  # as in Inductor: the other one draws other dropout masks
    )
    true = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, *, mode, **args: true(function, backend=backend, **args))


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "backward"), [(fail, as_it_is), (as_it_is, fail)])
def test_a_step_whose_compilation_fails_is_repeated_eagerly(
    one_form: TinyPlace,
    monkeypatch: pytest.MonkeyPatch,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
) -> None:
    usual = one_form.run("usual", steps=2, **ONE_SIZE | {"compile__enabled": False})
    one_form.train(usual)
    use_compiler(monkeypatch, forward, backward)
    run = one_form.run("failing", steps=2, checkpoint__every_n_steps=1, **ONE_SIZE)
    state, _ = one_form.train(run)
    assert (state.step, state.fit.eager, blocks_of(run).on) == (2, True, False)
    assert len(messages_of(run)) == 1
    assert "no such instruction" in messages_of(run)[0]
    for name, value in usual.context.adapter.masters.items():
        assert torch.equal(value, run.context.adapter.masters[name])
    again = one_form.run("failing", steps=3, **ONE_SIZE)
    assert one_form.resume(again)[0].step == 3  # it knows, and reports nothing more
    assert len(messages_of(again)) == 1


def gradients(run: Run, micros: list[MicroBatch]) -> Tensor:
    """All of a step's gradients, one after the other; the masters keep none."""
    torch.manual_seed(0)  # for dropout, which a step seeds by its position
    for micro in micros:
        backward(run.context, micro, run.feed.samples_in(0))
    found = [master.grad.flatten() for master in run.context.masters if master.grad is not None]
    abort_step(run.context)
    return torch.cat(found).double()


def nudged(micro: MicroBatch, unit: float) -> MicroBatch:
    """The same with latents and noise larger or smaller by the factor 1 ± `unit`."""
    draw = torch.Generator().manual_seed(0)
    factor = 1 + unit * torch.randint(0, 2, micro.latents.shape, generator=draw).mul_(2).sub_(1)
    return replace(micro, latents=micro.latents * factor, added=micro.added * factor)


def roundings_off(run: Run) -> float:
    """How much the first step's gradients of compiled blocks differ from those of eager ones, over what rounding does to these.

    The effect of rounding is that of inputs one rounding away in an eager pass, so that all that follows rounds otherwise.
    """
    adapter, unit = run.context.adapter, torch.finfo(run.context.dtype).eps
    torch.manual_seed(0)
    for (
        master
    ) in adapter.masters.values():  # up projections at zero: the gradients of the down projections would be, too
        if not master.any():
            torch.nn.init.normal_(master, std=0.02)
    adapter.copy_to_model()
    micros = [micro.to(run.context.device, run.context.dtype) for micro in next(read_steps(run, 0))]
    found = gradients(run, micros)
    with blocks_of(run).off():
        eager = gradients(run, micros)
        rounded = gradients(run, [nudged(micro, unit) for micro in micros])
    assert blocks_of(run).news() is not None, "blocks were compiled"
    assert 0 < float(eager.norm()) < math.inf
    return float((found - eager).norm()) / max(float((rounded - eager).norm()), unit * float(eager.norm()))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "factor"), [("fp32", 1.0), ("bf16", 1.0), ("bf16", 1.2)])
def test_traced_blocks_have_the_gradients_of_eager_ones(
    one_form: TinyPlace, monkeypatch: pytest.MonkeyPatch, precision: str, factor: float
) -> None:
    """With the dropout masks that eager draws. Gradients that are 20 % off for each block are found."""
    use_compiler(monkeypatch, as_it_is, lambda gradient: factor * gradient)
    run = one_form.run("traced", steps=1, memory__weight_dtype=precision, lora__dropout=0.3, **ONE_SIZE)
    assert (roundings_off(run) <= MARGIN) is (factor == 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_blocks_have_the_gradients_of_eager_ones(one_form: TinyPlace, precision: str) -> None:
    """By Inductor. `tests/models/test_inductor.py` has the transposed sequences of a U-Net, which it vectorized wrongly."""
    run = one_form.run("compiled", steps=1, memory__weight_dtype=precision, **ONE_SIZE)
    assert roundings_off(run) <= MARGIN


def test_a_graph_break_ends_the_run_with_fullgraph(one_form: TinyPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention import JointTransformerBlock

    def breaking(*arguments, **named):
        torch._dynamo.graph_break("a reason")

    monkeypatch.setattr(JointTransformerBlock, "forward", breaking)
    strict = one_form.run("strict", steps=1, compile__fullgraph=True, validation__split=0.0, **ONE_SIZE)
    with pytest.raises(TrainingFailed, match="cannot be compiled whole"):
        one_form.train(strict)


def lines_of(layout: Layout, **settings: object) -> tuple[str, ...]:
    config = resolve([Layer("test", {"compile": {"enabled": True, **settings}})]).config
    return compiling.compile_if_enabled(tiny_unet("sd15"), config, layout, torch.device("cpu"))[1]


def test_without_a_compiler_blocks_stay_as_they_are(place: TinyPlace) -> None:
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert place.run("none", steps=1, compile__enabled=True).context.compiled is None
        (line,) = lines_of(Layout(torch.float32, "fp32", False, compiled=True))
    assert line.startswith("not compiled: ")
    assert line.endswith("a CPU needs a C++ compiler (g++, clang or MSVC)")


def test_determinism_applies_only_to_the_run_that_sets_it(place: TinyPlace) -> None:
    import torch._inductor.config as inductor

    for wanted in (True, False):
        place.run(f"same {wanted}", steps=1, compile__enabled=True, train__deterministic=wanted)
        assert inductor.deterministic is wanted


@pytest.mark.parametrize(
    ("shapes", "dynamic", "messages_of"), [(33, False, True), (32, False, False), (33, "auto", False)]
)
def test_too_many_sizes_to_compile_each_are_reported(shapes: int, dynamic: object, messages_of: bool) -> None:
    layout = Layout(torch.float32, "fp32", False, compiled=True, shapes=shapes)
    lines = lines_of(layout, dynamic=dynamic)
    assert any(line.startswith(f"{shapes} sizes of micro-batch are more") for line in lines) is messages_of


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "beginnings"), [("bf16", 4), ("fp32", 1)])
def test_graphs_start_anew_per_micro_batch_when_gradients_are_copied_out(
    one_form: TinyPlace, monkeypatch: pytest.MonkeyPatch, precision: str, beginnings: int
) -> None:
    """Counted by torch, which counts down. Only a GPU shows the effect on CUDA graphs."""
    settings = ONE_SIZE | {"compile__mode": "reduce-overhead", "memory__weight_dtype": precision}
    use_compiler(monkeypatch, as_it_is, as_it_is)
    run = one_form.run(
        precision,
        steps=1,
        train__effective_batch_size=4,
        train__max_micro_batch_size=1,
        validation__split=0.0,
        **settings,
    )
    before = MarkStepBox.mark_step_counter
    one_form.train(run)
    assert before - MarkStepBox.mark_step_counter == beginnings


def test_auto_decides_by_the_steps_and_the_device_of_the_run() -> None:
    def compiles(device: str, steps: int, **settings: object) -> bool:
        config = resolve([Layer("test", {"compile": settings})]).config
        return compiling_pays(config, torch.device(device), steps)

    assert not compiles("cuda", 10**6)
    assert compiles("cpu", 1, enabled=True)
    assert [compiles("cuda", steps, enabled="auto") for steps in (1499, 1500)] == [False, True]
    assert [compiles("cuda", steps, enabled="auto", min_steps=300) for steps in (299, 300)] == [False, True]
    assert not compiles("cpu", 10**6, enabled="auto")


@pytest.mark.slow
def test_a_compiled_run_learns_the_same_and_resumes_bit_exactly(place: TinyPlace) -> None:
    settings = {"compile__enabled": True, "checkpoint__every_n_steps": 2}
    usual, straight = place.run("usual", steps=4), place.run("straight", steps=4, **settings)
    place.train(usual)
    place.train(straight)
    for name, value in usual.context.adapter.masters.items():
        torch.testing.assert_close(straight.context.adapter.masters[name], value, rtol=1e-3, atol=1e-5)
    place.train(place.run("broken", steps=2, **settings))
    torch._dynamo.reset()  # a new process reads the compile cache
    second = place.run("broken", steps=4, **settings)
    place.resume(second)
    assert outcome(straight)["tensors"] == outcome(second)["tensors"]
    assert "read from the cache" in messages_of(second)[-1]
