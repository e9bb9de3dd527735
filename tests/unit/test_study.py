"""Studies: cells are done once, taken up where they were, and put into a table. The runs themselves are played here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.report.metrics import MetricsWriter
from forge_ray.study import ablation, transfer
from forge_ray.study.cells import CellFailed, Study, Training

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
            code = self._ends.pop(file.stem, 0)
            if not code:
                trained = "initial" not in file.stem
                passed = {f"t{number}": [trained, True] for number in range(8)}
                file.write_text(json.dumps({"pass@1": 1.0 if trained else 0.5, "low": 0.4, "high": 1.0, "passed": passed}))
            return code
        run = Path(words[2]) if words[1] == "--resume" else Path(given["runs"]) / given["name"]
        (run / "checkpoints" / "step-000003").mkdir(parents=True, exist_ok=True)
        (run / "state.json").write_text("{}")
        if code := self._ends.pop(run.name, 0):
            return code
        value = next(value for name, value in (RATES | {"trained": 0.5}).items() if name in run.name)
        rates: dict[str, Any] = {
            "before": {"pass@1": 0.2},
            "after": {"pass@1": value + int(run.name[-1] if "seed" in run.name else 0) / 100},
        }
        (run / "summary.json").write_text(json.dumps({"heldout": rates}))
        MetricsWriter(run / "metrics.jsonl").close()
        return 0


def study(config: Config, runs: Runs) -> Study:
    made = Study(Path(config.runs) / "s-ablate", "run.yaml", ["train.steps=3"], lambda line: None, runs)
    made.open(config, {})
    return made


def test_cells_are_done_once_and_taken_up(config: Config) -> None:
    found, seeds = ablation.settings(["credit.scope=all,last"]), range(2)
    cells = [setting.cell(seed) for seed in seeds for setting in found]
    assert [cell.name for cell in cells] == ["scope-all-seed-0", "scope-last-seed-0", "scope-all-seed-1", "scope-last-seed-1"]
    runs = Runs(**{"scope-last-seed-0": 130, "scope-all-seed-1": 1})
    with pytest.raises(KeyboardInterrupt):
        study(config, runs).run(cells)
    with pytest.raises(CellFailed, match="scope-all-seed-1 ended with exit code 1"):
        study(config, runs).run(cells)
    study(config, runs).run(cells)
    root = Path(config.runs) / "s-ablate"
    tail = [f"runs={root}"]
    assert runs.words[0] == ["train", "run.yaml", "train.steps=3", 'train.credit.scope="all"', "seed=0", "name=scope-all-seed-0", *tail]
    assert [words[1] for words in runs.words] == ["run.yaml", "run.yaml", "--resume", "run.yaml", "--resume", "run.yaml"]
    before = len(runs.words)
    study(config, runs).run(cells)
    assert len(runs.words) == before, "all is done"
    rows = ablation.read(root, found, seeds)
    lines = ablation.table(rows, seeds)
    assert "| scope-all | 0.905 ± " in lines[2] and "0.900 0.910" in lines[2]
    assert "| scope-last | 0.605 ± " in lines[3] and "| -0.300 ± 0.000 | 0.500 |" in lines[3]


def test_a_study_is_of_one_config(config: Config) -> None:
    study(config, Runs())
    study(config.model_copy(update={"seed": 5}), Runs())
    other = config.model_copy(update={"train": config.train.model_copy(update={"steps": 7})})
    with pytest.raises(UserError, match="holds cells of another config"):
        study(other, Runs())


def test_a_cell_without_its_file_is_not_done(config: Config) -> None:
    silent = Study(Path(config.runs), "run.yaml", [], print, lambda words: 0)
    with pytest.raises(CellFailed, match="cell y ended"):
        silent.run([Training("y")])


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ("credit.scope", "nothing to compare"),
        ("credit.scope=all", "nothing to compare"),
        ("scope=[all", "nothing to compare"),
        ("nonsense=1,2", "no key of the config"),
        ("lr=1,2", "may be"),
        ("credit.scope=all,all", "two values are one"),
    ],
)
def test_what_cannot_be_compared_is_said(over: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ablation.settings([over])


def test_several_keys_are_combined() -> None:
    found = ablation.settings(["train.optimizer.lr=1e-6,3e-6", "loss.kl=0,0.1"])
    assert [setting.name for setting in found] == ["lr-1e-6, kl-0", "lr-1e-6, kl-0.1", "lr-3e-6, kl-0", "lr-3e-6, kl-0.1"]
    assert found[3].overrides == ('train.optimizer.lr="3e-6"', "train.loss.kl=0.1")
    assert ablation.full_key("train.loss.kl") == ablation.full_key("loss.kl") == "train.loss.kl"


def test_transfer(config: Config) -> None:
    root = Path(config.runs) / "s-transfer"
    made = transfer.plan(config, None, None)
    assert made == transfer.Plan((("react",), ("codex",), ("react", "codex")), ("react", "codex"))
    runs = Runs()
    one = Study(root, "run.yaml", [], lambda line: None, runs)
    one.open(config, {})
    with pytest.raises(UserError, match="has no checkpoint"):
        transfer.evaluations(config, made, root, None)
    one.run(transfer.trainings(config, made))
    assert json.loads(runs.words[0][2].removeprefix("harnesses="))[0]["name"] == "react"
    one.run(transfer.evaluations(config, made, root, 4))
    assert len(runs.words) == 3 + 8 and runs.words[-1][3].endswith("trained-react-codex/checkpoints/step-000003")
    lines = transfer.table(config, made, root)
    assert lines[0] == "| trained in | react | codex |" and lines[2].startswith("| initial policy | 0.500 [0.400, 1.000] |")
    assert lines[5] == "| react+codex | 1.000 [0.400, 1.000] (+0.500*) | 1.000 [0.400, 1.000] (+0.500*) |"
    for train, columns in (("react+nobody", None), (None, "nobody")):
        with pytest.raises(UserError, match="no harness 'nobody'"):
            transfer.plan(config, train, columns)
