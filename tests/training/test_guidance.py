"""A target with guidance (`loss.guidance_target`): its arithmetic, its cost in the plan, and what it excludes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lora_trainer.config.layers import Layer
from lora_trainer.core.errors import UsageError
from lora_trainer.run.plans.plan import make_plan
from lora_trainer.run.settings import settle
from lora_trainer.training.guidance import make_guidance_target, without_adapter
from lora_trainer.training.step import backward
from tests.training.tiny_run import TinyPlace


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1.5, 8.0), seed=st.integers(0, 1000), rows=st.integers(1, 4))
def test_the_target_is_guided_and_its_error_divided_by_the_scale(scale: float, seed: int, rows: int) -> None:
    """The target is what guidance makes of the plain one; the unguided prediction's error from the plain target is
    the prediction's from the guided one, divided by the scale."""
    draw = torch.Generator().manual_seed(seed)
    layers = nn.Sequential(nn.Linear(3, 3, bias=False))
    nn.init.normal_(layers[0].weight, generator=draw)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), layers)
    frozen = layers[0].base_layer

    def predict(model: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        return model(noisy + cond["embeds"])

    noisy, target = (torch.randn(rows, 3, generator=draw) for _ in range(2))
    empty, caption = torch.randn(3, generator=draw), torch.randn(rows, 3, generator=draw)
    t, sizes = torch.zeros(rows), torch.zeros(rows, 6)
    guidance = make_guidance_target(scale, layers, {"embeds": empty}, torch.device("cpu"), torch.float32)
    process = SimpleNamespace(target=lambda *_: target)
    context = SimpleNamespace(predict=predict, denoiser=layers, process=process)
    micro = SimpleNamespace(latents=None, noise=None, t=t, cond={"embeds": caption}, sizes=sizes)
    moved = guidance.moved(context, micro, noisy)
    u = frozen(noisy + empty)
    torch.testing.assert_close(moved, u + scale * (target - u), rtol=1e-5, atol=1e-5)
    assert not moved.requires_grad
    predicted = predict(layers, noisy, t, {"embeds": caption}, sizes)
    assert not torch.equal(predicted, frozen(noisy + caption)), "the adapter is on again"
    unguided = guidance.unguided(context)(noisy, t, {"embeds": caption}, sizes)
    torch.testing.assert_close((unguided - target) * scale, predicted - moved, rtol=1e-3, atol=1e-4)


def test_an_adapter_that_was_off_stays_off() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False), layers)
    layers[0].enable_adapters(False)
    x = torch.ones(1, 3)
    before = layers(x)
    with without_adapter(layers):
        assert torch.equal(layers(x), layers[1].base_layer(layers[0].base_layer(x)))
    assert [layer.disable_adapters for layer in layers] == [True, False]
    assert torch.equal(layers(x), before)


def test_a_step_with_a_guided_target_counts_its_forward_pass(place: TinyPlace) -> None:
    """The plan's operations are those that torch counts, within 3 %."""
    counted = {}
    for name, scale in (("plain", None), ("guided", 3.0)):
        run = place.run(name, steps=1, loss__guidance_target=scale, lora__rank=4)
        micros = run.feed.micros(0)
        with FlopCounterMode(display=False) as counter:
            for micro in micros:
                backward(run.context, micro, run.feed.samples_in(0))
        counted[name] = counter.get_total_flops()
    layer = {"model": {"path": str(place.model)}, "lora": {"rank": 4}, "memory": {"weight_dtype": "fp32"}}
    planned = {
        name: make_plan(settle([], [Layer("test", {**layer, "loss": {"guidance_target": scale}})])).fit.parts.tflop
        for name, scale in (("plain", None), ("guided", 3.0))
    }
    more = counted["guided"] / counted["plain"]
    assert 1.3 < more < 1.6
    assert planned["guided"] / planned["plain"] == pytest.approx(more, rel=0.03)


def test_the_plan_counts_a_training_adapter(place: TinyPlace, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    save_file({"unet.one.lora_A.weight": torch.zeros(64, 256), "unet.one.lora_B.weight": torch.zeros(256, 64)}, path)
    found = []
    for adapter in (None, str(path)):
        values = {"model": {"path": str(place.model), "training_adapter": adapter}, "memory": {"weight_dtype": "fp32"}}
        found.append(make_plan(settle([], [Layer("test", values)])).fit.parts.weights)
    assert (found[1] - found[0]) * 2**30 == pytest.approx(4 * 2 * 64 * 256)


@pytest.mark.parametrize(
    "trained", [{"text_encoder__learning_rates": (1e-4,)}, {"textual_inversion__placeholder_tokens": ("<a>",)}]
)
def test_a_guided_target_is_of_frozen_text_encoders(trained: dict[str, object], place: TinyPlace) -> None:
    with pytest.raises(UsageError, match="trains its text encoders"):
        place.run("both", loss__guidance_target=3.0, **trained)
