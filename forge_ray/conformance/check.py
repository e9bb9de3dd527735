"""What is compared after a run: the workspace with the plan, and the recording with the script.

A problem is one line with the aspect it belongs to. A call of the recording belongs to the line of the script that its prompt asks for:
`Script.choose` on the recorded prompt. So no order of time is assumed between conversations, and a call of no line stands out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_ray.conformance.plan import CONTINUED, Expected, Plan
from forge_ray.conformance.recording import Reader, RecordedCall
from forge_ray.serve_proxy.scripted_engine import Script


@dataclass(frozen=True)
class Problem:
    """Something that is not as it must be."""

    aspect: str
    """workspace | program | script | recording | duplicate | conversation | kind | continuation."""
    text: str

    def __str__(self) -> str:
        return f"{self.aspect}: {self.text}"


def workspace(plan: Plan, directory: Path) -> list[Problem]:
    """Whether the files are as the script's commands write them."""
    problems = []
    for name, text in plan.files.items():
        file = directory / name
        found = file.read_bytes() if file.is_file() else None
        if found != text.encode():
            problems.append(
                Problem("workspace", f"{name} {'is missing' if found is None else f'holds {found[:200]!r}'}, not {text[:200]!r}")
            )
    problems += [Problem("workspace", f"{name} must not be there") for name in plan.absent if (directory / name).exists()]
    return problems


def asked(plan: Plan, said: Sequence[str]) -> list[Problem]:
    """Whether the program asked for every line of the script, and for nothing else. `said`: names of the rules that answered it. A line may
    be asked for again after a fault; whether that counts twice only a recording says."""
    found = {plan.line(name) for name in said}
    expected = {call.line for call in plan.calls}
    problems = [Problem("script", f"{line} was not asked for") for line in sorted(expected - found)]
    return problems + ([Problem("script", "something was asked for that the script does not have")] if "?" in found else [])


def recording(plan: Plan, calls: Sequence[RecordedCall], script: Script, reader: Reader) -> list[Problem]:
    """Whether the recording is exactly the script."""
    problems: list[Problem] = []
    lines: dict[str, str] = {}
    by_line: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        line = "?"
        if call.prompt_text is not None:
            answer, _ = script.choose(call.prompt_text, reader.turn_mark)
            line = plan.line(answer.name)
            said = reader.sampled(answer.say or "")
            if call.counted and call.sampled is not None and _plain(call.sampled) != _plain(said):
                problems.append(Problem("recording", f"{line} was sampled as {_short(call.sampled)}, the script has {_short(said)}"))
        lines[call.id] = line
        if call.counted:
            by_line[line].append(call)
        elif not plan.attempts:
            problems.append(Problem("recording", f"a call of {line} does not count"))
    expected = {call.line for call in plan.calls}
    for line, found in by_line.items():
        if line not in expected:
            problems.append(Problem("recording", f"{len(found)} call(s) that the script does not have ({line})"))
        elif len(found) > 1:
            problems.append(Problem("duplicate", f"{line} counts {len(found)} times"))
    for call in plan.calls:
        if call.line not in by_line:
            problems.append(Problem("recording", f"{call.line} is missing"))
    matched = [(call, by_line[call.line][0]) for call in plan.calls if call.line in by_line]
    problems += _dialects(plan, matched) + _kinds(matched) + _tree(matched, lines) + _continuations(plan, matched, calls)
    return problems


Matched = Sequence[tuple[Expected, RecordedCall]]


def _dialects(plan: Plan, matched: Matched) -> list[Problem]:
    from forge_ray.conformance.programs import PROGRAMS

    program = PROGRAMS.get(plan.program)
    wanted = program.dialect if program else None
    others = {call.dialect for _, call in matched if call.dialect is not None and wanted is not None and call.dialect != wanted}
    return [Problem("recording", f"the dialect is {name}, not {wanted}") for name in sorted(others)]


def _kinds(matched: Matched) -> list[Problem]:
    wrong = [(e, call) for e, call in matched if call.kind is not None and call.kind != e.kind]
    return [Problem("kind", f"{e.line} is {call.kind}, not {e.kind}") for e, call in wrong]


def _tree(matched: Matched, lines: dict[str, str]) -> list[Problem]:
    """Calls that are one conversation, those that are not, and who began them."""
    problems = []
    labels: dict[str, str] = {}
    names: dict[str, str] = {}
    for expected, call in matched:
        label, name = expected.conversation, call.conversation
        if label is None or name is None:
            continue
        if labels.setdefault(label, name) != name:
            problems.append(Problem("conversation", f"{expected.line} is not in the conversation of {label}"))
        elif names.setdefault(name, label) != label:
            problems.append(Problem("conversation", f"{expected.line} is in the conversation of {names[name]}, not of {label}"))
    knows = any(call.spawned_by is not None for _, call in matched)
    for expected, call in matched:
        found = lines.get(call.spawned_by, "?") if call.spawned_by is not None else None
        if found != expected.spawned_by and (knows or call.conversation is not None):
            problems.append(Problem("conversation", f"{expected.line} was begun by {found}, not by {expected.spawned_by}"))
    return problems


def _continuations(plan: Plan, matched: Matched, calls: Sequence[RecordedCall]) -> list[Problem]:
    problems = []
    known = {call.id: call for call in calls}
    before: dict[str, RecordedCall] = {}
    for expected, call in matched:
        said = call.continuation
        if said is not None and expected.continuation is not None:
            if said not in expected.continuation:
                why = f" ({call.reason})" if call.reason else ""
                problems.append(
                    Problem("continuation", f"{expected.line} is {said}{why}, not {' or '.join(sorted(expected.continuation))}")
                )
            elif said == "fork" and expected.reason not in (call.reason or ""):
                problems.append(Problem("continuation", f"{expected.line} forks because of {call.reason!r}, not {expected.reason!r}"))
        last = before.get(expected.conversation or "")
        if said in CONTINUED and call.continues is not None:
            problems += _goes_on(plan, expected, call, known.get(call.continues), last)
        if expected.conversation is not None:
            before[expected.conversation] = call
    return problems


def _goes_on(plan: Plan, expected: Expected, call: RecordedCall, parent: RecordedCall | None, last: RecordedCall | None) -> list[Problem]:
    """What is called a continuation must be one, token for token, and of the call that came before."""
    if parent is None:
        return [Problem("continuation", f"{expected.line} goes on from a call that is not recorded")]
    if None not in (call.prompt, parent.prompt, parent.sampled):
        whole = [*_plain(parent.prompt), *_plain(parent.sampled)]
        if [*_plain(call.prompt)][: len(whole)] != whole:
            return [Problem("continuation", f"{expected.line} does not begin with the call that it goes on from")]
    if last is not None and parent.id != last.id and not plan.attempts:
        return [Problem("continuation", f"{expected.line} does not go on from the call before it")]
    return []


def _plain(tokens: Sequence[int] | str | None) -> str | list[int]:
    return tokens if isinstance(tokens, str) else list(tokens or ())


def _short(tokens: Sequence[int] | str) -> str:
    return repr(tokens if isinstance(tokens, str) else list(tokens))[:160]
