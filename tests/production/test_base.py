"""Single checkpoints and replaced parts as one folder: what `model.vae` and `model.text_encoders` make of a base."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.cli.main import main
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.models import FAMILIES
from lora_trainer.models.folder import detect_family, places_of_weights, weights_digest, without_weights
from lora_trainer.models.places import laid_out_models
from lora_trainer.models.single import tokenizers
from lora_trainer.models.single.recognise import recognise
from lora_trainer.production.bases.base import find_base
from lora_trainer.production.bases.hub_header import stand_in
from lora_trainer.production.bases.names import absolute
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.production.local_hub import COMMIT, local_hub

CPU = torch.device("cpu")


def found(path: Path, **more: object) -> Path:
    return find_base(
        ModelSection.model_validate({"path": str(path), **{key: str(value) for key, value in more.items()}})
    ).folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of diffusers, and the same model in one file with its text encoders and autoencoder."""
    place = tmp_path_factory.mktemp("made")
    pipeline = tiny_pipeline(place / "words", "sdxl")
    pipeline.save_pretrained(place / "folder")
    write(unet_checkpoint(pipeline, "sdxl"), place / "model.safetensors")
    return place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "folder", tmp_path / "folder")


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tokenizers, "CLIP", made / "words")
    return Path(shutil.copy(made / "model.safetensors", tmp_path))


def without(file: Path, *beginnings: str) -> Path:
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(beginnings)}
    return write(tensors, file.with_name("less.safetensors"))


def encoded(folder: Path) -> dict[str, torch.Tensor]:
    family = FAMILIES[detect_family(folder)]
    return family.load_encoders(folder, torch.float32, CPU).encode_text(["a red square"])


def test_what_a_checkpoint_lacks_comes_from_another_folder(folder: Path, checkpoint: Path) -> None:
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


def test_what_a_base_has_stays_its_own(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
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
        (tmp_path / "lost", "is nothing"),
        (folder / "tokenizer", "neither text_encoder/"),
        (folder / "unet", "has its own"),
        (folder / "model_index.json", "has its own"),
    ):
        with pytest.raises(UsageError, match=words):
            found(folder, text_encoders=place)


def test_all_that_is_wrong_with_replaced_parts_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        found(folder, text_encoders=tmp_path / "lost", vae=tmp_path / "gone")
    assert len(caught.value.problems) == 2


def test_a_laid_out_folder_that_vanished_is_made_anew(checkpoint: Path) -> None:
    first = found(checkpoint)
    shutil.rmtree(laid_out_models())
    assert found(checkpoint) == first
    assert FAMILIES["sdxl"].describe(first).family == "sdxl"


def test_a_folder_that_leads_elsewhere_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """A table of places in a stranger's autoencoder would name any file."""
    vae = shutil.copytree(folder / "vae", tmp_path / "vae")
    (vae / "weights.json").write_text('{"version": 1, "files": [["/etc/passwd", 1, 1]], "weights": {}}')
    with pytest.raises(UsageError, match="only read from the cache"):
        found(folder, vae=vae)


@pytest.mark.parametrize("part", ["tokenizer", "scheduler"])
def test_a_table_of_places_is_not_copied_into_the_cache(folder: Path, tmp_path: Path, part: str) -> None:
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


def test_a_stray_shard_beside_a_whole_set_is_passed_over(folder: Path) -> None:
    unet = folder / "unet"
    (file,) = unet.glob("*.safetensors")
    half = file.rename(unet / "diffusion_pytorch_model.fp16.safetensors")
    shutil.copy(half, unet / "diffusion_pytorch_model-00001-of-00002.safetensors")
    assert {place.file for place in places_of_weights(unet).values()} == {half}


def test_what_is_laid_out_leaves_with_its_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    other = Path(shutil.copy(checkpoint, tmp_path / "other.safetensors"))
    kept, gone = found(checkpoint), found(other)
    other.unlink()
    assert main(["cache", "status"]) == 0
    assert "2 laid-out models" in capsys.readouterr().out
    assert main(["cache", "clean"]) == 0
    assert "1 laid-out model whose files are gone or changed" in capsys.readouterr().out
    assert kept.is_dir()
    assert not gone.exists()


def test_an_id_of_a_hub_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("some/model") == "some/model"
    assert absolute("some/model/sd.safetensors") == "some/model/sd.safetensors"
    (tmp_path / "some").mkdir()
    assert absolute("some/model") == str(tmp_path / "some" / "model")
    assert absolute("model.safetensors") == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("ranged", [True, False])
def test_of_a_checkpoint_of_a_hub_the_header_alone_is_fetched_first(
    checkpoint: Path, tmp_path: Path, ranged: bool
) -> None:
    model = ModelSection(path="some/single/sd.safetensors")
    whole = FAMILIES["sdxl"].describe(found(checkpoint))
    with local_hub(tmp_path / "hf") as hub:
        hub.ranged = ranged
        hub.repositories["some/single"] = {"sd.safetensors": checkpoint.read_bytes()}
        header = find_base(model, weights=False, say=hub.listing.get)
        assert (header.named, header.commit, header.whole) == ("some/single/sd.safetensors", COMMIT, False)
        told = FAMILIES["sdxl"].describe(header.folder)
        assert (told.resolution, told.prediction, told.latent_channels) == (
            whole.resolution,
            whole.prediction,
            whole.latent_channels,
        )
        asked = [span for how, _, span in hub.asked if how == "GET" and span]
        (length,) = struct.unpack("<Q", checkpoint.read_bytes()[:8])
        assert asked == ["bytes=0-7", f"bytes=8-{7 + length}"]
        assert not list((tmp_path / "hf").rglob("sd.safetensors"))
        hub.asked.clear()
        assert find_base(model, weights=False, say=hub.listing.get) == header
        assert hub.asked == []
        fetched = find_base(model, say=hub.listing.get)
        assert fetched.whole
        assert fetched.folder != header.folder
        assert find_base(model, weights=False, offline=True) == fetched


def test_values_that_tell_a_variant_are_fetched_with_the_header(tmp_path: Path) -> None:
    norm = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
    reads = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.attn2.to_k.weight"
    tensors = {norm: torch.linspace(-1, 1, 320), reads: torch.zeros(8, 1024)}
    tensors["model.diffusion_model.input_blocks.0.0.weight"] = torch.zeros(8, 4, 3, 3)
    data = write(tensors, tmp_path / "sd2.safetensors").read_bytes()
    folder = stand_in("some/sd2.safetensors", len(data), lambda begin, end: data[begin:end])
    assert recognise(folder / "some/sd2.safetensors").prediction == "v_prediction"


@pytest.mark.parametrize("data", [b"", b"PK\3\4....more", b"\xff" * 20, b"\x08" + bytes(7) + b"no json!" + bytes(9)])
def test_what_is_no_checkpoint_is_refused_by_its_header(tmp_path: Path, data: bytes) -> None:
    with local_hub(tmp_path / "hf") as hub:
        hub.repositories["some/single"] = {"sd.safetensors": data}
        with pytest.raises(UsageError, match=r"^some/single/sd\.safetensors"):
            find_base(ModelSection(path="some/single/sd.safetensors"), weights=False, say=hub.listing.get)


def test_a_hubs_checkpoint_is_called_by_its_id(checkpoint: Path, tmp_path: Path) -> None:
    """Not by the place of the file that stands in for it."""
    lora = write({"unet.x.lora_A.weight": torch.zeros(1)}, tmp_path / "lora.safetensors").read_bytes()
    less = without(checkpoint, "conditioner.embedders.1.", "first_stage_model.").read_bytes()
    for data, count in ((lora, 1), (less, 2)):
        with local_hub(tmp_path / f"hf{count}") as hub:
            hub.repositories["some/single"] = {"sd.safetensors": data}
            with pytest.raises(UsageError) as caught:
                find_base(ModelSection(path="some/single/sd.safetensors"), weights=False, say=hub.listing.get)
        assert [problem.message[:27] for problem in caught.value.problems] == ["some/single/sd.safetensors "] * count


def test_a_checkpoint_of_a_hub_and_an_autoencoder_for_a_hubs_model(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    with local_hub(tmp_path / "hf") as hub:
        hub.repositories["some/single"] = {"old/sd.safetensors": checkpoint.read_bytes()}
        hub.holds("some/model", folder)
        single = find_base(ModelSection(path="some/single/old/sd.safetensors"), say=hub.listing.get)
        assert (single.named, single.commit) == ("some/single/old/sd.safetensors", COMMIT)
        replaced = ModelSection(path="some/model", vae=str(folder))
        alone = find_base(replaced, weights=False, say=hub.listing.get)
        assert not alone.whole  # what is not here cannot be laid out: its configs tell what it is
        whole = find_base(replaced, say=hub.listing.get)
        assert whole.folder.is_relative_to(laid_out_models())
        assert (whole.named, whole.commit, whole.whole) == ("some/model", COMMIT, True)
        for name, tensor in encoded(single.folder).items():
            assert torch.equal(encoded(whole.folder)[name], tensor)
        assert find_base(ModelSection(path="some/single/old/sd.safetensors"), offline=True).folder == single.folder


def test_a_folder_too_high_names_the_model_in_it(folder: Path) -> None:
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


def test_laid_out_folders_do_not_pile_up(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was laid out of a file that is gone leaves when another is laid out, unless it was used today."""
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


@pytest.mark.parametrize("inside", ["", "vae/"])
def test_an_autoencoder_of_a_hub(folder: Path, checkpoint: Path, tmp_path: Path, inside: str) -> None:
    """A repository that is one, or a whole model's: fetched once, held to its commit, its config before its weights."""
    plain = folder / "vae"
    with local_hub(tmp_path / "hf") as hub:
        files = {f"{inside}{path.name}": path.read_bytes() for path in plain.iterdir()}
        hub.repositories["some/vae"] = {**files, "other.safetensors": b"x", "README.md": b"read me"}
        for base in (folder, checkpoint, without(checkpoint, "first_stage_model.")):
            shutil.rmtree(tmp_path / "hf", ignore_errors=True)
            hub.asked.clear()
            model = ModelSection(path=str(base), vae="some/vae")
            told = find_base(model, weights=False, say=hub.listing.get)
            assert hub.fetched() == [f"{inside}config.json"]
            assert (told.whole, told.held) == (False, {"vae": f"some/vae@{COMMIT}"})
            with without_weights():
                assert FAMILIES["sdxl"].describe(told.folder).latent_channels == 4
            whole = find_base(model, say=hub.listing.get)
            assert (whole.whole, whole.commit) == (True, None)
            assert hub.fetched()[1:] == [f"{inside}diffusion_pytorch_model.safetensors"]
            hub.asked.clear()
            held = ModelSection(path=str(base), vae=f"some/vae@{COMMIT}")
            assert find_base(held, offline=True) == whole
            assert hub.asked == []
            assert weights_digest(whole.folder / "vae") == weights_digest(found(base, vae=folder) / "vae")


def test_an_autoencoder_in_one_file_of_a_hub(folder: Path, tmp_path: Path) -> None:
    (file,) = (folder / "vae").glob("*.safetensors")
    with local_hub(tmp_path / "hf") as hub:
        hub.repositories["some/vae"] = {"one.safetensors": file.read_bytes()}
        model = ModelSection(path=str(folder), vae="some/vae/one.safetensors")
        told = find_base(model, weights=False, say=hub.listing.get)
        assert (told.whole, told.held) == (False, {"vae": f"some/vae@{COMMIT}/one.safetensors"})
        assert not list((tmp_path / "hf").rglob("one.safetensors"))
        whole = find_base(ModelSection(path=str(folder), vae=told.held["vae"]), say=hub.listing.get)
        assert weights_digest(whole.folder / "vae") == weights_digest(found(folder, vae=file) / "vae")
        for named in ("some/vae", "some/vae@v1"):
            with pytest.raises(UsageError, match=r"holds no vae/.*Name one of its files: some/vae/one.safetensors"):
                find_base(ModelSection(path=str(folder), vae=named), say=hub.listing.get)


def test_an_autoencoder_of_a_hub_that_does_not_fit_is_refused_by_its_config(folder: Path, tmp_path: Path) -> None:
    with local_hub(tmp_path / "hf") as hub:
        hub.repositories["some/vae"] = {"config.json": b'{"_class_name": "AutoencoderKL", "latent_channels": 16}'}
        hub.repositories["some/vae"] |= {"diffusion_pytorch_model.safetensors": b"never fetched"}
        hub.repositories["some/unet"] = {"config.json": b'{"_class_name": "UNet2DConditionModel"}'}
        hub.repositories["some/bin"] = {"config.json": b"{}", "diffusion_pytorch_model.bin": b"x"}
        for named, words in (
            ("some/vae", "model.vae: some/vae has 16 latent channels, and the model's own has 4"),
            ("some/unet", "some/unet is a UNet2DConditionModel"),
            ("some/lost", r"some/lost is neither.*Check model.vae"),
        ):
            with pytest.raises(UsageError, match=words):
                find_base(ModelSection(path=str(folder), vae=named), weights=False, say=hub.listing.get)
        with pytest.raises(UsageError, match=r"some/bin: it holds only .*, a pickle"):
            find_base(ModelSection(path=str(folder), vae="some/bin"), say=hub.listing.get)
        with pytest.raises(UsageError, match="some/other at main is not in the Hugging Face cache"):
            find_base(ModelSection(path=str(folder), vae="some/other"), offline=True)
        assert set(hub.fetched()) == {"config.json"}


def test_text_encoders_of_a_hub(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Only what the base lacks is fetched."""
    less = without(checkpoint, "conditioner.embedders.1.")
    model = ModelSection(path=str(less), text_encoders="some/model")
    with local_hub(tmp_path / "hf") as hub:
        hub.holds("some/model", folder)
        assert not find_base(model, weights=False, say=hub.listing.get).whole
        assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
        laid_out = find_base(model, say=hub.listing.get)
        assert {name.partition("/")[0] for name in hub.fetched()} == {"text_encoder_2", "tokenizer_2"}
        assert laid_out.held == {"text_encoders": f"some/model@{COMMIT}"}
        hub.asked.clear()
        assert find_base(model, say=hub.listing.get) == laid_out
        assert hub.asked == []
        for name, tensor in encoded(found(checkpoint)).items():
            assert torch.equal(encoded(laid_out.folder)[name], tensor)
        with pytest.raises(UsageError, match="the model has its own"):
            find_base(ModelSection(path=str(folder), text_encoders="some/model"), say=hub.listing.get)


def test_a_fetch_of_shards_that_was_cut_off_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    """The index names shards that are not here yet; the configs are read first all the same."""
    (file,) = (folder / "unet").glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    shards = [f"{file.stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    placed = {name: shards[number % 2] for number, name in enumerate(tensors)}
    for shard in shards:
        write({name: tensors[name] for name in tensors if placed[name] == shard}, file.with_name(shard))
    (file.parent / f"{file.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    with local_hub(tmp_path / "hf") as hub:
        hub.holds("some/model", folder)
        hub.status[shards[1]] = (403, "")
        with pytest.raises(UsageError, match="error 403"):
            find_base(ModelSection(path="some/model"), say=hub.listing.get)
        hub.status.clear()
        told = find_base(ModelSection(path="some/model"), weights=False, say=hub.listing.get)
        with without_weights():
            assert FAMILIES["sdxl"].describe(told.folder).family == "sdxl"
        assert find_base(ModelSection(path="some/model"), say=hub.listing.get).whole
