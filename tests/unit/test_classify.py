"""Every row of the classification table, and the order of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_ray.actors.classify import Deadline, Evidence, Fault, classify, verified
from forge_ray.outcome import Outcome
from forge_ray.sandboxes.sandbox import Limit, RunResult
from forge_ray.serve_proxy.client import SessionSummary


def ran(exit_code: int | None = 0, limit: Limit | None = None, detail: str = "exit code 0", seconds: float = 3.0) -> RunResult:
    return RunResult(exit_code, limit, seconds, 0.1, Path("/dev/null"), 0, detail)


LATE = ran(None, "time", "killed after 180.2 s", 180.2)


def answered(**changes: Any) -> SessionSummary:
    return SessionSummary(
        **{"session": "s", "calls": 2, "sampled_tokens": 20, "last_status": "finished", "last_reply": "answer", **changes}
    )


def asked(**changes: Any) -> SessionSummary:
    """The last reply was a tool call."""
    return answered(last_reply="tool_calls", **changes)


def nothing(**changes: Any) -> SessionSummary:
    return SessionSummary(session="s", **changes)


def evidence(summary: SessionSummary, run: RunResult | None = None, **more: Any) -> Evidence:
    return Evidence(summary, run or ran(), Deadline(180, "the task's agent.timeout_sec"), **more)


CASES = [
    ("a final answer", evidence(answered()), Outcome.OK, "final answer"),
    ("an exit code is a hint only", evidence(answered(), ran(1)), Outcome.OK, "final answer"),
    ("a reply of unknown kind", evidence(answered(last_reply=None)), Outcome.OK, "cannot be told"),
    ("a recovered engine failure", evidence(answered(failed=1)), Outcome.OK, "final answer"),
    ("an earlier undelivered call", evidence(answered(undelivered=1)), Outcome.OK, "final answer"),
    ("limit of calls", evidence(asked(limit="calls"), ran(4)), Outcome.TRUNCATED, "session limit of calls (2 calls, 20 sampled tokens)"),
    ("limit of tokens, program crashed on it", evidence(asked(limit="tokens"), crash="x"), Outcome.TRUNCATED, "limit of tokens"),
    ("the limit fired first, then the deadline", evidence(asked(limit="calls"), LATE), Outcome.TRUNCATED, "session limit of calls"),
    ("overflow at the first prompt", evidence(nothing(overflow=True, refused=1)), Outcome.TRUNCATED, "context window"),
    ("tool output filled the window", evidence(asked(overflow=True), crash="rc 1"), Outcome.TRUNCATED, "context window"),
    ("cut at its length", evidence(answered(last_status="length", last_reply="length")), Outcome.TRUNCATED, "length limit"),
    ("cut at its length, tap of the edge missing", evidence(answered(last_status="length", last_reply=None)), Outcome.TRUNCATED, "length"),
    (
        "cut at its length, program crashed on it",
        evidence(answered(last_status="length", last_reply="length"), crash="x"),
        Outcome.TRUNCATED,
        "length",
    ),
    ("deadline", evidence(asked(), LATE), Outcome.TRUNCATED, "the task's agent.timeout_sec of 180 s, stopped after 180.2 s"),
    ("deadline under a call", evidence(asked(last_status="cancelled"), LATE), Outcome.TRUNCATED, "agent.timeout_sec"),
    ("hung after its answer", evidence(answered(), LATE), Outcome.TRUNCATED, "deadline"),
    ("deadline while the engine was gone", evidence(asked(failed=1), LATE), Outcome.ENGINE, "lost with their replica"),
    ("gave up quietly when the engine was gone", evidence(asked(failed=2), ran(0)), Outcome.ENGINE, "2 calls failed"),
    (
        "words about memory after a session limit",
        evidence(asked(limit="calls"), ran(3, "memory", "out of memory")),
        Outcome.TRUNCATED,
        "calls",
    ),
    ("own turn limit", evidence(asked(), ran(3)), Outcome.TRUNCATED, "ended by itself after a tool call"),
    ("handed in by a tool call", evidence(asked(), ran(0), submitted=True), Outcome.OK, "handed in"),
    ("handed in, but the program crashed", evidence(asked(), ran(1), crash="boom", submitted=True), Outcome.HARNESS, "boom"),
    ("never called", evidence(nothing(), ran(0)), Outcome.HARNESS, "never called the model; exit code 0"),
    ("never called, crashed", evidence(nothing(), ran(139), crash="died of signal 11"), Outcome.HARNESS, "died of signal 11"),
    ("never called until the deadline", evidence(nothing(), LATE), Outcome.HARNESS, "stopped after 180.2 s"),
    ("crashed", evidence(asked(), ran(1), crash="ended with exit code 1: Traceback"), Outcome.HARNESS, "Traceback"),
    ("crashed after an answer of a part of it", evidence(answered(), ran(139), crash="died of signal 11"), Outcome.HARNESS, "signal 11"),
    ("gave its call up", evidence(answered(last_status="cancelled", last_reply=None)), Outcome.HARNESS, "gave its last call up"),
    ("out of memory", evidence(asked(), ran(None, "memory", "more than 512 MB")), Outcome.SANDBOX, "more than 512 MB"),
    ("too many processes, and a limit of the session", evidence(asked(limit="calls"), ran(None, "processes", "p")), Outcome.SANDBOX, "p"),
    ("engine failed", evidence(asked(last_status="failed", failed=4)), Outcome.ENGINE, "4 failed"),
    ("engine fails until the deadline", evidence(asked(last_status="failed", failed=4), LATE), Outcome.ENGINE, "4 failed"),
    ("lost with its replica, gave up", evidence(asked(failed=1), ran(5), no_answer="gave up"), Outcome.ENGINE, "gave up"),
    ("lost with its replica, crashed", evidence(asked(failed=1), ran(1), crash="boom"), Outcome.ENGINE, "boom"),
    ("lost with its replica, nothing else", evidence(nothing(failed=1), ran(5)), Outcome.ENGINE, "none succeeded"),
    ("proxy refused all", evidence(nothing(refused=3)), Outcome.PROXY, "refused all 3"),
    ("proxy is away", evidence(nothing(), ran(5), proxy_answers=False), Outcome.PROXY, "does not answer"),
    ("proxy was away", evidence(nothing(), ran(5), no_answer="connection refused"), Outcome.PROXY, "connection refused"),
    ("proxy was lost on the way", evidence(asked(), ran(5), no_answer="gave up after 300 s"), Outcome.PROXY, "gave up after 300 s"),
    ("proxy is away at the deadline", evidence(asked(), LATE, proxy_answers=False), Outcome.PROXY, "does not answer"),
    ("still trying at the deadline", evidence(asked(), LATE, no_answer="refused; next try in 8 s"), Outcome.PROXY, "next try"),
    ("reply lost", evidence(answered(last_reply=None, undelivered=1)), Outcome.PROXY, "not delivered"),
    ("a fault of ours", Fault(Outcome.TASK, "task.toml is missing"), Outcome.TASK, "task.toml is missing"),
]


@pytest.mark.parametrize(("seen", "outcome", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_classify(seen: Evidence | Fault, outcome: Outcome, words: str) -> None:
    found, detail = classify(seen)
    assert found is outcome
    assert words in detail


def test_every_class_but_the_verifier_s_is_reached() -> None:
    assert {case[2] for case in CASES} == set(Outcome) - {Outcome.VERIFIER}


@pytest.mark.parametrize("before", [Outcome.OK, Outcome.TRUNCATED])
def test_a_verifier_without_a_reward_is_its_own_outcome(before: Outcome) -> None:
    found, detail = verified(before, "final answer", "reward.json is empty")
    assert found is Outcome.VERIFIER
    assert "reward.json is empty" in detail and "final answer" in detail
    assert verified(before, "final answer", None) == (before, "final answer")


def test_other_classes_are_not_touched_by_verification() -> None:
    assert verified(Outcome.HARNESS, "x", "reward.json is empty") == (Outcome.HARNESS, "x")
