"""Offline training: which stored rollouts, in which groups, in which order; batches of them without Ray."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ray.config import Config, Proxy, Rollouts, load
from forge_ray.errors import UserError
from forge_ray.job import stored_groups
from forge_ray.job.library import Recordings
from forge_ray.job.offline import check_tokenizer, prepare
from forge_ray.job.step_report import StepReport
from forge_ray.job.stored_batches import UNKNOWN, StoredBatches
from forge_ray.job.stored_source import StoredSource
from forge_ray.model_files import tokenizer_sha256
from forge_ray.outcome import Outcome
from forge_ray.report.metrics import MetricsWriter, read_metrics, read_rows
from forge_ray.report.summary import Summary
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDamaged, RunDir
from forge_ray.trajectories.split import flat
from forge_ray.trajectories.store import rescores
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.writer import StoreWriter
from tests.stored_run import store, stored_run
from tests.unit.making import make_call, make_record


def config(offline: dict[str, Any] | None = None, **train: Any) -> Config:
    return Config.model_validate(
        {
            "name": "off", "seed": 3, "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t"},
            "train": {"groups_per_step": 2, "group_size": 3, "steps": 4, "offline": {"runs": ["/a"], **(offline or {})}, **train},
        }
    )  # fmt: skip


def records(groups: int, rewards: tuple[float | None, ...] = (0.0, 1.0, 0.5), **changes: Any) -> list[RolloutRecord]:
    return [
        make_record(f"g{group:05d}-{slot}.0", reward, group=group, **changes)
        for group in range(groups)
        for slot, reward in enumerate(rewards)
    ]


def ids(plan: stored_groups.Plan) -> list[list[str]]:
    return [[stored.record.id for stored in group] for group in plan.groups]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.data())
def test_every_epoch_has_each_group_once_and_no_step_a_group_twice(groups: int, data: st.DataObject) -> None:
    size, seed = data.draw(st.integers(1, groups)), data.draw(st.integers(0, 9))
    steps = list(islice(stored_groups.batches(groups, size, seed), 3 * groups))
    assert all(len(step) == size == len(set(step)) for step in steps)
    flat_order = [group for step in steps for group in step]
    counts = [flat_order.count(group) for group in range(groups)]
    assert max(counts) - min(counts) <= 1, "no group is ahead by more than the epoch that is under way"
    assert steps == list(islice(stored_groups.batches(groups, size, seed), 3 * groups))
    if size * 3 == groups:
        assert sorted(flat_order[:groups]) == list(range(groups))


def test_ten_tasks_in_batches_of_four_over_four_steps() -> None:
    steps = list(islice(stored_groups.batches(10, 4, 0), 4))
    first = [group for step in steps for group in step][:10]
    assert sorted(first) == list(range(10)), "the first epoch, which ends inside step 3, has each task once"
    assert len({group for step in steps[2:] for group in step}) >= 6


def test_groups_are_those_that_were_recorded() -> None:
    stored = [*records(3), make_record("g00001-1.1", 0.25, group=1, key="g00001-1", attempt=1)]
    stored += [make_record("g00003-0.0", 1.0, group=3), make_record("g00003-1.0", None, group=3)]
    stored += [make_record(f"g00004-{i}.0", float(i), group=4) for i in range(3)]
    stored += [make_record("g00004-3.0", None, group=4, outcome=Outcome.TASK)]
    plan = stored_groups.plan(config(), [("a", stored)])
    assert ids(plan) == [[f"g{group:05d}-{slot}.0" for slot in range(3)] for group in range(3)], "the first attempt that counts"
    assert plan.left_out == {
        "rollouts that ended harness": 1,
        "groups that are dropped by rollouts.on_outcome": 1,
        "groups with a single rollout that may be trained": 1,
    }


def test_what_a_run_would_drop_is_left_out_although_it_has_a_reward() -> None:
    cut = [one.model_copy(update={"outcome": Outcome.TRUNCATED} if one.key.endswith("-0") else {}) for one in records(2)]
    assert [len(group) for group in stored_groups.plan(config(), [("a", cut)]).groups] == [3, 3]
    papers = config().model_copy(update={"rollouts": Rollouts(preset="paper")})
    plan = stored_groups.plan(papers, [("a", cut)])
    assert [len(group) for group in plan.groups] == [2, 2] and plan.left_out == {"rollouts that ended truncated": 2}


def test_rollouts_of_several_runs_are_told_apart_and_grouped_anew_by_task_and_harness() -> None:
    sources = [("run", records(2)), ("run", records(2)), ("other", records(1, harness="codex"))]
    as_recorded = stored_groups.plan(config(), sources)
    assert len(as_recorded.groups) == 5 and len({name for group in ids(as_recorded) for name in group}) == 15
    assert as_recorded.sources == ["run", "run-2", "other"] and ids(as_recorded)[2][0] == "run-2/g00000-0.0"
    new = stored_groups.plan(config({"groups": "task_harness"}, group_size=6), sources)
    pairs = [{(stored.record.task_name, stored.record.harness, stored.record.group) for stored in group} for group in new.groups]
    assert [len(group) for group in new.groups] == [3, 6, 6] and all(len(pair) == 1 for pair in pairs)
    small = stored_groups.plan(config({"groups": "task_harness"}, group_size=4), sources)
    assert sorted(len(group) for group in small.groups) == [3, 4, 4] and small.left_out == {"rollouts left over when groups were made": 4}


def test_recorded_groups_of_several_harnesses_need_a_config_that_compares_them() -> None:
    mixed = [make_record(f"g{g:05d}-{n}.0", float(n), group=g, harness=("react", "codex")[n]) for g in range(2) for n in range(2)]
    with pytest.raises(UserError, match=r"train.advantage.group_by: the recorded groups mix harnesses \(codex, react\)"):
        stored_groups.plan(config(), [("a", mixed)])
    assert len(stored_groups.plan(config(advantage={"group_by": "task"}), [("a", mixed)]).groups) == 2
    anew = stored_groups.plan(config({"groups": "task_harness"}), [("a", [one.model_copy(update={"task_name": "t"}) for one in mixed])])
    assert [{stored.record.harness for stored in group} for group in anew.groups] == [{"codex"}, {"react"}]


def test_runs_of_one_name_are_told_apart_from_one_that_is_called_so() -> None:
    plan = stored_groups.plan(config(), [(name, records(1)) for name in ("a", "a", "a-2", "a")])
    assert plan.sources == ["a", "a-3", "a-2", "a-4"] and len({name for group in ids(plan) for name in group}) == 12


def test_what_fills_no_step_is_refused_with_the_reasons() -> None:
    stored = [*records(1), *records(1, (1.0, 1.0))[:0], make_record("g00007-0.0", 1.0, group=7)]
    with pytest.raises(UserError, match=r"1 groups of stored rollouts can be trained, and a step takes 2 \(1 groups with a single"):
        stored_groups.plan(config(), [("a", stored)])
    same = records(3, (1.0, 1.0, 1.0))
    assert len(stored_groups.plan(config(), [("a", same)]).groups) == 3
    with pytest.raises(UserError, match=r"3 groups whose rewards are all equal"):
        stored_groups.plan(config(dynamic_sampling=True), [("a", same)])
    told = [one.model_copy(update={"call_rewards": {"0": float(number)}}) for number, one in enumerate(same)]
    cut = [one.model_copy(update={"outcome": Outcome.TRUNCATED} if one.key.endswith("-0") else {}) for one in same]
    for found, rules in ((told, {}), (cut, {"truncated": "scale"})):
        assert len(stored_groups.plan(config(dynamic_sampling=True, credit=rules), [("a", found)]).groups) == 3
    for found, rules in ((told, {"call_rewards": 0}), (cut, {})):
        with pytest.raises(UserError, match=r"3 groups whose rewards are all equal"):
            stored_groups.plan(config(dynamic_sampling=True, credit=rules), [("a", found)])


def test_what_so_many_steps_trained_is_told_in_one_line() -> None:
    plan = stored_groups.plan(config(), [("a", records(5)), ("b", records(1, (0.0, 1.0)))])
    assert [stored_groups.trained(plan, config(), done).groups for done in (0, 1, 2, 3, 4)] == [0, 2, 4, 6, 6]
    whole = stored_groups.trained(plan, config(), 4)
    line, *_ = Summary(name="x", seed=0, steps=4, trained_tokens=34, offline=whole).lines()
    assert line == "4 steps on 17 stored rollouts in 6 groups, of a, b; 34 tokens trained, no harness ran"


def test_epochs_bound_the_steps() -> None:
    plan = stored_groups.plan(config(), [("a", records(3))])
    assert [stored_groups.steps(plan, config({"epochs": epochs})) for epochs in (1, 2, 9)] == [2, 3, 4]


def test_the_plan_is_kept_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()
    plan = stored_groups.plan(config(), [("a", records(3))])
    stored_groups.keep(run, plan)
    assert stored_groups.kept(run) == plan
    stored_groups.file(run).write_text("{")
    with pytest.raises(RunDamaged, match=r"stored-groups.json cannot be read"):
        stored_groups.kept(run)


# ---- with a store ----


@pytest.fixture
def source(tmp_path: Path) -> StoredSource:
    location = Location.of(tmp_path / "data")
    writer = StoreWriter(location, Origin("old"))
    for record in records(3):
        first = make_call([1, 2], [3, 4], session=record.id)
        writer.add(record.model_copy(update={"calls": 2}), [first, make_call([1, 2, 3, 4, 5], [6], session=record.id, order=1)])
    writer.flush()
    return StoredSource("old", StoreReader(location))


def test_a_batch_holds_recorded_logprobs_and_no_version_of_the_other_run(source: StoredSource, tmp_path: Path) -> None:
    for builder in ("chain", "per_call", "tree"):
        own, plan = prepare(config(builder=builder), [source])
        run = RunDir(tmp_path / builder).create()
        batches = StoredBatches(own, run, plan, [source], None)
        for step in range(3):
            batches.form(step)
        again = StoredBatches(own, run, plan, [source], None)
        table, stats = again._samples.read(1)
        assert again.stored == 3 and stats["rollouts"] == 6 and stats["pass_rate"] == 1 / 3 and stats["epoch"] == 0
        assert set(flat(table, "steps").tolist()) == {UNKNOWN}
        logprobs = {value for value in flat(table, "logprobs").tolist() if value}
        assert logprobs == {-1.0, -1.0625, -2.0}
        assert (flat(table, "advantage") != 0).any()


def test_calls_under_a_grammar_are_trained_where_the_run_says_so(tmp_path: Path) -> None:
    """Offline, and by a run that made them."""
    rollouts = [(record, [make_call([1], [2], session=record.id, masked_by_grammar=True)]) for record in records(2)]
    writer = StoreWriter(Location.of(tmp_path / "data"), Origin("old"))
    for record, calls in rollouts:
        writer.add(record, calls)
    writer.flush()
    source = StoredSource("old", StoreReader(Location.of(tmp_path / "data")))
    made = stored_run(tmp_path / "made")
    store(made, rollouts)
    for lift, tokens in ((False, 0), (True, 6)):
        own, plan = prepare(config().model_copy(update={"proxy": Proxy(train_grammar_calls=lift)}), [source])
        batches = StoredBatches(own, RunDir(tmp_path / str(lift)).create(), plan, [source], None)
        batches.form(0)
        assert batches.stats(0)["tokens_trained"] == tokens
        recorded = Recordings(made, train_grammar_calls=lift).with_calls([record for record, _ in rollouts])
        assert {call.trainable for _, calls in recorded for call in calls} == {lift}


def test_rollouts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    own = tokenizer_sha256(tmp_path / "model")
    for number, digest in enumerate((own, None, "f" * 64)):
        writer = StoreWriter(Location.of(tmp_path / str(number)), Origin("old", tokenizer_sha256=digest))
        writer.add(make_record("g00000-0.0", 1.0), [])
        writer.flush()
    sources = [StoredSource(f"run{number}", StoreReader(Location.of(tmp_path / str(number)))) for number in range(3)]
    check_tokenizer(tmp_path / "model", sources[:2])
    with pytest.raises(UserError, match="the rollouts of run2 hold tokens of another tokenizer than the model's"):
        check_tokenizer(tmp_path / "model", sources)


def test_rewards_are_the_recorded_the_latest_or_those_of_one_rescore(source: StoredSource) -> None:
    def verdict(rescore: str, rollout: str, outcome: Outcome, reward: float | None, at: float) -> rescores.Rescored:
        return rescores.Rescored(
            rescore, rollout, "train", "t0", "react", "d", at, "me@here", Outcome.OK, 0.0, outcome, "", reward,
            {} if reward is None else {"reward": reward}, {"-1": 0.5} if reward is not None else {},
        )  # fmt: skip

    where, ok = source.reader.location, Outcome.OK
    rescores.put(where, 0, [verdict("A", "g00000-0.0", ok, 7.0, 1.0), verdict("A", "g00001-0.0", ok, 8.0, 2.0)])
    rescores.put(where, 0, [verdict("B", "g00000-0.0", ok, 9.0, 3.0)])
    failed, broken = Outcome.VERIFIER, Outcome.SANDBOX
    rescores.put(where, 1, [verdict("B", "g00001-0.0", failed, None, 4.0), verdict("B", "g00001-1.0", broken, None, 5.0)])
    source.reader.refresh()

    def rewards(which: str) -> list[list[float | None]]:
        _, plan = prepare(config({"rewards": which}), [source])
        return [[stored.record.reward for stored in group] for group in plan.groups]

    assert rewards("recorded") == [[0.0, 1.0, 0.5]] * 3
    assert rewards("A") == [[7.0, 1.0, 0.5], [8.0, 1.0, 0.5], [0.0, 1.0, 0.5]]
    assert rewards("latest") == [[9.0, 1.0, 0.5], [1.0, 0.5], [0.0, 1.0, 0.5]], "a verdict that failed leaves the rollout out, never at 0"
    _, plan = prepare(config({"rewards": "A"}), [source])
    assert plan.groups[0][0].record.call_rewards == {"-1": 0.5}
    with pytest.raises(UserError, match="no rescore 'C'"):
        rewards("C")


def test_an_age_that_nothing_has_is_refused(source: StoredSource) -> None:
    with pytest.raises(UserError, match=r"train.loss.stale.versions: .*mask by train.loss.stale.kl"):
        prepare(config(loss={"stale": {"versions": 2}}), [source])


def test_paths_of_the_config_are_relative_to_it(tmp_path: Path) -> None:
    import yaml

    tree = config({"runs": ["runs/one", "s3://bucket/two"]}).model_dump(mode="json")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    found = load(tmp_path / "run.yaml").train.offline
    assert found is not None and found.runs == [str(tmp_path / "runs" / "one"), "s3://bucket/two"]


def test_every_named_reward_is_in_the_steps_line_over_the_rollouts_that_have_it(source: StoredSource, tmp_path: Path) -> None:
    own, plan = prepare(config(), [source])
    for index, group in enumerate(plan.groups):
        for stored in group:
            stored.record.rewards.update({"reward": 1.0} if index else {"reward": 1.0, "format": float(stored.id == "g00000-0.0")})
    run = RunDir(tmp_path / "named").create()
    batches = StoredBatches(own, run, plan, [source], None)
    for step in range(2):
        batches.form(step)
    quiet: Any = SimpleNamespace(step=lambda _: None, warn=lambda _: None)
    with MetricsWriter(run.metrics) as metrics:
        report = StepReport(run, 1, batches, metrics, quiet)
        for step in range(2):
            report.step({"step": step + 1, "version": f"1.{step + 1}", "stats": batches.stats(step)}, {"train_s": 1.0}, {"seconds": 2.0})
    found = {row["step"]: row.get("reward/format") for row in read_rows(run.metrics)}
    assert sorted(found.values(), key=str) in ([1 / 3, None], [1 / 3, 1 / 3]) and read_metrics(run.metrics)[0].reward_mean == 0.5
