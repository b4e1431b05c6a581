"""What an import says of a key is so: each key has one verdict, and what changes the training is never called harmless.

The expected values follow the programs' own code: sd-scripts 48d368f, kohya_ss 45088f0, ai-toolkit 27a03a9, SimpleTuner
bc8e6ab, OneTrainer 23df383, diffusers 58eb52c, musubi-tuner 30c658c.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.importers import (
    aitoolkit,
    diffusers_flags,
    kohya,
    kohya_gui,
    musubi,
    onetrainer,
    onetrainer_concepts,
    rules,
    simpletuner,
)
from lora_trainer.importers.imported import Imported, import_file
from lora_trainer.importers.reading import KeyRule

UNUSED = Path(rules.__file__).with_name("unused_keys.toml")
TABLES: Mapping[str, Mapping[str, KeyRule]] = {
    "kohya": kohya.RULES,
    "musubi-tuner": musubi.RULES,
    "kohya GUI": kohya_gui.RULES_OF_GUI,
    "kohya GUI, flow matching": kohya_gui.RULES_OF_GUI,
    "ai-toolkit": aitoolkit.RULES,
    "ai-toolkit datasets": aitoolkit.DATASET_RULES,
    "SimpleTuner": simpletuner.RULES,
    "SimpleTuner datasets": simpletuner.BACKEND_RULES,
    "OneTrainer": onetrainer.RULES,
    "OneTrainer concepts, images": onetrainer_concepts.CONCEPT_RULES,
    "OneTrainer concepts, captions": onetrainer_concepts.CONCEPT_RULES,
    "diffusers": diffusers_flags.RULES,
}


@pytest.mark.parametrize("program", TABLES)
def test_each_key_has_one_verdict(program: str) -> None:
    rows = tomllib.loads(UNUSED.read_text("utf-8"))[program]
    parts = [(row, [f"{part}." for part in row.get("under", ())] or [""]) for row in rows]
    names = [f"{part}{name}" for row, befores in parts for part in befores for name in row["names"].split()]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    for name, rule in rules.unused_keys(program).items():
        used = TABLES[program][name]
        assert (used.verdict, used.ours, used.why) == (rule.verdict, rule.ours, rule.why), name


def test_every_program_has_its_table() -> None:
    assert set(tomllib.loads(UNUSED.read_text("utf-8"))) - {"reasons"} == set(TABLES)


def read(folder: Path, program: str, keys: Mapping[str, Any]) -> Imported:
    """A config of the program with these keys; a dot is a table in a table."""
    starts: dict[str, dict[str, Any]] = {
        "kohya": {"pretrained_model_name_or_path": "m", "train_data_dir": "p", "network_dim": 8},
        "GUI": {"LoRA_type": "Standard", "max_resolution": "512,512", "train_data_dir": "p"},
        "SimpleTuner": {"model_family": "sdxl", "model_type": "lora", "lora_type": "standard"},
        "OneTrainer": {"training_method": "LORA", "base_model_name": "m"},
        "ai-toolkit": {"type": "sd_trainer"},
    }
    document: dict[str, Any] = dict(starts.get(program, {}))
    for name, value in keys.items():
        *above, key = name.split(".")
        place = document
        for part in above:
            place = place.setdefault(part, {})
        place[key] = value
    if program == "ai-toolkit":
        document = {"job": "extension", "config": {"name": "a", "process": [document]}}
    text = json.dumps(document)
    if program == "diffusers":
        flags = {"pretrained_model_name_or_path": "m", "instance_data_dir": "p", "instance_prompt": "a", **keys}
        text = "train_dreambooth_lora.py " + " ".join(f"--{name}={value}" for name, value in flags.items())
    path = folder / "config.json"
    path.write_text(text, encoding="utf-8")
    return import_file(path)


def value_at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


MAPPED: list[tuple[str, dict[str, Any], str, Any]] = [
    ("kohya", {"save_every_n_steps": 10, "save_last_n_steps": 30}, "checkpoint.export_keep_last", 4),
    ("kohya", {"save_every_n_steps": 10, "save_last_n_steps": 25}, "checkpoint.export_keep_last", 3),
    ("kohya", {"save_every_n_steps": 10, "save_last_n_steps": 5}, "checkpoint.export_keep_last", 1),
    ("kohya", {"fp8_base_unet": True}, "memory.weight_dtype", "fp8"),
    ("kohya", {"optimizer": "Lion"}, "optimizer.name", "lion"),
    ("kohya", {"max_resolution": "768,768"}, "data.resolution", 768),
    ("kohya", {"sample_prompts": "a cat --n blurry, dark --w 512"}, "sample.negative_prompt", "blurry, dark"),
    ("GUI", {"train_batch_size": 2, "num_processes": 4, "num_machines": 2}, "train.effective_batch_size", 8),
    ("ai-toolkit", {"network.pretrained_lora_path": "/l.safetensors"}, "lora.network_weights", "/l.safetensors"),
    ("ai-toolkit", {"model.lora_path": "/l.safetensors"}, "model.loras", {"/l.safetensors": 1.0}),
    ("ai-toolkit", {"sample.neg": "blurry"}, "sample.negative_prompt", "blurry"),
    ("ai-toolkit", {"sample.samples": [{"prompt": "a", "neg": "b"}]}, "sample.negative_prompt", "b"),
    ("ai-toolkit", {"sample.network_multiplier": 0.5}, "sample.strengths", (0.5,)),
    ("ai-toolkit", {"model.quantize": True, "model.qtype": "qint8"}, "memory.weight_dtype", "int8"),
    (
        "ai-toolkit",
        {"model.name_or_path": "m.safetensors", "model.is_v_pred": True},
        "model.prediction_type",
        "v_prediction",
    ),
    ("SimpleTuner", {"init_lora": "/l.safetensors"}, "lora.network_weights", "/l.safetensors"),
    ("SimpleTuner", {"validation_negative_prompt": "blurry"}, "sample.negative_prompt", "blurry"),
    ("SimpleTuner", {"validation_disable": True}, "sample.every_n_steps", 0),
    ("SimpleTuner", {"pretrained_model_name_or_path": "a/b", "revision": "r1"}, "model.revision", "r1"),
    ("SimpleTuner", {"model_family": "flux", "tokenizer_max_length": 256}, "text_encoder.max_sequence_length", 256),
    ("OneTrainer", {"lora_model_name": "/l.safetensors"}, "lora.network_weights", "/l.safetensors"),
    ("OneTrainer", {"samples": [{"prompt": "a", "negative_prompt": "b"}]}, "sample.negative_prompt", "b"),
    ("OneTrainer", {"batch_size": 2, "multi_gpu": True, "device_indexes": "0,1,2"}, "train.effective_batch_size", 6),
    ("OneTrainer", {"model_type": "FLUX_DEV_1", "transformer.weight_dtype": "NFLOAT_4"}, "memory.weight_dtype", "nf4"),
    (
        "OneTrainer",
        {"model_type": "FLUX_DEV_1", "text_encoder_2_sequence_length": 77},
        "text_encoder.max_sequence_length",
        77,
    ),
    ("OneTrainer", {"model_type": "STABLE_DIFFUSION_35", "text_encoder_3.include": False}, "model.without_t5", True),
    (
        "diffusers",
        {"train_batch_size": 2, "gradient_accumulation_steps": 3, "num_processes": 2},
        "train.effective_batch_size",
        12,
    ),
    ("diffusers", {"revision": "r1"}, "model.revision", "r1"),
]


@pytest.mark.parametrize(("program", "keys", "setting", "value"), MAPPED)
def test_a_key_sets_what_it_means(program: str, keys: dict[str, Any], setting: str, value: Any, tmp_path: Path) -> None:
    assert value_at(read(tmp_path, program, keys).config, setting) == value


# Keys that train otherwise there, and the values of them that do not.
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("kohya", {"optimizer_args": ["decouple=False"]}, {"optimizer_args": ["decouple=True"]}),
    ("kohya", {"optimizer_args": ["d_coef=2"]}, {"optimizer_args": ["d_coef=1.0"]}),
    (
        "GUI",
        {"LoRA_type": "LyCORIS/LoCon", "LyCORIS_preset": "attn-mlp"},
        {"LoRA_type": "Standard", "LyCORIS_preset": "attn-mlp"},
    ),
    (
        "GUI",
        {"LoRA_type": "Flux1", "flux1_checkbox": True, "split_mode": True},
        {"LoRA_type": "Standard", "split_mode": True},
    ),
    ("GUI", {"flux1_checkbox": True, "split_qkv": False}, {"flux1_checkbox": True, "split_qkv": True}),
    ("GUI", {"sd3_checkbox": True, "sd3_clip_l": "c.safetensors"}, {"sd3_clip_l": "c.safetensors"}),
    (
        "ai-toolkit",
        {"train.unload_text_encoder": True},
        {"train.cache_text_embeddings": True, "train.unload_text_encoder": True},
    ),
    ("ai-toolkit", {"model.arch": "flux", "model.attn_masking": True}, {"model.attn_masking": False}),
    ("ai-toolkit", {"model.arch": "flux", "network.transformer_only": False}, {"network.transformer_only": True}),
    ("ai-toolkit", {"model.quantize": True, "model.qtype": "uint4"}, {"model.quantize": True, "model.qtype": "float8"}),
    ("ai-toolkit", {"model.quantize_te": True}, {"model.quantize_te": False}),
    ("ai-toolkit", {"train.noise_multiplier": 0}, {"train.noise_multiplier": 1.0}),
    ("SimpleTuner", {"ema_update_interval": 10}, {"ema_update_interval": 1}),
    ("SimpleTuner", {"t5_padding": "zero"}, {"t5_padding": "unmodified"}),
    ("SimpleTuner", {"model_flavour": "dev"}, {"pretrained_model_name_or_path": "a/b", "model_flavour": "dev"}),
    ("SimpleTuner", {"resume_from_checkpoint": "checkpoint-5"}, {"resume_from_checkpoint": "latest"}),
    (
        "SimpleTuner",
        {"train_batch_size": 2, "disable_segmented_timestep_sampling": False},
        {"disable_segmented_timestep_sampling": True},
    ),
    ("OneTrainer", {"ema": "GPU", "ema_update_step_interval": 5}, {"ema": "OFF", "ema_update_step_interval": 5}),
    ("OneTrainer", {"optimizer.eps": 1e-6}, {"optimizer.eps": 1e-8}),
    ("OneTrainer", {"optimizer.decouple": False}, {"optimizer.decouple": True}),
    ("OneTrainer", {"optimizer.fused_back_pass": True}, {"optimizer.fused_back_pass": False}),
    ("OneTrainer", {"unet.train": False}, {"unet.train": True}),
    ("OneTrainer", {"model_type": "FLUX_DEV_1", "transformer.train": False}, {"transformer.train": False}),
    (
        "OneTrainer",
        {"model_type": "FLUX_DEV_1", "transformer.guidance_scale": 3.5},
        {"transformer.guidance_scale": 1.0},
    ),
    ("OneTrainer", {"transformer.attention_mask": True}, {"transformer.attention_mask": False}),
    (
        "OneTrainer",
        {"unet.stop_training_after_unit": "EPOCH", "unet.stop_training_after": 30},
        {"unet.stop_training_after_unit": "NEVER", "unet.stop_training_after": 30},
    ),
    (
        "OneTrainer",
        {"text_encoder.stop_training_after_unit": "STEP", "text_encoder.stop_training_after": 30},
        {"text_encoder.stop_training_after": 30},
    ),
    ("OneTrainer", {"text_encoder.weight_dtype": "NFLOAT_4"}, {"text_encoder.weight_dtype": "FLOAT_32"}),
    ("OneTrainer", {"text_encoder_2.dropout_probability": 0.1}, {"text_encoder_2.dropout_probability": 0.0}),
    ("OneTrainer", {"lora_weight_dtype": "BFLOAT_16"}, {"lora_weight_dtype": "FLOAT_32"}),
    ("OneTrainer", {"continue_last_backup": True}, {"continue_last_backup": False}),
    ("OneTrainer", {"mse_strength": 0.0}, {"mse_strength": 1.0}),
    ("OneTrainer", {"multi_gpu": True, "batch_size": 2}, {"multi_gpu": False, "batch_size": 2}),
    ("diffusers", {"adam_epsilon": "1e-6"}, {"adam_epsilon": "1e-8"}),
    ("diffusers", {"image_interpolation_mode": "nearest"}, {"image_interpolation_mode": "lanczos"}),
    ("diffusers", {"tokenizer_name": "t"}, {"tokenizer_max_length": 77}),
    ("diffusers", {"resume_from_checkpoint": "checkpoint-5"}, {"resume_from_checkpoint": "latest"}),
    ("diffusers", {"text_encoder_use_attention_mask": True}, {"text_encoder_use_attention_mask": False}),
]


def verdict_of(imported: Imported, key: str) -> str:
    """The verdict of a key, or of an option in its list."""
    return next(line.verdict for line in imported.lines if line.key == key or line.key.startswith(f"{key}."))


@pytest.mark.parametrize(("program", "on", "off"), CHANGES)
def test_what_changes_the_training_is_never_called_harmless(
    program: str, on: dict[str, Any], off: dict[str, Any], tmp_path: Path
) -> None:
    changing, harmless = [*on][-1], [*off][-1]
    if harmless == "model.qtype":  # read by another key
        changing = harmless = "model.quantize"
    assert verdict_of(read(tmp_path, program, on), changing) == "changed"
    assert verdict_of(read(tmp_path, program, off), harmless) in ("ignored", "mapped")


def test_a_config_with_names_of_the_gui_keeps_its_optimizer_and_resolution(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    own = {"pretrained_model_name_or_path": "m", "train_data_dir": "p", "output_dir": "o", "network_dim": 16}
    path.write_text(json.dumps({**own, "max_resolution": "1024,1024", "optimizer": "Prodigy"}), encoding="utf-8")
    imported = import_file(path)
    assert (imported.config.optimizer.name, imported.config.data.resolution) == ("prodigy", 1024)
    assert not [line for line in imported.lines if line.verdict == "unknown"]


@pytest.mark.parametrize(
    ("attributes", "verdict"),
    [
        ("{diff_output_preservation = true}", "changed"),
        ("{diff_output_preservation = false}", "ignored"),
        ("{a = 1}", "ignored"),
    ],
)
def test_output_preservation_of_kohya(attributes: str, verdict: str, tmp_path: Path) -> None:
    path = tmp_path / "data.toml"
    path.write_text(
        f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\ncustom_attributes = {attributes}\n', encoding="utf-8"
    )
    assert verdict_of(import_file(path), "datasets[0].subsets[0].custom_attributes") == verdict


@pytest.mark.parametrize(
    ("image", "text", "config", "crops", "captions"),
    [
        ({}, {}, {}, 3, 8),  # crop jitter is on by default there
        ({}, {}, {"latent_caching": False}, 4, 8),
        ({"enable_crop_jitter": False}, {}, {}, 4, 8),
        ({}, {"enable_tag_shuffling": True}, {"text_encoder": {"train": False}}, 3, 5),
        ({}, {"enable_tag_shuffling": True}, {}, 3, 8),  # a text encoder that learns reads texts anew each time
    ],
)
def test_versions_that_onetrainer_caches(
    image: dict[str, Any], text: dict[str, Any], config: dict[str, Any], crops: int, captions: int, tmp_path: Path
) -> None:
    concept = {"path": "p", "image_variations": 3, "text_variations": 5, "image": image, "text": text}
    found = read(tmp_path, "OneTrainer", {**config, "concepts": [concept]}).config
    assert (found.data.crop_variants, found.captions.variants) == (crops, captions)


def test_the_launchers_processes_count_into_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    flags = "--instance_data_dir=p --instance_prompt=a --train_batch_size=2 --rank=4"
    path.write_text(f"accelerate launch --num_processes=4 train_dreambooth_lora.py {flags}\n", encoding="utf-8")
    assert import_file(path).config.train.effective_batch_size == 8


def test_datasets_without_a_strategy_have_that_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps([{"id": "a", "instance_data_dir": "a"}]), encoding="utf-8")
    keys = {"data_backend_config": "b.json", "caption_strategy": "textfile"}
    assert read(tmp_path, "SimpleTuner", keys).config.captions.extension == ".txt"


def test_regularization_images_of_weight_0_are_left_out(tmp_path: Path) -> None:
    """They train nothing in the other program; here a weight of 0 beside them is refused."""
    config = tmp_path / "config.toml"
    text = "train_data_dir = 'cats'\nreg_data_dir = 'reg'\nprior_loss_weight = 0\n"
    config.write_text(text, encoding="utf-8")
    settings = import_file(config).settings
    assert [source["path"] for source in settings["data.sources"]] == [str(tmp_path / "cats")]
    assert "loss.prior_loss_weight" not in settings
