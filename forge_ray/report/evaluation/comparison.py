"""Is one evaluation better than another? A paired test over the tasks that both have.

The difference of a task is the share of its rollouts that passed here minus that there. Pairing takes out that tasks differ in difficulty.
Under the null hypothesis a difference is as likely to have the other sign: `p` is the share of sign changes whose mean is at least as far
from 0 (two-sided sign-flip permutation test), over all of them up to `EXACT` tasks, else over a seeded sample, which counts the
observed one too and so is never 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forge_ray.report.evaluation.passes import Passed
from forge_ray.report.evaluation.resampling import bootstrap
from forge_ray.report.statistics import Interval, mean

EXACT = 16
"""Tasks up to which every sign change is looked at."""
SURE = 0.05
"""Two evaluations are told apart by a `p` below this. (Their interval alone would tell apart what two tasks say, and one.)"""
DRAWS = 20_000


@dataclass(frozen=True)
class Comparison:
    """`here` against `there`."""

    tasks: int
    """Tasks that both have."""
    here: float
    """pass@1 over those tasks."""
    there: float
    difference: Interval
    """here − there, with Student's interval over tasks, or a bootstrap's."""
    p: float
    """Two-sided, of the paired sign-flip test."""
    better: int
    """Tasks with more passes here."""
    worse: int

    def __str__(self) -> str:
        return (
            f"{self.here:.3f} against {self.there:.3f} on {self.tasks} tasks: {self.difference.mean:+.3f} "
            f"[{self.difference.low:+.3f}, {self.difference.high:+.3f}], p = {self.p:.2g}, {self.better} better, {self.worse} worse"
        )


def compare(here: Passed, there: Passed, *, resampled: bool = False) -> Comparison | None:
    """The paired comparison; None where no task has rollouts in both."""
    return _of({task: [(here[task], there[task])] for task in here if here[task] and there.get(task)}, resampled)


def compare_harnesses(here: Mapping[str, Passed], there: Mapping[str, Passed], *, resampled: bool = False) -> Comparison | None:
    """The same of evaluations in one or several harnesses: `{harness: {task: [passed, …]}}`. Compared are the harnesses that both have, and
    a task's difference is its mean over them; one harness each is compared whatever they are."""
    if len(here) == len(there) == 1:
        return compare(*here.values(), *there.values(), resampled=resampled)
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for harness in sorted(here.keys() & there.keys()):
        for task, samples in here[harness].items():
            if samples and (others := there[harness].get(task)):
                pairs[task].append((samples, others))
    return _of(pairs, resampled)


Pair = tuple[Sequence[bool], Sequence[bool]]


def _of(pairs: Mapping[str, Sequence[Pair]], resampled: bool) -> Comparison | None:
    if not pairs:
        return None
    ours, theirs = (
        np.array([np.mean([np.mean(pair[side]) for pair in pairs[task]]) for task in sorted(pairs)], np.float64) for side in (0, 1)
    )
    differences = ours - theirs
    values = differences.tolist()
    interval = bootstrap(values) if resampled else mean(values, -1.0, 1.0)
    assert interval is not None
    return Comparison(
        tasks=len(pairs),
        here=float(ours.mean()),
        there=float(theirs.mean()),
        difference=interval,
        p=sign_flip(differences),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
    )


def sign_flip(differences: np.ndarray, seed: int = 0) -> float:
    """p of the two-sided sign-flip test that the mean of `differences` (float64, (tasks,)) is 0."""
    moved = differences[differences != 0]
    if not len(moved):
        return 1.0
    observed = abs(moved.sum()) * (1 - 1e-12)  # sums of the same numbers in another order differ in their last bit
    if len(moved) <= EXACT:
        bits = (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1
        return float((np.abs((1 - 2 * bits) @ moved) >= observed).mean())
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (DRAWS, len(moved)))
    return float(((np.abs(signs @ moved) >= observed).sum() + 1) / (DRAWS + 1))
