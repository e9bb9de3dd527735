"""`forge-ray replay`: every token of a session has its line, with its mask, and what is not trained says why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from forge_ray.cli import replay as command
from forge_ray.config import Credit
from forge_ray.errors import UserError
from forge_ray.outcome import Outcome
from forge_ray.report.replay import replay
from forge_ray.run_dir import RunDir
from forge_ray.trajectories import credit
from forge_ray.trajectories.call import Call
from tests.unit.making import make_call, make_record


def decode(ids: Sequence[int]) -> str:
    return "".join({7: "\n", 8: "\x1b[2J"}.get(token, f"<{token}>") for token in ids)


def lines(calls: list[Call], *, full: bool = False) -> list[str]:
    chosen = credit.assign(calls)
    return list(replay(calls, chosen, credit.KIND_WEIGHTS, decode, full=full))


def rows(shown: list[str]) -> list[list[str]]:
    """`[place, mask, …]` of the token lines."""
    return [line.split() for line in shown if line.split() and line.split()[0].isdigit()]


def test_every_token_with_place_mask_id_logprob_and_version() -> None:
    one = make_call([1, 2, 7], [3, 8])
    two = make_call([1, 2, 7, 3, 8, 5], [6], order=1, parent=one.id, shared=5, splice="spliced", reason="re-rendered", rerendered=[9, 9])
    shown = lines([one, two])
    assert rows(shown) == [
        ["0", "0", "1", "'<1>'"],
        ["1", "0", "2", "'<2>'"],
        ["2", "0", "7", "'\\n'"],
        ["3", "1", "3", "-1.0000", "0.3", "'<3>'"],
        ["4", "1", "8", "-1.0625", "0.3", "'\\x1b[2J'"],
        ["5", "0", "5", "'<5>'"],
        ["6", "1", "6", "-2.0000", "0.3", "'<6>'"],
    ]
    text = "\n".join(shown)
    assert "spliced (re-rendered), shares 5 tokens with call 1" in text and "replaced by what was sampled: '<9><9>'" in text
    assert "0–4" in text and "as in call 1" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"status": "cancelled", "spans": None}, "cancelled"),
        ({"delivered": False}, "undelivered"),
        ({"delivered": None}, "nobody knows"),
        ({"superseded_by": "other"}, "superseded by other"),
        ({"masked_by_grammar": True}, "grammar"),
        ({"media": ["image:5f"]}, "holds images"),
        ({"kind": "aux"}, "weight 0"),
        ({"spans": None}, "versions"),
    ],
)
def test_what_is_not_trained_has_mask_0_and_a_reason(changes: dict, why: str) -> None:
    shown = lines([make_call([1], [2, 3], **changes)])
    assert [row[1] for row in rows(shown)] == ["0", "0", "0"]
    (said,) = [line for line in shown if "trained: no" in line]
    assert why in said


def test_a_long_prompt_is_cut_unless_asked_for() -> None:
    call = make_call(list(range(10, 210)), [3])
    short, whole = lines([call]), lines([call], full=True)
    assert len(rows(whole)) == 201 and len(rows(short)) < 60
    assert any("152 more tokens (--full)" in line for line in short)


def test_sessions_are_named_by_path_by_beginning_and_by_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "demo"
    (run / "rollouts" / "g00001-0.0").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    monkeypatch.setattr(command, "DEFAULT_RUNS", str(tmp_path / "runs"))
    by_path = command._find(str(run / "rollouts" / "g00001-0.0"), None)
    assert (by_path[0].root, by_path[1]) == (run, "g00001-0.0")
    assert (
        command._find("g00001", None)[0].root == run and command._find("x", str(run))[1] == "x" and command._find(str(run), None)[1] == ""
    )
    with pytest.raises(UserError, match="no run below"):
        command._find("g9", None)
    served = RunDir(tmp_path / "runs" / "demo-serve")
    served.rollouts.mkdir(parents=True)
    served.config.write_text("")
    served.calls.mkdir()
    with pytest.raises(UserError, match="served session 'serve'"):
        command._find("serve", None)
    refused = {"event": "refused", "session": "serve", "reason": "overflow", "status": 400, "dialect": "chat", "path": "/", "t": 1.0}
    (served.calls / "r0.jsonl").write_text(json.dumps(refused) + "\n")
    assert command._find("serve", None) == (served, "serve")
    assert command._one("g00001", ["g00001-0.0", "g00002-0.0"], by_path[0]) == "g00001-0.0"
    with pytest.raises(UserError, match="2 sessions begin with 'g'"):
        command._one("g", ["g00001-0.0", "g00002-0.0"], by_path[0])
    with pytest.raises(UserError, match="no session 'h'"):
        command._one("h", ["g00001-0.0"], by_path[0])
    with pytest.raises(UserError, match="has no recorded call"):
        command._one("h", [], by_path[0])


def test_the_record_says_whether_a_limit_ended_the_rollout(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name, outcome in (("a.0", Outcome.TRUNCATED), ("b.0", Outcome.OK)):
        (run.rollouts / name).mkdir(parents=True)
        (run.rollouts / name / "result.json").write_text(make_record(name, 1.0, outcome=outcome).model_dump_json())
    assert [command._truncated(run, name) for name in ("a.0", "b.0", "c.0")] == [True, False, False]
    cut = make_call([1], [2], status="length")
    chosen = credit.assign([cut], Credit(truncated="finished_calls"), truncated=True)
    assert any("trained: no, out of scope" in line for line in replay([cut], chosen, credit.KIND_WEIGHTS, decode))
