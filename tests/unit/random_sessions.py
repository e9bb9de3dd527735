"""Hypothesis strategies: sessions as harnesses make them, with forks, retries, sub-agents, replies nobody got, and versions that change."""

from __future__ import annotations

from hypothesis import strategies as st

from forge_ray.trajectories.call import Call
from forge_ray.trajectories.credit import by_completion
from forge_ray.trajectories.trajectory import Share, Trajectory
from tests.built import trajectory
from tests.unit.making import make_call

TOKENS = st.lists(st.integers(0, 2), max_size=3)
"""Few different tokens, so that prefixes meet by chance as well."""
NUMBERS = st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0])
"""Exact in float32, sums too."""


@st.composite
def sessions(draw: st.DrawFn, session: str = "g00000-0.0") -> list[Call]:
    """Calls by completion. A prompt may continue any earlier call, or a part of it, and say so (`parent`, `shared`) or not; the call that
    it continues may end after it."""
    count = draw(st.integers(0, 9))
    ends = draw(st.permutations(range(count)) if draw(st.booleans()) else st.just(range(count)))
    calls: list[Call] = []
    for order in range(count):
        history, link = [7], {}
        if calls and draw(st.integers(0, 3)):
            earlier = draw(st.sampled_from(calls))
            history = [*earlier.prompt_ids, *earlier.ids]
            if draw(st.integers(0, 4)) == 0:
                history = history[: draw(st.integers(1, len(history)))]
            if shared := draw(st.sampled_from([0, len(history)]) | st.integers(0, len(history))):
                link = {"parent": earlier.id, "shared": shared}
        repeat = calls and draw(st.integers(0, 7)) == 0
        earlier = draw(st.sampled_from(calls)) if repeat else None
        prompt = earlier.prompt_ids if earlier else [*history, *draw(TOKENS)]
        ids = earlier.ids if earlier and draw(st.booleans()) else draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        cut = draw(st.integers(0, len(ids)))
        spans = [("0.1", 0, cut), ("0.2", cut, len(ids))]
        calls.append(
            make_call(
                prompt,
                ids,
                order=order,
                session=session,
                ended=100.5 + ends[order],
                kind=draw(st.sampled_from(["agent", "agent", "subagent", "compaction", "aux"])),
                logprobs=draw(st.lists(st.floats(-30, 0, width=32), min_size=len(ids), max_size=len(ids))),
                spans=[span for span in spans if span[1] < span[2]],
                sampling={"temperature": draw(st.sampled_from([0.5, 1.0]))},
                delivered=draw(st.sampled_from([True, True, True, False])),
                masked_by_grammar=draw(st.sampled_from([False, False, False, True])),
                superseded_by=draw(st.sampled_from([None, None, None, "other"])),
                **({} if earlier else link),
            )
        )
    return by_completion(calls)


@st.composite
def shares(draw: st.DrawFn, calls: list[Call]) -> dict[int, Share]:
    """Some of the calls that may be trained, with any advantage and weight."""
    trainable = [ordinal for ordinal, call in enumerate(calls) if call.trainable]
    chosen = [ordinal for ordinal in trainable if draw(st.integers(0, 4))]
    return {ordinal: Share(draw(NUMBERS), draw(st.sampled_from([0.0, 0.5, 1.0]))) for ordinal in chosen}


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[Call], Trajectory]]:
    """A few rollouts, which may have a beginning in common, or sample the very same."""
    found: list[tuple[list[Call], Trajectory]] = []
    for number in range(draw(st.integers(1, 4))):
        name = f"g{number:05d}-0.0"
        again = found and draw(st.integers(0, 4)) == 0
        calls = draw(st.sampled_from(found))[0] if again else draw(sessions(session=name))
        made = trajectory(calls, rollout=name)
        made.shares = draw(shares(calls))
        found.append((calls, made))
    return found
