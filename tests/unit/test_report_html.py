"""The report, the summary and the printed trajectory, on made-up run directories: whole, empty, cut short, hostile."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forge_ray.outcome import Outcome
from forge_ray.report import html
from forge_ray.report.examples import choose
from forge_ray.report.metrics import MetricsWriter
from forge_ray.report.phases import Phase, PhaseLog
from forge_ray.report.records import evaluations, read_records
from forge_ray.report.summary import write_summary
from forge_ray.report.text import decoder, numbers, pieces
from forge_ray.report.trajectory import print_trajectory
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir
from forge_ray.trajectories.call_log import CallLogReader, CallLogWriter

HOSTILE = "<script>alert('x')</script> & \"q\" \x1b[2J \udcff"


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, so that characters span tokens."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def record(key: str, task: Path, outcome: Outcome, reward: float | None, started: float, detail: str = "final answer") -> RolloutRecord:
    evaluation = key.startswith("eval")
    return RolloutRecord(
        id=f"{key}.0", key=key, purpose="eval" if evaluation else "train", task=str(task), task_name=task.name, harness="react",
        group=None if evaluation else 0, attempt=0, outcome=outcome, detail=detail, reward=reward, calls=2, sampled_tokens=12,
        started=started, seconds={"total": 0.4},
    )  # fmt: skip


def write_record(run: RunDir, made: RolloutRecord) -> None:
    directory = run.rollouts / made.id
    directory.mkdir(parents=True)
    (directory / "result.json").write_text(made.model_dump_json())


async def write_calls(run: RunDir, sessions: list[str], said: str, asked: str) -> None:
    tokenizer, log = byte_tokenizer(), CallLogWriter(run.calls / "r1.jsonl")
    for number, session in enumerate(sessions):
        parent, known = None, 0
        for turn, (prompt, answer) in enumerate([(asked, said), ("tool says: ✓ Grüße", "Done")]):
            call, now = f"{session}-c{turn}", 1000.0 + 10 * number + turn
            new, ids = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
            await log.append(
                {
                    "event": "open", "call": call, "session": session, "purpose": "eval", "replica": "r1", "t": now, "dialect": "chat",
                    "path": "/v1/chat/completions", "streamed": False, "kind": "agent", "conversation": "1", "request_sha256": "0" * 64,
                    "parent": parent, "shared": known, "new": new, "sampling": {"temperature": 1.0}, "masked_by_grammar": False,
                    "max_tokens": 64, "version": "1.3",
                }
            )  # fmt: skip
            await log.append(
                {
                    "event": "finished", "call": call, "t": now + 0.5, "ids": ids, "logprobs": [-0.1 * (i % 7) for i in range(len(ids))],
                    "spans": [["1.3", 0, len(ids)]], "finish_reason": "stop", "stop_reason": None, "version": "1.3", "error": None,
                }
            )  # fmt: skip
            await log.append(
                {
                    "event": "delivered", "call": call, "t": now + 0.6, "response_sha256": "0" * 64, "bytes": 10, "status": 200,
                    "usage": None, "reply": "answer", "first_byte_s": 0.1, "last_byte_s": 0.5,
                }
            )  # fmt: skip
            parent, known = call, known + len(new) + len(ids)
    log.close()


def make_run(root: Path, *, steps: int = 12, said: str = "echo 137 > plain-dog.txt", asked: str = "Write 137 to plain-dog.txt") -> RunDir:
    """A run of two task families that went from 1/4 to 3/4."""
    run = RunDir(root / "run").create()
    run.config.write_text(yaml.safe_dump({"name": "made-up", "seed": 3, "train": {"logprob_bound": 1e-3}}))
    model = run.inputs / "model"
    model.mkdir()
    byte_tokenizer().save(str(model / "tokenizer.json"))
    random_source, phases = random.Random(0), PhaseLog(run.phases)
    for index, (name, seconds) in enumerate({"inputs": 12.5, "sft": 31.0, "engine": 40.0, "training": 80.0, "report": 1.5}.items()):
        phases.add(Phase(name, 1000.0 + 20 * index, seconds))
    with MetricsWriter(run.metrics) as metrics:
        for step in range(1, steps + 1):
            reward = 0.9 - 0.7 * math.exp(-step / 3) + random_source.gauss(0, 0.02)
            metrics.append(
                {
                    "event": "step", "step": step, "version": f"1.{step}", "seconds": 4.0, "reward_mean": reward, "reward_ci": 0.09,
                    "outcomes": {"ok": 60, "truncated": 4}, "tokens": 900, "logprob_diff": abs(random_source.gauss(2e-7, 1e-7)),
                }
            )  # fmt: skip
        for label, step in (("before", 0), ("step-6", 6), ("after", steps)):
            metrics.append({"event": "eval", "label": label, "step": step})
    sessions = []
    for label, share in (("before", 0.25), ("step-6", 0.6), ("after", 0.75)):
        for number in range(8):
            task = run.inputs / "tasks-heldout" / f"{('write', 'count')[number % 2]}-{number:03d}"
            task.mkdir(parents=True, exist_ok=True)
            (task / "task.toml").write_text(f'[metadata]\nfamily = "{("write", "count")[number % 2]}"\n')
            for sample in range(4):
                good = random_source.random() < share
                made = record(f"eval-{label}-{number:03d}-{sample}", task, Outcome.OK, float(good), 1000.0 + len(sessions))
                write_record(run, made)
                sessions.append(made.id)
    broken = record("g00000-1", Path("/gone/task"), Outcome.SANDBOX, None, 2000.0, detail=HOSTILE.encode("utf-8", "replace").decode())
    write_record(run, broken)
    asyncio.run(write_calls(run, sessions, said, asked))
    return run


class Page(HTMLParser):
    """Collects tags and text; fails on a handler, and on anything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        assert not any(name in ("src", "href") for name, _ in attrs), "the page must need nothing else"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_whole_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    summary = json.loads((write_summary(run), run.summary.read_text())[1])
    assert (summary["name"], summary["seed"], summary["steps"]) == ("made-up", 3, 12)
    assert set(summary["heldout"]) == {"before", "step-6", "after"}
    for label in ("before", "after"):
        rate = summary["heldout"][label]
        assert rate["n"] == 32 and 0 <= rate["low"] <= rate["pass@1"] <= rate["high"] <= 1
    assert summary["heldout"]["before"]["pass@1"] < summary["heldout"]["after"]["pass@1"]
    assert summary["outcomes"] == {"ok": 96, "sandbox": 1}
    assert summary["tokens"] == 97 * 12 and summary["trained_tokens"] == 12 * 900
    assert summary["seconds"]["sft"] == 31.0 and summary["seconds"]["total"] == 132.5  # 1000 … 1012.5 and 1020 … 1140
    assert summary["versions"]["python"]

    html.write_report(run)
    text = run.report.read_text()
    page = Page(text)
    seen = " ".join(page.texts)
    assert "script" not in page.tags
    assert page.tags.count("svg") == 2 and page.tags.count("article") == 3
    assert "write" in page.texts and "count" in page.texts, "a row per family"
    assert "echo 137 > plain-dog.txt" in re.sub(r"\s+", " ", "".join(page.texts))
    assert "✓ Grüße" in "".join(page.texts), "characters of several tokens are put together"
    assert "The run stops above 0.001." in seen
    assert re.search(r"held-out pass@1, step 6: ", text), "the evaluation in between is a point of the curve"
    assert f"<b>{summary['heldout']['after']['pass@1']:.2f}</b>" in text
    records = read_records(run)
    shutil.rmtree(run.rollouts)
    run.summary.unlink()
    assert html.render(run, records) == text, "records that were read are not read again"


def test_the_examples_pair_one_task_before_and_after(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    records = read_records(run)
    first, second, third = choose(evaluations(records), records)
    assert first.record.task_name == second.record.task_name
    assert (first.record.reward, second.record.reward, third.record.reward) == (0.0, 1.0, 0.0)
    assert [example.record.key.split("-")[1] for example in (first, second, third)] == ["before", "after", "after"]


def test_an_empty_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "empty")
    html.write_report(run)
    page = Page(run.report.read_text())
    assert "0 steps were trained" in " ".join(page.texts) and "svg" not in page.tags
    summary = json.loads((write_summary(run), run.summary.read_text())[1])
    assert summary["heldout"] == {"before": None, "after": None} and summary["steps"] == 0


def test_a_run_that_was_cut_short(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    with run.metrics.open("a") as file:
        file.write('{"event":"step","step":2,"reward_me')
    (run.rollouts / "g00001-0.0").mkdir()
    (run.rollouts / "g00001-0.0" / "result.json").write_bytes(b'{"id": "\xff')
    (run.calls / "r2.jsonl").write_bytes(b'{"event":"open","call":"torn')
    run.summary.write_text("{")
    run.phases.write_text("{\n")
    html.write_report(run)
    page = Page(run.report.read_text())
    assert page.tags.count("svg") == 2 and page.tags.count("article") == 3


def test_a_damaged_call_log_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with (run.calls / "r1.jsonl").open("a") as file:
        file.write("nonsense\n")
    html.write_report(run)
    assert "the call log is damaged" in run.report.read_text()


def test_a_hostile_run_cannot_write_html(tmp_path: Path) -> None:
    said = "</mark></pre><script>alert(1)</script><img src=x onerror=alert(1)>"
    run = make_run(tmp_path, said=said, asked="</style><iframe src='//evil'>'\"")
    for file in run.rollouts.glob("*/result.json"):
        made = RolloutRecord.model_validate_json(file.read_bytes())
        file.write_text(made.model_copy(update={"detail": said, "harness": "<b onclick=x>"}).model_dump_json())
    run.config.write_text(yaml.safe_dump({"name": "<script>", "seed": 0}))
    html.write_report(run)
    page = Page(run.report.read_text())
    assert not {"script", "img", "iframe"} & set(page.tags)
    assert said in "".join(page.texts), "shown as text"


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path) -> None:
    assert decoder(tmp_path) is numbers
    (tmp_path / "tokenizer.json").write_text("{}")
    assert decoder(tmp_path)([1, 2]) == "⟨1⟩⟨2⟩"


def test_pieces_are_whole_characters_and_cover_every_token(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    decode = decoder(tmp_path)
    ids = byte_tokenizer().encode("aé✓𝄞").ids
    assert [(text, end - first) for text, first, end in pieces(ids, decode)] == [("a", 1), ("é", 2), ("✓", 3), ("𝄞", 4)]
    broken = [*ids[:2], *byte_tokenizer().encode("b").ids * 20]  # a lone first byte of two
    spans = [(first, end) for _, first, end in pieces(broken, decode)]
    assert spans[0][0] == 0 and spans[-1][1] == len(broken) and all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert decode([2**40]) == f"⟨{2**40}⟩"


def test_a_printed_trajectory(tmp_path: Path) -> None:
    run = make_run(tmp_path, said="\x1b[2Jecho", asked="Q " * 2000)
    log = CallLogReader(run.calls)
    log.refresh()
    made = read_records(run)[0]
    calls = log.session(made.id)
    text = "\n".join(print_trajectory(calls, decoder(run.inputs / "model"), made))
    assert "\x1b" not in text and "\\x1b[2Jecho" in text, "a terminal must not obey the policy"
    assert "2800 characters]" in text
    assert "prompt 4008 known + 22 new" in text and "version 1.3" in text and "finished" in text
    assert f"outcome ok: final answer\nreward {made.reward:g}" in text
    assert "no call reached the proxy" in "\n".join(print_trajectory([], numbers))


@pytest.mark.parametrize("step_rows", [[], [{"step": 1}], [{"step": 1, "reward_mean": 2.5}, {"step": 2, "reward_mean": -1.0}]])
def test_curves_of_few_steps(tmp_path: Path, step_rows: list[dict[str, float]]) -> None:
    run = RunDir(tmp_path)
    with MetricsWriter(run.metrics) as metrics:
        for row in step_rows:
            metrics.append(row)
    html.write_report(run)
    text = run.report.read_text()
    assert ("<svg" in text) == any("reward_mean" in row for row in step_rows) and "nan" not in text.lower().replace("nano", "")


def test_a_curve_of_each_harness(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mixed").create()
    with MetricsWriter(run.metrics) as metrics:
        for step in (1, 2, 3):
            values = {"react": {"rollouts": 8, "reward_mean": step / 4}, "co<dex": {"rollouts": 8, "reward_mean": 0.1}}
            metrics.append({"event": "step", "step": step, "reward_mean": 0.4, "harnesses": values if step > 1 else None})
        metrics.append({"event": "eval", "label": "before", "step": 0})
    for harness in ("react", "co<dex"):
        made = record(f"eval-before-{harness[:2]}-0", tmp_path / "task", Outcome.OK, 1.0, 1.0)
        write_record(run, made.model_copy(update={"harness": harness}))
    page = html.render(run)
    assert "react" in page and "co&lt;dex" in page and "co<dex" not in page
    assert page.count("<tr><th>in ") == 2, "pass@1 in each"
    assert "react, step 3: 0.75" in page and "held-out in react, step 0: 1.000 [" in page and "held-out in co&lt;dex, step 0:" in page


def test_how_old_the_tokens_were_and_who_waited(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "async").create()
    with MetricsWriter(run.metrics) as metrics:
        metrics.append({"event": "step", "step": 1, "staleness_tokens": {"0": 300}, "trainer_idle_share": 0.75, "slot_idle_share": 0.5})
        metrics.append({"event": "step", "step": 2, "staleness_tokens": {"0": 100, "2": 300}, "trainer_idle_share": 0.25})
        metrics.append({"event": "step", "step": 3})
    page = html.render(run)
    for text in ("staleness 0, step 1: 1<", "staleness 2, step 2: 0.75<", "trainer idle, step 2: 0.25<", "places idle, step 1: 0.5<"):
        assert text in page
    assert "step 3:" not in page
