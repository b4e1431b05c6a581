"""A cache on a disk that may not be written to: it is used without a word, and what it lacks is one error before work."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lora_trainer.cli.main import main
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core import compilations
from lora_trainer.core.errors import UsageError
from lora_trainer.data.caches import pruning
from lora_trainer.data.images.remembered import FilePlace, Kept, Stamp, remembered
from lora_trainer.data.manifest import read_manifest
from lora_trainer.models.single import tokenizers
from lora_trainer.models.single.lay_out import lay_out
from lora_trainer.run import caching
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.read_only import read_only
from tests.recipes.recipe import Bench, contents, draw_images, exported, patched, record
from tests.run.local_hub import local_hub

PLACE = FilePlace(b"/a/cat.png", 0, -1)
KEPT = Kept(Stamp(9, 8, 7, 6), "ab" * 32, 64, 48, "PNG", 1)


@pytest.fixture
def own(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Everything of ours under the user's cache folder lies in an empty folder of the test's own."""
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "caches"))
    return Bench(bench.model, draw_images(tmp_path / "own"), bench.output, tmp_path / "caches")


def test_a_warm_cache_is_used(own, capsys):
    assert own.run("first", steps=2, cache__dir=None) == 0
    before = contents(own.cache)
    capsys.readouterr()
    with read_only(own.cache):
        assert own.run("second", steps=2, cache__dir=None) == 0
        assert own.run("cached", command="cache", steps=2, cache__dir=None) == 0
        assert main(["cache", "status", str(own.cache)]) == 0
    assert contents(own.cache) == before
    shown = capsys.readouterr()
    assert "read-only" not in (shown.out + shown.err).lower()
    assert exported(own.folder("first")) == exported(own.folder("second"))


@pytest.mark.parametrize("images", [0, 2])
def test_what_it_lacks_is_refused_before_anything_is_encoded(own, capsys, images):
    """Images that were never cached, and class images that were never generated."""
    assert own.run("first", steps=2) == 0
    (own.data / "image_3.txt").write_text("a ring that moved", encoding="utf-8")
    more = {"data__num_class_images": images, "data__class_prompts": '["a ring"]'} if images else {}
    capsys.readouterr()

    def encode(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    with read_only(own.cache), patched(caching, "fill_latents", encode):
        assert own.run("second", steps=2, **more) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert "cache.dir" in error
    assert not own.folder("second").exists()


def test_tidying_ends_no_run(own):
    """Whatever the reason for which the disk refuses it."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with patched(pruning, "forget_ended", full):
        assert own.run("first", steps=2) == 0
    assert record(own.folder("first"))["status"] == "done"


def test_headers_are_remembered(tmp_path):
    with remembered(tmp_path) as store:
        store.keep_headers({PLACE: KEPT})
    with read_only(tmp_path), remembered(tmp_path) as store:
        assert store.headers([PLACE]) == {PLACE: KEPT}
        store.keep_headers({PLACE._replace(path=b"/a/dog.png"): KEPT})
        assert store.headers([PLACE]) == {PLACE: KEPT}
    with read_only(tmp_path / "empty"), remembered(tmp_path / "empty") as store:
        assert store.headers([PLACE]) == {}


def test_code_is_compiled_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path))
    monkeypatch.setattr(compilations.atexit, "register", lambda *_, **__: None)
    monkeypatch.setenv(compilations.KEPT_IN, "")
    assert compilations.keep_compilations() is None
    monkeypatch.setenv(compilations.KEPT_IN, "")
    with read_only(tmp_path):
        assert compilations.keep_compilations() is not None
    own = Path(os.environ[compilations.KEPT_IN])
    assert not own.is_relative_to(tmp_path)
    own.rmdir()


def test_the_estimate_of_a_plan_is_computed_again(own, capsys):
    own.cache.mkdir()
    with read_only(own.cache):
        assert own.run("any", "--json", command="plan") == 0
    assert json.loads(capsys.readouterr().out)["family"] == "sd15"


def test_a_checkpoint_is_laid_out_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    file = write(unet_checkpoint(tiny_pipeline(tmp_path / "words", "sd15"), "sd15"), tmp_path / "model.safetensors")
    (tmp_path / "caches").mkdir()
    with read_only(tmp_path / "caches"), pytest.raises(UsageError) as caught:
        lay_out(file)
    assert len(caught.value.problems) == 1
    assert "LORA_TRAINER_CACHE" in caught.value.problems[0].fix
    folder = lay_out(file)
    with read_only(tmp_path / "caches"):
        assert lay_out(file) == folder


def test_images_of_a_parquet_file_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "caches"))
    (tmp_path / "caches").mkdir()
    png = io.BytesIO()
    Image.new("RGB", (96, 96), "teal").save(png, "PNG")
    table = tmp_path / "train.parquet"
    pq.write_table(pa.table({"jpg": [png.getvalue()], "caption": ["a wall"]}), table)
    with read_only(tmp_path / "caches"), pytest.raises(UsageError) as caught:
        read_manifest([table])
    assert len(caught.value.problems) == 1
    assert "LORA_TRAINER_CACHE" in caught.value.problems[0].fix
    samples = read_manifest([table])[0].samples
    assert len(samples) == 1
    with read_only(tmp_path / "caches"):
        assert read_manifest([table])[0].samples == samples


def test_a_model_of_the_hub_is_downloaded_once(tmp_path):
    weights = {"unet/diffusion_pytorch_model.safetensors": b"weights", "unet/config.json": b"{}"}
    index = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    with local_hub(tmp_path / "hf") as hub:
        hub.repositories["some/model"] = {"model_index.json": json.dumps(index).encode(), **weights}
        section = ModelSection(path="some/model")
        (tmp_path / "hf").mkdir(exist_ok=True)
        with read_only(tmp_path / "hf"), pytest.raises(UsageError) as caught:
            find_base(section, say=hub.listing.get)
        assert len(caught.value.problems) == 1
        assert "HF_HOME" in caught.value.problems[0].fix
        found = find_base(section, say=hub.listing.get)
        with read_only(tmp_path / "hf"):
            assert find_base(section, say=hub.listing.get) == found
