"""Storage by the real command: checkpoints of weights alone, a scratch folder, and shards on a server."""

from __future__ import annotations

import errno
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.core.io import write_json
from lora_trainer.data.images import remote
from lora_trainer.doctor.after import after_lines
from lora_trainer.doctor.during import sign_of_life
from lora_trainer.doctor.run_facts import read_run_facts
from lora_trainer.monitor import trackers
from lora_trainer.monitor.trackers import Trackers
from tests.data.range_server import serving
from tests.data.test_sources_tar import write_tar
from tests.recipes.recipe import Bench, exported, patched, record
from tests.recipes.test_resume import stop
from tests.training.checkpoints.test_scratch import killed_session, steps_in


def test_a_run_without_state_says_so_and_is_not_resumed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("light", steps=2, checkpoint__save_state="false") == 0
    assert "this run cannot be resumed" in capsys.readouterr().out
    before = record(bench.folder("light"))
    assert bench.run("light", "--resume", steps=4) == 2
    lora = bench.folder("light") / "light.safetensors"
    assert f"--set lora.network_weights={lora}" in capsys.readouterr().err
    assert record(bench.folder("light")) == before
    assert bench.run("light", steps=4) == 2
    assert "It cannot be resumed (checkpoint.save_state=false): choose another --name." in capsys.readouterr().err
    assert "--resume" not in advice_of_doctor(bench.folder("light"), "running")


def advice_of_doctor(folder: Path, status: str) -> str:
    """What `doctor` says of a run with this status, with a damaged checkpoint, and with none of its LoRA files."""
    write_json(folder / "run.json", record(folder) | {"status": status})
    for lora in folder.glob("*.safetensors"):
        lora.unlink()
    facts = read_run_facts(folder)
    killed = "\n".join(line.fix for line in after_lines(facts))
    hangs = "\n".join(line.fix for line in sign_of_life(replace(facts, age=1e6)))
    for state in folder.glob("checkpoints/*/state.json"):
        state.write_text("{")
    damaged = "\n".join(line.fix for line in after_lines(read_run_facts(folder)))
    assert f"--name {folder.name}-2" in killed
    assert "another --name" in hangs
    assert "copy it from a backup" in killed
    assert "delete it" in damaged
    return killed + hangs + damaged


def test_a_full_disk_advises_a_run_without_state_not_to_resume(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings: dict[str, object] = {"checkpoint__wait_minutes": 0, "checkpoint__every_n_steps": 1}
    with patched(trackers, "append_text", full):
        assert bench.run("light", steps=2, checkpoint__save_state="false", **settings) == 5
    light = capsys.readouterr().err
    assert "Free space there, then start again with another --name." in light
    assert "--resume" not in light
    with patched(trackers, "append_text", full):
        assert bench.run("whole", steps=2, **settings) == 5
    assert "Free space there, then continue with --resume." in capsys.readouterr().err


def test_a_stopped_run_without_state_names_its_weights(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert bench.run("light", steps=6, checkpoint__save_state="false") == 143
    assert "it cannot be resumed (checkpoint.save_state=false)" in capsys.readouterr().out
    (lora,) = (bench.folder("light") / "weights").iterdir()
    page = (bench.folder("light") / "report.html").read_text()
    assert f"<span>lora.network_weights={lora}</span>" in page
    assert "To train on from its weights" in page
    assert bench.run("light-2", steps=1, lora__network_weights=lora) == 0


def test_settings_that_need_state_or_validation_are_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    wrong: dict[str, object] = {"checkpoint__save_state": "false", "safeguards__on_nonfinite": "rollback"}
    assert bench.run("a", **wrong) == 2
    assert "remove checkpoint.save_state=false" in capsys.readouterr().err
    assert bench.run("b", checkpoint__keep_best=2) == 2
    assert "Set validation.every_n_steps" in capsys.readouterr().err
    assert bench.run("c", checkpoint__scratch=str(bench.output / "nowhere")) == 2
    assert "is no folder that can be written to" in capsys.readouterr().err


def test_a_resumed_run_takes_over_the_scratch_folder(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every: dict[str, object] = {"checkpoint__every_n_steps": 2}
    assert bench.run("straight", steps=6, checkpoint__scratch="auto", **every) == 0
    assert record(bench.folder("straight"))["config"]["checkpoint"]["scratch"] == "auto"
    (tmp_path / "fast").mkdir()
    every["checkpoint__scratch"] = str(tmp_path / "fast")
    assert bench.run("run", steps=4, **every) == 0
    checkpoints = bench.folder("run") / "checkpoints"
    assert steps_in(checkpoints) == [4, 2]
    shutil.move(checkpoints / "step-000004", killed_session(tmp_path / "fast", checkpoints))
    capsys.readouterr()
    assert bench.run("run", "--resume", steps=6, **every) == 0
    out = capsys.readouterr().out
    assert "step-000004 was still in" in out
    assert "resuming from step-000004" in out
    assert exported(bench.folder("run")) == exported(bench.folder("straight"))
    assert list((tmp_path / "fast").iterdir()) == []
    assert record(bench.folder("run"))["checkpoints"]["copied"] >= 1


def test_a_run_on_shards_of_a_server_is_the_run_on_shards_here(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "user"))
    monkeypatch.setattr(remote, "WAITS", (0.0,))
    monkeypatch.delenv(remote.OFFLINE, raising=False)
    members = {path.name: path.read_bytes() for path in sorted(bench.data.iterdir())}
    stems = sorted({Path(name).stem for name in members})
    (tmp_path / "shards").mkdir()
    for number, part in enumerate((stems[:5], stems[5:])):
        chosen = {name: data for name, data in members.items() if Path(name).stem in part}
        write_tar(tmp_path / "shards" / f"cats-{number:03}.tar", chosen)
    pattern = "cats-{000..001}.tar"

    def train(name: str, data: str, *extra: str, **settings: object) -> int:
        arguments = bench.arguments(name, *extra, steps=3, **{"cache__dir": str(tmp_path / name), **settings})
        return main([data if argument == str(bench.data) else argument for argument in arguments])

    assert train("here", str(tmp_path / "shards" / pattern)) == 0
    with serving(tmp_path / "shards") as served:
        address = f"{served.address}/{pattern}"
        assert train("there", address) == 0
        fetched = served.sent
        assert train("again", address, cache__dir=str(tmp_path / "there")) == 0
        assert served.sent == fetched + 2, "latents are cached: the first byte of each shard tells its version"
        assert train("fresh", address, cache__latents="false") == 0
        capsys.readouterr()
        assert train("offline", address, "--offline") == 2
        assert "offline nothing is fetched" in capsys.readouterr().err
        monkeypatch.delenv(remote.OFFLINE)
        small = ("--set", "data.resolution=64")
        assert main(["check", address, "--clean-copy", str(tmp_path / "copy"), *small]) in (0, 3)
        assert len((tmp_path / "copy" / "metadata.jsonl").read_text().splitlines()) == len(stems)
    assert exported(bench.folder("there")) == exported(bench.folder("here"))
    assert exported(bench.folder("again")) == exported(bench.folder("here"))
    capsys.readouterr()
    assert train("down", address) == 2
    assert "the connection failed" in capsys.readouterr().err
