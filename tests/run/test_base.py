"""Single checkpoints and replaced parts as one folder: `model.vae` and `model.text_encoders`."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.cli.main import main
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import places_of_weights
from lora_trainer.models.places import laid_out_models
from lora_trainer.models.single import tokenizers
from lora_trainer.run.bases.find import find_base
from lora_trainer.run.bases.names import absolute
from tests.conftest import needs_links
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.run.base_folders import encoded, found, without


def test_missing_parts_of_a_checkpoint_come_from_another_folder(folder: Path, checkpoint: Path) -> None:
    less = without(checkpoint, "conditioner.embedders.1.", "first_stage_model.")
    with pytest.raises(UsageError) as caught:
        found(less)
    assert len(caught.value.problems) == 2
    fixes = " ".join(problem.fix for problem in caught.value.problems)
    assert "model.vae" in fixes
    assert "model.text_encoders" in fixes
    laid_out = found(less, text_encoders=folder, vae=folder)
    assert detect_family(laid_out) == "sdxl"
    for name, tensor in encoded(found(checkpoint)).items():
        assert torch.equal(encoded(laid_out)[name], tensor)


def test_parts_that_a_base_model_has_are_not_replaced(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    file = other / "text_encoder" / "model.safetensors"
    write({name: tensor + 1 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    plain = encoded(found(checkpoint))
    for base in (checkpoint, folder):
        with pytest.raises(UsageError, match=r"the model has its own.*Remove model.text_encoders"):
            found(base, text_encoders=other)
    shutil.rmtree(folder / "text_encoder")
    for name in ("text_encoder_2", "tokenizer_2"):
        shutil.rmtree(other / name)
    changed = encoded(found(folder, text_encoders=other))
    assert not all(torch.equal(plain[name], changed[name]) for name in plain)


def test_a_folder_of_text_encoders_without_any_is_refused(folder: Path, tmp_path: Path) -> None:
    for place, words in (
        (tmp_path / "lost", "there is no file or folder"),
        (folder / "tokenizer", "neither text_encoder/"),
        (folder / "unet", "has its own"),
        (folder / "model_index.json", "has its own"),
    ):
        with pytest.raises(UsageError, match=words):
            found(folder, text_encoders=place)


def test_all_problems_of_replaced_parts_are_reported_at_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        found(folder, text_encoders=tmp_path / "lost", vae=tmp_path / "gone")
    assert len(caught.value.problems) == 2


def test_a_deleted_converted_folder_is_created_again(checkpoint: Path) -> None:
    first = found(checkpoint)
    shutil.rmtree(laid_out_models())
    assert found(checkpoint) == first
    assert FAMILIES["sdxl"].describe(first).family == "sdxl"


def test_a_folder_that_links_elsewhere_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """A shard index in an untrusted VAE folder could name any file."""
    vae = shutil.copytree(folder / "vae", tmp_path / "vae")
    (vae / "weights.json").write_text('{"version": 1, "files": [["/etc/passwd", 1, 1]], "weights": {}}')
    with pytest.raises(UsageError, match="only read from the cache"):
        found(folder, vae=vae)


@pytest.mark.parametrize("part", ["tokenizer", "scheduler"])
def test_a_shard_index_is_not_copied_into_the_cache(folder: Path, tmp_path: Path, part: str) -> None:
    """There it would be trusted."""
    vae = shutil.copytree(folder / "vae", tmp_path / "vae")
    (folder / part / "weights.json").write_text('{"version": 1, "files": [["/etc/passwd", 1, 1]], "weights": {}}')
    laid_out = found(folder, vae=vae)
    assert (laid_out / part).is_dir()
    assert not (laid_out / part / "weights.json").exists()


def test_nor_with_a_tokenizer_for_a_checkpoint(folder: Path, checkpoint: Path) -> None:
    (folder / "tokenizer_2" / "weights.json").write_text("{}")
    tokenizers.copy_tokenizer("clip_g", folder / "tokenizer_2", target := checkpoint.parent / "words")
    assert (target / "tokenizer_config.json").exists()
    assert not (target / "weights.json").exists()


def test_a_stray_shard_next_to_a_complete_set_is_ignored(folder: Path) -> None:
    unet = folder / "unet"
    (file,) = unet.glob("*.safetensors")
    half = file.rename(unet / "diffusion_pytorch_model.fp16.safetensors")
    shutil.copy(half, unet / "diffusion_pytorch_model-00001-of-00002.safetensors")
    assert {place.file for place in places_of_weights(unet).values()} == {half}


def test_a_converted_folder_is_removed_with_its_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    other = Path(shutil.copy(checkpoint, tmp_path / "other.safetensors"))
    kept, gone = found(checkpoint), found(other)
    other.unlink()
    assert main(["cache", "status"]) == 0
    assert "2 laid-out models" in capsys.readouterr().out
    assert main(["cache", "prune"]) == 0
    assert "1 laid-out model whose files are gone or changed" in capsys.readouterr().out
    assert kept.is_dir()
    assert not gone.exists()


def test_a_hub_id_stays_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("some/model") == "some/model"
    assert absolute("some/model/sd.safetensors") == "some/model/sd.safetensors"
    (tmp_path / "some").mkdir()
    assert absolute("some/model") == str(tmp_path / "some" / "model")
    assert absolute("model.safetensors") == str(tmp_path / "model.safetensors")


def test_a_parent_folder_is_refused_with_the_model_in_it(folder: Path) -> None:
    with pytest.raises(UsageError, match=f"Did you mean {folder}"):
        found(folder.parent)


def test_a_checkpoint_named_by_a_relative_path_is_found_from_any_folder(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint.parent / "deep").mkdir()
    monkeypatch.chdir(checkpoint.parent)
    first = found(Path(checkpoint.name))
    monkeypatch.chdir("deep")
    assert found(Path("..", checkpoint.name)) == first == found(checkpoint)
    assert FAMILIES["sdxl"].describe(first).family == "sdxl"


def test_converted_folders_do_not_pile_up(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converted folder of a deleted file is removed at the next conversion, unless used today."""
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    others = [Path(shutil.copy(checkpoint, tmp_path / f"{name}.safetensors")) for name in ("long", "idle", "today")]
    long, idle, today = (found(file) for file in others)
    for file in others[0], others[2]:
        file.unlink()
    for folder, days in ((long, 2), (idle, 91)):
        os.utime(folder, (time.time() - days * 86400,) * 2)
    kept = found(checkpoint)
    assert [folder.is_dir() for folder in (long, idle, today, kept)] == [False, False, True, True]
    os.utime(kept, (time.time() - 91 * 86400,) * 2)
    found(checkpoint)  # used again
    found(Path(shutil.copy(checkpoint, tmp_path / "new.safetensors")))
    assert kept.is_dir()


@pytest.mark.parametrize(
    ("file", "entry", "words"),
    [
        ("unet/config.json", {"in_channels": 9}, "inpainting.*9 input channels in place of 4"),
        ("text_encoder_2/config.json", {"hidden_size": 64}, r"takes text 192 wide, the text encoders give 64 \+ 64"),
        ("text_encoder_2/config.json", {"projection_dim": 32}, "takes a summary with sizes 1600 wide.* gives 1568"),
        ("unet/config.json", {"class_embed_type": "projection"}, "has inputs besides noise and text"),
        ("unet/config.json", {"encoder_hid_dim_type": "ip_image_proj"}, "has inputs besides noise and text"),
        ("unet/config.json", {"time_cond_proj_dim": 256}, "has inputs besides noise and text"),
        ("vae/config.json", {"latent_channels": 16}, "takes 4 latent channels, and the VAE makes 16"),
        ("vae/config.json", {"_class_name": "AutoencoderTiny"}, "is a AutoencoderTiny, not an AutoencoderKL"),
        ("vae/config.json", {"scaling_factor": None}, "scaling_factor is None"),
        ("vae/config.json", {"scaling_factor": 0}, "scaling_factor is 0"),
    ],
)
def test_a_folder_with_another_kind_of_model(folder: Path, file: str, entry: dict[str, object], words: str) -> None:
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | entry))
    with pytest.raises(UsageError, match=words):
        FAMILIES["sdxl"].describe(found(folder))


def test_all_parts_that_a_folder_lacks_are_named_at_once(folder: Path) -> None:
    for part in ("unet", "vae", "tokenizer_2"):
        shutil.rmtree(folder / part)
    with pytest.raises(UsageError) as caught:
        found(folder)
    assert [problem.message for problem in caught.value.problems] == [
        f"{folder}/tokenizer_2/ holds no vocabulary.",
        f"{folder}/unet/config.json is missing.",
        f"{folder}/vae/config.json is missing.",
    ]


def test_a_vae_from_a_checkpoint_of_another_family_is_refused(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Its family sets the scale, which no file stores."""
    other = write(unet_checkpoint(tiny_pipeline(tmp_path / "words", "sd15"), "sd15"), tmp_path / "sd.safetensors")
    with pytest.raises(UsageError, match=r"scaling_factor of 0.18215, and the model's own has 0.13025"):
        found(folder, vae=other)
    assert found(folder, vae=checkpoint).is_dir()


@needs_links
def test_a_path_without_a_model_is_refused_with_a_suggestion(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("gone")
    page = "https://huggingface.co/some/model"
    for named, words in (
        ("link", "is a link to gone, which does not exist"),
        ("lost", "looked for in"),
        (" ", "--model is empty"),
        ("some/model@v1", "Write it as some/model, with model.revision=v1"),
        (f"{page}/resolve/main/old/sd.safetensors", "Name the model as some/model/old/sd.safetensors"),
        ("https://elsewhere.org/sd", "Download the file"),
        (str(folder / "model_index.json"), f"Use its folder: {folder}"),
        (str(folder / "unet"), f"Use the whole model: {folder}"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            find_base(ModelSection(path=named))
    for vae, words in ((page, "Name the model as some/model"), (str(folder / "text_encoder"), "is a clip_text_model")):
        with pytest.raises(UsageError, match=words):
            found(folder, vae=vae)
