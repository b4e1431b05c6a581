"""Hub base models and their parts: fetched, pinned to commits, converted and refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import weights_digest, without_weights
from lora_trainer.models.places import laid_out_models
from lora_trainer.models.single.recognize import recognize
from lora_trainer.run.bases.find import find_base
from lora_trainer.run.bases.hub_header import make_placeholder
from tests.models.single.originals import write
from tests.run.base_folders import encoded, found, without
from tests.run.local_hub import COMMIT, local_hub


@pytest.mark.parametrize("ranged", [True, False])
def test_only_the_header_of_a_hub_checkpoint_is_fetched_first(checkpoint: Path, tmp_path: Path, ranged: bool) -> None:
    model = ModelSection(path="some/single/sd.safetensors")
    whole = FAMILIES["sdxl"].describe(found(checkpoint))
    with local_hub(tmp_path / "hf") as hub:
        hub.ranged = ranged
        hub.repositories["some/single"] = {"sd.safetensors": checkpoint.read_bytes()}
        header = find_base(model, weights=False, say=hub.listing.get)
        assert (header.named, header.commit, header.whole) == ("some/single/sd.safetensors", COMMIT, False)
        facts = FAMILIES["sdxl"].describe(header.folder)
        assert (facts.resolution, facts.prediction, facts.latent_channels) == (
            whole.resolution,
            whole.prediction,
            whole.latent_channels,
        )
        ranges = [span for how, _, span in hub.requests if how == "GET" and span]
        (length,) = struct.unpack("<Q", checkpoint.read_bytes()[:8])
        assert ranges == ["bytes=0-7", f"bytes=8-{7 + length}"]
        assert not list((tmp_path / "hf").rglob("sd.safetensors"))
        hub.requests.clear()
        assert find_base(model, weights=False, say=hub.listing.get) == header
        assert hub.requests == []
        fetched = find_base(model, say=hub.listing.get)
        assert fetched.whole
        assert fetched.folder != header.folder
        assert find_base(model, weights=False, offline=True) == fetched


def test_values_that_identify_a_flavor_are_fetched_with_the_header(tmp_path: Path) -> None:
    norm = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
    reads = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.attn2.to_k.weight"
    tensors = {norm: torch.linspace(-1, 1, 320), reads: torch.zeros(8, 1024)}
    tensors["model.diffusion_model.input_blocks.0.0.weight"] = torch.zeros(8, 4, 3, 3)
    data = write(tensors, tmp_path / "sd2.safetensors").read_bytes()
    folder = make_placeholder("some/sd2.safetensors", len(data), lambda begin, end: data[begin:end])
    assert recognize(folder / "some/sd2.safetensors").prediction == "v_prediction"


@pytest.mark.parametrize("data", [b"", b"PK\3\4....more", b"\xff" * 20, b"\x08" + bytes(7) + b"no json!" + bytes(9)])
def test_a_file_that_is_no_checkpoint_is_refused_by_its_header(tmp_path: Path, data: bytes) -> None:
    with local_hub(tmp_path / "hf") as hub:
        hub.repositories["some/single"] = {"sd.safetensors": data}
        with pytest.raises(UsageError, match=r"^some/single/sd\.safetensors"):
            find_base(ModelSection(path="some/single/sd.safetensors"), weights=False, say=hub.listing.get)


def test_a_hub_checkpoint_is_named_by_its_id(checkpoint: Path, tmp_path: Path) -> None:
    """Not by the path of its placeholder file."""
    lora = write({"unet.x.lora_A.weight": torch.zeros(1)}, tmp_path / "lora.safetensors").read_bytes()
    less = without(checkpoint, "conditioner.embedders.1.", "first_stage_model.").read_bytes()
    for data, count in ((lora, 1), (less, 2)):
        with local_hub(tmp_path / f"hf{count}") as hub:
            hub.repositories["some/single"] = {"sd.safetensors": data}
            with pytest.raises(UsageError) as caught:
                find_base(ModelSection(path="some/single/sd.safetensors"), weights=False, say=hub.listing.get)
        assert [problem.message[:27] for problem in caught.value.problems] == ["some/single/sd.safetensors "] * count


def test_a_hub_checkpoint_and_a_vae_for_a_hub_model(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    with local_hub(tmp_path / "hf") as hub:
        hub.repositories["some/single"] = {"old/sd.safetensors": checkpoint.read_bytes()}
        hub.holds("some/model", folder)
        single = find_base(ModelSection(path="some/single/old/sd.safetensors"), say=hub.listing.get)
        assert (single.named, single.commit) == ("some/single/old/sd.safetensors", COMMIT)
        replaced = ModelSection(path="some/model", vae=str(folder))
        alone = find_base(replaced, weights=False, say=hub.listing.get)
        assert not alone.whole  # missing files cannot be converted: the configs describe the model
        whole = find_base(replaced, say=hub.listing.get)
        assert whole.folder.is_relative_to(laid_out_models())
        assert (whole.named, whole.commit, whole.whole) == ("some/model", COMMIT, True)
        for name, tensor in encoded(single.folder).items():
            assert torch.equal(encoded(whole.folder)[name], tensor)
        assert find_base(ModelSection(path="some/single/old/sd.safetensors"), offline=True).folder == single.folder


@pytest.mark.parametrize("inside", ["", "vae/"])
def test_a_hub_vae(folder: Path, checkpoint: Path, tmp_path: Path, inside: str) -> None:
    """A VAE repository, or a whole model's: fetched once, pinned to its commit, config before weights."""
    plain = folder / "vae"
    with local_hub(tmp_path / "hf") as hub:
        files = {f"{inside}{path.name}": path.read_bytes() for path in plain.iterdir()}
        hub.repositories["some/vae"] = {**files, "other.safetensors": b"x", "README.md": b"read me"}
        for base in (folder, checkpoint, without(checkpoint, "first_stage_model.")):
            shutil.rmtree(tmp_path / "hf", ignore_errors=True)
            hub.requests.clear()
            model = ModelSection(path=str(base), vae="some/vae")
            early = find_base(model, weights=False, say=hub.listing.get)
            assert hub.fetched() == [f"{inside}config.json"]
            assert (early.whole, early.pinned) == (False, {"vae": f"some/vae@{COMMIT}"})
            with without_weights():
                assert FAMILIES["sdxl"].describe(early.folder).latent_channels == 4
            whole = find_base(model, say=hub.listing.get)
            assert (whole.whole, whole.commit) == (True, None)
            assert hub.fetched()[1:] == [f"{inside}diffusion_pytorch_model.safetensors"]
            hub.requests.clear()
            section = ModelSection(path=str(base), vae=f"some/vae@{COMMIT}")
            assert find_base(section, offline=True) == whole
            assert hub.requests == []
            assert weights_digest(whole.folder / "vae") == weights_digest(found(base, vae=folder) / "vae")


def test_a_hub_vae_in_one_file(folder: Path, tmp_path: Path) -> None:
    (file,) = (folder / "vae").glob("*.safetensors")
    with local_hub(tmp_path / "hf") as hub:
        hub.repositories["some/vae"] = {"one.safetensors": file.read_bytes()}
        model = ModelSection(path=str(folder), vae="some/vae/one.safetensors")
        early = find_base(model, weights=False, say=hub.listing.get)
        assert (early.whole, early.pinned) == (False, {"vae": f"some/vae@{COMMIT}/one.safetensors"})
        assert not list((tmp_path / "hf").rglob("one.safetensors"))
        whole = find_base(ModelSection(path=str(folder), vae=early.pinned["vae"]), say=hub.listing.get)
        assert weights_digest(whole.folder / "vae") == weights_digest(found(folder, vae=file) / "vae")
        for named in ("some/vae", "some/vae@v1"):
            with pytest.raises(UsageError, match=r"holds no vae/.*Name one of its files: some/vae/one.safetensors"):
                find_base(ModelSection(path=str(folder), vae=named), say=hub.listing.get)


def test_a_hub_vae_that_does_not_fit_is_refused_by_its_config(folder: Path, tmp_path: Path) -> None:
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


def test_hub_text_encoders(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Only the missing parts of the base model are fetched."""
    less = without(checkpoint, "conditioner.embedders.1.")
    model = ModelSection(path=str(less), text_encoders="some/model")
    with local_hub(tmp_path / "hf") as hub:
        hub.holds("some/model", folder)
        assert not find_base(model, weights=False, say=hub.listing.get).whole
        assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
        laid_out = find_base(model, say=hub.listing.get)
        assert {name.partition("/")[0] for name in hub.fetched()} == {"text_encoder_2", "tokenizer_2"}
        assert laid_out.pinned == {"text_encoders": f"some/model@{COMMIT}"}
        hub.requests.clear()
        assert find_base(model, say=hub.listing.get) == laid_out
        assert hub.requests == []
        for name, tensor in encoded(found(checkpoint)).items():
            assert torch.equal(encoded(laid_out.folder)[name], tensor)
        with pytest.raises(UsageError, match="the model has its own"):
            find_base(ModelSection(path=str(folder), text_encoders="some/model"), say=hub.listing.get)


def test_an_interrupted_fetch_of_shards_resumes(folder: Path, tmp_path: Path) -> None:
    """The index names shards that are not fetched yet; the configs are read first anyway."""
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
        found = find_base(ModelSection(path="some/model"), weights=False, say=hub.listing.get)
        with without_weights():
            assert FAMILIES["sdxl"].describe(found.folder).family == "sdxl"
        assert find_base(ModelSection(path="some/model"), say=hub.listing.get).whole
