"""`forge-ray rollouts rescore`: stored workspaces are judged again, by today's test scripts and reward functions. No model, no Ray.

    archived workspace → fresh sandbox → test script, reward function → a row of the dataset `rescores`

Nothing that is stored changes; `--from-rollouts` trains on the new verdicts where it is told to. What cannot be judged (no archive, no
task) is counted by its reason. Sandboxes bear the rescore's name, so a run that is still going on is not disturbed; one that was killed
leaves sandboxes that the next rescore of the run removes.
"""

from __future__ import annotations

import asyncio
import getpass
import itertools
import logging
import os
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_ray.actors.classify import verified
from forge_ray.config import Config
from forge_ray.errors import ForgeRayError, UserError, one_line
from forge_ray.job import library, store
from forge_ray.outcome import Outcome
from forge_ray.rewards.plan import function_of, refuse
from forge_ray.rewards.verdict import Subject, judge
from forge_ray.rollout import RolloutRecord, passes
from forge_ray.run_dir import RunDir
from forge_ray.sandboxes.process import ProcessBackend
from forge_ray.tasks.digest import task_digest
from forge_ray.tasks.task import Task, load_task, load_tasks
from forge_ray.tasks.verifier import VerifierError
from forge_ray.trajectories.store import rescores
from forge_ray.trajectories.store.rescores import Rescored

RESTORE_S = 600.0
"""Seconds to lay a workspace out."""
PART = 200
"""Rows of a part: so many verdicts a kill can cost at most."""

log = logging.getLogger(__name__)


@dataclass
class Summary:
    """What a rescore came to."""

    name: str
    rows: list[Rescored] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts that were not judged, by reason."""

    def lines(self) -> list[str]:
        """The table for a terminal."""
        judged = [row for row in self.rows if row.outcome not in (Outcome.TASK, Outcome.SANDBOX)]
        failed = Counter(f"{row.outcome}: {row.detail}" for row in self.rows if row.outcome in (Outcome.TASK, Outcome.SANDBOX))
        changed = [row for row in judged if row.changed]
        both = [row for row in judged if row.reward is not None and row.reward_before is not None]
        old, new = [row.reward_before for row in judged], [row.reward for row in judged]
        lines = [f"rescore {self.name}: {len(judged)} rollouts judged, {len(changed)} changed", f"{'':<18} {'old':>9} {'new':>9}"]
        lines.append(f"{'mean of both':<18} {_mean(row.reward_before for row in both)} {_mean(row.reward for row in both)}")
        lines.append(f"{'passed':<18} {sum(map(passes, old)):>9} {sum(map(passes, new)):>9}")
        lines.append(f"{'without a reward':<18} {old.count(None):>9} {new.count(None):>9}")
        up = sum(not passes(row.reward_before) and passes(row.reward) for row in both)
        down = sum(passes(row.reward_before) and not passes(row.reward) for row in both)
        lines.append(f"flips: {up} fail to pass, {down} pass to fail")
        for task, number in Counter(row.task for row in changed).most_common(10):
            lines.append(f"  {task}: {number} of {sum(row.task == task for row in judged)} changed")
        unrated = Counter(row.detail for row in judged if row.reward is None)
        lines += [f"without a reward: {number} x {reason}" for reason, number in unrated.most_common(10)]
        lines += [f"not judged: {number} x {reason}" for reason, number in (self.left_out + failed).most_common(10)]
        return lines


def _mean(rewards: Iterable[float | None]) -> str:
    numbers = [reward for reward in rewards if reward is not None]
    return f"{statistics.fmean(numbers):>9.4f}" if numbers else f"{'-':>9}"


@dataclass(frozen=True)
class _Job:
    record: RolloutRecord
    ended: Outcome
    archive: Path
    task: Task | UserError


async def rescore(
    config: Config, run: RunDir, records: Sequence[RolloutRecord], *, tasks: Path | None, jobs: int, told: Callable[[Rescored], None]
) -> Summary:
    """Judge `records` of `run`, `jobs` at a time, by the tasks in the directory `tasks` (None: each by its own). `config`: the run's, with
    today's rewards and weights. `told` hears of each verdict. Raises `UserError`."""
    found = Summary(f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    work = _plan(config, run, records, tasks, found)
    # One name for all rescores of the run: the next one finds what a killed one has left.
    backend = ProcessBackend(config.sandbox, f"{config.name}-rescore")
    for leftover in await backend.leftovers():
        try:
            await backend.destroy_leftover(leftover)
        except ForgeRayError as error:
            log.warning("sandbox %s of an earlier rescore stays: %s", leftover.directory, error)
    where, numbers, queue = store.location(config, run), itertools.count(), iter(work)
    waiting: list[Rescored] = []

    async def worker() -> None:
        for job in queue:
            row = await _judge(job, config, run, backend, found.name)
            found.rows.append(row)
            waiting.append(row)
            told(row)
            if len(waiting) >= PART:
                some = waiting[:]
                waiting.clear()
                try:
                    await asyncio.to_thread(rescores.put, where, next(numbers), some)
                except ForgeRayError:
                    waiting.extend(some)  # stored below, if that is possible then
                    raise

    workers = [asyncio.create_task(worker()) for _ in range(min(jobs, len(work)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)  # their sandboxes are gone then
        rescores.put(where, next(numbers), waiting)  # also of a rescore that is interrupted: what was judged is judged
    return found


def _plan(config: Config, run: RunDir, records: Sequence[RolloutRecord], tasks: Path | None, found: Summary) -> list[_Job]:
    """What can be judged, and by which task. Raises `UserError` where a task has no rule for its rewards, before anything is judged."""
    given = {task.name: task for task in load_tasks(tasks)} if tasks is not None else None
    loaded: dict[str, Task | UserError | None] = {}
    work = []
    for record in records:
        ended = rescores.ended_before(record)
        if ended is None or record.workspace_digest is None:
            found.left_out[f"no workspace was archived (outcome {record.outcome})"] += 1
            continue
        archive = run.rollouts / "archive" / f"{record.workspace_digest}.tar.gz"
        if not archive.is_file():
            found.left_out["its archive is gone from rollouts/archive"] += 1
            continue
        if record.task_name not in loaded:
            loaded[record.task_name] = given.get(record.task_name) if given is not None else _own(config, run, record)
        task = loaded[record.task_name]
        if task is None:
            found.left_out[f"no task {record.task_name} in {tasks}" if given is not None else f"task {record.task_name} is gone"] += 1
            continue
        work.append(_Job(record, ended, archive, task))
    refuse([task for task in loaded.values() if isinstance(task, Task)], config.rollouts)
    return work


def _own(config: Config, run: RunDir, record: RolloutRecord) -> Task | UserError | None:
    """The task that the rollout was made of, as it is today: where it lay then, or among the run's tasks by its name."""
    places = [Path(record.task)]
    for made, source in (("tasks-train", config.tasks.train), ("tasks-heldout", config.tasks.heldout)):
        folders = [run.inputs / made, *([Path(source.path)] if source is not None and source.function is None else [])]
        places += [folder / Path(record.task).name for folder in folders]
    for place in places:
        if place.is_dir():
            try:
                return load_task(place)
            except UserError as error:
                return error
    return None


async def _judge(job: _Job, config: Config, run: RunDir, backend: ProcessBackend, name: str) -> Rescored:
    record, task = job.record, job.task
    logs = run.root / "rescores" / f"{name}-{record.id}"
    outcome, detail, verdict, digest = job.ended, record.detail, None, None
    if record.outcome is Outcome.VERIFIER:
        detail = "rescored"
    try:
        if isinstance(task, UserError):
            raise task
        digest = await asyncio.to_thread(task_digest, task.directory)
        async with await backend.create(task, f"{name}-{record.id}", logs) as sandbox:
            async with asyncio.timeout(RESTORE_S):
                await sandbox.restore(job.archive)
            subject = Subject(run, record.id, job.archive, record.harness, str(job.ended), logs)
            verdict = await judge(subject, task, sandbox, config)
    except VerifierError as error:
        outcome, detail = verified(job.ended, detail, str(error))
    except UserError as error:
        outcome, detail = Outcome.TASK, str(error)
    except (ForgeRayError, TimeoutError, OSError) as error:
        outcome, detail = Outcome.SANDBOX, str(error) or "timed out"
    scored = verdict.scored if verdict else None
    asked = isinstance(task, Task) and function_of(task, config.rollouts) is not None
    return Rescored(
        rescore=name, rollout=record.id, purpose=record.purpose, task=record.task_name, harness=record.harness,
        workspace_digest=record.workspace_digest or "", at=time.time(), by=_who(), outcome_before=record.outcome,
        reward_before=record.reward, outcome=outcome, detail=one_line(detail),
        reward=verdict.rewards.reward if verdict else None, rewards=verdict.rewards.rewards if verdict else {},
        call_rewards=scored.calls if scored else {}, verifier_digest=digest,
        reward_digest=scored.digest if scored and asked else None, weights=dict(config.rollouts.reward_weights),
    )  # fmt: skip


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename}"


def stored(config: Config, run: RunDir) -> list[RolloutRecord]:
    """Every finished rollout of the run, by the time it started: those on disk, and those that only the store has."""
    from forge_ray.trajectories.store.reader import StoreReader

    found = {record.id: record for record in StoreReader(store.location(config, run)).rollouts()}
    found |= {record.id: record for record in library.records(run)}
    return sorted(found.values(), key=lambda record: (record.started, record.id))
