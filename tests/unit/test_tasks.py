"""Loading of Harbor-format task directories: what is valid, what is named, what is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from forge_ray.errors import UserError
from forge_ray.tasks.task import Task, load_task, load_tasks
from tests.task_maker import make_task


def refused(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_task(directory)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_whole_task(tmp_path: Path) -> None:
    task = load_task(
        make_task(
            tmp_path / "t",
            toml="""
            schema_version = "1.4"
            [task]
            name = "acme/sort-lines"
            [metadata]
            kind = "sort"
            [agent]
            timeout_sec = "60"
            [verifier]
            timeout_sec = 12.5
            env = { KEY = "value" }
            [environment]
            memory_mb = 512
            env = { A = "1" }
            """,
            instruction="# BENCHMARK canary 123\n<!-- canary guid -->\n\nSort the lines.\n",
        )
    )
    assert (task.name, task.instruction) == ("acme/sort-lines", "Sort the lines.\n")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.memory_mb) == (60.0, 12.5, 512)
    assert (task.env, task.verifier_env, task.notes, task.workdir) == ({"A": "1"}, {"KEY": "value"}, (), "/workspace")
    assert task.spec.metadata == {"kind": "sort"}
    assert task.unsupported() == [] and task.unsupported(isolation="none") == []
    assert pickle.loads(pickle.dumps(task)) == task


def test_an_empty_task_toml_and_no_verifier_section_are_valid(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path / "plain"))
    assert task.name == "plain"
    assert task.verifier_timeout_s is None and task.agent_timeout_s is None and task.notes == ()


def test_the_older_memory_and_storage_forms_are_read_with_a_note(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path / "t", toml='version = "1.0"\n[environment]\nmemory = "1G"\nstorage = "2048M"'))
    assert (task.memory_mb, task.spec.environment.storage_mb, task.spec.schema_version) == (1024, 2048, "1.0")
    assert len(task.notes) == 3 and all(str(tmp_path / "t" / "task.toml") in note for note in task.notes)
    assert task.unenforced() == [f"{task.directory}/task.toml: environment.storage_mb = 2048 is not enforced"]


def test_the_new_form_wins_over_the_old_one(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path / "t", toml='[environment]\nmemory = "8G"\nmemory_mb = 300'))
    assert task.memory_mb == 300
    assert "memory is ignored" in task.notes[0]


@pytest.mark.parametrize("value", ['"512MB"', "512", '"lots"'])
def test_a_size_that_says_nothing_is_refused(tmp_path: Path, value: str) -> None:
    line = refused(make_task(tmp_path / "t", toml=f"[environment]\nmemory = {value}"))
    assert "task.toml" in line and "environment.memory" in line and "memory_mb" in line


def test_unknown_keys_are_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    toml = "memory_mb = 5\n[environment]\nmemroy_mb = 1024\n[agent]\nfrobnicate = 1\n[[environment.mcp_servers]]\nname='m'\ntransprot='sse'"
    notes = load_task(make_task(tmp_path / "t", toml=toml)).notes
    assert any("environment.memroy_mb" in n and "did you mean environment.memory_mb?" in n for n in notes)
    assert any("unknown key memory_mb" in n and "belongs in environment.memory_mb" in n for n in notes)
    assert any("agent.frobnicate" in n for n in notes)
    assert any("environment.mcp_servers[0].transprot" in n and "transport?" in n for n in notes)
    assert all(note.startswith(str(tmp_path / "t" / "task.toml")) for note in notes)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[agent\nx = 1", ["not TOML", "line 1"]),
        ("schema_version = 1.4", ["schema_version"]),
        ("[agent]\ntimeout_sec = -1", ["agent.timeout_sec", "-1"]),
        ("[agent]\ntimeout_sec = 'soon'", ["agent.timeout_sec", "soon"]),
        ("[task]\nname = 'no-org'", ["task.name"]),
        ("[task]\nversion = '1'", ["task.name is missing"]),
        ("[environment]\nenv = { A = 1 }", ["environment.env.A"]),
        ("[verifier]\nenvironment_mode = 'shared'\nenvironment = {}", ["verifier", "separate"]),
        ("[verifier]\nenv = { A = '${FORGE_RAY_TEST_UNSET}' }", ["verifier.env.A", "FORGE_RAY_TEST_UNSET"]),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, toml: str, words: list[str]) -> None:
    line = refused(make_task(tmp_path / "t", toml=toml))
    assert "task.toml" in line
    for word in words:
        assert word in line


def test_templates_are_whole_values_from_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_RAY_SET", "yes")
    monkeypatch.setenv("FORGE_RAY_EMPTY", "")
    toml = "[verifier.env]\nA='${FORGE_RAY_SET}'\nB='${FORGE_RAY_EMPTY:-default}'\nC='${FORGE_RAY_UNSET:-a ${x}}'\nD='a${FORGE_RAY_SET}'"
    assert load_task(make_task(tmp_path / "t", toml=toml)).verifier_env == {"A": "yes", "B": "", "C": "a ${x}", "D": "a${FORGE_RAY_SET}"}


def test_missing_parts_are_named(tmp_path: Path) -> None:
    for part in ("task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"):
        directory = make_task(tmp_path / part.replace("/", "_"))
        (directory / part).unlink()
        assert part in refused(directory) and "missing" in refused(directory)
    assert "no such task directory" in refused(tmp_path / "nowhere")
    (empty := make_task(tmp_path / "empty") / "instruction.md").write_text("# canary\n\n")
    assert "instruction.md: is empty" in refused(empty.parent)


def test_links_out_of_the_tests_are_refused(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t")
    (directory / "tests" / "inside").symlink_to("../environment/Dockerfile")
    load_task(directory)
    (directory / "tests" / "outside").symlink_to("/etc/passwd")
    assert "tests/outside" in refused(directory)


def test_what_the_process_sandbox_lacks_is_named(tmp_path: Path) -> None:
    toml = """
    artifacts = ["/out"]
    [agent]
    user = "app"
    [verifier]
    environment_mode = "separate"
    [environment]
    gpus = 1
    os = "windows"
    allow_internet = false
    docker_image = "python:3.13"
    cpus = 2
    [environment.healthcheck]
    command = "true"
    [[steps]]
    name = "one"
    """
    task = load_task(make_task(tmp_path / "t", toml=toml, dockerfile="FROM x\nWORKDIR /usr/src/app\nRUN apt-get install -y jq\n"))
    named = " ".join(task.unsupported())
    for word in ("artifacts", "agent.user", "separate", "gpus", "windows", "no-network", "docker_image", "healthcheck", "steps"):
        assert word in named
    assert "Dockerfile:3: RUN apt-get install -y jq" in named and "/usr/src/app" in named
    assert task.unenforced() == [f"{task.directory}/task.toml: environment.cpus = 2.0 is not enforced"]


def test_without_bubblewrap_literal_paths_are_named(tmp_path: Path) -> None:
    script = "#!/bin/sh\npython3 /tests/check.py\necho 1 > ${VERIFIER_DIR:-/logs/verifier}/reward.txt\n"
    task = load_task(make_task(tmp_path / "t", test=script, instruction="Write /workspace/out.txt"))
    assert task.unsupported(isolation="bubblewrap") == []
    lines = task.unsupported(isolation="none")
    assert len(lines) == 2
    assert "tests/test.sh names /tests literally" in lines[1] and "${TESTS_DIR:-/tests}" in lines[1]
    assert "instruction.md names /workspace literally" in lines[0]


def test_a_folder_of_tasks_is_sorted_and_names_every_broken_one(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        make_task(tmp_path / name)
    (tmp_path / "README.md").write_text("no task")
    (tmp_path / ".git").mkdir()
    tasks: list[Task] = load_tasks(tmp_path)
    assert [task.name for task in tasks] == ["a", "b", "c"]
    (tmp_path / "a" / "task.toml").write_text("[")
    (tmp_path / "c" / "instruction.md").unlink()
    with pytest.raises(UserError) as caught:
        load_tasks(tmp_path)
    line = str(caught.value)
    assert "2 of 3 tasks" in line and "a/task.toml" in line and "c/instruction.md" in line and "\n" not in line
    with pytest.raises(UserError, match="holds no task"):
        load_tasks(tmp_path / ".git")
    with pytest.raises(UserError, match="cannot be read"):
        load_tasks(tmp_path / "nowhere")
    with pytest.raises(UserError, match="b: is itself a task; name the folder that it lies in"):
        load_tasks(tmp_path / "b")


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_task(tmp_path / name, toml='[task]\nname = "org/same"')
    with pytest.raises(UserError, match="a and b have the same name org/same"):
        load_tasks(tmp_path)


def test_what_no_process_can_be_given_is_refused(tmp_path: Path) -> None:
    for number, (toml, words) in enumerate(
        [
            ('[environment.env]\nA = "x\\u0000y"', "no environment variable"),
            ('[environment.env]\n"A=B" = "1"', "no environment variable"),
            ('[verifier.env]\n"" = "1"', "verifier.env: '' = '1' is no environment variable"),
            ('[environment]\nmemory = "99999999999999999999G"', "memory_mb"),
            ("[environment]\nmemory_mb = 99999999999999", "memory_mb"),
            ("[agent]\ntimeout_sec = inf", "timeout_sec"),
            ("[verifier]\ntimeout_sec = nan", "timeout_sec"),
            ('[environment]\nworkdir = "/a\\u0000b"', "the working directory has a NUL"),
            (f'[environment]\nworkdir = "/{"a" * 300}"', "too long for a path"),
            ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ]
    ):
        assert words in refused(make_task(tmp_path / str(number), toml=toml))
    assert "NUL" in refused(make_task(tmp_path / "nul", instruction="a\0b"))
    assert "cannot be read" in refused(tmp_path / "a\0b")


def test_a_task_that_would_hang_or_loop_is_refused(tmp_path: Path) -> None:
    for name in ("instruction.md", "task.toml"):
        task = make_task(tmp_path / name)
        (task / name).unlink()
        os.mkfifo(task / name)
        assert "no regular file" in refused(task)
    task = make_task(tmp_path / "loop")
    (task / "tests" / "loop").symlink_to("loop")
    assert "leads nowhere" in refused(task)
    (tmp_path / "self").symlink_to("self")
    assert "cannot be read" in refused(tmp_path / "self")


def test_odd_lines_of_a_dockerfile_are_named_and_not_copied(tmp_path: Path) -> None:
    lines = ["COPY a\0b .", "ENV A=x\0y", "WORKDIR /a\0b", "ENV =x", "COPY fifo .", "COPY " + "[" * 100_000]
    task = make_task(tmp_path / "t", dockerfile="FROM x\n" + "\n".join(lines) + "\n")
    os.mkfifo(task / "environment" / "fifo")
    loaded = load_task(task)
    assert len(loaded.image.unsupported) == len(lines) and loaded.image.copies == () and loaded.env == {}
    assert any("fifo (no regular file)" in line for line in loaded.image.unsupported)
