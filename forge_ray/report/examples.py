"""Three example trajectories of a run, as HTML: chosen to show what changed, not to flatter.

One held-out task before training (a failure, if there is one) and the same task after it (a success, if there is one), then a failure after
training, if there is one. A run without evaluations shows its first, its last and its last failed rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from forge_ray.outcome import RATED
from forge_ray.report.records import passed
from forge_ray.report.text import Decode, pieces
from forge_ray.report.trajectory import facts, new_prompt, visible
from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories.call import Call

CALLS = 12
"""Calls of a trajectory that are shown, half from each end."""
PROMPT_CHARACTERS = 4000
SAMPLED_TOKENS = 2000


@dataclass(frozen=True)
class Example:
    title: str
    record: RolloutRecord


def choose(by_label: dict[str, list[RolloutRecord]], records: Sequence[RolloutRecord]) -> list[Example]:
    """At most three different rollouts with calls."""
    before = [record for record in by_label.get("before", []) if record.calls]
    after = [record for record in by_label.get("after", []) if record.calls]
    examples: list[Example] = []

    def add(title: str, candidates: Sequence[RolloutRecord]) -> RolloutRecord | None:
        taken = {example.record.id for example in examples}
        found = next((record for record in candidates if record.id not in taken), None)
        if found and len(examples) < 3:
            examples.append(Example(title, found))
        return found

    solved = {record.task_name for record in after if passed(record)}
    first = add("Before training", sorted(before, key=lambda r: (passed(r), r.task_name not in solved, r.key)))
    task = first.task_name if first else None
    add("After training" + (", the same task" if task else ""), sorted(after, key=lambda r: (r.task_name != task, not passed(r), r.key)))
    add("After training, a failure", [record for record in after if not passed(record)])
    trained = [record for record in records if record.purpose == "train" and record.outcome in RATED and record.calls]
    add("The last training rollout", trained[::-1])
    add("The last training rollout that failed", [record for record in trained[::-1] if not passed(record)])
    add("The first training rollout", trained)
    return examples


def trajectory_html(example: Example, calls: Sequence[Call], decode: Decode) -> str:
    """One trajectory, call by call."""
    record = example.record
    reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
    verdict = "pass" if passed(record) else "fail"
    parts = [
        f"<article><h3>{escape(example.title)} <span class='badge {verdict}'>{escape(record.outcome.value)}, {escape(reward)}</span></h3>",
        f"<p class='meta'>{escape(' · '.join((record.task_name, record.harness, record.id, visible(record.detail))))}</p>",
    ]
    hidden = range(CALLS // 2, len(calls) - CALLS // 2) if len(calls) > CALLS else range(0)
    shown: set[str] = set()
    for number, call in enumerate(calls):
        if number == hidden.start and hidden:
            parts.append(f"<p class='empty'>{len(hidden)} calls are not shown</p>")
        if number not in hidden:
            parts.append(_call_html(number + 1, call, shown, decode))
        shown.add(call.id)
    if not calls:
        parts.append("<p class='empty'>its calls are not in the call log</p>")
    return "".join(parts) + "</article>"


def _call_html(number: int, call: Call, shown: set[str], decode: Decode) -> str:
    shared, new = new_prompt(call, shown)
    prompt = visible(decode(new))
    cut = f"[… {len(prompt) - PROMPT_CHARACTERS} characters] " if len(prompt) > PROMPT_CHARACTERS else ""
    prompt = escape(cut + prompt[-PROMPT_CHARACTERS:])
    return (
        f"<details open><summary>call {number} <small>{escape(visible(facts(call, shared, len(new))))}</small></summary>"
        f"<pre>{'<span class=known>…</span>' if shared else ''}{prompt}{_sampled_html(call, decode)}</pre></details>"
    )


def _sampled_html(call: Call, decode: Decode) -> str:
    parts = []
    for text, first, end in pieces(call.ids[:SAMPLED_TOKENS], decode):
        logprobs = call.logprobs[first:end]
        tip, style = "", ""
        if len(logprobs) == end - first and all(math.isfinite(value) for value in logprobs):
            tip = " ".join(f"{value:.3f}" for value in logprobs)
            # From 35 % strength at probability 0 to full strength at 1.
            style = f" style='--p:{35 + 65 * math.exp(min(0.0, math.fsum(logprobs))):.0f}%'"
        ids = " ".join(str(token) for token in call.ids[first:end])
        parts.append(f"<mark title='{escape(f'id {ids}' + (f', logprob {tip}' if tip else ''))}'{style}>{escape(visible(text))}</mark>")
    if len(call.ids) > SAMPLED_TOKENS:
        parts.append(f"<span class=known>[… {len(call.ids) - SAMPLED_TOKENS} tokens]</span>")
    return "".join(parts)
