"""How the policy works, from the text of its trajectories by fixed rules. No model judges.

An *action* is a tool call in a reply; its *result* is what stands between that reply and the next. Rules:

- **generic shell**: the action's tool is one of `SHELLS` (by name, whatever its case).
- **failed**: the result says so, by one of `CODES` (an exit code that is not 0) or `WORDS` (those of an error).
- **changes**: the tool's name says that it writes (`WRITES`, but for `NOTES`), or a shell command does outside of quotes (`SHELL_WRITES`: a
  redirection, `sed -i`, `mv`, …).

Measures of rollouts, as means over tasks of their means over a task's rollouts, with 95 % intervals over tasks:

- `generic_shell`: share of a rollout's actions that are generic shell.
- `tool_coverage`: distinct tools that a rollout used, of those that any compared rollout of its harness used.
- `self_verification`: of rollouts that changed something, the share in which an action that changes nothing and does not fail comes after
  the last change: it looked.
- `error_recovery`: of rollouts with a failed action, the share that pass all the same.
- `actions`: actions per rollout.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge_ray.report.statistics import Interval, mean, share

SHELLS = frozenset(
    {"bash", "shell", "sh", "exec", "exec_command", "run_shell_command", "run_command", "run_terminal_cmd", "execute_command"}
    | {"execute_bash", "terminal", "local_shell", "container.exec", "computer_terminal"}
)
WRITES = re.compile(r"write|edit|replace|patch|create|insert|delete|move|rename|append", re.IGNORECASE)
NOTES = re.compile(r"todo|plan|task|stdin|memory", re.IGNORECASE)
"""Tools that write down what the agent means to do, or into a running program: no change of the work."""
QUOTED = re.compile(r"(\b(?:ba|da|z)?sh\s+-\w*c\s*)?('[^']*'|\"(?:\\.|[^\"\\])*\")")
"""A quoted word of a command, which is no command itself, unless a shell is given it."""
SHELL_WRITES = re.compile(
    r"(?<![<>=\-0-9&])>{1,2}(?![&>])\s*(?!/dev/null)\S|\btee\b|\bsed\s+(-[a-zA-Z]*\s+)*-i|\b(mv|cp|rm|mkdir|rmdir|touch|ln|chmod|patch|truncate|dd)\s"
    r"|\bapply_patch\b|\bgit\s+(apply|commit|checkout|reset|mv|rm|add)\b|\b(pip|npm|apt|apt-get)\s+install\b"
)
CODES = re.compile(
    r"(?:exit[ _-]?(?:code|status)|exited(?: with)?(?: code| status)?|return[ _]?code)\"?\s*[:=]?\s*-?[1-9]\d*\b"
    r"|<tool_use_error>|\"is_error\":\s*true",
    re.IGNORECASE,
)
"""What a harness says itself of an action that failed."""
WORDS = re.compile(
    r"\A\s*(?:<[^>]*>\s*)?error\b|\berror:(?!\s*\(none\))|Traceback \(most recent call last\)|command not found"
    r"|No such file or directory|Permission denied",
    re.IGNORECASE,
)
"""What programs say: anywhere in a shell's output, in the first line of what another tool gives (the rest may be a file's own text)."""
_RESPONSE = re.compile(r"\s*(?:<tool_response>)?\s*(.*?)\s*</tool_response>", re.DOTALL)
"""A result as templates of Qwen's family write it into a user message."""
_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_NAMED = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*?\])\s*(?:$|</s>|\[/)", re.DOTALL)
_THINKING = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """One tool call."""

    tool: str
    arguments: str
    """As the policy wrote them."""
    result: str | None
    """None: the rollout ended before one came."""

    @property
    def shell(self) -> bool:
        return self.tool.lower() in SHELLS

    @property
    def failed(self) -> bool:
        if self.result is None:
            return False
        words = self.result if self.shell else self.result.strip().partition("\n")[0]
        return CODES.search(self.result) is not None or WORDS.search(words) is not None

    @property
    def changes(self) -> bool:
        if self.shell:
            return SHELL_WRITES.search(QUOTED.sub(lambda word: word[0] if word[1] else '""', self.arguments)) is not None
        return WRITES.search(self.tool) is not None and NOTES.search(self.tool) is None


@dataclass(frozen=True)
class Trajectory:
    """One rollout's actions, in order."""

    harness: str
    task: str
    passed: bool
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Behaviour:
    """The measures over some rollouts; None where no rollout says anything about one."""

    rollouts: int
    generic_shell: Interval | None
    tool_coverage: Interval | None
    self_verification: Interval | None
    error_recovery: Interval | None
    actions: Interval | None


def tool_calls(text: str) -> list[tuple[str, str]]:
    """`(tool, arguments)` of the tool calls in a reply, in the forms of Hermes and Qwen (`<tool_call>` with JSON), Qwen3-Coder
    (`<function=…>`) and Mistral. What is drafted in thinking is none."""
    text = _THINKING.sub("", text)
    found: list[tuple[int, str, str]] = []
    for match in _HERMES.finditer(text):
        found += [(match.start(), name, arguments) for name, arguments in _named(match[1])]
    for match in _MISTRAL.finditer(text):
        found += [(match.start(), name, arguments) for name, arguments in _named(match[1])]
    found += [(match.start(), match[1], match[2]) for match in _NAMED.finditer(text)]
    return [(name, arguments) for _, name, arguments in sorted(found, key=lambda one: one[0])]


def _named(text: str) -> list[tuple[str, str]]:
    try:
        value = json.loads(text)
    except ValueError:
        return []
    calls = value if isinstance(value, list) else [value]
    named = [call for call in calls if isinstance(call, dict) and isinstance(call.get("name"), str)]
    return [(call["name"], _text(call.get("arguments", {}))) for call in named]


def _text(arguments: object) -> str:
    """Strings of the arguments as they are: a command's own quotes, not JSON's."""
    if isinstance(arguments, Mapping):
        return "\n".join(_text(value) for value in arguments.values())
    if isinstance(arguments, list):
        return " ".join(_text(value) for value in arguments)
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def actions(messages: Sequence[tuple[str, str]]) -> list[Action]:
    """The actions of a conversation of `(role, text)`. A reply with several calls gets a result each where as many messages follow."""
    found: list[Action] = []
    for place, (role, text) in enumerate(messages):
        calls = tool_calls(text) if role == "assistant" else []
        if not calls:
            continue
        results = _results(list(itertools.takewhile(lambda message: message[0] != "assistant", messages[place + 1 :])))
        each = results if len(results) == len(calls) else ["\n".join(results)] * len(calls) if results else [None] * len(calls)
        found += [Action(tool, arguments, result) for (tool, arguments), result in zip(calls, each, strict=True)]
    return found


def _results(answers: Sequence[tuple[str, str]]) -> list[str]:
    """The results among the messages behind a reply: those of tools, where any is."""
    texts = [text for role, text in answers if role == "tool"] or [text for _, text in answers]
    return [result for text in texts for result in _RESPONSE.findall(text) or [text]]


def measure(trajectories: Iterable[Trajectory], known: Mapping[str, frozenset[str]]) -> Behaviour:
    """The measures. `known`: by harness, the tools that any compared rollout used (`tools`)."""
    given = list(trajectories)
    acting = [one for one in given if one.actions]
    changing = [one for one in acting if any(action.changes for action in one.actions)]
    failing = [one for one in acting if any(action.failed for action in one.actions)]
    return Behaviour(
        len(given),
        _share(acting, lambda one: sum(action.shell for action in one.actions) / len(one.actions)),
        _share(acting, lambda one: len({action.tool for action in one.actions}) / len(known[one.harness])),
        _share(changing, lambda one: float(_looked(one.actions))),
        _share(failing, lambda one: float(one.passed)),
        mean(_by_task(given, lambda one: float(len(one.actions))), 0.0, math.inf),
    )


def _by_task(some: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> list[float]:
    """The mean over each task's rollouts."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in some:
        found[one.task].append(value(one))
    return [sum(several) / len(several) for several in found.values()]


def _share(some: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> Interval | None:
    return share(_by_task(some, value), len(some))


def tools(trajectories: Iterable[Trajectory]) -> dict[str, frozenset[str]]:
    """By harness, every tool that was used."""
    found: dict[str, set[str]] = defaultdict(set)
    for one in trajectories:
        found[one.harness] |= {action.tool for action in one.actions}
    return {harness: frozenset(names) for harness, names in found.items()}


def _looked(made: Sequence[Action]) -> bool:
    last = max(place for place, action in enumerate(made) if action.changes)
    return any(not action.changes and not action.failed and action.result is not None for action in made[last + 1 :])


def table(rows: Mapping[str, Behaviour]) -> list[str]:
    """Markdown, a row each."""
    names = ("generic_shell", "tool_coverage", "self_verification", "error_recovery", "actions")
    lines = [f"| rollouts of | n | {' | '.join(name.replace('_', ' ') for name in names)} |", "|---|---|" + "---|" * len(names)]
    for title, found in rows.items():
        cells = [_cell(getattr(found, name), 1 if name == "actions" else 2) for name in names]
        lines.append(f"| {title} | {found.rollouts} | {' | '.join(cells)} |")
    return lines


def _cell(interval: Interval | None, digits: int) -> str:
    if interval is None:
        return "–"
    return f"{interval.mean:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
