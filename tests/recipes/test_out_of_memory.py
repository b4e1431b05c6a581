"""Running out of memory after training, or while caching, costs only time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.diffusion import loss as loss_module
from lora_trainer.evaluation import sample as sample_module
from lora_trainer.evaluation.lora_check import check_lora
from lora_trainer.evaluation.sample import compare
from lora_trainer.models.families import FAMILIES
from lora_trainer.run import release, uncached
from tests.recipes.recipe import Bench, contents, exported, losses, record, rows

SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def short_of_memory(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, out of memory unless nothing else stays on the GPU."""

    def work_or_fail(*args: Any) -> Any:
        *others, compute = args
        if compute.usable != 0:
            raise torch.OutOfMemoryError(SHORT)
        return work(*others, replace(compute, usable=None))

    return work_or_fail


def never(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(SHORT)


def test_the_gate_and_samples_use_less_memory(bench, finished, monkeypatch, capsys):
    """The trained denoiser leaves the GPU for sampling and returns unchanged."""
    rooms, freed = iter([0]), []
    monkeypatch.setattr(release, "usable_bytes", lambda *_: next(rooms, None))
    monkeypatch.setattr(release, "free_memory", freed.append)
    monkeypatch.setattr(release, "check_lora", short_of_memory(check_lora))
    monkeypatch.setattr(sample_module, "compare", short_of_memory(compare))
    settings = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3, "sample__every_n_steps": 3}
    assert bench.run("first", gates__lora_check="lite", **settings) == 0
    assert len(freed) == 2
    assert exported(bench.folder("first")) == exported(finished.folder("first"))
    output = capsys.readouterr().out
    assert output.count("out of memory: trying again with less on the GPU") == 3
    again, whole = (record(each.folder("first"))["lora"] for each in (bench, finished))
    # What is measured of the base model alone is read from the cache; so it is in both where an earlier test filled it.
    assert 0 < again.pop("cost")["forward_passes"] <= whole.pop("cost")["forward_passes"]
    assert again == whole
    assert (bench.folder("first") / "samples" / "before_after.png").is_file()


def test_a_lora_that_cannot_be_evaluated_is_kept_and_can_be_evaluated_later(bench, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(release, "check_lora", never)
        assert bench.run("first", steps=1, gates__lora_check="lite") == 5
    folder = bench.folder("first")
    kept, document = exported(folder), record(folder)
    assert kept
    assert (document["status"], document["exit_code"], document["steps"]) == ("failed", 5, 1)
    assert document["files"]["kohya"] == "first.safetensors"
    assert document["scores"]["lora"] is None
    assert "not evaluated" in document["reason"]
    assert f"lora-trainer validate {folder / 'first.safetensors'}" in document["reason"]
    assert bench.run("first", "--resume", steps=1, gates__lora_check="lite") == 0
    assert record(folder)["scores"]["lora"] is not None
    assert exported(folder) == kept


def test_images_are_encoded_in_smaller_batches(tiny_model, images, tmp_path, monkeypatch, capsys):
    """The same caches up to rounding. An image that does not fit alone ends the run with the fix."""
    family, batch_sizes = FAMILIES["sd15"], []

    def with_room_for(most: int) -> None:
        def load_encoders(*args: Any) -> Any:
            encoders = family.encoders.load(*args)

            def encode_image(pixels: torch.Tensor) -> Any:
                batch_sizes.append(len(pixels))
                if len(pixels) > most:
                    raise torch.OutOfMemoryError(SHORT)
                return encoders.encode_image(pixels)

            return replace(encoders, encode_image=encode_image)

        monkeypatch.setitem(FAMILIES, "sd15", replace(family, encoders=replace(family.encoders, load=load_encoders)))

    with_room_for(0)
    place = Bench(tiny_model, images, tmp_path / "runs", tmp_path / "none")
    assert main(["cache", *place.arguments("first")[1:]]) == 5
    assert "Out of memory while encoding one image of" in capsys.readouterr().err
    batch_sizes.clear()
    with_room_for(1)
    place = replace(place, cache=tmp_path / "few")
    assert main(["cache", *place.arguments("first")[1:]]) == 0
    assert len(contents(place.cache)) > 0
    assert batch_sizes[:3] == [4, 2, 1]
    assert "out of memory: encoding 2 images at once instead of 4" in capsys.readouterr().out


@pytest.mark.slow
def test_captions_are_encoded_in_smaller_batches(tiny_model, images, tmp_path, monkeypatch, capsys):
    """The same embeddings up to rounding. A caption that does not fit alone ends the run with the fix."""
    family, batch_sizes = FAMILIES["sd15"], []

    def with_room_for(most: int) -> None:
        def load_encoders(*args: Any) -> Any:
            encoders = family.encoders.load(*args)

            def encode_text(captions: Any) -> Any:
                batch_sizes.append(len(captions))
                if len(captions) > most:
                    raise RuntimeError("CUDA error: out of memory")
                return encoders.encode_text(captions)

            return replace(encoders, encode_text=encode_text)

        monkeypatch.setitem(FAMILIES, "sd15", replace(family, encoders=replace(family.encoders, load=load_encoders)))

    with_room_for(0)
    place = Bench(tiny_model, images, tmp_path / "runs", tmp_path / "none")
    assert main(["cache", *place.arguments("first")[1:]]) == 5
    assert "Out of memory while encoding one caption" in capsys.readouterr().err
    batch_sizes.clear()
    with_room_for(2)
    place = replace(place, cache=tmp_path / "few")
    assert main(["cache", *place.arguments("first")[1:]]) == 0
    assert max(batch_sizes) > 2
    assert "captions at once instead of" in capsys.readouterr().out
    monkeypatch.setitem(FAMILIES, "sd15", family)
    assert place.run("few", steps=2) == 0
    assert replace(place, cache=tmp_path / "all").run("all", steps=2) == 0
    assert losses(place.folder("few")) == pytest.approx(losses(place.folder("all")), rel=1e-4)


@pytest.mark.slow
def test_images_encoded_during_training_wait_for_memory(bench, monkeypatch):
    """Without cached latents: retried when steps leave room, and nothing changes."""
    family, fails, waited = FAMILIES["sd15"], iter([False, True, True, True, False, True]), []

    def load_encoders(*args: Any) -> Any:
        encoders = family.encoders.load(*args)

        def encode_image(pixels: torch.Tensor) -> Any:
            if next(fails, False):
                raise torch.OutOfMemoryError(SHORT)
            return encoders.encode_image(pixels)

        return replace(encoders, encode_image=encode_image)

    settings = {"cache__latents": "false", "steps": 3}
    assert bench.run("calm", **settings) == 0
    monkeypatch.setitem(FAMILIES, "sd15", replace(family, encoders=replace(family.encoders, load=load_encoders)))
    monkeypatch.setattr(uncached, "WAITS", (0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(uncached, "free_memory", waited.append)
    assert bench.run("short", **settings) == 0
    assert len(waited) == 4
    assert exported(bench.folder("short")) == exported(bench.folder("calm"))


def test_samples_that_run_out_of_memory_change_no_step(bench, finished, monkeypatch, capsys):
    monkeypatch.setattr(sample_module, "compare", never)
    assert bench.run("first", checkpoint__every_n_steps=3, validation__every_n_steps=3, sample__every_n_steps=2) == 0
    output = capsys.readouterr().out
    assert "no images at step 2: Out of memory with nothing left to reduce" in output
    assert losses(bench.folder("first")) == losses(finished.folder("first"))
    assert exported(bench.folder("first")) == exported(finished.folder("first"))


def test_an_out_of_memory_step_is_in_the_record_and_the_report(bench, finished, monkeypatch, capsys):
    """The whole command: one micro-batch runs out of memory, the run continues, and it is reported."""
    fails = iter([False, False, True])

    def squared_error(*args: Any) -> torch.Tensor:
        if next(fails, False):
            raise torch.OutOfMemoryError(SHORT)
        return true(*args)

    true = loss_module.squared_error
    monkeypatch.setattr(loss_module, "squared_error", squared_error)
    assert bench.run("first", checkpoint__every_n_steps=3, validation__every_n_steps=3) == 0
    folder = bench.folder("first")
    assert "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB)" in capsys.readouterr().out
    assert [row["kind"] for row in rows(folder, "events.jsonl")] == ["memory"]
    assert record(folder)["events"] == rows(folder, "events.jsonl")
    assert "out of memory" in (folder / "report.html").read_text("utf-8")
    assert losses(folder)[:2] == pytest.approx(losses(finished.folder("first"))[:2], rel=1e-4)
