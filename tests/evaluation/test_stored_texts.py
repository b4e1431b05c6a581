"""Text encoders without a LoRA stay memory mapped as stored, with bit-identical embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_trainer.evaluation.encode import text_reader
from lora_trainer.evaluation.loading import fresh_pipeline
from lora_trainer.evaluation.placing import bring_pipeline, stored_texts
from lora_trainer.models import encoders
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory import phases
from lora_trainer.models.memory.phases import CAPTIONS_AT_ONCE, captions_on_a_cpu, phase_costs
from tests.lora_format.tiny import tiny_pipeline

CPU = torch.device("cpu")
PROMPTS = ["a red ring", "two blue squares", ""]
GIB = 2**30


@pytest.fixture(scope="module", params=["sd3", "flux", "flux2", "chroma", "z_image"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model of a family stored in 16 bits, in a folder with the family's name."""
    folder = tmp_path_factory.mktemp("stored")
    tiny_pipeline(folder / "tokens", request.param).to(torch.bfloat16).save_pretrained(folder / request.param)
    return folder / str(request.param)


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes that are dequantized layer by layer. All run on a CPU."""
    names: list[str] = []
    true = encoders.offload_layers

    def noted(module: torch.nn.Module, *args: object) -> None:
        names.append(type(module).__name__)
        true(module, *args)  # type: ignore[arg-type]

    for place in ("lora_trainer.models.encoders.offload_layers", "lora_trainer.evaluation.placing.offload_layers"):
        monkeypatch.setattr(place, noted)
    monkeypatch.setattr(phases, "LARGE_TEXTS", 0)
    return names


def whole(model: Path, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    family = FAMILIES[model.name]
    encode = family.load_encoders(model, dtype, CPU).encode_text
    return [encode([prompt]) for prompt in PROMPTS]


def drawn_with(model: Path, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """The embeddings of each prompt in a sampling pipeline, after its encoders were moved."""
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
def test_small_encoders_are_dequantized_for_sampling(model: Path, dtype: torch.dtype) -> None:
    assert same(drawn_with(model, dtype), whole(model, dtype))


def test_large_encoders_are_dequantized_layer_by_layer_for_sampling(model: Path, visited: list[str]) -> None:
    assert same(drawn_with(model, torch.float32), whole(model, torch.float32))
    assert visited == ["Qwen3Model" if model.name in ("flux2", "z_image") else "T5EncoderModel"]


def test_large_encoders_are_dequantized_layer_by_layer_for_captions(model: Path, visited: list[str]) -> None:
    family = FAMILIES[model.name]
    read = text_reader(family, family.describe(model), torch.float32, CPU, None)
    assert same([read([prompt]) for prompt in PROMPTS], whole(model, torch.float32))
    assert len(visited) == {"sd3": 3, "flux": 2, "flux2": 1, "chroma": 1, "z_image": 1}[model.name]


@pytest.mark.parametrize(("family", "in_turn"), [("sd15", False), ("sdxl", False), ("sd3", True), ("flux", True)])
def test_t5_is_never_whole_in_host_memory(family: str, in_turn: bool) -> None:
    costs = phase_costs(family)
    found, together = captions_on_a_cpu(4, costs)
    assert found == in_turn
    assert together == CAPTIONS_AT_ONCE if not in_turn else together * 4 * costs.caption <= 2 * GIB
    assert together >= 1
