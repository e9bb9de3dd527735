"""A task's digest: what belongs to a task and nothing else changes it. The values are Harbor's own, see `test_export_readers`."""

from __future__ import annotations

import os
from pathlib import Path

from forge_ray.tasks.digest import image_digest, task_digest


def make_task(directory: Path) -> Path:
    for name, content in {
        "task.toml": "", "instruction.md": "do", "README.md": "r", "other.txt": "no", "environment/Dockerfile": "FROM x",
        "environment/a~": "x", "environment/x/__pycache__/a.pyc": "x", "tests/test.sh": "true", "tests/b.txt": "b",
        "solution/solve.sh": "s", "steps/a/instruction.md": "i", "steps/a/tests/test.sh": "t",
    }.items():  # fmt: skip
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    for name, target in {"link": "b.txt", "loop": ".", "dangling": "nowhere"}.items():
        os.symlink(target, directory / "tests" / name)
    return directory


def test_only_what_belongs_to_the_task_counts(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    first = task_digest(task)
    assert first == "sha256:80cd9e5c7dbeb8767248b5aa94dd7486fcd8be8c649bdeaf7b24cba4dcceecdb"
    (task / "other.txt").write_text("yes")
    (task / "environment" / "new~").write_text("x")
    assert task_digest(task) == first
    (task / "tests" / "b.txt").write_text("c")
    assert task_digest(task) != first
    (task / "tests" / "b.txt").write_text("b")
    assert task_digest(task) == first


def test_the_image_has_a_digest_of_its_own(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    whole, image = task_digest(task), image_digest(task)
    (task / "tests" / "b.txt").write_text("c")
    assert image_digest(task) == image == "sha256:5b59ab73dd0a071e88ea786d794c43f5f30d49d637fb24e17b3ebf93b995a9a9" != whole
    (task / "environment" / "Dockerfile").write_text("FROM y")
    assert image_digest(task) != image


def test_a_change_within_one_tick_of_the_file_systems_clock_counts(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    file = task / "tests" / "b.txt"
    first, time = task_digest(task), file.stat().st_mtime_ns
    file.write_text("c")  # as long as it was
    os.utime(file, ns=(time, time))
    assert task_digest(task) != first


def test_its_gitignore_takes_the_place_of_the_usual_patterns(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (task / ".gitignore").write_text("b.txt\n*.sh\n!solve.sh\n")
    assert task_digest(task) == "sha256:0a56b645add6f2e66ff4cfd6853fc7d5e072d64ab395ee66b8eda5b0a7e62534"


def test_a_name_that_is_no_utf8_counts(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    first = task_digest(task)
    (tmp_path / "tests" / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert task_digest(task) != first
