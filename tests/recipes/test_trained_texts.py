"""Text encoders trained through the real command: they learn, resume, and load in diffusers."""

from __future__ import annotations

import json

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open

from lora_trainer.cli.main import main
from lora_trainer.evaluation.loading import adapted_modules, components_of, judged
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_lora
from lora_trainer.training.checkpoints.checkpoint import newest_valid
from tests.recipes.recipe import Bench, draw_images, header_of, record, rows, save_tiny_model

CPU = torch.device("cpu")
RATES = {"sd15": "[1e-2]", "sd2": "[1e-2]", "sdxl": "[1e-2, 5e-3]", "sd3": "[1e-2, 5e-3, 1e-2]", "flux": "[1e-2]"}
RANK, TEXT_RANK = 4, 2  # with alphas 8 and 6
FAMILY_CASES = [pytest.param(name, marks=() if name == "sd15" else pytest.mark.slow) for name in RATES]


@pytest.fixture(scope="module", params=FAMILY_CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A family's tiny model and a finished eight-step run named `cat` that also trains its text encoders."""
    folder = tmp_path_factory.mktemp(request.param)
    data = draw_images(folder / "data")
    bench = Bench(save_tiny_model(folder, request.param), data, folder / "runs", folder / "cache")
    settings = {
        "text_encoder__learning_rates": RATES[request.param],
        "text_encoder__lora_rank": TEXT_RANK,
        "text_encoder__lora_alpha": 6,
    }
    more = {
        "lora__alpha": 8,
        "data__resolution": 64,
        "validation__every_n_steps": 4,
        "sample__every_n_steps": 4,
        "checkpoint__export_weights": "last",
        "captions__dropout": 0.2,
        "gates__lora_check": "lite",
    }
    assert bench.run("cat", steps=8, **settings, **more) == 0
    return bench


def test_loss_falls_and_the_gate_uses_the_trained_text_encoders(trained):
    first, *_, last = rows(trained.folder("cat"), "validation.jsonl")
    assert last["loss"] < first["loss"]
    document = record(trained.folder("cat"))
    assert document["lora"]["parts"]["works"]["value"] == 1.0
    assert document["lora"]["numbers"]["learning"]["mean"] > 0.0
    assert document["lora"]["numbers"]["drift"] > 0.0
    assert any(line.startswith("text_encoder: LoRA rank 2") for line in document["choices"])
    assert (trained.folder("cat") / "samples" / "step-000004.png").exists()


def deltas_trained(bench: Bench) -> dict[str, torch.Tensor]:
    """The weight change of each module in the newest checkpoint, by the names in files."""
    found, _ = newest_valid(bench.folder("cat") / "checkpoints")
    assert found is not None
    masters, deltas = found[1].adapter, {}
    prefix = FAMILIES[detect_family(bench.model)].denoiser.component
    for name, down in masters.items():
        module, _, rest = name.partition(".lora_A.")
        if not rest:
            continue
        text = module.startswith("text_encoder")
        scale = 6 / TEXT_RANK if text else 8 / RANK
        up = masters[f"{module}.lora_B.{rest}"]
        deltas[module if text else f"{prefix}.{module}"] = scale * up.flatten(1) @ down.flatten(1)
    return deltas


@pytest.mark.parametrize("ending", [".safetensors", ".diffusers.safetensors"])
def test_both_formats_change_a_fresh_pipeline_as_trained(trained, ending):
    family = FAMILIES[detect_family(trained.model)]
    lora = trained.folder("cat") / f"cat{ending}"
    pipeline = family.pipeline.make(trained.model, torch.float32, CPU)
    assert judged(pipeline, family, lora, read_lora(lora)) == []
    parts = components_of(pipeline, family)
    wanted = deltas_trained(trained)
    found = {
        f"{component}.{name}": module.get_delta_weight("default_0")
        for component, part in parts.items()
        for name, module in part.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    learned = family.text_rates(json.loads(RATES[family.name]))
    assert {name.partition(".")[0] for name in found} == {family.denoiser.component, *learned}
    assert found.keys() == wanted.keys()
    assert adapted_modules(pipeline, family) == len(read_lora(lora).modules) == len(wanted)
    for name, delta in wanted.items():
        off = found[name].detach().flatten(1) - delta  # files hold both halves in fp16
        assert float(off.abs().max()) < 1e-4 or float(off.norm() / delta.norm()) < 1e-3, name


def test_keys_keep_the_prefix_that_other_programs_expect(trained):
    header = header_of(trained.folder("cat") / "cat.safetensors")
    with safe_open(trained.folder("cat") / "cat.safetensors", framework="numpy") as file:
        keys = [key for key in file.keys() if "_te" in key]  # noqa: SIM118  safe_open is no dict
    assert keys
    assert all("_text_model_encoder_layers_" in key or key.startswith("lora_te3_encoder_block_") for key in keys)
    with safe_open(trained.folder("cat") / "cat.diffusers.safetensors", framework="numpy") as file:
        others = [key for key in file.keys() if key.startswith("text_encoder")]  # noqa: SIM118  safe_open is no dict
    assert others
    assert all(".text_model.encoder.layers." in key or "_3.encoder.block." in key for key in others)
    assert header["ss_text_encoder_lr"] == str(json.loads(RATES[detect_family(trained.model)]))
    assert json.loads(header["ss_network_args"])["text_encoder_dim"] == TEXT_RANK
    assert (header["lora_trainer.alpha"], header["lora_trainer.text_encoder_alpha"]) == ("8.0", "6.0")


def test_a_finished_run_is_evaluated_again_from_its_file(trained, capsys):
    lora = str(trained.folder("cat") / "cat.safetensors")
    data = ["--data", str(trained.data), "--json"]
    assert main(["validate", lora, "--model", str(trained.model), *data, "--set", "gates.lora_check=lite"]) in (0, 4)
    document = json.loads(capsys.readouterr().out)
    assert document["parts"]["works"]["value"] == 1.0
    assert document["numbers"]["learning"]["mean"] > 0.0


def test_captions_are_cached_only_for_encoders_that_are_not_trained(trained):
    cached = [path for path in trained.cache.rglob("*.safetensors") if "texts" in str(path)]
    assert bool(cached) == (detect_family(trained.model) == "flux")  # whose T5 is not trained here


def test_resuming_keeps_which_encoders_are_trained(trained, capsys):
    settings = {
        "text_encoder__lora_rank": TEXT_RANK,
        "text_encoder__lora_alpha": 6,
        "lora__alpha": 8,
        "captions__dropout": 0.2,
    }
    settings |= {"data__resolution": 64}
    capsys.readouterr()
    other = "[0.0, 5e-3]" if "," in RATES[detect_family(trained.model)] else "[]"
    lacking = {} if other != "[]" else {"text_encoder__lora_rank": "none", "text_encoder__lora_alpha": "none"}
    assert trained.run("cat", "--resume", steps=13, text_encoder__learning_rates=other, **{**settings, **lacking}) == 2
    assert "trained text encoders" in " ".join(capsys.readouterr().err.split())
