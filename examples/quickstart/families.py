"""Six families of small shell problems, each with the strategies, right and wrong, that the teacher knows.

A problem is drawn from one of three splits. Which names and three-digit values belong to a split is decided by a digest, not by the
seed, so no file name and no value of `heldout` ever occurs in `train` or `development`, whatever the seeds (line counts and single
digits do). Choices of design were made on `development`; `heldout` is for reporting.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "development", "heldout"]

_ADJECTIVES = (
    "big blue bold calm cold cool dark deep dry dull dusty fair fast fine flat gold good gray green hard hot kind loud mild new odd old "
    "plain red slow soft warm"
)
_NOUNS = (
    "ant ape bat bear bee bird boar bull calf cat cod cow crab crow deer dog duck elk fish fly fox frog goat hare hen lamb lion mole moth "
    "mule owl pig"
)

ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()

SHOWN = "\0"
"""Stands in a command for what the previous command printed."""


@dataclass(frozen=True)
class Problem:
    """One task: what is asked, what lies in the workspace, and what must lie there at the end."""

    family: str
    instruction: str
    files: dict[str, str]
    """Workspace at the start: name to content."""
    expected: dict[str, str]
    """Workspace at the end: name to content, white space at both ends aside."""
    right: tuple[tuple[str, ...], ...]
    """Strategies that solve it, equally likely; each is a sequence of commands."""
    wrong: tuple[tuple[float, tuple[str, ...]], ...]
    """Strategies that do not, with their weights."""
    output: str
    """The file a careful agent looks at before it says that it is done."""


def split_of(text: str) -> Split:
    """Split that a name or value belongs to: a tenth each for `heldout` and `development`, the rest `train`."""
    share = int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:4], "big") / 2**32
    return "heldout" if share < 0.1 else "development" if share < 0.2 else "train"


@dataclass
class Draw:
    """Random names and values of one problem, all of one split."""

    rng: random.Random
    split: Split

    def names(self, count: int) -> list[str]:
        """File names that share no adjective and no noun: a model that copies half of a name is wrong, and seen to be."""
        chosen: list[str] = []
        adjectives, nouns = set[str](), set[str]()
        while len(chosen) < count:
            adjective, noun = self.rng.choice(ADJECTIVES), self.rng.choice(NOUNS)
            name = f"{adjective}-{noun}.txt"
            if adjective not in adjectives and noun not in nouns and split_of(name) == self.split:
                adjectives.add(adjective)
                nouns.add(noun)
                chosen.append(name)
        return chosen

    def value(self, avoid: str = "") -> str:
        """A number of three different digits, none of them in `avoid`."""
        while True:
            text = str(self.rng.randint(102, 987))
            if len(set(text)) == 3 and not set(text) & set(avoid) and split_of(text) == self.split:
                return text


def _write(draw: Draw) -> Problem:
    target, decoy = draw.names(2)
    value = draw.value()
    return Problem(
        family="write",
        instruction=f"Write {value} to {target}",
        files={decoy: draw.value(avoid=value)},
        expected={target: value},
        right=((f"echo {value} > {target}",),),
        wrong=((0.4, (f"echo {value}",)), (0.3, (f"cat {target}",)), (0.3, (f"echo {value} | {target}",))),
        output=target,
    )


def _append(draw: Draw) -> Problem:
    (target,) = draw.names(1)
    value = draw.value()
    before = draw.value(avoid=value)
    return Problem(
        family="append",
        instruction=f"Append {value} to {target}",
        files={target: before},
        expected={target: f"{before}\n{value}"},
        right=((f"echo {value} >> {target}",),),
        wrong=((0.6, (f"echo {value} > {target}",)), (0.4, (f"cat {target}",))),
        output=target,
    )


def _count(draw: Draw) -> Problem:
    source, target = draw.names(2)
    lines = [draw.value() for _ in range(draw.rng.randint(2, 9))]
    return Problem(
        family="count",
        instruction=f"Count the lines of {source} into {target}",
        files={source: "\n".join(lines)},
        expected={target: str(len(lines))},
        right=((f"wc -l < {source} > {target}",), (f"wc -l < {source}", f"echo {SHOWN} > {target}")),
        wrong=((0.4, (f"wc -c < {source} > {target}",)), (0.3, (f"wc -l {source} > {target}",)), (0.3, (f"wc -l < {source}",))),
        output=target,
    )


def _find(draw: Draw) -> Problem:
    holder, *others, target = draw.names(4)
    value = draw.value()
    return Problem(
        family="find",
        instruction=f"Find the file with {value} and put its name into {target}",
        files={holder: value} | {name: draw.value(avoid=value) for name in others},
        expected={target: holder},
        right=((f"grep -l {value} * > {target}",), (f"grep -l {value} *", f"echo {SHOWN} > {target}")),
        wrong=((0.4, (f"grep {value} * > {target}",)), (0.3, (f"ls > {target}",)), (0.3, (f"grep -l {value} *",))),
        output=target,
    )


def _sum(draw: Draw) -> Problem:
    source, target = draw.names(2)
    while True:
        summands = [draw.rng.randint(1, 99) for _ in range(draw.rng.randint(2, 4))]
        # The verifier could not tell a sum from a count of lines where both are the same number.
        if split_of("+".join(map(str, summands))) == draw.split and sum(summands) != len(summands):
            break
    program = "'{s+=$1} END {print s}'"
    return Problem(
        family="sum",
        instruction=f"Sum the numbers of {source} into {target}",
        files={source: "\n".join(map(str, summands))},
        expected={target: str(sum(summands))},
        right=((f"awk {program} {source} > {target}",), (f"awk {program} {source}", f"echo {SHOWN} > {target}")),
        wrong=((0.4, (f"wc -l < {source} > {target}",)), (0.3, (f"cat {source} > {target}",)), (0.3, (f"awk {program} {source}",))),
        output=target,
    )


def _copy(draw: Draw) -> Problem:
    source, target = draw.names(2)
    value = draw.value()
    return Problem(
        family="copy",
        instruction=f"Copy {source} to {target}",
        files={source: value},
        expected={source: value, target: value},
        right=((f"cp {source} {target}",), (f"cat {source} > {target}",)),
        wrong=((0.4, (f"mv {source} {target}",)), (0.3, (f"cat {source}",)), (0.3, (f"echo {source} > {target}",))),
        output=target,
    )


FAMILIES: dict[str, Callable[[Draw], Problem]] = {
    "write": _write,
    "append": _append,
    "count": _count,
    "find": _find,
    "sum": _sum,
    "copy": _copy,
}


def problem(family: str, rng: random.Random, split: Split) -> Problem:
    """Draw one problem of `family` in `split`."""
    return FAMILIES[family](Draw(rng, split))
