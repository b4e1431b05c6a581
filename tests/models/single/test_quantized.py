"""Base models in quantized files: what is loaded equals the reference arithmetic, bit for bit."""

from __future__ import annotations

import json
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.core.gguf_file import BLOCKS, PACKED_TYPES, read_gguf_header
from lora_trainer.lora_format.metadata import header
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import weights_digest
from lora_trainer.models.quantization.store import is_narrow, make_quantizer
from lora_trainer.models.quantization.stored_forms import dequantized, hadamard, read_blocks
from lora_trainer.models.single import tokenizers
from lora_trainer.models.single.recognize import recognize
from lora_trainer.run.bases.find import find_base
from lora_trainer.run.bases.hub_header import make_placeholder
from tests.lora_format.tiny import facts
from tests.models.single.originals import (
    Tensors,
    anima_checkpoint,
    chroma_checkpoint,
    flow_checkpoint,
    flux2_checkpoint,
    krea2_checkpoint,
    qwen_image21_checkpoint,
    qwen_image_checkpoint,
    unet_original,
    write,
    z_image_original,
)
from tests.models.single.quantized import (
    as_bytes,
    comfy,
    dequantized_by_ggml,
    gguf_of,
    random_blocks,
    turning,
    write_gguf,
)
from tests.models.single.tiny import (
    tiny_anima,
    tiny_chroma,
    tiny_flow_pipeline,
    tiny_flux2,
    tiny_krea2,
    tiny_pipeline,
    tiny_qwen_image,
    tiny_qwen_image21,
    tiny_z_image,
)

CPU = torch.device("cpu")
GGUF_PACKAGE = "pip install 'lora-trainer[gguf]'"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX.1 folder that lends its text encoders and its VAE."""
    folder = tmp_path_factory.mktemp("parts")
    tiny_flow_pipeline(folder / "words", "flux-dev").save_pretrained(folder / "folder")
    return folder


@pytest.fixture(scope="module")
def plain(place: Path) -> Tensors:
    """The transformer's tensors by the names of FLUX.1's own code."""
    return flow_checkpoint(tiny_flow_pipeline(place / "words", "flux-dev"), bare=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizers, "CLIP", place / "words")


def folder_of(file: Path, place: Path) -> Path:
    named = {"path": file, "text_encoders": place / "folder", "vae": place / "folder"}
    return find_base(ModelSection.model_validate({key: str(value) for key, value in named.items()})).folder


def loaded(file: Path, place: Path, dtype: torch.dtype = torch.bfloat16, stored: Any = "bf16") -> nn.Module:
    return FAMILIES["flux"].denoiser.load(folder_of(file, place), dtype, CPU, make_quantizer(stored))


def same(one: nn.Module, two: nn.Module) -> None:
    first, second = one.state_dict(), two.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype
        assert torch.equal(first[name], second[name]), name


def test_the_form_is_named_before_and_recorded_after(place: Path, plain: Tensors, tmp_path: Path) -> None:
    file = write(comfy(plain)[0], tmp_path / "scaled.safetensors")
    named = {"path": file, "text_encoders": place / "folder", "vae": place / "folder"}
    base = find_base(ModelSection.model_validate({key: str(value) for key, value in named.items()}))
    assert (
        base.note
        == "scaled.safetensors is stored as fp8 e4m3 with scales: it is dequantized layer by layer while it loads."
    )
    written = header(facts(base_form=base.form), LoraWeights({}))
    assert written["lora_trainer.base_model_form"] == "fp8 e4m3 with scales"
    assert "lora_trainer.base_model_form" not in header(facts(), LoraWeights({}))


SCALED = {
    "first form": {"first": True},
    "one scale": {},
    "a scale for each row": {"by_row": True},
    "e5m2": {"form": "float8_e5m2"},
    "int8": {"form": "int8_tensorwise", "by_row": True},
    "int8 rotated": {"form": "int8_tensorwise", "rotated": 64},
}


@pytest.mark.exact
@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_checkpoint_is_the_model_that_it_stands_for(
    kind: str, place: Path, plain: Tensors, tmp_path: Path
) -> None:
    tensors, meant = comfy(plain, **SCALED[kind])
    file = write(tensors, tmp_path / "scaled.safetensors")
    same(loaded(file, place), loaded(write(meant, tmp_path / "meant.safetensors"), place))
    assert "with scales" in recognize(file).form
    assert recognize(file).form.startswith("int8" if "int8" in kind else "fp8 e5m2" if kind == "e5m2" else "fp8 e4m3")


@given(st.integers(0, 255), st.floats(2**-20, 1e4, width=32), st.sampled_from(["F8_E4M3", "F8_E5M2", "I8"]))
@settings(max_examples=200, deadline=None, database=None)
def test_every_number_is_the_stored_one_times_its_scale(bits: int, scale: float, form: str) -> None:
    """By hand, from the fields of sign, exponent and fraction; rounded to fp32 once."""
    fraction = {"F8_E4M3": 3, "F8_E5M2": 2, "I8": 7}[form]
    if form == "I8":
        number = float(bits - 256 if bits > 127 else bits)
    else:
        bias, exponent = 2 ** (6 - fraction) - 1, (bits & 127) >> fraction
        rest = (bits & (2**fraction - 1)) / 2**fraction
        number = (1 + rest) * 2.0 ** (exponent - bias) if exponent else rest * 2.0 ** (1 - bias)
        number *= -1 if bits & 128 else 1
        if (form == "F8_E4M3" and bits & 127 == 127) or (form == "F8_E5M2" and exponent == 31):
            return  # infinite, or no number
    found = dequantized(torch.tensor([[bits]], dtype=torch.uint8), torch.tensor([scale]), form)
    assert float(found) == float(torch.tensor(number * scale, dtype=torch.float64).float())


def test_rotations_are_turned_back() -> None:
    for side in (4, 16, 64, 256):
        assert torch.equal(hadamard(side), turning(side))
        assert torch.equal(hadamard(side) @ hadamard(side), torch.eye(side))
    weight, scale = torch.randint(-127, 128, (6, 512), dtype=torch.int8), torch.rand(6)
    rotated = (weight.double() * scale.double()[:, None]).view(6, 2, 256) @ turning(256).double()
    assert torch.allclose(dequantized(weight, scale, "I8", 256).double(), rotated.view(6, 512), rtol=1e-5, atol=1e-3)


def test_the_same_form_is_kept_and_computes_as_comfyui(place: Path, plain: Tensors, tmp_path: Path) -> None:
    """Its bits stay; the scale is rounded to the compute precision, in which ComfyUI multiplies by it."""
    for form, stored in (("float8_e4m3fn", "fp8"), ("int8_tensorwise", "int8")):
        for by_row in (False, True):
            tensors, _ = comfy(plain, form, by_row=by_row)
            model = loaded(write(tensors, tmp_path / f"{stored}.safetensors"), place, stored=stored)
            layer = model.get_submodule("single_transformer_blocks.0.proj_out")
            assert isinstance(layer, nn.Linear)
            assert is_narrow(layer)
            own = tensors["single_blocks.0.linear2.weight"]
            assert torch.equal(layer.weight.view(own.dtype).view(torch.uint8), own.view(torch.uint8))
            scale = tensors["single_blocks.0.linear2.weight_scale"]
            wide = own.to(torch.bfloat16) * scale.to(torch.bfloat16)
            x = torch.randn(2, own.shape[1]).to(torch.bfloat16)
            assert torch.equal(layer(x), nn.functional.linear(x, wide, layer.bias))
            fused = model.get_submodule("transformer_blocks.0.attn.to_k")
            rows = tensors["double_blocks.0.img_attn.qkv.weight"].chunk(3)[1]
            assert torch.equal(fused.weight.view(own.dtype).view(torch.uint8), rows.view(torch.uint8))


def test_another_form_is_quantized_again(place: Path, plain: Tensors, tmp_path: Path) -> None:
    """e5m2 as e4m3, and rotated int8 as int8: as the weights that the file stands for would be."""
    for more, stored in (({"form": "float8_e5m2"}, "fp8"), ({"form": "int8_tensorwise", "rotated": 64}, "int8")):
        tensors, meant = comfy(plain, **more)
        file = write(tensors, tmp_path / "scaled.safetensors")
        other = write(meant, tmp_path / "meant.safetensors")
        same(loaded(file, place, stored=stored), loaded(other, place, stored=stored))


BAD: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "shape": ({"img_in.weight_scale": torch.ones(3)}, r"img_in has a scale of F32 \[3\] for a weight of \[128, 64\]"),
    "no scale": ({"img_in.weight_scale": None}, "img_in is said to be F8_E4M3 and lacks its scale"),
    "no weight": ({"img_in.weight": None}, "img_in has a scale and no weight"),
    "whole scale": ({"img_in.weight_scale": torch.ones(1, dtype=torch.int32)}, r"a scale of I32 \[1\]"),
    "format": ({"img_in.comfy_quant": as_bytes({"format": "nvfp4"})}, "ComfyUI's format 'nvfp4'; these are read: float8_e4m3fn"),
    "no format": ({"img_in.comfy_quant": as_bytes({})}, "ComfyUI's format 'None'"),
    "no JSON": ({"img_in.comfy_quant": torch.zeros(9, dtype=torch.uint8)}, "img_in.comfy_quant is no JSON"),
    "deep JSON": ({"img_in.comfy_quant": torch.full((5000,), ord("["), dtype=torch.uint8)}, "is no JSON"),
    "another type": ({"img_in.comfy_quant": as_bytes({"format": "int8_tensorwise"})}, "int8_tensorwise and is stored as F8_E4M3"),
    "two scales": ({"img_in.weight_scale_2": torch.ones(1)}, "img_in.weight_scale_2 is a second scale"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_scaled_files_that_cannot_be_read_say_why(kind: str, place: Path, plain: Tensors, tmp_path: Path) -> None:
    changes, message = BAD[kind]
    tensors, _ = comfy(plain)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    with pytest.raises(UsageError, match=message) as caught:
        folder_of(write(tensors, tmp_path / "bad.safetensors"), place)
    assert len(caught.value.problems) == 1


def test_a_scale_that_is_no_number_is_named(place: Path, plain: Tensors, tmp_path: Path) -> None:
    tensors, _ = comfy(plain)
    tensors["txt_in.weight_scale"] = torch.tensor(float("nan"))
    file = write(tensors, tmp_path / "nan.safetensors")
    for stored in ("bf16", "fp8"):
        with pytest.raises(UsageError, match=r"txt_in\.weight_scale holds numbers that are not finite"):
            loaded(file, place, stored=stored)


def test_formats_may_be_in_the_metadata_or_left_out(place: Path, plain: Tensors, tmp_path: Path) -> None:
    """Without a prefix, as some tools write it; fp8 shows by its type what it is."""
    tensors, meant = comfy(plain)
    bare = {f"model.diffusion_model.{name}": each for name, each in tensors.items() if "comfy_quant" not in name}
    expected = loaded(write(meant, tmp_path / "meant.safetensors"), place)
    layers = {name.removesuffix(".weight_scale"): {"format": "float8_e4m3fn"} for name in tensors if "_scale" in name}
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
    for more in (metadata, None):
        same(loaded(write(bare, tmp_path / "bare.safetensors", more), place), expected)
    whole, _ = comfy(plain, "int8_tensorwise")
    unsaid = {name: each for name, each in whole.items() if "comfy_quant" not in name}
    with pytest.raises(UsageError, match=r"stored as I8 with a scale, and no \.comfy_quant says how"):
        recognize(write(unsaid, tmp_path / "unsaid.safetensors"))


def test_the_weights_digest_depends_on_the_scales(place: Path, plain: Tensors, tmp_path: Path) -> None:
    tensors, _ = comfy(plain)
    one = weights_digest(folder_of(write(tensors, tmp_path / "one.safetensors"), place) / "transformer")
    again = weights_digest(folder_of(write(tensors, tmp_path / "again.safetensors"), place) / "transformer")
    tensors["img_in.weight_scale"] = tensors["img_in.weight_scale"] * 2
    other = weights_digest(folder_of(write(tensors, tmp_path / "other.safetensors"), place) / "transformer")
    assert one == again != other


@pytest.mark.exact
@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_gguf_blocks_are_those_of_ggml(kind: str, tmp_path: Path) -> None:
    """By its own package, in rows that are read by themselves; and by diffusers' functions, which are another's."""
    pytest.importorskip("gguf", reason=GGUF_PACKAGE)
    from diffusers.quantizers.gguf import utils

    numbers, size = BLOCKS[kind]
    shape = (7, 2 * numbers)
    data = random_blocks(kind, 14)
    file = write_gguf(tmp_path / "one.gguf", {"first": ("F32", [3], bytes(12)), "x.weight": (kind, shape, data)})
    entry = read_gguf_header(file)["x.weight"]
    expected = dequantized_by_ggml(data, kind, shape)
    assert entry["dtype"] == kind
    assert tuple(entry["shape"]) == shape
    assert torch.equal(read_blocks(file, entry, (), torch.float32), expected)
    swapped = read_blocks(file, entry, ((3, 6), (0, 2)), torch.float32)
    assert torch.equal(swapped, torch.cat([expected[3:6], expected[0:2]]))
    assert torch.equal(read_blocks(file, entry, (), torch.bfloat16), expected.bfloat16())
    theirs = utils.dequantize_functions[getattr(utils.gguf.GGMLQuantizationType, kind)]
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, size)
    assert torch.equal(theirs(blocks, numbers, size, torch.float32).reshape(shape), expected)


@given(st.lists(st.floats(-100, 100, width=32), min_size=32, max_size=32))
@settings(max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_q8_0_is_a_half_times_whole_numbers(tmp_path: Path, values: list[float]) -> None:
    pytest.importorskip("gguf", reason=GGUF_PACKAGE)
    whole = [round(value) for value in values]
    scale = struct.unpack("<e", struct.pack("<e", 0.1))[0]
    data = struct.pack("<e32b", scale, *whole)
    file = write_gguf(tmp_path / "one.gguf", {"x": ("Q8_0", [1, 32], data)})
    found = read_blocks(file, read_gguf_header(file)["x"], (), torch.float32)
    assert found.flatten().tolist() == [float(torch.tensor(scale * each).float()) for each in whole]


def test_gguf_rows_that_share_a_block_are_read_whole(tmp_path: Path) -> None:
    """As of tensors that were reshaped so that blocks divide their rows."""
    pytest.importorskip("gguf", reason=GGUF_PACKAGE)
    data = random_blocks("Q4_0", 24)
    shape = [16, 3, 4, 4]
    file = write_gguf(tmp_path / "one.gguf", {"x": ("Q4_0", [3, 256], data)}, "sd1", {"x": shape})
    entry = read_gguf_header(file)["x"]
    expected = dequantized_by_ggml(data, "Q4_0", shape)
    assert torch.equal(read_blocks(file, entry, (), torch.float32), expected)
    assert torch.equal(read_blocks(file, entry, ((5, 9),), torch.float32), expected[5:9])


@pytest.mark.exact
@pytest.mark.parametrize("kind", ["flux Q8_0", "flux Q4_K", "sdxl Q5_0", "z_image Q4_1"])
def test_a_gguf_checkpoint_is_the_model_that_it_stands_for(
    kind: str, place: Path, plain: Tensors, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason=GGUF_PACKAGE)
    family, form = kind.split()
    if family == "sdxl":
        pipeline = tiny_pipeline(tmp_path / "words", "sdxl")
        tensors, architecture = unet_original(pipeline.unet), "sdxl"
    elif family == "z_image":
        pipeline = tiny_z_image(tmp_path / "words")
        tensors, architecture = z_image_original(pipeline.transformer), "lumina2"
    else:
        pipeline, tensors, architecture = None, plain, "flux"
    lent = place
    if pipeline is not None:
        lent = tmp_path / "lent"
        pipeline.save_pretrained(lent / "folder")
    file, meant = gguf_of(tensors, form, tmp_path / "turbo.gguf", architecture)
    other = write(meant, tmp_path / "turbo.safetensors")
    load = FAMILIES[family].denoiser.load
    for stored in ("bf16", "int8"):
        narrow = make_quantizer(stored)  # type: ignore[arg-type]
        one, two = (load(folder_of(each, lent), torch.bfloat16, CPU, narrow) for each in (file, other))
        same(one, two)
    assert recognize(file).form.startswith("GGUF")
    assert form in recognize(file).form
    assert recognize(file).family == family


# Each with the architecture that ComfyUI-GGUF's converter writes into its files; it has none for Krea 2.
LATER = {"flux2": "flux", "chroma": "flux", "qwen_image": "qwen_image", "krea2": "krea2", "anima": "cosmos"}
LATER["qwen_image21"] = "qwen_image"


def later_family(family: str, folder: Path) -> tuple[Any, Tensors]:
    """A tiny pipeline, and its transformer's tensors by the names of its first code."""
    if family == "flux2":
        pipeline = tiny_flux2(folder)
        return pipeline, flux2_checkpoint(pipeline, bare=True)
    if family == "chroma":
        pipeline = tiny_chroma(folder)
        return pipeline, chroma_checkpoint(pipeline, bare=True)
    make, checkpoint = {
        "qwen_image": (tiny_qwen_image, qwen_image_checkpoint),
        "qwen_image21": (tiny_qwen_image21, qwen_image21_checkpoint),
        "krea2": (tiny_krea2, krea2_checkpoint),
        "anima": (tiny_anima, anima_checkpoint),
    }[family]
    pipeline = make()
    return pipeline, checkpoint(pipeline, bare=True)


@pytest.mark.parametrize("family", LATER)
def test_later_families_are_read_from_fp8_and_gguf_and_predict_within_the_rounding(family: str, tmp_path: Path) -> None:
    """Each file is loaded as the weights that it stands for; against the model before it was rounded, predictions differ little."""
    pytest.importorskip("gguf", reason=GGUF_PACKAGE)
    pipeline, tensors = later_family(family, tmp_path / "words")
    pipeline.save_pretrained(tmp_path / "folder")
    denoiser = FAMILIES[family].denoiser
    facts_of = FAMILIES[family].describe(tmp_path / "folder")
    cond = FAMILIES[family].load_encoders(tmp_path / "folder", torch.float32, CPU).encode_text(["a red ring"])
    noisy = torch.randn(1, facts_of.latent_channels, 8, 8, generator=torch.Generator().manual_seed(0))

    def predict(base: Path) -> tuple[dict[str, Tensor], Tensor]:
        model = denoiser.load(base, torch.float32, CPU)
        with torch.no_grad():
            return model.state_dict(), denoiser.predict(model, noisy, torch.tensor([500]), cond, torch.zeros(1, 6))

    whole = predict(tmp_path / "folder")[1]
    bare = {name.removeprefix("net."): each for name, each in tensors.items()}  # as the converter of GGUF files does
    for form, most in (("fp8", 0.06), ("GGUF Q8_0", 0.01)):
        if form.startswith("GGUF"):
            file, meant = gguf_of(bare, "Q8_0", tmp_path / "base.gguf", LATER[family])
        else:
            scaled, meant = comfy(tensors)
            file = write(scaled, tmp_path / "scaled.safetensors")
        assert (recognize(file).family, recognize(file).form.startswith(form)) == (family, True)
        weights, found = predict(folder_of(file, tmp_path))
        expected = predict(folder_of(write(meant, tmp_path / "base.safetensors"), tmp_path))[0]
        assert weights.keys() == expected.keys()
        assert all(torch.equal(each, expected[name]) for name, each in weights.items())
        error = float((found - whole).norm() / whole.norm())
        assert 0 < error < most, form


def test_a_gguf_file_without_its_package_is_recognized(tmp_path: Path, plain: Tensors) -> None:
    """And plain types need none."""
    parts = {name: ("BF16", list(each.shape), bytes(2 * each.numel())) for name, each in plain.items()}
    found = recognize(write_gguf(tmp_path / "flux.gguf", parts))
    assert (found.family, found.variant, found.form) == ("flux", "dev", "GGUF BF16")


def test_the_package_is_asked_for_before_anything_is_loaded(
    place: Path, plain: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by commands that read no weights."""
    parts = {
        name: ("Q8_0", list(each.shape), bytes(each.numel() // 32 * 34))
        if each.ndim > 1
        else ("F32", list(each.shape), bytes(4 * each.numel()))
        for name, each in plain.items()
    }
    file = write_gguf(tmp_path / "flux.gguf", parts)
    monkeypatch.setitem(sys.modules, "gguf", None)
    named = {"path": file, "text_encoders": place / "folder", "vae": place / "folder"}
    model = ModelSection.model_validate({key: str(value) for key, value in named.items()})
    assert "GGUF Q8_0, F32" in find_base(model, weights=False).note
    with pytest.raises(UsageError, match=r"holds Q8_0, .* not installed.*pip install 'lora-trainer\[gguf\]'"):
        find_base(model)


def test_a_hub_s_header_has_the_formats_of_its_layers(plain: Tensors, tmp_path: Path) -> None:
    """They lie together in a file that safetensors wrote, so that few ranges are read."""
    tensors, _ = comfy(plain, "int8_tensorwise", rotated=64)
    file = write(tensors, tmp_path / "scaled.safetensors")
    data, ranges = file.read_bytes(), list[tuple[int, int]]()

    def read(begin: int, end: int) -> bytes:
        ranges.append((begin, end))
        return data[begin:end]

    folder = make_placeholder(file.name, len(data), read)
    assert recognize(folder / file.name).form == recognize(file).form == "int8 rotated with scales"
    assert len(ranges) == 3


def bad_gguf(change: str) -> bytes:
    head = lambda tensors, entries, version=3: b"GGUF" + struct.pack("<IQQ", version, tensors, entries)  # noqa: E731
    name = struct.pack("<Q", 1) + b"x"
    tensor = name + struct.pack("<IQIQ", 1, 32, 8, 0)
    fill = bytes(400)
    return {
        "version": head(1, 0, 1) + tensor + fill,
        "tensors": head(2**62, 0) + fill,
        "entries": head(0, 2**62) + fill,
        "a long name": head(1, 0) + struct.pack("<Q", 2**60) + fill,
        "a long array": head(0, 1) + name + struct.pack("<IIQ", 9, 8, 2**61) + fill,
        "a long array of numbers": head(0, 1) + name + struct.pack("<IIQ", 9, 10, 2**58) + fill,
        "arrays in arrays": head(0, 1) + name + struct.pack("<IIQ", 9, 9, 1) * 1 + struct.pack("<IQ", 9, 1) * 2000 + fill,
        "a type of metadata": head(0, 1) + name + struct.pack("<I", 77) + fill,
        "quantization type 99": head(1, 0) + name + struct.pack("<IQIQ", 1, 32, 99, 0) + fill,
        "numbers in a row": head(1, 0) + name + struct.pack("<IQIQ", 1, 33, 8, 0) + fill,
        "sides": head(1, 0) + name + struct.pack("<I", 9) + fill,
        "is there twice": head(2, 0) + tensor + name + struct.pack("<IQIQ", 1, 32, 8, 64) + fill,
        "overlap": head(2, 0) + tensor + struct.pack("<Q", 1) + b"y" + struct.pack("<IQIQ", 1, 32, 8, 32) + fill,
        "unaligned": head(1, 0) + name + struct.pack("<IQIQ", 1, 32, 8, 5) + fill,
        "is cut off": head(1, 0) + name + struct.pack("<IQQIQ", 2, 32, 2**30, 8, 0) + fill,
        "ends inside": (head(1, 0) + tensor)[:-3],
        "alignment": head(0, 1) + text_entry("general.alignment", 3) + fill,
    }[change]  # fmt: skip


def text_entry(name: str, value: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<II", 4, value)


@pytest.mark.parametrize(
    "change",
    """version tensors|entries|a long name|a long array|a long array of numbers|arrays in arrays|a type of metadata|sides
    |quantization type 99|numbers in a row|is there twice|overlap|unaligned|is cut off|ends inside|alignment""".replace(
        "version tensors", "version|tensors"
    ).split("|"),
    ids=str.strip,
)
def test_hostile_gguf_headers_are_one_message(change: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(bad_gguf(change.strip()))
    with pytest.raises(UsageError) as caught:
        recognize(path)
    (problem,) = caught.value.problems
    assert str(path) in problem.message
    assert problem.fix
    if change in ("quantization type 99", "is there twice", "is cut off", "numbers in a row"):
        assert change in problem.message


@given(st.data())
@settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_a_gguf_header_is_a_message_or_a_model(tmp_path: Path, data: st.DataObject) -> None:
    tensors = {f"double_blocks.0.{name}.weight": ("F16", [4, 8], bytes(64)) for name in ("img_attn.qkv", "b", "c")}
    whole = write_gguf(tmp_path / "whole.gguf", tensors, originals={"double_blocks.0.b.weight": [8, 4]}).read_bytes()
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4)):
        if place < len(damaged):
            damaged[place] = value
    (tmp_path / "damaged.gguf").write_bytes(damaged)
    with suppress(UsageError):
        recognize(tmp_path / "damaged.gguf")
