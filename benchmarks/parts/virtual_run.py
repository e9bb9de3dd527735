"""A training run on a virtual clock: the run's own scheduler, admission and choice at consumption, between a simulated harness and trainer.

A rollout takes a time drawn from its own name, so that the same rollout takes the same time under every setting; its tokens are spread
evenly over it, each of the version that was served then. One event queue: what happens at the same time happens in the order in which it
was planned.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import count

from forge_ray.config import Config
from forge_ray.job.flow import Flow
from forge_ray.job.scheduler import Group, TaskRef
from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRecord, RolloutRequest

TOKENS = 64
"""Tokens of a rollout, for the staleness."""


@dataclass
class Result:
    """Figures of one run, over its steps after the warm-up. Times are in the unit of the rollouts' median."""

    step: float = 0.0
    """Mean time between weight updates."""
    trainer_idle: float = 0.0
    """Share of the time in which the trainer waited for a batch."""
    slots_idle: float = 0.0
    """Share of the slots' time in which nothing ran in them."""
    staleness_max: int = 0
    """Largest (version − version of the token) of a trained token, at consumption."""
    staleness_mean: float = 0.0
    """The same, mean over trained tokens."""
    dropped: float = 0.0
    """Share of the ended groups that were dropped because they were too old."""
    held: float = 0.0
    """Share of the steps that waited for a slow group although there were enough others."""
    histogram: dict[int, int] = field(default_factory=dict)
    """Trained tokens by staleness."""


def settings(*, bound: int, on_stale: str = "wait", steps: int, slots: int = 64, groups: int = 8, size: int = 8, seed: int = 0) -> Config:
    """The config of such a run."""
    return Config.model_validate(
        {
            "name": "virtual",
            "seed": seed,
            "policy": {"model": "none"},
            "harnesses": [{"name": "react"}],
            "tasks": {"train": "none"},
            "rollouts": {"max_in_flight": slots},
            "train": {"steps": steps, "groups_per_step": groups, "group_size": size, "max_staleness": bound, "on_stale": on_stale},
            "eval": {"before": False, "after": False},
        }
    )


class VirtualRun:
    """One run of `config`. `sigma`: of the lognormal rollout times, whose median is 1; `train`: time of a step in the trainer; `lost`:
    share of the attempts that end in an engine's error."""

    def __init__(self, config: Config, *, sigma: float = 0.5, train: float = 0.0, lost: float = 0.0) -> None:
        self.config, self._sigma, self._train_time, self._lost = config, sigma, train, lost
        self.flow = Flow(config, [TaskRef(f"task-{number}", f"/task-{number}") for number in range(64)])
        self.now, self.version = 0.0, 0
        self._events: list[tuple[float, int, RolloutRequest | None]] = []
        self._number = count()
        self._served_since = [0.0]
        """Time at which each version began to be served."""
        self._spans: dict[str, tuple[float, float]] = {}
        self._idle_since: float | None = 0.0
        self._trainer_idle: list[tuple[float, float]] = []
        self._in_flight: list[tuple[float, int]] = [(0.0, 0)]
        self._tokens: list[list[int]] = []
        """Per step the staleness of every trained token."""
        self._held: set[int] = set()
        self.ended_groups = 0
        self.most_in_flight = 0

    def run(self) -> VirtualRun:
        """Until the last step is trained."""
        self._go_on()
        while self._events and self.version < self.config.train.steps:
            self.now, _, ended = heapq.heappop(self._events)
            if ended is None:
                self.version += 1
                self._served_since.append(self.now)
                self._idle_since = self.now
            else:
                self._end(ended)
            self._go_on()
        return self

    def duration(self, request: RolloutRequest) -> float:
        """How long a rollout takes."""
        draw = random.Random(f"{self.config.seed}/{request.key}.{request.attempt}")
        return math.exp(self._sigma * draw.gauss(0.0, 1.0))

    def result(self, warm: int = 0, tail: int = 0) -> Result:
        """The figures of the steps from `warm` on, without the last `tail`, in which nothing new is started."""
        last = self.version - tail
        began, ended = self._served_since[warm], self._served_since[last]
        window, tokens = ended - began, [age for step in self._tokens[warm:last] for age in step]
        used = 0.0
        for (start, running), (stop, _) in zip(self._in_flight, [*self._in_flight[1:], (ended, 0)], strict=True):
            used += running * max(0.0, min(stop, ended) - max(start, began))
        idle = sum(max(0.0, min(stop, ended) - max(start, began)) for start, stop in self._trainer_idle)
        scheduler = self.flow.scheduler
        return Result(
            step=window / (last - warm),
            trainer_idle=idle / window,
            slots_idle=1 - used / window / self.config.rollouts.max_in_flight,
            staleness_max=max(tokens),
            staleness_mean=sum(tokens) / len(tokens),
            dropped=scheduler.stale_groups / max(self.ended_groups, 1),
            held=len(self._held) / self.version,
            histogram={age: tokens.count(age) for age in sorted(set(tokens))},
        )

    def _go_on(self) -> None:
        """What the driver does whenever something has happened: launch, and give an idle trainer its batch."""
        while True:
            for request in self.flow.launch(self.version):
                end = self.now + self.duration(request)
                self._spans[request.key] = (self.now, end)
                heapq.heappush(self._events, (end, next(self._number), request))
            self._in_flight.append((self.now, self.flow.in_flight))
            self.most_in_flight = max(self.most_in_flight, self.flow.in_flight)
            if self._idle_since is None:
                return
            taken = self.flow.take(self.version, self.flow.scheduler.ready(), self._staleness)
            if taken.held:
                self._held.add(self.version)
            if taken.batch:
                self.flow.used(taken.batch)
                ages = [self.version - v for group in taken.batch for record in group.records for v in self._versions(record.key)]
                self._tokens.append(ages)
                self._trainer_idle.append((self._idle_since, self.now))
                self._idle_since = None
                heapq.heappush(self._events, (self.now + self._train_time, next(self._number), None))
            if not taken.stale:
                return

    def _end(self, request: RolloutRequest) -> None:
        name = f"{request.key}.{request.attempt}"
        fails = random.Random(f"lost {self.config.seed}/{name}").random() < self._lost
        record = RolloutRecord(
            id=name, key=request.key, purpose="train", task=request.task, task_name=request.task_name, harness=request.harness,
            group=request.group, attempt=request.attempt, outcome=Outcome.ENGINE if fails else Outcome.OK, detail="",
            reward=None if fails else 1.0,
        )  # fmt: skip
        self.ended_groups += len(self.flow.finish(record))

    def _versions(self, key: str) -> list[int]:
        """The version of each token of a rollout."""
        start, end = self._spans[key]
        return [bisect_right(self._served_since, start + (end - start) * place / TOKENS) - 1 for place in range(TOKENS)]

    def _staleness(self, group: Group) -> int:
        return max((self.version - self._versions(record.key)[0] for record in group.records), default=0)


def synchronous_share(seed: int, steps: int, share: float) -> float:
    """Time of a step in the trainer, so that waiting for the agents is `share` of a synchronous step."""
    alone = VirtualRun(settings(bound=0, steps=steps, seed=seed)).run().result().step
    return alone * (1 - share) / share
