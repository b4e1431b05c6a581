"""`--copy-to`, the ComfyUI workflow and the text for A1111, through the real command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.core.errors import UsageError
from lora_trainer.core.families import families
from lora_trainer.data.prompt_weights import parse_weights, plain
from lora_trainer.evaluation.recipe import parameters, rows_of
from lora_trainer.report.comfyui import workflow_of
from lora_trainer.run.other_programs import copy_beside, file_of_model, loras_folder
from tests.recipes.recipe import Bench, record


@pytest.fixture
def comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ComfyUI in a home folder that has nothing else."""
    home = tmp_path / "home"
    (home / "ComfyUI/models/loras").mkdir(parents=True)
    (home / "ComfyUI/models/checkpoints").mkdir()
    (home / "ComfyUI/custom_nodes").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("FORGE_PATH", raising=False)
    return home / "ComfyUI"


def linked_nodes(workflow: dict[str, Any]) -> set[str]:
    """The nodes from which the image is drawn, followed from `SaveImage` back."""
    (end,) = (key for key, node in workflow.items() if node["class_type"] == "SaveImage")
    found, todo = set[str](), [end]
    while todo:
        key = todo.pop()
        found.add(key)
        inputs = workflow[key]["inputs"].values()
        todo += [value[0] for value in inputs if isinstance(value, list) and value[0] not in found]
    return found


def inputs_of(workflow: dict[str, Any], class_type: str) -> dict[str, Any]:
    (node,) = (node for node in workflow.values() if node["class_type"] == class_type)
    return dict(node["inputs"])


def test_a_run_leaves_its_lora_in_comfyui_with_a_workflow(bench: Bench, comfyui: Path) -> None:
    other = comfyui / "models/loras/cat.safetensors"
    other.write_bytes(b"of somebody else")
    settings = {
        "gates__lora_check": "lite",
        "sample__negative_prompt": "blurry",
        "sample__guidance_scale": 5,
        "data__resolution": 64,
    }
    assert bench.run("cat", "--copy-to", "comfyui", **settings) == 0
    folder = bench.folder("cat")
    found = record(folder)
    assert other.read_bytes() == b"of somebody else"
    copy = comfyui / "models/loras/cat-2.safetensors"
    assert found["copied_to"] == str(copy)
    assert copy.read_bytes() == (folder / "cat.safetensors").read_bytes()
    drawn = json.loads((folder / "samples/before_after.json").read_text("utf-8"))
    workflow = json.loads((folder / found["files"]["comfyui"]).read_text("utf-8"))
    assert linked_nodes(workflow) == set(workflow)
    assert inputs_of(workflow, "CheckpointLoaderSimple")["ckpt_name"] == "model.safetensors"
    assert inputs_of(workflow, "LoraLoader")["lora_name"] == "cat-2.safetensors"
    sampler = inputs_of(workflow, "KSampler")
    assert (sampler["seed"], sampler["steps"], sampler["cfg"]) == (drawn["images"][0]["seed"], drawn["steps"], 5)
    texts = {node["inputs"]["text"] for node in workflow.values() if node["class_type"] == "CLIPTextEncode"}
    assert texts == {drawn["images"][0]["prompt"], "blurry"}
    prompt, negative, numbers = (folder / found["files"]["a1111"]).read_text("utf-8").splitlines()
    assert prompt == f"{drawn['images'][0]['prompt']} <lora:cat-2:1>"
    assert negative == "Negative prompt: blurry"
    assert f"Steps: {drawn['steps']}" in numbers
    assert ", Model: model, " in numbers  # no folder
    page = (folder / "report.html").read_text("utf-8")
    assert "&lt;lora:cat-2:1&gt;" in page
    assert str(copy) in page
    # Again for the finished run: the same bytes are there already.
    assert bench.run("cat", "--copy-to", "comfyui", "--resume", **settings) == 0
    assert len(list((comfyui / "models/loras").iterdir())) == 2


def test_a_finished_run_that_is_copied_names_the_copy_everywhere(bench: Bench, comfyui: Path) -> None:
    (comfyui / "models/loras/cat.safetensors").write_bytes(b"of somebody else")
    settings = {"gates__lora_check": "lite", "data__resolution": 64}
    assert bench.run("cat", **settings) == 0
    folder = bench.folder("cat")
    before = record(folder)
    assert before["copied_to"] is None
    assert bench.run("cat", "--copy-to", "comfyui", "--resume", **settings) == 0
    found = record(folder)
    copy = comfyui / "models/loras/cat-2.safetensors"
    assert found["copied_to"] == str(copy)
    assert {key for key in found if found[key] != before[key]} <= {"copied_to", "config", "origins", "changed"}
    workflow = json.loads((folder / found["files"]["comfyui"]).read_text("utf-8"))
    assert inputs_of(workflow, "LoraLoader")["lora_name"] == "cat-2.safetensors"
    assert "<lora:cat-2:1>" in (folder / found["files"]["a1111"]).read_text("utf-8")
    page = (folder / "report.html").read_text("utf-8")
    assert "&lt;lora:cat-2:1&gt;" in page
    assert str(copy) in page


def test_a_refused_lora_is_not_copied(bench: Bench, comfyui: Path) -> None:
    code = bench.run("cat", "--copy-to", "comfyui", command="produce", gates__lora=1, optimizer__learning_rate=1e-9)
    assert code == 4
    assert record(bench.folder("cat"))["copied_to"] is None
    assert list((comfyui / "models/loras").iterdir()) == []


def test_a_program_that_is_not_there_is_refused_before_training(bench: Bench, comfyui: Path, capsys: Any) -> None:
    for target in ("forge", str(comfyui / "nowhere")):
        assert bench.run("cat", "--copy-to", target) == 2
        assert "run.copy_to" in capsys.readouterr().err
    assert not bench.folder("cat").exists()


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(
    bench: Bench, comfyui: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    usual = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: comfyui not in Path(path).parents and usual(path, mode))
    assert bench.run("cat", "--copy-to", str(comfyui)) == 2
    assert str(comfyui) in capsys.readouterr().err
    assert not bench.folder("cat").exists()


def test_a_copy_that_fails_does_not_fail_the_run(bench: Bench, comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_trainer.run.other_programs.copy_beside", full)
    assert bench.run("cat", "--copy-to", str(comfyui)) == 0
    assert record(bench.folder("cat"))["copied_to"] is None


def test_copies_are_numbered_and_never_twice(tmp_path: Path) -> None:
    lora, target = tmp_path / "cat.safetensors", tmp_path / "loras"
    names = []
    for data in (b"one", b"two", b"one", b"three", b"two"):
        lora.write_bytes(data)
        names.append(copy_beside(lora, target).name)
    assert names == [f"cat{end}.safetensors" for end in ("", "-2", "", "-3", "-2")]
    (target / "cat-4.safetensors").symlink_to(tmp_path / "lost")
    lora.write_bytes(b"four")
    assert copy_beside(lora, target).name == "cat-5.safetensors"


RECIPE: dict[str, Any] = {
    "program": "lora_trainer",
    "family": "sd15",
    "model": "base",
    "model_sha256": {},
    "lora": "cat.safetensors",
    "lora_hash": "0" * 64,
    "strengths": [0.0, 0.8],
    "images": [{"prompt": "a cat", "seed": 7}],
    "negative": None,
    "steps": 20,
    "guidance": 3.5,
    "size": [512, 768],
    "scheduler": "DDIMScheduler",
    "scheduler_config": {},
    "text": {"clip_skip": 2},
}


def numbers_of(recipe: dict[str, Any]) -> dict[str, str]:
    """The last line of A1111's text."""
    line = parameters(recipe, rows_of(recipe)[0], None).splitlines()[-1]
    return dict(each.split(": ", 1) for each in line.split(", "))


@pytest.mark.parametrize(
    ("scheduler", "sampler"),
    [
        ("EulerAncestralDiscreteScheduler", "Euler a"),
        ("DPMSolverMultistepScheduler", "DPM++ 2M"),
        ("FlowMatchEulerDiscreteScheduler", "Euler"),
        ("DEISMultistepScheduler", None),
    ],
)
def test_the_text_names_a_sampler_as_the_web_ui_does(scheduler: str, sampler: str | None) -> None:
    assert numbers_of({**RECIPE, "scheduler": scheduler}).get("Sampler") == sampler


def test_guidance_that_is_an_input_of_the_model_is_no_cfg_scale() -> None:
    flux = numbers_of({**RECIPE, "family": "flux"})
    assert (flux["CFG scale"], flux["Distilled CFG Scale"]) == ("1", "3.5")
    for family in ("sd15", "chroma", "other"):
        numbers = numbers_of({**RECIPE, "family": family})
        assert numbers["CFG scale"] == "3.5"
        assert "Distilled CFG Scale" not in numbers
    assert "CFG" not in str(numbers_of({**RECIPE, "family": "flux", "guidance": None}))


def test_brackets_of_a_prompt_are_no_weights_elsewhere() -> None:
    recipe = {**RECIPE, "images": [{"prompt": "(toy) [red:1.2] cat (a:2)", "seed": 7}], "negative": "(blurry)"}
    text = parameters(recipe, rows_of(recipe)[0], 0.8)
    prompt, negative, _ = text.splitlines()
    assert plain(prompt) == "(toy) [red:1.2] cat (a:2) <lora:cat:0.8>"
    assert {weight for _, weight in parse_weights(prompt)} == {1.0}
    assert negative == r"Negative prompt: \(blurry\)"
    workflow = workflow_of(recipe, "cat.safetensors", "base.safetensors")
    assert workflow is not None
    texts = {node["inputs"]["text"] for node in workflow.values() if node["class_type"] == "CLIPTextEncode"}
    assert texts == {r"\(toy\) [red:1.2] cat \(a:2\)", r"\(blurry\)"}  # ComfyUI has no square brackets


@pytest.mark.parametrize("family", [name for name, document in families().items() if "comfyui" in document])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_workflow_of_each_family_is_whole(family: str, prediction: str) -> None:
    recipe = {**RECIPE, "family": family, "scheduler_config": {"shift": 3.0, "prediction_type": prediction}}
    workflow = workflow_of(recipe, "cat.safetensors", "base.safetensors")
    assert workflow is not None
    assert linked_nodes(workflow) == set(workflow)
    assert inputs_of(workflow, "LoraLoader")["strength_model"] == 0.8
    latent = inputs_of(workflow, families()[family]["comfyui"]["latent"])
    assert (latent["width"], latent["height"]) == (512, 768)
    assert workflow_of({**recipe, "family": "other"}, "cat.safetensors", "base.safetensors") is None


def test_the_file_of_a_model() -> None:
    assert file_of_model("stabilityai/stable-diffusion-xl-base-1.0") == "sd_xl_base_1.0.safetensors"
    assert file_of_model("/models/my_sd.safetensors") == "my_sd.safetensors"
    assert file_of_model("C:\\models\\my-sd") == "my-sd.safetensors"


@pytest.mark.parametrize(("target", "meant"), [("comfui", "comfyui"), ("ComfyUi2", "comfyui"), ("forg", "forge")])
def test_a_program_that_is_nearly_named_is_suggested(target: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        loras_folder(target)
    assert raised.value.problems[0].code == "folder_missing"
    assert f"Did you mean {meant}?" in raised.value.problems[0].fix
