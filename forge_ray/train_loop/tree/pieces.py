"""A forest in pieces for a budget of tokens, and the order in which they run.

A piece is a range of flat tokens that one forward pass computes. Since the order is depth first, what a piece needs from before is a path:
keys and values of the tokens above its first one, each seen by a prefix of the piece. The piece that computed them *holds* them, with the
gradients that later pieces send back, until its own backward adds these in. So any cuts give the same gradients; only time and memory
depend on where they are. A program is a list of operations on pieces:

    F i   forward of piece i, its graph stays alive        B i   backward of piece i
    f i   forward without a graph, for its keys and values alone (the piece runs a second time, F and B, when all below it is done)

Invariants: backwards come in the reverse order of their forwards (what was run last is undone first), every piece's after those of all
pieces that see it; the tokens whose graphs are alive at once are at most the budget, whatever the length of a path. (`f` costs a third of
a piece's work; it is taken where a kept graph would leave too little room.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from forge_ray.train_loop.tree.forest import segments

Operation = tuple[Literal["f", "F", "B"], int]


class Own(NamedTuple):
    """A segment's part in a piece: its keys [start, end) against the queries [start, until), causal; local indices."""

    start: int
    end: int
    until: int


class Past(NamedTuple):
    """Keys [first, end) of those that piece `piece` holds, seen by the local queries [0, until)."""

    piece: int
    first: int
    end: int
    until: int


class Cut(NamedTuple):
    """End of a piece, and whether it is to run twice rather than stay alive while others see it."""

    end: int
    twice: bool


@dataclass(frozen=True)
class Piece:
    """Flat tokens [start, end)."""

    start: int
    end: int
    past: tuple[Past, ...]
    """From the root down."""
    own: tuple[Own, ...]
    """Depth first."""
    held: np.ndarray
    """int64: local indices, rising, of the tokens that later pieces see."""

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Program:
    """Pieces in the order of the tokens, and what to do with them."""

    pieces: tuple[Piece, ...]
    operations: tuple[Operation, ...]

    @property
    def letters(self) -> str:
        """The operations without their pieces."""
        return "".join(letter for letter, _ in self.operations)

    def alive(self) -> int:
        """Most tokens whose graphs are alive at once."""
        now = most = 0
        for letter, number in self.operations:
            if letter == "B":
                now -= len(self.pieces[number])
            else:
                most = max(most, now + len(self.pieces[number]))
                now += len(self.pieces[number]) if letter == "F" else 0
        return most

    def computed(self) -> int:
        """Tokens of all forward passes."""
        return sum(len(self.pieces[number]) for letter, number in self.operations if letter != "B")


def plan(sub_end: np.ndarray, position: np.ndarray, budget: int) -> Program:
    """The program of a forest whose graphs hold at most `budget` tokens at once. `sub_end`, `position`: (U,), as in `Forest`."""
    return program(sub_end, position, cuts(sub_end, position, budget))


def cuts(sub_end: np.ndarray, position: np.ndarray, budget: int) -> list[Cut]:
    """Where to cut. Whole subtrees go together while they fit. One that does not gives away its top: about half of the room, kept alive
    while that leaves a quarter of the budget to those below, else run twice."""
    budget = max(1, budget)
    count = len(sub_end)
    starts = segments(sub_end, position)[:, 0]
    found: list[Cut] = []
    here = 0
    rooms = [(count, budget)]
    while here < count:
        while rooms[-1][0] <= here:
            rooms.pop()
        end, room = rooms[-1]
        done = here
        while done < end and sub_end[done] - here <= room:
            done = int(sub_end[done])
        if done > here:
            found.append(Cut(done, False))
            here = done
            continue
        until = int(sub_end[here])
        after = np.searchsorted(starts, here, "right")
        first = int(starts[after]) if after < len(starts) else count
        half = room // 2
        if first - here <= half and room - half >= max(1, budget // 4):
            top = int(starts[np.searchsorted(starts, here + half, "right") - 1])
            twice = False
            rooms.append((until, room - (top - here)))
        else:
            # The first boundary beyond half of the room, or where there is none, all of the room.
            beyond = np.searchsorted(starts, here + max(1, half), "left")
            top = min(int(starts[beyond]) if beyond < len(starts) else count, here + room)
            twice = True
            rooms.append((until, room))
        found.append(Cut(top, twice))
        here = top
    return found


def program(sub_end: np.ndarray, position: np.ndarray, cuts: Sequence[Cut]) -> Program:
    """The program for given cuts (rising; the last ends the forest). Any cuts are right."""
    pieces: list[Piece] = []
    operations: list[Operation] = []
    path: list[tuple[Past, int]] = []  # open runs of held tokens from the root down (`until` unused), and the end of their subtree
    stack: list[tuple[int, int, bool]] = []  # (piece, end of the last that sees it, twice)
    parts = segments(sub_end, position)

    def undo(upto: int) -> None:
        while stack and stack[-1][1] <= upto:
            number, _, twice = stack.pop()
            if twice:
                operations.append(("F", number))
            operations.append(("B", number))

    start = 0
    for number, cut in enumerate(cuts):
        end = cut.end
        undo(start)
        while path and path[-1][1] <= start:
            path.pop()
        held = np.flatnonzero(sub_end[start:end] > end)
        pieces.append(Piece(start, end, _past(path, start, end), _own(parts, start, end), held))
        if len(held):
            ends = sub_end[start + held]
            breaks = np.flatnonzero(np.diff(ends, prepend=-1))
            for first, last in zip(breaks, [*breaks[1:], len(held)], strict=True):
                path.append((Past(number, int(first), int(last), 0), int(ends[first])))
            operations.append(("f" if cut.twice else "F", number))
            stack.append((number, int(ends[0]), cut.twice))
        else:
            operations.append(("F", number))
            operations.append(("B", number))
        start = end
    if start != len(sub_end):
        raise ValueError(f"the cuts end at {start}, the forest at {len(sub_end)}")
    undo(len(sub_end))
    return Program(tuple(pieces), tuple(operations))


def _past(path: list[tuple[Past, int]], start: int, end: int) -> tuple[Past, ...]:
    merged: list[Past] = []
    for run, until in path:
        seen = min(until, end) - start
        last = merged[-1] if merged else None
        if last is not None and (last.piece, last.end, last.until) == (run.piece, run.first, seen):
            merged[-1] = last._replace(end=run.end)
        else:
            merged.append(run._replace(until=seen))
    return tuple(merged)


def _own(parts: np.ndarray, start: int, end: int) -> tuple[Own, ...]:
    first = int(np.searchsorted(parts[:, 1], start, "right"))
    last = int(np.searchsorted(parts[:, 0], end, "left"))
    inside = np.stack([parts[first:last, 0].clip(min=start), parts[first:last, 1].clip(max=end), parts[first:last, 2].clip(max=end)], 1)
    return tuple(Own(*row) for row in (inside - start).tolist())
