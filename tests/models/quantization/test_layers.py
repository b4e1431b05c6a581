"""Denoisers load layer by layer: bit-identical to the library, and never all unquantized in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_trainer.benchmarks.random_weights import with_random_weights
from lora_trainer.core.errors import UsageError
from lora_trainer.models.families.sd15 import FAMILY
from lora_trainer.models.frozen import load_frozen
from lora_trainer.models.kept import keep_loaded
from lora_trainer.models.places import Place
from lora_trainer.models.quantization import stored_forms
from lora_trainer.models.quantization.layers import fill_layers, fill_the_rest
from lora_trainer.models.quantization.store import is_narrow, make_quantizer, store_layers
from tests.lora_format.tiny import tiny_pipeline

CPU = torch.device("cpu")
NAME = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    tiny_pipeline(folder / "made", "sd15").save_pretrained(folder / "model", safe_serialization=True)
    return folder / "model"


def loaded(part: Path, dtype: torch.dtype = torch.float32, stored: str = "bf16") -> nn.Module:
    return load_frozen(UNet2DConditionModel, part, dtype, CPU, make_quantizer(stored))  # type: ignore[arg-type]


def library(part: Path, dtype: torch.dtype, **how: object) -> dict[str, Tensor]:
    found: nn.Module = UNet2DConditionModel.from_pretrained(part, dtype=dtype, use_safetensors=True, **how)
    return found.state_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_equal_those_of_the_library(model: Path, dtype: torch.dtype) -> None:
    ours = loaded(model / "unet", dtype)
    assert_same(ours.state_dict(), library(model / "unet", dtype))
    assert not ours.training
    assert not any(each.requires_grad or each.is_meta for each in ours.parameters())


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_several_files_and_flavors(model: Path, tmp_path: Path, variant: str | None) -> None:
    whole: nn.Module = UNet2DConditionModel.from_pretrained(model / "unet")
    whole.save_pretrained(tmp_path / "unet", max_shard_size="1MB", variant=variant)  # type: ignore[operator]
    assert len(list((tmp_path / "unet").glob("*-of-*.safetensors"))) > 1
    assert_same(loaded(tmp_path / "unet").state_dict(), whole.state_dict())
    for each in sorted((tmp_path / "unet").glob("*.safetensors"))[:1]:
        tensors = load_file(each)
        del tensors[min(tensors)]
        save_file(tensors, each)
    with pytest.raises(UsageError, match="which its index names"):
        loaded(tmp_path / "unet")
    for index in (tmp_path / "unet").glob("*.json"):
        if "index" in index.name:
            index.unlink()
    with pytest.raises(UsageError, match=r"index.*is missing"):
        loaded(tmp_path / "unet")


def test_missing_weights_or_other_shapes_are_refused(model: Path, tmp_path: Path) -> None:
    part = shutil.copytree(model / "unet", tmp_path / "unet")
    tensors = load_file(part / NAME)
    save_file({**tensors, "conv_in.bias": torch.zeros(3)}, part / NAME)
    with pytest.raises(UsageError, match=r"conv_in\.bias has shape \[3\] in place of \[32\]"):
        loaded(part)
    del tensors["conv_in.bias"]
    save_file(tensors, part / NAME)
    with pytest.raises(UsageError, match=r"lacks 1 of its weights \(first: conv_in\.bias\)"):
        loaded(part)


def test_weights_that_are_not_floating_point_are_refused(model: Path, tmp_path: Path) -> None:
    """From the header, before the model is used. What the header does not show is found when it is read."""
    copy = shutil.copytree(model, tmp_path / "model")
    tensors = load_file(copy / "unet" / NAME)
    for dtype in (torch.int8, torch.bool, torch.complex64):
        save_file({**tensors, "conv_in.weight": tensors["conv_in.weight"].to(dtype)}, copy / "unet" / NAME)
        for act in (lambda: FAMILY.describe(copy), lambda: loaded(copy / "unet")):
            with pytest.raises(UsageError, match=r"'conv_in\.weight' is stored as (I8|BOOL|C64)") as caught:
                act()
            assert "float16" in caught.value.problems[0].fix
    with torch.device("meta"):
        embeddings = nn.ParameterDict({"own": nn.Parameter(torch.empty(3))})
    save_file({"own": torch.ones(3, dtype=torch.int8)}, tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=r"own is stored as torch\.int8 in place of floating point"):
        fill_layers(embeddings, {"own": Place(tmp_path / "own.safetensors", "own")}, torch.float32, CPU, None)


@pytest.mark.parametrize("stored", ["fp8", "int8"])
def test_quantized_loading_equals_loading_and_quantizing(model: Path, stored: str) -> None:
    at_once, after = loaded(model / "unet", torch.bfloat16, stored), loaded(model / "unet", torch.bfloat16)
    narrow = make_quantizer(stored)  # type: ignore[arg-type]
    assert narrow is not None
    store_layers(after, narrow)
    assert any(map(is_narrow, after.modules()))
    assert_same(dict(at_once.named_parameters()), dict(after.named_parameters()))
    assert_same(dict(at_once.named_buffers()), dict(after.named_buffers()))


def test_a_kept_base_model_is_not_quantized(model: Path) -> None:
    family = keep_loaded({"sd15": FAMILY})["sd15"]
    before = {name: tensor.clone() for name, tensor in loaded(model / "unet").state_dict().items()}
    narrow = family.denoiser.load(model, torch.float32, CPU, make_quantizer("int8"))
    assert any(map(is_narrow, narrow.modules()))
    assert_same(family.denoiser.load(model, torch.float32, CPU).state_dict(), before)


def test_layers_in_host_memory_are_quantized_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the GPU and back. A layer that is already there does not move."""
    went: list[object] = []
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(nn.Linear, "to", lambda layer, device: went.append((device, layer.weight.dtype)))
    narrow = make_quantizer("int8", by=gpu)
    assert narrow is not None
    narrow(nn.Linear(32, 32).requires_grad_(False))
    assert went == [(gpu, torch.float32), (CPU, torch.int8)]
    narrow(nn.Linear(32, 32, device="meta").requires_grad_(False))
    assert len(went) == 2


def test_random_layers_are_quantized_when_created() -> None:
    wide: list[int] = []
    narrow = make_quantizer("int8")
    assert narrow is not None
    layers: list[nn.Module] = []

    def narrow_and_look(module: nn.Module) -> None:
        narrow(module)
        wide.append(sum(not each.is_meta and each.is_floating_point() for part in layers for each in part.parameters()))

    def make() -> nn.Module:
        layers.extend(nn.Linear(64, 64, bias=False) for _ in range(4))
        return nn.Sequential(*layers)

    model = with_random_weights(make, torch.bfloat16, CPU, narrow_and_look)
    assert all(map(is_narrow, layers))
    assert max(wide) == 0
    assert not any(each.requires_grad for each in model.parameters())


class Toy(nn.Module):
    """Layers of 8 MB in fp32, and buffers that only its code creates."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1448, 1448, bias=False) for _ in range(count))
        self.register_buffer("places", torch.arange(6.0).reshape(2, 3), persistent=False)


def test_memory_holds_the_quantized_model_and_a_few_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megabyte, count = 1 << 20, 40
    path = tmp_path / "toy.safetensors"
    save_file({f"layers.{index}.weight": torch.ones(1448, 1448) for index in range(count)}, path)
    monkeypatch.setattr(stored_forms, "READ_AT_ONCE", 16 * megabyte)
    with torch.device("meta"):
        toy = Toy(count)
    process, seen = psutil.Process(), list[int]()
    narrow = make_quantizer("int8")
    assert narrow is not None
    before = process.memory_info().rss

    def narrow_and_look(module: nn.Module) -> None:
        narrow(module)
        seen.append(process.memory_info().rss - before)

    fill_layers(toy, {name: Place(path, name) for name in toy.state_dict()}, torch.bfloat16, CPU, narrow_and_look)
    narrow_size = sum(each.nbytes for each in (*toy.parameters(), *toy.buffers()) if not each.is_meta)
    assert 80 * megabyte < narrow_size < 84 * megabyte
    # The last read, one layer, and malloc fragmentation; unquantized the model has 160 MB, its file 320.
    assert max(seen) < narrow_size + 90 * megabyte
    fill_the_rest(toy, lambda: Toy(count), CPU)
    assert toy.get_buffer("places").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("stored", ["bf16", "int8"])
def test_a_file_is_mapped_once_however_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    """Whether weights stay in it, or only biases, which are not quantized."""
    path = tmp_path / "toy.safetensors"
    with torch.device("meta"):
        toy = nn.Sequential(*(nn.Linear(1448, 1448) for _ in range(40)))
    save_file({name: torch.ones(each.shape, dtype=torch.bfloat16) for name, each in toy.state_dict().items()}, path)
    monkeypatch.setattr(stored_forms, "READ_AT_ONCE", 16 << 20)
    process = psutil.Process()
    before = process.memory_info().vms
    fill_layers(
        toy, {name: Place(path, name) for name in toy.state_dict()}, torch.bfloat16, CPU, make_quantizer(stored)
    )  # type: ignore[arg-type]
    stored_bytes = sum(each.nbytes for each in (*toy.parameters(), *toy.buffers())) if stored != "bf16" else 0
    assert process.memory_info().vms - before < stored_bytes + 1.5 * path.stat().st_size
    assert float(toy[39].bias.sum()) == 1448


# Relative error of a prediction against fp32, over noise levels: some room above what a tiny model shows.
BOUNDS = {"bf16": 0.02, "fp8": 0.1, "int8": 0.03, "int8 products": 0.05, "nf4": 0.25}


@pytest.mark.parametrize("stored", BOUNDS)
def test_predictions_stay_near_those_of_fp32(model: Path, stored: str) -> None:
    def predicted(dtype: torch.dtype, stored: str) -> Tensor:
        name, products = stored.partition(" ")[::2]
        narrow = make_quantizer(name, products=bool(products))  # type: ignore[arg-type]
        denoiser = load_frozen(UNet2DConditionModel, model / "unet", dtype, CPU, narrow)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, 4, 16, 16, generator=generator).to(dtype)
        embeds = torch.randn(4, 77, int(denoiser.config.cross_attention_dim), generator=generator).to(dtype)
        with torch.no_grad():
            return FAMILY.denoiser.predict(
                denoiser, x, torch.tensor([20, 300, 600, 980]), {"embeds": embeds}, x
            ).float()

    exact, found = predicted(torch.float32, "bf16"), predicted(torch.bfloat16, stored)
    assert 0 < float((found - exact).norm() / exact.norm()) < BOUNDS[stored]
