"""`--model` through the real command: hub models, another VAE, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file

from lora_trainer.cli.main import main
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.tensorfile import read_tensor_header
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.places import laid_out_models
from lora_trainer.models.single import tokenizers
from lora_trainer.run.bases.find import find_base
from tests.conftest import CHECKOUT
from tests.lora_format.tiny import tiny_vae
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.recipes.recipe import Bench, contents, exported, losses, record, save_tiny_model
from tests.run.local_hub import COMMIT, LocalHub, local_hub

NAME = "some/tiny-model"


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path) -> Iterator[LocalHub]:
    with local_hub(tmp_path / "hf") as running:
        running.holds(NAME, tiny_model)
        yield running


@pytest.fixture
def fetched(bench: Bench) -> Bench:
    return replace(bench, model=Path(NAME))


def no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, opened)
    monkeypatch.setattr(socket, "create_connection", opened)
    monkeypatch.setattr(socket, "getaddrinfo", opened)


def test_a_hub_model_trains_as_its_folder_and_resumes_offline(
    hub: LocalHub, fetched: Bench, finished: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetched.run("hub", steps=3, checkpoint__every_n_steps=3, validation__every_n_steps=3) == 0
    assert "fetching some/tiny-model at 0123456789ab from the hub" in capsys.readouterr().err
    folder = fetched.folder("hub")
    assert losses(folder) == losses(finished.folder("first"))[:3]
    document = record(folder)
    assert (document["config"]["model"]["path"], document["config"]["model"]["revision"]) == (NAME, COMMIT)
    assert (document["model"]["path"], document["model"]["commit"]) == (NAME, COMMIT)
    kept = tomllib.loads((folder / "config.toml").read_text("utf-8"))["model"]
    assert (kept["path"], kept["revision"]) == (NAME, COMMIT)
    assert read_tensor_header(folder / "hub.safetensors")["__metadata__"]["ss_sd_model_name"] == NAME

    no_socket(monkeypatch)
    hub.requests.clear()
    moved = folder.with_name("moved")
    folder.rename(moved)
    assert main(["train", "--config", str(moved / "config.toml"), "--resume", "--offline", "--max-steps", "6"]) == 0
    assert exported(moved)["kohya"].keys() == exported(finished.folder("first"))["kohya"].keys()
    assert losses(moved) == losses(finished.folder("first"))
    drawn = ["--prompt", "a ring", "--set", "run.offline=true", "--set", "sample.num_inference_steps=1"]
    assert main(["sample", str(moved / "moved.safetensors"), "--model", NAME, *drawn]) == 0
    assert (
        main(["validate", str(moved / "moved.safetensors"), "--set", "gates.lora=0", "--set", "gates.lora_check=lite"])
        == 0
    )
    assert f"base model: {NAME} at 0123456789ab" in capsys.readouterr().err
    assert hub.requests == []


def test_plan_and_check_fetch_only_configs(hub: LocalHub, fetched: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == NAME
    assert main(["check", "--model", NAME, str(fetched.data)]) == 0
    capsys.readouterr()
    assert fetched.run("dry", "--dry-run", steps=1) == 0
    assert "the model's weights are not downloaded yet" in capsys.readouterr().out
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
    assert main(["plan", "--model", NAME, "--offline"]) == 0
    assert fetched.run("offline", "--offline", steps=1) == 2
    assert "offline nothing is fetched" in capsys.readouterr().err
    assert not fetched.folder("offline").exists()


def test_plan_and_a_dry_run_fetch_only_the_header_of_a_hub_checkpoint(
    hub: LocalHub, fetched: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    file = write(unet_checkpoint(tiny_pipeline(tmp_path / "words", "sd15"), "sd15"), tmp_path / "sd.safetensors")
    hub.repositories["some/single"] = {"sd.safetensors": file.read_bytes()}
    assert main(["plan", "--model", "some/single/sd.safetensors", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["model"] == "some/single/sd.safetensors"
    single = replace(fetched, model=Path("some/single/sd.safetensors"))
    assert single.run("dry", "--dry-run", steps=1, data__resolution=64) == 0
    ranges = [span for how, path, span in hub.requests if how == "GET" and "/resolve/" in path]
    assert ranges
    assert all(span.startswith(("bytes=0-7", "bytes=8-")) for span in ranges)
    assert not list((tmp_path / "hf").rglob("sd.safetensors"))


def test_weights_of_a_skipped_t5_stay_on_the_hub(hub: LocalHub, fetched: Bench, tmp_path: Path) -> None:
    hub.holds("some/sd3", save_tiny_model(tmp_path, "sd3"))
    arguments = ["--model", "some/sd3", "--set", "model.without_t5=true"]
    assert main(["check", str(fetched.data), *arguments, "--set", "data.resolution=64"]) == 0
    found = find_base(ModelSection(path="some/sd3", without_t5=True), say=lambda line: None)
    assert "text_encoder_3/model.safetensors" not in hub.fetched()
    assert FAMILIES["sd3"].describe(found.folder).family == "sd3"
    assert not (found.folder / "text_encoder_3").exists()


def test_bad_data_is_refused_before_weights_are_fetched(hub: LocalHub, fetched: Bench, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert replace(fetched, data=tmp_path / "empty").run("empty") in (2, 3)
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def test_a_batch_fetches_its_base_model_once(hub: LocalHub, fetched: Bench, tmp_path: Path) -> None:
    for name in ("cedar", "birch"):
        shutil.copytree(fetched.data, tmp_path / "root" / name)
    settings = fetched.arguments("unused", steps=1, gates__dataset=0, gates__lora=0)
    places = [word for word in settings[settings.index("--max-steps") :] if word]
    batch = ["batch", str(tmp_path / "root"), "--model", NAME, "--output", str(fetched.output), *places]
    assert main([*batch, "--dry-run"]) == 0
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
    assert main(batch) == 0
    assert len(hub.fetched()) == len(set(hub.fetched()))
    assert {record(fetched.folder(name))["model"]["commit"] for name in ("cedar", "birch")} == {COMMIT}


def test_a_replaced_vae_is_used_to_train_and_sample_and_is_laid_out_again(
    bench: Bench, finished: Bench, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    other = tiny_vae()
    other.save_pretrained(tmp_path / "vae")
    file = tmp_path / "other.safetensors"
    save_file(other.state_dict(), file)
    before = contents(bench.model)
    settings = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3}
    assert bench.run("vae", steps=3, model__vae=tmp_path / "vae", **settings) == 0
    assert losses(bench.folder("vae"))[0] != losses(finished.folder("first"))[0]
    assert contents(bench.model) == before
    document = record(bench.folder("vae"))
    assert document["config"]["model"]["vae"] == str(tmp_path / "vae")
    assert document["model"]["path"] == str(bench.model)
    shutil.rmtree(laid_out_models())
    assert bench.run("vae", "--resume", steps=4, model__vae=tmp_path / "vae", **settings) == 0
    assert bench.run("file", steps=3, model__vae=file, **settings) == 0
    choices = {name: record(bench.folder(name))["choices"] for name in ("vae", "file")}
    assert f"VAE: {tmp_path / 'vae'}" in choices["vae"]
    assert any(line.startswith(f"VAE: {file} (scaling_factor") for line in choices["file"])
    assert losses(bench.folder("file")) == losses(bench.folder("vae"))[:3]
    assert bench.run("vae", "--resume", steps=5, **settings) == 2  # it started with another VAE


def other_channels(folder: Path) -> Path:
    config = {key: value for key, value in tiny_vae().config.items() if not key.startswith("_")}
    AutoencoderKL.from_config(config | {"latent_channels": 16, "scaling_factor": 1.5305}).save_pretrained(folder)
    return folder


def test_a_vae_that_does_not_fit_is_refused_with_both_numbers(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for vae, words in (
        (other_channels(tmp_path / "wide"), ("16 latent channels", "own has 4", "1.5305", "0.18215")),
        (tmp_path / "lost", ("There is no VAE at",)),
        (tmp_path / "empty", ("holds no VAE",)),
        (bench.model / "unet", ("is a UNet2DConditionModel",)),
        (bench.model / "unet/diffusion_pytorch_model.safetensors", ("is no VAE",)),
    ):
        assert bench.run("refused", model__vae=vae) == 2
        output = capsys.readouterr().err
        assert all(word in output for word in words), output
    assert not bench.folder("refused").exists()


def test_a_family_that_does_not_match_the_files(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("refused", model__family="sdxl", model__revision="v1") == 2
    output = capsys.readouterr().err
    assert "not on a hub" in output
    assert bench.run("refused", model__family="sdxl") == 2
    assert "is a model of sd15" in capsys.readouterr().err
    for command in (["check", str(bench.data)], ["plan"]):
        assert main([*command, "--set", "model.revision=v1"]) == 2
        assert "no model of a hub is set" in capsys.readouterr().err


def test_paths_that_are_no_base_model_are_named(
    bench: Bench, finished: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "pickle.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    single = tmp_path / "folder"
    single.mkdir()
    (single / "model.safetensors").write_bytes(b"")
    lora = finished.folder("first") / "first.safetensors"
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((bench.model / "unet/diffusion_pytorch_model.safetensors").read_bytes()[:-50])
    for model, words in (
        (empty, "is empty"),
        (single, "Use one of its files"),
        (bench.model / "unet", "is one part of a model"),
        (tmp_path / "pickle.safetensors", "is a pickle"),
        (cut, "promises"),
        (lora, "is a LoRA"),
        (bench.model / "vae/diffusion_pytorch_model.safetensors", "one part of a model"),
        (Path("lost/model.safetensors"), "There is no model at"),
    ):
        assert replace(bench, model=model).run("refused") == 2
        assert words in capsys.readouterr().err, model
    assert not bench.folder("refused").exists()


CLOSED = """
import socket, sys
def opened(*_, **__):
    print("a socket was opened", file=sys.stderr)
    raise OSError("no network here")
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, opened)
socket.create_connection = socket.getaddrinfo = opened
from lora_trainer.cli.main import main
code = main(sys.argv[1:])
from huggingface_hub import constants
print("offline", constants.HF_HUB_OFFLINE, "telemetry", not constants.HF_HUB_DISABLE_TELEMETRY)
raise SystemExit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "offline"), [("train --dry-run", True), ("check", True), ("train", True), ("train", False)]
)
def test_a_separate_process_opens_no_socket(
    bench: Bench, tiny_model: Path, tmp_path: Path, command: str, offline: bool
) -> None:
    """The environment is set before any import. A local model needs no request anyway."""
    model: Path | str = tiny_model
    if offline:  # by its id, from the cache
        with local_hub(tmp_path / "hf") as hub:
            hub.holds(NAME, tiny_model)
            find_base(ModelSection(path=NAME), say=lambda line: None)
        model = NAME
    words = ["check", str(bench.data), "--model", str(model), "--set", "run.offline=true"]
    if command != "check":
        more = [*command.split()[1:], *(["--offline"] if offline else [])]
        words = replace(bench, model=Path(model)).arguments("alone", *more, steps=1)
    around = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    around |= {"HF_HUB_CACHE": str(tmp_path / "hf"), "PYTHONPATH": str(CHECKOUT)}
    whole_command = [sys.executable, "-c", CLOSED, *words]
    done = subprocess.run(whole_command, env=around, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a socket was opened" not in done.stderr
    assert f"offline {offline} telemetry False" in done.stdout


def test_a_hub_vae_is_pinned_to_its_commit(
    hub: LocalHub, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    tiny_vae().save_pretrained(tmp_path / "vae")
    hub.holds("some/vae", tmp_path / "vae")
    assert bench.run("vae", "--dry-run", steps=1, model__vae="some/vae") == 0
    assert hub.fetched() == ["config.json"]
    assert bench.run("vae", steps=1, model__vae="some/vae") == 0
    folder = bench.folder("vae")
    pinned = f"some/vae@{COMMIT}"
    assert record(folder)["config"]["model"]["vae"] == pinned
    assert tomllib.loads((folder / "config.toml").read_text("utf-8"))["model"]["vae"] == pinned
    no_socket(monkeypatch)
    again = ["train", "--config", str(folder / "config.toml"), "--resume", "--offline", "--max-steps", "2"]
    assert main(again) == 0
    assert len(losses(folder)) == 2
