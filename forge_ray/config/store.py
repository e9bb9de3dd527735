"""`store`: where the rollouts of a run are kept as data."""

from __future__ import annotations

from forge_ray.config.values import Positive, Section


class Store(Section):
    """The run's calls, rollouts and samples as Parquet datasets, see docs/rollouts.md."""

    location: str | None = None
    """Where they are: a directory, or a URI of a file system that pyarrow or fsspec knows (`s3://bucket/path`, `gs://…`; parameters such as
    `?region=…` behind it); the run's name is added. Nothing: `<run>/data`."""
    flush_s: Positive = 30
    """Rollouts that ended are gathered for so many seconds into one file of each dataset."""
