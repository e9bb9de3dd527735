"""A `Part` made of tries: tokens that calls share are computed once, see the package.

Losses see what they see of rows: one entry per emission, sequence = call, trajectory = rollout. A loss that looks at whole sequences gets
them in one part, from a forward pass over all pieces; its derivatives c by log-probability (and entropy) are numbers then, and
Σ c · log π has the loss's gradient, piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_ray.train_loop.losses import LossInputs, Total
from forge_ray.train_loop.part import Passes, Work
from forge_ray.train_loop.tree import passes as tree_passes
from forge_ray.train_loop.tree.forest import Forest
from forge_ray.train_loop.tree.pieces import plan


@dataclass(frozen=True)
class Tries:
    """See `Part`: tokens are numbered as the forest's emissions."""

    forest: Forest
    piece_tokens: int
    """Tokens whose graphs may be alive at once."""
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    """float32, (E,): further fields of `LossInputs`."""

    @property
    def steps(self) -> np.ndarray:
        return self.forest.steps

    @property
    def old_logprobs(self) -> np.ndarray:
        return self.forest.logprobs

    @property
    def origin(self) -> tuple[Sequence[str], np.ndarray, np.ndarray]:
        return self.forest.rollouts, self.forest.owner, self.forest.call

    def total(self) -> Total:
        return self.forest.total()

    def minibatches(self, parts: int, seed: int | str | None = None) -> list[Tries]:
        # Each with a forest of its own: tokens computed before an update are not those after it.
        return [self] if parts == 1 else [self.select(chosen) for chosen in self.forest.shares(parts, seed)]

    def sampled_by(self, version: int, most: int) -> Tries:
        sequence = self.forest.sequence
        chosen = np.unique(sequence[self.forest.steps == version])[:most]
        return self.select(np.isin(sequence, chosen))

    def with_scores(self, name: str, values: np.ndarray) -> Tries:
        return replace(self, scores={**self.scores, name: values})

    def score(self, module: torch.nn.Module, passes: Passes) -> np.ndarray:
        return tree_passes.score(module, self.forest, self._plan(), passes)[:, 0]

    def accumulate(self, work: Work) -> None:
        program = self._plan()
        whole = work.whole_sequences and work.passes.count(len(program.pieces)) > 1
        everything = self._inputs(work)
        known: Tensor | None = None
        if whole:
            known = self._derivatives(work, tree_passes.score(work.module, self.forest, program, work.passes))
        elif not self.forest.emissions:
            # The metrics of an update have the same names on every rank.
            nothing = torch.zeros(0, device=work.passes.device)
            work.loss(everything(np.zeros(0, np.int64), nothing, nothing))

        def loss(emissions: np.ndarray, logprobs: Tensor, entropy: Tensor) -> Tensor:
            if known is not None:
                coefficients = known[emissions]
                return (coefficients[:, 0] * logprobs + coefficients[:, 1] * entropy).sum()
            return work.loss(everything(emissions, logprobs, entropy))

        tree_passes.gradients(work.module, self.forest, program, work.passes, loss, work.backward, entropy_gradient=work.entropy_gradient)

    def _derivatives(self, work: Work, scores: np.ndarray) -> Tensor:
        """(E, 2): of the loss by log-probability and by entropy."""
        known = torch.from_numpy(scores).to(work.passes.device).requires_grad_()
        share = work.loss(self._inputs(work)(np.arange(self.forest.emissions), known[:, 0], known[:, 1]))
        return torch.autograd.grad(share, known)[0] if share.requires_grad else torch.zeros_like(known)

    def _plan(self) -> Any:
        return plan(self.forest.sub_end, self.forest.position, self.piece_tokens)

    def select(self, emissions: np.ndarray) -> Tries:
        """Only these emissions (bool, (E,))."""
        scores = {name: values[emissions] for name, values in self.scores.items()}
        return Tries(self.forest.select(emissions), self.piece_tokens, scores)

    def _inputs(self, work: Work) -> Any:
        """Makes the `LossInputs` of some emissions."""
        forest, device = self.forest, work.passes.device
        sequence = forest.sequence

        def counted(of: np.ndarray) -> np.ndarray:
            return np.bincount(of)[of].astype(np.float32) if len(of) else np.zeros(0, np.float32)

        recorded = {
            "old_logprobs": forest.logprobs, "advantages": forest.advantage, "weights": forest.weight, "sequence": sequence,
            "sequence_tokens": counted(sequence), "trajectory": forest.owner, "trajectory_tokens": counted(forest.owner),
            "position": forest.position[forest.at] + 1, "staleness": work.step - forest.steps, **self.scores,
        }  # fmt: skip
        columns = {name: torch.from_numpy(np.ascontiguousarray(values)).to(device) for name, values in recorded.items()}

        def inputs(emissions: np.ndarray, logprobs: Tensor, entropy: Tensor) -> LossInputs:
            index = torch.from_numpy(emissions).to(device)
            return LossInputs(
                logprobs=logprobs,
                entropy=entropy,
                describe=lambda place: forest.describe(int(emissions[place])),
                **{name: values[index] for name, values in columns.items()},
            )

        return inputs
