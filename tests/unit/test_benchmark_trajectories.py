"""The sessions that benchmarks are made of have the shape that they say, and the benchmark of the builders counts right."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import trajectories
from benchmarks.parts import sessions
from forge_ray.trajectories.store import calls as stored


@pytest.mark.parametrize("stripped", [False, True])
def test_a_claude_code_like_session_has_its_turns_and_its_tokens(stripped: bool) -> None:
    session = sessions.claude_code(stripped=stripped)
    assert Counter(call.kind for call in session) == {"agent": 100 + 5, "subagent": 3 * 8, "compaction": 1}
    assert sum(call.superseded for call in session) == 5
    unique = sum(len(call.new) + len(call.ids) for call in session)
    assert (abs(unique - 70_000) < 3_000) != stripped, "kept halves of replies come on top"
    assert all(call.new.tolist() for call in session) and session[0].prompt > 15_000
    again = sessions.claude_code(stripped=stripped)
    assert all((one.ids == other.ids).all() and (one.new == other.new).all() for one, other in zip(session, again, strict=True))


@pytest.mark.parametrize("session", [sessions.claude_code(unique=2_000, turns=12, agent_turns=3, stripped=True), sessions.subagents(1)])
def test_the_rows_and_the_calls_of_a_session_are_the_same(session: list[sessions.Spoken]) -> None:
    # `stored.table` refuses a prompt that does not begin as its parent and `shared` say.
    assert sessions.table([session]).equals(stored.table(sessions.calls(session)))


def test_a_group_shares_its_prompts() -> None:
    step = sessions.group(tasks=2, rollouts=3, prompt=50, common=40, turns=2)
    prompts = [session[0].new.tolist() for session in step]
    assert len(step) == 6 and len({tuple(prompt[:40]) for prompt in prompts}) == 1 and len({tuple(prompt) for prompt in prompts}) == 2


def test_the_builders_figures() -> None:
    session = sessions.claude_code(unique=3_000, turns=12, agents=2, agent_turns=3, retries=2)
    figures = trajectories.of_session(session)
    assert figures["call_tokens"] == sum(len(call.prompt_ids) + len(call.ids) for call in sessions.calls(session))
    assert [figures[name]["rows"] for name in trajectories.BUILDERS] == [12 + 2 * 3 + 1, 4, 1], "main, after compaction, two agents"
    sizes = [figures[name]["training_tokens"] for name in trajectories.BUILDERS]
    assert sizes == sorted(sizes, reverse=True)
    assert "| chain |" in trajectories.speeds("session", figures)
    assert trajectories.merged_fully(4) in (0, 0.25, 0.5, 0.75, 1)
