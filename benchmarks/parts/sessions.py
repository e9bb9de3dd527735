"""Recorded sessions of the kinds that harnesses make, generated from a seed: token ids that mean nothing, in shapes that do.

`claude_code` is a long session of one agent: a system prompt with its tools, turns whose tool results make most of the text, sub-agents
with prompts of their own, a compaction after which the history is its summary, and requests that were sent twice. `subagents` branches:
agents that start agents and ask several things of one history. `group` is a step: many short rollouts that begin alike.

Sizes: a session has `unique` tokens, counted once however often they are sent. `stripped`: the chat template leaves the reasoning of
earlier replies out, so each prompt forks from the one before it at its last reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.store.schema import CALLS

SPAN = "0.3"
"""The weight version that sampled everything."""
_ALIKE: dict[str, Any] = {
    "replica": "r0", "dialect": "messages", "path": "/v1/messages", "streamed": True, "conversation": "main", "max_tokens": 32_000,
    "splice": "new", "version_open": SPAN, "version_end": SPAN,
}  # fmt: skip
"""Fields of a call that no builder looks at."""


@dataclass
class Spoken:
    """One call, in the order of completion."""

    parent: int
    """Index of an earlier call of the session; -1: none."""
    shared: int
    new: np.ndarray
    """int32: the prompt after the first `shared` tokens of the parent's prompt and reply."""
    ids: np.ndarray
    """int32: the reply."""
    logprobs: np.ndarray
    """float32, of the reply."""
    kind: str = "agent"
    superseded: bool = False
    """The same request was sent again: this reply is not trained."""

    @property
    def prompt(self) -> int:
        """Tokens."""
        return self.shared + len(self.new)


@dataclass
class _Talk:
    """A session being made: its calls so far, and the randomness that its texts come from."""

    rng: np.random.Generator
    vocabulary: int
    stripped: bool
    calls: list[Spoken] = field(default_factory=list)

    def text(self, length: int) -> np.ndarray:
        return self.rng.integers(0, self.vocabulary, max(1, length), dtype=np.int32)

    def say(self, parent: int, new: np.ndarray, length: int, *, shared: int | None = None, kind: str = "agent") -> int:
        """A call that continues `parent` with `new`, or begins with it; its number."""
        whole = 0 if parent < 0 else self.calls[parent].prompt + len(self.calls[parent].ids)
        shared = whole if shared is None else shared
        if self.stripped and parent >= 0 and shared == whole:
            # The first half of the reply was reasoning: the history has the rest.
            before = self.calls[parent]
            shared, new = before.prompt, np.concatenate([before.ids[len(before.ids) // 2 :], new])
        reply = self.text(length)
        logprobs = -np.abs(self.rng.normal(0.4, 0.3, len(reply))).astype(np.float32)
        self.calls.append(Spoken(parent if shared else -1, shared, new, reply, logprobs, kind))
        return len(self.calls) - 1

    def repeat(self) -> int:
        """The last request once more; its first reply is replaced by the second. The number of the second."""
        last = self.calls[-1]
        last.superseded = True
        reply = self.text(len(last.ids))
        self.calls.append(Spoken(last.parent, last.shared, last.new, reply, np.full(len(reply), -0.5, np.float32), last.kind))
        return len(self.calls) - 1


def claude_code(
    seed: int = 0,
    *,
    unique: int = 70_000,
    turns: int = 100,
    agents: int = 3,
    agent_turns: int = 8,
    compactions: int = 1,
    retries: int = 5,
    stripped: bool = False,
    vocabulary: int = 32_000,
) -> list[Spoken]:
    """One session of `turns` calls of the outermost agent and `agents` × `agent_turns` of sub-agents, besides compactions and retries.

    Of `unique` tokens (without `stripped`, which adds the kept halves of replies) a fifth is the system prompt with its tools; replies are
    about a third of the rest."""
    talk = _Talk(np.random.default_rng(seed), vocabulary, stripped)
    system, task = talk.text(unique * 15 // 70), talk.text(unique // 140)
    agent_system = unique * 2 // 70
    calls = turns + agents * agent_turns + compactions + retries
    summary = unique // 70
    rest = unique - len(system) - len(task) - agents * agent_system - compactions * summary
    replies = _parts(talk.rng, rest * 2 // 5, calls)
    results = _parts(talk.rng, rest - sum(replies), turns - 1 + agents * agent_turns + 2 * compactions)
    compact_at = {turns * (number + 1) // (compactions + 1) for number in range(compactions)}
    agent_at = {turns * (number + 1) // (agents + 1) + 2 for number in range(agents)}
    retry_at = {turns * (2 * number + 1) // (2 * retries) for number in range(retries)}
    last = talk.say(-1, np.concatenate([system, task]), replies.pop())
    for turn in range(1, turns):
        if turn in compact_at:
            summed = talk.say(last, talk.text(results.pop()), summary, kind="compaction")
            history = np.concatenate([talk.calls[summed].ids, talk.text(results.pop())])
            last = talk.say(0, history, replies.pop(), shared=len(system))
        else:
            last = talk.say(last, talk.text(results.pop()), replies.pop())
        if turn in retry_at:
            last = talk.repeat()
        if turn in agent_at:
            inner = talk.say(-1, np.concatenate([talk.text(agent_system), talk.text(results.pop())]), replies.pop(), kind="subagent")
            for _ in range(agent_turns - 1):
                inner = talk.say(inner, talk.text(results.pop()), replies.pop(), kind="subagent")
    return talk.calls


def subagents(seed: int = 0, *, stripped: bool = False, vocabulary: int = 32_000) -> list[Spoken]:
    """A branching session: a main agent of 8 turns, sub-agents of 4 turns on one prompt, and a fork of the whole history of 3 turns."""
    talk = _Talk(np.random.default_rng(seed), vocabulary, stripped)
    begin = talk.text(300)
    inner = np.concatenate([begin[:100], talk.text(100)])
    last = talk.say(-1, np.concatenate([begin, talk.text(30)]), 25)
    for turn in range(1, 8):
        last = talk.say(last, talk.text(30), 25)
        if turn % 3 == 1:
            one = talk.say(-1, np.concatenate([inner, talk.text(20)]), 15, kind="subagent")
            for _ in range(3):
                one = talk.say(one, talk.text(20), 15, kind="subagent")
        if turn == 4:
            one = last
            for _ in range(3):
                one = talk.say(one, talk.text(10), 15)
    return talk.calls


def group(
    seed: int = 0, *, tasks: int = 8, rollouts: int = 8, prompt: int = 2_000, common: int = 1_700, turns: int = 5, vocabulary: int = 32_000
) -> list[list[Spoken]]:
    """A step: `rollouts` rollouts of each of `tasks` tasks; prompts of `prompt` tokens, whose first `common` are the harness's own."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, vocabulary, common, dtype=np.int32)
    step = []
    for _ in range(tasks):
        task = np.concatenate([system, rng.integers(0, vocabulary, prompt - common, dtype=np.int32)])
        for _ in range(rollouts):
            talk = _Talk(rng, vocabulary, False)
            last = talk.say(-1, task, 30)
            for _ in range(turns - 1):
                last = talk.say(last, talk.text(30), 30)
            step.append(talk.calls)
    return step


def table(sessions: Sequence[Sequence[Spoken]]) -> pa.Table:
    """Sessions as rows of the calls dataset; the rollouts are `g00000-0.0`, `g00001-0.0`, …"""
    flat = [(rollout(number), ordinal, call) for number, session in enumerate(sessions) for ordinal, call in enumerate(session)]
    columns = {
        "rollout": [name for name, *_ in flat],
        "call": [_id(name, ordinal) for name, ordinal, _ in flat],
        "ordinal": [ordinal for _, ordinal, _ in flat],
        "parent": [None if call.parent < 0 else _id(name, call.parent) for name, _, call in flat],
        "shared": [call.shared for *_, call in flat],
        "new": _lists([call.new for *_, call in flat], "new"),
        "prompt_tokens": [call.prompt for *_, call in flat],
        "ids": _lists([call.ids for *_, call in flat], "ids"),
        "logprobs": _lists([call.logprobs for *_, call in flat], "logprobs"),
        "spans": [[{"version": SPAN, "first": 0, "end": len(call.ids)}] for *_, call in flat],
        "status": ["finished"] * len(flat),
        "delivered": [not call.superseded for *_, call in flat],
        "superseded_by": [_id(name, ordinal + 1) if call.superseded else None for name, ordinal, call in flat],
        "trainable": [not call.superseded for *_, call in flat],
        "kind": [call.kind for *_, call in flat],
        "temperature": [1.0] * len(flat),
        **{name: [value] * len(flat) for name, value in _ALIKE.items()},
        "sampling": ['{"temperature":1.0}'] * len(flat),
        "opened": [float(ordinal) for _, ordinal, _ in flat],
        "ended": [ordinal + 0.5 for _, ordinal, _ in flat],
    }
    blank = {pa.string(): "", pa.bool_(): False, pa.int32(): 0, pa.float64(): 0.0}
    for column in CALLS.columns:
        if column.name not in columns:
            empty = None if column.nullable else [] if pa.types.is_list(column.type) else blank[column.type]
            columns[column.name] = [empty] * len(flat)
    return pa.table({name: pa.array(columns[name], CALLS.schema.field(name).type) for name in CALLS.schema.names}, schema=CALLS.schema)


def calls(session: Sequence[Spoken], number: int = 0) -> list[Call]:
    """The same as `Call`s, each with its whole prompt: what a builder on lists needs."""
    name, made, whole = rollout(number), [], []
    for ordinal, call in enumerate(session):
        prompt = (whole[call.parent][: call.shared] if call.parent >= 0 else []) + call.new.tolist()
        whole.append(prompt + call.ids.tolist())
        made.append(
            Call(
                id=_id(name, ordinal),
                session=name,
                purpose="train",
                kind=call.kind,
                prompt_ids=prompt,
                sampling={"temperature": 1.0},
                masked_by_grammar=False,
                opened=float(ordinal),
                ended=ordinal + 0.5,
                parent=None if call.parent < 0 else _id(name, call.parent),
                shared=call.shared,
                ids=call.ids.tolist(),
                logprobs=call.logprobs.tolist(),
                spans=[(SPAN, 0, len(call.ids))],
                status="finished",
                delivered=not call.superseded,
                superseded_by=_id(name, ordinal + 1) if call.superseded else None,
                **_ALIKE,
            )
        )
    return made


def rollout(number: int) -> str:
    return f"g{number:05d}-0.0"


def _id(name: str, ordinal: int) -> str:
    return f"{name}/{ordinal:04d}"


def _lists(parts: Sequence[np.ndarray], name: str) -> pa.Array:
    kind = CALLS.schema.field(name).type
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(parts), kind.value_type)).cast(kind)


def _parts(rng: np.random.Generator, total: int, parts: int) -> list[int]:
    """`parts` lengths of at least 1 that add up to `total`, some much longer than others, as tool results are."""
    weights = rng.lognormal(0, 0.7, parts)
    lengths = 1 + np.floor((total - parts) * weights / weights.sum()).astype(int)
    lengths[: total - lengths.sum()] += 1
    return lengths.tolist()
