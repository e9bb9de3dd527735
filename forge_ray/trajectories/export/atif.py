"""ATIF 1.8, Harbor's trajectory format: one document per rollout.

A call of the policy is one step of source `agent`: its text, its tool calls, and under `metrics` the token ids it was given and those it
sampled with their logprobs, so that each call's tokens can be had back exactly (`calls`). What came between two calls is an observation
(tool messages) or a step of its own. A conversation whose history was rewritten repeats it as steps with `is_copied_context`. Other
conversations (of sub-agents, titles, compactions) are `subagent_trajectories`, each in the trajectory whose step began it and named there,
where that is known.

ATIF has no loss mask, no weight version and no reward: those are in `extra`. A number that is not finite is left out. An image part of ATIF
names a file, and the recording holds an image's digest only: its placeholders stay text, and the step's `extra` has the digests (`media`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.export.marks import Part
from forge_ray.trajectories.export.text import Text, goes_on, usable

VERSION = "ATIF-v1.8"
_TOOL_CALL = re.compile(r"\s*<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A tool call in the words of Hermes and Qwen; calls in other words stay part of the message."""


def document(row: Mapping[str, Any], calls: Sequence[Call], text: Text) -> dict[str, Any] | None:
    """The trajectory of one rollout; None where no call has a reply (ATIF knows no empty trajectory)."""
    groups: dict[str, list[Call]] = {}
    for call in calls:
        if usable(call):
            groups.setdefault(call.conversation, []).append(call)
    if not groups:
        return None
    main = next((name for name, found in groups.items() if any(call.kind == "agent" for call in found)), next(iter(groups)))
    made = {name: _trajectory(row, found, text, name) for name, found in groups.items()}
    whole = made[main]
    steps = {step["extra"]["call"]: step for one in made.values() for step in one["steps"] if "metrics" in step}
    for name, owner in _owners(groups, main).items():
        made[owner].setdefault("subagent_trajectories", []).append(made[name])
        if (step := steps.get(groups[name][0].spawned_by or "")) is not None:
            results = step.setdefault("observation", {"results": []})["results"]
            results.append({"subagent_trajectory_ref": [{"trajectory_id": name}]})
    facts = ("rollout", "run", "task", "task_digest", "outcome", "detail", "purpose", "group", "step", "workspace_digest")
    extra = {name: row[name] for name in facts if row.get(name) is not None}
    if row["reward"] is not None and math.isfinite(row["reward"]):
        extra["reward"] = row["reward"]
    extra["rewards"] = {name: value for name, value in row["rewards"].items() if math.isfinite(value)}
    return whole | {"extra": extra}


def calls(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a document: `call`, `prompt_ids`, `ids`, `logprobs` of each call of the policy."""
    for step in found["steps"]:
        if "metrics" in step:
            metrics = step["metrics"]
            yield {
                "call": step["extra"]["call"],
                "prompt_ids": metrics["prompt_token_ids"],
                "ids": metrics["completion_token_ids"],
                "logprobs": metrics.get("logprobs"),
            }
    for inner in found.get("subagent_trajectories", ()):
        yield from calls(inner)


def _owners(groups: Mapping[str, Sequence[Call]], main: str) -> dict[str, str]:
    """Of each conversation but `main`: the one that a call of it began, where that is known and leads to `main`, else `main`. A reference
    is resolved among the trajectories that lie in the one it is in."""
    of_call = {call.id: name for name, made in groups.items() for call in made}
    found: dict[str, str] = {}
    for name in groups:
        chain = [name]
        while chain[-1] != main and len(chain) <= len(groups):
            chain.append(of_call.get(groups[chain[-1]][0].spawned_by or "", main))
        if name != main:
            found[name] = chain[1] if chain[-1] == main else main
    return found


def _trajectory(row: Mapping[str, Any], made: Sequence[Call], text: Text, name: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    before: Call | None = None
    known = {call.id: call for call in made}
    for call in made:
        parent = known.get(call.parent or "")
        follows = parent is not None and parent is before and goes_on(call, parent)
        for part in text.prompt(call, before if follows else None):
            _context(steps, part, copied=before is not None and not follows)
        steps.append(_step(call, text))
        before = call
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    return {
        "schema_version": VERSION,
        "session_id": row["rollout"],
        "trajectory_id": name,
        "agent": {"name": row["harness"], "version": row.get("harness_version") or "unknown", "model_name": row["policy"]},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(call.prompt_ids) for call in made),
            "total_completion_tokens": sum(len(call.ids) for call in made),
            "total_steps": len(steps),
        },
    }


def _context(steps: list[dict[str, Any]], part: Part, *, copied: bool) -> None:
    """Take in a message that the harness put into a prompt."""
    flag = {"is_copied_context": True} if copied else {}
    last = steps[-1] if steps else None
    if part.role == "tool" and last is not None and last["source"] == "agent" and not copied:
        results = last.setdefault("observation", {"results": []})["results"]
        asked = last.get("tool_calls", ())
        answered = sum("source_call_id" in result for result in results)
        result: dict[str, Any] = {"content": part.content}
        if answered < len(asked):
            result["source_call_id"] = asked[answered]["tool_call_id"]
        results.append(result)
    elif part.role == "assistant":  # a reply of another time: nobody sampled it here
        steps.append({"source": "agent", "message": part.content, "llm_call_count": 0, "is_copied_context": True})
    else:
        source = part.role if part.role in ("system", "user") else "user"
        steps.append({"source": source, "message": part.content} | flag | ({"extra": {"role": part.role}} if source != part.role else {}))


def _step(call: Call, text: Text) -> dict[str, Any]:
    message, tool_calls = _tool_calls(text.reply(call), call.id)
    metrics: dict[str, Any] = {
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(call.ids),
        "prompt_token_ids": list(call.prompt_ids),
        "completion_token_ids": list(call.ids),
    }
    if len(call.logprobs) == len(call.ids) and all(map(math.isfinite, call.logprobs)):
        metrics["logprobs"] = list(call.logprobs)
    step: dict[str, Any] = {
        "timestamp": datetime.fromtimestamp(call.ended or call.opened, UTC).isoformat(),
        "source": "agent",
        "message": message,
        "llm_call_count": 1,
        "metrics": metrics,
        "extra": {
            "call": call.id,
            "kind": call.kind,
            "status": call.status,
            "trainable": call.trainable,
            "loss_mask": [int(call.trainable)] * len(call.ids),
            "versions": [list(span) for span in call.spans or ()],
            "sampling": call.sampling,
            "splice": call.splice,
            **({"media": call.media} if call.media else {}),
        },
    }
    return step | ({"tool_calls": tool_calls} if tool_calls else {})


def _tool_calls(text: str, call: str) -> tuple[str, list[dict[str, Any]]]:
    """The text without its tool calls, and these; all of it as text where one of them cannot be read."""
    found = []
    for number, match in enumerate(_TOOL_CALL.finditer(text)):
        try:
            made = json.loads(match[1])
            name, arguments = made["name"], made.get("arguments", {})
        except (ValueError, KeyError, TypeError):
            return text, []
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        found.append({"tool_call_id": f"{call}-{number}", "function_name": name, "arguments": arguments})
    return (_TOOL_CALL.sub("", text), found) if found else (text, [])
