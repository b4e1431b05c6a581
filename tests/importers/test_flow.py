"""Flow matching and text encoder settings of other programs, by their source code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.config.layers import Resolved
from lora_trainer.config.options import suited
from lora_trainer.config.schema import Config
from lora_trainer.importers.imported import Imported, import_file
from lora_trainer.models.families import FAMILIES
from tests.families.own import own_families
from tests.lora_format.tiny import tiny_transformer


def imported_text(folder: Path, name: str, text: str) -> Imported:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return import_file(path)


def kohya(folder: Path, **keys: object) -> Imported:
    start = {"pretrained_model_name_or_path": "m", "network_dim": 8, "learning_rate": 1e-4, **keys}
    return imported_text(folder, "k.toml", "".join(f"{key} = {json.dumps(value)}\n" for key, value in start.items()))


def drawn(config: Config) -> tuple[Any, ...]:
    """The distribution, its parameters, and the shift."""
    flow = config.flow
    numbers = {"uniform": (), "logit_normal": (flow.logit_mean, flow.logit_std), "mode": (flow.mode_scale,)}
    return (flow.timestep_sampling, *numbers[flow.timestep_sampling], flow.shift)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"ae": "ae.safetensors"}, ("uniform", 3.0)),  # its defaults: sigma, uniform, shift 3
        ({"timestep_sampling": "sigmoid", "sigmoid_scale": 1.5}, ("logit_normal", 0.0, 1.5, 1.0)),
        ({"timestep_sampling": "shift"}, ("logit_normal", 0.0, 1.0, 3.0)),
        ({"timestep_sampling": "shift", "discrete_flow_shift": 3.1582}, ("logit_normal", 0.0, 1.0, 3.1582)),
        ({"timestep_sampling": "flux_shift"}, ("logit_normal", 0.0, 1.0, "resolution")),
        ({"timestep_sampling": "uniform"}, ("uniform", 1.0)),
        # Timesteps are taken from the noisy end there, so the logit's mean has the other sign.
        (
            {"timestep_sampling": "sigma", "weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 0.8},
            ("logit_normal", -0.5, 0.8, 3.0),
        ),
        ({"timestep_sampling": "sigma", "weighting_scheme": "mode", "mode_scale": 1.1}, ("mode", 1.1, 3.0)),
        ({"clip_g": "g", "weighting_scheme": "logit_normal", "logit_mean": 0.5}, ("logit_normal", 0.5, 1.0, 1.0)),
        ({"clip_g": "g", "training_shift": 2.0}, ("uniform", 2.0)),
        ({"qwen3": "q"}, ("logit_normal", 0.0, 1.0, 1.0)),  # Anima's script has other defaults than FLUX.1's
        ({"network_module": "networks.lora_anima", "sigmoid_scale": 1.2}, ("logit_normal", 0.0, 1.2, 1.0)),
        ({"qwen3": "q", "timestep_sampling": "shift"}, ("logit_normal", 0.0, 1.0, 1.0)),
        ({"qwen3": "q", "timestep_sampling": "shift", "discrete_flow_shift": 3}, ("logit_normal", 0.0, 1.0, 3.0)),
    ],
)
def test_timesteps_of_kohya(keys: dict[str, object], expected: tuple[Any, ...], tmp_path: Path) -> None:
    imported = kohya(tmp_path, **keys)
    assert drawn(imported.config) == expected
    assert imported.config.lora.target_modules == "attention+ff"


def test_keys_of_kohyas_anima_script(tmp_path: Path) -> None:
    imported = kohya(
        tmp_path, qwen3="q", text_encoder_lr=1e-5, llm_adapter_path="a", t5_max_token_length=512, attn_mode="flash"
    )
    assert line_of(imported, "text_encoder_lr") == ("changed", "Anima's text encoder is not trained here")
    assert line_of(imported, "llm_adapter_path")[0] == line_of(imported, "qwen3")[0] == "changed"
    assert line_of(imported, "t5_max_token_length")[0] == line_of(imported, "attn_mode")[0] == "ignored"
    assert not imported.config.text_encoder.learning_rates


@pytest.mark.parametrize(
    ("arch", "verdict", "why"),
    [
        *(
            (arch, "ignored", "read from the model's files")
            for arch in ("flux_kontext", "flux2_klein_9b", "anima", "krea2", "qwen_image_edit_plus")
        ),
        ("flux2", "changed", "FLUX.2 klein is"),
        ("zimage_l2p", "changed", "Z-Image is"),
        ("hidream", "changed", "of model families that are not trained here"),
    ],
)
def test_architectures_of_ai_toolkit_are_known_or_refused_with_the_nearest(
    arch: str, verdict: str, why: str, tmp_path: Path
) -> None:
    found, reason = line_of(imported_text(tmp_path, "a.json", toolkit_job(arch)), "model.arch")
    assert found == verdict
    assert why in reason


def test_a_diffusion_config_of_kohya_reports_no_timesteps(tmp_path: Path) -> None:
    assert not {name for name in kohya(tmp_path).settings if name.startswith("flow.")}


def test_a_checkbox_of_the_gui_selects_the_family(tmp_path: Path) -> None:
    form = {"LoRA_type": "Flux1", "max_resolution": "512,512", "pretrained_model_name_or_path": "m"}
    form |= {"timestep_sampling": "shift", "discrete_flow_shift": 3.1582, "guidance_scale": 1, "ae": "a.safetensors"}
    on = imported_text(tmp_path, "g.json", json.dumps({**form, "flux1_checkbox": True}))
    assert drawn(on.config) == ("logit_normal", 0.0, 1.0, 3.1582)
    assert on.config.model.vae == str(tmp_path / "a.safetensors")
    off = imported_text(tmp_path, "g.json", json.dumps({**form, "LoRA_type": "Standard", "flux1_checkbox": False}))
    assert not {name for name in off.settings if name.startswith("flow.")}
    assert off.config.model.vae is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"timestep_distribution": "LOGIT_NORMAL", "noising_bias": 0.3}, ("logit_normal", 0.3, 1.0, 1.0)),
        ({"timestep_distribution": "LOGIT_NORMAL", "noising_weight": 0.5}, ("logit_normal", 0.0, 1.5, 1.0)),
        ({"timestep_distribution": "UNIFORM", "timestep_shift": 3.0}, ("uniform", 3.0)),
        ({"timestep_distribution": "HEAVY_TAIL", "noising_weight": 1.2}, ("mode", 1.2, 1.0)),
        ({"timestep_distribution": "UNIFORM", "dynamic_timestep_shifting": True}, ("uniform", "resolution")),
    ],
)
def test_timesteps_of_onetrainer(keys: dict[str, object], expected: tuple[Any, ...], tmp_path: Path) -> None:
    start = {"training_method": "LORA", "base_model_name": "m", "concepts": [{"path": "p"}], "model_type": "FLUX_DEV_1"}
    imported = imported_text(tmp_path, "o.json", json.dumps({**start, **keys}))
    assert drawn(imported.config) == expected
    other = imported_text(tmp_path, "o.json", json.dumps({**start, **keys, "model_type": "STABLE_DIFFUSION_15"}))
    assert not {name for name in other.settings if name.startswith("flow.")}


def test_timesteps_of_ai_toolkit_simpletuner_and_diffusers(tmp_path: Path) -> None:
    def toolkit(kind: str) -> Config:
        process = {
            "type": "sd_trainer",
            "model": {"name_or_path": "m", "arch": "flux"},
            "train": {"timestep_type": kind},
        }
        job = {"job": "extension", "config": {"name": "a", "process": [process]}}
        return imported_text(tmp_path, "a.json", json.dumps(job)).config

    assert drawn(toolkit("sigmoid")) == ("logit_normal", 0.0, 1.0, 1.0)
    assert drawn(toolkit("shift")) == drawn(toolkit("flux_shift")) == ("uniform", "model")
    assert drawn(toolkit("weighted")) == ("uniform", 1.0)

    def tuner(**keys: object) -> Config:
        start = {"model_family": "flux", "lora_type": "standard", "model_type": "lora"}
        return imported_text(tmp_path, "s.json", json.dumps({**start, **keys})).config

    assert drawn(tuner(flow_schedule_auto_shift=True)) == ("logit_normal", 0.0, 1.0, "resolution")
    assert drawn(tuner(flow_schedule_shift=2.0, flow_sigmoid_scale=0.5)) == ("logit_normal", 0.0, 0.5, 2.0)
    assert drawn(tuner(flow_use_uniform_schedule=True, flow_schedule_shift=0)) == ("uniform", 1.0)
    flags = "--pretrained_model_name_or_path=m --instance_data_dir=p --rank=8"
    for script, more, expected in (
        ("train_dreambooth_lora_flux", "", ("uniform", 1.0)),
        (
            "train_dreambooth_lora_sd3",
            "--weighting_scheme=logit_normal --logit_mean=1",
            ("logit_normal", -1.0, 1.0, "model"),
        ),
    ):
        command = f"accelerate launch {script}.py {flags} {more}\n"
        assert drawn(imported_text(tmp_path, "d.sh", command).config) == expected


def toolkit_job(arch: str, **train: object) -> str:
    process = {"type": "sd_trainer", "model": {"name_or_path": "m", "arch": arch}, "train": train}
    return json.dumps({"job": "extension", "config": {"name": "a", "process": [process]}})


def tuner(family: str, **keys: object) -> str:
    return json.dumps({"model_family": family, "lora_type": "standard", "model_type": "lora", **keys})


def one_trainer(kind: str, **keys: object) -> str:
    start = {"training_method": "LORA", "base_model_name": "m", "concepts": [{"path": "p"}], "model_type": kind}
    return json.dumps({**start, **keys})


def script(family: str, flags: str = "") -> str:
    paths = "--pretrained_model_name_or_path=m --instance_data_dir=p --rank=8"
    return f"accelerate launch train_dreambooth_lora_{family}.py {paths} {flags}\n"


def line_of(imported: Imported, key: str) -> tuple[str, str]:
    (found,) = [line for line in imported.lines if line.key == key]
    return found.verdict, found.why


def test_one_weighting_of_kohyas_is_followed_and_none_for_a_flow(tmp_path: Path) -> None:
    debiased, scaled = "debiased_estimation_loss", "scale_v_pred_loss_like_noise_pred"
    assert kohya(tmp_path, **{debiased: True}).config.loss.weighting == "debiased"
    assert kohya(tmp_path, **{scaled: True, debiased: False}).config.loss.weighting == "v_as_epsilon"
    both = kohya(tmp_path, **{scaled: True, debiased: True})
    assert both.config.loss.weighting == "debiased"
    assert line_of(both, scaled)[0] == "changed"
    of_snr = kohya(tmp_path, min_snr_gamma=5, **{debiased: True})
    assert (of_snr.config.loss.weighting, line_of(of_snr, debiased)[0]) == ("min_snr", "changed")
    of_flow = kohya(tmp_path, clip_g="g", **{debiased: True})
    assert (of_flow.config.loss.weighting, line_of(of_flow, debiased)[0]) == ("min_snr", "ignored")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", toolkit_job("flux"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("a.json", toolkit_job("zimage"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("a.json", toolkit_job("qwen_image:2512"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("a.json", toolkit_job("krea2"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("a.json", toolkit_job("qwen_image_edit_plus"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("s.json", tuner("krea2"), ("logit_normal", 0.0, 1.0, 3.0)),
        ("s.json", tuner("anima"), ("logit_normal", 0.0, 1.0, 3.0)),
        ("o.json", one_trainer("ANIMA"), ("uniform", 1.0)),
        ("a.json", toolkit_job("qwen_image_2"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("a.json", toolkit_job("flux", linear_timesteps=True), ("uniform", 1.0)),
        ("a.json", toolkit_job("flux2_klein_4b"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("a.json", toolkit_job("anima"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("a.json", toolkit_job("chroma"), ("logit_normal", 0.0, 1.0, 1.0)),
        ("o.json", one_trainer("CHROMA_1"), ("uniform", 1.0)),
        ("s.json", tuner("flux2"), ("logit_normal", 0.0, 1.0, 3.0)),
        ("o.json", one_trainer("FLUX_2"), ("uniform", 1.0)),
        ("d.sh", script("flux2_klein"), ("uniform", 1.0)),
        ("s.json", tuner("flux"), ("logit_normal", 0.0, 1.0, 3.0)),
        ("s.json", tuner("z_image", flow_schedule_auto_shift=True), ("logit_normal", 0.0, 1.0, "resolution")),
        ("s.json", tuner("qwen_image"), ("logit_normal", 0.0, 1.0, 3.0)),
        ("o.json", one_trainer("Z_IMAGE"), ("uniform", 1.0)),
        ("o.json", one_trainer("QWEN"), ("uniform", 1.0)),
        ("o.json", one_trainer("KREA_2"), ("uniform", 1.0)),
        ("d.sh", script("sd3"), ("logit_normal", 0.0, 1.0, "model")),
        ("d.sh", script("z_image"), ("uniform", "model")),
        ("d.sh", script("qwen_image"), ("uniform", "model")),
        ("d.sh", script("krea2"), ("uniform", "model")),
    ],
)
def test_default_timestep_sampling_of_each_program(
    name: str, text: str, expected: tuple[Any, ...], tmp_path: Path
) -> None:
    assert drawn(imported_text(tmp_path, name, text).config) == expected


@pytest.mark.parametrize(
    "text", [toolkit_job("sdxl"), tuner("sdxl"), one_trainer("STABLE_DIFFUSION_15"), script("sdxl")]
)
def test_no_timesteps_are_reported_for_a_diffusion_model(text: str, tmp_path: Path) -> None:
    name = "d.sh" if text.startswith("accelerate") else "x.json"
    assert not {each for each in imported_text(tmp_path, name, text).settings if each.startswith("flow.")}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (toolkit_job("zimage", min_snr_gamma=5, noise_offset=0.1), "changed"),
        (tuner("z_image", snr_gamma=5, offset_noise=True, noise_offset=0.1), "ignored"),
        (one_trainer("Z_IMAGE", loss_weight_fn="MIN_SNR_GAMMA", offset_noise_weight=0.1), "changed"),
    ],
)
def test_diffusion_only_options_are_skipped_for_a_flow_model(text: str, verdict: str, tmp_path: Path) -> None:
    """A config that kept it could not be trained: users get an error for it."""
    imported = imported_text(tmp_path, "x.json", text)
    config = imported.config
    assert (config.loss.min_snr_gamma, config.noise.offset) == (None, 0.0)
    assert suited(Resolved(config, dict(imported.origin)), "flow").config == config
    of_diffusion = [
        line for line in imported.lines if "snr" in line.key or "offset" in line.key or "weight_fn" in line.key
    ]
    assert {line.verdict for line in of_diffusion if line.key != "noise_offset"} == {verdict}
    assert not any("not trained here" in line.why for line in imported.lines), "it is a family of this program"


def test_kohyas_scripts_for_flows_read_no_noise_options(tmp_path: Path) -> None:
    options = {"min_snr_gamma": 5, "noise_offset": 0.05, "multires_noise_iterations": 6}
    for mark in ({"ae": "a"}, {"clip_g": "g"}):
        imported = kohya(tmp_path, **mark, **options)
        assert (imported.config.loss.min_snr_gamma, imported.config.noise.multires_iterations) == (None, 0)
        assert {line_of(imported, key)[0] for key in options} == {"ignored"}
    assert kohya(tmp_path, **options).config.loss.min_snr_gamma == 5.0


def test_a_loss_of_clean_latents_is_reported_unless_its_weighting_undoes_it(tmp_path: Path) -> None:
    """kohya's script for SD3, and diffusers' by default, multiply the velocity error by the time."""
    assert "by its square" in line_of(kohya(tmp_path, clip_g="g"), "weighting_scheme")[1]
    assert line_of(kohya(tmp_path, clip_g="g", weighting_scheme="sigma_sqrt"), "weighting_scheme") == ("mapped", "")
    assert line_of(kohya(tmp_path, clip_g="g", weighting_scheme="cosmap"), "weighting_scheme")[0] == "changed"
    for flags, squared in (("", True), ("--precondition_outputs=0", False), ("--weighting_scheme=sigma_sqrt", False)):
        imported = imported_text(tmp_path, "d.sh", script("sd3", flags))
        assert ("by its square" in line_of(imported, "weighting_scheme")[1]) == squared, flags


def test_other_defaults_of_diffusers_scripts_for_flows(tmp_path: Path) -> None:
    found = {family: imported_text(tmp_path, "d.sh", script(family)) for family in ("sd3", "flux", "z_image")}
    for imported in found.values():
        assert imported.config.optimizer.learning_rate == imported.config.optimizer.weight_decay == 1e-4
    assert found["sd3"].config.text_encoder.max_sequence_length == 77
    assert line_of(found["flux"], "guidance_scale")[0] == "changed", "3.5 there"
    assert "guidance_scale" not in {line.key for line in found["z_image"].lines}
    assert found["z_image"].config.lora.target_modules == "attention"
    klein = imported_text(tmp_path, "d.sh", script("flux2_klein", "--guidance_scale=3.5"))
    assert line_of(klein, "guidance_scale") == ("ignored", "as here")
    transformer = tiny_transformer("flux2")
    learned = target_modules(transformer, FAMILIES["flux2"].denoiser, klein.config.lora.target_modules)
    assert len(learned) == 2 * 4 + 2 * 2, "no layers of the text in double blocks"
    krea2 = imported_text(tmp_path, "d.sh", script("krea2")).config
    assert (krea2.optimizer.learning_rate, krea2.lora.alpha) == (3e-4, 32.0)
    assert len(target_modules(tiny_transformer("krea2"), FAMILIES["krea2"].denoiser, krea2.lora.target_modules)) == 36
    streams = imported_text(tmp_path, "d.sh", script("qwen_image")).config.lora.target_modules
    learned = target_modules(tiny_transformer("qwen_image"), FAMILIES["qwen_image"].denoiser, streams)
    assert {name.partition(".attn.")[2] for name in learned} == {"to_q", "to_k", "to_v", "to_out.0"}
    transformer = tiny_transformer("flux")
    learned = target_modules(transformer, FAMILIES["flux"].denoiser, found["flux"].config.lora.target_modules)
    suffixes = "attn.to_k attn.to_q attn.to_v attn.to_out.0 attn.add_k_proj attn.add_q_proj attn.add_v_proj".split()
    suffixes += "attn.to_add_out ff.net.0.proj ff.net.2 ff_context.net.0.proj ff_context.net.2".split()
    assert set(learned) == {name for name, _ in transformer.named_modules() if name.endswith(tuple(suffixes))}


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({}, (1e-4,)),  # trained by default
        ({"text_encoder_lr": 5e-5}, (5e-5,)),
        ({"text_encoder_lr": 5e-5, "sdxl": True}, (5e-5, 5e-5)),
        ({"text_encoder_lr": [5e-5, 1e-5], "sdxl": True}, (5e-5, 1e-5)),
        ({"text_encoder_lr": 5e-5, "network_train_unet_only": True}, ()),
        ({"text_encoder_lr": 0}, ()),
        ({"cache_text_encoder_outputs": True}, ()),
        ({"ae": "a", "text_encoder_lr": [5e-5, 1e-5]}, (5e-5,)),
        ({"ae": "a", "text_encoder_lr": [5e-5, 1e-5], "network_args": ["train_t5xxl=True"]}, (5e-5, 1e-5)),
        ({"ae": "a", "text_encoder_lr": 5e-5, "network_args": ["train_t5xxl=True"]}, (5e-5, 5e-5)),
        # of SD3: the last learning rate of a short list applies to the rest
        ({"t5xxl": "t", "clip_g": "g", "text_encoder_lr": [5e-5, 1e-5]}, (5e-5, 1e-5)),
        (
            {"t5xxl": "t", "clip_g": "g", "text_encoder_lr": [5e-5, 1e-5], "network_args": ["train_t5xxl=True"]},
            (5e-5, 1e-5, 1e-5),
        ),
    ],
)
def test_learning_rates_of_kohyas_text_encoders(
    keys: dict[str, object], rates: tuple[float, ...], tmp_path: Path
) -> None:
    config = kohya(tmp_path, network_alpha=4, **keys).config
    assert config.text_encoder.learning_rates == rates
    assert config.text_encoder.lora_alpha == (4.0 if rates else None)


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"flux1_checkbox": True, "train_t5xxl": True, "t5xxl_lr": 1e-5}, (5e-5, 1e-5)),
        ({"flux1_checkbox": True, "train_t5xxl": True, "t5xxl_lr": 0}, (5e-5, 5e-5)),
        ({"flux1_checkbox": True, "train_t5xxl": False, "t5xxl_lr": 1e-5}, (5e-5,)),
        ({"sd3_checkbox": True, "train_t5xxl": True, "t5xxl_lr": 1e-5}, (5e-5, 1e-5)),  # for CLIP's second there
        ({"train_t5xxl": True, "t5xxl_lr": 1e-5}, (5e-5,)),
    ],
)
def test_learning_rate_of_t5_in_the_gui(keys: dict[str, object], rates: tuple[float, ...], tmp_path: Path) -> None:
    start = {"LoRA_type": "Flux1", "max_resolution": "512,512", "noise_offset_type": "Original", "lr_warmup": 0}
    start |= {"pretrained_model_name_or_path": "m", "train_data_dir": "p", "text_encoder_lr": 5e-5}
    assert imported_text(tmp_path, "g.json", json.dumps({**start, **keys})).config.text_encoder.learning_rates == rates


@pytest.mark.parametrize(
    ("model", "rates"),
    [
        ("STABLE_DIFFUSION_15", (1e-5,)),  # its file has switches of four text encoders, all on by themselves
        ("STABLE_DIFFUSION_XL_10_BASE", (1e-5, 2e-5)),
        ("STABLE_DIFFUSION_35", (1e-5, 2e-5, 3e-5)),
        ("FLUX_DEV_1", (1e-5, 2e-5)),
        ("FLUX_2", ()),
        ("CHROMA_1", ()),
        ("Z_IMAGE", ()),
        ("QWEN", ()),
        ("KREA_2", ()),
    ],
)
def test_learning_rates_of_onetrainers_text_encoders(model: str, rates: tuple[float, ...], tmp_path: Path) -> None:
    start: dict[str, object] = {"training_method": "LORA", "base_model_name": "m", "concepts": [], "model_type": model}
    names = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
    parts = {name: {"train": True, "learning_rate": float(f"{number}e-5")} for number, name in enumerate(names, 1)}
    assert imported_text(tmp_path, "o.json", json.dumps({**start, **parts})).config.text_encoder.learning_rates == rates
    parts["text_encoder_3"]["include"] = False
    left = imported_text(tmp_path, "o.json", json.dumps({**start, **parts})).config.text_encoder.learning_rates
    assert left == rates[:2]


def test_options_of_text_encoders(tmp_path: Path) -> None:
    text = kohya(tmp_path, clip_skip=2, max_token_length=225).config.text_encoder
    assert (text.clip_skip, text.max_tokens) == (2, 225)
    assert kohya(tmp_path, clip_skip=1, max_token_length=75).config.text_encoder.clip_skip is None
    start = {"training_method": "LORA", "base_model_name": "m", "concepts": [], "text_encoder_layer_skip": 1}
    for kind, layers in (("STABLE_DIFFUSION_15", 2), ("STABLE_DIFFUSION_XL_10_BASE", 3)):
        imported = imported_text(tmp_path, "o.json", json.dumps({**start, "model_type": kind}))
        assert imported.config.text_encoder.clip_skip == layers


@pytest.mark.parametrize(
    ("written", "verdict", "expected"),
    [
        ("there.safetensors", "mapped", "a single checkpoint"),
        ("gone.safetensors", "changed", "there is no such folder or file here"),
        ("old.ckpt", "changed", "it is a pickle"),
        ("owner/name", "mapped", "a model of a hub"),
    ],
)
def test_bases(written: str, verdict: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "there.safetensors").write_bytes(b"")
    imported = kohya(tmp_path, pretrained_model_name_or_path=written)
    line = next(line for line in imported.lines if line.key == "pretrained_model_name_or_path")
    assert line.verdict == verdict
    assert expected in line.why


def test_control_folders_of_ai_toolkit_become_control_images(tmp_path: Path) -> None:
    text = """
job: extension
config:
  name: edit
  process:
    - type: sd_trainer
      model: {name_or_path: m, arch: flux_kontext, is_flux: true}
      train: {steps: 10, batch_size: 1}
      network: {type: lora, linear: 16, linear_alpha: 16}
      datasets:
        - {folder_path: after, control_path: [before, mask], control_path_1: depth}
"""
    config = imported_text(tmp_path, "edit.yaml", text).config
    names = [Path(place).name for place in config.data.sources[0].control_images]
    assert names == ["depth"]  # numbered folders replace the one without a number


# Each family's names in ai-toolkit, SimpleTuner and OneTrainer; none where that program lacks it.
NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "sd15": (("sd1",), ("sd1x",), ("STABLE_DIFFUSION_15",)),
    "sd2": (("sd2",), ("sd2x",), ("STABLE_DIFFUSION_20", "STABLE_DIFFUSION_21_BASE")),
    "sdxl": (("sdxl",), ("sdxl",), ("STABLE_DIFFUSION_XL_10_BASE",)),
    "sd3": (("sd3",), ("sd3",), ("STABLE_DIFFUSION_3", "STABLE_DIFFUSION_35")),
    "flux": (("flux", "flux_kontext"), ("flux",), ("FLUX_DEV_1",)),
    "flux2": (("flux2_klein_4b", "flux2_klein_9b"), ("flux2",), ("FLUX_2",)),
    "chroma": (("chroma",), ("chroma",), ("CHROMA_1",)),
    "z_image": (("zimage", "zimage:turbo"), ("z_image",), ("Z_IMAGE",)),
    "qwen_image": (("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"), ("qwen_image",), ("QWEN",)),
    "qwen_image21": (("qwen_image_2",), (), ()),
    "krea2": (("krea2",), ("krea2",), ("KREA_2",)),
    "anima": (("anima",), ("anima",), ("ANIMA",)),
    **{name: own.OTHER_TRAINERS for name, own in own_families().items()},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_imported_by_the_names_of_other_programs(family: str, tmp_path: Path) -> None:
    of_aitoolkit, of_simpletuner, of_onetrainer = NAMES[family]
    jobs = [
        *(("arch", {"config": {"process": [{"model": {"arch": name}}]}}) for name in of_aitoolkit),
        *(("model_family", {"model_family": name, "model_type": "lora"}) for name in of_simpletuner),
        *(
            ("model_type", {"model_type": name, "training_method": "LORA", "concepts": [], "base_model_name": "m"})
            for name in of_onetrainer
        ),
    ]
    for key, document in jobs:
        imported = imported_text(tmp_path, "job.json", json.dumps(document))
        (line,) = [line for line in imported.lines if line.key.rpartition(".")[2] == key and line.value != "lora"]
        assert (line.verdict, line.why) == ("ignored", "read from the model's files"), document
