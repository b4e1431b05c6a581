"""Settings that name files: what the schema says is what a run writes, a batch reads and the page holds to its roots."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.paths import path_settings, source_paths
from lora_trainer.core.errors import Problem
from lora_trainer.jobs.folders import folder_values
from lora_trainer.run.inputs import with_absolute_paths
from lora_trainer.web.asked_settings import AskedSettings, refuse_outside

# A boundary of security: a setting that names files and is not here could read outside of the page's roots.
NAMED = {
    *("model.path", "model.vae", "model.text_encoders", "model.training_adapter", "model.loras", "cache.dir"),
    *("lora.network_weights", "checkpoint.scratch", "sample.control_images", "gates.encoder"),
    *("run.output", "run.copy_to"),
}


def value_of(name: str, path: str) -> object:
    return {"model.loras": {path: 0.5}, "sample.control_images": [path]}.get(name, path)


def test_the_paths_are_those_that_are_known() -> None:
    assert set(path_settings()) == NAMED
    assert set(source_paths()) == {"path", "captions_file", "masks", "control_images"}


@pytest.mark.parametrize("name", sorted(NAMED - {"run.output"}))
def test_a_page_names_no_path_outside_of_its_roots(name: str, tmp_path: Path) -> None:
    section, key = name.split(".")
    problems: list[Problem] = []
    refuse_outside([{section: {key: value_of(name, "/etc/passwd")}}], [tmp_path], problems)
    assert [each.code for each in problems] == ["outside_folders"]
    refuse_outside([{section: {key: value_of(name, str(tmp_path / "here"))}}], [tmp_path], problems)
    assert len(problems) == 1


def test_the_folder_of_runs_is_the_server_s_own(tmp_path: Path) -> None:
    """Resolved settings have it, also where no request set it; a request that sets it is refused by its name."""
    problems: list[Problem] = []
    refuse_outside([{"run": {"output": "runs"}}], [tmp_path], problems)
    assert problems == []
    AskedSettings(settings={"run.output": "/etc"}).nested(problems)
    assert [each.code for each in problems] == ["setting_not_allowed"]


@pytest.mark.parametrize("key", sorted(source_paths()))
def test_a_source_names_no_path_outside_of_the_roots(key: str, tmp_path: Path) -> None:
    problems: list[Problem] = []
    source = {"path": str(tmp_path), key: ["/etc/passwd"] if key == "control_images" else "/etc/passwd"}
    refuse_outside([{"data": {"sources": [source]}}], [tmp_path], problems)
    assert [each.code for each in problems] == ["outside_folders"]


@pytest.mark.parametrize("name", sorted(NAMED - {"run.output", "run.copy_to"}))
def test_a_folder_s_own_file_names_paths_from_that_folder(name: str, tmp_path: Path) -> None:
    section, key = name.split(".")
    (tmp_path / "own").mkdir()
    value = {"model.loras": '{"own" = 0.5}', "sample.control_images": '["own"]'}.get(name, '"own"')
    (tmp_path / "lora.toml").write_text(f"[{section}]\n{key} = {value}\n", encoding="utf-8")
    assert folder_values(tmp_path)[section][key] in (
        str(tmp_path / "own"),
        [str(tmp_path / "own")],
        {str(tmp_path / "own"): 0.5},
    )


def test_absolute_paths_keep_hub_ids_addresses_and_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [{"path": "https://host/cats.tar"}, {"path": "cats", "masks": "alpha", "control_images": ["before"]}]
    values = {
        "model": {"path": "owner/name", "loras": {"a.safetensors": 0.5}},
        "run": {"copy_to": "comfyui", "output": "runs"},
        "checkpoint": {"scratch": "auto"},
        "data": {"sources": sources},
    }
    config = with_absolute_paths(resolve([Layer("test", values)]).config)
    assert config.model.path == "owner/name"
    assert config.model.loras == {str(tmp_path / "a.safetensors"): 0.5}
    assert (config.run.copy_to, config.run.output) == ("comfyui", str(tmp_path / "runs"))
    assert config.checkpoint.scratch == "auto"
    remote, local = config.data.sources
    assert remote.path == "https://host/cats.tar"
    assert (local.path, local.masks, local.control_images) == (
        str(tmp_path / "cats"),
        "alpha",
        (str(tmp_path / "before"),),
    )
