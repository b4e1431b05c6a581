"""Memory that runs out after the training, or while caches are filled, costs time and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lora_trainer.cli.main import main
from lora_trainer.evaluation import lora_check
from lora_trainer.evaluation.lora_check import check_lora
from lora_trainer.evaluation.sample import compare
from lora_trainer.models import FAMILIES
from lora_trainer.production import release, session
from tests.recipes.recipe import Bench, contents, exported, losses, record

SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def short_of_memory(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, which runs out of memory unless nothing needs to stay on the card."""

    def work_or_fail(*given: Any, **named: Any) -> Any:
        if named["usable"] != 0:
            raise torch.OutOfMemoryError(SHORT)
        return work(*given, **named | {"usable": None})

    return work_or_fail


def never(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(SHORT)


def test_gate_and_pictures_are_made_with_less(bench, finished, monkeypatch, capsys):
    """And the trained denoiser, which makes room for the one that draws, comes back as it was."""
    rooms, freed = iter([0]), []
    monkeypatch.setattr(release, "usable_bytes", lambda *_: next(rooms, None))
    monkeypatch.setattr(release, "free_memory", freed.append)
    monkeypatch.setattr(release, "check_lora", short_of_memory(check_lora))
    monkeypatch.setattr(release, "compare", short_of_memory(compare))
    assert bench.run("first", checkpoint__every_steps=3, validate__every_steps=3, sample__every_steps=3) == 0
    assert len(freed) == 2
    assert exported(bench.folder("first")) == exported(finished.folder("first"))
    said = capsys.readouterr().out
    assert said.count("out of memory: once more with less on the card") == 3
    assert record(bench.folder("first"))["lora"] == record(finished.folder("first"))["lora"]
    assert (bench.folder("first") / "samples" / "before_after.png").is_file()


def test_memory_that_runs_out_while_validating_loses_no_step(bench, finished, monkeypatch, capsys):
    true, calls = session.held_out_losses, [0]

    def second_fails(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        return never() if calls[0] == 2 else true(*given, **named)

    settings = {"checkpoint__every_steps": 3, "validate__every_steps": 3}
    with monkeypatch.context() as patch:
        patch.setattr(session, "held_out_losses", second_fails)
        assert bench.run("first", **settings) == 5
    said = capsys.readouterr().err
    assert "Out of memory while validating step 3" in said
    assert "step-000003 is safe" in said
    assert bench.run("first", "--resume", **settings) == 0
    assert losses(bench.folder("first")) == losses(finished.folder("first"))


def test_a_lora_that_cannot_be_judged_is_kept_and_can_be_judged_later(bench, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(release, "check_lora", never)
        assert bench.run("first", steps=1) == 5
    folder = bench.folder("first")
    kept, document = exported(folder), record(folder)
    assert kept
    assert (document["status"], document["exit_code"], document["steps"]) == ("failed", 5, 1)
    assert document["files"]["kohya"] == "first.safetensors"
    assert document["scores"]["lora"] is None
    assert "not judged" in document["reason"]
    assert f"lora-trainer validate {folder / 'first.safetensors'}" in document["reason"]
    monkeypatch.setattr(lora_check, "CELLS", 8)
    assert bench.run("first", "--resume", steps=1) == 0
    assert record(folder)["scores"]["lora"] is not None
    assert exported(folder) == kept


def test_pictures_are_encoded_fewer_at_once(tiny_model, pictures, tmp_path, monkeypatch, capsys):
    """The same caches to rounding; a picture that does not fit even alone ends the run with what to change."""
    family, asked = FAMILIES["sd15"], []

    def with_room_for(most: int) -> None:
        def load_encoders(*given: Any) -> Any:
            encoders = family.load_encoders(*given)

            def encode_image(pixels: torch.Tensor) -> Any:
                asked.append(len(pixels))
                if len(pixels) > most:
                    raise torch.OutOfMemoryError(SHORT)
                return encoders.encode_image(pixels)

            return replace(encoders, encode_image=encode_image)

        monkeypatch.setitem(FAMILIES, "sd15", replace(family, load_encoders=load_encoders))

    with_room_for(0)
    place = Bench(tiny_model, pictures, tmp_path / "runs", tmp_path / "none")
    assert main(["cache", *place.arguments("first")[1:]]) == 5
    assert "Out of memory while encoding one picture of" in capsys.readouterr().err
    asked.clear()
    with_room_for(1)
    place = replace(place, cache=tmp_path / "few")
    assert main(["cache", *place.arguments("first")[1:]]) == 0
    assert len(contents(place.cache)) > 0
    assert asked[:3] == [4, 2, 1]
