"""Calls that another model answered, as data: they come back equal, whatever died in between, and a person is shown them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.cli.main import main
from forge_ray.trajectories.store import upstream as upstream_rows
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.schema import UPSTREAM, StoreError
from forge_ray.trajectories.store.writer import Ended, StoreWriter, unfinished
from forge_ray.trajectories.upstream import UpstreamCall
from tests.unit.making import make_record, make_rollout

_VALUE: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)


def made(number: int, session: str = "g00000-0.0", **changes: Any) -> UpstreamCall:
    fields: dict[str, Any] = {
        "id": f"{session}/u{number}", "session": session, "purpose": "train", "replica": "r0", "upstream": "judge*", "model": "judge-1",
        "dialect": "chat", "path": "/v1/chat/completions", "streamed": False, "kind": "aux", "conversation": None,
        "opened": 99.0 + number, "ended": 99.25 + number, "status": "finished", "http_status": 200, "delivered": True,
        "request": {"model": "judge-1", "messages": [{"role": "user", "content": f"turn {turn} ü"} for turn in range(number + 1)]},
        "reply": {"text": f"verdict {number}", "tool_calls": [], "finish_reason": "stop"},
    }  # fmt: skip
    return UpstreamCall(**{**fields, **changes})


@given(
    st.lists(st.fixed_dictionaries({}, optional={"messages": st.lists(_VALUE, max_size=4), "tools": _VALUE, "x": _VALUE}), max_size=6),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_call_comes_back_equal_with_its_whole_request(requests: list[dict[str, Any]], data: st.DataObject) -> None:
    calls = [
        made(
            number,
            request=request,
            reply=data.draw(st.dictionaries(st.text("ab", max_size=2), _VALUE, max_size=2)),
            others=tuple(data.draw(st.lists(st.dictionaries(st.just("text"), _VALUE), max_size=2))),
            logprobs=data.draw(st.none() | st.just({"tokens": ["a"], "logprobs": [-0.5], "top": [{"b": -1.5}], "bytes": {"0": [255]}})),
            delivered=data.draw(st.none() | st.booleans()),
            conversation=data.draw(st.none() | st.just("c")),
        )
        for number, request in enumerate(requests)
    ]
    rows = upstream_rows.table(calls)
    assert rows.schema.equals(UPSTREAM.schema, check_metadata=True) and upstream_rows.calls(rows, "train") == calls


def test_rows_hold_new_messages_only() -> None:
    rows = upstream_rows.table([made(number) for number in range(4)])
    assert [len(json.loads(text)["messages"]) for text in rows["request"].to_pylist()] == [1, 1, 1, 1]
    with pytest.raises(StoreError, match="u1 cannot be put together"):
        upstream_rows.calls(rows.slice(1), "train")


@pytest.mark.parametrize("dies_at", ["upstream/", "rollouts/"])
def test_a_writer_that_died_between_its_files_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: Any, dies_at: str) -> None:
    location, put = Location.of(tmp_path), Location.put
    record, calls = make_rollout("g00000-0.0", 1.0)
    only = make_record("g00000-1.0", 0.0)
    ended = [Ended(record, calls, upstream=[made(0), made(1)]), Ended(only, [], upstream=[made(0, only.id)])]

    def dies(self: Location, name: str, content: pa.Buffer) -> None:
        if name.startswith(dies_at):
            raise KeyboardInterrupt
        put(self, name, content)

    monkeypatch.setattr(Location, "put", dies)
    writer = StoreWriter(location, Origin("run"))
    for one in ended:
        writer.add(one.record, one.calls, one.log, one.upstream)
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    monkeypatch.setattr(Location, "put", put)
    assert StoreReader(location).table("upstream").num_rows == 0, "nobody sees calls without their rollout"
    again = StoreWriter(location, Origin("run"))
    for part, ids in unfinished(location).items():
        again.finish(part, [one for one in ended if one.record.id in ids])
    stored = set(StoreReader(location).table("rollouts")["rollout"].to_pylist())
    for one in ended:
        if one.record.id not in stored:
            again.add(one.record, one.calls, one.log, one.upstream)
    again.flush()
    reader = StoreReader(location)
    assert unfinished(location) == {} and [record.id for record in reader.rollouts()] == ["g00000-0.0", "g00000-1.0"]
    assert all(reader.upstream(one.record.id) == one.upstream for one in ended) and reader.upstream("nobody") == []
    assert (reader.table("upstream").num_rows, reader.table("calls").num_rows) == (3, 1)


def test_they_are_shown_in_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = StoreWriter(Location.of(tmp_path), Origin("run", policy="policy"))
    record, calls = make_rollout("g00000-0.0", 1.0, samples=2)
    writer.add(record, calls, upstream=[made(2), made(9)])
    writer.flush()
    for more in ((), ("--tokens",)):
        assert main(["rollouts", "show", str(tmp_path), record.id, *more]) == 0
        text = capsys.readouterr().out
        places = [text.rindex(word) for word in ("call 1 of 2", "verdict 2", "call 2 of 2", "verdict 9")]
        assert places == sorted(places) and text.count("verdict 2") == 1 and "judge-1 (another model, upstream judge*)" in text
    assert main(["rollouts", "show", str(tmp_path), record.id, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["upstream_calls_made"]
    assert [len(call["request"]["messages"]) for call in shown] == [3, 10] and shown[0]["reply"]["text"] == "verdict 2"
