"""TensorBoard's event files, in the run's folder `logs`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.image.plugin_data_pb2 import ImagePluginData
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from lora_trainer.core.disk import current
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, ShownImage, TrackedRun, Tracker, numbers_of

GENERATION = "brain.Event:2"
FOLDER = "logs"
PNG = b"\x89PNG\r\n\x1a\n"
BINS = 30


def open_tracker(run: TrackedRun) -> Tracker:
    return Board(run.folder / FOLDER)


class Board(Tracker):
    """One session's event file in `folder`. tensorboard's own writer fails unseen, in a thread of its own.

    All methods raise OSError when the disk refuses. A folder that was deleted is created again, with a new file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lost = folder, threading.Event()
        current().keep(FOLDER, self._lost.set)  # called by the thread that creates the run's folder again
        self._open()

    def scalars(self, group: str, row: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in numbers_of(row).items()]
        self._write(step=row["step"], summary=Summary(value=values))

    def images(self, step: int, images: Sequence[ShownImage]) -> None:
        for image in images:
            encoded = image.path.read_bytes()
            if not encoded.startswith(PNG):
                continue
            width, height = (int.from_bytes(encoded[place : place + 4], "big") for place in (16, 20))
            plugin = SummaryMetadata.PluginData(plugin_name="images", content=ImagePluginData().SerializeToString())
            about = SummaryMetadata(plugin_data=plugin, summary_description=image.caption)
            # Width and height come first, as the image plugin stores them.
            parts = [str(width).encode(), str(height).encode(), encoded]
            self._tensor(step, image.tag, about, parts)

    def text(self, step: int, tag: str, markdown: str) -> None:
        plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
        self._tensor(step, f"{tag}/text_summary", SummaryMetadata(plugin_data=plugin), [markdown.encode()])

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        counts, edges = np.histogram(np.asarray(values), bins=BINS)
        found = HistogramProto(
            min=min(values),
            max=max(values),
            num=len(values),
            sum=sum(values),
            sum_squares=sum(value * value for value in values),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.astype(float).tolist(),
        )
        self._write(step=step, summary=Summary(value=[Summary.Value(tag=tag, histo=found)]))

    def rewind(self, step: int) -> None:
        """Hide what this or an earlier session wrote of later steps."""
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def finish(self, ending: RunEnding) -> None:
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _tensor(self, step: int, tag: str, about: SummaryMetadata, parts: list[bytes]) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(parts))])
        tensor = TensorProto(dtype="DT_STRING", string_val=parts, tensor_shape=shape)
        self._write(step=step, summary=Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=tensor)]))

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = open(self._folder / name, "wb", buffering=0)  # noqa: SIM115  closed by `finish`
        self._records = RecordWriter(self._file)
        self._write(file_version=GENERATION)

    def _write(self, **content: Any) -> None:
        if self._lost.is_set():
            self._lost.clear()
            with contextlib.suppress(OSError):
                self._file.close()
            self._open()
        self._records.write(Event(wall_time=time.time(), **content).SerializeToString())
