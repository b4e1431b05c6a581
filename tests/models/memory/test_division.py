"""A denoiser divided over two devices: the same numbers, and no operation that mixes the devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.masters import Adapter
from lora_trainer.memory_plan.trace import (
    Account,
    Subject,
    _micro_batch,
    _step_context,
    make_subject,
    trace,
    trace_division,
)
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import Architecture
from lora_trainer.models.folder import read_config
from lora_trainer.models.memory import checkpointing
from lora_trainer.models.memory.block_swap import move_to_device
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.memory.division import divide, divisible_blocks, divisible_lists, half_of
from lora_trainer.training import build
from lora_trainer.training.denoiser_layout import Layout
from lora_trainer.training.fallbacks import seed_dropout
from lora_trainer.training.micro_batch import make_micro_batch
from lora_trainer.training.processes import Processes
from lora_trainer.training.step import StepContext, StepSettings, backward, train_step
from tests.export.tiny import tiny_unet
from tests.recipes.recipe import save_tiny_model
from tests.training.test_fake_gpu import CROSSING, KINDS, FakeGpu, a_batch, settings

pytestmark = pytest.mark.exact
FIRST, SECOND, BF16 = torch.device("cpu"), torch.device("meta"), torch.bfloat16
# Blocks on the second device in every suite; the slow one has all numbers, and the other flavors.
COUNTS = {"sdxl": (2,), "flux": (3,), "z_image": (2,)}
EVERY = [
    pytest.param(kind, count, marks=[] if count in COUNTS.get(kind, ()) else pytest.mark.slow)
    for kind in KINDS
    for count in range(1, 1 + (5 if kind in ("sd15", "sdxl") else 4))
]


class TwoDevices(FakeGpu):
    """Refuses every operation on tensors of both devices, but for copies. What arrives from the second is ones."""

    allows_numbers = False  # of the CPU, which a GPU reads too: here the CPU is the first GPU

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        met = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        if len({leaf.device for leaf in met if leaf.ndim or not self.allows_numbers}) > 1:
            if name not in CROSSING:
                raise RuntimeError(f"{function}: tensors of both devices")
            if name == "copy_" and args[0].device == FIRST:
                return args[0].fill_(1.0)
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.fixture
def devices() -> Iterator[TwoDevices]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else parameters that become meta are others
    try:
        with TwoDevices() as mode:
            yield mode
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


LORA = {"rank": 2, "timestep_min_rank": 1}


def built(kind: str, folder: Path, lora: dict[str, object] = LORA, **layout: Any) -> tuple[StepContext, list[Any]]:
    """A tiny model's step, and two micro-batches for it."""
    name, stored, _ = KINDS[kind]
    family, model = FAMILIES[name], folder / "model"
    if not model.exists():
        save_tiny_model(folder, kind)
    facts = family.describe(model)
    config = settings(lora=lora, train={"ema_decay": 0.9})
    chosen = Layout(BF16, stored, latents=(2, facts.latent_channels, 8, 8), **layout)
    processes = Processes(0, 1, FIRST, None, lambda: None)
    context = build.build_step_context(config, family, facts, chosen, processes, is_attention_requested=False)
    torch.manual_seed(0)
    shapes = family.text.cond_shapes(dict(context.denoiser.config), facts)
    batch = a_batch(family, facts, {key: torch.ones(2, *shape) for key, shape in shapes.items()})
    return context, [make_micro_batch(batch, 0, step, config.noise, context.process) for step in range(2)]


def devices_of(module: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize(("kind", "count"), EVERY)
def test_a_divided_step_mixes_no_devices(kind: str, count: int, tmp_path: Path, devices: TwoDevices) -> None:
    """Forward, backward and update of every family at every block, checkpointed or not, quantized, with an EMA."""
    context, micros = built(kind, tmp_path, checkpointing=count % 2 == 1, second=SECOND, divided=count)
    blocks = divisible_blocks(context.denoiser)
    if count > len(blocks):
        pytest.skip("the tiny model has fewer blocks")
    there = blocks[len(blocks) - count :]
    assert [devices_of(block) for block in there] == [{SECOND}] * count
    assert {device for block in blocks[: len(blocks) - count] for device in devices_of(block)} <= {FIRST}
    assert {master.device for master in context.masters} == {FIRST}
    result = train_step(context, micros, 4, StepSettings(1e-4))
    assert result.loss.device == result.grad_norm.device == FIRST
    assert len(context.optimizer.state) == len(context.masters)
    move_to_device(context.denoiser, SECOND)
    assert devices_of(context.denoiser) == {SECOND}
    move_to_device(context.denoiser, FIRST)
    assert [devices_of(block) for block in there] == [{SECOND}] * count
    assert devices_of(context.denoiser) == {FIRST, SECOND}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_every_adapter_is_divided(adapter: str, kind: str, tmp_path: Path, devices: TwoDevices) -> None:
    devices.allows_numbers = adapter == "loha"  # peft's scale
    lora = {"type": adapter, "rank": 2}
    context, micros = built(kind, tmp_path, lora, checkpointing=True, second=SECOND, divided=3)
    assert {copy.device for copy in context.adapter.copies.values()} == {FIRST, SECOND}
    train_step(context, micros, 4, StepSettings(1e-4))
    assert len(context.optimizer.state) == len(context.masters)


@pytest.mark.parametrize(
    "kind", [kind if kind == "sdxl" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_divided_model_trains_the_same(kind: str, checkpointed: bool, tmp_path: Path) -> None:
    """Losses and masters, bit for bit, where each tensor that crosses is copied."""
    crossed: list[tuple[torch.device, Tensor]] = []

    def copying(tensor: Tensor, device: torch.device) -> Tensor:
        crossed.append((device, tensor))
        return tensor.clone()

    found = []
    for divided in (False, True):
        context, micros = built(kind, tmp_path, checkpointing=checkpointed)
        if divided:
            divide(context.denoiser, 2, FIRST, torch.device("cpu", 0), copying)
        results = [train_step(context, micros, 4, StepSettings(1e-3, step)) for step in range(2)]
        found.append(([float(each.loss) for each in results], [master.clone() for master in context.masters]))
    (whole, masters), (losses, others) = found
    assert losses == whole
    assert all(torch.equal(one, other) for one, other in zip(masters, others, strict=True))
    assert {device for device, _ in crossed} == {FIRST, torch.device("cpu", 0)}


def test_a_skip_connection_crosses_once(devices: TwoDevices) -> None:
    """A U-Net's later blocks read what the first ones left; the text goes to each block, and crosses once a pass."""
    crossed: list[Tensor] = []

    def move(tensor: Tensor, device: torch.device) -> Tensor:
        if device == SECOND and tensor.device != SECOND:
            crossed.append(tensor)
        return tensor.to(device)

    unet = tiny_unet("sd15").requires_grad_(False)
    text = torch.ones(1, 4, 32)
    divide(unet, 2, FIRST, SECOND, move)
    with torch.no_grad():
        for _ in range(2):
            unet(torch.ones(1, 4, 8, 8), torch.zeros(1), text)
    assert len(crossed) == len({id(tensor) for tensor in crossed}) + 1  # the text crosses in each of both passes
    assert sum(tensor is text for tensor in crossed) == 2
    skips = (
        len(unet.down_blocks[0].resnets) + len(unet.down_blocks[1].resnets) + 2
    )  # and conv_in, and what is downsampled
    assert len(crossed) == 2 * (skips + 3)  # and the hidden states, the time's embedding, the text


@pytest.mark.usefixtures("devices")
def test_a_checkpoint_keeps_what_is_on_the_blocks_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves the random state of its inputs' device, which dropout in a recomputed block must find again."""
    seen: list[tuple[nn.Module, set[torch.device]]] = []

    def checkpointed(block: nn.Module, *inputs: Any) -> Any:
        seen.append((block, {leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}))
        return block(*inputs)

    monkeypatch.setattr(checkpointing, "recomputing", lambda mode: checkpointed)
    context, micros = built("flux", tmp_path, checkpointing=True, second=SECOND, divided=3)
    train_step(context, micros[:1], 2, StepSettings(1e-4))
    assert [places for block, places in seen] == [{FIRST}, {SECOND}, {SECOND}, {SECOND}]


def test_which_blocks_are_divided() -> None:
    unet = tiny_unet("sd15")
    (blocks,) = divisible_lists(unet)
    assert blocks == [*unet.down_blocks, unet.mid_block, *unet.up_blocks]
    assert [half_of(sizes) for sizes in ([1, 1, 1, 1], [1, 1, 4], [4, 1, 1], [])] == [2, 1, 3, 0]


def test_dropout_on_a_second_gpu_has_masks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded by the step, as those of the first GPU: both repeat on resuming, and equal blocks have no equal masks."""
    seeds: list[tuple[str, int]] = []
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(("all", seed)))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeds.append(("current", seed)))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for second in (None, FIRST, torch.device("cuda", 1)):
        context = SimpleNamespace(built=SimpleNamespace(second=second))
        run: Any = SimpleNamespace(config=settings(), processes=SimpleNamespace(rank=0), context=context)
        for step in (3, 3, 4):
            seed_dropout(run, step)
    one, both = seeds[:3], seeds[6:]
    assert seeds[3:6] == one
    assert both[::2] == one
    assert both[:2] == both[2:4]
    assert len({seed for _, seed in both}) == 4


class ByDevice(Account):
    """Counts each storage for the device that it is on."""

    def __init__(self) -> None:
        self.kind = 0
        super().__init__(lambda size: ((self.kind, 1.0),), 2, {})

    def follow(self, tensor: Tensor) -> None:
        self.kind = int(tensor.device == SECOND)
        super().follow(tensor)

    def _result(self, function: Any, arguments: Any, named: Any) -> Any:
        return function(*arguments, **named)


def really_held(subject: Subject, count: int, checkpointed: int, micro: int) -> list[int]:
    """Peaks of both devices without the weights, in a step that is divided over two, with captions of full length."""
    denoiser = subject.denoiser.to_empty(device=FIRST)
    divide(denoiser, count, FIRST, SECOND)
    checkpoint_blocks(denoiser, checkpointed)
    account = ByDevice()
    for tensor in (*denoiser.parameters(), *denoiser.buffers()):
        account.follow(tensor)
    before, context = list(account.live), _step_context(subject)
    masters = {name: each for name, each in denoiser.named_parameters() if each.requires_grad}
    process = replace(context.process, alphas_cumprod=torch.ones(1000))
    context = replace(context, adapter=Adapter({}, masters), device=FIRST, process=process)
    batch = replace(_micro_batch(subject, micro, 32, 32), t=torch.zeros(micro, dtype=torch.long))
    batch = replace(batch, cond={name: torch.zeros_like(value) for name, value in batch.cond.items()})
    with account:
        backward(context, batch.to(FIRST, BF16), micro)
    return [max(moment[kind] - before[kind] for moment in account.line) for kind in (0, 1)]


@pytest.mark.parametrize("checkpointed", [pytest.param(0, marks=pytest.mark.slow), 99])
@pytest.mark.parametrize(
    "name",
    [
        *("flux", "z_image", "krea2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in "sdxl sd3 chroma qwen_image flux2 anima".split()),
    ],
)
def test_a_trace_shows_what_each_device_holds(
    name: str, checkpointed: int, tmp_path: Path, devices: TwoDevices
) -> None:
    """In tiny models, of which what crosses is a large part. Whole, it is the trace of one GPU."""
    family, model = FAMILIES[name], save_tiny_model(tmp_path, name)
    config = read_config(model, f"{family.denoiser.component}/config.json")
    architecture = Architecture(family.describe(model), config)
    micro = 1 if name == "chroma" else 2  # of several captions a trace has a mask, and equal ones need none

    def subject() -> Subject:
        return make_subject(family, architecture, rank=4, targets="attention", dtype=BF16)

    found = trace_division(subject(), (micro, 32, 32), checkpointed, "full")
    assert found.first[0] == trace(subject(), micro=micro, height=32, width=32, checkpointed=checkpointed).peak
    assert found.second[0] == 0
    for count in sorted({1, len(found.first) - 2}):
        first, second = really_held(subject(), count, checkpointed, micro)
        assert 0.97 * first <= found.first[count] <= 1.16 * first
        assert found.second[count] == pytest.approx(second, rel=0.08)
