"""A `Part` made of rows: sequences beside each other in micro-batches, each computed whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from forge_ray.train_loop import forward
from forge_ray.train_loop.forward import Microbatch, Row
from forge_ray.train_loop.losses import Total
from forge_ray.train_loop.part import Passes, Work


@dataclass(frozen=True)
class Rows:
    """See `Part`: tokens are numbered row by row."""

    rows: Sequence[Row]
    scored: tuple[str, ...] = ()
    """Names of the rows' `scores`: a part without rows has them too."""

    @property
    def steps(self) -> np.ndarray:
        return _joined([row.steps for row in self.rows], np.int64)

    @property
    def old_logprobs(self) -> np.ndarray:
        return _joined([row.old_logprobs for row in self.rows], np.float32)

    @property
    def origin(self) -> tuple[Sequence[str], np.ndarray, np.ndarray]:
        names = list(dict.fromkeys(row.name for row in self.rows))
        places = {name: place for place, name in enumerate(names)}
        owner = [np.full(len(row.positions), places[row.name]) for row in self.rows]
        calls = [np.zeros(len(row.positions)) if row.calls is None else row.calls for row in self.rows]
        return names, _joined(owner, np.int64), _joined(calls, np.int64)

    def total(self) -> Total:
        return forward.total(self.rows)

    def minibatches(self, parts: int, seed: int | str | None = None) -> list[Rows]:
        return [replace(self, rows=part) for part in forward.minibatches(self.rows, parts, seed)]

    def sampled_by(self, version: int, most: int) -> Rows:
        return replace(self, rows=[row for row in self.rows if (row.steps == version).any()][:most])

    def with_scores(self, name: str, values: np.ndarray) -> Rows:
        ends = np.cumsum([len(row.positions) for row in self.rows])[:-1]
        parts = np.split(values, ends) if self.rows else []
        rows = [replace(row, scores={**row.scores, name: own}) for row, own in zip(self.rows, parts, strict=True)]
        return Rows(rows, (*self.scored, name))

    def score(self, module: torch.nn.Module, passes: Passes) -> np.ndarray:
        found: dict[int, np.ndarray] = {}
        with torch.no_grad():
            for members, batch in self._batches(passes):
                with passes.cast():
                    logprobs, _ = forward.token_logprobs(module, batch)
                ends = np.cumsum([len(self.rows[index].positions) for index in members])[:-1]
                found.update(zip(members, np.split(logprobs.cpu().numpy(), ends), strict=False))
        return _joined([found[index] for index in range(len(self.rows))], np.float32)

    def accumulate(self, work: Work) -> None:
        batches = self._batches(work.passes)
        for index, (_, batch) in enumerate(batches):
            with work.passes.cast():
                logprobs, entropy = forward.token_logprobs(work.module, batch, entropy=work.entropy, entropy_gradient=work.entropy_gradient)
            inputs = batch.loss_inputs(logprobs, work.step, entropy=entropy)
            work.backward(work.loss(inputs), index == len(batches) - 1)

    def _batches(self, passes: Passes) -> list[tuple[list[int], Microbatch]]:
        """Micro-batches with the rows' numbers in them, and as many empty ones as the other ranks have more. Never none: an empty one has
        the metrics' names, a loss of 0, and a gradient of 0 for every weight."""
        cuts = forward.cuts(self.rows, passes.max_tokens, packed=passes.packed) or [[]]
        cuts += [[]] * (passes.count(len(cuts)) - len(cuts))

        def batch(cut: list[int]) -> Microbatch:
            return forward.collate([self.rows[index] for index in cut], passes.device, packed=passes.packed, scores=self.scored)

        return [(cut, batch(cut)) for cut in cuts]


def _joined(values: Sequence[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate([*values, np.zeros(0, kind)]).astype(kind, copy=False)
