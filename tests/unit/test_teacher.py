"""What of a teacher's recording is demonstrated, how it is asked again, and the table; the rendering is tested over vLLM's app."""

from __future__ import annotations

import json
from typing import Any

from forge_ray.job.serving import told_other
from forge_ray.report import upstream_text
from forge_ray.report.replay import replay
from forge_ray.trajectories import credit, teacher
from forge_ray.trajectories.upstream import Requests, UpstreamCall, restore
from tests.unit.making import make_call


def passed(call: str = "u1", **changes: Any) -> UpstreamCall:
    fields: dict[str, Any] = {name: "x" for name in ("session", "purpose", "replica", "upstream", "path")}
    fields |= {"id": call, "model": "big-1", "dialect": "chat", "streamed": False, "kind": "agent", "conversation": None, "opened": 1.0}
    fields |= {"ended": 2.0, "request": {"messages": [{"role": "user", "content": "hi"}]}, "status": "finished", "http_status": 200}
    fields |= {"reply": {"text": "yes", "reasoning": "", "tool_calls": [], "finish_reason": "stop"}, "delivered": True}
    return UpstreamCall(**(fields | changes))


def test_only_whole_delivered_calls_of_the_teacher() -> None:
    calls = [
        passed(),
        passed(delivered=False),
        passed(status="length"),
        passed(model="judge"),
        passed(delivered=None),
        passed(status="failed"),
    ]
    assert teacher.teachers(calls, ["big-*"]) == [calls[0]] and teacher.teachers(calls, []) == []


def test_a_request_is_asked_again_without_what_would_change_the_answer() -> None:
    asked = {
        "model": "big-1",
        "messages": [],
        "stream": True,
        "max_tokens": 5,
        "stop": ["x"],
        "n": 2,
        "tools": [1],
        "tool_choice": "required",
    }
    again = teacher.request(passed(request=asked), "policy", 64)
    assert again == {"model": "policy", "messages": [], "stream": False, "tools": [1]}
    messages = teacher.request(passed(dialect="messages", request={"max_tokens": 1, "tool_choice": {"type": "none"}}), "policy", 64)
    assert messages == {"model": "policy", "stream": False, "max_tokens": 64, "tool_choice": {"type": "none"}}


def test_a_reply_as_a_template_takes_it() -> None:
    calls = [{"id": "a", "name": "f", "arguments": '{"x": 1}'}, {"id": "b", "name": "patch", "arguments": "*** Begin"}]
    made = teacher.message(passed(reply={"text": None, "reasoning": "hm", "tool_calls": calls, "finish_reason": "tool_calls"}))
    assert (made["content"], made["reasoning"], made["reasoning_content"]) == ("", "hm", "hm")
    assert [call["function"]["arguments"] for call in made["tool_calls"]] == [{"x": 1}, {"input": "*** Begin"}]


def test_each_reply_is_trained_once_and_keeps_the_teachers_own_tokens() -> None:
    one = make_call([1, 2], [3, 4], masked_by_grammar=True)
    two = make_call([1, 2, 3, 4, 5], [6], order=1)
    side = make_call([9], [8], order=2, kind="aux")
    again = make_call([1, 2], [7], order=3, superseded_by="z")
    scores = {"tokens": ["y", "es"], "logprobs": [-0.25, -1.0], "top": [{"y": -0.25}, {"es": -1.0}]}
    said = {call.id: passed(f"u-{call.id}", logprobs=scores if call is one else None) for call in (one, two, side, again)}
    (row,) = teacher.demonstrations([one, two, side, again], said)
    assert (row.ids, row.mask) == ([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True])
    row.session, row.task, row.reward = "s", "t", 1.0
    (stored,) = teacher.table([row]).to_pylist()
    assert [(turn["first"], turn["end"], turn["call"]) for turn in stored["turns"]] == [(2, 4, f"u-{one.id}"), (5, 6, f"u-{two.id}")]
    first, second = stored["turns"]
    assert (first["tokens"], first["logprobs"], json.loads(first["more"])) == (["y", "es"], [-0.25, -1.0], {"top": scores["top"]})
    assert (second["tokens"], second["logprobs"], second["more"], json.loads(second["text"])["text"]) == (None, None, None, "yes")


def test_replay_shows_them_in_order() -> None:
    call = make_call([1], [2])
    before = passed("early", ended=(call.ended or 0) - 1, request={"messages": [{"role": "user", "content": "ask\x1b[2J"}]})
    after = passed("late", ended=(call.ended or 0) + 1, status="failed", http_status=502, error="gone", delivered=False)
    chosen = credit.assign([call])
    shown = list(replay([call], chosen, credit.KIND_WEIGHTS, lambda ids: str(list(ids)), upstream=[before, after]))
    heads = [line.split()[-1] for line in shown if line.startswith("──")]
    assert heads == ["early", call.id, "late"]
    text = "\n".join(shown)
    assert "user │ ask\\x1b[2J" in text and "reply │ yes" in text and "failed, status 502, undelivered" in text and "gone" in text
    assert "trained: no, it is text of another model" in text


def test_replay_leaves_out_what_was_shown_before() -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    call = passed(request={"messages": items})
    assert "   2 earlier items (--full)" in list(upstream_text.lines(call))
    assert [line.partition("│ ")[2] for line in upstream_text.lines(call, full=True) if "│" in line] == ["a", "b", "c", "yes"]


def test_requests_are_differences_that_come_back_whole_in_any_order() -> None:
    requests = Requests()
    system, tools = {"role": "system", "content": "s"}, [{"name": "t"}]
    sent: dict[str, dict[str, Any]] = {
        "a": {"model": "m", "messages": [system, 1], "tools": tools},
        "other": {"model": "m", "messages": [{"role": "system", "content": "z"}, 1]},
        "b": {"model": "m", "messages": [system, 1, 2, 3], "tools": tools},
        "c": {"model": "m", "messages": [system, 1, 4]},
        "text": {"input": "no list"},
    }
    events: dict[str, dict[str, Any]] = {}
    for name, body in sent.items():
        events[name] = requests.encode(name, body)
        requests.remember(name, written=name != "c")
    assert (events["b"]["parent"], events["b"]["request"]) == ("a", {"messages": [2, 3]})
    assert (events["c"]["dropped"], events["other"]["parent"]) == (["tools"], None)
    later = requests.encode("d", {"model": "m", "messages": [system, 1, 4, 5]})
    assert later["parent"] in ("a", "b")  # `c` is not on disk
    assert restore(dict(reversed(events.items()))) == (sent, [])
    del events["a"]
    found, broken = restore(events)
    assert sorted(broken) == ["b", "c"] and found == {name: sent[name] for name in ("other", "text")}


def test_serve_tells_of_them_in_a_line() -> None:
    line = told_other(passed(reply={"text": "yes\x1b[2J\nno"}))
    assert line.endswith("big-1, another model · chat · finished, status 200 · 1.00 s · yes\\x1b[2J no")
