"""TensorBoard's event files, by the package `tensorboard` alone (no TensorFlow, no torch)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path


class TensorBoard:
    """One event file per start of the run; TensorBoard joins those of a directory."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # Generated modules, whose names no type checker sees.
        event, summary = (import_module(f"tensorboard.compat.proto.{name}_pb2") for name in ("event", "summary"))
        numbers = [summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(event.Event(wall_time=time.time(), step=step, summary=summary.Summary(value=numbers)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
