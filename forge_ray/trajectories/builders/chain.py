"""Calls merged while each prompt begins, token for token, with everything of the call before it.

A call joins the sample whose tokens are the longest prefix of its prompt; the rest of the prompt (tool results, the next user
message, tokens of calls that are not trained) is context. Where no sample fits, because the harness rewrote its history, compacted
it, or started a second agent, a new sample begins with the whole prompt as context. So a sample's ids always are the prompt and the
sampled ids of its last call, and each logprob is conditioned on exactly the tokens it was conditioned on in the engine.

Only trained calls extend a sample: a reply that was never delivered, or was replaced by a retry, does not end the chain for the
call that took its place. Of two calls that both continue one call, the one that completed first joins it, the other begins anew, so
that the shared tokens are trained once.

In the trie of the rollout's calls, "the sample's tokens are a prefix of the prompt" reads: the node where the sample ends lies on the path
to the node where the prompt ends. No token is compared twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from forge_ray.trajectories.builders.rows import Row, table
from forge_ray.trajectories.trajectory import Trajectory
from forge_ray.trajectories.trie import ROOT, Ends, Trie, add


def build(trajectories: Sequence[Trajectory]) -> pa.Table:
    """Samples in the order of their first call; see `forge_ray.trajectories.builders`."""
    rows = []
    for trajectory in trajectories:
        trie = Trie()
        ends = add(trie, trajectory)
        rows.append([Row(trie.spell(ends.whole[calls[-1]]), calls) for calls in _merge(trajectory, trie, ends)])
    return table(trajectories, rows)


def merged(trajectory: Trajectory) -> list[list[int]]:
    """The trained calls of each sample, by ordinal."""
    trie = Trie()
    return _merge(trajectory, trie, add(trie, trajectory))


def _merge(trajectory: Trajectory, trie: Trie, ends: Ends) -> list[list[int]]:
    samples: list[list[int]] = []
    ending: dict[int, list[int]] = {}
    """Node -> the samples that end there."""
    for ordinal in sorted(trajectory.shares):
        node = ends.prompt[ordinal]
        while node != ROOT and not ending.get(node):
            node = trie.parent[node]
        if node == ROOT:
            sample = len(samples)
            samples.append([])
        else:
            sample = min(ending[node])
            ending[node].remove(sample)
        samples[sample].append(ordinal)
        ending.setdefault(ends.whole[ordinal], []).append(sample)
    return samples
