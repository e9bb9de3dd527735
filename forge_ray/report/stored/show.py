"""One rollout: what it came to, where it came from, its calls, where its files are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from forge_ray.report import upstream_text
from forge_ray.report.stored.listing import moment, number
from forge_ray.report.stored.select import Row
from forge_ray.report.trajectory import facts, visible
from forge_ray.run_dir import RunDir
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.upstream import UpstreamCall

LOG_LINES = 12
"""Lines of the verifier's log that are shown, from its end."""


def lines(row: Row, calls: Sequence[Call], run: RunDir | None, upstream: Sequence[UpstreamCall] = ()) -> Iterator[str]:
    """The lines about a rollout; `run`: its run directory, where that is at hand. `upstream` by their end: each is shown before the first
    call that ended after it."""
    yield f"{row['rollout']} of run {row['run']}: {row['purpose']}, attempt {row['attempt']} at {row['key']}"
    detail = f": {visible(row['detail'])}" if row["detail"] else ""
    yield f"outcome    {row['outcome']}{detail}"
    yield f"reward     {number(row['reward'])}{_numbers(row['rewards'])}"
    group = "" if row["group"] is None else f", group {row['group']}"
    yield f"step       {'none' if row['step'] is None else row['step']}{group}"
    yield f"started    {moment(row['started'])}, seconds{_numbers(row['seconds'])}"
    yield f"task       {visible(row['task'])} ({row['task_digest'] or 'digest unknown'}) from {row['task_path']}"
    yield f"harness    {visible(row['harness'])} ({row['harness_version'] or 'version unknown'}), options {row['harness_options']}"
    yield f"image      {row['image_digest'] or 'digest unknown'}, on {visible(row['image_base'] or 'no base image')}"
    weights = ", ".join(f"{name} ({count} tokens)" for name, count in row["versions"].items())
    yield f"policy     {row['policy']}, weights {weights or 'none'}"
    yield f"           template {row['template_sha256'] or 'unknown'}, tokenizer {row['tokenizer_sha256'] or 'unknown'}"
    yield f"sampling   {'; '.join(row['sampling']) or 'no call'}"
    yield (
        f"tokens     {row['prompt_tokens']} prompt, {row['sampled_tokens']} sampled, {row['trainable_tokens']} trainable in "
        f"{row['calls']} calls, {row['upstream_calls']} calls of other models"
    )
    if run is not None:
        yield f"files      {run.rollouts / row['rollout']}"
        if row["workspace_digest"]:
            yield f"workspace  {run.rollouts / 'archive' / row['workspace_digest']}.tar.gz"
    else:
        yield f"workspace  {row['workspace_digest'] or 'not archived'}"
    if row["verifier_log"] is not None:
        yield f"verifier   {row['verifier_log_bytes']} bytes of output"
        shown = [visible(line)[:400] for line in row["verifier_log"].splitlines()]
        yield from (f"           │ {line}" for line in shown[-LOG_LINES:])
    known: dict[str, int] = {}
    others = deque(upstream)
    for number_, call in enumerate(calls, start=1):
        while others and (call.ended is None or others[0].ended <= call.ended):
            yield from upstream_text.lines(others.popleft())
        known[call.id] = number_
        shared = call.shared if call.parent in known else 0
        yield ""
        parent = f", goes on from call {known[call.parent]}" if call.parent in known and call.parent is not None else ""
        yield f"── call {number_} of {len(calls)} {call.id}: {call.splice}{f' ({visible(call.reason)})' if call.reason else ''}{parent}"
        yield f"   {visible(facts(call, shared, len(call.prompt_ids) - shared))}"
    for other in others:
        yield from upstream_text.lines(other)


def _numbers(values: dict[str, float]) -> str:
    return f" ({', '.join(f'{visible(name)} {value:g}' for name, value in values.items())})" if values else ""
