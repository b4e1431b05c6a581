"""The meaning of other trainers' keys, by their source code, and their import."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.cli.main import main
from lora_trainer.config.schema import SampleSection
from lora_trainer.core.errors import UsageError
from lora_trainer.importers.imported import Imported, import_file
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.published import public_architecture
from lora_trainer.optim.layers import last_match, layer_notes

USUAL = (SampleSection().num_inference_steps, SampleSection().guidance_scale)


def imported_text(folder: Path, name: str, text: str) -> Imported:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return import_file(path)


@pytest.mark.parametrize(
    ("network", "rank", "alpha"),
    [
        ({}, 4, 1.0),
        ({"rank": 4}, 4, 1.0),
        ({"rank": 32, "linear": 32}, 32, 1.0),
        ({"rank": 8, "linear": 300}, 8, 1.0),  # as NetworkConfig has it
        ({"linear": 300, "linear_alpha": 16}, 300, 16.0),
        ({"linear": 32, "alpha": 32}, 32, 32.0),
        ({"linear": 32, "alpha": 32, "linear_alpha": 8}, 32, 8.0),
    ],
)
def test_rank_and_alpha_of_ai_toolkit(network: dict[str, int], rank: int, alpha: float, tmp_path: Path) -> None:
    job = {"job": "extension", "config": {"name": "a", "process": [{"type": "sd_trainer", "network": network}]}}
    imported = imported_text(tmp_path, "a.json", json.dumps(job))
    assert (imported.config.lora.rank, imported.config.lora.alpha) == (rank, alpha)
    assert {"lora.rank", "lora.alpha"} <= {*imported.settings}


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({}, None),
        ({"do_guidance_loss": False, "guidance_loss_target": 4.0}, None),
        ({"do_guidance_loss": True}, 3.0),
        ({"do_guidance_loss": True, "guidance_loss_target": 3.5}, 3.5),
        ({"do_guidance_loss": True, "guidance_loss_target": [2.0, 4.0]}, None),
    ],
)
def test_the_guidance_loss_of_ai_toolkit(keys: dict[str, object], scale: float | None, tmp_path: Path) -> None:
    job = {"job": "extension", "config": {"name": "a", "process": [{"type": "sd_trainer", "train": keys}]}}
    imported = imported_text(tmp_path, "a.json", json.dumps(job))
    assert imported.config.loss.guidance_target == scale
    if keys.get("do_guidance_loss"):
        verdict, why = verdict_of(imported, "do_guidance_loss")
        assert (verdict, "the base model's" in why) == ("changed", scale is not None)


def kohya_with(folder: Path, text: str) -> Imported:
    start = 'pretrained_model_name_or_path = "m"\nnetwork_dim = 8\n'
    return imported_text(folder, "k.toml", f"{start}{text}\n")


def verdict_of(imported: Imported, key: str) -> tuple[str, str]:
    """The result of a key and its reason: the last line of that key."""
    line = [line for line in imported.lines if line.key.endswith(key)][-1]
    return line.verdict, line.why


def test_masks_of_kohya_count_as_they_do_there_and_differences_are_reported(tmp_path: Path) -> None:
    masks = 'train_data_dir = "p"\nconditioning_data_dir = "masks"\n'
    for text in (masks, f"{masks}masked_loss = false"):
        off = kohya_with(tmp_path, text)
        assert off.config.data.sources[0].masks is None
        assert verdict_of(off, "conditioning_data_dir") == ("ignored", "means nothing without masked_loss")
    on = kohya_with(tmp_path, f"{masks}masked_loss = true")
    assert on.config.data.sources[0].masks == str(tmp_path / "masks")
    for key in ("conditioning_data_dir", "masked_loss"):
        verdict, why = verdict_of(on, key)
        assert verdict == "changed"
        assert "divided by the mask's area" in why
    # Transparency needs no masked_loss there.
    alpha = kohya_with(tmp_path, 'train_data_dir = "p"\nalpha_mask = true')
    assert alpha.config.data.sources[0].masks == "alpha"
    assert verdict_of(alpha, "alpha_mask")[0] == "changed"


def test_a_config_sets_whether_its_dataset_has_masks(tmp_path: Path) -> None:
    subset = '[[datasets.subsets]]\nimage_dir = "a"\nconditioning_data_dir = "masks"\n'
    (tmp_path / "data.toml").write_text(f"[[datasets]]\n{subset}", encoding="utf-8")
    named = 'dataset_config = "data.toml"\n'
    assert kohya_with(tmp_path, named).config.data.sources[0].masks is None
    on = kohya_with(tmp_path, f"{named}masked_loss = true")
    assert on.config.data.sources[0].masks == str(tmp_path / "masks")
    assert verdict_of(on, "conditioning_data_dir")[0] == "changed"


def one_trainer(folder: Path, **more: object) -> Imported:
    start = {"training_method": "LORA", "base_model_name": "m", "concepts": [{"path": "p"}]}
    return imported_text(folder, "o.json", json.dumps({**start, **more}))


def test_the_mask_area_can_count_as_in_onetrainer(tmp_path: Path) -> None:
    key = "normalize_masked_area_loss"
    assert verdict_of(one_trainer(tmp_path, masked_training=True, **{key: True}), key) == ("ignored", "as here")
    for imported in (
        one_trainer(tmp_path, masked_training=True, **{key: False}),
        one_trainer(tmp_path, masked_training=True),  # its default
    ):
        verdict, why = verdict_of(imported, key)
        assert verdict == "changed"
        assert "here the loss is divided by the mask's area" in why
    assert verdict_of(one_trainer(tmp_path, **{key: False}), key)[0] == "ignored"
    assert not any(line.key == key for line in one_trainer(tmp_path).lines)


@pytest.mark.parametrize(
    ("text", "of_all", "tags", "whole", "expected"),
    [
        ({"tag_dropout_mode": "RANDOM"}, 0.0, 0.2, 0.0, ""),
        ({}, 0.0, 0.2, 0.0, "all tags but the kept ones at once there"),  # FULL with one tag kept
        ({"keep_tags_count": 0}, 0.0, 0.0, 0.2, "the whole caption"),
        ({"keep_tags_count": 0, "tag_dropout_mode": "FULL"}, 0.5, 0.0, 0.6, "the whole caption"),
        ({"tag_dropout_mode": "RANDOM WEIGHTED"}, 0.0, 0.2, 0.0, "more often there"),
    ],
)
def test_tag_dropout_modes_of_onetrainer(
    text: dict[str, object], of_all: float, tags: float, whole: float, expected: str, tmp_path: Path
) -> None:
    written = {**text, "tag_dropout_enable": True, "tag_dropout_probability": 0.2}
    encoder = {"dropout_probability": of_all}
    imported = one_trainer(tmp_path, concepts=[{"path": "p", "text": written}], text_encoder=encoder)
    captions = imported.config.captions
    assert (captions.tag_dropout, captions.dropout) == (tags, pytest.approx(whole))
    verdict, why = verdict_of(imported, "text.tag_dropout_probability")
    assert expected in why
    assert verdict == ("changed" if "there" in expected else "mapped")


@pytest.mark.parametrize("script", ["train_dreambooth_lora", "train_dreambooth_lora_sdxl", "train_text_to_image_lora"])
def test_diffusers_crops_at_random_by_default(script: str, tmp_path: Path) -> None:
    command = f"accelerate launch {script}.py --pretrained_model_name_or_path=m --instance_data_dir=p --rank=8"
    usual = imported_text(tmp_path, "a.sh", f"{command}\n")
    assert usual.config.data.crop == "random"
    assert "drawn anew each time there" in verdict_of(usual, "center_crop")[1]
    assert imported_text(tmp_path, "b.sh", f"{command} --center_crop\n").config.data.crop == "center"


def test_diffusers_class_images_are_generated_where_the_folder_has_none(tmp_path: Path) -> None:
    command = "accelerate launch train_dreambooth_lora.py --instance_data_dir=p --rank=8 --with_prior_preservation"
    command += " --class_data_dir=others --class_prompt='a photo of a cat'"
    data = imported_text(tmp_path, "a.sh", f"{command}\n").config.data
    assert (data.num_class_images, data.class_prompts, len(data.sources)) == (100, ("a photo of a cat",), 1)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "cat.png").touch()
    imported = imported_text(tmp_path, "b.sh", f"{command} --num_class_images=30\n")
    assert (imported.config.data.num_class_images, imported.config.data.class_prompts) == (0, ())
    assert imported.config.data.sources[1].is_reg
    assert imported.config.data.sources[1].default_caption == "a photo of a cat"
    verdict, why = verdict_of(imported, "with_prior_preservation")
    assert verdict == "changed"
    assert "with the images that class_data_dir has; diffusers adds as many class images to each batch" in why


@pytest.mark.parametrize(
    ("prompts", "used", "left_out"),
    [
        ("a cat --s 20 --l 5\na dog --l 5 --s 20", (20, 5.0), ()),
        ("a cat --s 20 --w 512\na dog", USUAL, ("--s", "--w")),
        ("a cat --l 4 --d 1\na dog --l 5 --d 2", USUAL, ("--l", "--d")),
        ("a cat --s few", USUAL, ("--s",)),
    ],
)
def test_options_behind_prompts_are_read_or_named(
    prompts: str, used: tuple[int, float], left_out: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text(f"# of kohya\n{prompts}\n", encoding="utf-8")
    imported = kohya_with(tmp_path, 'sample_prompts = "prompts.txt"')
    sample = imported.config.sample
    assert sample.prompts == ("a cat", "a dog")[: len(sample.prompts)]
    assert (sample.num_inference_steps, sample.guidance_scale) == used
    verdict, why = verdict_of(imported, "sample_prompts")
    assert verdict == ("changed" if left_out else "mapped")
    assert all(option in why for option in left_out)


@pytest.mark.parametrize(
    ("text", "every", "verdict"),
    [
        ("save_every_n_epochs = 2", 2, "mapped"),
        ("save_every_n_epochs = 0", 0, "ignored"),
        ("save_n_epoch_ratio = 4\nmax_train_epochs = 10", 2, "mapped"),
        ("save_n_epoch_ratio = 40\nmax_train_epochs = 10", 1, "mapped"),
        ("save_n_epoch_ratio = 4", 0, "changed"),
    ],
)
def test_saved_files_of_kohya_by_epochs(text: str, every: int, verdict: str, tmp_path: Path) -> None:
    """LoRA files: checkpoints to resume from keep their own interval."""
    imported = kohya_with(tmp_path, f"{text}\nsave_last_n_epochs = 3")
    kept = imported.config.checkpoint
    assert (kept.export_every_n_epochs, kept.export_keep_last) == (every, 3 if every else 0)
    assert (kept.every_n_steps, kept.every_n_epochs, kept.keep_last) == (500, None, 2)
    assert verdict_of(imported, text.split(maxsplit=1)[0])[0] == verdict


def test_saved_states_of_kohya_are_checkpoints(tmp_path: Path) -> None:
    text = "save_every_n_steps = 50\nsave_last_n_steps = 150\nsave_state = true\nsave_last_n_steps_state = 100"
    kept = kohya_with(tmp_path, text).config.checkpoint
    assert (kept.export_every_n_steps, kept.export_keep_last) == (50, 4)  # 0, 50, 100 and 150 steps old
    assert (kept.every_n_steps, kept.keep_last) == (50, 3)
    kept = kohya_with(
        tmp_path, "save_every_n_epochs = 2\nsave_state = true\nsave_last_n_epochs_state = 4"
    ).config.checkpoint
    assert (kept.every_n_epochs, kept.keep_last, kept.export_every_n_epochs) == (2, 4, 2)
    imported = kohya_with(tmp_path, "save_state = true")
    assert verdict_of(imported, "save_state") == (
        "mapped",
        "at the end alone there; here every checkpoint.every_n_steps too",
    )
    assert verdict_of(kohya_with(tmp_path, "save_last_n_steps = 9"), "save_last_n_steps")[0] == "ignored"


@pytest.mark.parametrize(
    ("unit", "steps", "epochs"), [("EPOCH", 0, 3), ("STEP", 3, 0), ("MINUTE", 0, 0), ("NEVER", 0, 0)]
)
def test_save_intervals_of_onetrainer_follow_their_unit(unit: str, steps: int, epochs: int, tmp_path: Path) -> None:
    """LoRA files and backups with state."""
    kept = one_trainer(tmp_path, save_every=3, save_every_unit=unit).config.checkpoint
    assert (kept.export_every_n_steps, kept.export_every_n_epochs) == (steps, epochs)
    assert (kept.every_n_steps, kept.every_n_epochs) == (500, None)
    kept = one_trainer(tmp_path, backup_after=3, backup_after_unit=unit).config.checkpoint
    assert (kept.every_n_steps, kept.every_n_epochs) == (steps or 500, epochs or None)


def test_simpletuner_saves_by_steps_and_by_epochs(tmp_path: Path) -> None:
    keys = {"model_family": "sdxl", "model_type": "lora", "checkpoint_epoch_interval": 2}
    kept = imported_text(tmp_path, "s.json", json.dumps(keys)).config.checkpoint
    assert (kept.every_n_steps, kept.every_n_epochs) == (500, 2)


@pytest.mark.parametrize(
    ("written", "ours", "verdict"),
    [("float", "fp32", "mapped"), ("fp16", "fp16", "mapped"), ("bf16", "bf16", "mapped"), ("fp8", "fp16", "changed")],
)
def test_the_precision_of_files_is_that_of_the_original(written: str, ours: str, verdict: str, tmp_path: Path) -> None:
    imported = kohya_with(tmp_path, f'save_precision = "{written}"')
    assert imported.config.checkpoint.export_dtype == ours
    assert verdict_of(imported, "save_precision")[0] == verdict


def test_programs_with_fp32_files_by_default_keep_fp32(tmp_path: Path) -> None:
    assert kohya_with(tmp_path, "").config.checkpoint.export_dtype == "fp32"
    assert one_trainer(tmp_path).config.checkpoint.export_dtype == "fp32"
    assert one_trainer(tmp_path, output_dtype="BFLOAT_16").config.checkpoint.export_dtype == "bf16"
    script = "train_dreambooth_lora_flux.py --instance_data_dir=p --instance_prompt=cat --rank=4"
    for flag, ours in (("", "fp16"), (" --upcast_before_saving", "fp32")):
        config = imported_text(tmp_path, "d.sh", f"accelerate launch {script}{flag}\n").config
        assert config.checkpoint.export_dtype == ours


@pytest.mark.parametrize("place", ["run/config/examples/flux", "run/config", "run", "elsewhere"])
def test_datasets_of_simpletuner_are_found_in_parent_and_working_folders(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "run" / "config" / "examples" / "flux", tmp_path / "elsewhere"
    folder.mkdir(parents=True)
    other.mkdir()
    monkeypatch.chdir(other)
    (tmp_path / place / "data").mkdir()
    backends = tmp_path / place / "data" / "sets.json"
    backends.write_text(json.dumps([{"id": "a", "type": "local", "instance_data_dir": "cats"}]), encoding="utf-8")
    keys = {"model_family": "flux", "model_type": "lora", "data_backend_config": "data/sets.json"}
    imported = imported_text(folder, "config.json", json.dumps(keys))
    assert verdict_of(imported, "data_backend_config") == ("mapped", f"data.sources, read from {backends}")
    assert len(imported.config.data.sources) == 1


@pytest.mark.parametrize("named", ["nowhere/sets.json", "/nowhere/sets.json", "~nobody/sets.json", "x" * 5000])
def test_a_config_with_missing_datasets_is_imported_without_them(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"model_family": "flux", "model_type": "lora", "lora_rank": 7, "data_backend_config": named}
    (tmp_path / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    assert main(["import", str(tmp_path / "config.json"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["lora.rank"] == 7
    (line,) = [each for each in document["keys"] if each["key"] == "data_backend_config"]
    assert line["verdict"] == "changed"
    assert "name the images with --data" in line["why"]


def test_hub_datasets_are_skipped_and_named(tmp_path: Path) -> None:
    hub = [{"id": "a", "type": "huggingface", "dataset_name": "a/b", "metadata_backend": "huggingface"}]
    assert verdict_of(imported_text(tmp_path, "sets.json", json.dumps(hub)), "backends[0]")[0] == "changed"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Prodigy", "", ("changed", "always on here: use_bias_correction, safeguard_warmup")),
        ("Prodigy", "use_bias_correction=True", ("changed", "always on here: safeguard_warmup")),
        ("Prodigy", "use_bias_correction=True safeguard_warmup=True", ("mapped", "")),
        (
            "Prodigy",
            "use_bias_correction=False safeguard_warmup=True",
            ("changed", "always on here: use_bias_correction"),
        ),
        ("AdamW", "", ("mapped", "")),
    ],
)
def test_what_prodigy_always_has_here_is_reported(name, arguments, expected, tmp_path: Path) -> None:
    imported = kohya_with(tmp_path, f"optimizer_type = {name!r}\noptimizer_args = {arguments.split()}")
    verdict, why = verdict_of(imported, "optimizer_type")
    assert (verdict, why.partition("; overridden")[0]) == expected
    for pair in arguments.split():
        key, _, value = pair.partition("=")
        wanted = "ignored" if value == "True" else "changed"
        assert verdict_of(imported, f"optimizer_args.{key}") == (wanted, "always on here")


def test_diffusers_prodigy_has_by_default_what_is_always_on_here(tmp_path: Path) -> None:
    command = "accelerate launch train_dreambooth_lora_sdxl.py --instance_data_dir=p --rank=8 --optimizer=prodigy"
    usual = imported_text(tmp_path, "a.sh", f"{command}\n")
    assert "always on" not in verdict_of(usual, "optimizer")[1]
    off = imported_text(tmp_path, "b.sh", f"{command} --prodigy_safeguard_warmup=False\n")
    assert "always on here: safeguard_warmup" in verdict_of(off, "optimizer")[1]
    assert verdict_of(off, "prodigy_safeguard_warmup") == ("changed", "always on here")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("train_batch_size = 4\nenable_bucket = true", "changed"),
        ("train_batch_size = 1\nenable_bucket = true", "mapped"),
        ("train_batch_size = 4\nenable_bucket = false", "mapped"),
    ],
)
def test_epochs_of_kohya_with_batches_inside_buckets_are_reported(text: str, verdict: str, tmp_path: Path) -> None:
    imported = kohya_with(tmp_path, f"{text}\nmax_train_epochs = 10")
    assert imported.config.train.max_epochs == 10
    found, why = verdict_of(imported, "max_train_epochs")
    assert found == verdict
    assert ("20 images of 20 shapes in batches of 4 it has 20, and 5 here" in why) == (verdict == "changed")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it falls from 0.95 to 0.10"),
        ("huber_schedule = 'snr'\nhuber_c = 0.2", "it falls from 0.96 to 0.20"),
        ("huber_schedule = 'exponential'", "it falls from 1.00 to 0.10"),
    ],
)
def test_the_huber_schedule_of_kohya_is_reported_with_its_numbers(text: str, expected: str, tmp_path: Path) -> None:
    imported = kohya_with(tmp_path, f"loss_type = 'huber'\n{text}")
    verdict, why = verdict_of(imported, "huber_schedule")
    assert verdict == "changed"
    assert expected in why
    constant = kohya_with(tmp_path, "loss_type = 'huber'\nhuber_schedule = 'constant'")
    assert verdict_of(constant, "huber_schedule") == ("ignored", "means nothing here")


def block_factors(folder: Path, arguments: list[str], more: str = "") -> dict[str, float]:
    return dict(
        kohya_with(folder, f"network_args = {json.dumps(arguments)}\n{more}").config.optimizer.layer_learning_rates
    )


def test_learning_rates_of_kohyas_blocks_are_those_of_its_places(tmp_path: Path) -> None:
    """Of its `get_block_index`: a down block's place n is number 3 * block + n + 1, an up block's 3 * block + n."""
    numbers = ",".join(str(place / 10) for place in range(12))
    found = block_factors(tmp_path, [f"down_lr_weight={numbers}", "mid_lr_weight=0.5", "up_lr_weight=1,1,1,0.25"])
    assert found == {
        **{f"down_blocks.{block}.attentions.{n}.*": (3 * block + n + 1) / 10 for block in range(3) for n in range(2)},
        "mid_block.*": 0.5,
        "up_blocks.1.attentions.0.*": 0.25,
    }
    of_sdxl = block_factors(tmp_path, ["down_lr_weight=0,0,0,0,.2,.3,0,.5,.6", "block_lr_zero_threshold=0.25"])
    assert of_sdxl == {
        "down_blocks.1.attentions.0.*": 0.0,
        "down_blocks.1.attentions.1.*": 0.3,
        "down_blocks.2.attentions.0.*": 0.5,
        "down_blocks.2.attentions.1.*": 0.6,
    }
    curve = block_factors(tmp_path, ["up_lr_weight=reverse_linear+.5", "conv_dim=8"])
    assert curve["up_blocks.3.resnets.2.*"] == 0.5
    assert curve["up_blocks.2.upsamplers.*"] == pytest.approx(0.5 + 3 / 11)
    assert "up_blocks.0.attentions.0.*" not in curve
    with pytest.raises(UsageError, match=r"down_lr_weight = .* is not a number"):
        block_factors(tmp_path, ["down_lr_weight=heavy"])


@pytest.mark.parametrize(("family", "side"), [("sd15", 12), ("sdxl", 9)])
def test_every_pattern_of_kohyas_blocks_matches_layers_of_the_model(family: str, side: int, tmp_path: Path) -> None:
    """A pattern without a layer would be refused; and each layer of a block has one."""
    numbers, middle = ",".join(["0.5"] * side), ",".join(["0.5"] * (3 if family == "sdxl" else 1))
    arguments = [f"down_lr_weight={numbers}", f"mid_lr_weight={middle}", f"up_lr_weight={numbers}"]
    with torch.device("meta"):
        unet = FAMILIES[family].denoiser.make(public_architecture(family).denoiser)
    for more in ([], ["conv_dim=4"]):
        config = kohya_with(tmp_path, f"network_args = {json.dumps([*arguments, *more])}").config
        layers = target_modules(unet, FAMILIES[family].denoiser, config.lora.target_modules)
        parameters = [f"{layer}.lora_A.default.weight" for layer in layers]
        lines = layer_notes(parameters, config.optimizer)
        assert all("x 0.5: " in line for line in lines)
        assert all(last_match(name, config.optimizer.layer_learning_rates) for name in parameters)


def layer_sizes(folder: Path, arguments: list[str], more: str = "") -> tuple[dict[str, int], dict[str, float]]:
    """`lora.rank_pattern` and `lora.alpha_pattern` of kohya's arguments, at network_dim 8 and network_alpha 16."""
    sizes = 'network_module = "networks.lora"\nnetwork_alpha = 16\n'
    lora = kohya_with(folder, f"{sizes}network_args = {json.dumps(arguments)}\n{more}").config.lora
    return dict(lora.rank_pattern), dict(lora.alpha_pattern)


def test_ranks_and_alphas_of_kohyas_blocks_and_convolutions_are_those_of_its_places(tmp_path: Path) -> None:
    of_convolutions = ("*.resnets.*.conv1", "*.resnets.*.conv2", "*samplers.*.conv")
    found = layer_sizes(tmp_path, ["conv_dim=6", "conv_alpha=4"])
    assert found == (dict.fromkeys(of_convolutions, 6), dict.fromkeys(of_convolutions, 4.0))
    assert layer_sizes(tmp_path, ["conv_dim=8", "conv_alpha=16"]) == ({}, {})
    assert layer_sizes(tmp_path, ["conv_dim=8"]) == ({}, dict.fromkeys(of_convolutions, 1.0))  # kohya's default
    dims = ",".join(str(place + 1) for place in range(25))
    ranks, _ = layer_sizes(tmp_path, [f"block_dims={dims}"])
    assert ranks["down_blocks.0.attentions.0.*"] == 2  # kohya's place 1 of 12
    assert ranks["mid_block.*"] == 13
    assert ranks["up_blocks.3.attentions.2.*"] == 25
    dims = ",".join(str(place + 1) for place in range(23))
    ranks, alphas = layer_sizes(tmp_path, [f"block_dims={dims}", f"block_alphas={dims}"])
    assert ranks["down_blocks.2.attentions.1.*"] == 10  # its input block 8, behind one number of the time embedding
    assert ranks["mid_block.attentions.*"] == 12
    assert alphas["up_blocks.0.attentions.0.*"] == 14.0
    both, _ = layer_sizes(tmp_path, [f"block_dims={dims}", "conv_dim=6"])
    assert list(both)[-3:] == list(of_convolutions)  # the last pattern that matches counts
    with pytest.raises(UsageError, match="25 numbers with commas, or 23 for SDXL"):
        layer_sizes(tmp_path, ["block_dims=4,8"])


@pytest.mark.parametrize(("family", "count"), [("sd15", 25), ("sdxl", 23)])
def test_every_rank_pattern_of_kohya_matches_layers_of_the_model(family: str, count: int, tmp_path: Path) -> None:
    with torch.device("meta"):
        unet = FAMILIES[family].denoiser.make(public_architecture(family).denoiser)
    for more in ([], ["conv_dim=4"]):
        dims = ",".join(["8"] * count)
        text = f'network_module = "networks.lora"\nnetwork_args = {json.dumps([f"block_dims={dims}", *more])}'
        lora = kohya_with(tmp_path, text).config.lora
        layers = target_modules(unet, FAMILIES[family].denoiser, lora.target_modules)
        for pattern in lora.rank_pattern:
            assert any(fnmatchcase(layer, pattern) for layer in layers), pattern


def test_lora_plus_and_merged_loras_of_kohya_are_imported(tmp_path: Path) -> None:
    def lora(*arguments: str) -> tuple[float | None, float | None]:
        found = kohya_with(tmp_path, f"network_args = {json.dumps(arguments)}").config.lora
        return found.loraplus_lr_ratio, found.loraplus_text_encoder_lr_ratio

    assert lora("loraplus_lr_ratio=16") == (16.0, None)
    assert lora("loraplus_lr_ratio=16", "loraplus_unet_lr_ratio=4") == (4.0, None)
    assert lora("loraplus_text_encoder_lr_ratio=2") == (None, 2.0)
    text = 'base_weights = ["a.safetensors", "b.safetensors"]\nbase_weights_multiplier = [0.5]'
    merged = kohya_with(tmp_path, text).config.model.loras
    assert {Path(path).name: factor for path, factor in merged.items()} == {"a.safetensors": 0.5, "b.safetensors": 1.0}


def test_convolutions_of_ai_toolkit_have_their_own_rank_and_alpha(tmp_path: Path) -> None:
    network = {"type": "lora", "linear": 16, "linear_alpha": 16, "conv": 8, "conv_alpha": 4}
    process = {"type": "sd_trainer", "network": network, "model": {"name_or_path": "m", "arch": "sdxl"}}
    document = {"job": "extension", "config": {"name": "a", "process": [process]}}
    lora = imported_text(tmp_path, "a.yaml", json.dumps(document)).config.lora
    assert lora.rank == 16
    assert set(lora.rank_pattern.values()) == {8}
    assert set(lora.alpha_pattern.values()) == {4.0}
    with torch.device("meta"):
        unet = FAMILIES["sdxl"].denoiser.make(public_architecture("sdxl").denoiser)
    layers = target_modules(unet, FAMILIES["sdxl"].denoiser, lora.target_modules)
    assert all(any(fnmatchcase(layer, pattern) for layer in layers) for pattern in lora.rank_pattern)


def test_stochastic_rounding_of_onetrainer_is_for_weights_in_bf16(tmp_path: Path) -> None:
    def imported(name: str, lora: str) -> Imported:
        optimizer = {"optimizer": name, "stochastic_rounding": True}
        document = {"model_type": "STABLE_DIFFUSION_15", "training_method": "LORA", "base_model_name": "m"}
        dtypes = {"lora_weight_dtype": lora, "train_dtype": "BFLOAT_16"}
        return imported_text(tmp_path, "o.json", json.dumps(document | dtypes | {"optimizer": optimizer}))

    assert imported("ADAMW", "BFLOAT_16").config.optimizer.stochastic_rounding
    assert imported("ADAFACTOR", "BFLOAT_16").config.optimizer.stochastic_rounding
    for each in (imported("ADAMW", "FLOAT_32"), imported("PRODIGY", "BFLOAT_16")):
        assert not each.config.optimizer.stochastic_rounding
    assert verdict_of(imported("PRODIGY", "BFLOAT_16"), "stochastic_rounding")[0] == "changed"


@pytest.mark.parametrize(
    ("log_with", "trackers", "why"),
    [
        ("tensorboard", ("tensorboard",), ""),
        ("wandb", ("wandb",), "wandb needs pip install 'lora-trainer[wandb]'"),
        ("all", ("tensorboard", "wandb"), "wandb needs pip install 'lora-trainer[wandb]'"),
        ("tensorboard,comet_ml", ("tensorboard",), "without comet_ml"),
        ("comet_ml", ("tensorboard",), "comet_ml is none of the trackers here; tensorboard shows the run"),
        ("none", (), ""),
        ("", ("tensorboard",), "not set"),
    ],
)
def test_trackers_of_kohya(log_with: str, trackers: tuple[str, ...], why: str, tmp_path: Path) -> None:
    imported = kohya_with(tmp_path, f'log_with = "{log_with}"\nlog_tracker_name = "cats"')
    assert imported.config.run.trackers == trackers
    has_projects = "wandb" in trackers
    assert imported.config.run.tracker_project == ("cats" if has_projects else "lora-trainer")
    assert verdict_of(imported, "log_tracker_name")[0] == ("mapped" if has_projects else "ignored")
    assert verdict_of(imported, "log_with")[1] == why


def test_trackers_of_the_other_trainers(tmp_path: Path) -> None:
    job = {"type": "sd_trainer", "logging": {"use_wandb": True, "project_name": "cats"}}
    toolkit = {"job": "extension", "config": {"name": "a", "process": [job]}}
    files = {
        "a.json": json.dumps(toolkit),
        "o.json": json.dumps({"training_method": "LORA", "base_model_name": "m", "tensorboard": False}),
        "s.json": json.dumps({"--model_type": "lora", "--data_backend_config": "d.json", "--report_to": "wandb"}),
        "d.sh": "accelerate launch train_dreambooth_lora.py --instance_data_dir=p --rank=4 --report_to=wandb",
    }
    (tmp_path / "d.json").write_text('[{"id": "a", "type": "local", "instance_data_dir": "p"}]', encoding="utf-8")
    found = {name: imported_text(tmp_path, name, text).config.run for name, text in files.items()}
    assert {name: run.trackers for name, run in found.items()} == {
        "a.json": ("tensorboard", "wandb"),
        "o.json": (),
        "s.json": ("wandb",),
        "d.sh": ("wandb",),
    }
    assert found["a.json"].tracker_project == "cats"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.sh",
            "accelerate launch train_text_to_image_lora.py --train_data_dir=x --caption_column=description --rank 4",
        ),
        (
            "data.json",
            '[{"id": "a", "type": "local", "instance_data_dir": "x", "parquet": {"caption_column": "description"}}]',
        ),
    ],
)
def test_the_column_of_captions(name: str, text: str, tmp_path: Path) -> None:
    imported = imported_text(tmp_path, name, text)
    columns = {imported.config.captions.column}
    columns |= {each.captions.column for each in imported.config.data.sources if each.captions is not None}
    assert "description" in columns
