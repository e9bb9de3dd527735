"""The behaviour report's rules, on small conversations with the answer worked out by hand."""

from __future__ import annotations

import json

import pytest

from forge_ray.report.behaviour import Action, Trajectory, actions, measure, table, tool_calls, tools


def hermes(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"I do it. {hermes('bash', command='ls')}", [("bash", "ls")]),
        (hermes("a", x="1") + "\n" + hermes("b", y=["p", "q"], z=2), [("a", "1"), ("b", "p q\n2")]),
        ("<tool_call>\n<function=edit><parameter=p>f</parameter></function></tool_call>", [("edit", "<parameter=p>f</parameter>")]),
        ('[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}}]', [("bash", "ls")]),
        (f"<think>perhaps {hermes('bash', command='touch BAD')}</think>{hermes('bash', command='ls')}", [("bash", "ls")]),
        ("<think>never closed " + hermes("bash", command="ls"), []),
        ("<tool_call>not json</tool_call> [TOOL_CALLS] nothing", []),
        ('<tool_call>{"arguments": {}}</tool_call>', []),
    ],
)  # fmt: skip
def test_tool_calls_are_found(text: str, found: list[tuple[str, str]]) -> None:
    assert tool_calls(text) == found


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("echo hi > out.txt", True),
        ("echo hi >> out.txt", True),
        ("cat a.txt", False),
        ("ls 2>&1", False),
        ("ls > /dev/null", False),
        ("test 3 -gt 2 && grep -n 'a => b' f", False),
        ("sed -i s/a/b/ f", True),
        ("sed s/a/b/ f", False),
        ("cp a b", True),
        ("wc -l f | tee n.txt", True),
        ("diff a b", False),
        ("python -m pytest", False),
        ("git diff", False),
        ("git add -A && git commit -m x", True),
        ("ls >> /dev/null", False),
        ("awk '$1 > 3' f", False),
        ("grep 'rm -r' f", False),
        ('python -c "print(2 > 1)"', False),
        ("bash -lc 'echo hi > f'", True),
        ('echo hi > "a file"', True),
        ("cat > f <<'EOF'\nx\nEOF", True),
    ],
)
def test_what_changes_something(command: str, changes: bool) -> None:
    assert Action("Bash", command, "").changes is changes


def test_tools_that_write_change_something() -> None:
    assert not any(Action(tool, "", "").changes for tool in ("TodoWrite", "write_todos", "update_plan", "write_stdin", "TaskCreate"))
    assert Action("apply_patch", "", "").changes and Action("Write", "x", "").changes and not Action("read_file", "> x", "").changes


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ("Exit code: 1\nOutput:", True),
        ("Exit code: 0\nOutput: 7", False),
        ("bash: foo: command not found", True),
        ("Process exited with code 127", True),
        ("exit_code=0", False),
        ("returncode: 2", True),
        ("no errors were found", False),
        ("Command: ls\nDirectory: (root)\nOutput: a\nError: (none)\nExit Code: 0\nSignal: (none)", False),  # Qwen Code
        ('{\n  "returncode": 0,\n  "output": "a"\n}', False),  # mini-swe-agent
        ('{\n  "returncode": 1,\n  "output": ""\n}', True),
        ("Chunk ID: 9b\nWall time: 0.1 seconds\nProcess exited with code 0\nOutput:\n", False),  # Codex
        ("Exit code 2\nls: cannot access", True),  # Claude Code
        ("if [ -z $1 ]; then exit 1; fi", False),
        ("rates\nerror and mean", False),
        ("error: no such option", True),
        ("Traceback (most recent call last):\n  File", True),
        (None, False),
    ],
)
def test_what_failed(result: str | None, failed: bool) -> None:
    assert Action("bash", "x", result).failed is failed


def test_what_a_file_says_is_no_failure() -> None:
    assert not Action("read_file", "f", "1\tdef f():\n2\t    print('error: no')").failed
    assert Action("read_file", "f", "Error: no such file").failed
    assert Action("Edit", "f", "<tool_use_error>not found</tool_use_error>").failed


def test_results_belong_to_their_calls() -> None:
    talk = [
        ("user", "do it"),
        ("assistant", hermes("bash", command="a") + hermes("bash", command="b")),
        ("tool", "one"),
        ("tool", "two"),
        ("assistant", hermes("read", path="c") + hermes("read", path="d")),
        ("user", "both in one"),
        ("assistant", hermes("bash", command="e")),
    ]
    assert [(action.arguments, action.result) for action in actions(talk)] == [
        ("a", "one"),
        ("b", "two"),
        ("c", "both in one"),
        ("d", "both in one"),
        ("e", None),
    ]


def test_results_are_cut_out_of_what_a_template_puts_around_them() -> None:
    both = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>"
    talk = [("assistant", hermes("bash", command="a") + hermes("bash", command="b")), ("user", both)]
    assert [action.result for action in actions(talk)] == ["one", "two"]
    talk = [("assistant", hermes("bash", command="a")), ("tool", "one"), ("user", "a reminder: an error: is told so")]
    assert [action.result for action in actions(talk)] == ["one"]


def made(task: str, passed: bool, *steps: tuple[str, str, str]) -> Trajectory:
    return Trajectory("react", task, passed, tuple(Action(*step) for step in steps))


def test_the_measures() -> None:
    write, look, fail = ("bash", "echo > f", "ok"), ("read_file", "f", "ok"), ("bash", "cat g", "No such file or directory")
    given = [
        made("a", True, write, look),  # looked; half shell; both tools
        made("b", False, write),  # did not look
        made("c", True, fail, write, ("bash", "cat f", "ok")),  # recovered, looked
        made("d", False, write, fail),  # a look that failed is none; not recovered
        made("e", True),  # never acted
    ]
    known = tools(given)
    assert known == {"react": frozenset({"bash", "read_file"})}
    found = measure(given, known)
    assert found.rollouts == 5
    means = [found.generic_shell, found.tool_coverage, found.self_verification, found.error_recovery, found.actions]
    assert [interval.mean for interval in means if interval] == pytest.approx([3.5 / 4, 2.5 / 4, 2 / 4, 1 / 2, 8 / 5])
    twice = measure([*given, *[made("a", True, write)] * 3], known)
    assert twice.self_verification is not None and twice.self_verification.mean == pytest.approx(1.25 / 4), "a task counts once"
    none = measure([made(task, False, fail) for task in "ab"], known).error_recovery
    assert none is not None and none.mean == none.low == 0 and none.high > 0.5, "two tasks do not show that it never recovers"
    lines = table({"before": found, "after": measure([], known)})
    assert lines[2].startswith("| before | 5 | 0.88 [") and lines[3] == "| after | 0 | – | – | – | – | – |"
