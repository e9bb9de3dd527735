"""A recorded session as text, token by token, for `forge-ray replay`: what was asked, what was answered, what of it is trained.

Every token of a call's sequence has one line: its place, its mask (1: trained), its id, its text; a sampled one also its logprob and the
weight version that sampled it. Of a prompt only what is new against its parent is written out, and of a long one its two ends, unless
`full` asks for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from forge_ray.report import upstream_text
from forge_ray.report.text import Decode, pieces
from forge_ray.report.trajectory import facts, visible
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.upstream import UpstreamCall

EDGE = 24
"""Tokens at each end of a prompt's new part that are written out."""


def untrained(call: Call, weights: Mapping[str, float]) -> str:
    """Why no token of a call is trained, in a few words."""
    if call.status not in ("finished", "length"):
        return call.status
    if call.superseded_by is not None:
        return f"superseded by {call.superseded_by}"
    if call.delivered is not True:
        return "undelivered" if call.delivered is False else "nobody knows whether it was delivered"
    if call.masked_by_grammar:
        return "sampled under a grammar (proxy.train_grammar_calls)"
    if call.media:
        return "its prompt holds images, and the learner sees tokens only"
    if not weights.get(call.kind, 1.0):
        return f"kind {call.kind} has weight 0 (train.credit.kind_weights)"
    if call.spans is None or len(call.ids) != len(call.logprobs):
        return "its weight versions or logprobs are unknown"
    return "out of scope (train.credit.scope, or of a truncated rollout: train.credit.truncated)"


def replay(
    calls: Sequence[Call],
    trained: Collection[int],
    weights: Mapping[str, float],
    decode: Decode,
    *,
    full: bool = False,
    upstream: Sequence[UpstreamCall] = (),
) -> Iterator[str]:
    """The lines of a session. `calls` in the order to show, `trained` ordinals in `calls`; `weights` of the kinds; `upstream` by time: each
    is shown before the first call that ended after it."""
    numbers = {call.id: number for number, call in enumerate(calls, start=1)}
    others = deque(upstream)
    for number, call in enumerate(calls, start=1):
        while others and (call.ended is None or others[0].ended <= call.ended):
            yield from upstream_text.lines(others.popleft(), full=full)
        known = call.parent in numbers and numbers[call.parent] < number
        shared = call.shared if known else 0
        new = call.prompt_ids[shared:]
        chosen = number - 1 in trained
        yield ""
        yield f"── call {number} of {len(calls)} {call.id}"
        yield f"   {visible(facts(call, shared, len(new)))}"
        yield f"   conversation {_name(call.conversation, numbers)}{_spawner(call, numbers)} · {_splice(call, numbers)}"
        if call.ignored:
            yield f"   ignored fields: {visible(', '.join(call.ignored))}"
        if call.rerendered:
            yield f"   replaced by what was sampled: {_quoted(decode(call.rerendered))}"
        yield f"   trained: {'yes' if chosen else f'no, {untrained(call, weights)}'}"
        yield f"   {'place':>7}  mask  {'id':>7}  {'logprob':>9}  {'version':>8}  text"
        if shared:
            yield f"   {f'0–{shared - 1}':>7}  0     as in call {numbers.get(call.parent or '')}"
        yield from _prompt(new, shared, decode, full)
        yield from _sampled(call, decode, "1" if chosen else "0")
    for other in others:
        yield from upstream_text.lines(other, full=full)
    if not calls and not upstream:
        yield "no call of this session is in the call log"


def _prompt(ids: Sequence[int], start: int, decode: Decode, full: bool) -> Iterator[str]:
    rows = list(_texts(ids, decode))
    for offset, (token, text) in enumerate(zip(ids, rows, strict=True)):
        if not full and len(ids) > 2 * EDGE + 1 and EDGE <= offset < len(ids) - EDGE:
            if offset == EDGE:
                yield f"   {'…':>7}  0     {len(ids) - 2 * EDGE} more tokens (--full)"
            continue
        yield f"   {start + offset:>7}  0     {token:>7}  {'':>9}  {'':>8}  {text}"


def _sampled(call: Call, decode: Decode, mask: str) -> Iterator[str]:
    versions = call.versions()
    for offset, (token, text) in enumerate(zip(call.ids, _texts(call.ids, decode), strict=True)):
        logprob = f"{call.logprobs[offset]:.4f}" if offset < len(call.logprobs) else "?"
        version = versions[offset] if offset < len(versions) else "?"
        yield f"   {len(call.prompt_ids) + offset:>7}  {mask}     {token:>7}  {logprob:>9}  {version:>8}  {text}"


def _texts(ids: Sequence[int], decode: Decode) -> Iterator[str]:
    """The text of each token; of a character in several tokens at the first, a ditto mark at the others."""
    for text, first, end in pieces(ids, decode):
        yield _quoted(text)
        yield from ['"'] * (end - first - 1)


def _quoted(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t").join("''")


def _name(conversation: str, numbers: Mapping[str, int]) -> str:
    return f"of call {numbers[conversation]}" if conversation in numbers else visible(conversation)


def _spawner(call: Call, numbers: Mapping[str, int]) -> str:
    if call.spawned_by is None:
        return ""
    return f", started by call {numbers.get(call.spawned_by, call.spawned_by)}"


def _splice(call: Call, numbers: Mapping[str, int]) -> str:
    before = numbers.get(call.parent or "")
    parent = f" with call {before}" if before and call.shared else ""
    reason = f" ({visible(call.reason)})" if call.reason else ""
    return f"{call.splice}{reason}, shares {call.shared} tokens{parent}" if parent else f"{call.splice}{reason}"
