"""The run's stored rollouts: records on disk and their calls in the log.

Everything here reads what other processes wrote durably, so a driver that starts again sees exactly what the stopped one saw.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDamaged, RunDir

if TYPE_CHECKING:
    from forge_ray.trajectories.call import Call
    from forge_ray.trajectories.call_log import Problem

log = logging.getLogger(__name__)


def records(run: RunDir) -> Iterator[RolloutRecord]:
    """Every finished rollout, by path name. Raises `RunDamaged`."""
    for file in sorted(run.rollouts.glob("*/result.json")):
        try:
            yield RolloutRecord.model_validate_json(file.read_bytes())
        except ValueError as error:
            problem = " ".join(str(error).split())[:200]
            raise RunDamaged(f"{file} is damaged ({problem}): remove it, and the rollout is made again") from None


class Recordings:
    """Calls of finished rollouts, out of the run's call log."""

    def __init__(self, run: RunDir, *, train_grammar_calls: bool = False) -> None:
        from forge_ray.trajectories.call_log import CallLogReader

        self._reader = CallLogReader(run.calls)
        self._lift = train_grammar_calls
        self._lock = threading.Lock()
        self._done: set[str] = set()
        self._told: set[Problem] = set()

    def with_calls(self, found: list[RolloutRecord]) -> list[tuple[RolloutRecord, list[Call]]]:
        """Each record with its calls by completion. Blocking file reads: call it in a thread (of any, one is let in at a time)."""
        with self._lock:
            done, self._done = self._done, set()
            self._reader.refresh()
            for session in done:
                self._reader.forget(session)
            taken = [(record, self._reader.session(record.id)) for record in found]
            for problem in self._reader.problems:
                if problem not in self._told:
                    self._told.add(problem)
                    log.error("the call log is damaged: %s", problem)
        for call in (call for _, calls in taken for call in calls if self._lift):
            call.masked_by_grammar = False
        return taken

    def done(self, found: Iterable[RolloutRecord]) -> None:
        """These rollouts will not be asked for again: what was read of them is let go at the next read. Their calls stay on disk."""
        self._done.update(record.id for record in found)
