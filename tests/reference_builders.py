"""The builders by the book, on lists: what the real ones (`forge_ray.trajectories.builders`) must give, and what they are timed against."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from forge_ray.trajectories.call import Call, version_step


@dataclass
class Sample:
    """Per-token lists of one length."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    temperature: list[float] = field(default_factory=list)
    call: list[int] = field(default_factory=list)

    def given(self, ids: Iterable[int]) -> None:
        """Append tokens that are context only."""
        ids = list(ids)
        self._append(ids, False, [0.0] * len(ids), [-1] * len(ids), 1.0, -1)

    def sampled(self, call: Call, ordinal: int) -> None:
        """Append the sampled tokens of a call."""
        self._append(call.ids, True, call.logprobs, [version_step(label) for label in call.versions()], call.temperature, ordinal)

    def _append(self, ids: list[int], mask: bool, logprobs: list[float], steps: list[int], temperature: float, call: int) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.steps += steps
        self.temperature += [temperature] * len(ids)
        self.call += [call] * len(ids)


def per_call(calls: Sequence[Call], chosen: Collection[int]) -> list[Sample]:
    samples = []
    for ordinal in sorted(chosen):
        sample = Sample()
        sample.given(calls[ordinal].prompt_ids)
        sample.sampled(calls[ordinal], ordinal)
        samples.append(sample)
    return samples


def chain(calls: Sequence[Call], chosen: Collection[int]) -> list[Sample]:
    samples: list[Sample] = []
    for ordinal in sorted(chosen):
        prompt = calls[ordinal].prompt_ids
        best = None
        for sample in samples:
            if (best is None or len(sample.ids) > len(best.ids)) and prompt[: len(sample.ids)] == sample.ids:
                best = sample
        if best is None:
            samples.append(best := Sample())
        best.given(prompt[len(best.ids) :])
        best.sampled(calls[ordinal], ordinal)
    return samples


@dataclass
class Node:
    """One token of a trie."""

    children: dict[int, Node] = field(default_factory=dict)
    emitted: list[tuple[int, int, int, float]] = field(default_factory=list)
    """(rollout, call, place in the call, logprob) of the calls that sampled this token."""


def tree(rollouts: Sequence[tuple[Sequence[Call], Collection[int]]]) -> Node:
    """The trie of the chosen calls of some rollouts; the root stands for no token."""
    root = Node()
    for rollout, (calls, chosen) in enumerate(rollouts):
        for ordinal in sorted(chosen):
            node = root
            for token in calls[ordinal].prompt_ids:
                node = node.children.setdefault(token, Node())
            for place, (token, logprob) in enumerate(zip(calls[ordinal].ids, calls[ordinal].logprobs, strict=True)):
                node = node.children.setdefault(token, Node())
                node.emitted.append((rollout, ordinal, place, logprob))
    return root
