"""`train.credit`: what a rollout's reward is worth at each of its calls."""

from __future__ import annotations

from typing import Literal

from forge_ray.config.values import NonNegative, Proportion, Section, Share


class Credit(Section):
    """What a rollout's reward is worth at each of its calls; formulas in [samples](samples.md#credit)."""

    gamma: Share = 1.0
    """Eq. 1: the reward of call t of T is gamma^(T−t) times the terminal reward."""
    kind_weights: dict[Literal["agent", "subagent", "compaction", "aux"], NonNegative] = {}
    """Weight of a kind of call (default 1 each, aux 0)."""
    scope: Literal["all", "outermost", "last"] = "all"
    """Which calls are trained: all, those of the outermost agent, or the last one. The others are masked, not rewarded with zero."""
    statistics: Literal["terminal", "mean_sample_reward"] = "terminal"
    """The one number per rollout that group statistics use: its terminal reward, or the mean of Eq. 1's rewards over its trained calls (the
    paper's words). With gamma 1 they are the same."""
    truncated: Literal["reward", "scale", "mask", "finished_calls"] = "reward"
    """A rollout that a limit cut off: `reward` trains it with its reward; `scale` with `truncated_scale` times it; `mask` lets it count
    in the group statistics and keeps it out of the loss; `finished_calls` keeps out only the calls that were cut."""
    truncated_scale: Proportion = 0.5
    """Factor of `truncated: scale`; 0 = the reward of a truncated rollout is 0."""
    call_rewards: NonNegative = 1.0
    """Weight of the advantage of a call's own reward, where the task gives such; 0 = they are not used."""
