"""A kept base model is read once, and changes to the parts it returns do not reach it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.models import kept
from lora_trainer.models.attention.backends import set_attention_backend
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.kept import keep_loaded
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from tests.lora_format.tiny import tiny_pipeline

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family, in a folder that bears its name."""
    folder = tmp_path_factory.mktemp("kept")
    tiny_pipeline(folder / "made", request.param).save_pretrained(folder / request.param, safe_serialization=True)
    return folder / request.param


def counted(model: Path, reads: list[str]) -> Any:
    """The family of a model, which reports what it reads from the disk."""
    name = model.name
    family = FAMILIES[name]

    def load_denoiser(*arguments: Any) -> Any:
        reads.append("denoiser")
        return family.denoiser.load(*arguments)

    def make_pipeline(*arguments: Any) -> Any:
        reads.append("pipeline")
        return family.pipeline.make(*arguments)

    seen = replace(
        family,
        denoiser=replace(family.denoiser, load=load_denoiser),
        pipeline=replace(family.pipeline, make=make_pipeline),
    )
    return keep_loaded({name: seen})[name]


def part(pipeline: Any, model: Path) -> Any:
    """A pipeline's denoiser."""
    return getattr(pipeline, FAMILIES[model.name].denoiser.component)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_changes_of_a_job_to_a_base_model_are_undone(model):
    reads: list[str] = []
    family = counted(model, reads)
    untouched = weights(FAMILIES[model.name].denoiser.load(model, torch.float32, CPU))
    for _ in range(2):
        denoiser = family.denoiser.load(model, torch.float32, CPU)
        assert_same(weights(denoiser), untouched)
        assert not any(parameter.requires_grad for parameter in denoiser.parameters())
        assert not denoiser.training
        assert not any(getattr(module, "gradient_checkpointing", False) for module in denoiser.modules())
        assert denoiser.dtype == torch.float32
        # All that a run does to it.
        names = target_modules(denoiser, family.denoiser, "attention")
        parameters = inject_lora(denoiser, names, AdapterOptions(2, 1.0, 0.1), 0)
        set_attention_backend(denoiser, "math")
        checkpoint_blocks(denoiser, 3)
        denoiser.train()
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1.0)
        denoiser.half()
    pipeline = family.pipeline.make(model, torch.float32, CPU)
    assert_same(weights(part(pipeline, model)), untouched)
    assert reads == ["pipeline"], "the disk is read once for both"


def test_twins_share_their_weights(model):
    family = counted(model, [])
    first, second = (family.denoiser.load(model, torch.float32, CPU) for _ in range(2))
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert pairs
    assert all(one is not other and one.data_ptr() == other.data_ptr() for one, other in pairs)


def test_a_pipeline_of_a_kept_base_model_generates_the_same_as_a_fresh_one(model):
    family = counted(model, [])

    def drawn(pipeline: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        return pipeline(
            prompt="a ring", num_inference_steps=2, generator=generator, height=64, width=64, output_type="np"
        )

    fresh = drawn(FAMILIES[model.name].pipeline.make(model, torch.float32, CPU)).images
    for _ in range(2):
        pipeline = family.pipeline.make(model, torch.float32, CPU)
        assert (drawn(pipeline).images == fresh).all()
        pipeline.vae.enable_slicing()
        set_attention_backend(part(pipeline, model), "math")


def test_another_precision_is_another_base_model_and_full_memory_keeps_one(model, monkeypatch):
    reads: list[str] = []
    family = counted(model, reads)
    monkeypatch.setattr(kept, "MEMORY_FULL", 101.0)  # percent: never, whatever other programs hold
    assert family.denoiser.load(model, torch.bfloat16, CPU).dtype == torch.bfloat16
    family.denoiser.load(model, torch.float32, CPU)
    family.denoiser.load(model, torch.bfloat16, CPU)
    assert reads == ["pipeline", "pipeline"]
    monkeypatch.setattr(kept, "MEMORY_FULL", -1.0)
    family.denoiser.load(model, torch.float16, CPU)
    family.denoiser.load(model, torch.bfloat16, CPU)
    assert len(reads) == 4
