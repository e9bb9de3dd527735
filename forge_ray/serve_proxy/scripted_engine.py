"""The script of a policy that answers by rule: what `policy.script` names.

A script is a JSON list of rules. For each call the first rule that fits the prompt answers:

    [{"if": "substring of the decoded prompt", "turn": 0, "say": "I write it.\\n<tool_call>…</tool_call>"},
     {"if": "…", "turn": 1, "ids": [17, 4, 2]},
     {"turn": 2, "say": "a long answer", "fault": "fail", "after": 3}]

`if` absent fits every prompt; `turn` is the number of assistant messages in the prompt, absent fits every turn. `say` is tokenised and
ends with the tokenizer's end token; `ids` are sampled as they stand. A prompt that no rule fits is answered with "done.". Faults act once
`after` tokens were given: `fail` raises in the engine, `hang` gives nothing more until the call is aborted, `die` kills the replica's
process. `delay_s` waits before each token. The model's own chat template, tool parser and stop handling apply, as they do to sampled text.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from forge_ray.errors import ForgeRayError, UserError

DEFAULT_ANSWER = "done."


class ScriptedFault(ForgeRayError):
    """A rule of the script asked for this failure."""


class Rule(BaseModel):
    """One rule of a script."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    contains: str = Field(default="", alias="if")
    turn: int | None = None
    say: str | None = None
    ids: list[int] | None = None
    fault: Literal["fail", "hang", "die"] | None = None
    after: int = Field(default=0, ge=0)
    """Tokens given before the fault."""
    delay_s: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _answers(self) -> Rule:
        if (self.say is None) == (self.ids is None) and not (self.fault and self.say is None):
            raise ValueError("give either say or ids")
        return self

    def fits(self, prompt: str, turn: int) -> bool:
        return self.contains in prompt and self.turn in (None, turn)


def load_script(path: str | Path) -> list[Rule]:
    """Read and check a script. Raises `UserError` that names the rule."""
    try:
        rules = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path), fix="correct policy.script") from None
    except ValueError as error:
        raise UserError(f"is no JSON ({error})", where=str(path), fix="write a list of rules") from None
    try:
        return TypeAdapter(list[Rule]).validate_python(rules)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the script"
        raise UserError(f"rule {where}: {first['msg']}", where=str(path), fix="see forge_ray.serve_proxy.scripted_engine") from None


def choose(rules: list[Rule], prompt: str, turn: int) -> Rule:
    """The first rule that fits, or the default answer."""
    for rule in rules:
        if rule.fits(prompt, turn):
            return rule
    return Rule(say=DEFAULT_ANSWER)


def logprob(position: int, token: int) -> float:
    """A made-up natural log of a probability, different from position to position and token to token, so that a test sees a shift."""
    return math.log((1 + token % 97) / 100) - position / 1024
