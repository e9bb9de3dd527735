"""Evaluation: `eval.samples` rollouts of every held-out task, with the evaluation sampling settings, never trained.

Keys name the evaluation and the sample, so an evaluation that was interrupted goes on where it was. A rollout that ended in an
infrastructure error is tried again like a training rollout; one that stays without a reward is left out of pass@1 and counted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from forge_ray.job.scheduler import TaskRef
from forge_ray.outcome import RATED
from forge_ray.rollout import RolloutRecord, RolloutRequest

if TYPE_CHECKING:
    from forge_ray.config import Config
    from forge_ray.job.dispatch import Dispatch


async def evaluate(
    config: Config,
    dispatch: Dispatch,
    tasks: list[TaskRef],
    label: str,
    samples: int | None = None,
    done: list[RolloutRecord] | None = None,
) -> AsyncIterator[RolloutRecord]:
    """The final records of evaluation `label` as they come; `done` are those of an earlier try of the same evaluation."""
    requests = {}
    for harness in config.harnesses:
        for number, task in enumerate(tasks):
            for sample in range(samples or config.eval.samples):
                name = harness.name if len(config.harnesses) == 1 else f"{number}-{config.harnesses.index(harness)}"
                key = f"eval-{label}-{number:03d}-{sample}" if len(config.harnesses) == 1 else f"eval-{label}-{name}-{sample}"
                requests[key] = RolloutRequest(key=key, purpose="eval", task=task.path, task_name=task.name, harness=harness.name)
    for record in done or []:
        if record.key in requests and record.outcome in RATED:
            del requests[record.key]
            yield record
        elif record.key in requests:
            requests[record.key] = requests[record.key].model_copy(update={"attempt": record.attempt + 1})
    limit = config.eval.max_in_flight or config.rollouts.max_in_flight
    waiting = list(requests.values())
    for _ in range(config.rollouts.retries + 1):
        again: list[RolloutRequest] = []
        last = _ == config.rollouts.retries
        async for record in dispatch.run_all(waiting, limit):
            if record.outcome in RATED or last:
                yield record
            else:
                again.append(requests[record.key].model_copy(update={"attempt": record.attempt + 1}))
        if not again:
            return
        waiting = again
