"""The programs of several ranks brought into step, for engines whose forward and backward are collective (ZeRO-2, ZeRO-3).

There every rank must make the same kind of pass at the same time: a forward gathers each layer's weights in order, a backward in reverse,
so equal counts are not enough. The common course is merged from what each rank wants next: `f` before `F` before `B`. A rank that wants
something else, or nothing, makes a dummy pass of one token. Invariant: along the course every rank has the same number of graphs alive,
its own and dummies, so wherever the course says `B` each has one to undo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def course(programs: Sequence[str]) -> str:
    """The merged course of these programs (`Program.letters` of every rank)."""
    at = [0] * len(programs)
    merged: list[str] = []
    alive = 0
    while True:
        wanted = {letters[place] for letters, place in zip(programs, at, strict=True) if place < len(letters)}
        letter = next((letter for letter in "fFB" if letter in wanted), "B" if alive else "")
        if not letter:
            return "".join(merged)
        merged.append(letter)
        alive += {"f": 0, "F": 1, "B": -1}[letter]
        at = [place + letters.startswith(letter, place) for letters, place in zip(programs, at, strict=True)]


def follow(letters: str, merged: str) -> Iterator[bool]:
    """For each letter of the course, whether it is this rank's own next operation (else: a dummy)."""
    place = 0
    for letter in merged:
        own = letters.startswith(letter, place)
        place += own
        yield own
    if place != len(letters):
        raise ValueError(f"the course ends before the program does: {place} of {len(letters)} operations")
