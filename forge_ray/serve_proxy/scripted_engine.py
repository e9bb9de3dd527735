"""The script of a policy that answers by rule: what `policy.script` names.

A script is a JSON list of rules. For each call the first rule that fits the prompt answers:

    [{"if": "substring of the decoded prompt", "turn": 0, "say": "I write it.\\n<tool_call>…</tool_call>"},
     {"if": "…", "turn": 1, "ids": [17, 4, 2]},
     {"turn": 2, "say": "a long answer", "fault": "fail", "after": 3}]

`if` absent fits every prompt; `turn` is the number of assistant messages in the prompt, absent fits every turn. `say` is tokenised and
ends with the tokenizer's end token; `ids` are sampled as they stand. A prompt that no rule fits is answered with "done.". Faults act once
`after` tokens were given: `fail` raises in the engine, `hang` gives nothing more until the call is aborted, `die` kills the replica's
process; `overflow` refuses the prompt as too long before anything is given. With `times` a fault acts that often and the rule answers
afterwards. `delay_s` waits before each token. The model's own chat template, tool parser and stop handling apply, as they do to sampled
text.

Several conversations in one script tell themselves apart by `of`: a text in the conversation's first message. Of all the script's `of`
texts the one that stands first in a prompt says whose it is (an agent's prompt also holds, later on, what it told its sub-agents). `last`
must occur in what follows the beginning of the prompt's last assistant message. `find` is a regular expression with one group: its last
match in the prompt takes the place of `{found}` in `say`, e.g. an id that the harness made up. `name` is a label for reports.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
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
    of: str = ""
    last: str = ""
    turn: int | None = None
    find: str = ""
    say: str | None = None
    ids: list[int] | None = None
    fault: Literal["fail", "hang", "die", "overflow"] | None = None
    after: int = Field(default=0, ge=0)
    """Tokens given before the fault."""
    times: int | None = Field(default=None, ge=1)
    """How often the fault acts; None: always."""
    delay_s: float = Field(default=0.0, ge=0)
    name: str = ""

    @model_validator(mode="after")
    def _answers(self) -> Rule:
        if (self.say is None) == (self.ids is None) and not (self.fault and self.say is None):
            raise ValueError("give either say or ids")
        try:
            groups = re.compile(self.find).groups
        except re.error as error:
            raise ValueError(f"find is no regular expression ({error})") from None
        if self.find and groups != 1:
            raise ValueError("find needs exactly one group")
        return self

    @property
    def reads_prompts(self) -> bool:
        """Whether the prompt decides if it answers, or what."""
        return bool(self.contains or self.of or self.last or self.find) or self.turn is not None

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


class Script:
    """The rules of one engine, and how often their faults have acted."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules
        self._marks = sorted({rule.of for rule in rules if rule.of})
        self._acted: Counter[int] = Counter()
        self.reads_prompts = any(rule.reads_prompts for rule in rules)
        """Whether any rule looks at the prompt; else its text need not be made."""

    def answer(self, prompt: str, turn_mark: str) -> Rule:
        """The rule that answers `prompt`, with its `say` complete. `turn_mark` stands before each assistant message in a prompt, and once
        at its end. Counts the fault that it carries as acted."""
        rule, at = self.choose(prompt, turn_mark)
        if rule.fault == "overflow" or not self._acts(rule, at):
            rule = rule.model_copy(update={"fault": None})
        return rule

    def overflows(self, prompt: str, turn_mark: str) -> bool:
        """Whether `prompt` is to be refused as too long; asked once, before `answer`."""
        rule, at = self.choose(prompt, turn_mark)
        return rule.fault == "overflow" and self._acts(rule, at)

    def _acts(self, rule: Rule, at: int) -> bool:
        if rule.fault is None or rule.times is None:
            return rule.fault is not None
        self._acted[at] += 1
        return self._acted[at] <= rule.times

    def choose(self, prompt: str, turn_mark: str) -> tuple[Rule, int]:
        """`answer` without counting: the rule and its place in the script, -1 for the default answer."""
        parts = prompt.split(turn_mark)
        turn, last = len(parts) - 2, parts[-2] if len(parts) > 1 else prompt
        whose = self.whose(prompt)
        for at, rule in enumerate(self.rules):
            if rule.fits(prompt, turn) and rule.of in ("", whose) and rule.last in last:
                return _completed(rule, prompt), at
        return Rule(say=DEFAULT_ANSWER), -1

    def whose(self, prompt: str) -> str:
        """Which `of` text a prompt belongs to; "" for none."""
        places = {mark: at for mark in self._marks if (at := prompt.find(mark)) >= 0}
        # Of two at one place the longer is meant.
        return min(places, key=lambda mark: (places[mark], -len(mark)), default="")


def _completed(rule: Rule, prompt: str) -> Rule:
    if not rule.find or rule.say is None:
        return rule
    found = re.findall(rule.find, prompt)
    return rule.model_copy(update={"say": rule.say.replace("{found}", found[-1] if found else "")})


def logprob(position: int, token: int) -> float:
    """A made-up natural log of a probability, different from position to position and token to token, so that a test sees a shift."""
    return math.log((1 + token % 97) / 100) - position / 1024
