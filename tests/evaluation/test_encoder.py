"""Outside image encoders in the verdict: tiny random ones of real kinds, and folders that hold none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPVisionModel,
    Dinov2Model,
    ResNetConfig,
    ResNetModel,
)

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config, GatesSection
from lora_trainer.core.errors import UsageError
from lora_trainer.evaluation.compute import ON_CPU
from lora_trainer.evaluation.evidence import RealImages
from lora_trainer.evaluation.lora_check import LoraGate, check_lora
from lora_trainer.evaluation.lora_report import NO_ENCODER, LoraReport
from lora_trainer.evaluation.sample_rates import BY_SAMPLES
from lora_trainer.evaluation.seeing import describing, open_eyes, place_encoder
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.evaluation.verdict import SCALES
from lora_trainer.lora_format.writing import write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory.phases import TILE, decoding_bytes, phase_costs
from lora_trainer.models.vision_encoder import EncoderFolder, load_vision_encoder
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.bases.find import silent
from lora_trainer.run.inputs import with_absolute_paths
from tests.evaluation.tiny_encoders import SEEN, SMALL, save_tiny_dino
from tests.lora_format.tiny import facts, random_lora, tiny_pipeline
from tests.run.local_hub import COMMIT, local_hub

FAMILY = FAMILIES["sd15"]
CPU = torch.device("cpu")
PIXELS = torch.rand(3, 64, 48, generator=torch.Generator().manual_seed(2)) * 2 - 1


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dino(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both parts, as such models are published."""
    folder = tmp_path_factory.mktemp("clip")
    text = {**SMALL, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**SMALL, "image_size": 56, "patch_size": 14}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    CLIPImageProcessorPil(**SEEN).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network without tokens."""
    folder = tmp_path_factory.mktemp("resnet")
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ResNetModel(config).save_pretrained(folder)
    CLIPImageProcessorPil(**SEEN).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = random_lora(FAMILY.denoiser.load(base, torch.float32, CPU))
    return write_lora(tmp_path_factory.mktemp("lora"), "any", weights, facts())[0]


@pytest.fixture(scope="module")
def images() -> RealImages:
    generator = torch.Generator().manual_seed(3)
    texts = torch.randn(77, 32, generator=generator)
    names = ("a cat", "a dog", "a cat on a sofa", "a dog on a road")
    return RealImages(
        [
            EncodedSample(name, torch.randn(4, 8, 8, generator=generator), {"embeds": texts}, torch.zeros(6), name)
            for name in names
        ]
    )


def check(lora: Path, base: Path, images: RealImages, encoder: Path | None) -> LoraReport:
    chosen = None if encoder is None else EncoderFolder(encoder, "owner/name@1234")
    gate = LoraGate(check="lite", prompts=("", "a red circle"), encoder=chosen)
    return check_lora(lora, base, FAMILY, images, gate)


@pytest.mark.parametrize("name", ["dino", "clip", "resnet"])
def test_features_have_one_length_and_are_the_same_each_time(name: str, request: pytest.FixtureRequest) -> None:
    describe = load_vision_encoder(request.getfixturevalue(name), CPU)
    once, again, other = describe(PIXELS), describe(PIXELS), describe(-PIXELS)
    assert {block: value.shape for block, value in once.items()} == {"pooled": (16,), "cells": (9 * 16,)}
    for block, value in once.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again[block])
        assert not torch.allclose(value, other[block])
    assert once["pooled"].norm() == pytest.approx(1.0)
    assert torch.allclose(once["cells"].reshape(16, 9).norm(dim=0), torch.ones(9))


@pytest.mark.parametrize(("name", "kind"), [("dino", Dinov2Model), ("clip", CLIPVisionModel)])
def test_features_are_those_of_transformers(name: str, kind: type, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    model = kind.from_pretrained(folder).eval()  # type: ignore[attr-defined]
    shown = ((PIXELS + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    inputs = AutoImageProcessor.from_pretrained(folder, backend="pil")(images=[shown], return_tensors="pt")
    with torch.no_grad():
        found = model(**inputs)
    described = load_vision_encoder(folder, CPU)(PIXELS)

    def unit(value: Tensor) -> Tensor:
        return value / value.norm(dim=0)

    assert torch.allclose(described["pooled"], unit(found.pooler_output[0]), atol=1e-6)
    patches = found.last_hidden_state[0, 1:].T.reshape(16, 4, 4)  # the first token is that of the whole image
    corner = patches[:, :2, :2].mean((1, 2))
    assert torch.allclose(described["cells"].reshape(16, 9)[:, 0], unit(corner), atol=1e-6)


def test_each_block_of_features_counts_alike(dino: Path) -> None:
    """They have the length 1 together, so that a distance is one of angles."""
    found = describing(load_vision_encoder(dino, CPU))(Image.new("RGB", (48, 64), (200, 90, 30)))
    assert found.norm() == pytest.approx(1.0, abs=1e-5)
    assert sorted((float(found[:144].norm()), float(found[144:].norm()))) == pytest.approx([0.5**0.5] * 2, abs=1e-5)


def test_the_verdict_compares_by_the_encoder(dino: Path, lora: Path, base: Path, images: RealImages) -> None:
    own, outside = (check(lora, base, images, each) for each in (None, dino))
    assert (own.encoder, outside.encoder) == (NO_ENCODER, "owner/name@1234")
    assert json.loads(json.dumps(outside.to_json(), allow_nan=False))["encoder"] == "owner/name@1234"
    assert outside.numbers["judge"] != own.numbers["judge"]
    assert outside.cost.forward_passes == own.cost.forward_passes


def ruined(base: Path, copy: Path, component: str, name: str) -> Path:
    """A copy of a base model with one weight that is NaN."""
    shutil.copytree(base, copy)
    file = next((copy / component).glob("*.safetensors"))
    tensors = load_file(file)
    tensors[name][:] = float("nan")
    save_file(tensors, file)
    return copy


def test_a_base_that_cannot_sample_or_decode_is_named(
    dino: Path, lora: Path, base: Path, images: RealImages, tmp_path: Path
) -> None:
    report = check(lora, ruined(base, tmp_path / "unet", "unet", "conv_out.bias"), images, None)
    assert (report.score, report.outcome) == (None, "unresolved")
    assert {part.reason for part in report.parts.values()} == {"the base model's own predictions are not finite"}
    assert report.reasons == ("Nothing was measured: the base model's own predictions hold NaN or infinity.",)
    blind = ruined(base, tmp_path / "vae", "vae", "decoder.conv_out.bias")
    report = check(lora, blind, images, dino)
    assert not any(report.parts[name].measure for name in BY_SAMPLES)
    assert report.outcome == "unresolved"
    assert [name for name, part in report.parts.items() if part.measure] == ["works"]
    assert "not_compared" in {finding.code for finding in report.findings}


def test_captions_and_images_that_are_all_alike_are_named(lora: Path, base: Path, images: RealImages) -> None:
    alike = [replace(images.trained[0], caption="the same")] * 4
    parts = check(lora, base, RealImages(alike), None).parts
    assert list(parts) == list(SCALES)
    for name in ("follows_captions", "varied", "is_new"):
        assert parts[name].measure is None, name
    assert parts["follows_captions"].reason != parts["varied"].reason


def no_encoders(dino: Path, base: Path, folder: Path) -> dict[str, Path]:
    """Folders that hold none, by what the message says of them."""
    made = {name: folder / name for name in ("pickle", "empty", "no_sizes", "text", "cut", "own_code", "file", "less")}
    for name in ("pickle", "no_sizes", "text", "cut", "own_code", "less"):
        shutil.copytree(dino, made[name])
    (made["pickle"] / "model.safetensors").rename(made["pickle"] / "pytorch_model.bin")
    made["empty"].mkdir()
    for path in made["no_sizes"].glob("*processor_config*"):
        path.unlink()
    BertModel(BertConfig(**SMALL, vocab_size=30)).save_pretrained(made["text"])
    cut = (dino / "model.safetensors").read_bytes()
    (made["cut"] / "model.safetensors").write_bytes(cut[:-40])
    config = json.loads((dino / "config.json").read_text("utf-8"))
    own = {**config, "model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
    (made["own_code"] / "config.json").write_text(json.dumps(own), encoding="utf-8")
    made["file"].write_bytes(cut)
    tensors = load_file(dino / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if "layernorm" not in name}, made["less"] / "model.safetensors"
    )
    return {
        "holds only pytorch_model.bin, a pickle": made["pickle"],
        "config.json is missing": made["empty"],
        "lacks preprocessor_config.json": made["no_sizes"],
        "holds a model of type bert, no image encoder": made["text"],
        "model.safetensors": made["cut"],
        "code of its own, which is never run": made["own_code"],
        "is a file": made["file"],
        "of its weights": made["less"],
        "is a diffusers model": base,
        "of type UNet2DConditionModel": base / "unet",
        "does not exist": folder / "absent",
    }


def test_a_folder_without_an_encoder_is_one_message(dino: Path, base: Path, tmp_path: Path) -> None:
    for message, folder in no_encoders(dino, base, tmp_path).items():
        with pytest.raises(UsageError, match=message) as caught:
            load_vision_encoder(folder, CPU)
        assert len(caught.value.problems) == 1
        assert caught.value.problems[0].fix


@pytest.mark.parametrize("command", ["train", "produce", "validate", "batch"])
def test_a_wrong_encoder_ends_a_command_before_anything_is_done(
    command: str, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sets" / "one").mkdir(parents=True)
    named = {"validate": [str(lora)], "batch": [str(tmp_path / "sets")]}.get(command, [])
    output = [] if command == "validate" else ["--output", str(tmp_path / "runs")]
    assert main([command, *named, *output, "--set", f"gates.encoder={tmp_path / 'absent'}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.count("does not exist. Set gates.encoder to a folder of transformers") == 1
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def named(encoder: str | None, *, offline: bool = False) -> Config:
    config = Config(gates=GatesSection(encoder=encoder))
    return config.model_copy(update={"run": config.run.model_copy(update={"offline": offline})})


def test_an_encoder_of_a_hub_is_fetched_once_its_configs_first(dino: Path, tmp_path: Path) -> None:
    with local_hub(tmp_path / "hf") as hub:
        hub.holds("owner/dino", dino)
        hub.repositories["owner/dino"] |= {"pytorch_model.bin": b"pickle", "README.md": b""}
        hub.repositories["owner/none"] = {"README.md": b""}
        hub.repositories["owner/pickle"] = {
            name: data for name, data in hub.repositories["owner/dino"].items() if "safetensors" not in name
        }
        assert find_encoder(named(None)) is None
        find_encoder(named("owner/dino"), weights=False, say=silent)
        assert set(hub.fetched()) == {"config.json", "preprocessor_config.json"}
        found = find_encoder(named("owner/dino"), say=silent)
        assert found is not None
        assert found.name == f"owner/dino@{COMMIT}"
        assert set(hub.fetched()) == {"config.json", "preprocessor_config.json", "model.safetensors"}
        hub.requests.clear()
        assert find_encoder(named("owner/dino", offline=True)) == found
        assert hub.requests == []
        assert load_vision_encoder(found.path, CPU)(PIXELS)
        for name, message in (
            ("owner/absent", "neither a folder here nor a model of the hub"),
            ("owner/none", "gates.encoder: owner/none holds no image encoder: config.json is missing"),
            ("owner/pickle", "holds only pytorch_model.bin, a pickle"),
            ("owner/dino/model.safetensors", "Set it to the whole model: owner/dino"),
            ("https://huggingface.co/owner/dino", "Name the model as owner/dino"),
        ):
            with pytest.raises(UsageError, match=message):
                find_encoder(named(name), say=silent)
        with pytest.raises(UsageError, match="offline nothing is fetched"):
            find_encoder(named("owner/other", offline=True))


def test_a_folder_of_an_encoder_is_good_from_anywhere(dino: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dino.parent)
    assert with_absolute_paths(named(dino.name)).gates.encoder == str(dino)
    assert with_absolute_paths(named("owner/name")).gates.encoder == "owner/name"


@pytest.mark.parametrize("kind", ["flux2", "qwen_image", "qwen_image21"])
def test_latents_are_seen_by_every_class_of_vae(kind: str, tmp_path: Path) -> None:
    """Each other than the usual one, which the tests above decode with."""
    tiny_pipeline(tmp_path / "tokenizer", kind).save_pretrained(tmp_path / "base", safe_serialization=True)
    own = FAMILIES[kind].describe(tmp_path / "base")
    eyes, _ = open_eyes(None, own, ON_CPU, 64)
    latents = torch.randn(own.latent_channels, 8, 8, generator=torch.Generator().manual_seed(0))
    image = eyes.image(latents)
    assert image is not None
    assert image.size == (8 * own.downscale, 8 * own.downscale)
    assert eyes.image(latents * torch.nan) is None


def test_vae_and_encoder_leave_most_of_a_gpu_to_the_denoiser() -> None:
    costs, encoder, pixels = phase_costs("sdxl"), 1 << 30, 1024 * 1024
    whole = encoder + 4 * costs.autoencoder + decoding_bytes(pixels, 4, costs)
    parts = encoder + 4 * costs.autoencoder + decoding_bytes(TILE * TILE, 4, costs)
    for usable, expected in (
        (None, (True, False, whole)),
        (2 * whole, (True, False, whole)),
        (2 * whole - 1, (True, True, parts)),
        (2 * parts - 1, (False, False, 0)),
        (0, (False, False, 0)),
    ):
        placed = place_encoder(encoder, pixels, 4, costs, usable)
        assert (placed.on_device, placed.tiled, placed.reserved) == expected, usable
