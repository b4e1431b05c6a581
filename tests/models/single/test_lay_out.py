"""A checkpoint in the original layout equals its folder: each tensor and prediction, by each reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import single_file_utils as diffusers_own
from safetensors.torch import load_file
from torch import Tensor
from transformers import CLIPTokenizer

from lora_trainer.core.errors import UsageError
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.flux import denoiser_part
from lora_trainer.models.places import laid_out_models
from lora_trainer.models.single import tokenizers
from lora_trainer.models.single.lay_out import lacking_parts, lay_out
from lora_trainer.models.single.recognize import recognize
from lora_trainer.models.single.stored import Stored
from lora_trainer.models.single.texts import BIAS
from tests.models.single.originals import flow_checkpoint, flux_original, unet_checkpoint, write
from tests.models.single.quantized import as_bytes
from tests.models.single.tiny import FLOWS, tiny_flow_pipeline, tiny_pipeline

CPU = torch.device("cpu")
VARIANTS = {
    "sd15": ("sd15", "epsilon", {}),
    "sd2": ("sd2", "epsilon", {}),
    "sd2-768-v": ("sd2", "v_prediction", {}),
    "sdxl": ("sdxl", "epsilon", {}),
    "sdxl-v": ("sdxl", "v_prediction", {}),
}


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path, Path]:
    """A family's name, a diffusers folder and a checkpoint with the same weights."""
    family, prediction, _ = VARIANTS[request.param]
    terminal = request.param == "sdxl-v"
    pipeline = tiny_pipeline(tmp_path / "words", family, prediction, zero_terminal=terminal)
    if request.param == "sd2":
        pipeline.unet.register_to_config(sample_size=64, upcast_attention=False)
    pipeline.save_pretrained(tmp_path / "folder")
    tensors = unet_checkpoint(pipeline, family)
    if terminal:
        tensors |= {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}
    metadata = {"modelspec.prediction_type": "v"} if request.param == "sd2-768-v" else None
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    return family, tmp_path / "folder", write(tensors, tmp_path / "model.safetensors", metadata)


def both(load: Any, folder: Path, laid_out: Path) -> tuple[Any, Any]:
    return load(folder, torch.float32, CPU), load(laid_out, torch.float32, CPU)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_checkpoint_equals_its_folder(model: tuple[str, Path, Path]) -> None:
    name, folder, file = model
    assert recognize(file).family == name
    family, laid_out = FAMILIES[name], lay_out(file)
    assert detect_family(laid_out) == name
    theirs, ours = family.describe(folder), family.describe(laid_out)
    assert (ours.resolution, ours.prediction, ours.latent_channels, ours.caption_tokens, ours.pixel_step) == (
        theirs.resolution,
        theirs.prediction,
        theirs.latent_channels,
        theirs.caption_tokens,
        theirs.pixel_step,
    )
    unet, other = both(family.denoiser.load, folder, laid_out)
    same(unet.state_dict(), other.state_dict())
    read, expected = both(family.load_encoders, folder, laid_out)
    captions = ["a red square on a white background", "", "blue (circle)!"]
    cond, same_cond = read.encode_text(captions), expected.encode_text(captions)
    same(cond, same_cond)
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    for a, b in zip(read.encode_image(pixels), expected.encode_image(pixels), strict=True):
        assert torch.equal(a, b)
    noisy, t, sizes = torch.randn(3, 4, 16, 16), torch.tensor([3, 500, 900]), torch.full((3, 6), 128.0)
    with torch.no_grad():
        assert torch.equal(
            family.denoiser.predict(unet, noisy, t, cond, sizes),
            family.denoiser.predict(other, noisy, t, same_cond, sizes),
        )
    first, second = family.denoiser.make_process(folder), family.denoiser.make_process(laid_out)
    assert first.prediction == second.prediction
    assert torch.equal(first.alphas_cumprod, second.alphas_cumprod)


def test_key_mappings_are_those_of_diffusers_converters(model: tuple[str, Path, Path]) -> None:
    name, _, file = model
    laid_out, family = lay_out(file), FAMILIES[name]
    unet = family.denoiser.load(laid_out, torch.float32, CPU)
    same(unet.state_dict(), diffusers_own.convert_ldm_unet_checkpoint(load_file(file), dict(unet.config)))
    vae = family.pipeline.make(laid_out, torch.float32, CPU).vae
    same(vae.state_dict(), diffusers_own.convert_ldm_vae_checkpoint(load_file(file), dict(vae.config)))


@pytest.fixture(params=FLOWS)
def flow(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any, Path]:
    """A family's name, its pipeline and a diffusers folder."""
    pipeline = tiny_flow_pipeline(tmp_path / "words", request.param)
    pipeline.save_pretrained(tmp_path / "folder")
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    return request.param[:4].rstrip("-.").removesuffix(".5"), pipeline, tmp_path / "folder"


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_flow_checkpoint_equals_its_folder(flow: tuple[str, Any, Path], tmp_path: Path, bare: bool) -> None:
    name, pipeline, folder = flow
    last = "tokenizer_2" if name == "flux" else "tokenizer_3"
    parts: dict[str, Path | None] = {last: folder / last}
    if bare:
        encoders = [path.name for path in folder.glob("text_encoder*")]
        parts |= {part: folder / part for part in (*encoders, "vae")}
    file = write(flow_checkpoint(pipeline, bare=bare), tmp_path / "model.safetensors")
    assert recognize(file).family == name
    laid_out, family = lay_out(file, parts), FAMILIES[name]
    theirs, ours = family.describe(folder), family.describe(laid_out)
    assert (ours.resolution, ours.latent_channels, ours.caption_tokens, ours.pixel_step) == (
        theirs.resolution,
        theirs.latent_channels,
        theirs.caption_tokens,
        theirs.pixel_step,
    )
    denoiser, other = both(family.denoiser.load, folder, laid_out)
    same(denoiser.state_dict(), other.state_dict())
    read, expected = both(family.load_encoders, folder, laid_out)
    captions = ["a red ring on a background", ""]
    cond, same_cond = read.encode_text(captions), expected.encode_text(captions)
    same(cond, same_cond)
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    for a, b in zip(read.encode_image(pixels), expected.encode_image(pixels), strict=True):
        assert torch.equal(a, b)
    noisy, t, sizes = torch.randn(2, 16, 8, 8), torch.tensor([3, 900]), torch.full((2, 6), 64.0)
    with torch.no_grad():
        assert torch.equal(
            family.denoiser.predict(denoiser, noisy, t, cond, sizes),
            family.denoiser.predict(other, noisy, t, same_cond, sizes),
        )
    one, two = (
        json.loads((each / "scheduler/scheduler_config.json").read_text("utf-8")) for each in (folder, laid_out)
    )
    assert {key: one[key] for key in two if key in one} == {key: two[key] for key in two if key in one}


def test_key_mappings_of_sd3_are_those_of_diffusers_converter(flow: tuple[str, Any, Path], tmp_path: Path) -> None:
    name, pipeline, _ = flow
    if name == "flux":
        pytest.skip("its converter knows the published width only")
    file = write(flow_checkpoint(pipeline, bare=True), tmp_path / "model.safetensors")
    found = diffusers_own.convert_sd3_transformer_checkpoint_to_diffusers(load_file(file))
    same(dict(pipeline.transformer.state_dict()), found)


def test_rows_of_flux_are_those_of_diffusers_converter(tmp_path: Path) -> None:
    """The row numbers of each layer of the published width, in one column."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
        shapes = {name: tensor.shape for name, tensor in flux_original(model).items()}
    numbered = {name: torch.arange(shape[0], dtype=torch.int32) for name, shape in shapes.items()}
    rows = {name: each[:, None] if len(shapes[name]) == 2 else each for name, each in numbered.items()}
    places = denoiser_part(Stored(write(rows, tmp_path / "rows.safetensors"), "", shapes)).places
    theirs = diffusers_own.convert_flux_transformer_checkpoint_to_diffusers(dict(rows))
    assert places.keys() == theirs.keys() == model.state_dict().keys()
    for name, place in places.items():
        own = [rows[place.key][begin:end] for begin, end in place.rows] or [rows[place.key]]
        assert torch.equal(torch.cat(own), theirs[name]), name


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
def test_weights_of_other_types_are_cast(stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny_pipeline(tmp_path / "words", "sd15")
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    tensors = unet_checkpoint(pipeline, "sd15")
    cast = {name: each.to(stored) if each.is_floating_point() else each for name, each in tensors.items()}
    unet = FAMILIES["sd15"].denoiser.load(lay_out(write(cast, tmp_path / "x.safetensors")), torch.float32, CPU)
    same(unet.state_dict(), {name: each.to(stored).float() for name, each in pipeline.unet.state_dict().items()})


def test_a_checkpoint_is_converted_once_per_version_of_the_file(model: tuple[str, Path, Path]) -> None:
    _, _, file = model
    first = lay_out(file)
    stamp = (first / "model_index.json").stat().st_mtime_ns
    assert lay_out(file) == first
    assert (first / "model_index.json").stat().st_mtime_ns == stamp
    assert sum(each.stat().st_size for each in first.rglob("*") if each.is_file()) < file.stat().st_size / 2
    os.utime(file, (1, 1))
    assert lay_out(file) != first


def test_several_processes_convert_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny_pipeline(tmp_path / "words", "sd15")
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    file = write(unet_checkpoint(pipeline, "sd15"), tmp_path / "model.safetensors")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lay_out, [file] * 8))
    assert len(folders) == 1
    assert [path.name for path in laid_out_models().iterdir()] == [folders.pop().name]


def test_a_missing_weight_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = unet_checkpoint(tiny_pipeline(tmp_path / "words", "sd15"), "sd15")
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    del tensors["model.diffusion_model.middle_block.1.norm.bias"]
    file = write(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=f"unet of {file} lacks 1 .*mid_block.attentions.0.norm.bias"):
        FAMILIES["sd15"].denoiser.load(lay_out(file), torch.float32, CPU)
    tensors["model.diffusion_model.middle_block.9.norm.bias"] = torch.zeros(1)
    with pytest.raises(UsageError, match=r"1 tensors that no known model has: model.diffusion_model.middle_block.9"):
        lay_out(write(tensors, file))


@pytest.mark.slow
@pytest.mark.exact
def test_a_quantized_text_encoder_counts_as_missing_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a form that is not read; float8 with scales, as in SD3.5 files, is read."""
    pipeline = tiny_flow_pipeline(tmp_path / "words", "sd3")
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    pipeline.save_pretrained(tmp_path / "folder")
    tensors = flow_checkpoint(pipeline)
    plain = lay_out(
        write(tensors, tmp_path / "plain.safetensors"), {"tokenizer_3": tmp_path / "folder" / "tokenizer_3"}
    )
    for name in [name for name in tensors if name.startswith("text_encoders.t5xxl.") and tensors[name].ndim == 2]:
        tensors[f"{name.removesuffix('.weight')}.scale_weight"] = torch.tensor(0.5)
        tensors[name] = (tensors[name] * 2).to(torch.float8_e4m3fn)
        tensors[f"{name.removesuffix('.weight')}.comfy_quant"] = as_bytes({"format": "mxfp8"})
    scaled = recognize(write(tensors, tmp_path / "scaled.safetensors"))
    assert lacking_parts(scaled) == {"text_encoder_3", "tokenizer_3"}
    with pytest.raises(UsageError, match=r"holds text_encoder_3 quantized \(.*format 'mxfp8'.*model.without_t5"):
        lay_out(scaled, {"tokenizer_3": tmp_path / "folder" / "tokenizer_3"})
    replaced = {part: tmp_path / "folder" / part for part in ("text_encoder_3", "tokenizer_3")}
    read, expected = both(FAMILIES["sd3"].load_encoders, plain, lay_out(scaled, replaced))
    same(read.encode_text(["a ring"]), expected.encode_text(["a ring"]))
    known = {name: each for name, each in tensors.items() if not name.endswith(".comfy_quant")}
    meant = {
        name: each.float() * 0.5 if name.startswith("text_encoders.t5xxl.") and each.ndim == 2 else each
        for name, each in known.items()
        if not name.endswith(".scale_weight")
    }
    files = (write(each, tmp_path / f"{number}.safetensors") for number, each in enumerate((known, meant)))
    words = {"tokenizer_3": tmp_path / "folder" / "tokenizer_3"}
    read, expected = both(FAMILIES["sd3"].load_encoders, *(lay_out(file, words) for file in files))
    same(read.encode_text(["a ring"]), expected.encode_text(["a ring"]))


def test_flux_checkpoints_of_comfyui_have_other_norm_names(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
        shapes = {
            name.replace("_norm.scale", "_norm.weight"): each.shape for name, each in flux_original(model).items()
        }
    assert any(name.endswith("key_norm.weight") for name in shapes)
    places = denoiser_part(Stored(tmp_path / "model.safetensors", "", shapes)).places
    assert places.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    "left_out", ["middle_block.1.", "input_blocks.5.1.transformer_blocks.1.", "output_blocks.1.1.transformer_blocks.1."]
)
def test_a_unet_with_missing_blocks_is_refused(left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SSD-1B and Vega are such."""
    tensors = unet_checkpoint(tiny_pipeline(tmp_path / "words", "sdxl"), "sdxl")
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    fewer = {name: each for name, each in tensors.items() if not name.startswith(f"model.diffusion_model.{left_out}")}
    assert len(fewer) < len(tensors)
    with pytest.raises(UsageError, match="removed blocks"):
        lay_out(write(fewer, tmp_path / "model.safetensors"))


@pytest.mark.exact
def test_sd3_reads_no_projection_of_its_first_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in diffusers' converter, which always puts ones on the diagonal."""
    pipeline = tiny_flow_pipeline(tmp_path / "words", "sd3")
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    pipeline.save_pretrained(tmp_path / "folder")
    tensors, parts = flow_checkpoint(pipeline), {"tokenizer_3": tmp_path / "folder" / "tokenizer_3"}
    plain = lay_out(write(tensors, tmp_path / "plain.safetensors"), parts)
    width = len(tensors["text_encoders.clip_l.transformer.text_model.final_layer_norm.bias"])
    tensors["text_encoders.clip_l.transformer.text_projection.weight"] = torch.randn(width, width)
    other = lay_out(write(tensors, tmp_path / "other.safetensors"), parts)
    texts, family = ["a ring"], FAMILIES["sd3"]
    read, expected = both(family.load_encoders, plain, other)
    same(read.encode_text(texts), expected.encode_text(texts))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("sdxl", "conditioner.embedders.1.model.text_projection"),
        ("sd3", "text_encoders.clip_g.transformer.text_projection.weight"),
        ("sd3", f"text_encoders.t5xxl.transformer.{BIAS}"),
    ],
)
def test_text_encoders_with_damaged_shapes_are_named(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = family == "sd3"
    pipeline = tiny_flow_pipeline(tmp_path / "words", family) if flow else tiny_pipeline(tmp_path / "words", family)
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    pipeline.save_pretrained(tmp_path / "folder")
    tensors = flow_checkpoint(pipeline) if flow else unet_checkpoint(pipeline, family)
    parts = {"tokenizer_3": tmp_path / "folder" / "tokenizer_3"} if flow else {}
    for damaged in (None, torch.zeros(()), torch.zeros(3), torch.zeros(0, 0), torch.zeros(32, 0)):
        own = {key: value for key, value in tensors.items() if key != name}
        file = write(own if damaged is None else own | {name: damaged}, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match=f"lacks {name}, or"):
            lay_out(file, parts)


def test_no_heavy_import_is_needed(tmp_path: Path) -> None:
    file = write(unet_checkpoint(tiny_pipeline(tmp_path / "words", "sd15"), "sd15"), tmp_path / "model.safetensors")
    program = (
        "import sys; from pathlib import Path; from lora_trainer.models.families import FAMILIES;"
        "from lora_trainer.models.single.lay_out import lay_out;"
        "FAMILIES['sd15'].describe(lay_out(Path(sys.argv[1])));"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_vocabulary_is_that_of_clip(tmp_path: Path) -> None:
    tokenizers.copy_tokenizer("clip_l", None, tmp_path / "one")
    tokenizers.copy_tokenizer("open_clip_g", None, tmp_path / "two")
    one, two = (CLIPTokenizer.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert one("a photo of a cat").input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]
    assert one("Héllo,  WORLD's 12").input_ids[1:3] != []
    filled = [words("cat", padding="max_length").input_ids for words in (one, two)]
    assert [row[2:4] for row in filled] == [[49407, 49407], [49407, 0]]
    assert len(one) == 49408
    assert one.model_max_length == 77
