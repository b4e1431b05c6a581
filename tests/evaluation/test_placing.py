"""The placement on the GPU changes no gate result and no image, and the chosen one fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from lora_trainer.diffusion.timesteps import stratified_timesteps
from lora_trainer.evaluation import drift, placing
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.evidence import RealImages
from lora_trainer.evaluation.lora_check import LoraGate, check_lora
from lora_trainer.evaluation.placing import bring_pipeline, bytes_of, keep, with_less
from lora_trainer.evaluation.recipe import Drawing, Grid, ImageRequest, NamedModel
from lora_trainer.evaluation.sample import Where, compare, draw
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.lora_format.writing import write_lora
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Encoders
from lora_trainer.models.memory.phases import (
    Placement,
    caching_bytes,
    images_at_once,
    phase_costs,
    place_drawing,
    place_gate,
    prediction_bytes,
)
from tests.lora_format.tiny import facts, random_lora, tiny_pipeline

CPU = torch.device("cpu")
GIB = 2**30
SDXL_DENOISER = 2_567_463_684 * 2  # bytes in bf16


KNOWN_AS = {"sd15": "sd_v1", "sdxl": "sdxl_base_v1-0"}


@pytest.fixture(scope="module", params=["sd15", "sdxl"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A family, a base model of it and a LoRA."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_pipeline(folder / "tokenizer", request.param).save_pretrained(folder / "base")
    denoiser = FAMILIES[request.param].denoiser.load(folder / "base", torch.float32, CPU)
    lora, _ = write_lora(folder, "lora", random_lora(denoiser), facts(base_version=KNOWN_AS[request.param]))
    return request.param, folder / "base", lora


def half(base: Path, family: str) -> int:
    """Bytes with which half of the denoiser stays, if swapped layers needed no room."""
    denoiser = FAMILIES[family].denoiser.load(base, torch.float32, CPU)
    return prediction_bytes(8 * 8, 4, phase_costs(family)) + bytes_of(denoiser) // 2


def test_the_gate_result_does_not_depend_on_the_denoisers_device(
    subject: tuple[str, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, base, lora = subject
    monkeypatch.setattr(placing, "phase_costs", lambda family: replace(phase_costs(family), layer=0))
    monkeypatch.setattr(drift, "stratified_timesteps", lambda steps, of: stratified_timesteps(2, of))
    family = FAMILIES[name]
    shapes = family.text.cond_shapes(family.denoiser.load(base, torch.float32, CPU).config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    samples = [
        EncodedSample(
            f"s{index}",
            torch.randn(4, 8, 8, generator=generator),
            {key: torch.randn(*shape, generator=generator) for key, shape in shapes.items()},
            torch.tensor([64.0, 64, 0, 0, 64, 64]),
        )
        for index in range(1)
    ]
    messages: list[str] = []

    def numbers(usable: int | None) -> dict[str, object]:
        compute = Compute(usable=usable, say=messages.append)
        report = check_lora(
            lora, base, family, RealImages((), samples), LoraGate(check="lite", prompts=("a ring",)), compute
        )
        return dict(report.numbers)

    whole = numbers(None)
    assert not any("layer by layer" in line for line in messages)
    assert numbers(half(base, name) if name == "sd15" else 0) == whole
    assert any("of the denoiser on the GPU and the rest layer by layer" in line for line in messages)


def test_the_gate_encodes_prompts_layer_by_layer_when_encoders_do_not_fit(
    subject: tuple[str, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, base, lora = subject
    monkeypatch.setattr(drift, "stratified_timesteps", lambda steps, of: stratified_timesteps(2, of))

    def whole(*args: object) -> Encoders:
        raise AssertionError("loaded whole")

    family, prompts = FAMILIES[name], ("a ring", "a cat", "a red ring")
    gate = LoraGate(check="lite", prompts=prompts)
    drifted = check_lora(lora, base, family, RealImages(), gate).numbers["drift"]
    visiting = replace(family, encoders=replace(family.encoders, load=whole))
    report = check_lora(lora, base, visiting, RealImages(), gate, Compute(usable=1))
    assert report.numbers["drift"] == pytest.approx(drifted, rel=1e-5)  # one at a time: up to rounding


def test_images_do_not_depend_on_the_devices_of_the_parts(subject: tuple[str, Path, Path], tmp_path: Path) -> None:
    name, base, lora = subject
    messages: list[str] = []

    def drawn(usable: int | None) -> list[np.ndarray]:
        where, drawing = Where(tmp_path / str(usable), "grid"), Drawing(2, 3.0, (64, 64))
        model, grid = NamedModel(FAMILIES[name], base), Grid([ImageRequest("a ring", 1)], drawing)
        compare(model, lora, grid, where, Compute(usable=usable, say=messages.append))
        return [np.asarray(Image.open(where.image(0, strength)), dtype=int) for strength in (None, 1.0)]

    whole, swapped = drawn(None), drawn(0)
    assert "encoders layer by layer" in messages[0]
    assert np.abs(whole[0] - whole[1]).max() > 0
    for one, other in zip(whole, swapped, strict=True):
        assert np.abs(one - other).max() <= 1


@pytest.mark.slow  # the tests above have a family with a VAE of the usual class
def test_images_of_a_vae_that_keeps_its_statistics_in_buffers_do_not_depend_on_its_device(tmp_path: Path) -> None:
    base = tmp_path / "flux2"
    tiny_pipeline(tmp_path / "tokens", "flux2").save_pretrained(base, safe_serialization=True)
    drawn = []
    for usable in (None, 0):
        pipeline = FAMILIES["flux2"].pipeline.make(base, torch.float32, CPU)
        bring_pipeline(pipeline, FAMILIES["flux2"], CPU, usable, (64, 64))
        read = read_prompts(pipeline, FAMILIES["flux2"], ["a ring", ""], CPU)
        rows = [ImageRequest("a ring", 1)]
        (image,) = draw(pipeline, FAMILIES["flux2"], read, rows, Drawing(2, 3.0, (64, 64)))
        drawn.append(np.asarray(image, dtype=int))
    assert np.abs(drawn[0] - drawn[1]).max() <= 1


def test_layers_stay_until_memory_is_full() -> None:
    """Parts that do not stay are freed between two uses, and results are the same."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    x = torch.randn(2, 8)
    expected = module(x)
    each = bytes_of(module[0])
    keep(module, CPU, 2 * each)
    assert [layer.weight.device.type for layer in module] == ["cpu", "cpu", "meta"]
    assert torch.equal(module(x), expected)
    assert module[2].weight.device.type == "meta"


def test_out_of_memory_is_retried_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "free_memory", lambda device: None)  # seconds, in a process with much in it
    calls: list[int | None] = []
    messages: list[str] = []

    def attempt(compute: Compute) -> str:
        calls.append(compute.usable)
        if compute.usable is None or compute.usable > 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    assert with_less(attempt, Compute(usable=100, say=messages.append)) == "done"
    assert calls == [100, 50, 0]
    assert len(messages) == 2
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError, match="nothing left"):
        with_less(lambda _: attempt(Compute(usable=1)), Compute())
    assert calls == [1, 1]


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    denoiser=st.integers(GIB, 12 * GIB),
    side=st.sampled_from([512, 768, 1024, 1536]),
    usable=st.integers(GIB, 24 * GIB),
)
def test_the_chosen_placement_fits(family: str, denoiser: int, side: int, usable: int) -> None:
    """Unless the denoiser has nothing left to move off the GPU. Nothing moves without need."""
    costs, places = phase_costs(family), (side // 8) ** 2

    def check(placed: Placement, whole: int) -> None:
        assert placed.peak <= usable or placed.resident == 0
        assert (placed.peak == whole and placed.resident is None) == (whole <= usable)
        assert placed.resident is None or placed.resident < denoiser

    check(place_gate(denoiser, places, 2, costs, usable), place_gate(denoiser, places, 2, costs, None).peak)
    drawing = [place_drawing(denoiser, GIB, places, side * side, 2, 2, costs, limit) for limit in (usable, None)]
    assert drawing[0].in_turn == (drawing[1].peak > usable)
    assert drawing[0].peak <= usable or drawing[0].resident == 0
    images = images_at_once(8, side * side, 4, costs, usable)
    assert 1 <= images <= 8
    assert images == 1 or caching_bytes(images, side * side, 4, costs, None)[0] <= max(
        usable, 4 * (sum(costs.text_encoders) + 34 * costs.caption)
    )


@pytest.mark.parametrize(("side", "kept_gib"), [(768, 3.5), (1024, 2.9)])
def test_sdxl_is_evaluated_and_sampled_on_the_smallest_gpu(side: int, kept_gib: float) -> None:
    """6 GiB with 4.7 usable: published sizes in bf16. Most of the denoiser stays, no tiling."""
    costs, usable = phase_costs("sdxl"), int(4.7 * GIB)
    encoders = 2 * (sum(costs.text_encoders) + costs.autoencoder)
    drawing = place_drawing(SDXL_DENOISER, encoders, (side // 8) ** 2, side * side, 2, 2, costs, usable)
    assert drawing.in_turn
    assert not drawing.tiled
    assert drawing.resident is not None
    assert kept_gib * GIB < drawing.resident < SDXL_DENOISER
    gate = place_gate(SDXL_DENOISER, 128 * 128, 2, costs, usable)
    assert gate.resident is not None
    assert gate.resident > 4.0 * GIB
    peak, messages = caching_bytes(1, side * side, 4, costs, usable)
    assert peak <= usable
    assert messages == "1 image at once"


def test_text_encoders_that_do_not_fit_are_loaded_layer_by_layer() -> None:
    costs = phase_costs("flux")
    peaks = [caching_bytes(1, 1024**2, 4, costs, None if gib is None else gib * GIB) for gib in (4, 11, None)]
    assert peaks[0][0] < 4 * GIB
    assert "layer by layer, 31 captions" in peaks[0][1]
    assert "32 captions" in peaks[1][1]
    assert peaks[2][0] > 4 * sum(costs.text_encoders)
