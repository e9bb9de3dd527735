"""An evaluation on the held-out tasks in a run directory of its own (`forge-ray eval`), which can be taken up again.

Beside the config lies `plan.json`: what is evaluated, and how often. Rollouts that have ended are on disk, and are not made again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import library, single, state
from forge_ray.job.evaluate import evaluate
from forge_ray.job.runtime import Runtime
from forge_ray.job.scheduler import TaskRef
from forge_ray.outcome import RATED
from forge_ray.report.phases import PhaseLog
from forge_ray.report.progress import Progress
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir, write_json

PLAN = "plan.json"
LABEL = "eval"


@dataclass(frozen=True)
class Heldout:
    """An evaluation that was begun."""

    config: Config
    directory: RunDir
    checkpoint: Path | None
    """None: the initial policy."""
    samples: int
    """Rollouts of every held-out task."""

    def run(self) -> list[RolloutRecord]:
        """What is missing of it; the records of all of it. Where nothing is missing, nothing is started."""
        tasks: list[TaskRef] = []
        done = [record for record in library.records(self.directory) if record.purpose == "eval"]

        async def first(runtime: Runtime) -> list[RolloutRecord] | None:
            tasks.extend((await runtime.tasks())[1])
            if not tasks:
                raise UserError("tasks.heldout is not set", where="forge-ray eval", fix="name the held-out tasks in the config")
            rated = {record.key: record for record in done if record.outcome in RATED}
            return list(rated.values()) if len(rated) == self._wanted(tasks) else None

        async def work(runtime: Runtime, progress: Progress) -> list[RolloutRecord]:
            client = await single.start_proxy(runtime, progress, self.checkpoint)
            records: list[RolloutRecord] = []
            with PhaseLog(self.directory.phases).phase(LABEL):
                async for record in evaluate(self.config, runtime.pools(client), tasks, LABEL, self.samples, done):
                    records.append(record)
                    progress.evaluation(LABEL, records, self._wanted(tasks))
            return records

        return single.in_runtime(self.config, self.directory, work, first)

    def _wanted(self, tasks: list[TaskRef]) -> int:
        return len(tasks) * self.samples * len(self.config.harnesses)


def begin(config: Config, checkpoint: Path | None, samples: int) -> Heldout:
    """A new one, in a directory beside the config's run."""
    config, directory = single.side_run(config, "eval")
    write_json(directory.root / PLAN, {"checkpoint": None if checkpoint is None else str(checkpoint), "samples": samples})
    return Heldout(config, directory, checkpoint, samples)


def take_up(where: Path) -> Heldout:
    """The one in a run directory, from now on this process's. Raises `UserError`."""
    if not (where / PLAN).is_file():
        raise UserError(f"{where} holds no evaluation that was begun", where="--resume", fix="give the run directory of a forge-ray eval")
    config, directory = state.reopen(str(where))
    plan = json.loads((where / PLAN).read_text())
    checkpoint = None if plan["checkpoint"] is None else Path(plan["checkpoint"])
    return Heldout(config, directory, checkpoint, plan["samples"])
