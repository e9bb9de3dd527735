"""Rescoring: archived workspaces in fresh sandboxes, new verdicts beside the old ones."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from forge_ray.cli.main import main
from forge_ray.config import Config, load
from forge_ray.job.rescore import rescore, stored
from forge_ray.outcome import Outcome
from forge_ray.run_dir import RunDir
from forge_ray.sandboxes.archive import archive_tree
from forge_ray.sandboxes.removal import remove_tree
from forge_ray.trajectories.store import rescores
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.schema import StoreError
from tests.stored_run import archived, store, stored_run
from tests.task_maker import make_task
from tests.unit.making import make_call, make_record

OUT = "${VERIFIER_DIR:-/logs/verifier}"
CHECKS = f'#!/bin/sh\n[ "$(cat answer.txt)" = 42 ] && echo 1 > {OUT}/reward.txt || echo 0 > {OUT}/reward.txt\n'
PRESENT = f"#!/bin/sh\n[ -e answer.txt ] && echo 1 > {OUT}/reward.txt || echo 0 > {OUT}/reward.txt\n"
ODD = (
    "#!/bin/bash\n"
    r"""if [ -e "$(printf 'caf\351.txt')" ] && [ -p fifo ] && [ "$(readlink out)" = /root ] && [ "$(readlink loop)" = loop ] """
    f"\\\n && [ $(stat -c %a ro) = 555 ]; then echo 1 > {OUT}/reward.txt; else echo 0 > {OUT}/reward.txt; fi\n"
    "printf '\\377\\360\\050\\n'; head -c 100000 /dev/urandom\n"
)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    make_task(tmp_path / "tasks" / "t0", test=CHECKS)
    make_task(tmp_path / "tasks" / "odd", test=ODD)
    return tmp_path / "tasks"


@pytest.fixture
def run(tmp_path: Path, tasks: Path) -> RunDir:
    tree: dict[str, Any] = {
        "name": "stored", "runs": str(tmp_path / "runs"), "policy": {"model": str(tmp_path)}, "harnesses": [{"name": "react"}],
        "tasks": {"train": str(tasks)}, "sandbox": {"directory": str(tmp_path / "boxes")},
    }  # fmt: skip
    return stored_run(tmp_path / "runs" / "stored", Config.model_validate(tree))


def rollout(run: RunDir, tasks: Path, slot: int, answer: str | None, reward: float | None, task: str = "t0", **changes: Any) -> None:
    files = {} if answer is None else {"answer.txt": answer}
    record = make_record(
        f"g00000-{slot}.0", reward, task=str(tasks / task), task_name=task, **{"workspace_digest": archived(run, files), **changes}
    )
    store(run, [(record, [make_call([1], [2, 3], session=record.id)])])


def rows(run: RunDir) -> dict[str, rescores.Rescored]:
    found = rescores.rows(StoreReader(str(run.data)).table("rescores"))
    return rescores.choose(found, rescores.LATEST)


def test_a_changed_verifier_judges_again_and_the_old_rewards_stay(run: RunDir, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout(run, tasks, 0, "42", 1.0)
    rollout(run, tasks, 1, "41", 0.0)
    rollout(run, tasks, 2, None, 0.0)
    rollout(run, tasks, 3, "42", None, outcome=Outcome.VERIFIER, detail="no file (the rollout before it: truncated, deadline)")
    rollout(run, tasks, 4, "42", None, workspace_digest=None)
    before = {file: file.read_bytes() for file in run.rollouts.glob("*/result.json")}
    assert main(["rollouts", "rescore", str(run.root), "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "4 rollouts judged, 1 changed" in said and "flips: 0 fail to pass, 0 pass to fail" in said
    assert "not judged: 1 x no workspace was archived (outcome harness)" in said
    found = rows(run)
    assert {name: (row.outcome, row.reward) for name, row in found.items()} == {
        "g00000-0.0": ("ok", 1.0), "g00000-1.0": ("ok", 0.0), "g00000-2.0": ("ok", 0.0), "g00000-3.0": ("truncated", 1.0),
    }  # fmt: skip
    (tasks / "t0" / "tests" / "test.sh").write_text(PRESENT)
    assert main(["rollouts", "rescore", str(run.root), "--task", "t*", "--outcome", "ok"]) == 0
    said = capsys.readouterr().out
    assert "3 rollouts judged, 1 changed" in said and "flips: 1 fail to pass, 0 pass to fail" in said and "t0: 1 of 3 changed" in said
    assert "mean of both" in said and "0.3333" in said and "0.6667" in said
    again = rows(run)
    assert again["g00000-1.0"].reward == 1.0 and again["g00000-1.0"].verifier_digest != found["g00000-1.0"].verifier_digest
    assert again["g00000-1.0"].by.count("@") == 1 and again["g00000-1.0"].at > found["g00000-1.0"].at
    assert again["g00000-3.0"] == found["g00000-3.0"], "a filter leaves the others as they are"
    assert {file: file.read_bytes() for file in before} == before
    every = rescores.rows(StoreReader(str(run.data)).table("rescores"))
    assert len(every) == 7 and len({row.rescore for row in every}) == 2, "rows are only added"
    assert not list((run.root.parent.parent / "boxes").glob("*/*")), "no sandbox is left"


def test_odd_names_fifos_and_links_are_in_the_sandbox_again(run: RunDir, tasks: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    script = r""": > "$(printf 'caf\351.txt')"; mkfifo fifo; ln -s /root out; ln -s loop loop"""
    script += "; mkdir ro; : > ro/f; chmod 444 ro/f; chmod 555 ro"
    tree.mkdir()
    assert os.spawnlp(os.P_WAIT, "sh", "sh", "-ec", f"cd {tree}; {script}") == 0
    digest = archive_tree(tree, run.rollouts / "archive")
    remove_tree(tree)
    rollout(run, tasks, 0, None, 0.0, task="odd", workspace_digest=digest)
    assert main(["rollouts", "rescore", str(run.root)]) == 0
    row = rows(run)["g00000-0.0"]
    assert row.reward == 1.0, row.detail
    (log,) = (run.root / "rescores").glob("*/verifier.log")
    assert log.stat().st_size > 100_000


def test_another_reward_function_and_weights(
    run: RunDir, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout(run, tasks, 0, "42", 1.0)
    rollout(run, tasks, 1, "41", 0.0)
    (tmp_path / "judge.py").write_text(
        "def brevity(rollout):\n"
        "    if rollout.rewards['reward'] == 0: return float('nan')\n"
        "    return len(rollout.calls[0].ids) * len((rollout.workspace / 'answer.txt').read_text())\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["rollouts", "rescore", str(run.root), "--function", "judge.py:brevity", "--weight", "reward=1", "--weight", "brevity=0.1"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "without a reward: 1 x " in said and "what it returned is nan" in said and f"--from-rollouts {run.root}" in said
    good, bad = rows(run)["g00000-0.0"], rows(run)["g00000-1.0"]
    assert good.reward == 1.4 and good.rewards == {"reward": 1.0, "brevity": 4.0} and len(good.reward_digest or "") == 64
    assert (bad.outcome, bad.reward) == (Outcome.VERIFIER, None) and "what it returned is nan" in bad.detail
    record = next(iter(rescores.apply([make_record("g00000-1.0", 0.0)], rows(run))))
    assert (record.outcome, record.reward) == (Outcome.VERIFIER, None), "a verdict that fails is never reward 0"
    assert main(["rollouts", "rescore", str(run.root), "--weight", "rewrad=1"]) == 0
    said = capsys.readouterr().out
    assert "without a reward: 2 x " in said and "'rewrad'" in said and "--from-rollouts" not in said


def test_a_file_name_that_is_no_utf8_in_an_error_costs_no_verdict(
    run: RunDir, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function that complains of such a file; and what the record of a rollout makes of the same line."""
    tree = tmp_path / "tree"
    tree.mkdir()
    Path(os.fsdecode(os.fsencode(tree) + b"/caf\xe9.txt")).write_text("x")
    rollout(run, tasks, 0, None, 0.0, workspace_digest=archive_tree(tree, run.rollouts / "archive"))
    rollout(run, tasks, 1, "42", 1.0)
    (tmp_path / "judge.py").write_text(
        "def strict(rollout):\n"
        "    for file in rollout.workspace.iterdir():\n"
        "        if file.name != 'answer.txt': raise ValueError(f'unexpected {file.name}')\n"
        "    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["rollouts", "rescore", str(run.root), "--function", "judge.py:strict", "--weight", "strict=1"]) == 0
    assert "2 rollouts judged" in capsys.readouterr().out
    found = rows(run)
    assert found["g00000-0.0"].outcome is Outcome.VERIFIER and "unexpected caf\ufffd.txt" in found["g00000-0.0"].detail
    assert found["g00000-1.0"].reward == 1.0
    record = make_record("g00000-0.0", None, detail="unexpected\n caf\udce9.txt")
    assert record.detail == "unexpected caf\ufffd.txt" and type(record).model_validate_json(record.model_dump_json()) == record


def test_verdicts_that_could_not_be_stored_are_stored_with_the_next(run: RunDir, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot in range(3):
        rollout(run, tasks, slot, "42", 0.0)
    config, put, full = load(run.config), rescores.put, [True]

    def once(*arguments: Any) -> None:
        if full.pop() if full else False:
            raise StoreError("no space left on device")
        put(*arguments)

    monkeypatch.setattr(rescores, "put", once)
    monkeypatch.setattr("forge_ray.job.rescore.PART", 2)
    with pytest.raises(StoreError, match="no space left"):
        asyncio.run(rescore(config, run, stored(config, run), tasks=None, jobs=1, told=lambda _: None))
    assert sorted(rows(run)) == ["g00000-0.0", "g00000-1.0"]


def test_what_cannot_be_judged_is_said_and_changes_nothing(run: RunDir, tasks: Path, tmp_path: Path, capsys: Any) -> None:
    rollout(run, tasks, 0, "42", 1.0)
    rollout(run, tasks, 1, "41", 0.0, task="gone")
    rollout(run, tasks, 2, "40", 0.0)
    (run.rollouts / "archive").joinpath(f"{archived(run, {'answer.txt': '40'})}.tar.gz").write_bytes(b"damaged")
    assert main(["rollouts", "rescore", str(run.root)]) == 0
    said = capsys.readouterr().out
    assert "1 rollouts judged, 0 changed" in said and "task gone is gone" in said and "cannot be restored" in said
    assert list(rows(run)) == ["g00000-0.0"], "a sandbox's failure is no verdict"
    other = tmp_path / "other"
    make_task(other / "t1")
    assert main(["rollouts", "rescore", str(run.root), "--tasks", str(other)]) == 0
    assert "no task t0 in" in capsys.readouterr().out
    for wrong, words in (
        (["--function", "nothing"], "names no function"),
        (["--weight", "x"], "is no weight"),
        (["--function", "no.py:f", "--weight", "f=1"], "does not exist"),
        (["--function", f"{__file__}:rows"], "nothing says what each is worth"),
        (["--outcome", "engine"], "no stored rollout is wanted"),
        (["--jobs", "0"], "sandboxes at a time"),
    ):
        assert main(["rollouts", "rescore", str(run.root), *wrong]) == 2
        assert words in capsys.readouterr().err


def test_what_was_judged_before_an_interruption_is_kept(run: RunDir, tasks: Path) -> None:
    for slot in range(4):
        rollout(run, tasks, slot, "42", 0.0)
    config = load(run.config)
    seen: list[str] = []

    def told(row: rescores.Rescored) -> None:
        seen.append(row.rollout)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(rescore(config, run, stored(config, run), tasks=None, jobs=1, told=told))
    assert sorted(rows(run)) == seen and len(seen) == 2
    assert not list((run.root.parent.parent / "boxes").glob("*/*"))
