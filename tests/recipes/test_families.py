"""Every family through the same commands: it learns, resumes exactly, and its file loads in diffusers."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.evaluation.loading import adapted_modules, judged, without_lora
from lora_trainer.models.detection import detect_family
from lora_trainer.models.drawing import prompted, read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_lora
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.run import caching
from tests.families.own import own_families
from tests.recipes.recipe import (
    Bench,
    draw_images,
    exported,
    header_of,
    losses,
    patched,
    record,
    rows,
    save_tiny_model,
)
from tests.recipes.test_resume import stop

CPU = torch.device("cpu")
LEARNING = {
    "data__resolution": 64,
    "lora__alpha": 8,
    "checkpoint__every_n_steps": 3,
    "captions__dropout": 0.3,
}  # rank 4
KINDS = {
    "sd3-without-t5": "sd3",
    "sd3.5": "sd3",
    "flux-schnell": "flux",
    "krea2-turbo": "krea2",
    "qwen_image21-turbo": "qwen_image21",
    "flux2-distilled": "flux2",
}  # other flavors of a family
AT_1024 = (
    "flux",
    "flux2",
    "chroma",
    "z_image",
    "qwen_image",
    "qwen_image21",
    "krea2",
    "anima",
    *own_families(),
)  # the gate's pixels for them, as no config sets fewer: ten times as slow


@pytest.fixture(scope="module", params=[*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A family's tiny model, and a finished run named `cat` of twelve steps on it."""
    folder = tmp_path_factory.mktemp(request.param, numbered=False)
    bench = Bench(
        save_tiny_model(folder, request.param), draw_images(folder / "data"), folder / "runs", folder / "cache"
    )
    assert detect_family(bench.model) == KINDS.get(request.param, request.param)
    check = "off" if detect_family(bench.model) in AT_1024 else "lite"
    assert bench.run("cat", steps=12, validation__every_n_steps=12, gates__lora_check=check, **LEARNING) == 0
    return bench


def family_of(bench: Bench) -> str:
    return detect_family(bench.model)


def kind_of(bench: Bench) -> str:
    """As its model was made."""
    return bench.model.parent.name


def test_loss_falls(trained):
    first, last = rows(trained.folder("cat"), "validation.jsonl")
    assert last["loss"] < first["loss"]
    document = record(trained.folder("cat"))
    assert document["status"] == "done"
    timestep_choices = [line for line in document["choices"] if line.startswith("timesteps: ")]
    assert len(timestep_choices) == (family_of(trained) not in ("sd15", "sd2", "sdxl"))
    if family_of(trained) not in AT_1024:
        assert learned(document)


def learned(document: dict[str, Any]) -> bool:
    lora = document["lora"]
    return bool(lora["parts"]["works"]["value"] == 1.0 and lora["numbers"]["learning"]["mean"] > 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", AT_1024)
def test_the_gate_measures_the_lora_at_1024_px(family, tmp_path):
    bench = Bench(save_tiny_model(tmp_path, family), draw_images(tmp_path / "data"), tmp_path, tmp_path / "cache")
    assert bench.run("cat", steps=12, gates__lora_check="lite", **LEARNING) == 0
    assert learned(record(bench.folder("cat")))


def test_a_stopped_run_resumes_exactly(trained):
    settings = {"validation__every_n_steps": 12, **LEARNING}
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert trained.run("broken", steps=12, **settings) == 143
    assert record(trained.folder("broken"))["steps"] == 3
    assert trained.run("broken", "--resume", steps=12, **settings) == 0
    assert losses(trained.folder("broken")) == losses(trained.folder("cat"))
    assert exported(trained.folder("broken")) == exported(trained.folder("cat"))


@pytest.mark.parametrize("ending", [".safetensors", ".diffusers.safetensors"])
def test_the_file_loads_whole_in_a_fresh_pipeline_and_leaves_the_base_unchanged(trained, ending):
    name = family_of(trained)
    lora = trained.folder("cat") / f"cat{ending}"
    pipeline = FAMILIES[name].pipeline.make(trained.model, torch.float32, CPU)
    base = {
        key: value.clone() for key, value in getattr(pipeline, FAMILIES[name].denoiser.component).state_dict().items()
    }

    asked: dict[str, Any] = {"prompt": "a ring"}
    if name == "qwen_image21":  # whose pipeline's own reading needs torchvision
        asked = prompted(FAMILIES[name], read_prompts(pipeline, FAMILIES[name], ["a ring"]), ["a ring"], None)

    def image() -> torch.Tensor:
        drawn = pipeline(
            **asked,
            num_inference_steps=2,
            width=64,
            height=64,
            output_type="pt",
            generator=torch.manual_seed(1),
        )
        return drawn.images[0]

    before = image()
    assert judged(pipeline, FAMILIES[name], lora, read_lora(lora)) == []
    assert adapted_modules(pipeline, FAMILIES[name]) == len(read_lora(lora).modules) > 0
    assert not torch.equal(image(), before)
    with without_lora(pipeline):
        assert torch.equal(image(), before)
    pipeline.unload_lora_weights()
    after = getattr(pipeline, FAMILIES[name].denoiser.component).state_dict()
    assert base.keys() == after.keys()
    assert all(torch.equal(base[key], after[key]) for key in base)


def test_the_header_names_the_base_model_as_other_programs_do(trained):
    expected = {
        "sd15": ("sd_v1", "False", "stable-diffusion-v1/lora", "epsilon"),
        "sd2": ("sd_v2_768_v", "True", "stable-diffusion-v2-768-v/lora", "v"),
        "sdxl": ("sdxl_base_v1-0", "False", "stable-diffusion-xl-v1-base/lora", "epsilon"),
        "sd3": ("sd3", "False", "stable-diffusion-3-medium/lora", None),
        "sd3-without-t5": ("sd3", "False", "stable-diffusion-3-medium/lora", None),
        "sd3.5": ("sd3", "False", "stable-diffusion-3-5-medium/lora", None),
        "flux": ("flux1", "False", "flux-1-dev/lora", None),
        "flux-schnell": ("flux1", "False", "flux-1-schnell/lora", None),
        "flux2": ("flux2", "False", "flux-2-klein-base/lora", None),
        "flux2-distilled": ("flux2", "False", "flux-2-klein/lora", None),
        "chroma": ("chroma", "False", "chroma/lora", None),
        "z_image": ("z_image", "False", "z-image-turbo/lora", None),
        "qwen_image": ("qwen_image", "False", "Qwen-Image/lora", None),
        "qwen_image21": ("qwen_image21", "False", "Qwen-Image-2.1/lora", None),
        "qwen_image21-turbo": ("qwen_image21", "False", "Qwen-Image-2.1/lora", None),
        "krea2": ("krea2", "False", "Krea-2/lora", None),
        "krea2-turbo": ("krea2", "False", "Krea-2/lora", None),
        "anima": ("anima", "False", "anima/lora", None),
        **{name: own.HEADER for name, own in own_families().items()},
    }
    keys = ("ss_base_model_version", "ss_v2", "modelspec.architecture", "modelspec.prediction_type")
    header = header_of(trained.folder("cat") / "cat.safetensors")
    assert tuple(header.get(key) for key in keys) == expected[kind_of(trained)]
    assert (header["ss_network_dim"], header["ss_network_alpha"], header["lora_trainer.alpha"]) == ("4", "4.0", "8.0")


def test_a_lora_is_refused_on_another_family(trained, tiny_model, tmp_path, capsys):
    lora, own = str(trained.folder("cat") / "cat.safetensors"), family_of(trained)
    other = save_tiny_model(tmp_path, "sdxl") if own == "sd15" else tiny_model
    for command, code in ((["validate", lora], 4), (["sample", lora, "--prompt", "a ring"], 2)):
        capsys.readouterr()
        assert main([*command, "--model", str(other)]) == code
        output = capsys.readouterr()
        assert "trained on another model family" in " ".join((output.out + output.err).split())


def test_a_v_prediction_model_with_zero_terminal_snr(tmp_path):
    """As in published v-prediction models of SDXL."""
    model = save_tiny_model(tmp_path, "sdxl")
    scheduler = model / "scheduler" / "scheduler_config.json"
    changes = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text("utf-8")) | changes), encoding="utf-8")
    bench = Bench(model, draw_images(tmp_path / "data"), tmp_path / "runs", tmp_path / "cache")
    assert bench.run("v", steps=8, validation__every_n_steps=8, loss__min_snr_gamma=5, gates__lora_check="lite") == 0
    first, last = rows(bench.folder("v"), "validation.jsonl")
    assert last["loss"] < first["loss"]
    assert record(bench.folder("v"))["lora"]["parts"]["works"]["value"] == 1.0
    header = header_of(bench.folder("v") / "v.safetensors")
    keys = ("ss_base_model_version", "modelspec.prediction_type", "ss_zero_terminal_snr")
    assert tuple(header[key] for key in keys) == ("sdxl_base_v1-0", "v", "True")


@pytest.mark.parametrize("family", ["sd3", pytest.param("flux", marks=pytest.mark.slow)])
def test_text_encoders_too_large_for_a_gpu_are_read_layer_by_layer(family, tmp_path, capsys):
    """As planned, and bit for bit as with whole encoders."""
    model, data = save_tiny_model(tmp_path, family), draw_images(tmp_path / "data", 4)
    settings = {"data__resolution": 64, "steps": 2}
    bench = Bench(model, data, tmp_path / "runs", tmp_path / "cache")
    assert bench.run("whole", **settings) == 0
    capsys.readouterr()
    with patched(caching, "usable_bytes", lambda config, device: 2**30):  # too small for 32 captions at once
        assert replace(bench, cache=tmp_path / "other").run("visiting", **settings) == 0
    assert "text encoders layer by layer, " in capsys.readouterr().out
    assert losses(bench.folder("visiting")) == losses(bench.folder("whole"))
