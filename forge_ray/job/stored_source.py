"""Where an offline run takes its rollouts from: the store of one run, with the verdicts that were made later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_ray.trajectories.store import rescores

if TYPE_CHECKING:
    from forge_ray.rollout import RolloutRecord
    from forge_ray.trajectories.store.reader import StoreReader


@dataclass(frozen=True)
class StoredSource:
    """The store of one run."""

    name: str
    """Of the run."""
    reader: StoreReader

    def records(self, rewards: str) -> list[RolloutRecord]:
        """Its training rollouts with the rewards that `train.offline.rewards` means. Raises `StoreError`."""
        records = self.reader.rollouts("train")
        if rewards == rescores.RECORDED:
            return records
        found = rescores.rows(self.reader.table("rescores"))
        if rewards != rescores.LATEST and all(row.rescore != rewards for row in found):
            return records  # made in another of the sources; `offline.prepare` sees that one has it
        return rescores.apply(records, rescores.choose(found, rewards))

    def rescored(self) -> set[str]:
        """Names of its rescores."""
        return set(self.reader.table("rescores", ["rescore"])["rescore"].to_pylist())
