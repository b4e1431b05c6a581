"""`lora-trainer models`: the list, what fits, what is on this computer, and downloads from a local hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.cli.main import main
from lora_trainer.core.errors import Problem
from lora_trainer.core.families import families
from lora_trainer.run.bases.catalog import catalog
from lora_trainer.run.bases.names import HUB_ID
from lora_trainer.run.bases.programs import find_programs
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.run.local_hub import LocalHub, local_hub
from tests.run.test_hub import FILES, UNET

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
SD15 = "stable-diffusion-v1-5/stable-diffusion-v1-5"


@pytest.fixture(autouse=True)
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any program, in which commands run."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    for variable in ("COMFYUI_PATH", "FORGE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("lora_trainer.run.bases.programs.RENTED", ())
    monkeypatch.setattr("lora_trainer.run.bases.hub_requests.sleep", lambda seconds: None)
    return home


@pytest.fixture
def hub(tmp_path: Path) -> Any:
    with local_hub(tmp_path / "hf") as running:
        running.repositories[SD15] = dict(FILES)
        yield running


@pytest.fixture
def problem_codes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a command that is refused, and returns the codes of what it prints."""

    def run(*arguments: str) -> list[str]:
        printed: list[Problem] = []
        with monkeypatch.context() as patch:
            patch.setattr("lora_trainer.cli.errors._print_problems", printed.extend)
            assert main(list(arguments)) == 2
        assert all(problem.fix for problem in printed)
        return [problem.code for problem in printed]

    return run


def install_comfyui(folder: Path) -> Path:
    """What tells a folder of ComfyUI from others that hold models."""
    (folder / "comfy").mkdir(parents=True)
    (folder / "comfy/sd.py").touch()
    (folder / "models/loras").mkdir(parents=True)
    return folder


def write_checkpoint(path: Path) -> Path:
    """What tells a checkpoint of SD 1.5 from other files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    reads = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.attn2.to_k.weight"
    first = "model.diffusion_model.input_blocks.0.0.weight"
    return write({first: torch.zeros(8, 4, 3, 3), reads: torch.zeros(8, 768)}, path)


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["models", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def listed(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(each) for each in document["models"] if each["name"] == name)


def test_every_family_is_listed_with_ids_that_the_hub_can_have() -> None:
    assert {model.family for model in catalog().values()} == set(families())
    assert all(HUB_ID.fullmatch(model.hub_id) for model in catalog().values())
    ids = [model.hub_id for model in catalog().values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "name", [name for name, model in catalog().items() if model.download_bytes and model.is_planned]
)
def test_a_listed_size_is_at_least_that_of_the_parts_that_training_loads(name: str) -> None:
    model = catalog()[name]
    document = families()[model.family]
    denoiser = document["memory_profile"]["stored"]["half"]["weights"] // 2
    parts = denoiser + sum(document["phases"]["text_encoders"]) + document["phases"]["autoencoder"]
    width = 4 if model.family in ("sd15", "sd2", "sdxl") else 2
    assert 0.98 * width * parts < model.download_bytes < 1.25 * width * parts


def test_the_list_says_what_fits_each_size_of_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--vram", "12")
    assert found["gpu_gib"] == 12
    (fit,) = listed(found, "flux-dev")["fits"]
    assert main(["plan", "--preset", "12gb", "--set", "model.family=flux", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (fit["fits"], fit["weight_dtype"]) == (plan["fits"], plan["weight_dtype"])
    assert (fit["peak_gib"], fit["spare_gib"]) == (round(plan["peak_gib"], 2), round(plan["margin_gib"], 2))
    assert listed(found, "klein-base-9b")["fits"] == []


def test_a_small_gpu_fits_only_some(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--vram", "3")
    fitting = {each["name"] for each in found["models"] if any(fit["fits"] for fit in each["fits"])}
    assert "qwen-image" not in fitting
    assert main(["models", "--vram", "3"]) == 0


def test_without_a_gpu_every_vram_preset_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys)
    assert found["gpu_gib"] is None
    assert [fit["gpu_gib"] for fit in listed(found, "sdxl")["fits"]] == [6, 8, 10, 12, 16, 24]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["gett"], "unknown_action"),
        (["get"], "argument_missing"),
        (["get", "sdxll"], "unknown_model"),
        (["--vram", "0"], "vram_out_of_range"),
        (["--vram", "nan"], "vram_out_of_range"),
    ],
)
def test_wrong_arguments(arguments: list[str], code: str, problem_codes: Any) -> None:
    assert problem_codes("models", *arguments) == [code]


def test_a_name_of_the_list_is_no_path_and_is_answered_with_the_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "sdxl"]) == 2
    assert SDXL in capsys.readouterr().err


def test_files_of_other_programs_are_found_and_used(
    hub: LocalHub, computer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comfyui = install_comfyui(computer / "ComfyUI")
    own = write_checkpoint(comfyui / "models/checkpoints/v1-5-pruned-emaonly.safetensors")
    other = write_checkpoint(comfyui / "models/checkpoints/anime.safetensors")
    write({"lora_down.weight": torch.zeros(1, 1)}, comfyui / "models/checkpoints/lora.safetensors")
    found = document(capsys)
    assert listed(found, "sd15")["here"] == [str(own)]
    assert {each["path"] for each in found["files"]} == {str(own), str(other)}
    got = document(capsys, "get", "sd15")
    assert (got["path"], got["arguments"]) == (str(own), f"--model {own}")
    assert hub.requests == []
    document(capsys, "get", "sd15", "--again")
    assert UNET in hub.fetched()


def test_a_denoiser_alone_is_used_with_its_program_s_text_encoders(
    computer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_comfyui(computer / "ComfyUI")
    own = write_checkpoint(computer / "ComfyUI/models/diffusion_models/v1-5-pruned.safetensors")
    encoders = computer / "ComfyUI/models/text_encoders"
    encoders.mkdir()
    got = document(capsys, "get", "sd15")
    assert got["arguments"] == f"--model {own} --set model.text_encoders={encoders}"


def test_a_part_that_a_checkpoint_lacks_is_named_where_a_program_has_it(
    computer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_comfyui(computer / "ComfyUI")
    for name in ("text_encoders", "vae"):
        (computer / "ComfyUI/models" / name).mkdir()
    own = computer / "own.safetensors"
    write(unet_checkpoint(tiny_pipeline(computer / "words", "sd15"), "sd15"), own)
    tensors = {key: value for key, value in load_file(own).items() if not key.startswith("cond_stage_model.")}
    write(tensors, own)
    assert main(["plan", "--model", str(own)]) == 2
    assert f"--set model.text_encoders={computer / 'ComfyUI/models/text_encoders'}" in capsys.readouterr().err


def test_a_variable_and_extra_model_paths_name_other_folders(computer: Path, tmp_path: Path, monkeypatch: Any) -> None:
    comfyui, shared = install_comfyui(tmp_path / "my comfy"), tmp_path / "shared"
    extra = f"a111:\n  base_path: {shared}\n  checkpoints: |\n    one\n    two\nbroken: 3\n"
    (comfyui / "extra_model_paths.yaml").write_text(extra)
    (shared / "two").mkdir(parents=True)
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    (computer / "stable-diffusion-webui/models/Lora").mkdir(parents=True)
    (computer / "stable-diffusion-webui/webui.py").touch()
    first, second = find_programs()
    assert (first.folder, first.loras) == (comfyui, comfyui / "models/loras")
    assert first.model_folders(("checkpoints",)) == [shared / "two"]
    assert second.loras == computer / "stable-diffusion-webui/models/Lora"
    for text in ("a: [", "3", "!!python/object:os.system x"):
        (comfyui / "extra_model_paths.yaml").write_text(text)
        assert first.model_folders(("checkpoints",)) == []


def test_a_folder_of_models_is_no_program_and_the_current_folder_comes_last(
    computer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("checkpoints", "loras", "Lora", "Stable-diffusion"):
        (computer / "models" / name).mkdir(parents=True)
        (computer / "ComfyUI/models" / name).mkdir(parents=True)
    assert find_programs() == []
    desktop = computer / "Documents/ComfyUI"
    for name in ("models/checkpoints", "custom_nodes"):
        (desktop / name).mkdir(parents=True)
    here = install_comfyui(tmp_path / "here")
    monkeypatch.chdir(here)
    assert [program.folder for program in find_programs()] == [desktop, here]


def test_a_model_is_downloaded_once_and_then_listed(hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.cut[UNET] = [3000]
    hub.once[UNET] = [(429, {})]
    got = document(capsys, "get", "sd15")
    assert (Path(got["path"]) / UNET).read_bytes() == FILES[UNET]
    assert got["arguments"] == f"--model {SD15}"
    hub.requests.clear()
    assert document(capsys, "get", SD15) == got
    assert listed(document(capsys), "sd15")["here"] == [got["path"]]
    assert hub.requests == []


def test_a_model_that_is_not_listed_is_downloaded_by_its_id(hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["some/model"] = dict(FILES)
    got = document(capsys, "get", "some/model", "--revision", "v1")
    assert got["arguments"] == "--model some/model --set model.revision=v1"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ((401, "GatedRepo"), "hub_gated"),
        ((403, "GatedRepo"), "hub_gated"),
        ((404, "RepoNotFound"), "hub_model_missing"),
        ((429, ""), "hub_limits_requests"),
        ((500, ""), "hub_error"),
    ],
)
def test_a_refusal_is_one_message(hub: LocalHub, status: tuple[int, str], code: str, problem_codes: Any) -> None:
    hub.status["/api/models/"] = status
    assert problem_codes("models", "get", "sd15") == [code]


def test_a_full_disk_is_one_message(hub: LocalHub, problem_codes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_trainer.run.bases.hub.free_bytes", lambda folder: 2000)
    assert problem_codes("models", "get", "sd15") == ["disk_full"]
    assert UNET not in hub.fetched()
