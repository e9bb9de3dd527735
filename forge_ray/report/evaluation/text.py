"""An evaluation and a comparison as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from forge_ray.report.evaluation.comparison import SURE, Comparison
from forge_ray.report.evaluation.summary import Estimates, EvaluationSummary
from forge_ray.report.records import harness_title


def lines(summary: EvaluationSummary) -> Iterator[str]:
    """The estimates: one table of k, then the parts, one line each."""
    whole = summary.whole
    yield f"held-out pass@1: {whole.rate}"
    if len(whole.at_least_one) > 1:
        yield "  k   pass@k (any of k passes)     pass^k (all k pass)"
        for k, interval in whole.at_least_one.items():
            yield f"{k:>3}   {interval!s:<26}   {whole.all_of[k]}"
    if whole.flips is not None:
        yield f"flip rate: {whole.flips} of two rollouts of one task end differently"
    for title, parts in (("harness", summary.by_harness), ("kind of task", summary.by_kind)):
        if parts:
            yield f"by {title}:"
            titles = [harness_title(name) for name in parts]
            width = max(map(len, titles))
            yield from (f"  {title:<{width}}  {_part(part)}" for title, part in zip(titles, parts.values(), strict=True))


def _part(part: Estimates) -> str:
    last = max(part.all_of, default=1)
    tail = f", pass^{last} {part.all_of[last].mean:.3f}" if last > 1 else ""
    return f"pass@1 {part.rate}{tail}"


def comparison_lines(name: str, other: str, compared: Comparison | None) -> Iterator[str]:
    """The paired comparison of `name` with `other`."""
    if compared is None:
        yield f"{name} and {other} have no task in common on which both have a reward"
        return
    yield f"{name} against {other}: {compared}"
    if compared.p >= SURE:
        yield "  this evaluation does not tell the two apart"
