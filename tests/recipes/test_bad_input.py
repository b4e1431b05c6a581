"""Bad input through the command: the exit code, all problems at once, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.diffusion import loss as loss_module
from lora_trainer.run import caching, room
from lora_trainer.run import train as run_module
from lora_trainer.run_folder.lock import LOCK
from tests.recipes.recipe import Bench, contents, draw_images, patched, record, rows


def with_data(bench: Bench, data: Path) -> Bench:
    return Bench(bench.model, data, bench.output, bench.cache)


def with_model(bench: Bench, model: Path) -> Bench:
    return Bench(model, bench.data, bench.output, bench.cache)


def plain_error(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    assert "Traceback" not in output.err + output.out
    assert "bug" not in output.err
    return output.err


def test_a_folder_without_images(bench, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert with_data(bench, empty).run("none") in (2, 3)
    assert "empty" in plain_error(capsys)
    assert not bench.folder("none").exists()


def test_a_folder_that_does_not_exist(bench, tmp_path, capsys):
    assert with_data(bench, tmp_path / "absent").run("none") == 2
    assert "absent" in plain_error(capsys)


@pytest.mark.parametrize("command", ["train", "produce"])
def test_images_without_captions(command, bench, tmp_path, capsys):
    data = draw_images(tmp_path / "bare")
    for caption in sorted(data.glob("*.txt"))[:4]:
        caption.unlink()
    assert with_data(bench, data).run("bare", command=command) == 3
    message = plain_error(capsys)
    assert "4 of 10 files have no caption" in message
    for way in (
        "--set data.allow_missing_captions=true",
        "--set captions.trigger_word=WORD",
        f"lora-trainer caption {data} --model florence-2-base --in-place",
    ):
        assert way in message
    assert not bench.folder("bare").exists()


def test_images_without_captions_train_on_the_trigger_word_alone(bench, tmp_path, capsys):
    data = draw_images(tmp_path / "bare")
    for caption in data.glob("*.txt"):
        caption.unlink()
    own, sks = with_data(bench, data), "captions.trigger_word=sks"
    said = "no caption: the trigger word 'sks' alone is trained"
    assert own.run("alone", steps=2, captions__trigger_word="sks") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [said in line for line in lines].count(True) == 1
    assert "  image_0.png: trained on 'sks'" in lines
    assert not any("distinct caption" in line or "lack the trigger" in line for line in lines)
    assert own.run("gated", "--dry-run", command="produce", captions__trigger_word="sks") == 0
    assert said in capsys.readouterr().out
    model = ["--model", str(bench.model)]
    assert main(["check", str(data), "--set", sks, *model, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["samples"], document["passed"], document["parts"]["captions"]) == (10, True, 1.0)
    found = [(each["code"], each["severity"]) for file in document["files"] for each in file["findings"]]
    assert found.count(("missing_caption", "note")) == 10
    assert main(["plan", "--data", str(data), "--set", sks, *model, "--json"]) == 0
    assert any(said in sentence for sentence in json.loads(capsys.readouterr().out)["advice"])
    assert main(["plan", "--data", str(data), *model, "--json"]) == 0
    assert any("train refuses them" in sentence for sentence in json.loads(capsys.readouterr().out)["advice"])


def test_only_images_that_get_a_trigger_word_train_without_a_caption(bench, tmp_path, capsys):
    data = draw_images(tmp_path / "bare")
    for number, caption in enumerate(sorted(data.glob("*.txt"))):
        caption.rename(caption.with_suffix(".tags")) if number else caption.write_text(" ", encoding="utf-8")
    # A setting that does not find the captions that are there is a mistake. An empty one is one without.
    own = with_data(bench, data)
    assert own.run("bare", "--dry-run", captions__trigger_word="sks", captions__extension=".text") == 3
    assert "--set captions.extension=t" in plain_error(capsys)
    assert own.run("bare", "--dry-run", captions__trigger_word="sks") == 0
    assert "has an empty caption: the trigger word 'sks' alone is trained" in capsys.readouterr().out
    # Regularization images get no trigger word.
    classes = draw_images(tmp_path / "classes")
    (classes / "image_0.txt").unlink()
    sources = f'[{{path = "{bench.data}"}}, {{path = "{classes}", is_reg = true}}]'
    assert bench.run("bare", "--dry-run", captions__trigger_word="sks", data__sources=sources) == 3
    message = plain_error(capsys)
    assert "1 of 20 files has no caption" in message
    assert "captions.trigger_word" not in message


def test_files_of_which_none_can_be_trained_are_counted(bench, tmp_path, capsys):
    data = draw_images(tmp_path / "bare")
    for caption in data.glob("*.txt"):
        caption.unlink()
    assert with_data(bench, data).run("bare", "--dry-run") == 3
    assert "dataset: 10 files, none of which can be trained as it is" in capsys.readouterr().out
    assert main(["check", str(data), "--model", str(bench.model)]) == 3
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "refused: 10 files, none of which can be trained as it is"
    assert "0 images" not in output


@pytest.mark.parametrize("named", ["./modl.safetensors", "modl.safetensors", "sub/modl.safetensors", "./sub/modl.gguf"])
def test_a_checkpoint_that_is_missing_is_a_missing_file(named, bench, tmp_path, monkeypatch, capsys):
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--model", named, "--data", str(bench.data), "--dry-run"]) == 2
    message = plain_error(capsys)
    assert f"There is no file {Path(named).name} in " in message
    assert "That folder holds model.safetensors." in message
    assert "exists" not in message


def test_half_the_files_broken(bench, tmp_path, capsys):
    data = draw_images(tmp_path / "broken")
    for image in sorted(data.glob("*.png"))[:5]:
        image.write_bytes(image.read_bytes()[:200])
    assert with_data(bench, data).run("broken", command="produce") == 3
    assert "5 of 10 files cannot be read" in plain_error(capsys)
    assert not bench.folder("broken").exists()


def without_weights(model: Path) -> None:
    (model / "unet" / "diffusion_pytorch_model.safetensors").unlink()


def as_pickle(model: Path) -> None:
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))


def truncated(model: Path) -> None:
    for weights in (model / "unet" / "diffusion_pytorch_model.safetensors", model / "vae"):
        found = weights if weights.is_file() else next(weights.glob("*.safetensors"))
        found.write_bytes(found.read_bytes()[:-1000])


def as_another_kind(model: Path) -> None:
    index = model / "model_index.json"
    document = json.loads(index.read_text(encoding="utf-8"))
    index.write_text(json.dumps(document | {"_class_name": "PixArtAlphaPipeline"}), encoding="utf-8")


def without_index(model: Path) -> None:
    (model / "model_index.json").unlink()


def garbled(model: Path) -> None:
    (model / "unet" / "config.json").write_text("{", encoding="utf-8")


def half_a_config(model: Path) -> None:
    (model / "unet" / "config.json").write_text("{}", encoding="utf-8")


DAMAGES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (without_weights, ("unet", "holds no weights")),
    (as_pickle, ("unet", "pickle")),
    (truncated, ("unet", "vae")),
    (as_another_kind, ("PixArtAlphaPipeline", "Supported")),
    (without_index, ("holds no model_index.json", "Expected a diffusers folder")),
    (garbled, ("unet", "config.json")),
    (half_a_config, ("config.json lacks in_channels",)),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_model(damage, words, bench, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(bench.model, model)
    damage(model)
    assert with_model(bench, model).run("damaged") == 2
    message = plain_error(capsys)
    assert all(word in message for word in words), message
    assert not bench.folder("damaged").exists()


def test_no_model_at_all(bench, tmp_path, capsys):
    assert with_model(bench, tmp_path / "nowhere").run("lost") == 2
    assert "nowhere" in plain_error(capsys)


PICKLE = b"\x80\x02}q\x00."


@pytest.mark.parametrize("ending", ["ckpt", "bin", "pt"])
def test_a_pickle_is_never_opened(ending, bench, tmp_path, capsys):
    pickle = tmp_path / f"model.{ending}"
    pickle.write_bytes(PICKLE)
    model = ["--model", str(bench.model)]
    for arguments in (
        with_model(bench, pickle).arguments("pickled"),
        ["validate", str(pickle), *model],
        ["sample", str(pickle), *model, "--prompt", "a ring"],
    ):
        assert main(arguments) == 2
        message = plain_error(capsys)
        assert "is a pickle" in message
        assert "can run code" in message
    assert not bench.folder("pickled").exists()


def test_a_truncated_lora_is_refused_before_its_model_is_read(finished, tmp_path, capsys):
    whole = finished.folder("first") / "first.safetensors"
    half = tmp_path / "half.safetensors"
    half.write_bytes(whole.read_bytes()[:-100])
    assert main(["validate", str(half), "--model", str(finished.model)]) == 2
    said = plain_error(capsys)
    assert "half.safetensors is cut off" in said
    assert "base model" not in said


def test_a_single_file_that_is_damaged(bench, tmp_path, capsys):
    checkpoint = tmp_path / "model.safetensors"
    checkpoint.write_bytes(b"not one")
    assert with_model(bench, checkpoint).run("single") == 2
    assert "is empty or was cut off" in plain_error(capsys)


def test_data_problems_are_printed_once(bench, tmp_path, capsys):
    data = draw_images(tmp_path / "bare")
    for caption in sorted(data.glob("*.txt"))[:4]:
        caption.unlink()
    assert with_data(bench, data).run("bare") == 3
    output = capsys.readouterr()
    assert (output.out + output.err).count("no caption") == 2, "one count and its first example"


def test_a_dry_run_of_refused_data_shows_its_plan(bench, tmp_path, capsys):
    data = draw_images(tmp_path / "bare")
    (data / "image_0.txt").unlink()
    assert with_data(bench, data).run("bare", "--dry-run") == 3
    output = capsys.readouterr()
    assert "settings that a preset, file or flag set" in output.out
    assert "1 of 10 files has no caption" in output.err


@pytest.mark.parametrize("command", ["train", "produce"])
def test_a_dry_run_refuses_what_the_run_refuses(
    command: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = draw_images(tmp_path / "images")
    (bench.folder("used") / "checkpoints").mkdir(parents=True)
    (bench.folder("used") / "run.json").write_text('{"status": "done", "steps": 6}', encoding="utf-8")
    (bench.folder("other")).mkdir()
    (bench.folder("other") / "notes.txt").write_text("not a run", encoding="utf-8")
    (tmp_path / "file").touch()
    nowhere = bench.output / "nowhere"
    settings: dict[str, dict[str, object]] = {
        "used": {},
        "other": {},
        "scratch": {"checkpoint__scratch": nowhere},
        "tracker": {"run__trackers": '["wandb"]'},
        "swa": {"train__swa_start": 5},
        "unvalidated": {"validation__split": 0, "checkpoint__keep_best": 1, "validation__every_n_steps": 2},
        "adapter": {"lora__network_weights": nowhere},
    }
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = sorted(tmp_path.rglob("*"))
    for dry in ((), ("--dry-run",)):
        for name, own in settings.items():
            assert bench.run(name, *dry, command=command, **own) == 2, (name, dry)
        assert replace(bench, output=tmp_path / "file").run("file", *dry, command=command) == 2
        assert replace(bench, data=inside, output=inside).run("inside", *dry, command=command) == 2
        assert replace(bench, cache=tmp_path / "file").run("cache", *dry, command=command) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_refuses_a_full_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda folder: 0)
    assert bench.run("full", "--dry-run") == 2
    monkeypatch.undo()
    monkeypatch.setattr(caching, "free_bytes", lambda folder: 0)
    own = replace(bench, cache=bench.output / "cache")
    assert own.run("full", "--dry-run") == own.run("full", "--dry-run", command="cache") == 2


@pytest.mark.parametrize("status", ["done", "stopped"])
def test_parts_of_a_record_that_are_of_another_type_are_missing(status: str, finished: Bench, tmp_path: Path) -> None:
    own = replace(finished, output=tmp_path)
    shutil.copytree(finished.folder("first"), own.folder("first"))
    file = own.folder("first") / "run.json"
    damaged = {"status": status, "config": [], "files": [], "pinned": [], "seconds": []}
    file.write_text(json.dumps({**record(own.folder("first")), **damaged}), encoding="utf-8")
    assert own.run("first", "--resume") == 0


def test_a_dry_run_of_a_resumed_run_refuses_what_cannot_be_changed(finished: Bench, tmp_path: Path) -> None:
    own = replace(finished, output=tmp_path)
    shutil.copytree(finished.folder("first"), own.folder("first"))
    (own.folder("first") / "report.html").unlink()  # which a run would write again
    before = contents(tmp_path)
    assert own.run("first", "--resume", "--dry-run", steps=8, lora__rank=8) == 2
    assert own.run("first", "--resume", "--dry-run") == 0
    assert contents(tmp_path) == before


def test_a_resumed_run_names_the_data_that_has_changed(finished: Bench, tmp_path: Path, capsys) -> None:
    own = replace(finished, data=tmp_path / "images")
    shutil.copytree(finished.data, own.data)
    (own.data / "image_3.txt").write_text("another caption", encoding="utf-8")
    assert own.run("first", "--resume", "--dry-run", steps=8) == 2
    assert "image_3.png (caption)" in capsys.readouterr().err


def test_a_caption_that_may_be_missing(bench, tmp_path, capsys):
    data = draw_images(tmp_path / "bare")
    (data / "image_0.txt").unlink()
    assert with_data(bench, data).run("bare", "--dry-run", data__allow_missing_captions="true") == 0
    output = capsys.readouterr().out
    assert "note: image_0.png has no caption. It trains on an empty caption" in output
    assert "allow_missing_captions=true" not in output


def test_equal_names_in_two_folders_are_distinguished(bench, tmp_path, capsys):
    for name in ("cats", "dogs"):
        draw_images(tmp_path / "both" / name)
    assert with_data(bench, tmp_path / "both").run("both", "--dry-run") == 0
    output = capsys.readouterr().out
    assert "warning: 10 of 20 files are exact copies of others" in output
    assert "(first: dogs/image_0.png is the same file as ../cats/image_0.png)" in output


def test_a_cache_folder_that_does_not_exist(tmp_path, capsys):
    for action in ("status", "prune"):
        assert main(["cache", action, str(tmp_path / "nope")]) == 2
        assert "There is no folder" in plain_error(capsys)


def test_steps_and_epochs_together(bench, capsys):
    assert bench.run("both", train__max_epochs=2) == 2
    said = plain_error(capsys)
    assert "train.max_steps" in said
    assert "train.max_epochs" in said


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--preset", "12gbb"), ("12gbb", "12gb")),
        (("--stepps", "3"), ("--stepps",)),
        (("--set", "lora.rnk=3"), ("lora.rnk", "rank")),
        (("--set", "optimizer.name=adamx"), ("optimizer.name", "adamw")),
        (("--set", "lora.rank=-1"), ("lora.rank", "at least 1")),
        (("--seed", "many"), ("train.seed", "whole number")),
    ],
)
def test_a_wrong_option_value(extra, words, bench, capsys):
    assert bench.run("wrong", *extra) == 2
    said = plain_error(capsys)
    assert all(word in said for word in words), said


def test_an_output_that_is_a_file(bench, tmp_path, capsys):
    (tmp_path / "runs").write_text("in the way", encoding="utf-8")
    assert bench.run("blocked") == 2
    assert "cannot be written to" in plain_error(capsys)


def test_a_folder_without_a_run(bench, capsys):
    bench.folder("mine").mkdir(parents=True)
    (bench.folder("mine") / "letter.txt").write_text("dear", encoding="utf-8")
    assert bench.run("mine") == 2
    assert "is not a run" in plain_error(capsys)
    assert [path.name for path in bench.folder("mine").iterdir()] == ["letter.txt"]


def test_all_mistakes_are_reported_at_once(bench, capsys):
    extra = ["--preset", "12gbb", "--rank", "8", "--set", "lora.rankk=3", "--set", "optimizer.learning_rate=quick"]
    assert main([*bench.arguments("wrong"), *extra]) == 2
    said = plain_error(capsys)
    for word in ("12gbb", "12gb", "--rank", "lora.rank", "rankk", "optimizer.learning_rate", "quick"):
        assert word in said, said
    assert not bench.folder("wrong").exists()


def test_a_pattern_that_matches_nothing(bench, capsys):
    assert bench.run("pattern", lora__target_modules="*.no_such_layer") == 2
    assert "'*.no_such_layer' matches none" in plain_error(capsys)
    assert not bench.folder("pattern").exists(), "corrected, the same command must run"


def test_a_resolution_below_the_models_step(bench, capsys):
    """The tiny model's bucket step is 16 px and the minimum resolution 32: no bucket fits 48 x 16."""
    assert bench.run("small", data__resolution=31) == 2
    assert "data.resolution" in plain_error(capsys)


def nan_at(step: int) -> Callable[..., torch.Tensor]:
    """An MSE loss that is NaN in one step."""
    true, calls = loss_module.squared_error, [0]

    def squared_error(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return true(predicted, target) * (float("nan") if calls[0] == step else 1.0)

    return squared_error


def test_a_nonfinite_loss_ends_the_run_and_names_what_is_saved(bench, capsys):
    # Steps of one micro-batch, so that the fourth call is the fourth step.
    with patched(loss_module, "squared_error", nan_at(4)):
        assert (
            bench.run(
                "nan", safeguards__on_nonfinite="stop", train__effective_batch_size=1, checkpoint__every_n_steps=2
            )
            == 5
        )
    said = plain_error(capsys)
    assert "not finite (loss nan, gradient nan) at step 4" in said
    assert "step-000003 is safe" in said
    assert "optimizer.learning_rate" in said
    folder = bench.folder("nan")
    document = record(folder)
    assert (document["status"], document["exit_code"], document["steps"]) == ("failed", 5, 3)
    assert "step 4" in document["reason"]
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    assert not list(folder.glob("*.safetensors"))
    assert bench.run("nan", "--resume", train__effective_batch_size=1, checkpoint__every_n_steps=2) == 0
    assert record(folder)["status"] == "done"


def test_out_of_memory_ends_the_run_and_names_what_is_saved(bench, capsys):
    def full(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with patched(loss_module, "squared_error", full):
        assert bench.run("full") == 5
    said = plain_error(capsys)
    assert "memory" in said
    assert "data.resolution" in said
    assert record(bench.folder("full"))["status"] == "failed"


def test_an_extreme_learning_rate_trains_or_fails_with_a_message(bench, capsys):
    assert bench.run("wild", optimizer__learning_rate=10) in (0, 5)
    plain_error(capsys)
    assert record(bench.folder("wild"))["status"] in ("done", "failed")


def test_brackets_in_names_and_captions_are_no_markup(bench, tmp_path, capsys):
    data = draw_images(tmp_path / "set [red]")
    for image in sorted(data.glob("*.png")):
        image.rename(image.with_name(f"[bold]{image.name}"))
    for caption in sorted(data.glob("*.txt")):
        caption.rename(caption.with_name(f"[bold]{caption.name}"))
        caption.with_name(f"[bold]{caption.name}").write_text(f"[/] a [red] ring :cat: {caption.stem}", "utf-8")
    assert with_data(bench, data).run("markup", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "[bold]image_" in shown
    assert "[/] a [red] ring :cat:" in shown


def test_output_inside_the_data_is_refused(bench, capsys):
    arguments = bench.arguments("inside")
    arguments[arguments.index("--output") + 1] = str(bench.data / "runs")
    assert main(arguments) == 2
    assert "is inside the dataset" in capsys.readouterr().err
    assert not (bench.data / "runs").exists()


def test_a_folder_in_which_another_process_trains(bench, capsys):
    """A live process locks it, also against --resume. After any end of that process it is free."""
    folder = bench.folder("held")
    folder.mkdir(parents=True)
    program = "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); print(1, flush=True); input()"
    command = [sys.executable, "-c", program, str(folder / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for extra in ((), ("--resume",)):
            assert bench.run("held", *extra) == 2
            assert "Another process is training" in plain_error(capsys)
        holder.kill()
    assert bench.run("held", steps=1) == 0
    assert record(folder)["status"] == "done"


def test_two_runs_that_start_at_once(bench, capsys):
    """The second finds the folder free and is refused at its first write."""
    true, started = run_module.read_inputs, []

    def read_inputs(*arguments, **options):
        inputs = true(*arguments, **options)
        if not started:
            started.append(True)
            assert bench.run("twice", steps=1) == 0
        return inputs

    with patched(run_module, "read_inputs", read_inputs):
        assert bench.run("twice", steps=2) == 2
    assert "holds a run already" in plain_error(capsys)
    assert record(bench.folder("twice"))["steps"] == 1


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="root may write everywhere")
def test_an_output_that_may_not_be_written_to(bench, capsys):
    bench.output.mkdir()
    bench.output.chmod(0o500)
    assert bench.run("locked") == 2
    assert "cannot be written to" in plain_error(capsys)


def test_a_finished_run_is_not_offered_to_be_resumed(finished, capsys):
    assert finished.run("first") == 2
    assert "It is finished" in capsys.readouterr().err


def test_a_negative_cache_limit_is_refused(capsys):
    assert main(["cache", "prune", "--limit-gb", "-1"]) == 2
    assert "negative" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["..", ".", "a/b", "a\\b", "two\nlines"])
def test_a_name_that_leads_elsewhere_is_refused(name, bench, capsys):
    assert bench.run(name) == 2
    assert "is no name of a folder" in plain_error(capsys)
    assert not bench.output.exists()


def test_an_empty_name_is_refused(bench, capsys):
    assert bench.run("") == 2
    assert "run.name" in capsys.readouterr().err
