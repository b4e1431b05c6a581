"""Each tracker with its real library: what a run shows is there, also after a rollback and when it is resumed."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lora_trainer.monitor.tracker_kinds import TRACKERS, trackio
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, ShownImage, TrackedRun
from lora_trainer.monitor.tracker_thread import TrackerThreads
from lora_trainer.monitor.trackers import Trackers

CAPTION = "a robot on a desk (seed 42)"
TAG = "samples/1 a robot on a desk, strength 1"


def installed(name: str) -> pytest.MarkDecorator:
    kind = TRACKERS[name]
    return pytest.mark.skipif(find_spec(kind.library) is None, reason=f"pip install '{kind.requirement}'")


def shown_by(name: str, folder: Path, *, resumed: bool = False, first: int = 1) -> list[str]:
    """What a run of four steps sends, with a rollback from step 3 to 2; the lines that it printed."""
    lines, image = list[str](), folder / "samples" / "a.png"
    image.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (24, 16), "teal").save(image)
    (folder / "run.safetensors").write_bytes(b"weights")
    config = {"train": {"seed": 42}, "lora": {"rank": 8}}
    origins = {"lora.rank": "--set"}
    run = TrackedRun("run", folder, config=config, origins=origins, resumed=resumed, say=lines.append)
    threads = TrackerThreads([name], run)
    trackers = Trackers(folder, resume_step=first - 1 if resumed else -1, threads=threads)
    trackers.steps([{"step": step, "loss": 1.0 / step, "epoch": 0} for step in range(first, first + 3)])
    trackers.forget_after(first + 1)
    trackers.steps([{"step": step, "loss": 2.0 / step, "skipped": True} for step in range(first + 2, first + 4)])
    trackers.validation({"step": first + 3, "loss": 0.25})
    trackers.system({"step": first + 3, "gpu_utilization": 0.9})
    trackers.update_sizes(first + 3, {"a": 0.5, "b": 0.25, "c": 0.125})
    threads.call("images", first + 3, [ShownImage(TAG, image, CAPTION)])
    threads.call("text", first + 3, "verdict", "**passed**")
    threads.finish(RunEnding("done", 0, {"lora": 0.93}, [folder / "run.safetensors"]))
    return lines


def test_tensorboard_shows_everything(tmp_path: Path) -> None:
    assert shown_by("tensorboard", tmp_path) == []
    board = EventAccumulator(str(tmp_path / "logs"))
    board.Reload()
    losses = [(each.step, each.value) for each in board.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(2 / 3)), (4, 0.5)]
    assert board.Scalars("validation/loss")[0].value == 0.25
    assert board.Scalars("system/gpu_utilization")[0].value == pytest.approx(0.9)
    assert board.Scalars("updates/max")[0].value == 0.5
    (histogram,) = board.Histograms("updates/relative_change")
    assert (histogram.histogram_value.num, histogram.histogram_value.max) == (3, 0.5)
    (image,) = board.Tensors(TAG)
    width, height, encoded = image.tensor_proto.string_val
    assert (width, height) == (b"24", b"16")
    assert encoded == (tmp_path / "samples" / "a.png").read_bytes()
    assert board.SummaryMetadata(TAG).summary_description == CAPTION
    assert board.Tensors("verdict/text_summary")[0].tensor_proto.string_val == [b"**passed**"]


@installed("trackio")
def test_trackio_keeps_a_run_in_a_folder_beside_it(tmp_path: Path) -> None:
    """In a process of its own: it reads where its folder is when it is imported."""
    program = (
        "from pathlib import Path; from tests.monitor.test_tracker_kinds import shown_by;"
        f"folder = Path({str(tmp_path / 'run')!r}); print(shown_by('trackio', folder));"
        "print(shown_by('trackio', folder, resumed=True, first=5))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stdout + done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "lora-trainer.db") as stored:
        found = stored.execute("select step, metrics from metrics order by id").fetchall()
        ids = stored.execute("select distinct run_id from metrics").fetchall()
        ((config,),) = stored.execute("select config from configs").fetchall()
    rows = [(step, json.loads(metrics)) for step, metrics in found]
    assert len(ids) == 1, "a resumed run continues the one that is there"
    steps = [step for step, each in rows if "train/loss" in each]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 7, 7, 8]
    shown: dict[str, Any] = {}
    for _, each in rows:
        shown |= each
    assert shown["validation/loss"] == 0.25
    assert shown["system/gpu_utilization"] == 0.9
    assert shown[TAG]["caption"] == CAPTION
    assert shown["updates/relative_change"]["_type"] == "trackio.histogram"
    assert json.loads(config)["lora.rank"] == 8
    assert json.loads(config)["origins"] == {"lora.rank": "--set"}


@pytest.mark.parametrize("interval", [0.5, None])
def test_the_interval_of_trackio_is_set_only_where_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float | None
) -> None:
    """A small replacement of the library: its interval is a name of its own, which another version may not have."""
    modules = {name: types.ModuleType(name) for name in ("trackio", "trackio.run", "trackio.utils")}
    started = list[dict[str, Any]]()
    vars(modules["trackio"])["init"] = lambda **settings: started.append(settings)
    if interval is not None:
        vars(modules["trackio.run"])["BATCH_SEND_INTERVAL"] = interval
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio.open_tracker(TrackedRun("run", tmp_path / "run"))
    assert len(started) == 1
    assert getattr(modules["trackio.run"], "BATCH_SEND_INTERVAL", None) == (interval and trackio.WRITE_EVERY)


@pytest.fixture
def without_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))


HANGING = """
import sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import json, os

class Server(BaseHTTPRequestHandler):
    "Knows a run, and never answers what is sent of it."
    def log_message(self, *_): pass
    def do_POST(self):
        query = self.rfile.read(int(self.headers["content-length"] or 0)).decode(errors="replace")
        if "graphql" not in self.path or "CreateRunFiles" in query:
            time.sleep(600)
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        bucket = {"id": "x", "name": "run", "displayName": "run", "historyLineCount": 0, "project": project}
        viewer = {"id": "v", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}}
        data = {"viewer": viewer} if "query Viewer" in query else {}
        data = {"upsertBucket": {"bucket": bucket, "inserted": True}} if "UpsertBucket" in query else data
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"WANDB_API_KEY": "0123456789" * 4, "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}"}
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, TrackedRun
from lora_trainer.monitor.tracker_thread import TrackerThreads
threads = TrackerThreads(["wandb"], TrackedRun("run", Path(sys.argv[1]), offline=False, wait_seconds=60, say=print))
threads.call("scalars", "train", {"step": 1, "loss": 0.5})
threads._threads[0].settle(time.monotonic() + 60)
if sys.argv[2] == "hung":  # W&B itself does not answer, so that nothing ends the run
    threads.call("text", 1, "a", "b")
    from lora_trainer.monitor.tracker_kinds import wandb
    wandb.WandbRun.text = lambda *_: time.sleep(600)
threads.finish(RunEnding("stopped", 143))
print(time.time())
"""


@installed("wandb")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["hung", "slow"])
def test_wandb_does_not_hold_up_the_end_of_the_process(how: str, tmp_path: Path, without_login: None) -> None:
    """A server that takes nothing: after the run's own wait of 5 s nothing waits another 60."""
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path / "run"), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    ended = time.time()
    assert done.returncode == 0, done.stderr
    line, finished = done.stdout.splitlines()
    assert line.startswith("W&B did not finish in time")
    assert ended - float(finished) < 20
    assert "Traceback" not in done.stderr
    stored = next((tmp_path / "run" / "logs" / "wandb").glob("run-*/*.wandb")).read_bytes()
    assert how == "hung" or b"train/loss" in stored


@pytest.mark.skipif(shutil.which("sleep") is None, reason="a program to stand for W&B's")
def test_the_process_of_wandb_is_ended_with_this_one_and_no_other(tmp_path: Path) -> None:
    """A program of that name stands for it, and a hook that waits for it, as W&B's does."""
    from lora_trainer.monitor.tracker_kinds.wandb import SERVICE

    shutil.copy(shutil.which("sleep") or "", tmp_path / SERVICE)
    program = f"""
import atexit, subprocess, time
from lora_trainer.monitor.tracker_kinds import wandb
wandb.ENDING_SECONDS = 0.2
service, other = (subprocess.Popen([name, "60"]) for name in ({str(tmp_path / SERVICE)!r}, "sleep"))
atexit.register(lambda: (service.wait(), print(service.returncode, other.poll()), other.kill(), other.wait()))
wandb.abandon()
time.sleep(0.5)
print(service.poll())
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["None", "-9 None"], done.stderr
    assert time.monotonic() - began < 40


@installed("wandb")
def test_wandb_is_offline_without_a_login_and_resumes_its_run(
    tmp_path: Path, without_login: None, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert shown_by("wandb", folder) == []
    assert shown_by("wandb", folder, resumed=True, first=5) == []
    first, second = sorted((folder / "logs" / "wandb").glob("offline-run-*"))
    identity = json.loads((folder / "logs" / "wandb.json").read_text())["id"]
    for path in (first, second):  # W&B adds a number to a second session of the same second
        assert re.fullmatch(rf"offline-run-\d{{8}}_\d{{6}}-{identity}(-1)?", path.name), path.name
    stored = next(first.glob("*.wandb")).read_bytes()  # uncompressed records
    for shown in ("train/loss", "validation/loss", "system/gpu_utilization", "updates/relative_change", TAG, CAPTION):
        assert shown.encode() in stored, shown
    assert b"run.safetensors" in stored, "the LoRA is an artifact"
    assert b"lora.rank" in stored, "where settings are from"
    assert list((first / "files" / "media" / "images").rglob("*.png"))
    output = capfd.readouterr()
    assert output.out + output.err == "", "it neither asks nor prints"


def test_wandb_measures_nothing_that_the_trainer_measures(
    tmp_path: Path, without_login: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own monitor would read the GPU and the CPU a second time."""
    from lora_trainer.monitor.tracker_kinds.wandb import open_tracker

    passed: dict[str, Any] = {}
    shown = SimpleNamespace(define_metric=lambda *_, **__: None)
    fake = SimpleNamespace(Settings=passed.update, init=lambda **_: shown)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    open_tracker(TrackedRun("run", tmp_path))
    for setting in ("x_disable_stats", "x_disable_machine_info", "x_disable_meta", "disable_git"):
        assert passed[setting] is True, setting
    assert passed["console"] == "off"


def test_a_login_is_found_without_asking(tmp_path: Path, without_login: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_trainer.monitor.tracker_kinds.wandb import is_logged_in

    assert not is_logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "0" * 40)
    (tmp_path / "netrc").chmod(0o600)
    assert is_logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not is_logged_in(), "a key of another server"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert is_logged_in()


def test_no_trackers_library_is_imported_that_is_not_used() -> None:
    program = (
        "import sys; import lora_trainer.cli.main, lora_trainer.run.train, lora_trainer.monitor.trackers;"
        "print(sorted({'wandb', 'trackio', 'tensorboard', 'prometheus_client', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
