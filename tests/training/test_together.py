"""Runs on one base: each gets what it would have got alone, and one that fails harms no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.joined import bare_copy
from lora_trainer.adapters.masters import Adapter
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.config.schema import LossSection, OptimizerSection
from lora_trainer.diffusion.loss import make_loss
from lora_trainer.diffusion.process import usual_process
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory.block_swap import SwappedBlock, swap_blocks
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.quantization import four_bits
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from lora_trainer.optim.clipping import clip_by_norm
from lora_trainer.optim.optimizers import make_optimizer
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.run_group import Member, RunGroup
from lora_trainer.training.step import StepContext, StepSettings, abort_step, train_step
from tests.lora_format.tiny import tiny_transformer, tiny_unet

STEPS = 2
BOUND = 1e-10  # of the largest trained value, in float64
CPU = torch.device("cpu")
UNETS = ("sd15", "sd2", "sdxl")
Built = Callable[[nn.Module], StepContext]


def base_of(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    denoiser = tiny_unet(family) if family in UNETS else tiny_transformer(family)
    denoiser = FAMILIES[family].denoiser.make(dict(denoiser.config))
    return denoiser.requires_grad_(False).to(dtype)


def builder(
    family: str, seed: int, *, kind: str = "lora", rank: int = 4, alpha: float = 4.0, lr: float = 1e-2, **changes: Any
) -> Built:
    """Builds a run's step context on a base."""

    def build(denoiser: nn.Module) -> StepContext:
        spec, own = FAMILIES[family].denoiser, ADAPTERS[kind].load()
        names = target_modules(denoiser, spec, changes.get("targets", "attention"))
        parameters = own.inject(denoiser, names, AdapterOptions(rank, alpha), seed)
        own.speed_up(denoiser)
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters.values():  # from 0 on, half of the gradients would be 0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data.to(torch.float64) + 0.05 * noise
        adapter = Adapter(parameters, parameters)
        process = usual_process("epsilon" if family in UNETS else "flow")
        section = OptimizerSection(name=changes.get("optimizer", "adamw"), learning_rate=lr)
        return StepContext(
            denoiser=denoiser.train(),
            predict=spec.predict,
            process=process,
            loss=make_loss(LossSection(), process),
            adapter=adapter,
            average=None,
            shown=lambda: adapter.masters,
            optimizer=make_optimizer(adapter.masters, section),
            scaler=torch.amp.GradScaler(enabled=False),
            reduce=None,
            device=CPU,
            dtype=torch.float64,
            clip=partial(clip_by_norm, largest=1.0),
        )

    return build


def samples(family: str, denoiser: nn.Module, count: int, seed: int, side: int = 8) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

    shapes = FAMILIES[family].text.cond_shapes(dict(denoiser.config))
    cond = {
        name: torch.zeros(count, *shape, dtype=torch.bool) if name == "padding" else drawn(*shape)
        for name, shape in shapes.items()
    }
    channels = (
        4 if family in UNETS else 16 if "in_channels" not in denoiser.config else latent_channels(family, denoiser)
    )
    latents, noise = drawn(channels, side, side), drawn(channels, side, side)
    t = torch.randint(1, 1000, (count,), generator=generator)
    sizes = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * count, dtype=torch.float64)
    return MicroBatch(latents, noise, noise, t, cond, sizes, torch.ones(count, dtype=torch.float64))


def latent_channels(family: str, denoiser: nn.Module) -> int:
    packed = {"flux", "flux2", "chroma", "qwen_image", "krea2"}
    return int(denoiser.config.in_channels) // 4 if family in packed else int(denoiser.config.in_channels)


def train_alone(base: nn.Module, build: Built, data: Sequence[Sequence[MicroBatch]]) -> dict[str, Tensor]:
    context = build(bare_copy(base))
    return train(context, data)


def train(context: StepContext, data: Sequence[Sequence[MicroBatch]]) -> dict[str, Tensor]:
    for step, micros in enumerate(data):
        context.joined.begin_step(step)
        train_step(context, micros, sum(len(each.t) for each in micros), StepSettings(lr_of(context), step))
    return {name: value.detach().clone() for name, value in context.adapter.masters.items()}


def lr_of(context: StepContext) -> float:
    return float(context.optimizer.param_groups[0]["lr"])


def train_together(
    base: nn.Module,
    builds: Sequence[Built],
    data: Sequence[Sequence[Sequence[MicroBatch]]],
    lines: list[str] | None = None,
) -> tuple[list[dict[str, Tensor]], RunGroup]:
    group, found, lines = RunGroup(8), dict[str, dict[str, Tensor]](), [] if lines is None else lines

    def work(build: Built, own: Sequence[Sequence[MicroBatch]], member: Member) -> None:
        context = member.join(build(bare_copy(base)), (), lines.append)
        found[member.name] = train(context, own)

    group.run(
        {str(index): partial(work, build, own) for index, (build, own) in enumerate(zip(builds, data, strict=True))}
    )
    return [found[name] for name in sorted(found)], group


def assert_equal_to_rounding(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    largest = max(float(value.abs().max()) for value in one.values())
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=BOUND * largest)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of Krea 2's norms in float64
@pytest.mark.parametrize("family", FAMILIES)
def test_each_run_ends_as_alone_with_one_pass_for_each_shape(family: str) -> None:
    """Three runs with seeds, learning rates and batch sizes of their own; two of them of one rank."""
    base = base_of(family)
    sizes = ((2, 1e-2), (2, 3e-3), (1, 1e-2))
    builds = [
        builder(family, seed, rank=(4, 4, 3)[seed], alpha=2.0 + seed, lr=lr) for seed, (_, lr) in enumerate(sizes)
    ]
    data = [
        [[samples(family, base, count, 100 * run + step)] for step in range(STEPS)]
        for run, (count, _) in enumerate(sizes)
    ]
    found, group = train_together(base, builds, data)
    assert group.passes == STEPS
    for build, own, together in zip(builds, data, found, strict=True):
        alone = train_alone(base, build, own)
        assert_equal_to_rounding(alone, together)
    assert not any(torch.equal(found[0][name], found[1][name]) for name in found[0])


KINDS = [("lora", {}), ("dora", {}), ("lokr", {}), ("loha", {}), ("oft", {"rank": 8})]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind for kind, _ in KINDS])
def test_a_kind_is_joined_with_a_lora_on_other_layers(kind: str, options: dict[str, Any]) -> None:
    base = base_of("sd15")
    builds = [builder("sd15", 1, kind=kind, **options), builder("sd15", 2, targets="attention+ff"), builder("sd15", 3)]
    data = [[[samples("sd15", base, 1, 10 * run + step)] for step in range(STEPS)] for run in range(3)]
    found, group = train_together(base, builds, data)
    assert group.passes == STEPS
    for build, own, together in zip(builds, data, found, strict=True):
        assert_equal_to_rounding(train_alone(base, build, own), together)


def test_runs_whose_shapes_come_in_another_order_share_passes_of_other_steps() -> None:
    """One waits once for its second shape: five passes for two times four steps. Step by step they would be eight."""
    base = base_of("sd15")
    builds = [builder("sd15", seed) for seed in range(2)]
    data = [
        [[samples("sd15", base, 1, 10 * run + step, side=(8, 16)[(run + step) % 2])] for step in range(4)]
        for run in (0, 1)
    ]
    found, group = train_together(base, builds, data)
    assert group.passes == 5
    for build, own, together in zip(builds, data, found, strict=True):
        assert_equal_to_rounding(train_alone(base, build, own), together)


def test_shapes_of_a_step_are_passes_of_their_own() -> None:
    """Two shapes in the steps of one run, one in those of the others: each step has two passes, whoever asks first."""
    base = base_of("sd15")
    builds = [builder("sd15", seed) for seed in range(3)]
    both = [[samples("sd15", base, 1, step), samples("sd15", base, 2, step + 9, side=16)] for step in range(3)]
    data = [both, [[each[0]] for each in both], [[each[1]] for each in both]]
    found, group = train_together(base, builds, data)
    assert group.passes == 2 * 3
    for build, own, together in zip(builds, data, found, strict=True):
        assert_equal_to_rounding(train_alone(base, build, own), together)


def test_a_run_that_turns_nan_leaves_the_bytes_of_the_others() -> None:
    base = base_of("sd15")
    builds = [builder("sd15", seed) for seed in range(3)]
    data = [[[samples("sd15", base, 2, 10 * run + step)] for step in range(3)] for run in range(3)]
    spoiled = [replace(data[1][1][0], latents=torch.full_like(data[1][1][0].latents, torch.nan))]
    whole, _ = train_together(base, builds, data)
    broken, group = train_together(base, builds, [data[0], [data[1][0], spoiled, data[1][2]], data[2]])
    assert group.passes == 3
    for run in (0, 2):
        assert all(torch.equal(whole[run][name], broken[run][name]) for name in whole[run])
    assert all(torch.isfinite(value).all() for value in broken[1].values()), "its step was skipped"
    assert not all(torch.equal(whole[1][name], broken[1][name]) for name in whole[1])


def test_a_run_that_fails_ends_alone() -> None:
    base, group, found = base_of("sd15"), RunGroup(8), dict[str, dict[str, Tensor]]()
    data = [[samples("sd15", base, 2, step)] for step in range(3)]

    def work(number: int, member: Member) -> None:
        context = member.join(builder("sd15", number)(bare_copy(base)), (), print)
        if number == 1:
            train(context, data[:1])
            raise ArithmeticError("of this run alone")
        found[member.name] = train(context, data)

    with pytest.raises(ArithmeticError, match="of this run alone"):
        group.run({str(number): partial(work, number) for number in range(3)})
    assert group.passes == 3
    for number in (0, 2):
        assert_equal_to_rounding(train_alone(base, builder("sd15", number), data), found[str(number)])


def test_a_run_that_aborts_its_step_repeats_it_and_changes_no_other() -> None:
    """The loss of one run runs out of memory once, between the joined forward and backward passes."""
    base, group, found = base_of("sd15"), RunGroup(8), dict[str, dict[str, Tensor]]()
    data = [[samples("sd15", base, 2, step)] for step in range(2)]

    def work(number: int, member: Member) -> None:
        context = member.join(builder("sd15", number)(bare_copy(base)), (), print)
        if number == 1:

            def failing(*_: Tensor) -> Tensor:
                raise torch.OutOfMemoryError("of this test")

            member.begin_step(0)
            with pytest.raises(torch.OutOfMemoryError):
                train_step(replace(context, loss=failing), data[0], 2, StepSettings(1e-2, 0))
            abort_step(context)
        found[member.name] = train(context, data)

    group.run({str(number): partial(work, number) for number in range(3)})
    assert group.passes == 3
    for number in range(3):
        assert_equal_to_rounding(train_alone(base, builder("sd15", number), data), found[str(number)])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_puts_fewer_runs_in_a_pass_and_changes_nothing_else(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of more than four samples fails; the five runs then take two passes a step."""
    base, lines = base_of("sd15"), list[str]()
    builds = [builder("sd15", seed) for seed in range(5)]
    data = [[[samples("sd15", base, 1, 10 * run + step)] for step in range(STEPS)] for run in range(5)]
    alone = [train_alone(base, build, own) for build, own in zip(builds, data, strict=True)]
    if where == "forward":
        real = RunGroup._forward
        monkeypatch.setattr(RunGroup, "_forward", lambda *of: refuse(len(of[1])) or real(*of))
    else:
        gradients = torch.autograd.grad
        monkeypatch.setattr(
            torch.autograd, "grad", lambda y, *of, **named: refuse(len(y)) or gradients(y, *of, **named)
        )
    found, group = train_together(base, builds, data, lines)
    assert group.most == 3
    assert lines == ["out of memory (of this test): 3 runs in one pass in place of 5; it is repeated"] * 5
    for own, together in zip(alone, found, strict=True):
        assert_equal_to_rounding(own, together)


def refuse(samples: int) -> None:
    if samples > 4:
        raise torch.OutOfMemoryError("of this test")


@pytest.mark.parametrize("layout", ["checkpointed", "swapped", "nf4"])
def test_the_base_may_be_checkpointed_swapped_and_quantized(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, widened = base_of("sd15"), four_bits.widened
    if layout == "nf4":
        # bitsandbytes has no float64: it would return memory that was not written.
        wide = lambda *of: widened(*of[:3], torch.float32).to(of[3])  # noqa: E731
        monkeypatch.setattr(four_bits, "widened", wide)
        store_layers(base, make_quantizer("nf4"))
    if layout == "checkpointed":
        checkpoint_blocks(base, 3)
    if layout == "swapped":
        swap_blocks(base, 3, CPU)
    builds = [builder("sd15", seed) for seed in range(2)]
    data = [[[samples("sd15", base, 1, 10 * run + step)] for step in range(STEPS)] for run in range(2)]
    alone = [train_alone(base, build, own) for build, own in zip(builds, data, strict=True)]
    found, group = train_together(base, builds, data)
    assert group.passes == STEPS
    for own, together in zip(alone, found, strict=True):
        assert_equal_to_rounding(own, together)


@pytest.mark.parametrize("layout", ["swapped", "nf4"])
def test_weights_are_dequantized_and_copied_once_for_all_runs(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, count = base_of("sd15"), 0
    widened, load = four_bits.widened, SwappedBlock.load

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*of: Any) -> Any:
            nonlocal count
            count += 1
            return real(*of)

        return call

    if layout == "nf4":  # bitsandbytes has no float64
        monkeypatch.setattr(four_bits, "widened", counted(lambda *of: widened(*of[:3], torch.float32).to(of[3])))
        store_layers(base, make_quantizer("nf4"))
    else:
        monkeypatch.setattr(SwappedBlock, "load", counted(load))
        swap_blocks(base, 3, CPU)
    data = [[[samples("sd15", base, 1, 10 * run + step)] for step in range(STEPS)] for run in range(3)]
    counts = []
    for runs in (1, 3):
        count = 0
        train_together(base, [builder("sd15", seed) for seed in range(runs)], data[:runs])
        counts.append(count)
    assert 0 < counts[1] <= counts[0]
