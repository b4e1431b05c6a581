"""Text encoders that no LoRA is on stay mapped as they are stored; what they say is the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_trainer.evaluation.encode import text_reader
from lora_trainer.evaluation.loading import fresh_pipeline
from lora_trainer.evaluation.placing import bring_pipeline, stored_texts
from lora_trainer.models import FAMILIES, encoders
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.memory import phases
from lora_trainer.models.memory.phases import CAPTIONS_AT_ONCE, captions_on_a_cpu, phase_costs
from tests.export.tiny import tiny_pipeline

CPU = torch.device("cpu")
PROMPTS = ["a red ring", "two blue squares", ""]
GIB = 2**30


@pytest.fixture(scope="module", params=["sd3", "flux", "z_image"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of a family that is stored in 16 bits, in a folder of the family's name."""
    folder = tmp_path_factory.mktemp("stored")
    tiny_pipeline(folder / "tokens", request.param).to(torch.bfloat16).save_pretrained(folder / request.param)
    return folder / str(request.param)


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is widened layer by layer, by its class: everything on a CPU."""
    names: list[str] = []
    true = encoders.offload_layers

    def noted(module: torch.nn.Module, *given: object) -> None:
        names.append(type(module).__name__)
        true(module, *given)  # type: ignore[arg-type]

    for place in ("lora_trainer.models.encoders.offload_layers", "lora_trainer.evaluation.placing.offload_layers"):
        monkeypatch.setattr(place, noted)
    monkeypatch.setattr(phases, "LARGE_TEXTS", 0)
    return names


def whole(model: Path, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    family = FAMILIES[model.name]
    encode = family.load_encoders(model, dtype, CPU).encode_text
    return [encode([prompt]) for prompt in PROMPTS]


def drawn_with(model: Path, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """What a pipeline that draws reads of each prompt, after its encoders were brought there."""
    family = FAMILIES[model.name]
    pipeline = fresh_pipeline(family, model, dtype, CPU)
    (stored,) = stored_texts(pipeline, family)
    assert {each.dtype for each in stored.parameters()} == {torch.bfloat16}
    bring_pipeline(pipeline, family, CPU, None, (64, 64))
    with torch.no_grad():
        read = read_prompts(pipeline, family, PROMPTS, CPU)
    return [read[prompt] for prompt in PROMPTS]


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)
        for mine, yours in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small_ones_are_widened_where_images_are_drawn(model: Path, dtype: torch.dtype) -> None:
    assert same(drawn_with(model, dtype), whole(model, dtype))


def test_large_ones_are_widened_layer_by_layer_where_images_are_drawn(model: Path, visited: list[str]) -> None:
    assert same(drawn_with(model, torch.float32), whole(model, torch.float32))
    assert visited == ["Qwen3Model" if model.name == "z_image" else "T5EncoderModel"]


def test_large_ones_are_widened_layer_by_layer_where_captions_are_read(model: Path, visited: list[str]) -> None:
    family = FAMILIES[model.name]
    read = text_reader(family, family.describe(model), torch.float32, CPU, None)
    assert same([read([prompt]) for prompt in PROMPTS], whole(model, torch.float32))
    assert len(visited) == {"sd3": 3, "flux": 2, "z_image": 1}[model.name]


@pytest.mark.parametrize(("family", "in_turn"), [("sd15", False), ("sdxl", False), ("sd3", True), ("flux", True)])
def test_a_cpu_holds_no_t5_whole(family: str, in_turn: bool) -> None:
    costs = phase_costs(family)
    found, together = captions_on_a_cpu(4, costs)
    assert found == in_turn
    assert together == CAPTIONS_AT_ONCE if not in_turn else together * 4 * costs.caption <= 2 * GIB
    assert together >= 1
