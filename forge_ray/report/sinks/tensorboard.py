"""TensorBoard's event files, by the package `tensorboard` alone (no TensorFlow, no torch)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """One event file per start of the run; TensorBoard joins those of a directory."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
