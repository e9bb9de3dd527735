"""What is wrong with `configure` of a harness of one's own is said before a run, and nothing is where nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_ray.harnesses import rehearsal
from forge_ray.harnesses.harness import get

README = Path(__file__).parents[2] / "README.md"


HEAD = "from forge_ray.harnesses.harness import Command, Harness\n\nclass Mine(Harness):\n    def configure(self, launch):\n        "


def problem(directory: Path, code: str, instruction: str | None = "Do it.") -> str | None:
    file = directory / "mine.py"
    file.write_text(code)
    return rehearsal.problem(get(f"{file}:Mine"), instruction)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return Command(argv=('sh', '-c', launch.instruction), visible=('/usr',), env={'K': launch.key})", None),
        ("raise ValueError('no luck')", "configure fails (ValueError: no luck)"),
        ("pass", "configure gives None, which is no Command"),
        ("return Command(argv='agent')", "argv = 'agent' is no tuple"),
        ("return Command(argv=())", "argv is empty"),
        ("return Command(argv=('agent', launch.context_window))", "argv = ('agent', 32768) is no tuple of texts"),
        ("return Command(argv=('agent',), visible=('/usr'))", "visible = '/usr' is no tuple"),
        ("return Command(argv=('agent',), visible=('/no/such',))", "/no/such is to be visible and does not exist"),
        ("return Command(argv=('agent',), env={'LIMIT': launch.context_window})", "env = {'LIMIT': 32768} has what is no text"),
        ("return Command(argv=('agent',), env={'CAP': launch.max_output})", "env = {'CAP': None} has what is no text"),
    ],
)
def test_a_harness_of_ones_own(body: str, words: str | None, tmp_path: Path) -> None:
    found = problem(tmp_path, f"{HEAD}{body}\n")
    assert found is None if words is None else words in (found or ""), found


def test_what_only_a_real_instruction_could_tell_is_not_told_of_a_made_up_one(tmp_path: Path) -> None:
    code = f"{HEAD}return Command(argv=('agent', __import__('json').loads(launch.instruction)['job']))\n"
    assert problem(tmp_path, code, None) is None and problem(tmp_path, code, '{"job": "x"}') is None
    assert "configure fails (JSONDecodeError" in (problem(tmp_path, code) or "")


def test_the_readmes_is_good_but_for_the_program_that_is_not_here(tmp_path: Path) -> None:
    code = next(part for part in README.read_text().split("```python\n") if "class Mine" in part).partition("```")[0]
    assert problem(tmp_path, code) == "/opt/my-agent is to be visible and does not exist"
