"""Named numbers become the terminal reward r_T. Pure.

The verifier's numbers and the reward function's are one set of names. With `rollouts.reward_weights` w,

    r_T = Σ_n w_n · reward_n        over the names n of the weights

and without: the number called `reward`, or the only one. A weight whose number is missing is an error of the verdict, never a 0: a mean
over rollouts that were measured differently would say nothing. Numbers without a weight are recorded and not trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from forge_ray.tasks.verifier import RewardAmbiguous, RewardNotANumber, Rewards, VerifierError, short, usable_number


class RewardUnnamed(VerifierError):
    """`rollouts.reward_weights` asks for a number that was not given."""


class RewardTwice(VerifierError):
    """Verifier and reward function give different numbers one name."""


def combine(verifier: Mapping[str, float] | None, function: Mapping[str, float] | None, weights: Mapping[str, float]) -> Rewards:
    """The verdict of a rollout from the numbers of its verifier and of its reward function (None: it has none). Raises `VerifierError`."""
    if verifier and function and (both := sorted(verifier.keys() & function.keys())):
        raise RewardTwice(f"the verifier and the reward function both give {both[0]!r}: rename the function's")
    named = {**(verifier or {}), **(function or {})}
    if not weights:
        return Rewards(_only(named, of_both=bool(verifier and function)), named)
    if missing := [name for name in weights if name not in named]:
        have = f"there {'is' if len(named) == 1 else 'are'} {', '.join(map(repr, named))}" if named else "there is none"
        raise RewardUnnamed(f"rollouts.reward_weights has {missing[0]!r}, and no reward of that name was given; {have}")
    total = math.fsum(weight * named[name] for name, weight in weights.items())
    return Rewards(number("the weighted reward", total), named)


def number(what: str, value: object) -> float:
    """`value` as a usable number. Raises `VerifierError` that begins with `what`."""
    if not isinstance(value, int | float):  # a bool is an int
        raise RewardNotANumber(f"{what} is {short(value)} and not a number")
    return usable_number(what, value)


def _only(named: Mapping[str, float], *, of_both: bool) -> float:
    if of_both:
        # Taking the verifier's alone would leave the function without effect, and nobody would see it.
        raise RewardAmbiguous(f"verifier and reward function give {', '.join(map(repr, named))}: set rollouts.reward_weights")
    if "reward" in named:
        return named["reward"]
    if len(named) == 1:
        return next(iter(named.values()))
    raise RewardAmbiguous(f"there are rewards {', '.join(map(repr, named))}, and none is 'reward': set rollouts.reward_weights")
