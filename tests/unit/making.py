"""Calls and records for tests, with every field that a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.writer import StoreWriter


def make_call(prompt: list[int], ids: list[int], *, order: int = 0, session: str = "g00000-0.0", **changes: Any) -> Call:
    """A whole, delivered training call that was the `order`-th to end; logprobs tell call and token apart."""
    fields: dict[str, Any] = {
        "id": f"{session}/{order:03d}",
        "session": session,
        "purpose": "train",
        "replica": "r0",
        "dialect": "chat",
        "path": "/v1/chat/completions",
        "streamed": False,
        "kind": "agent",
        "conversation": "main",
        "prompt_ids": list(prompt),
        "sampling": {"temperature": 1.0},
        "masked_by_grammar": False,
        "max_tokens": 64,
        "opened": 100.0 + order,
        "ended": 100.5 + order,
        "ids": list(ids),
        "logprobs": [-(order + 1) - position / 16 for position in range(len(ids))],
        "spans": [("0.3", 0, len(ids))],
        "status": "finished",
        "delivered": True,
    }
    return Call(**{**fields, **changes})


def make_record(rollout: str, reward: float | None, *, group: int | None = 0, **changes: Any) -> RolloutRecord:
    """A rollout that ended ok, or as a harness error where the reward is None."""
    fields: dict[str, Any] = {
        "id": rollout,
        "key": rollout.rpartition(".")[0] or rollout,
        "purpose": "train",
        "task": f"/tasks/t{group}",
        "task_name": f"t{group}",
        "harness": "react",
        "group": group,
        "attempt": 0,
        "outcome": Outcome.HARNESS if reward is None else Outcome.OK,
        "detail": "",
        "reward": reward,
    }
    return RolloutRecord(**{**fields, **changes})


def make_rollout(
    rollout: str, reward: float | None, *, samples: int = 1, group: int = 0, **changes: Any
) -> tuple[RolloutRecord, list[Call]]:
    """A rollout of `samples` calls that do not continue one another, one sample each."""
    calls = [make_call([9, 9, 10 + n], [1, 2, n], order=n, session=rollout) for n in range(samples)]
    return make_record(rollout, reward, group=group, **changes), calls


def store_rollouts(location: Location, *names: str) -> list[tuple[RolloutRecord, list[Call]]]:
    """Rollouts of two calls each, stored at `location`."""
    writer, made = StoreWriter(location, Origin("run")), [make_rollout(name, 1.0, samples=2) for name in names]
    for record, calls in made:
        writer.add(record, calls)
    writer.flush()
    return made
