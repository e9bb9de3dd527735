"""A rollout's calls as plain text, for `forge-ray rollout`.

Each call shows what was new in its prompt, what was sampled, and what is known about both. Control characters of a harness or a policy
are written out, so that a printed trajectory cannot move the cursor or clear the screen.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence

from forge_ray.report.text import Decode
from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories.call import Call

TAIL = 1200
"""Characters of a prompt's new part that are shown, from its end."""


def visible(text: str) -> str:
    """`text` with control characters, except newline and tab, as escapes."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def new_prompt(call: Call, shown: Container[str]) -> tuple[int, list[int]]:
    """How many of the prompt's tokens are the prompt and sample of a call in `shown` (ids), and the token ids after them."""
    shared = call.shared if call.parent is not None and call.parent in shown else 0
    return shared, call.prompt_ids[shared:]


def mean_logprob(call: Call) -> float | None:
    """Mean natural-log probability of the sampled tokens; None where there are none."""
    return math.fsum(call.logprobs) / len(call.logprobs) if call.logprobs else None


def versions(call: Call) -> str:
    """The weight versions that sampled the call: `1.4`, or `1.4→1.5` across an update."""
    names = list(dict.fromkeys(call.versions())) or list(dict.fromkeys(v for v in (call.version_open, call.version_end) if v))
    return "→".join(names) or "unknown"


def status(call: Call) -> str:
    """The call's end in words: status, delivery, replacement."""
    words = [call.status]
    if call.error:
        words.append(call.error)
    if call.delivered is False:
        words.append("undelivered")
    if call.superseded_by:
        words.append(f"superseded by {call.superseded_by}")
    if call.masked_by_grammar:
        words.append("grammar")
    if call.media:
        words.append(f"{len(call.media)} images in its prompt")
    return ", ".join(words)


def facts(call: Call, shared: int, new: int) -> str:
    """One line about a call."""
    mean = mean_logprob(call)
    seconds = f"{call.ended - call.opened:.2f} s" if call.ended is not None else "not ended"
    return (
        f"{call.dialect}{' streamed' if call.streamed else ''} · {call.kind} · {status(call)} · version {versions(call)} · "
        f"temperature {call.temperature:g} · prompt {shared} known + {new} new · sampled {len(call.ids)} of at most {call.max_tokens}"
        f"{'' if mean is None else f' · mean logprob {mean:.3f}'} · {seconds}"
    )


def print_trajectory(calls: Sequence[Call], decode: Decode, record: RolloutRecord | None = None) -> Iterator[str]:
    """The lines of a trajectory, call by call in the given order, then the outcome."""
    if record:
        yield f"{record.id}: task {record.task_name}, harness {record.harness}"
    shown: set[str] = set()
    for number, call in enumerate(calls, start=1):
        shared, new = new_prompt(call, shown)
        yield ""
        yield f"── call {number} of {len(calls)} {call.id}"
        yield f"   {visible(facts(call, shared, len(new)))}"
        text = visible(decode(new))
        if len(text) > TAIL:
            text = f"[… {len(text) - TAIL} characters]{text[-TAIL:]}"
        yield from _block("prompt ", text)
        yield from _block("sampled", visible(decode(call.ids)))
        shown.add(call.id)
    if not calls:
        yield "no call reached the proxy"
    if record:
        reward = "none" if record.reward is None else f"{record.reward:g}"
        yield ""
        yield f"outcome {record.outcome}: {visible(record.detail)}"
        yield f"reward {reward} · {record.calls} calls, {record.sampled_tokens} sampled tokens"
        if record.seconds:
            yield "seconds " + ", ".join(f"{name} {value:.2f}" for name, value in record.seconds.items())


def _block(label: str, text: str) -> Iterator[str]:
    for index, line in enumerate(text.split("\n")):
        yield f"   {label if index == 0 else ' ' * len(label)} │ {line}"
