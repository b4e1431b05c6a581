"""Noise, loss, optimizer and weight options through the command: their effects and refusals."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.config.schema import Config
from lora_trainer.lora_format.reading import read_lora
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.run import after_training
from lora_trainer.run.release import lora_weights
from tests.lora_format.tiny import facts, tiny_pipeline
from tests.recipes.recipe import Bench, exported, header_of, losses, patched, record, rows, stored_as


def v_model(bench: Bench, folder: Path) -> Bench:
    """The same bench with a v-prediction model."""
    shutil.copytree(bench.model, folder)
    scheduler = folder / "scheduler" / "scheduler_config.json"
    document = json.loads(scheduler.read_text(encoding="utf-8"))
    scheduler.write_text(json.dumps(document | {"prediction_type": "v_prediction"}), encoding="utf-8")
    return replace(bench, model=folder)


def test_zero_terminal_snr_needs_a_v_prediction_model(bench, tmp_path, capsys):
    assert bench.run("epsilon", noise__zero_terminal_snr="true") == 2
    output = capsys.readouterr().err
    assert "noise.zero_terminal_snr = true (from --set): the model predicts epsilon" in output
    assert "Traceback" not in output
    assert not bench.folder("epsilon").exists()
    velocity = v_model(bench, tmp_path / "v")
    settings = {"noise__zero_terminal_snr": "true", "loss__min_snr_gamma": 5, "steps": 2, "gates__lora_check": "lite"}
    assert velocity.run("velocity", **settings) == 0
    assert velocity.run("usual", loss__min_snr_gamma=5, steps=2, gates__lora_check="lite") == 0
    assert all(math.isfinite(loss) for loss in losses(bench.folder("velocity")))
    assert losses(bench.folder("velocity")) != losses(bench.folder("usual"))
    drawn = [
        (bench.folder(name) / "samples" / "before_after_00_without.png").read_bytes() for name in ("velocity", "usual")
    ]
    assert drawn[0] != drawn[1], "drawn on the schedule that was trained on"


def test_loss_weights_multiply_the_loss_of_their_images(bench, tmp_path):
    assert bench.run("plain", steps=1) == 0
    data = Path(shutil.copytree(bench.data, tmp_path / "weighted"))
    lines = [json.dumps({"file_name": path.name, "weight": 2.5}) for path in sorted(data.glob("*.png"))]
    (data / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert replace(bench, data=data).run("weighted", steps=1) == 0
    (plain,), (weighted,) = losses(bench.folder("plain")), losses(bench.folder("weighted"))
    assert weighted == pytest.approx(2.5 * plain, rel=1e-6)
    assert record(bench.folder("weighted"))["data_hash"] != record(bench.folder("plain"))["data_hash"]


@pytest.mark.parametrize(
    "settings", [{"noise__input_perturbation": 0.2}, {"loss__type": "huber", "loss__huber_delta": 0.05}]
)
def test_noise_and_loss_options_change_the_first_loss(settings, finished, bench):
    assert bench.run("option", steps=1, **settings) == 0
    assert losses(bench.folder("option"))[0] != losses(finished.folder("first"))[0]


@pytest.mark.parametrize("average", [{"train__ema_decay": 0.5}, {"train__swa_start": 2, "train__swa_every_n_steps": 1}])
def test_the_average_is_exported_and_validated_and_training_is_unchanged(average, finished, bench):
    assert bench.run("first", **average, checkpoint__every_n_steps=3, validation__every_n_steps=3) == 0
    assert losses(bench.folder("first")) == losses(finished.folder("first"))
    assert exported(bench.folder("first")) != exported(finished.folder("first"))
    validations = [rows(each.folder("first"), "validation.jsonl") for each in (bench, finished)]
    assert [row["step"] for row in validations[0]] == [row["step"] for row in validations[1]]
    assert validations[0][0]["loss"] == validations[1][0]["loss"], "nothing is trained at step 0"
    assert validations[0][-1]["loss"] != validations[1][-1]["loss"]
    kept = load_file(bench.folder("first") / "checkpoints" / "step-000006" / "average.safetensors")
    assert_exported(bench.folder("first"), kept)


def test_a_schedule_free_run_exports_its_averaged_weights(bench):
    """The library's own average, read after ours."""
    seen: dict[str, torch.Tensor] = {}
    true = after_training.choose_released

    def looking(config, checkpoints, state, context):
        released = true(config, checkpoints, state, context)
        trained = {name: master.detach().clone() for name, master in context.adapter.masters.items()}
        context.optimizer.eval()
        seen.update({name: master.detach().clone() for name, master in context.adapter.masters.items()})
        assert any(not torch.equal(seen[name], trained[name]) for name in seen)
        return released

    with patched(after_training, "choose_released", looking):
        assert bench.run("free", optimizer__name="adamw_schedulefree", checkpoint__export_weights="last") == 0
    assert_exported(bench.folder("free"), seen)


def test_a_lora_kept_in_bf16_alone_is_exported_from_it(bench):
    settings = {"memory__weight_dtype": "bf16", "optimizer__stochastic_rounding": "true"}
    assert (
        bench.run("rounded", steps=3, checkpoint__export_weights="last", checkpoint__every_n_steps=3, **settings) == 0
    )
    kept = load_file(bench.folder("rounded") / "checkpoints" / "step-000003" / "adapter.safetensors")
    assert {value.dtype for value in kept.values()} == {torch.bfloat16}
    assert_exported(bench.folder("rounded"), {name: value.float() for name, value in kept.items()})


def assert_exported(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """The file's updates are those of these adapter weights, to the precision of fp16."""
    written = read_lora(folder / f"{folder.name}.safetensors").modules
    assert len(written) * 2 == len(expected)
    for name, pair in written.items():
        module = name.removeprefix("unet.")
        down, up = (expected[f"{module}.lora_{half}.default.weight"] for half in "AB")
        assert torch.allclose(pair.delta(), up @ down, atol=2e-3 * float((up @ down).abs().max()))


def test_prodigy_takes_a_factor_and_refuses_a_learning_rate(bench, capsys):
    assert bench.run("rate", optimizer__name="prodigy", optimizer__learning_rate=1e-4) == 2
    assert "prodigy finds the learning rate itself" in capsys.readouterr().err
    assert bench.run("factor", steps=2, optimizer__name="prodigy", optimizer__learning_rate=None) == 0
    assert "optimizer.learning_rate = 0.0001 (from default) becomes 1.0" in capsys.readouterr().err
    assert [row["lr"] for row in rows(bench.folder("factor"))] == [1.0, 1.0]
    assert any("becomes 1.0" in line for line in record(bench.folder("factor"))["choices"])


@pytest.mark.slow
def test_clipping_by_value_replaces_clipping_by_norm(bench, capsys):
    assert bench.run("both", optimizer__clip_value=0.5, optimizer__max_grad_norm=2.0) == 2
    assert "by value (optimizer.clip_value) or by norm, not both" in capsys.readouterr().err
    assert bench.run("value", steps=2, optimizer__clip_value=1e-12) == 0
    assert record(bench.folder("value"))["config"]["optimizer"]["max_grad_norm"] == 0.0
    assert bench.run("norm", steps=2) == 0
    assert losses(bench.folder("value"))[0] == losses(bench.folder("norm"))[0]
    assert exported(bench.folder("value")) != exported(bench.folder("norm"))


@pytest.mark.parametrize("stabilized", [True, False])
@pytest.mark.parametrize("rank", [4, 6])
def test_the_file_changes_each_layer_like_the_adapter_in_memory(stabilized, rank, tmp_path):
    """Linear layers and convolutions with alpha other than rank: the scale is alpha / rank or alpha / sqrt(rank)."""
    family, unet = FAMILIES["sd15"], tiny_pipeline(tmp_path).unet.requires_grad_(False)
    names = target_modules(unet, family.denoiser, ("*.to_q", "*.ff.net.*", "*.resnets.*.conv?", "*.conv_shortcut"))
    adapters = inject_lora(unet, names, AdapterOptions(rank, 2.7, 0.0, rank_stabilized=stabilized), 1)
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.normal_()
    config = Config.model_validate({"lora": {"rank": rank, "alpha": 2.7, "use_rslora": stabilized}})
    weights = lora_weights(config, family, adapters)
    training_facts = facts(alpha=2.7, rank_stabilized=stabilized)
    for path in write_lora(tmp_path, "cat", weights, training_facts, FileLayout(dtype=torch.float32)):
        written = read_lora(path)
        assert len(written.modules) == len(names)
        assert json.loads(written.metadata["ss_network_args"]).get("rank_stabilized", False) is stabilized
        for name, pair in written.modules.items():
            expected = unet.get_submodule(name.removeprefix("unet.")).get_delta_weight("default").detach()
            assert torch.allclose(pair.delta(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_lora_files_have_the_requested_precision(bench):
    settings = {"steps": 2, "lora__alpha": 2.6, "checkpoint__export_every_n_steps": 1, "gates__lora_check": "lite"}
    settings |= {
        "textual_inversion__placeholder_tokens": '["<zobo>"]',
        "captions__trigger_word": "<zobo>",
        "sample__prompts": '["<zobo>"]',
    }
    written = {}
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        assert bench.run(name, checkpoint__export_dtype=name, **settings) == 0
        folder = bench.folder(name)
        kohya, diffusers = folder / f"{name}.safetensors", folder / f"{name}.diffusers.safetensors"
        others = (folder / "weights" / f"{name}-step-000001.safetensors", folder / f"{name}.embedding-zobo.safetensors")
        for file in (kohya, diffusers, *others):
            assert stored_as(file) == {name.replace("fp", "F").upper()}
        assert record(folder)["lora"]["parts"]["works"]["value"] == 1.0
        written[dtype] = load_file(kohya)
        modules = read_lora(diffusers).modules
        assert all(torch.equal(pair.up, modules[key].up) for key, pair in read_lora(kohya).modules.items())
    wide = written.pop(torch.float32)
    for dtype, tensors in written.items():
        assert all(torch.equal(tensors[key], wide[key].to(value.dtype)) for key, value in tensors.items()), dtype


def test_use_rslora_is_recorded_and_must_not_change(bench, capsys):
    assert bench.run("stable", steps=2, checkpoint__every_n_steps=1, lora__use_rslora="true", lora__alpha=2) == 0
    header = header_of(bench.folder("stable") / "stable.safetensors")
    assert json.loads(header["ss_network_args"])["rank_stabilized"] is True
    assert (header["ss_network_alpha"], header["lora_trainer.alpha"]) == ("4.0", "2.0")
    (bench.folder("stable") / "run.json").write_text('{"status": "stopped", "steps": 2}', encoding="utf-8")
    assert bench.run("stable", "--resume", steps=2, lora__alpha=2) == 2
    assert "lora.use_rslora was true and is now false" in capsys.readouterr().err


def test_a_run_does_without_the_default_tracker_where_it_is_not_installed(bench, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "lora_trainer.monitor.tracker_kinds.tensorboard", raising=False)
    assert bench.run("plain", steps=1) == 0
    assert "TensorBoard does not work (ModuleNotFoundError" in capsys.readouterr().out
    assert record(bench.folder("plain"))["status"] == "done"
    assert not (bench.folder("plain") / "logs").exists()
    assert bench.run("chosen", steps=1, run__trackers="tensorboard") == 2
    assert not bench.folder("chosen").exists()
