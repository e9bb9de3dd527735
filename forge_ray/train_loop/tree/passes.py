"""Forward and backward passes over a forest's pieces: `score` without gradients, `gradients` with them.

Each pass hands the model a piece's tokens with their own positions, and its `View`. Memory at any moment: the graphs of the pieces that are
alive (`pieces.plan` bounds their tokens) and the keys and values of the path. Where ranks must keep step every missing pass is made up for
by one of a single token, whose loss is 0 times its own score and so reaches every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_ray.train_loop.part import Passes
from forge_ray.train_loop.tree import lockstep
from forge_ray.train_loop.tree.attention import Held, View
from forge_ray.train_loop.tree.forest import Forest
from forge_ray.train_loop.tree.head import Targets, answering
from forge_ray.train_loop.tree.model import language_model, switched
from forge_ray.train_loop.tree.pieces import Own, Program

Loss = Callable[[np.ndarray, Tensor, Tensor], Tensor]
"""`loss(emissions, logprobs, entropy)`: indices (m,) of emissions of the forest, and their numbers (m,); a scalar share."""


def score(module: torch.nn.Module, forest: Forest, program: Program, passes: Passes) -> np.ndarray:
    """(E, 2): logprob and entropy of every emission, nats. Collective in lockstep."""
    found = np.zeros((forest.emissions, 2), np.float32)
    done: set[int] = set()
    with _Runner(module, forest, program, passes).ready() as runner, torch.no_grad():
        for letter, number in program.operations:
            if letter == "B":
                runner.forget(number)
            elif number not in done:
                done.add(number)
                emissions, scores = runner.forward(number)
                found = found.astype(np.promote_types(found.dtype, scores.cpu().numpy().dtype), copy=False)
                found[emissions] = scores.cpu().numpy()
        for _ in range(passes.count(len(done)) - len(done)):
            runner.dummy()
    return found


def gradients(
    module: torch.nn.Module, forest: Forest, program: Program, passes: Passes, loss: Loss, backward: Callable[[Tensor, bool], None],
    *, entropy_gradient: bool,
) -> None:  # fmt: skip
    """Add the gradients of the sum of all shares. `backward(share, last)` is called once per piece. Collective in lockstep."""
    alive: dict[int, Tensor] = {}
    dummies: list[Tensor] = []
    left = list(program.operations)[::-1]
    with _Runner(module, forest, program, passes, entropy_gradient).ready() as runner:
        steps = list(_steps(program.letters, passes))
        last = max((place for place, (letter, _) in enumerate(steps) if letter == "B"), default=-1)
        for place, (letter, own) in enumerate(steps):
            if not own:
                if letter == "B":
                    backward(dummies.pop(), place == last)
                    continue
                with torch.set_grad_enabled(letter == "F"):
                    share = runner.dummy()
                if letter == "F":
                    dummies.append(share)
                continue
            number = left.pop()[1]
            if letter == "B":
                backward(alive.pop(number), place == last)
                runner.forget(number)
            elif letter == "f":
                with torch.no_grad():
                    runner.forward(number)
            else:
                emissions, scores = runner.forward(number)
                alive[number] = loss(emissions, scores[:, 0], scores[:, 1]) if len(emissions) else 0.0 * scores.sum()


def _steps(letters: str, passes: Passes) -> Iterator[tuple[str, bool]]:
    """The course of this update, and what of it is this rank's own."""
    if not passes.lockstep or passes.ranks.world == 1:
        return ((letter, True) for letter in letters)
    import torch.distributed as dist

    programs: list[Any] = [None] * passes.ranks.world
    dist.all_gather_object(programs, letters)
    merged = lockstep.course(programs)
    return zip(merged, lockstep.follow(letters, merged), strict=True)


class _Runner:
    """The forward passes of one forest."""

    def __init__(self, module: torch.nn.Module, forest: Forest, program: Program, passes: Passes, entropy_gradient: bool = False) -> None:
        self._module, self._forest, self._program, self._passes = module, forest, program, passes
        self._entropy_gradient = entropy_gradient
        self._head: Any = language_model(module).get_output_embeddings()
        self._holders: dict[int, Held] = {}
        self._order = np.argsort(forest.at, kind="stable")
        self._bounds = np.searchsorted(forest.at[self._order], [0, *(piece.end for piece in program.pieces)])

    @contextmanager
    def ready(self) -> Iterator[_Runner]:
        """Within, the model's attention is that of pieces."""
        with ExitStack() as stack:
            stack.enter_context(switched(self._module))
            yield self
        self._holders.clear()

    def forward(self, number: int) -> tuple[np.ndarray, Tensor]:
        """A piece's emissions, (m,), and their scores, (m, 2); (1, 2) where it has none."""
        piece, forest, device = self._program.pieces[number], self._forest, self._passes.device
        emissions = self._order[self._bounds[number] : self._bounds[number + 1]]
        if len(piece.held) and number not in self._holders:
            self._holders[number] = Held(piece.held, len(piece), device)
        view = View(piece.past, piece.own, self._holders.get(number), self._holders)
        targets = Targets(forest.at[emissions] - piece.start, forest.token[emissions], forest.temperature[emissions], device)
        tokens = slice(piece.start, piece.end)
        return emissions, self._pass(forest.ids[tokens], forest.position[tokens], view, targets)

    def dummy(self) -> Tensor:
        """A pass of one token that reaches every weight with the gradient 0."""
        nothing = np.zeros(0, np.int64)
        targets = Targets(nothing, nothing, np.zeros(0, np.float32), self._passes.device)
        return 0.0 * self._pass(np.zeros(1, np.int64), np.zeros(1, np.int64), View((), (Own(0, 1, 1),), None), targets).sum()

    def forget(self, number: int) -> None:
        """No later piece sees this one."""
        self._holders.pop(number, None)

    def _pass(self, ids: np.ndarray, positions: np.ndarray, view: View, targets: Targets) -> Tensor:
        given = {
            name: torch.from_numpy(values)[None].to(self._passes.device)
            for name, values in (("input_ids", ids), ("position_ids", positions))
        }
        with self._passes.cast(), answering(self._head, targets, entropy_gradient=self._entropy_gradient):
            return self._module(**given, use_cache=False, tree=view).logits[0]
