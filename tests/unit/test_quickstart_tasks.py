"""The quickstart's tasks: verifiers that tell right from wrong, splits that share nothing, files that the loader takes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from forge_ray.tasks.task import load_task
from tests.quickstart import module

families, tasks = module("families"), module("tasks")
FAMILIES = list(families.FAMILIES)


class Place:
    """One task's directory, a workspace with its files, and what a sandbox tells the verifier."""

    def __init__(self, root: Path, task) -> None:
        self.task, self.directory, self.workspace, self.logs = task, root / "task", root / "workspace", root / "logs"
        tasks.write_task(self.directory, task)
        self.logs.mkdir()
        self.reset()

    def reset(self) -> None:
        shutil.rmtree(self.workspace, ignore_errors=True)
        shutil.copytree(self.directory / "environment" / "files", self.workspace)

    def run(self, *argv: str) -> str:
        places = {"WORKSPACE": self.workspace, "TESTS_DIR": self.directory / "tests", "VERIFIER_DIR": self.logs}
        environment = {"PATH": os.defpath, **{name: str(path) for name, path in places.items()}}
        done = subprocess.run(
            argv, cwd=self.workspace, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    def follow(self, commands) -> None:
        shown = ""
        for command in commands:
            shown = self.run("bash", "-c", command.replace(families.SHOWN, shown))

    def reward(self) -> str:
        (self.logs / "reward.txt").unlink(missing_ok=True)
        self.run(str(self.directory / "tests" / "test.sh"))
        return (self.logs / "reward.txt").read_text()


@pytest.fixture(params=FAMILIES)
def place(request, tmp_path) -> Place:
    return Place(tmp_path, families.problem(request.param, random.Random(f"test {request.param}"), "train"))


def test_the_solution_earns_1_and_an_untouched_workspace_0(place) -> None:
    assert place.reward() == "0\n"
    place.run(str(place.directory / "solution" / "solve.sh"))
    assert place.reward() == "1\n"


def test_every_right_strategy_earns_1_and_every_wrong_one_0(place) -> None:
    for commands in place.task.right:
        place.reset()
        place.follow(commands)
        assert place.reward() == "1\n", commands
    for _, commands in place.task.wrong:
        place.reset()
        place.follow(commands)
        assert place.reward() == "0\n", commands


def test_a_wrong_answer_earns_0_however_near_it_is(place) -> None:
    name, text = next(iter(place.task.expected.items()))
    place.run(str(place.directory / "solution" / "solve.sh"))
    answer = place.workspace / name
    for wrong in ("", text[:-1], text + "0", f"{text}\n{text}", text.replace(text[0], "x", 1), text + " " * 20_000 + "x"):
        answer.write_text(wrong)
        assert place.reward() == "0\n", wrong[:80]
    answer.write_text(f" \n{text}\t\n\n")  # white space at both ends does not count
    assert place.reward() == "1\n"


def test_a_link_a_directory_or_a_pipe_in_place_of_the_file_earns_0(place) -> None:
    name = next(iter(place.task.expected))
    place.run(str(place.directory / "solution" / "solve.sh"))
    answer, expected = place.workspace / name, place.directory / "tests" / "expected" / name
    answer.unlink()
    answer.symlink_to(expected)
    assert place.reward() == "0\n"
    answer.unlink()
    answer.mkdir()
    assert place.reward() == "0\n"
    answer.rmdir()
    os.mkfifo(answer)
    assert place.reward() == "0\n"


def test_without_a_workspace_there_is_no_reward_rather_than_0(place) -> None:
    environment = {"PATH": os.defpath, "WORKSPACE": str(place.workspace / "gone"), "VERIFIER_DIR": str(place.logs)}
    subprocess.run([str(place.directory / "tests" / "test.sh")], env=environment, check=False, timeout=60)
    assert not (place.logs / "reward.txt").exists()


def read(directory: Path, below: str) -> dict[str, str]:
    return {file.name: file.read_text().strip() for file in (directory / below).iterdir()}


def test_every_split_has_every_family_and_the_splits_share_no_name_value_or_answer(tmp_path) -> None:
    seen: dict[str, set] = {}
    for split, count in (("train", 240), ("development", 24), ("heldout", 24)):
        words, answers = set[str](), set[tuple]()
        for seed in (0, 1):
            out = tmp_path / f"{split}-{seed}"
            getattr(tasks, split)(out, seed, count)
            made = sorted(out.iterdir())
            assert {directory.name.partition("-")[0]: 0 for directory in made}.keys() == set(FAMILIES)
            assert len(made) == len({(d / "instruction.md").read_text() for d in made}) == count
            for directory in made:
                files, expected = read(directory, "environment/files"), read(directory, "tests/expected")
                words |= {*files, *expected, *(value for text in files.values() for value in text.split() if len(value) == 3)}
                answers.add((directory.name.partition("-")[0], *sorted(expected.items())))
        seen[f"{split} words"], seen[f"{split} answers"] = words, answers
    for kind in ("words", "answers"):
        for one, other in (("train", "heldout"), ("train", "development"), ("development", "heldout")):
            assert not seen[f"{one} {kind}"] & seen[f"{other} {kind}"]


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(tmp_path) -> None:
    def content(name: str, seed: int) -> dict[str, str]:
        tasks.train(tmp_path / name, seed, 12)
        return {str(f.relative_to(tmp_path / name)): f.read_text() for f in sorted((tmp_path / name).rglob("*")) if f.is_file()}

    assert content("a", 3) == content("b", 3)
    assert content("a", 3) != content("c", 4)


def test_the_loader_takes_every_task_without_a_note(tmp_path) -> None:
    tasks.heldout(tmp_path, 0)
    for directory in tmp_path.iterdir():
        task = load_task(directory)
        assert task.notes == () and task.unsupported() == [] and task.unsupported(isolation="none") == []
        assert task.workdir == "/workspace" and task.instruction.strip()
