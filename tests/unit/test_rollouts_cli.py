"""`forge-ray rollouts ls | show | stats`: which rollouts, what is said of them, and stores that nobody brought up to date."""

from __future__ import annotations

import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forge_ray.cli.main import main
from forge_ray.cli.stored_run import stored_run as open_store
from forge_ray.errors import UserError
from forge_ray.outcome import Outcome
from forge_ray.report.stored import select, stats
from forge_ray.run_dir import RunDir
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.writer import StoreWriter
from tests.unit.making import make_call, make_record
from tests.unit.test_export import conversation, model, stored_run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Rollouts of two tasks and harnesses, one of each kind."""
    writer = StoreWriter(Location.of(tmp_path / "data"), Origin("run", policy="policy"))
    for number, (task, harness, outcome, reward, purpose) in enumerate(
        [
            ("sum-1", "react", "ok", 1.0, "train"),
            ("sum-1", "react", "ok", 0.0, "train"),
            ("sum-2", "codex", "truncated", 0.5, "train"),
            ("find-1", "codex", "harness", None, "train"),
            ("find-1", "react", "ok", 1.0, "eval"),
        ]
    ):
        record = make_record(
            f"r{number}-0.0", reward, purpose=purpose, task_name=task, harness=harness, outcome=Outcome(outcome), started=float(number),
            group=None if purpose == "eval" else number, seconds={"total": 2.0 + number}, calls=1,
        )  # fmt: skip
        writer.add(record, [make_call([1, 2], [3], session=record.id, purpose=purpose, spans=[("2.7", 0, 1)])], ("verdict\n", 8))
    writer.flush()
    return tmp_path / "data"


def listed(capsys: pytest.CaptureFixture[str], store: Path, *more: str) -> list[str]:
    assert main(["rollouts", "ls", str(store), "--json", *more]) == 0
    return [json.loads(line)["rollout"].partition("-")[0] for line in capsys.readouterr().out.splitlines()]


def test_each_filter_keeps_what_fits(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, store) == ["r0", "r1", "r2", "r3", "r4"]
    assert listed(capsys, store, "--task", "sum-*") == ["r0", "r1", "r2"] and listed(capsys, store, "--task", "sum-2") == ["r2"]
    assert listed(capsys, store, "--harness", "codex") == ["r2", "r3"] and listed(capsys, store, "--outcome", "truncated") == ["r2"]
    assert listed(capsys, store, "--purpose", "eval") == ["r4"] and listed(capsys, store, "--step", "7") == ["r4"]
    for condition, wanted in {">=0.5": "r0 r2 r4", "<0.5": "r1", "=1": "r0 r4", "1": "r0 r4", "!=0": "r0 r2 r4", "none": "r3"}.items():
        assert listed(capsys, store, "--reward", condition) == wanted.split(), condition
    assert listed(capsys, store, "--task", "sum-*", "--reward", ">0.9") == ["r0"] and listed(capsys, store, "--task", "x") == []


def test_a_harness_from_a_file_goes_by_its_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = StoreWriter(Location.of(tmp_path), Origin("run", policy="policy"))
    writer.add(make_record("r0-0.0", 1.0, harness="/x/mine.py:Mine"), [])
    writer.flush()
    for asked, wanted in {"Mine": ["r0"], "/x/mine.py:Mine": ["r0"], "/x/*": ["r0"], "mine": []}.items():
        assert listed(capsys, tmp_path, "--harness", asked) == wanted
    assert main(["rollouts", "ls", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert " Mine " in said and "/x/mine.py" not in said


@pytest.mark.parametrize("text", ["", ">=", "much", ">=1 and <2", "nan"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--reward"):
        select.bound(text)


def test_the_table_names_every_rollout(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "ls", str(store)]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("r0-0.0", "sum-2", "codex", "truncated", "5 rollouts"))


def test_statistics_have_an_interval_over_related_rollouts(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = select.rows(StoreReader(str(store)))
    train = stats.of([row for row in rows if row["purpose"] == "train"])
    assert (train["n"], train["rated"], train["truncated"], train["failed"]) == (4, 3, 0.25, 0.25)
    assert train["reward_mean"] == 0.5 and train["reward_ci"] == 0.0, "both tasks have a mean of 0.5"
    assert train["outcomes"] == {"harness": 1, "ok": 2, "truncated": 1} and train["seconds"] == 3.5 and train["trainable"] == 1.0
    assert stats.of([])["reward_mean"] is None and list(stats.by(rows, "step")) == ["7", "–"]
    assert main(["rollouts", "stats", str(store), "--json", "--by", "harness"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: row["n"] for name, row in found["by_harness"].items()} == {"codex": 2, "react": 3} and set(found) == {"all", "by_harness"}
    assert main(["rollouts", "stats", str(store)]) == 0 and "find-1" in capsys.readouterr().out
    assert main(["rollouts", "stats", str(store), "--by", "weather"]) == 2 and "weather" in capsys.readouterr().err


def test_one_rollout_is_shown_with_its_origin(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "show", str(store), "r2"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("r2-0.0 of run run", "truncated", "sum-2", "2.7 (1 tokens)", "verdict", "call 1 of 1"))
    assert main(["rollouts", "show", str(store), "r2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls_made"][0]["ids"] == [3]
    assert main(["rollouts", "show", str(store), "r"]) == 2 and "5 rollouts begin with 'r'" in capsys.readouterr().err
    assert main(["rollouts", "show", str(store), "x"]) == 2 and "no rollout 'x'" in capsys.readouterr().err


def test_tokens_are_printed_with_the_run_s_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = model(tmp_path / "m")
    run = stored_run(tmp_path, policy, {f"g00000-{n}.0": conversation(policy, f"g00000-{n}.0") for n in range(2)})
    assert main(["rollouts", "show", str(run.root), "g00000-1", "--tokens"]) == 0
    text = capsys.readouterr().out
    assert "step       4, group 0" in text and "'<|im_start|>'" in text and "trained: yes" in text


def test_a_stopped_run_s_store_is_completed_and_a_running_one_s_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = model(tmp_path / "m")
    run = stored_run(tmp_path, policy, {f"g00000-{n}.0": conversation(policy, f"g00000-{n}.0") for n in range(2)})
    late = make_record("g00001-0.0", 1.0, group=1, started=9.0)
    (run.rollouts / late.id).mkdir()
    (run.rollouts / late.id / "result.json").write_text(late.model_dump_json())
    with (run.root / ".lock").open("w") as driver:
        fcntl.flock(driver, fcntl.LOCK_EX)
        assert main(["rollouts", "ls", str(run.root)]) == 0
        printed = capsys.readouterr()
        assert "2 rollouts" in printed.out and "1 rollouts that have ended are not in the store yet" in printed.err
    assert main(["rollouts", "ls", str(run.root)]) == 0
    printed = capsys.readouterr()
    assert "3 rollouts" in printed.out and "are now" in printed.err
    assert main(["rollouts", "ls", str(run.root)]) == 0 and capsys.readouterr().err == ""


def test_commands_that_complete_a_store_at_the_same_time_take_turns(tmp_path: Path) -> None:
    """None takes another command for the run's driver and goes on with a part of the rollouts."""
    policy = model(tmp_path / "m")
    run = stored_run(tmp_path, policy, {})
    for number in range(20):
        late = make_record(f"g{number:05d}-0.0", 1.0, group=number, started=9.0)
        (run.rollouts / late.id).mkdir()
        (run.rollouts / late.id / "result.json").write_text(late.model_dump_json())
    with ThreadPoolExecutor(6) as pool:
        seen = list(pool.map(lambda _: open_store(str(run.root)).reader.table("rollouts", ["rollout"]).num_rows, range(6)))
    assert seen == [20] * 6


def test_what_is_neither_run_nor_store_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for where in ("nowhere", str(tmp_path), "memory://nothing/here"):
        assert main(["rollouts", "ls", where]) == 2
        assert where in capsys.readouterr().err
    for arguments in (["ls"], ["show", str(tmp_path)], ["export", str(tmp_path)], ["export", str(tmp_path), "--format", "x", "--out", "y"]):
        assert main(["rollouts", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"; see forge-ray rollouts {arguments[0]} --help")


def test_a_store_without_a_model_exports_tokens_and_refuses_text(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "export", str(store), "--format", "chat", "--out", str(tmp_path / "c")]) == 2
    assert "tokenizer" in capsys.readouterr().err and not (tmp_path / "c").exists()
    assert main(["rollouts", "export", str(store), "--format", "trl", "--out", str(tmp_path / "t")]) == 0
    assert main(["rollouts", "export", str(store), "--format", "trl", "--out", "/proc/t"]) == 2
    assert "--out: /proc/t cannot be written (" in capsys.readouterr().err
    assert RunDir(tmp_path).data == store


def test_behaviour_counts_every_sampled_reply_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One shell action of one tool in each rollout, that changes nothing; the history is rewritten afterwards."""
    policy = model(tmp_path / "m")
    run = stored_run(tmp_path, policy, {f"g00000-{n}.0": conversation(policy, f"g00000-{n}.0") for n in range(2)})
    assert main(["rollouts", "behaviour", str(run.root)]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line == "| training | 2 | 1.00 [0.00, 1.00] | 1.00 [0.00, 1.00] | – | – | 1.0 [0.0, inf] |", "one task tells no spread"
    assert main(["rollouts", "behaviour", str(run.root), "--purpose", "eval"]) == 0
    assert capsys.readouterr().out == "no rollout with a reward\n"
