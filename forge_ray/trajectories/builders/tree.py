"""A token trie: each token that calls share is stored once, and trained at each call that sampled it.

    system, task ─┬─ reply 1 ─ result ─┬─ reply 2 ─ …          one row: the tokens depth first, `sub_end` says whose subtree is where
                  │                    └─ reply 2' (a retry)
                  └─ the same task again, another rollout

A trie spans one rollout, all rollouts of a step (the harness's long system prompt is in each of them), or a set of demonstrations. What
it holds does not depend on who wrote the history: a template that strips reasoning costs the tree its few new tokens, where a chain begins
anew with the whole prompt. See `tree_schema` for the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.builders.rows import joined
from forge_ray.trajectories.trajectory import Trajectory, TrajectoryError
from forge_ray.trajectories.tree_rows import Tree, table
from forge_ray.trajectories.trie import ROOT, Trie, add


def build(trajectories: Sequence[Trajectory], *, span: str = "step") -> pa.Table:
    """Rows of `TREE_SCHEMA`: one for all (`span` `step`) or one for each (`rollout`). Trajectories without a trained call are left out."""
    trained = [trajectory for trajectory in trajectories if trajectory.shares]
    together = [trained] if span == "step" and trained else [[trajectory] for trajectory in trained]
    return table([_tree(members) for members in together])


def of_sequences(sequences: Sequence[np.ndarray], trained: Sequence[np.ndarray]) -> pa.Table:
    """One trie of sequences that nobody sampled, as demonstrations are: token ids (T,) each, and the places (n,), rising from 1, of its
    tokens that are trained. `rollouts` are their numbers; emissions have weight and advantage 1, step -1, logprob 0, temperature 1, and
    `call` counts the runs of trained tokens."""
    trie = Trie()
    ends, emitted, kept = [], [], []
    for number, (ids, places) in enumerate(zip(sequences, trained, strict=True)):
        if len(places):
            if places[0] < 1:
                raise TrajectoryError(f"sequence {number}: nothing predicts its first token")
            kept.append(number)
            ends.append(trie.insert(ROOT, 0, ids.astype(np.int32)))
            emitted.append(places)
    if not kept:
        return table([])
    flat = _Flat(trie, set(ends))
    counts = [len(places) for places in emitted]
    runs = [np.cumsum(np.diff(places, prepend=places[0]) > 1) for places in emitted]
    paths = [flat.path(end, 0) for end in ends]
    at = joined([path[places - 1] for path, places in zip(paths, emitted, strict=True)], np.int64)
    ones = np.ones(len(at), np.float32)
    return table(
        [
            flat.tree(
                at=at,
                token=flat.ids[joined([path[places] for path, places in zip(paths, emitted, strict=True)], np.int64)],
                logprobs=0 * ones,
                steps=np.full(len(at), -1),
                temperature=ones,
                advantage=ones,
                weight=ones,
                owner=np.repeat(np.arange(len(kept)), counts),
                call=joined(runs, np.int64),
                rollouts=[str(number) for number in kept],
                groups=[-1] * len(kept),
                tasks=[""] * len(kept),
                harnesses=[""] * len(kept),
                rewards=[float("nan")] * len(kept),
            )
        ]
    )


def _tree(trajectories: Sequence[Trajectory]) -> Tree:
    trie = Trie()
    ends = [add(trie, trajectory) for trajectory in trajectories]
    trained = [(owner, ordinal) for owner, trajectory in enumerate(trajectories) for ordinal in sorted(trajectory.shares)]
    flat = _Flat(trie, {ends[owner].whole[ordinal] for owner, ordinal in trained})
    calls = [trajectories[owner].calls[ordinal] for owner, ordinal in trained]
    shares = [trajectories[owner].shares[ordinal] for owner, ordinal in trained]
    counts = np.array([len(call.ids) for call in calls], np.int64)
    at = [flat.path(ends[owner].whole[ordinal], calls[index].prompt_tokens - 1)[:-1] for index, (owner, ordinal) in enumerate(trained)]
    return flat.tree(
        at=joined(at, np.int64),
        token=joined([call.ids for call in calls], np.int32),
        logprobs=joined([call.logprobs for call in calls], np.float32),
        steps=joined([call.steps for call in calls], np.int32),
        temperature=np.repeat(np.array([call.temperature for call in calls], np.float32), counts),
        advantage=np.repeat(np.array([share.advantage for share in shares], np.float32), counts),
        weight=np.repeat(np.array([share.weight for share in shares], np.float32), counts),
        owner=np.repeat(np.array([owner for owner, _ in trained], np.int32), counts),
        call=np.repeat(np.array([ordinal for _, ordinal in trained], np.int32), counts),
        rollouts=[trajectory.rollout for trajectory in trajectories],
        groups=[-1 if trajectory.group is None else trajectory.group for trajectory in trajectories],
        tasks=[trajectory.task for trajectory in trajectories],
        harnesses=[trajectory.harness for trajectory in trajectories],
        rewards=[float("nan") if trajectory.reward is None else trajectory.reward for trajectory in trajectories],
    )


class _Flat:
    """The nodes of a trie that lie on the paths to some ends, one after another, depth first."""

    def __init__(self, trie: Trie, ends: set[int]) -> None:
        self._trie = trie
        order = trie.depth_first(ends)
        lengths = np.array([len(trie.tokens[node]) for node in order], np.int64)
        starts = np.cumsum(lengths) - lengths
        self._start = dict(zip(order, starts.tolist(), strict=True))
        stop = dict(zip(order, (starts + lengths).tolist(), strict=True))
        for node in reversed(order):
            parent = trie.parent[node]
            if parent != ROOT:
                stop[parent] = max(stop[parent], stop[node])
        self.ids = joined([trie.tokens[node] for node in order], np.int32)
        self.sub_end = np.repeat(np.array([stop[node] for node in order], np.int64), lengths)
        begins = np.array([trie.begin(node) for node in order], np.int64)
        self.position = np.arange(len(self.ids)) - np.repeat(starts - begins, lengths)

    def path(self, node: int, depth: int) -> np.ndarray:
        """int64: flat indices of the tokens from place `depth` on, on the path to the end of `node`."""
        parts: list[np.ndarray] = []
        while node != ROOT and self._trie.end[node] > depth:
            start, begin, end = self._start[node], self._trie.begin(node), self._trie.end[node]
            parts.append(np.arange(start + max(0, depth - begin), start + end - begin))
            node = self._trie.parent[node]
        return joined(parts[::-1], np.int64)

    def tree(self, **columns: object) -> Tree:
        return Tree.in_trie_order(ids=self.ids, sub_end=self.sub_end, position=self.position, **columns)
