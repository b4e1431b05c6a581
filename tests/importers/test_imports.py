"""Configs of other trainers: each key is accounted for, and the imported config trains like theirs."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.errors import UsageError
from lora_trainer.importers import (
    aitoolkit,
    diffusers_flags,
    kohya,
    kohya_dataset,
    kohya_gui,
    musubi,
    onetrainer,
    onetrainer_concepts,
    simpletuner,
)
from lora_trainer.importers.imported import Imported, as_toml, finished, import_file
from lora_trainer.importers.reading import KeyRule, Reading

FILES = Path(__file__).with_name("files")
KINDS = {
    "kohya_config.toml": "kohya config",
    "kohya_dataset.toml": "kohya dataset TOML",
    "kohya_gui.json": "kohya GUI",
    "musubi.sh": "musubi-tuner",
    "musubi_config.toml": "musubi-tuner",
    "aitoolkit.yaml": "ai-toolkit",
    "simpletuner.json": "SimpleTuner",
    "multidatabackend.json": "SimpleTuner data",
    "onetrainer.json": "OneTrainer",
    "concepts.json": "OneTrainer concepts",
    "diffusers.sh": "diffusers flags",
}


def keys_of(imported: Imported) -> str:
    """The result of each key, one per line; a golden file is next to the config."""
    lines = []
    for line in imported.lines:
        becomes = json.dumps(line.settings, ensure_ascii=False).replace(str(FILES), "FILES")
        lines.append(f"{line.verdict:<8} {line.key}  {becomes}" + (f"  {line.why}" if line.why else ""))
    return "\n".join(lines).replace(str(FILES), "FILES") + "\n"


def imported_text(folder: Path, name: str, text: str) -> Imported:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return import_file(path)


@pytest.mark.parametrize("name", KINDS)
def test_every_key_of_a_realistic_file(name: str) -> None:
    imported = import_file(FILES / name)
    assert imported.format == KINDS[name]
    assert keys_of(imported) == (FILES / f"{name}.keys").read_text("utf-8")
    # The written file passes our schema and has the same settings.
    assert resolve([Layer(name, tomllib.loads(as_toml(imported)))]).config == imported.config


def held_at(name: str, document: Mapping[str, Any]) -> list[Any]:
    """The values of a TOML at `data.flip` or at `data.sources[0, 2].captions.prefix`."""
    sources, _, key = name.removeprefix("data.sources[").partition("].")
    places = [document["data"]["sources"][int(place)] for place in sources.split(", ")] if key else [document]
    for part in (key or name).split("."):
        places = [place.get(part, {}) for place in places]
    return places


def assert_listing_is_written(imported: Imported) -> None:
    """Each `key -> setting = value` is in the TOML."""
    document = tomllib.loads(as_toml(imported))
    for line in imported.lines:
        for name, value in line.settings.items():
            for held_value in held_at(name, document):
                if name == "data.sources":
                    assert all(any(table.items() <= each.items() for each in held_value) for table in value), line
                else:
                    assert (
                        (held_value or None) == (value or None) if value in (None, {}, "") else held_value == value
                    ), line


@pytest.mark.parametrize("name", KINDS)
def test_listed_settings_are_in_the_written_file(name: str) -> None:
    assert_listing_is_written(import_file(FILES / name))


def test_overridden_keys_are_reported(tmp_path: Path) -> None:
    (tmp_path / "backends.json").write_text(
        json.dumps(
            [
                {"id": "a", "instance_data_dir": "a", "resolution": 0.02, "resolution_type": "area"},
                {"id": "b", "instance_data_dir": "b", "resolution": 0.02, "resolution_type": "area", "crop": False},
            ]
        ),
        encoding="utf-8",
    )
    keys = {"model_family": "sdxl", "lora_type": "standard", "resolution": 256, "checkpointing_steps": 200}
    imported = imported_text(tmp_path, "s.json", json.dumps({**keys, "data_backend_config": "backends.json"}))
    assert_listing_is_written(imported)
    assert imported.config.data.resolution == 128  # 145 px has that area; the bucket step is 64 px
    lines = {line.key: line for line in imported.lines}
    assert lines["resolution"].verdict == "ignored"
    assert "overridden: data.resolution = 128" in lines["resolution"].why
    assert "checkpoint_step_interval" not in lines  # a default that nobody wrote and nothing follows
    assert lines["checkpointing_steps"].settings == {"checkpoint.every_n_steps": 200}
    assert "overridden: data.max_aspect = 1.0" in lines["backends[1].crop"].why
    assert lines["backends[1]"].verdict == "changed"
    assert "one value for all datasets here: 1.0" in lines["backends[1]"].why


def test_unsupported_augmentations_are_reported_prominently(tmp_path: Path) -> None:
    image = {"enable_random_rotate": True, "random_rotate_max_angle": 10.0, "enable_fixed_hue": True}
    off = {"random_hue_max_strength": 0.2, "random_contrast_max_strength": 0.3, "enable_fixed_flip": False}
    imported = imported_text(tmp_path, "c.json", json.dumps([{"path": "p", "image": {**image, **off}, "text": {}}]))
    verdicts = {line.key.rpartition(".")[2]: line.verdict for line in imported.lines}
    assert {key: verdicts[key] for key in image} == dict.fromkeys(image, "changed")
    assert verdicts["random_hue_max_strength"] == "changed"  # of the fixed hue
    assert verdicts["random_contrast_max_strength"] == verdicts["enable_fixed_flip"] == "ignored"


def test_masked_training_without_masks_is_reported(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    document = {
        "training_method": "LORA",
        "base_model_name": "m",
        "masked_training": True,
        "concepts": [{"path": str(tmp_path / "p")}, {"path": str(tmp_path / "later")}],
    }
    imported = imported_text(tmp_path, "o.json", json.dumps(document))
    assert [source.masks for source in imported.config.data.sources] == [None, str(tmp_path / "later")]
    whys = {line.key: line.why for line in imported.lines if line.verdict == "changed"}
    assert "so masks are skipped" in whys["concepts[0].path"]
    assert "needs masks beside the images" in whys["concepts[1].path"]
    (tmp_path / "p" / "a-masklabel.png").write_bytes(b"")
    imported = imported_text(tmp_path, "o.json", json.dumps(document))
    assert imported.config.data.sources[0].masks == str(tmp_path / "p")


def test_every_common_key_is_known() -> None:
    common = (
        "pretrained_model_name_or_path train_data_dir reg_data_dir dataset_config output_dir output_name resolution "
        "train_batch_size max_train_epochs max_train_steps gradient_accumulation_steps learning_rate unet_lr "
        "text_encoder_lr network_module network_dim network_alpha network_dropout network_weights "
        "network_train_unet_only optimizer_type lr_scheduler lr_warmup_steps lr_scheduler_num_cycles max_grad_norm "
        "mixed_precision save_precision save_every_n_epochs save_every_n_steps save_last_n_epochs save_last_n_steps "
        "save_model_as save_state resume seed gradient_checkpointing cache_latents cache_latents_to_disk "
        "cache_text_encoder_outputs cache_text_encoder_outputs_to_disk enable_bucket min_bucket_reso max_bucket_reso "
        "bucket_reso_steps bucket_no_upscale caption_extension shuffle_caption keep_tokens caption_dropout_rate "
        "caption_tag_dropout_rate xformers sdpa clip_skip max_token_length min_snr_gamma noise_offset "
        "multires_noise_iterations multires_noise_discount ip_noise_gamma loss_type huber_c huber_schedule "
        "prior_loss_weight no_half_vae fp8_base blocks_to_swap sample_every_n_epochs sample_every_n_steps "
        "sample_prompts sample_sampler max_data_loader_n_workers persistent_data_loader_workers "
        "network_args.conv_dim network_args.conv_alpha network_args.loraplus_lr_ratio network_args.block_dims"
    ).split()
    assert set(common) - set(kohya.RULES) == set()
    of_data = (
        "resolution batch_size enable_bucket min_bucket_reso max_bucket_reso bucket_reso_steps bucket_no_upscale "
        "validation_split validation_seed image_dir class_tokens num_repeats is_reg metadata_file caption_extension "
        "shuffle_caption keep_tokens keep_tokens_separator caption_prefix caption_suffix caption_separator "
        "enable_wildcard caption_dropout_rate caption_dropout_every_n_epochs caption_tag_dropout_rate flip_aug "
        "color_aug random_crop alpha_mask conditioning_data_dir"
    ).split()
    assert set(of_data) - set(kohya_dataset.RULES) == set()
    assert {"optimizer", "max_resolution", "epoch", "lr_warmup", "LoRA_type"} - set(kohya_gui.MORE_RULES) == set()
    flags = "instance_data_dir instance_prompt class_data_dir class_prompt num_class_images with_prior_preservation "
    more = "repeats rank lora_alpha resume_from_checkpoint checkpoints_total_limit snr_gamma"
    assert set((flags + more).split()) - set(diffusers_flags.RULES) == set()
    sections = {
        "network": "type linear linear_alpha conv conv_alpha",
        "save": "dtype save_every max_step_saves_to_keep",
        "train": "batch_size steps gradient_accumulation_steps optimizer lr dtype timestep_type",
        "model": "name_or_path arch quantize",
    }
    names = {f"{section}.{key}" for section, keys in sections.items() for key in keys.split()}
    assert names - set(aitoolkit.RULES) == set()
    of_datasets = "folder_path caption_ext caption_dropout_rate shuffle_tokens resolution num_repeats mask_path"
    assert set(of_datasets.split()) - set(aitoolkit.DATASET_RULES) == set()


def test_defaults_of_kohya_are_imported(tmp_path: Path) -> None:
    text = 'pretrained_model_name_or_path = "m"\ntrain_data_dir = "p"\nresolution = 512\n'
    config = imported_text(tmp_path, "k.toml", text).config
    assert config.train.max_steps == 1600
    assert config.optimizer.learning_rate == 2e-6
    assert (config.lora.rank, config.lora.alpha) == (4, 1.0)
    assert (config.lr_scheduler.name, config.lr_scheduler.warmup_steps) == ("constant_with_warmup", 0)
    assert config.memory.weight_dtype == "fp32"
    assert config.captions.extension == ".caption"
    assert config.data.max_aspect == 1.0  # no buckets: all images are cropped to one shape
    assert (config.validation.split, config.checkpoint.export_weights) == (0.0, "last")


def test_the_gui_counts_warmup_in_percent_and_epochs_without_steps(tmp_path: Path) -> None:
    marks = {"LoRA_type": "Standard", "noise_offset_type": "Original", "lr_scheduler": "cosine", "lr_warmup": 10}
    steps = imported_text(tmp_path, "a.json", json.dumps({**marks, "max_train_steps": 800, "epoch": 3})).config
    assert (steps.train.max_steps, steps.train.max_epochs, steps.lr_scheduler.warmup_steps) == (800, None, 80)
    epochs = imported_text(tmp_path, "b.json", json.dumps({**marks, "max_train_steps": 0, "epoch": 3})).config
    assert (epochs.train.max_steps, epochs.train.max_epochs, epochs.lr_scheduler.warmup_steps) == (None, 3, None)


def test_total_repeats_of_an_image(tmp_path: Path) -> None:
    backends = [
        {"id": "a", "instance_data_dir": "a", "repeats": 0},
        {"id": "b", "instance_data_dir": "b", "repeats": 9},
    ]
    simple = imported_text(tmp_path, "s.json", json.dumps(backends)).config
    assert [source.repeats for source in simple.data.sources] == [1, 10]
    text = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\nnum_repeats = 1\n'
    assert imported_text(tmp_path, "k.toml", text).config.data.sources[0].repeats == 1


def test_captions_of_one_source_keep_the_common_settings() -> None:
    config = import_file(FILES / "aitoolkit.yaml").config
    assert [source.captions and source.captions.trigger_word for source in config.data.sources] == ["sks", "sks"]


def test_an_out_of_range_value_is_skipped_and_reported(tmp_path: Path) -> None:
    text = 'pretrained_model_name_or_path = "m"\ntrain_data_dir = "p"\nnetwork_dim = 99999\ncaption_dropout_rate = 3\n'
    imported = imported_text(tmp_path, "k.toml", text)
    assert imported.config.lora.rank == 32, "the default"
    reasons = [line.why for line in imported.lines if line.why.startswith("skipped")]
    assert any("lora.rank = 99999" in why and "at most 4096" in why for why in reasons)
    assert any("captions.dropout" in why for why in reasons)


def test_a_contradictory_setting_is_dropped_and_reported(tmp_path: Path) -> None:
    text = 'train_data_dir = "p"\noptimizer_type = "AdamWScheduleFree"\nlr_scheduler = "cosine"\nnetwork_dim = 8\n'
    imported = imported_text(tmp_path, "k.toml", text)
    assert (imported.config.optimizer.name, imported.config.lr_scheduler.name) == (
        "adamw_schedulefree",
        "constant_with_warmup",
    )
    assert any(line.key == "lr_scheduler" and "averages weights" in line.why for line in imported.lines)


def test_no_bucket_is_smaller_than_the_training_size(tmp_path: Path) -> None:
    text = 'train_data_dir = "p"\nnetwork_dim = 8\nresolution = 128\nenable_bucket = true\n'
    imported = imported_text(tmp_path, "k.toml", text)
    assert imported.config.data.bucket_min == 128  # kohya's default of 256 would leave no bucket
    assert any("not more than the training resolution, 128 px" in line.why for line in imported.lines)


def test_wrong_types_of_values_are_reported_together(tmp_path: Path) -> None:
    text = 'train_data_dir = "p"\nnetwork_dim = "many"\nlearning_rate = true\nmixed_precision = "fp12"\n'
    with pytest.raises(UsageError) as caught:
        imported_text(tmp_path, "k.toml", text)
    message = str(caught.value)
    assert 'network_dim = "many" is not a number' in message
    assert "learning_rate = true is not a number" in message
    assert 'mixed_precision = "fp12" is not a precision' in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[lora]\nrank = 8\n", "already a config of lora-trainer"),
        ('title = "x"\n', "not a config that can be imported"),
        ('{"a": [', "is not valid JSON"),
        ("a: !!python/name:os.system x", "Only plain values"),
        ('dataset_config = "gone.toml"\nnetwork_dim = 8\noutput_dir = "o"\n', "gone.toml does not exist"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_message_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "x"
    path.write_text(text, encoding="utf-8")
    assert main(["import", str(path)]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err
    assert out == ""


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for name in KINDS:
        assert main(["import", str(FILES / name), "--json"]) == 0
        out, err = capsys.readouterr()
        assert "hf_abcdef" not in out + err
        assert "0123456789abcdef" not in out + err


def test_the_command_writes_a_new_file_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cat.toml"
    assert main(["import", str(FILES / "kohya_config.toml"), "--output", str(output)]) == 0
    table = capsys.readouterr().out
    places = [table.index(title) for title in ("unknown: ", "changed in meaning", "ignored (", "the same here")]
    assert places == sorted(places)
    assert f"lora-trainer train --config {output}" in table
    written = output.read_bytes()
    assert main(["import", str(FILES / "aitoolkit.yaml"), "--output", str(output)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert output.read_bytes() == written
    assert main(["train", "--config", str(output), "--model", str(BASE_FOLDER), "--explain"]) == 0
    assert re.search(r"lora\.rank +32", capsys.readouterr().out)


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(FILES / "simpletuner.json"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "SimpleTuner"
    assert len(document["keys"]) == sum(document["counts"].values())
    assert tomllib.loads(document["toml"])["lora"]["rank"] == document["settings"]["lora.rank"] == 32


NUMBERS = [0, 1, -1, 3, 0.5, 1e9, float("inf"), 10**30, -5.5, True, False, None]
TEXTS = ["", "1", "0.1", "abc", "true", "512,512", "1,2,3", "a\0b", "x.txt", "AdamWScheduleFree", "huber"]
ODD = st.sampled_from([*NUMBERS, *TEXTS, [], ["a"], [1, 2], ["a=1", "b"], {}, {"a": 1}, [{}]])


def some(rules: Mapping[str, KeyRule]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(sorted(rules)), ODD, max_size=6)


def deep(keys: Mapping[str, object]) -> dict[str, Any]:
    """`a.b = 1` as nested tables."""
    found: dict[str, Any] = {}
    for name, value in keys.items():
        place = found
        *above, key = name.split(".")
        for part in above:
            place[part] = place[part] if isinstance(place.get(part), dict) else {}
            place = place[part]
        place[key] = value
    return found


@settings(max_examples=25)
@given(st.data())
def test_any_file_is_read_or_refused_with_a_message(data: st.DataObject) -> None:
    source = {"path": "p", "folder_path": "p", "image_dir": "p", "instance_data_dir": "p"}
    subset = {**data.draw(some(kohya_dataset.RULES)), "image_dir": "p"}
    concept = {**deep(data.draw(some(onetrainer_concepts.CONCEPT_RULES))), "path": "p"}
    backend = {**deep(data.draw(some(simpletuner.BACKEND_RULES))), "instance_data_dir": "p"}
    process = {key: value for key, value in data.draw(some(aitoolkit.RULES)).items() if key[:4] not in ("conf", "meta")}
    folder = {**data.draw(some(aitoolkit.DATASET_RULES)), "folder_path": "p"}
    documents: dict[Callable[[Path, Any], Reading], Any] = {
        kohya.read: data.draw(some(kohya.RULES)),
        kohya_gui.read: data.draw(some(kohya_gui.MORE_RULES)),
        musubi.read: data.draw(some(musubi.RULES)),
        kohya_dataset.dataset_reading: {"datasets": [{**data.draw(some(kohya_dataset.RULES)), "subsets": [subset]}]},
        aitoolkit.read: {
            "config": {"process": [{**deep(process), "datasets": [folder, source]}]},
            "meta": data.draw(ODD),
        },
        simpletuner.read: data.draw(some(simpletuner.RULES)),
        simpletuner.read_backends: [backend, source],
        onetrainer.read: {**deep(data.draw(some(onetrainer.RULES))), "concepts": [concept, source]},
        diffusers_flags.read: data.draw(some(diffusers_flags.RULES)),
    }
    for read, document in documents.items():
        try:
            imported = finished("any", FILES / "any", read(FILES / "any", document))
        except UsageError:
            continue  # with a message; any other error is a failure
        assert resolve([Layer("any", tomllib.loads(as_toml(imported)))]).config == imported.config
        assert_listing_is_written(imported)
