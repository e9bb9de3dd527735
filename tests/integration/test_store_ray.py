"""The store's datasets through Ray Data, and the benchmark that reads them so."""

from __future__ import annotations

from pathlib import Path

from forge_ray.config import Train
from forge_ray.trajectories import batch
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.samples import SampleStore
from forge_ray.trajectories.store.writer import StoreWriter
from tests.unit.making import make_record, make_rollout


def test_every_dataset_is_a_ray_dataset(cluster: None, tmp_path: Path) -> None:
    location = Location.of(tmp_path)
    for part in range(2):
        writer = StoreWriter(location, Origin("run"))
        writer.add(make_record(f"e-{part}.0", None, group=None, purpose="eval"), [])  # null throughout the first file
        for slot in range(2):
            writer.add(*make_rollout(f"g0000{part}-{slot}.0", float(slot), group=part, samples=3))
        writer.flush()
    for step in (9, 10):
        groups = [[make_rollout(f"g0000{step}-{slot}.0", float(slot)) for slot in range(2)]]
        SampleStore(location).write(step, batch.build_step(groups, Train()).table, {})
    reader = StoreReader(location)
    rollouts = reader.ray("rollouts", ["rollout", "reward", "group", "purpose"]).take_all()
    assert len(rollouts) == 6 and {(row["group"], row["reward"]) for row in rollouts if row["purpose"] == "eval"} == {(None, None)}
    calls = reader.ray("calls").take_all()
    assert len(calls) == 12 and {row["purpose"] for row in calls} == {"train"} and all(list(row["ids"])[:2] == [1, 2] for row in calls)
    assert sorted({row["step"] for row in reader.ray("samples").take_all()}) == [9, 10]
    assert StoreReader(str(tmp_path / "nothing")).ray("calls").count() == 0
