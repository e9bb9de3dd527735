"""Rewards: what a Python function of the user's says of a rollout, beside the verifier, and how named numbers become the trained one.

rollout.py      what a reward function is given
plan.py         which function a task's rollouts are given to, and what cannot work
call.py         calls it in a process of its own, with a deadline; used by the pools and by `rollouts rescore`
verdict.py      test script and function together: the verdict on one workspace
program.py      the process that a function runs in: it alone of this package reads recordings, so that whoever waits for it meets no token
combine.py      named numbers → the terminal reward
"""

from forge_ray.rewards.rollout import Call, Rollout

__all__ = ["Call", "Rollout"]
