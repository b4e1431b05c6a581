"""trackio: charts of all runs of an output folder, in the folder `trackio` beside them. Nothing is sent anywhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lora_trainer.monitor.tracker_kinds.interface import RunEnding, ShownImage, TrackedRun, Tracker, numbers_of

FOLDER = "trackio"
WRITE_EVERY = 5.0  # seconds; it opens its database anew for each write, which takes longer than a row


def open_tracker(run: TrackedRun) -> Tracker:
    return TrackioRun(run)


class TrackioRun(Tracker):
    """A run of trackio. A resumed run continues the one of its name."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder.parent.absolute() / FOLDER))  # read when it is imported
        if run.offline:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio

        # It prints its hints on stdout, which may carry our JSON.
        for name in ("trackio", "trackio.run", "trackio.utils"):
            sys.modules[name].print = lambda *_, **__: None  # type: ignore[attr-defined]
        # The user's name is part of each config, and asking the hub for it is a request.
        sys.modules["trackio.run"]._get_default_namespace = lambda: None  # type: ignore[attr-defined]
        if hasattr(sys.modules["trackio.run"], "BATCH_SEND_INTERVAL"):  # of trackio's own, and not of all its versions
            sys.modules["trackio.run"].BATCH_SEND_INTERVAL = WRITE_EVERY  # type: ignore[attr-defined]
        self._trackio, self._run = trackio, run
        settings = {f"{section}.{key}": value for section, keys in run.config.items() for key, value in keys.items()}
        self._shown = trackio.init(
            project=run.project,
            name=run.name,
            config={**settings, "origins": dict(run.origins)},
            resume="allow" if run.resumed else "never",
            embed=False,
            auto_log_gpu=False,  # the group `system` has them
            auto_log_cpu=False,
        )

    def scalars(self, group: str, row: Mapping[str, Any]) -> None:
        self._shown.log({f"{group}/{name}": value for name, value in numbers_of(row).items()}, step=row["step"])

    def images(self, step: int, images: Sequence[ShownImage]) -> None:
        shown = {each.tag: self._trackio.Image(str(each.path), caption=each.caption) for each in images}
        self._shown.log(shown, step=step)

    def text(self, step: int, tag: str, markdown: str) -> None:
        self._shown.log({tag: self._trackio.Markdown(markdown)}, step=step)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self._shown.log({tag: self._trackio.Histogram(values)}, step=step)

    def finish(self, ending: RunEnding) -> None:
        self._shown.finish()
