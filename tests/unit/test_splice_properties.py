"""Random conversation trees with replies that come back in other tokens: what a prompt as used is made of, also after a restart."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_ray.config import Limits
from forge_ray.serve_proxy.placing import Asked, Placement
from forge_ray.serve_proxy.session_index import SessionIndex
from forge_ray.trajectories.call import Call
from tests.built import chains
from tests.unit.making import make_call
from tests.unit.toy_chat import END, IDS, ToyReader, encode, pieces, render, say

WORDS = ["hello", "he", "llo", "lo", "a b", "\n", "more", "{", '"', "assistant"]


class Harness:
    """A harness that keeps a tree of conversations, a model that samples in odd tokens, and the index between them."""

    def __init__(self, seed: int, *, harmful: float, branching: float = 0.15) -> None:
        self.random, self.harmful, self.branching = random.Random(seed), harmful, branching
        self.reader = ToyReader()
        self.index = self.make_index()
        self.calls: list[Call] = []
        self.placed: dict[str, Placement] = {}
        self.rendered: dict[str, list[int]] = {}
        self.branches: list[list[dict[str, Any]]] = [[{"role": "user", "content": "go"}]]

    def make_index(self) -> SessionIndex:
        index = SessionIndex("r", Limits())
        index.reader = self.reader
        return index

    def words(self, most: int = 4) -> str:
        return "".join(self.random.choices(WORDS, k=self.random.randint(0, most)))

    def reply(self) -> tuple[str, str]:
        """(as sampled, as the harness keeps it)."""
        chosen = self.random.random
        thinking, text = (self.words() if chosen() < 0.3 else ""), self.words()
        arguments = {self.words(1) + str(n): self.random.choice([1, True, 2.0, "x", [1, {"b": 1, "a": 2}]]) for n in range(2)}
        calls = [("run", arguments)] if chosen() < 0.5 else []
        sampled = say(text, *((name, json.dumps(given, sort_keys=False)) for name, given in calls), thinking=thinking)
        if chosen() < self.harmful:
            return sampled, say(text + "!", *calls)
        kept = {name: dict(reversed(given.items())) for name, given in calls}
        separators = self.random.choice([(",", ":"), (", ", ": ")])
        written = [(name, json.dumps(given, separators=separators)) for name, given in kept.items()]
        strip = str.strip if chosen() < 0.5 else str
        return sampled, say(strip(text), *written, thinking=strip(thinking) or thinking)

    def sample(self, text: str) -> list[int]:
        """The text in tokens of a random cut."""
        ids, at = [], 0
        while at < len(text):
            length = self.random.randint(1, 7)
            piece = next(text[at : at + n] for n in range(length, 0, -1) if text[at : at + n] in IDS)
            ids.append(IDS[piece])
            at += len(piece)
        return ids + pieces(END)

    def step(self) -> None:
        """One request, of some branch of the tree, and its reply."""
        branch = self.random.randrange(len(self.branches))
        messages = self.branches[branch]
        if len(messages) > 2 and self.random.random() < self.branching:  # go on from an earlier point, another way
            messages = [*messages[: self.random.randrange(1, len(messages), 2)], {"role": "user", "content": f"or {len(self.calls)}"}]
            messages = messages if messages[-2]["role"] == "assistant" else messages[-1:]
            self.branches.append(messages)
            branch = len(self.branches) - 1
        call, prompt = f"c{len(self.calls):03d}", render(messages)
        placed = self.index.find("s", prompt, Asked())
        self.index.enter("s", call, placed)
        sampled, kept = self.reply()
        ids = self.sample(sampled)
        self.index.sampled("s", len(ids))
        self.index.end("s", call, ids, "finished", "agent", float(len(self.calls)))
        self.index.delivered("s", call, "answer")
        self.placed[call], self.rendered[call] = placed, prompt
        self.calls.append(
            make_call(
                list(placed.prompt),
                ids,
                order=len(self.calls),
                session="s",
                id=call,
                conversation=placed.conversation,
                parent=placed.parent,
                shared=placed.shared,
                splice=placed.splice,
                reason=placed.reason,
                rerendered=placed.found.rerendered,
                overlap=placed.found.overlap,
            )
        )
        user = {"role": "user", "content": self.random.choice(["more", "\nok", f"n{len(self.calls)}"])}
        self.branches[branch] = [*messages, {"role": "assistant", "content": kept}, user]


def made_of(harness: Harness, call: Call) -> list[tuple[int, bool]]:
    """The prompt as used, token by token: (id, it is a sampled token of a recorded call)."""
    placed, by_id = harness.placed[call.id], {known.id: known for known in harness.calls}
    if placed.found.continues:
        assert placed.parent is not None
        parent = by_id[placed.parent]
        before = made_of(harness, parent) + [(token, True) for token in parent.ids]
    elif placed.found.parent is not None:
        before = made_of(harness, by_id[placed.found.parent.call])
    else:
        before = []
    return before + [(token, False) for token in harness.rendered[call.id][placed.found.rest :]]


def as_rendered(harness: Harness, call: Call) -> list[int]:
    """The prompt as used with every spliced reply put back as it was rendered."""
    placed, by_id = harness.placed[call.id], {known.id: known for known in harness.calls}
    if placed.found.parent is None:
        return list(placed.prompt)
    parent = by_id[placed.found.parent.call]
    before = as_rendered(harness, parent)
    if placed.found.continues == "spliced":
        assert placed.found.rerendered is not None
        before = before[: len(before) - placed.found.overlap] + placed.found.rerendered
    elif placed.found.continues:
        before = before + parent.ids
    return before + list(placed.prompt)[len(parent.prompt_ids) + (len(parent.ids) if placed.found.continues else 0) :]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.3]))
def test_a_prompt_is_made_of_sampled_tokens_and_of_rendered_ones(seed: int, harmful: float) -> None:
    harness = Harness(seed, harmful=harmful)
    for _ in range(14):
        harness.step()
    for call in harness.calls:
        placed = harness.placed[call.id]
        assert [token for token, _ in made_of(harness, call)] == call.prompt_ids
        assert as_rendered(harness, call) == harness.rendered[call.id]
        assert (call.reason is None) <= (call.splice in ("new", "exact"))
        if placed.parent is not None:
            parent = next(known for known in harness.calls if known.id == placed.parent)
            assert (parent.prompt_ids + parent.ids)[: placed.shared] == call.prompt_ids[: placed.shared]
        if placed.found.continues == "exact":
            assert placed.found.rerendered is None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**9))
def test_harmless_changes_never_fork(seed: int) -> None:
    harness = Harness(seed, harmful=0.0, branching=0.0)
    for _ in range(12):
        harness.step()
    assert harness.calls[0].splice == "new" and all(call.splice in ("exact", "spliced") for call in harness.calls[1:])
    assert len(chains(harness.calls)) == 1


def test_the_random_trees_hold_every_case() -> None:
    harnesses = [Harness(seed, harmful=0.3) for seed in range(20)]
    for harness in harnesses:
        for _ in range(14):
            harness.step()
    calls = [call for harness in harnesses for call in harness.calls]
    assert {call.splice for call in calls} == {"new", "exact", "spliced", "fork"}
    assert any(call.overlap for call in calls)
    assert sum(call.splice == "spliced" for call in calls) > 50 and sum(call.splice == "fork" for call in calls) > 50


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**9), st.integers(1, 12))
def test_a_restart_changes_nothing(seed: int, at: int) -> None:
    harness, young = Harness(seed, harmful=0.2), Harness(seed, harmful=0.2)
    for number in range(14):
        harness.step()
        if number == at:
            young.index = young.make_index()
            young.index.restore("s", young.calls, closed=False, limit=None)
        young.step()
        one, other = harness.calls[-1], young.calls[-1]
        assert (one.prompt_ids, one.splice, one.parent, one.shared) == (other.prompt_ids, other.splice, other.parent, other.shared)
        assert (one.rerendered, one.conversation) == (other.rerendered, other.conversation)


def test_eight_rollouts_of_harmless_changes_are_eight_samples() -> None:
    built = []
    for rollout in range(8):
        index, reader = SessionIndex("r", Limits()), ToyReader()
        index.reader = reader
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {rollout}"}]
        calls: list[Call] = []
        for number in range(8):
            placed = index.place("s", render(messages), f"c{number}")
            given = {"path": f"p{number}", "lines": [1, 2], "all": number % 2 == 0}
            ids = encode(say("I do it. ", ("edit", json.dumps(given, separators=(",", ":"))))) + pieces(END)
            index.end("s", f"c{number}", ids, "finished", "agent", float(number))
            calls.append(make_call(list(placed.prompt), ids, order=number, session=f"s{rollout}", splice=placed.splice))
            kept = say("I do it.", ("edit", json.dumps(dict(sorted(given.items())))))
            messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": f"done {number}"}]
        assert [call.splice for call in calls] == ["new"] + ["spliced"] * 7
        built += chains(calls)
    assert len(built) == 8 and all(sum(sample.mask) == sum(len(call.ids) for call in calls) for sample in built)
