"""Studies: cells are done once, taken up where they were, and put into a table. The runs themselves are played here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Config, Harness, Sft, Source, load
from forge_ray.errors import UserError
from forge_ray.report.metrics import MetricsWriter
from forge_ray.study import ablation, transfer
from forge_ray.study.cells import Training, plain
from forge_ray.study.study import Study

RATES = {"all": 0.9, "last": 0.6}
CONFIG = """
name: s
policy: {model: m}
harnesses: [{name: react}, {name: codex}]
tasks: {train: t, heldout: h}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "run.yaml").write_text(CONFIG)
    return load(tmp_path / "run.yaml", [f"runs={tmp_path}"])


class Runs:
    """Plays the command line: `train` makes a run directory, `eval` its file; fails or is interrupted where it is told to."""

    def __init__(self, **ends: int) -> None:
        self.words: list[list[str]] = []
        self._ends = ends

    def __call__(self, words: Sequence[str]) -> int:
        self.words.append(list(words))
        given = dict(word.split("=", 1) for word in words if "=" in word)
        if words[0] == "eval":
            file = Path(words[list(words).index("--json") + 1])
            if code := self._ends.pop(file.stem, 0):
                run = Path(given["runs"]) / f"{given['name']}-eval-1"
                run.mkdir(parents=True)
                (run / "plan.json").write_text("{}")
                return code
            trained = "start" not in file.stem
            passed = {f"t{number}": [trained, True] for number in range(8)}
            rate = {"pass@1": 1.0 if trained else 0.5, "low": 0.4, "high": 1.0}
            parts = dict.fromkeys(("react", "codex"), rate)
            file.write_text(json.dumps({**rate, "by_harness": parts, "passed": dict.fromkeys(parts, passed)}))
            return 0
        run = Path(words[2]) if words[1] == "--resume" else Path(given["runs"]) / given["name"]
        (run / "checkpoints" / "step-000003").mkdir(parents=True, exist_ok=True)
        (run / "state.json").write_text("{}")
        if code := self._ends.pop(run.name, 0):
            return code
        value = next(value for name, value in (RATES | {"trained": 0.5}).items() if name in run.name)
        rates: dict[str, Any] = {"after": {"pass@1": value + int(run.name[-1] if "seed" in run.name else 0) / 100}}
        if "eval.before=false" not in words:
            rates["before"] = {"pass@1": 0.2}
        (run / "summary.json").write_text(json.dumps({"heldout": rates}))
        MetricsWriter(run / "metrics.jsonl").close()
        return 0


def study(config: Config, runs: Runs, said: list[str] | None = None) -> Study:
    made = Study(Path(config.runs) / "s-ablate", (said if said is not None else []).append, runs)
    made.open(config, {}, free=["seed"])
    return made


def test_cells_are_done_once_and_taken_up(config: Config) -> None:
    found, seeds, said = ablation.settings(["credit.scope=all,last"]), range(2), list[str]()
    cells, root = ablation.cells(config, found, seeds), Path(config.runs) / "s-ablate"
    assert [cell.name for cell in cells] == ["scope-all-seed-0", "scope-last-seed-0", "scope-all-seed-1", "scope-last-seed-1"]
    runs = Runs(**{"scope-last-seed-0": 130, "scope-all-seed-1": 1})
    with study(config, runs, said) as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.run(cells)
    assert "3 of 4 cells are left" in said[-1]
    with study(config, runs, said) as failing:
        failing.run(cells)
        lines = ablation.table(ablation.read(root, config, found, seeds), seeds)
        assert failing.failed == {"scope-all-seed-1": 1} and failing.end(lines, 0.0) == 1
    assert lines[2].endswith("0.900 – |"), "what is done makes a table"
    assert (root / "table.md").read_text() == "\n".join(lines) + "\n" and "tries them again" in said[-1]
    with study(config, runs) as last:
        last.run(cells)
    first = ["train", str(root / "config.yaml"), 'train.credit.scope="all"', "seed=0", "name=scope-all-seed-0", f"runs={root}"]
    assert runs.words[0] == first, "from a copy of the config, whatever becomes of the user's"
    assert [words[1] == "--resume" for words in runs.words] == [False, False, True, False, False, True]
    before = len(runs.words)
    with study(config, runs) as again:
        again.run(cells)
    assert len(runs.words) == before, "all is done"
    rows = ablation.read(root, config, found, seeds)
    assert rows[1].gain == pytest.approx([0.4, 0.41]), "the start was evaluated once for each seed"
    lines = ablation.table(rows, seeds)
    assert "| scope-all | 0.905 ± " in lines[2] and "0.900 0.910" in lines[2]
    assert "| scope-last | 0.605 ± " in lines[3] and "| -0.300 ± 0.000 | 0.500 |" in lines[3]


def test_one_start_serves_all_settings_of_a_seed(config: Config, tmp_path: Path) -> None:
    sft = config.model_copy(update={"train": config.train.model_copy(update={"sft": Sft(demonstrations=Source(path="/d"))})})
    found = ablation.settings(["loss.kl=0,0.1"])
    first, second = ablation.cells(sft, found, [3])
    assert not any("sft" in word or "before" in word for word in second.words(tmp_path)), "the first is not done"
    start = tmp_path / first.name / "checkpoints" / "step-000000"
    start.mkdir(parents=True)
    first.done(tmp_path).write_text("{}")
    assert {f"policy.model={start}", "train.sft=null", "eval.before=false"} <= set(second.words(tmp_path))
    assert not any("step-000000" in word for word in ablation.cells(config, found, [3])[1].words(tmp_path)), "nothing was made at the start"
    for own in ("sft.lr=1e-3,1e-4", "proxy.max_call_tokens=1,2", "train.precision=float32,bfloat16"):
        assert not ablation.shared_start(sft, ablation.settings([own]))


def test_a_study_is_of_one_config_and_one_process(config: Config) -> None:
    other = config.model_copy(update={"train": config.train.model_copy(update={"steps": 7})})
    elsewhere = config.model_copy(update={"seed": 5, "proxy": config.proxy.model_copy(update={"port": 5})})
    with study(config, Runs()), pytest.raises(UserError, match="another process is at work on this study"):
        study(config, Runs())
    with study(other, Runs()) as begun:  # nothing was made of the first
        begun.run([Training("x-all")])
    with study(other.model_copy(update={"seed": 5, "proxy": elsewhere.proxy}), Runs()):
        pass
    with pytest.raises(UserError, match=r"holds cells of another config: train\.steps was 7 and is 100"):
        study(config, Runs())


def test_the_directory_of_a_run_is_no_study(config: Config) -> None:
    run = Path(config.runs) / "s-ablate"
    run.mkdir(parents=True)
    (run / "state.json").write_text("{}")
    with pytest.raises(UserError, match="is the directory of a run"):
        study(config, Runs())


def test_a_cell_without_its_file_is_not_done(config: Config) -> None:
    silent = Study(Path(config.runs), print, lambda words: 0)
    silent.run([Training("y")])
    assert silent.failed == {"y": 0}


def test_names_tell_cells_apart() -> None:
    names = [plain(text) for text in ("lr-1e-6", "lr--1e-6", "a/b", "a-b", "x" * 60, "x" * 61, "/")]
    assert names[0] == "lr-1e-6" and len(set(names)) == len(names) and max(map(len, names)) <= 40


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ("credit.scope", "nothing to compare"),
        ("credit.scope=all", "nothing to compare"),
        ("scope=[all", "nothing to compare"),
        ("nonsense=1,2", "no key of the config"),
        ("lr=1,2", "may be"),
        ("credit.scope=all,all", "two values are one"),
        ("seed=1,2", "the study's own"),
    ],
)
def test_what_cannot_be_compared_is_said(over: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ablation.settings([over])


def test_several_keys_are_combined() -> None:
    found = ablation.settings(["train.optimizer.lr=1e-6,3e-6", "loss.kl=0,0.1"])
    names = [setting.name for setting in found]
    assert names == ["optimizer.lr-1e-6, loss.kl-0", "optimizer.lr-1e-6, loss.kl-0.1", "optimizer.lr-3e-6, loss.kl-0", names[3]]
    assert found[3].overrides == ('train.optimizer.lr="3e-6"', "train.loss.kl=0.1")
    assert found[3].cell(2).name == "optimizer.lr-3e-6_loss.kl-0.1-seed-2", "not what sft.lr or stale.kl would be called"
    assert ablation.full_key("train.loss.kl") == ablation.full_key("loss.kl") == "train.loss.kl"
    assert ablation.settings(["policy.engine.max_num_seqs=1,2"])[0].overrides == ("policy.engine.max_num_seqs=1",)


def test_transfer(config: Config) -> None:
    root = Path(config.runs) / "s-transfer"
    made = transfer.plan(config, None, None)
    assert made == transfer.Plan((("react",), ("codex",), ("react", "codex")), ("react", "codex"))
    runs = Runs(**{"trained-codex": 1, "trained-react-in-react_codex-k4": 130})
    with Study(root, lambda line: None, runs) as one:
        one.open(config, {})
        assert transfer.evaluations(config, made, root, 4) == []
        one.run(transfer.trainings(config, made))
        assert one.failed == {"trained-codex": 1}
        assert json.loads(runs.words[0][2].removeprefix("harnesses="))[0]["name"] == "react"
        with pytest.raises(KeyboardInterrupt):
            one.run(transfer.evaluations(config, made, root, 4))
        one.run(transfer.evaluations(config, made, root, 4))
        assert [words[1] == "--resume" for words in runs.words[3:]] == [False, False, True, False], "taken up, and once for all columns"
        assert runs.words[-1][3].endswith("trained-react_codex/checkpoints/step-000003")
    lines = transfer.table(config, made, root, 4)
    assert lines[0] == "| trained in | react | codex |" and lines[2].startswith("| initial policy | 0.500 [0.400, 1.000] |")
    assert lines[4] == "| codex | – | – |"
    assert lines[5] == "| react+codex | 1.000 [0.400, 1.000] (+0.500*) | 1.000 [0.400, 1.000] (+0.500*) |"
    assert transfer.table(config, made, root, 8)[5] == "| react+codex | – | – |", "more rollouts are another evaluation"
    for train, columns in (("react+nobody", None), (None, "nobody")):
        with pytest.raises(UserError, match="no harness 'nobody'"):
            transfer.plan(config, train, columns)


def test_transfer_begins_where_the_supervised_start_ended(config: Config, tmp_path: Path) -> None:
    named = [Harness(name="react"), Harness(name="/x/h.py:Own")]
    sft = config.train.model_copy(update={"sft": Sft(demonstrations=Source(path="/d"))})
    own = config.model_copy(update={"train": sft, "harnesses": named})
    made = transfer.plan(own, "react,Own", "Own")
    assert made == transfer.Plan((("react",), ("/x/h.py:Own",)), ("/x/h.py:Own",)), "one from a file goes by its class"
    first, second = transfer.trainings(own, made)
    for cell in (first, second):
        (tmp_path / cell.name / "checkpoints" / "step-000000").mkdir(parents=True)
        (tmp_path / cell.name / "checkpoints" / "step-000003").mkdir(parents=True)
    first.done(tmp_path).write_text("{}")
    assert "train.sft=null" in second.words(tmp_path)
    rows = transfer.evaluations(own, made, tmp_path, None)
    assert [cell.checkpoint for cell in rows] == [str(tmp_path / first.name / "checkpoints" / f"step-00000{step}") for step in (0, 3)]
    assert transfer.table(own, made, tmp_path, None)[2:] == ["| after the supervised start | – |", "| react | – |", "| Own | – |"]
