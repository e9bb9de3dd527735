"""How a rollout can end, and what is done with each way of ending.

Every rollout ends in exactly one `Outcome`. `OK` and `TRUNCATED` carry a reward from the verifier; every other class says who
failed and never carries one: an infrastructure failure is not a reward of 0. A `Treatment` says what the learner does with it.
"""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Who ended the rollout."""

    OK = "ok"
    """The policy gave a final answer, the harness ended, the verifier gave a reward."""
    TRUNCATED = "truncated"
    """A limit (calls, tokens, context, output length, time) with healthy infrastructure; verified."""
    HARNESS = "harness"
    """The harness program crashed, could not start, or never called the model."""
    SANDBOX = "sandbox"
    """The sandbox could not be made, ran out of a resource, or was lost."""
    PROXY = "proxy"
    """The recording proxy refused or lost calls although the session was open."""
    ENGINE = "engine"
    """The inference engine failed or was lost under a call."""
    VERIFIER = "verifier"
    """The verifier crashed, timed out, or left no valid reward (numbers, each of at most 1e12 either way)."""
    TASK = "task"
    """The task itself is broken (unreadable, unsupported, no test)."""


RATED = frozenset({Outcome.OK, Outcome.TRUNCATED})
"""Outcomes that carry a reward."""


class Treatment(StrEnum):
    """What is done with a rollout of one outcome class."""

    TRAIN = "train"
    """Kept: enters the group statistics and the loss. Of `truncated` rollouts, see also `train.credit.truncated`."""
    DROP = "drop"
    """Kept on disk, not trained, not replaced: the group shrinks. One that shrinks to a single rollout has no baseline and is replaced."""
    RETRY = "retry"
    """Not trained; a new attempt replaces it, up to `rollouts.retries`, then dropped."""
    DROP_GROUP = "drop_group"
    """The whole group is left out of training, and replaced by another."""


PRESETS: dict[str, dict[Outcome, Treatment]] = {
    "default": {
        Outcome.OK: Treatment.TRAIN,
        Outcome.TRUNCATED: Treatment.TRAIN,
        Outcome.HARNESS: Treatment.RETRY,
        Outcome.SANDBOX: Treatment.RETRY,
        Outcome.PROXY: Treatment.RETRY,
        Outcome.ENGINE: Treatment.RETRY,
        Outcome.VERIFIER: Treatment.RETRY,
        Outcome.TASK: Treatment.DROP_GROUP,
    },
    # OpenForgeRL section 2.3: trajectories that end in an error unrelated to the policy, timeouts included, are discarded.
    "paper": {
        Outcome.OK: Treatment.TRAIN,
        Outcome.TRUNCATED: Treatment.DROP,
        Outcome.HARNESS: Treatment.DROP,
        Outcome.SANDBOX: Treatment.DROP,
        Outcome.PROXY: Treatment.DROP,
        Outcome.ENGINE: Treatment.DROP,
        Outcome.VERIFIER: Treatment.DROP,
        Outcome.TASK: Treatment.DROP_GROUP,
    },
}
"""The named policies. `rollouts.on_outcome` overrides single classes."""


def treatment(outcome: Outcome, preset: str, overrides: dict[Outcome, Treatment]) -> Treatment:
    """What to do with a rollout that ended in `outcome`."""
    return overrides.get(outcome, PRESETS[preset][outcome])
