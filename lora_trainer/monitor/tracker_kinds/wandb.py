"""W&B: offline unless you are logged in. Its files are in the run's folder `logs/wandb`."""

from __future__ import annotations

import html
import netrc
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import psutil

from lora_trainer.core.errors import first_line
from lora_trainer.core.io import read_json, write_json
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, ShownImage, TrackedRun, Tracker, numbers_of

FOLDER, ID_FILE = "logs", "wandb.json"
INIT_SECONDS = 30.0
SERVICE = "wandb-core"
ENDING_SECONDS = 3.0  # that W&B's process has to close its files
SERVER = "https://api.wandb.ai"


def open_tracker(run: TrackedRun) -> Tracker:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of its own errors, to its makers
    mode = os.environ.get("WANDB_MODE") or ("online" if is_logged_in() else "offline")
    return WandbRun(run, "offline" if run.offline else mode)


def abandon() -> None:
    """The run waits for W&B no more. W&B's hook at the end of this process would, as long as its own process works."""
    threading.Thread(target=end_service, name="end of W&B", daemon=True).start()


def end_service() -> None:
    """When this process ends, let W&B's close its files for `ENDING_SECONDS`, then end it.

    What it wrote is in the run's `logs/wandb`, for `wandb sync`; it writes in blocks, so the last entries may be missing.
    """
    threading.main_thread().join()  # over before the hooks run
    time.sleep(ENDING_SECONDS)
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name().startswith(SERVICE):
                child.kill()


def is_logged_in() -> bool:
    """Whether W&B has a key of this user: from `wandb login`, or in the environment. Nobody is asked for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVER)).netloc
    try:
        found = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return found.authenticators(host) is not None


class WandbRun(Tracker):
    """A run of W&B. Its charts are over our own `step`: W&B's may not fall, and ours does after a rollback."""

    def __init__(self, run: TrackedRun, mode: str) -> None:
        import wandb

        self._wandb, self._run = wandb, run
        (run.folder / FOLDER).mkdir(parents=True, exist_ok=True)
        identity = identity_of(run)
        settings = wandb.Settings(
            silent=True,
            console="off",  # else it reads all that this process prints
            init_timeout=INIT_SECONDS,
            finish_timeout=run.wait_seconds,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,  # the group `system` has them
            x_save_requirements=False,
        )
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", run.project),
            "id": identity,
            "name": run.name,
            "dir": str(run.folder / FOLDER),
            "config": {**run.config, "origins": dict(run.origins)},
            "resume": "allow",
            "reinit": "create_new",
            "settings": settings,
        }
        try:
            self._shown = wandb.init(mode=mode, **options)
        except Exception as error:
            if mode != "online":
                raise
            run.say(f"W&B does not answer ({first_line(error)}): this run is kept offline for `wandb sync`")
            self._shown = wandb.init(mode="offline", **options)
        self._shown.define_metric("step")
        self._shown.define_metric("*", step_metric="step")

    def scalars(self, group: str, row: Mapping[str, Any]) -> None:
        self._log(row["step"], {f"{group}/{name}": value for name, value in numbers_of(row).items()})

    def images(self, step: int, images: Sequence[ShownImage]) -> None:
        self._log(step, {each.tag: self._wandb.Image(str(each.path), caption=each.caption) for each in images})

    def text(self, step: int, tag: str, markdown: str) -> None:
        self._log(step, {tag: self._wandb.Html(f"<pre>{html.escape(markdown)}</pre>")})

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self._log(step, {tag: self._wandb.Histogram(values)})

    def finish(self, ending: RunEnding) -> None:
        self._shown.summary.update({"status": ending.status, **{f"score/{k}": v for k, v in ending.scores.items()}})
        if self._run.uploads_files and ending.files:
            artifact = self._wandb.Artifact(re.sub(r"[^\w.-]", "-", self._run.name, flags=re.ASCII)[:128], type="model")
            for path in ending.files:
                artifact.add_file(str(path), name=path.relative_to(self._run.folder).as_posix(), policy="immutable")
            self._shown.log_artifact(artifact)
        self._shown.finish(exit_code=ending.exit_code)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._shown.log({"step": step, **values})


def identity_of(run: TrackedRun) -> str:
    """The run's id of W&B: that of its earlier sessions where it is resumed, else a new one, which is kept."""
    path = run.folder / FOLDER / ID_FILE
    if run.resumed:
        try:
            return str(read_json(path)["id"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the run began without W&B
    identity = uuid.uuid4().hex[:12]
    write_json(path, {"id": identity})
    return identity
