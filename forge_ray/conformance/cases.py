"""The cases, each a function from a program to its plan, or to None where the program has no such thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge_ray.conformance.door import Fault, FaultKind
from forge_ray.conformance.plan import NEW, Expected, Plan, later, rule
from forge_ray.conformance.programs import Program
from forge_ray.conformance.reply import Reply

ONE, TWO, THREE = 'a  b\tc "q" \\d', "naïve café ☕ 漢字 👩‍💻", "x/y/z"
DELAY_S = {"cut": 0.03, "reset": 0.1}
"""Seconds between the tokens of a reply that a fault destroys. It must be under way then: a proxy has delivered a reply whose last byte it
was rid of, whatever became of it on the way, and where the program then asks in other words, the turn rightly counts twice."""
PRINTED = "; sleep 0.2"
"""Ends a command whose output the script waits for: Qwen Code now and then loses what is printed just before the end."""


def mark(program: str, case: str, who: str = "main") -> str:
    """What tells a conversation's prompts from all others."""
    return f"[{case}/{program}/{who}]"


def ask(of: str) -> str:
    return f"Task {of}: do what is to be done here, step by step, and say when it is finished."


def words(program: Program) -> Plan:
    """Four turns: odd white space, unicode, keys in another order, escapes, parallel calls, reasoning."""
    of, shell = mark(program.name, "words"), program.shell
    turns = [
        Reply("\n  I begin:\tone  file. ", (shell.call(f"printf '%s\\n' '{ONE}' > one.txt", "reversed"),)),
        Reply(
            "Two at once…",
            (
                shell.call(f"printf '%s\\n' '{TWO}' > two.txt", "escaped"),
                shell.call(f"mkdir -p 'sub dir' && printf '%s\\n' '{THREE}' > 'sub dir/three.txt'", "escaped"),
            ),
            reasoning="\n  Nothing  speaks against two calls, 漢字.\n\n",
        ),
        Reply("漢字 👩‍💻 — now all of it:\n\n", (shell.call("cat one.txt two.txt 'sub dir/three.txt' > four.txt", "spaced"),)),
        program.end(" All four files are there. ☕ 完了 👍🏽\n"),
    ]
    lines = [f"main.{turn}" for turn in range(len(turns))]
    calls = [Expected(lines[0], continuation=NEW), *(later(line, program.fork) for line in lines[1:])]
    return _plan(
        program,
        "words",
        [rule(line, reply, of=of, turn=turn) for turn, (line, reply) in enumerate(zip(lines, turns, strict=True))],
        {
            "one.txt": f"{ONE}\n",
            "two.txt": f"{TWO}\n",
            "sub dir/three.txt": f"{THREE}\n",
            "four.txt": f"{ONE}\n{TWO}\n{THREE}\n",
        },
        calls,
    )


def subagent(program: Program) -> Plan | None:
    """An agent starts a sub-agent, which writes a file and reports."""
    spawn = program.spawn
    if spawn is None:
        return None
    of, sub = mark(program.name, "subagent"), mark(program.name, "subagent", "sub")
    write = program.shell.call("printf 'by the sub-agent\\n' > sub.txt")
    report = "I wrote sub.txt."
    rules = [
        rule("main.0", Reply("I hand this on.", (spawn.tool.call(f"Task {sub}: write sub.txt and report."),)), of=of, turn=0),
        rule("sub.0", Reply("I write it.", (write,)), of=sub, turn=0),
        rule("sub.1", Reply("", (spawn.report.call(report),)) if spawn.report else Reply(report), of=sub, turn=1),
    ]
    calls = [Expected("main.0", continuation=NEW)]
    if spawn.then == "wait" and spawn.wait is not None:
        wait = spawn.wait.call(["{found}"])
        rules.append(rule("main.1", Reply("I wait for it.", (wait,)), of=of, turn=1, find=spawn.find))
        calls.append(Expected("main.1"))
    elif spawn.then == "notice":
        rules.append(rule("main.1", Reply("It is under way."), of=of, turn=1))
        calls.append(Expected("main.1"))
    last = f"main.{len(calls)}"
    rules.append(rule(last, program.end("The sub-agent is done."), of=of, turn=len(calls)))
    calls += [
        Expected(last),
        Expected("sub.0", kind="subagent", conversation="sub", continuation=NEW, spawned_by="main.0"),
        Expected("sub.1", kind="subagent", conversation="sub"),
    ]
    return _plan(program, "subagent", rules, {"sub.txt": "by the sub-agent\n"}, calls, options=spawn.options)


def compaction(program: Program) -> Plan | None:
    """A history that has become too long is summarised, and the work goes on."""
    how = program.compaction
    if how is None:
        return None
    of, kept = mark(program.name, "compaction"), mark(program.name, "compaction", "kept")
    shell = program.shell
    long = [f"seq {start}000000 {start}004000 | tr '\\n' ' '" for start in range(1, 1 + how.outputs)]
    begin = Reply(f"I begin {of}.", tuple(shell.call(command) for command in (f"printf 'first\\n' > first.txt; {long[0]}", *long[1:])))
    summary = f"<summary>\n{kept} first.txt is written. second.txt is still to be written.\n</summary>"
    rules = [
        rule("summary", Reply(summary), of=of, **_condition(how.words)),
        rule("after.1", program.end("Both are written."), if_=kept, last="second-is-there"),
        rule("after.0", Reply("I go on.", (shell.call("printf 'second\\n' > second.txt; echo second-is-\"there\"" + PRINTED),)), if_=kept),
        rule("main.0", begin, of=of, turn=0),
    ]
    if how.trigger == "overflow":
        rules.append({"name": "overflow", "of": of, "turn": 1, "fault": "overflow"})
    home = "main" if how.same_conversation else None
    return _plan(
        program,
        "compaction",
        rules,
        {"first.txt": "first\n", "second.txt": "second\n"},
        [
            Expected("main.0", continuation=NEW),
            Expected("summary", kind="compaction", conversation=None, continuation=None),
            Expected("after.0", conversation=home or "after", continuation=None),
            later("after.1", how.fork, conversation=home or "after"),
        ],
        options=how.options,
        window=how.window,
    )


def fault(kind: FaultKind) -> Callable[[Program], Plan]:
    """One request goes wrong: in the first turn for a cut stream, which then holds half a tool call, else in the second."""

    def plan(program: Program) -> Plan:
        of = mark(program.name, kind)
        at, gives_up = 0 if kind == "cut" else 1, kind in program.gives_up
        slowly = {"delay_s": DELAY_S[kind]} if kind in DELAY_S else {}
        once = program.shell.call("printf 'once\\n' >> once.txt; echo step-one-is-\"done\"" + PRINTED)
        # By what was done and not by the turn: some programs keep the half of a cut reply as a turn.
        rules = [
            rule("step.1", program.end("It is written, once."), of=of, if_="step-one-is-done", **(slowly if at == 1 else {})),
            rule(
                "step.0",
                Reply("I append one line to a file, once and only once.", (once,)),
                of=of,
                **(slowly if at == 0 else {}),
            ),
        ]
        attempts = kind in ("reset", "cut")
        # What a fork is compared with may be the answer that was destroyed, so its reason is not said then.
        fork = program.fork and "" if attempts else program.fork
        calls = [Expected("step.0", continuation=None if kind == "cut" else NEW), later("step.1", fork)]
        written = {"once.txt": "once\n"}
        return _plan(
            program,
            kind,
            rules,
            {} if gives_up and at == 0 else written,
            calls[:at] if gives_up else calls,
            absent=("once.txt",) if gives_up and at == 0 else (),
            faults=(Fault(kind, of, at),),
            attempts=attempts,
        )

    return plan


CASES: dict[str, Callable[[Program], Plan | None]] = {
    "words": words,
    "subagent": subagent,
    "compaction": compaction,
    "429": fault("429"),
    "429-retry-after": fault("429-retry-after"),
    "500": fault("500"),
    "reset": fault("reset"),
    "cut": fault("cut"),
}


def _plan(program: Program, case: str, rules: list[dict[str, Any]], files: dict[str, str], calls: list[Expected], **more: Any) -> Plan:
    of = mark(program.name, case)
    side = [{"of": of, "turn": 0, "say": "A title", **conditions} for conditions in program.side]
    asides = [Expected(conditions["name"], kind="aux", conversation=conditions["name"], continuation=NEW) for conditions in program.side]
    options = {**program.options, **more.pop("options", {})}
    named = [{**rule, "name": f"{program.name}/{case}:{rule['name']}"} for rule in (*side, *rules)]
    return Plan(program.name, case, ask(of), tuple(named), files, (*asides, *calls), options=options, **more)


def _condition(words: Any) -> dict[str, str]:
    return {"if_" if key == "if" else key: text for key, text in words.items()}
