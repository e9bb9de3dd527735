"""The store beside a run: one thread writes the rollouts that end, and what a stopped run left out.

What it writes is on disk already (`rollouts/<id>/result.json`, the call log), so it may lag, and a run does not stop for it: what could not
be stored is logged, tried again, and made good when the run starts again. A rollout is stored once, by its id.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.config import Config
from forge_ray.errors import ForgeRayError
from forge_ray.model_files import template_sha256, tokenizer_sha256
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir

if TYPE_CHECKING:
    from forge_ray.trajectories.call_log import CallLogReader
    from forge_ray.trajectories.store.location import Location
    from forge_ray.trajectories.store.rollouts import Origin
    from forge_ray.trajectories.store.samples import SampleStore
    from forge_ray.trajectories.store.writer import Ended, StoreWriter

log = logging.getLogger(__name__)


def location(config: Config, run: RunDir) -> Location:
    """Where the run's data is. Raises `UserError` for a `store.location` that nothing knows."""
    from forge_ray.trajectories.store.location import Location

    return Location.of_run(config.store.location, config.name, run.data)


def samples(config: Config, run: RunDir) -> SampleStore:
    """The run's step batches."""
    from forge_ray.trajectories.store.samples import SampleStore

    return SampleStore(location(config, run))


def origin(config: Config, model: Path | None) -> Origin:
    """What is the same for all rollouts of the run; `model`: the directory that is served."""
    from forge_ray.trajectories.store.rollouts import Origin

    return Origin(
        config.name,
        policy=config.policy.served_name,
        template_sha256=template_sha256(config.policy, model) if model is not None else None,
        tokenizer_sha256=tokenizer_sha256(model) if model is not None else None,
        harness_options={harness.name: harness.model_dump(mode="json")["options"] for harness in config.harnesses},
    )


class RolloutWriter:
    """Puts the run's rollouts into its store. One at a time, by the process that holds the run."""

    def __init__(self, config: Config, run: RunDir, model: Path | None) -> None:
        from forge_ray.trajectories.call_log import CallLogReader
        from forge_ray.trajectories.store.writer import StoreWriter

        self._run = run
        self._writer: StoreWriter = StoreWriter(location(config, run), origin(config, model))
        self._calls: CallLogReader = CallLogReader(run.calls)
        self._taken: set[str] = set()

    def complete(self) -> int:
        """Store what a stopped run left out; returns the number of rollouts. Raises `ForgeRayError`."""
        from forge_ray.report.records import read_records
        from forge_ray.trajectories.store.reader import StoreReader
        from forge_ray.trajectories.store.writer import unfinished

        where = self._writer.location
        where.sweep()
        known = {record.id: record for record in read_records(self._run)}
        self._calls.refresh()
        stored = 0
        for part, rollouts in unfinished(where).items():
            stored += sum(id in known for id in rollouts)
            self._writer.finish(part, [self._ended(known[id]) for id in rollouts if id in known])
        self._taken = set(StoreReader(where).table("rollouts", ["rollout"])["rollout"].to_pylist())
        missing = [record for id, record in known.items() if id not in self._taken]
        for record in missing:
            self.add(record)
            if self._writer.full:
                stored += self._writer.flush()
        return stored + self._writer.flush()

    def add(self, record: RolloutRecord) -> None:
        """Take a rollout whose record and calls are on disk; one that was taken before is not taken again."""
        if record.id in self._taken:
            return
        self._calls.refresh()
        try:
            ended = self._ended(record)
            self._writer.add(record, ended.calls, ended.log, ended.upstream)
        except (ForgeRayError, ValueError, TypeError, OverflowError) as error:  # pyarrow's own are ValueErrors
            # Something in its recording fits no column; the recording itself is untouched.
            log.error("rollout %s cannot be stored as data: %s", record.id, error)
        self._taken.add(record.id)
        self._calls.forget(record.id)

    def flush(self) -> None:
        """Put what was taken. Raises `StoreError`."""
        self._writer.flush()

    @property
    def waiting(self) -> int:
        return self._writer.waiting

    @property
    def full(self) -> bool:
        return self._writer.full

    def _ended(self, record: RolloutRecord) -> Ended:
        from forge_ray.trajectories.store.rollouts import read_log
        from forge_ray.trajectories.store.writer import Ended

        log = read_log(self._run.rollouts / record.id / "verifier.log")
        return Ended(record, self._calls.session(record.id), log, self._calls.upstream(record.id))


class StoreThread:
    """`RolloutWriter` in a thread of its own."""

    def __init__(self, config: Config, run: RunDir, model: Path | None) -> None:
        self._config, self._run, self._model = config, run, model
        self._location = location(config, run)  # what is wrong with it is a person's to mend: before the run begins
        self._queue: queue.SimpleQueue[RolloutRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="forge-ray store", daemon=True)
        self._thread.start()

    def ended(self, record: RolloutRecord) -> None:
        """A rollout has ended; its record is on disk."""
        self._queue.put(record)

    def close(self, timeout_s: float) -> None:
        """Store what is left and end the thread; blocks, at most `timeout_s` seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the last rollouts are not in the store: resuming the run stores them")

    def _work(self) -> None:
        try:
            writer = RolloutWriter(self._config, self._run, self._model)
            self._complete(writer)
            self._follow(writer)
        except Exception:  # a bug of ours: the run goes on, and the next start stores what is missing
            log.exception("the store's thread ended; the run's recording is not touched by it")

    def _complete(self, writer: RolloutWriter) -> None:
        try:
            if (late := writer.complete()) > 0:
                log.info("%d rollouts of a stopped run are stored now", late)
        except ForgeRayError as error:
            log.warning("the store could not be completed: %s", error)

    def _follow(self, writer: RolloutWriter) -> None:
        due, ended = None, False
        while not ended:
            wait = None if due is None else max(0.0, due - time.monotonic())
            try:
                record = self._queue.get(timeout=wait)
            except queue.Empty:
                record, due = None, 0.0
            else:
                ended = record is None
            if record is not None:
                writer.add(record)
                due = due if due is not None else time.monotonic() + self._config.store.flush_s
            if ended or writer.full or (due is not None and time.monotonic() >= due):
                due = None if self._flushed(writer) else time.monotonic() + self._config.store.flush_s

    def _flushed(self, writer: RolloutWriter) -> bool:
        try:
            writer.flush()
        except ForgeRayError as error:
            log.warning("%d rollouts are not in the store yet, which is tried again: %s", writer.waiting, error)
            return False
        return True
