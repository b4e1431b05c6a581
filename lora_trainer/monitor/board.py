"""TensorBoard's event file, written by the caller's thread: tensorboard's own writer fails unseen in another one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

GENERATION = "brain.Event:2"


class Board:
    """One session's event file in `folder`, from `first_step` on.

    All methods raise OSError when the disk refuses.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = open(folder / name, "wb", buffering=0)  # noqa: SIM115  closed by close()
        self._records = RecordWriter(self._file)
        self._write(file_version=GENERATION)
        self.begin(first_step)

    def begin(self, first_step: int) -> None:
        """Hide what this or an earlier session wrote from `first_step` on."""
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, group: str, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row, at its step."""
        values = [
            Summary.Value(tag=f"{group}/{name}", simple_value=float(value))
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._write(step=row["step"], summary=Summary(value=values))

    def add_text(self, tag: str, markdown: str, step: int) -> None:
        """Write a text, for TensorBoard's page of texts."""
        plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
        text = TensorProto(
            dtype="DT_STRING",
            string_val=[markdown.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=SummaryMetadata(plugin_data=plugin), tensor=text)
        self._write(step=step, summary=Summary(value=[value]))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **content).SerializeToString())
