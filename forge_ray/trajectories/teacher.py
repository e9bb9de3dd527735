"""A teacher's recorded rollouts as demonstrations for the policy: what is taken, and the table that comes of it. Pure; no tokenizer here.

The teacher's calls are text (`upstream.UpstreamCall`). Each is asked again of the policy's own server, which renders it as in training, and
answered with the teacher's reply in the policy's template (`forge_ray.job.dictation`); what that records are calls like any others,
merged by the `chain` builder. So a demonstration is, token for token, what a rollout of the policy would be in which it said the same, and
each reply is trained once.

The table of demonstrations has one row per sample:

    column     type
    ids        list<int32>    token ids
    mask       list<bool>     true where the teacher speaks, end tokens included
    session    string         the rollout
    task       string         its task's name
    reward     double
    turns      list<struct>   the replies, in order:
        first, end  int32          their tokens are ids[first:end]
        call        string         id of the teacher's call in the recording
        model       string         name that the harness asked for
        text        string         JSON: the reply as the teacher gave it (`UpstreamCall.reply`)
        tokens      list<string>   the teacher's own tokens, as text; null without log-probabilities
        logprobs    list<double>   nats, of `tokens`
        more        string         JSON: `top` and `bytes` of `UpstreamCall.logprobs`, where there are any

The teacher's tokens are kept as it cut them: which of them stand for which of the policy's is for the learner that distils to say.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from forge_ray.trajectories import builders, credit
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.trajectory import Share, of_calls
from forge_ray.trajectories.upstream import UpstreamCall

if TYPE_CHECKING:
    import pyarrow as pa

_ENDS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "stop",
    "stop_sequences",
    "min_tokens",
    "n",
    "logprobs",
    "top_logprobs",
)
"""Fields of a request that would cut the reply short, or have it answered more than once."""
_OPENAI_ONLY = ("store", "service_tier", "prediction", "background", "modalities", "logit_bias")


@dataclass
class Turn:
    """One reply of the teacher in a demonstration."""

    first: int
    end: int
    """Its tokens are `ids[first:end]`."""
    call: UpstreamCall


@dataclass
class Demonstration:
    """One training sequence."""

    ids: list[int]
    mask: list[bool]
    turns: list[Turn] = field(default_factory=list)
    session: str = ""
    task: str = ""
    reward: float = 0.0


def teachers(calls: Iterable[UpstreamCall], models: Collection[str]) -> list[UpstreamCall]:
    """The calls that can be demonstrated: of a model named by `models` (names or patterns), whole and delivered, by their end."""
    return [call for call in calls if call.whole and any(fnmatchcase(call.model, model) for model in models)]


def request(call: UpstreamCall, model: str, window: int) -> dict[str, Any]:
    """The teacher's request as one to the policy's server, whose model is `model` and may take `window` tokens."""
    body = {name: value for name, value in call.request.items() if name not in _ENDS + _OPENAI_ONLY}
    if call.dialect == "messages":
        body["max_tokens"] = window  # which this dialect asks for
    if "none" not in (choice := body.get("tool_choice"), choice.get("type") if isinstance(choice, dict) else None):
        body.pop("tool_choice", None)  # a server reads a forced call in another form than the template writes
    return {**body, "model": model, "stream": False}


def message(call: UpstreamCall) -> dict[str, Any]:
    """The teacher's reply as a chat template takes it: arguments as an object, as a server hands them over."""
    reply = call.reply
    made: dict[str, Any] = {"role": "assistant", "content": reply.get("text") or ""}
    if thought := reply.get("reasoning"):
        made |= {"reasoning": thought, "reasoning_content": thought}
    if calls := reply.get("tool_calls"):
        made["tool_calls"] = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": _arguments(one["arguments"])}}
            for one in calls
        ]
    return made


def demonstrations(calls: Sequence[Call], said: Mapping[str, UpstreamCall]) -> Iterator[Demonstration]:
    """The samples of what the policy's server recorded of one rollout. `said`: the teacher's call behind each, by the recorded one's id."""
    ordered = [replace(call, masked_by_grammar=False) for call in credit.by_completion(calls)]  # a grammar has masked nothing here
    trajectory = of_calls("", ordered)
    trajectory.shares = {ordinal: Share(1.0, 1.0) for ordinal in credit.assign(trajectory.calls) if ordered[ordinal].id in said}
    for row in builders.build("chain", [trajectory]).select(["ids", "mask", "call"]).to_pylist():
        turns: list[Turn] = []
        for place, ordinal in enumerate(row["call"]):
            if ordinal < 0:
                continue
            if place and row["call"][place - 1] == ordinal:
                turns[-1].end = place + 1
            else:
                turns.append(Turn(place, place + 1, said[ordered[ordinal].id]))
        yield Demonstration(row["ids"], row["mask"], turns)


def table(rows: Sequence[Demonstration]) -> pa.Table:
    """As described above."""
    import pyarrow as pa

    turn = pa.struct(
        [
            ("first", pa.int32()),
            ("end", pa.int32()),
            ("call", pa.string()),
            ("model", pa.string()),
            ("text", pa.string()),
            ("tokens", pa.list_(pa.string())),
            ("logprobs", pa.list_(pa.float64())),
            ("more", pa.string()),
        ]
    )
    return pa.table(
        {
            "ids": pa.array([row.ids for row in rows], pa.list_(pa.int32())),
            "mask": pa.array([row.mask for row in rows], pa.list_(pa.bool_())),
            "session": pa.array([row.session for row in rows], pa.string()),
            "task": pa.array([row.task for row in rows], pa.string()),
            "reward": pa.array([row.reward for row in rows], pa.float64()),
            "turns": pa.array([[_turn(one) for one in row.turns] for row in rows], pa.list_(turn)),
        }
    )


def _turn(turn: Turn) -> dict[str, Any]:
    scores = turn.call.logprobs or {}
    more = {name: scores[name] for name in ("top", "bytes") if name in scores}
    return {
        "first": turn.first,
        "end": turn.end,
        "call": turn.call.id,
        "model": turn.call.model,
        "text": json.dumps(turn.call.reply),
        "tokens": [token.encode(errors="replace").decode() for token in scores["tokens"]] if scores else None,
        "logprobs": scores.get("logprobs"),
        "more": json.dumps(more) if more else None,
    }


def _arguments(text: str) -> dict[str, Any]:
    """As an object; what is none (a freeform tool's text) is what servers declare such tools with: an object of one text."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"input": text}
