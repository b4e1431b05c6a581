"""musubi-tuner's training jobs: which models, layers and times they mean, by its source code at 30c658c."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from torch import nn

from lora_trainer.adapters.target_modules import target_modules, unread_modules
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import UsageError
from lora_trainer.core.families import families
from lora_trainer.diffusion.timesteps import Shift, flow_times
from lora_trainer.importers.imported import Imported, import_file
from lora_trainer.models.families import FAMILIES
from tests.importers.test_flow import drawn, line_of
from tests.lora_format.tiny import tiny_transformer

SCRIPTS = {
    "qwen_image": "qwen_image",
    "z_image": "zimage",
    "flux": "flux_kontext",
    "flux2": "flux_2",
    "krea2": "krea2",
}


def command(folder: Path, script: str, flags: str = "") -> Imported:
    """The import of a command of `SCRIPT_train_network.py`."""
    path = folder / "train.sh"
    start = (
        f"accelerate launch --mixed_precision bf16 src/musubi_tuner/{script}.py --dit a.safetensors --vae v.safetensors"
    )
    path.write_text(f"{start} --network_module networks.lora_x --learning_rate 1e-4 {flags}\n", encoding="utf-8")
    return import_file(path)


def job(folder: Path, **keys: object) -> Imported:
    """The import of a TOML of `--config_file`."""
    path = folder / "job.toml"
    start = {"dit": "a.safetensors", "network_module": "networks.lora_qwen_image", **keys}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in start.items()), encoding="utf-8")
    return import_file(path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ("uniform", 1.0)),  # its defaults: sigma, no weighting, shift 1
        ("--discrete_flow_shift 3", ("uniform", 3.0)),
        # sigma counts timesteps from noise, so the logit's mean has the other sign.
        ("--weighting_scheme logit_normal --logit_mean 0.5 --logit_std 0.8", ("logit_normal", -0.5, 0.8, 1.0)),
        ("--weighting_scheme mode --mode_scale 1.1", ("mode", 1.1, 1.0)),
        ("--timestep_sampling uniform --discrete_flow_shift 3", ("uniform", 1.0)),
        ("--timestep_sampling sigmoid --sigmoid_scale 1.5", ("logit_normal", 0.0, 1.5, 1.0)),
        ("--timestep_sampling shift", ("logit_normal", 0.0, 1.0, 1.0)),
        ("--timestep_sampling shift --discrete_flow_shift 2.2", ("logit_normal", 0.0, 1.0, 2.2)),
        ("--timestep_sampling logsnr --logit_mean -6 --logit_std 2", ("logit_normal", 3.0, 1.0, 1.0)),
        ("--timestep_sampling qwen_shift", ("logit_normal", 0.0, 1.0, "resolution")),
    ],
)
def test_timesteps_that_are_the_same_here(flags: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    imported = command(tmp_path, "qwen_image_train_network", flags)
    assert drawn(imported.config) == expected
    assert line_of(imported, "timestep_sampling")[0] in ("mapped", "default")


def test_logsnr_draws_the_times_of_its_formula(tmp_path: Path) -> None:
    """t = sigmoid(-logsnr / 2) with a normal logsnr, arXiv:2411.14793."""
    imported = command(tmp_path, "qwen_image_train_network", "--timestep_sampling logsnr --logit_mean -6 --logit_std 2")
    times = flow_times(imported.config.flow, Shift())
    for share in (0.1, 0.5, 0.9):  # a high logsnr is a low time
        logsnr = NormalDist(-6, 2).inv_cdf(1 - share)
        assert times.at(share, (64, 64)) == pytest.approx(1 / (1 + math.exp(logsnr / 2)))


# (x1, y1, x2, y2) of get_lin_function in trainer_base.py, and latents' sides of a token.
LINES = {
    "qwen_shift": (256, 0.5, 8192, 0.9, 2),
    "flux_shift": (256, 0.5, 4096, 1.15, 2),
    "flux2_shift": (256, 0.5, 4096, 1.15, 1),
    "krea2_shift": (256, 0.5, 6400, 1.15, 2),
}


@pytest.mark.parametrize("family", SCRIPTS)
def test_a_shift_by_size_is_the_same_line_where_the_import_says_so(family: str, tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    for name, place in (("model_index", "model_index.json"), ("scheduler", "scheduler/scheduler_config.json")):
        (tmp_path / place).write_text(json.dumps(families()[family]["single_file"][name]), encoding="utf-8")
    own = FAMILIES[family].denoiser.make_process(tmp_path).times.shift
    found = {}
    for name, (x1, y1, x2, y2, side) in LINES.items():
        imported = command(tmp_path, f"{SCRIPTS[family]}_train_network", f"--timestep_sampling {name}")
        shift = flow_times(imported.config.flow, own).shift
        latents = [(64, 64), (128, 160)]  # FLUX.2's have half the sides there
        there = [(h // 2, w // 2) if family == "flux2" else (h, w) for h, w in latents]
        mus = [y1 + (y2 - y1) * ((h // side) * (w // side) - x1) / (x2 - x1) for h, w in there]
        is_same = [shift.of(size) for size in latents] == pytest.approx([math.exp(mu) for mu in mus])
        found[name] = line_of(imported, "timestep_sampling")[0]
        assert found[name] == ("mapped" if is_same else "changed"), name
    assert sorted(found.values()) == ["changed", "changed", "changed", "mapped"]


@pytest.mark.parametrize("name", ["flux_shift", "ideogram4_shift", "qinglong_flux", "qinglong_qwen"])
def test_other_timesteps_are_reported(name: str, tmp_path: Path) -> None:
    imported = command(tmp_path, "qwen_image_train_network", f"--timestep_sampling {name}")
    verdict, why = line_of(imported, "timestep_sampling")
    assert verdict == "changed"
    assert "the model's own scheduler" in why
    with pytest.raises(UsageError, match="timestep_sampling"):
        command(tmp_path, "qwen_image_train_network", "--timestep_sampling qwen")


def test_a_weighting_of_the_loss_is_reported_with_every_sampling(tmp_path: Path) -> None:
    for flags in ("", "--timestep_sampling shift"):
        imported = command(tmp_path, "qwen_image_train_network", f"--weighting_scheme cosmap {flags}")
        assert line_of(imported, "weighting_scheme") == ("changed", "without its weighting of the loss")


BLOCKS: dict[str, Callable[[str], bool]] = {  # target modules and exclude patterns of networks/lora_*.py
    "qwen_image": lambda name: name.startswith("transformer_blocks.") and "_mod." not in name,
    "z_image": lambda name: name.startswith("layers.") and "modulation" not in name,
    "flux": lambda name: name.startswith(("transformer_blocks.", "single_transformer_blocks.")) and "norm" not in name,
    "flux2": lambda name: name.startswith(("transformer_blocks.", "single_transformer_blocks.")) and "norm" not in name,
    "krea2": lambda name: True,
}


@pytest.mark.parametrize("family", SCRIPTS)
def test_the_layers_that_its_networks_train_learn_here(family: str, tmp_path: Path) -> None:
    imported = command(tmp_path, f"{SCRIPTS[family]}_train_network")
    transformer, spec = tiny_transformer(family), FAMILIES[family].denoiser
    unread = unread_modules(transformer) | set(spec.unread(transformer))
    linear = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)} - unread
    learned = target_modules(transformer, spec, imported.config.lora.target_modules)
    assert set(learned) == {name for name in linear if BLOCKS[family](name)}


@pytest.mark.parametrize(
    ("script", "flags", "flavor"),
    [
        ("qwen_image", "", "base"),
        ("qwen_image", "--model_version original", "base"),
        ("qwen_image", "--model_version edit-2511", "edit-2511"),
        ("qwen_image", "--edit", "edit"),
        ("qwen_image", "--edit_plus", "edit-2509"),
        ("qwen_image", "--model_version layered", None),
        ("flux_2", "--model_version klein-4b", "distilled"),
        ("flux_2", "--model_version klein-base-9b", "base"),
        ("flux_2", "", None),  # FLUX.2 dev, its default
        ("flux_kontext", "", "kontext"),
        ("zimage", "", None),
        ("krea2", "", None),
    ],
)
def test_flavors_of_models(script: str, flags: str, flavor: str | None, tmp_path: Path) -> None:
    imported = command(tmp_path, f"{script}_train_network", flags)
    assert imported.config.model.flavor == flavor
    assert Path(str(imported.config.model.path)).name == "a.safetensors"
    not_trained = [line.why for line in imported.lines if "not trained here" in line.why]
    assert bool(not_trained) == (script in ("flux_2", "qwen_image") and flavor is None)


@pytest.mark.parametrize("script", ["hv", "hv_1_5", "wan", "fpack", "kandinsky5"])
def test_video_models_are_refused(script: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a video model, which is not trained here") as refused:
        command(tmp_path, f"{script}_train_network")
    assert "Z-Image" in refused.value.problems[0].fix


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"network_module": "networks.lora"}, "HunyuanVideo"),
        ({"network_module": "networks.lora_wan"}, "Wan"),
        ({"network_module": "networks.loha", "t5": "t5.pth"}, "Wan"),
        ({"network_module": "networks.lora_ideogram4"}, "Ideogram 4"),
        ({"network_module": "networks.lora_hidream_o1"}, "HiDream-O1"),
    ],
)
def test_a_toml_tells_the_model_by_its_network_or_its_options(
    keys: dict[str, object], name: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"trains {name}"):
        job(tmp_path, **keys)


def lora_of(config: Config) -> tuple[str, int, float | None, int]:
    return config.lora.type, config.lora.rank, config.lora.alpha, config.lora.lokr_factor


def test_kinds_of_networks(tmp_path: Path) -> None:
    assert lora_of(job(tmp_path).config) == ("lora", 4, 1.0, -1)  # its defaults
    loha = job(tmp_path, network_module="networks.loha", network_dim=8, network_alpha=0)
    assert lora_of(loha.config) == ("loha", 8, Config().lora.alpha, -1)
    lokr = job(tmp_path, network_module="networks.lokr", network_dim=8, network_args=["factor=4"])
    assert lora_of(lokr.config) == ("lokr", 8, 1.0, 4)


def test_text_encoders_of_kontext_are_a_folder_with_both_files(tmp_path: Path) -> None:
    both = command(
        tmp_path, "flux_kontext_train_network", "--text_encoder1 te/t5.safetensors --text_encoder2 te/l.safetensors"
    )
    assert both.config.model.text_encoders == str(tmp_path / "te")
    apart = command(
        tmp_path, "flux_kontext_train_network", "--text_encoder1 a/t5.safetensors --text_encoder2 b/l.safetensors"
    )
    assert apart.config.model.text_encoders is None
    assert line_of(apart, "text_encoder2")[0] == "changed"


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names the config_file nowhere, which is not there"):
        command(tmp_path, "qwen_image_train_network", "--config_file nowhere")


def test_another_training_is_reported_and_kohyas_commands_are_no_jobs_of_it(tmp_path: Path) -> None:
    for script in ("qwen_image_train", "flux_2_train_network_self_flow"):
        assert line_of(command(tmp_path, script), "(script)")[0] == "changed"
    assert (
        command(tmp_path, "flux_train_network", "--ae a --network_dim 4 --max_train_steps 9").format == "kohya config"
    )
