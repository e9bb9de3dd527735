"""Exports read back by the libraries that they are for, each in its own environment (`python -m tests.readers`)."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from forge_ray.cli.main import main
from forge_ray.run_dir import RunDir
from forge_ray.tasks.digest import task_digest
from forge_ray.trajectories.store.reader import StoreReader
from tests.readers import HARBOR, TRL, VERL
from tests.tiny_model import tiny_model
from tests.unit.test_export import conversation, looking, stored_run
from tests.unit.test_task_digest import make_task

HERE = Path(__file__).parent / "readers"
PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two rollouts of the tiny model's tokenizer: one has failed, one has passed."""
    names = [f"g00000-{number}.0" for number in range(2)]
    policy = tiny_model()
    return stored_run(tmp_path_factory.mktemp("readers"), policy, {name: conversation(policy, name) for name in names})


def export(run: RunDir, form: str, tmp_path: Path) -> Path:
    assert main(["rollouts", "export", str(run.root), "--format", form, "--out", str(tmp_path / form)]) == 0
    return tmp_path / form


def test_harbor_s_validator_takes_every_trajectory(run: RunDir, tmp_path: Path) -> None:
    seen = stored_run(tmp_path, tiny_model(), {"g00001-0.0": looking(tiny_model(), "g00001-0.0")})
    shutil.copy(export(seen, "atif", tmp_path / "run") / "g00001-0.0.json", export(run, "atif", tmp_path))
    found = json.loads(HARBOR.run(HERE / "harbor_reads.py", tmp_path / "atif"))
    assert found == {"g00000-0.0.json": [], "g00000-1.0.json": [], "g00001-0.0.json": []}
    broken = tmp_path / "broken"
    broken.mkdir()
    document = json.loads((tmp_path / "atif" / "g00000-0.0.json").read_text())
    document["steps"][0]["weather"] = "rain"
    (broken / "x.json").write_text(json.dumps(document))
    assert json.loads(HARBOR.run(HERE / "harbor_reads.py", broken))["x.json"], "the validator can say no"


def test_harbor_counts_a_task_s_digest_as_we_do(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    for rules in (None, "b.txt\n*.sh\n!solve.sh\n", "/tests/\n"):
        if rules is not None:
            (task / ".gitignore").write_text(rules)
        assert task_digest(task) == HARBOR.run(HERE / "harbor_digest.py", task).strip()


def test_trl_reads_chat_lines_and_trains_on_sequences(run: RunDir, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in export(run, "chat", tmp_path).read_text().splitlines()]
    assert all(line["exact"] for line in lines)
    rows = pq.read_table(export(run, "trl", tmp_path)).to_pylist()
    arguments = (tmp_path / "chat", tmp_path / "trl", tiny_model(), tmp_path / "cache")
    found = json.loads(TRL.run(HERE / "trl_reads.py", *arguments).splitlines()[-1])
    seen = {call.id: call.prompt_ids + call.ids for _, calls in StoreReader(str(run.data)).with_calls() for call in calls}
    for line, ids in zip(lines, found["chat"], strict=True):
        # The template ends the last message with a line break, which nobody sampled.
        assert ids[: len(seen[line["call"]])] == seen[line["call"]] and len(ids) <= len(seen[line["call"]]) + 1
    for row, labels in zip(rows, found["labels"], strict=True):
        wanted = [
            token if chosen else -100
            for token, chosen in zip(row["input_ids"], [0] * len(row["prompt_ids"]) + row["env_mask"], strict=True)
        ]
        assert labels[: len(wanted)] == wanted and set(labels[len(wanted) :]) <= {-100}
    assert math.isfinite(found["loss"])
    trained = []
    for prompt, there, completion, mask in zip(
        *(found[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "mask")), strict=True
    ):
        prompt = [token for token, real in zip(prompt, there, strict=True) if real]
        trained.append((prompt, [token for token, chosen in zip(completion, mask, strict=True) if chosen]))
    stored = [(row["prompt_ids"], [t for t, chosen in zip(row["completion_ids"], row["env_mask"], strict=True) if chosen]) for row in rows]
    assert sorted(trained) == sorted(stored)
    mean = np.mean([row["reward"] for row in rows])
    assert sorted(np.sign(found["advantages"])) == sorted(np.sign([row["reward"] - mean for row in rows]))


def test_verl_makes_a_batch_by_the_lines_of_the_documentation(run: RunDir, tmp_path: Path) -> None:
    block = re.search(r"```python\n# veRL\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "lines.py").write_text(block[1])
    # One sequence per rollout: veRL's advantage is over sequences, ours over rollouts.
    assert main(["rollouts", "export", str(run.root), "--format", "verl", "--out", str(tmp_path / "all")]) == 0
    table = pq.read_table(tmp_path / "all")
    rows = table.take([n for n, row in enumerate(table.to_pylist()) if row["sample"] == 0])
    pq.write_table(rows, tmp_path / "verl")
    found = json.loads(VERL.run(HERE / "verl_reads.py", tmp_path / "verl", tmp_path / "lines.py").splitlines()[-1])
    assert found["parts"] == [1, 1]
    for number, row in enumerate(rows.to_pylist()):
        real = [token for token, there in zip(found["input_ids"][number], found["attention_mask"][number], strict=True) if there]
        assert real == row["prompts"] + row["responses"]
        places = [place for place, there in zip(found["position_ids"][number], found["attention_mask"][number], strict=True) if there]
        assert places == list(range(len(real)))
        length = len(row["responses"])
        assert found["response_mask"][number][:length] == row["response_mask"] and not any(found["response_mask"][number][length:])
        np.testing.assert_allclose(found["rollout_log_probs"][number][:length], row["rollout_log_probs"])
    np.testing.assert_allclose(found["ours"], found["theirs"], atol=1e-5)
    assert math.isfinite(found["loss"])
