"""`train.sft.demonstrations: {path: builtin:teacher, options: {recordings: …}}`: a teacher's recorded rollouts as demonstrations.

A source function like a user's own (`job.sources`): it runs in a process of its own, which may load vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_ray import ray_env
from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.outcome import RATED
from forge_ray.report.records import read_records
from forge_ray.report.text import model_directory
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir
from forge_ray.trajectories import teacher
from forge_ray.trajectories.upstream import UpstreamCall

WHERE = "train.sft.demonstrations.options"
logger = logging.getLogger(__name__)


def demonstrations(
    out: Path, seed: int, run: str, recordings: str | Sequence[str], reward: float = 1.0, models: str | Sequence[str] = ()
) -> None:
    """Write `out/demonstrations.parquet` from the rollouts of other runs; the policy is that of `run`.

    `recordings`: names of runs beside this one, or paths of run directories; `*` stands for anything. Taken are rollouts with at least
    `reward`, and of them the calls for `models` (names or patterns; nothing: the model of the rollout's harness in its run's config).
    """
    logging.basicConfig(level=logging.WARNING)
    directory = RunDir(Path(run))
    config = load(directory.config)
    found = list(_rollouts(config, _list(recordings), reward, _list(models)))
    if not found:
        raise UserError(f"no rollout of {recordings} has a reward of {reward:g} and calls of a teacher", where=WHERE, fix="record some")
    environment = ray_env.worker() | config.policy.environment
    os.environ.update(environment)
    rows, note = asyncio.run(_dictate(config, str(model_directory(directory)), found))
    print(note)
    if not rows:
        raise UserError(note, where=WHERE, fix="see the log")
    import pyarrow.parquet as pq

    pq.write_table(teacher.table(rows), out / "demonstrations.parquet")


async def _dictate(
    config: Config, model: str, found: Sequence[tuple[RolloutRecord, list[UpstreamCall]]]
) -> tuple[list[teacher.Demonstration], str]:
    from forge_ray.job.dictation import Dictation
    from forge_ray.serve_proxy.inside import inside

    rows: list[teacher.Demonstration] = []
    with tempfile.TemporaryDirectory(prefix="forge-ray-teacher-") as folder:
        async with inside(config, model, Path(folder)) as server:
            dictation = Dictation(server, config)
            for record, calls in found:
                for row in await dictation.rollout(calls):
                    row.session, row.task, row.reward = record.id, record.task_name, record.reward or 0.0
                    rows.append(row)
    left = "".join(f", {count} left out: {reason}" for reason, count in dictation.left_out.most_common())
    return rows, f"{len(rows)} demonstrations of {len(found)} rollouts, {dictation.replies} replies{left}"


def _rollouts(
    config: Config, recordings: list[str], reward: float, models: list[str]
) -> Iterator[tuple[RolloutRecord, list[UpstreamCall]]]:
    from forge_ray.trajectories.call_log import CallLogReader

    for name in recordings:
        path = Path(os.path.expandvars(os.path.expanduser(name)))
        runs = sorted(Path(config.runs).glob(name)) if not path.is_absolute() else sorted(path.parent.glob(path.name))
        runs = [run for run in runs if (run / "config.yaml").is_file()]
        if not runs:
            raise UserError(f"no run {name!r} (looked in {config.runs})", where=f"{WHERE}.recordings", fix="give a run's name or directory")
        for run in map(RunDir, runs):
            asked = {harness.name: harness.model for harness in load(run.config).harnesses}
            reader = CallLogReader(run.calls)
            reader.refresh()
            for record in read_records(run):
                if record.outcome not in RATED or record.reward is None or record.reward < reward:
                    continue
                wanted = models or [model for model in [asked.get(record.harness)] if model is not None]
                calls = teacher.teachers(reader.upstream(record.id), wanted)
                if calls and reader.quarantined(record.id) is None:
                    yield record, calls


def _list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
