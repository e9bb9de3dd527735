"""One run whose replica, rollout pool and driver are killed outright while it trains, and which `--resume` then finishes."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from forge_ray.config import load
from forge_ray.job.library import records
from forge_ray.outcome import RATED
from forge_ray.report.metrics import read_metrics
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir
from forge_ray.trajectories.call import Call, version_step
from forge_ray.trajectories.call_log import CallLogReader
from forge_ray.trajectories.store.reader import StoreReader
from tests.fault.command import Command, sandboxes, small_run

pytestmark = pytest.mark.timeout(900)
STEPS = 14
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Of Ray's own processes they end last: they try to tell a dead cluster about a dead raylet first, for about a minute."""


class Published(threading.Thread):
    """Watches a run's weight files (old ones are removed while it trains): digests of the tensors under each version label."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(daemon=True)
        self.digests: dict[str, set[str]] = {}
        self._run, self._seen, self._stop_it = run, set(), threading.Event()

    def run(self) -> None:
        while not self._stop_it.wait(0.02):
            self.look()

    def look(self) -> None:
        from safetensors.numpy import load

        for file in self._run.weights.glob("[!.]*.safetensors"):
            try:
                status = file.stat()
                key = (file.name, status.st_ino, status.st_mtime_ns)
                if key in self._seen:
                    continue
                tensors = load(file.read_bytes())
            except FileNotFoundError:
                continue
            self._seen.add(key)
            digest = hashlib.sha256()
            for name in sorted(tensors):
                digest.update(name.encode() + tensors[name].tobytes())
            self.digests.setdefault(file.name.removesuffix(".safetensors"), set()).add(digest.hexdigest())

    def stop(self) -> None:
        self._stop_it.set()
        self.join()
        self.look()


class Story:
    """What a run's directory tells."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._calls = CallLogReader(run.calls)

    def steps(self) -> int:
        return max((row.step for row in read_metrics(self.run.metrics)), default=0)

    def batches(self) -> dict[int, dict[str, int]]:
        """Step -> rollout id -> group."""
        import pyarrow.parquet

        found = {}
        for file in self.run.data.glob("samples/step=*/batch.parquet"):
            table = pyarrow.parquet.read_table(file, columns=["rollout", "group"])
            found[int(file.parent.name.removeprefix("step="))] = dict(zip(*(table.column(i).to_pylist() for i in range(2)), strict=True))
        return found

    def rated(self) -> dict[str, RolloutRecord]:
        return {record.id: record for record in records(self.run) if record.purpose == "train" and record.outcome in RATED}

    def calls(self, rollout: str) -> list[Call]:
        self._calls.refresh()
        return self._calls.session(rollout)

    def labels(self, rollout: str) -> set[str]:
        """Version labels of the trainable tokens of a rollout."""
        self._calls.refresh()
        return {label for call in self._calls.session(rollout) if call.trainable for label in call.versions()}

    def oldest(self, rollouts: list[str]) -> int | None:
        return min((version_step(label) for rollout in rollouts for label in self.labels(rollout)), default=None)

    def waiting_group(self) -> list[str]:
        """Finished rollouts of a group that no batch holds, all sampled by the version whose batch is the newest: the next batch's."""
        batches = self.batches()
        newest = max(batches, default=-1)
        used = {group for batch in batches.values() for group in batch.values()}
        groups: dict[int, list[str]] = {}
        for record in self.rated().values():
            if record.group is not None and record.group not in used:
                groups.setdefault(record.group, []).append(record.id)
        for found in groups.values():
            if all({version_step(label) for label in self.labels(rollout)} == {newest} for rollout in found):
                return found
        return []


def kill(command: Command, title: str) -> psutil.Process:
    """SIGKILL the process; it is replaced by Ray."""
    process = command.until(title, lambda: command.find(title))
    process.send_signal(signal.SIGKILL)
    command.until(f"a new {title}", lambda: (new := command.find(title)) is not None and new != process)
    return process


def in_flight(run: RunDir) -> list[Path]:
    return [path for path in run.rollouts.glob("g*") if not (path / "result.json").exists()]


def test_a_run_survives_its_parts_and_its_driver(policy: Path, tmp_path: Path) -> None:
    words = small_run(policy, tmp_path, "kills", 18770, steps=STEPS)
    run = RunDir(tmp_path / "runs" / "kills")
    story, published = Story(run), Published(run)
    published.start()
    with Command(*words, "train.checkpoint_every=3", directory=tmp_path) as first:
        first.until("step 1", lambda: story.steps() >= 1)
        kill(first, "ray::ServeReplica")
        first.until("calls of the new replica", lambda: len(list(run.calls.glob("*.jsonl"))) > 1)
        before = story.steps()
        first.until("a step after the replica's end", lambda: story.steps() > before)

        first.until("rollouts in flight", lambda: in_flight(run))
        kill(first, "ray::RolloutPool")
        before = story.steps()
        first.until("a step after the pool's end", lambda: story.steps() > before)

        # The driver stands still while it is found out whether this is the moment: finished rollouts that the next batch should get.
        driver = psutil.Process(first.process.pid)
        carried: list[str] = []
        while not carried:
            formed = len(list(run.data.glob("samples/step=*/*.parquet")))
            first.until("a further batch", lambda formed=formed: len(list(run.data.glob("samples/step=*/*.parquet"))) > formed)
            assert formed <= STEPS - 4, "no moment came"
            driver.suspend()
            time.sleep(1)  # rollouts in flight end meanwhile
            if not (carried := story.waiting_group()):
                driver.resume()
        trained = story.batches()
        driver.kill()
        first.wait()
        assert [line for line in first.left() if not any(agent in line for agent in AGENTS)] == [], "processes outlive the driver"
        published.look()
        labels_before = set(published.digests)
        incarnations = json.loads(run.state.read_text())["incarnation"]
        rated_before = story.rated()

        with Command("train", "--resume", str(run.root), directory=tmp_path) as second:
            assert second.wait() == 0, second.text[-6000:]
            assert second.left() == []
            assert re.search(r"^resuming at step \d+; replaying \d+ recorded batch", second.text, re.MULTILINE), second.text[-6000:]
        assert first.left(120) == []
    published.stop()
    assert sandboxes(tmp_path) == []

    metrics = read_metrics(run.metrics)
    assert [row.step for row in metrics] == list(range(1, STEPS + 1))
    assert all((row.logprob_diff or 0) < 1e-3 for row in metrics)

    _each_rollout_once(story)
    _each_rollout_stored_once(story)
    batches = story.batches()
    assert {step: batches[step] for step in trained} == trained, "a batch that was formed is never changed"
    used = {rollout: step for step, batch in batches.items() for rollout in batch}
    assert all(used.get(rollout, -1) > max(trained) for rollout in carried), (carried, max(trained))
    assert {rollout: record for rollout, record in story.rated().items() if rollout in rated_before} == rated_before

    # Labels: one set of weights each, and the resumed run has new ones throughout.
    assert {label: len(found) for label, found in published.digests.items() if len(found) != 1} == {}
    assert len(set.union(*published.digests.values())) > STEPS // 2, "the steps change the weights"
    labels_after = set(published.digests) - labels_before
    assert {int(label.split(".")[0]) for label in labels_after} == {incarnations + 2}, "one for the proxy, one for the train worker"
    assert {label for rollout in used for label in story.labels(rollout)} <= set(published.digests)


def _each_rollout_stored_once(story: Story) -> None:
    """The store has what was recorded, call by call, whatever was killed: `float32` is all that the engine's logprobs are."""
    reader = StoreReader(str(story.run.data))
    assert sorted(record.id for record in reader.rollouts()) == sorted(record.id for record in records(story.run))
    assert reader.table("calls").num_rows == sum(len(calls) for _, calls in reader.with_calls())
    for record, calls in reader.with_calls():
        assert calls == story.calls(record.id), record.id
        assert record == next(known for known in records(story.run) if known.id == record.id)


def _each_rollout_once(story: Story) -> None:
    """Every rated rollout is in one batch, or it is told why it is in none."""
    batches, rated = story.batches(), story.rated()
    config = load(story.run.config).train
    assert sorted(batches) == list(range(STEPS))
    times = Counter(rollout for batch in batches.values() for rollout in batch)
    assert [rollout for rollout, count in times.items() if count > 1] == []
    keys = Counter(rated[rollout].key for rollout in times)
    assert [key for key, count in keys.items() if count > 1] == [], "two attempts at one rollout were both trained"

    step_of = {group: step for step, batch in batches.items() for group in batch.values()}
    groups: dict[int, list[str]] = {}
    for record in rated.values():
        assert record.group is not None
        groups.setdefault(record.group, []).append(record.id)
    formed = {step: (story.run.data / f"samples/step={step}/batch.parquet").stat().st_mtime for step in batches}
    lost = []
    for group, rollouts in groups.items():
        if group in step_of:
            # Its rated rollouts are all in the batch, but for those without a token to train.
            lost += [r for r in rollouts if r not in times and story.labels(r)]
            continue
        if len(rollouts) < config.group_size:
            continue  # not complete when the run ended
        oldest = story.oldest(rollouts)
        complete = max((story.run.rollouts / rollout / "result.json").stat().st_mtime for rollout in rollouts)
        for step, moment in formed.items():
            if oldest is None or complete > moment - 1 or step - oldest > config.max_staleness:
                continue
            # Fresh enough for this batch and ready: it may only have stood back behind older ones.
            chosen = {g: [r for r, of in batches[step].items() if of == g] for g in set(batches[step].values())}
            if any((story.oldest(members) or 0) > oldest for members in chosen.values()):
                lost += rollouts
    assert lost == []
