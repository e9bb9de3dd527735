"""What a verifier leaves behind: the reward files of Harbor's contract, parsed strictly.

`reward.json` (a flat object of numbers of at most `MAX_REWARD`, 1e12, either way; `true` is 1.0) wins over `reward.txt` (one such number,
named `reward`). A malformed `reward.json` does not fall back to `reward.txt`. There is no default: whatever is not a valid reward is a
typed `VerifierError`, and the rollout ends in outcome `verifier`. The exit status of `test.sh` says nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from forge_ray.errors import ForgeRayError
from forge_ray.rollout import MAX_REWARD, usable

MAX_BYTES = 1 << 20
"""Largest reward file that is read."""

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class VerifierError(ForgeRayError):
    """The verifier gave no valid reward. One line."""


class VerifierTimeout(VerifierError):
    """Its time limit ended it; a reward that it wrote before is not used."""


class VerifierKilled(VerifierError):
    """Another limit of the sandbox ended it."""


class RewardMissing(VerifierError):
    """No reward file."""


class RewardEmpty(VerifierError):
    """A reward file without a reward in it (empty, white space, `{}`)."""


class RewardMalformed(VerifierError):
    """Not a number, not JSON, not a flat object, not a regular file, or too large."""


class RewardNotANumber(VerifierError):
    """A value in the object is no number (text, null, list, object)."""


class RewardNotFinite(VerifierError):
    """NaN, an infinity, or a number beyond a double."""


class RewardTooLarge(VerifierError):
    """A number whose magnitude is above `MAX_REWARD`: no statistics can be made of it."""


class RewardAmbiguous(VerifierError):
    """Several named numbers and none is called `reward`: the terminal reward is unknown."""


@dataclass(frozen=True)
class Rewards:
    """A verdict."""

    reward: float | None
    """The terminal reward r_T: the number named `reward`, or the only one. None: several, and which of them is trained is not said here."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Every named number."""


def parse_rewards(directory: Path) -> Rewards:
    """Read the verdict from `directory` (the verifier's /logs/verifier). Links are not followed. Raises `VerifierError`."""
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RewardMissing("the verifier removed its own directory") from None
    except OSError as error:
        raise RewardMalformed(f"the verifier's directory cannot be read ({error.strerror})") from None
    try:
        content = _read("reward.json", folder)
        if content is not None:
            return _from_json(content)
        content = _read("reward.txt", folder)
    finally:
        os.close(folder)
    if content is None:
        raise RewardMissing("the verifier wrote neither reward.json nor reward.txt")
    number = _from_text(content)
    return Rewards(number, {"reward": number})


def _read(name: str, folder: int) -> bytes | None:
    try:
        # O_NONBLOCK: a FIFO of that name must not hold us up.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RewardMalformed(f"{name} cannot be read ({error.strerror})") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RewardMalformed(f"{name} is no regular file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    finally:
        os.close(handle)
    if len(content) > MAX_BYTES:
        raise RewardMalformed(f"{name} is larger than {MAX_BYTES} bytes")
    if not content.strip():
        raise RewardEmpty(f"{name} is empty")
    return content


def _from_text(content: bytes) -> float:
    text = content.decode("utf-8-sig", "replace").strip()
    if re.fullmatch(r"[+-]?(nan|inf|infinity)", text, re.IGNORECASE):
        raise RewardNotFinite(f"reward.txt holds {text}")
    if not _NUMBER.fullmatch(text):
        raise RewardMalformed(f"reward.txt holds {short(text)} and not one number")
    return usable_number("reward.txt: 'reward'", float(text))


def _from_json(content: bytes) -> Rewards:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RewardMalformed(f"reward.json is not JSON ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict):
        raise RewardMalformed(f"reward.json holds {short(value)} and not an object of named numbers")
    if not value:
        raise RewardEmpty("reward.json holds no reward: {}")
    rewards = {}
    for key, number in value.items():
        if not isinstance(number, int | float):  # a bool is an int
            raise RewardNotANumber(f"reward.json: {key!r} is {short(number)} and not a number")
        if any("\ud800" <= letter <= "\udfff" for letter in key):
            raise RewardMalformed(f"reward.json: the name {key!r} is no text")
        rewards[key] = usable_number(f"reward.json: {key!r}", number)
    if "reward" in rewards:
        return Rewards(rewards["reward"], rewards)
    if len(rewards) == 1:
        return Rewards(next(iter(rewards.values())), rewards)
    return Rewards(None, rewards)


def usable_number(what: str, value: float) -> float:
    """`value` as a float that statistics may be made of. Raises `RewardNotFinite` and `RewardTooLarge`, which begin with `what`."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardNotFinite(f"{what} is {short(value)}")
    if not usable(number):
        raise RewardTooLarge(f"{what} is {short(value)}, beyond {MAX_REWARD:g}")
    return number


def short(value: object) -> str:
    """`value` on one line, cut."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a very large integer"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}…"
