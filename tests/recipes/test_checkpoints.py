"""Training, evaluation and sampling with a single-file checkpoint equal those with the same model's folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from lora_trainer.cli.main import main
from lora_trainer.models.families import flux, flux2, sd3, z_image
from lora_trainer.models.family import Architecture
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single import tokenizers, unet
from tests.models.single.originals import (
    flow_checkpoint,
    flux2_checkpoint,
    joined,
    unet_checkpoint,
    write,
    z_image_checkpoint,
)
from tests.models.single.quantized import comfy, gguf_of
from tests.models.single.tiny import FLOWS, tiny_flow_pipeline, tiny_flux2, tiny_pipeline, tiny_z_image
from tests.recipes.recipe import Bench, draw_images, exported, header_of, losses, record

KINDS = {
    "sd15": "epsilon",
    "sd2": "v_prediction",
    "sdxl": "epsilon",
    "sd3.5": "flow",
    "flux-dev": "flow",
    "flux2": "flow",
    "z_image": "flow",
}


def benches_of(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, Bench, dict[str, str]]:
    """The same model as a folder and as a checkpoint, and the settings for the checkpoint."""
    monkeypatch.setattr(tokenizers, "CLIP", folder / "words")
    if kind == "flux2":
        pipeline = tiny_flux2(folder / "words", distilled=True)
        tensors = flux2_checkpoint(pipeline)
    elif kind == "z_image":
        pipeline = tiny_z_image(folder / "words")
        tensors = z_image_checkpoint(pipeline)
    elif kind in FLOWS:
        pipeline = tiny_flow_pipeline(folder / "words", kind)
        tensors = flow_checkpoint(pipeline)
    else:
        pipeline = tiny_pipeline(folder / "words", kind, KINDS[kind])
        tensors = unet_checkpoint(pipeline, kind)
    pipeline.save_pretrained(folder / "model")
    smaller(folder / "model", monkeypatch)
    file = write(tensors, folder / "one.safetensors", {"modelspec.prediction_type": "v"} if kind == "sd2" else None)
    plain = Bench(folder / "model", draw_images(folder / "data", 4), folder / "runs", folder / "cache")
    more = {"model__text_encoders": str(folder / "model")} if KINDS[kind] == "flow" else {}
    return plain, replace(plain, model=file), more


def smaller(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get a native resolution of 64 px for the gate: a file does not store it."""

    def public(name: str) -> Architecture:
        published = public_architecture(name)
        small = {"sample_size": 8} if "sample_size" in published.denoiser else {}
        return replace(published, denoiser={**published.denoiser, **small})

    for module in (unet, flux, flux2, sd3, z_image):
        monkeypatch.setattr(module, "public_architecture", public)
    for module in (flux, flux2, z_image):  # whose configs do not store it either
        monkeypatch.setattr(module, "SIDE", 8)
    for path in (model / "unet" / "config.json", model / "transformer" / "config.json"):
        if path.exists() and "sample_size" in path.read_text(encoding="utf-8"):
            config = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps(config | {"sample_size": 8}), encoding="utf-8")


LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "sd15"]


@pytest.mark.exact
@pytest.mark.parametrize("kind", ["sd15", *LONG])
def test_a_checkpoint_trains_like_its_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, single, more = benches_of(kind, tmp_path, monkeypatch)
    settings: dict[str, Any] = {"data__resolution": 64, "gates__lora_check": "lite"}
    assert plain.run("folder", steps=3, **settings) == 0
    assert single.run("single", steps=3, **settings, **more) == 0
    assert losses(plain.folder("folder")) == losses(plain.folder("single"))
    assert exported(plain.folder("folder"))["diffusers"] == exported(plain.folder("single"))["diffusers"]
    folder, alone = (record(plain.folder(name)) for name in ("folder", "single"))
    assert folder["lora"]["parts"] == alone["lora"]["parts"]
    for image in sorted((plain.folder("folder") / "samples").glob("*_with*.png")):
        other = plain.folder("single") / image.relative_to(plain.folder("folder"))
        with Image.open(image) as one, Image.open(other) as two:
            assert one.tobytes() == two.tobytes()


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.parametrize("stored", ["fp8 scaled", "Q8_0"])
def test_a_quantized_checkpoint_trains_as_the_model_that_it_stands_for(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its LoRA says on what it was trained."""
    plain, single, more = benches_of("flux-dev", tmp_path, monkeypatch)
    whole = load_file(single.model)
    begin = "model.diffusion_model."
    own = {name.removeprefix(begin): each for name, each in whole.items() if name.startswith(begin)}
    if stored == "Q8_0":
        pytest.importorskip("gguf", reason="pip install 'lora-trainer[gguf]'")
        file, meant = gguf_of(own, stored, tmp_path / "small.gguf")
        more |= {"model__vae": str(plain.model)}
        whole = {}
    else:
        tensors, meant = comfy(own)
        others = {name: each for name, each in whole.items() if not name.startswith(begin)}
        file = write(joined({begin: tensors, "": others}), tmp_path / "small.safetensors")
        whole = others
    other = write(joined({begin: meant, "": whole}), tmp_path / "meant.safetensors")
    for name, model in (("quantized", file), ("plain", other)):
        assert replace(single, model=model).run(name, steps=3, data__resolution=64, **more) == 0
    assert losses(plain.folder("quantized")) == losses(plain.folder("plain"))
    lora = plain.folder("quantized") / "quantized.safetensors"
    form = "fp8 e4m3 with scales" if stored == "fp8 scaled" else "GGUF Q8_0, F32"
    assert header_of(lora)["lora_trainer.base_model_form"] == form
    assert "lora_trainer.base_model_form" not in header_of(plain.folder("plain") / "plain.safetensors")
    assert f"is stored as {form}: it is dequantized layer by layer while it loads" in capsys.readouterr().err
    assert main(["inspect", str(lora)]) == 0
    assert form in capsys.readouterr().out


@pytest.mark.slow
def test_a_lora_is_evaluated_and_sampled_on_a_checkpoint_as_on_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, single, _ = benches_of("sd15", tmp_path, monkeypatch)
    assert plain.run("folder", steps=3, data__resolution=64) == 0
    lora = shutil.copy(plain.folder("folder") / "folder.safetensors", tmp_path / "alone.safetensors")
    reports, drawn = [], []
    for bench in (plain, single):
        capsys.readouterr()
        args = ["--model", str(bench.model)]
        assert main(
            ["validate", str(lora), *args, "--data", str(plain.data), "--json", "--set", "gates.lora_check=lite"]
        ) in (0, 4)
        reports.append(json.loads(capsys.readouterr().out))
        assert reports[-1]["cost"].pop("seconds") > 0
        target = tmp_path / f"drawn_{len(drawn)}"
        words = ["--prompt", "a ring", "--num-inference-steps", "2", "--output", str(target)]
        assert main(["sample", str(lora), *args, *words]) == 0
        drawn.append([Image.open(path).tobytes() for path in sorted(target.rglob("*_with*.png"))])
    assert reports[0]["parts"]["works"]["value"] == 1.0
    assert reports[0]["numbers"]["judge"]["found"], "samples are compared with the images"
    assert reports[0] == reports[1]
    assert len(drawn[0]) >= 2
    assert drawn[0] == drawn[1]
