"""The store on other file systems than the local one: fsspec's, Google's and S3's, each by the client that a run uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_ray.config import Train
from forge_ray.errors import UserError
from forge_ray.trajectories import batch
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.samples import SampleStore
from forge_ray.trajectories.store.schema import StoreError
from forge_ray.trajectories.store.writer import unfinished
from tests.unit.making import make_rollout, store_rollouts


def test_fsspec_file_systems_work(tmp_path: Path) -> None:
    location = Location.of(f"memory://{tmp_path.name}", "run")
    assert location.local is None
    stored = store_rollouts(location, "g00000-0.0")
    (again,) = StoreReader(Location.of(f"memory://{tmp_path.name}", "run")).with_calls()
    assert again == stored[0]
    built = batch.build_step([[make_rollout(f"g00000-{n}.0", float(n)) for n in range(2)]], Train())
    SampleStore(location).write(0, built.table, {"taken": [0]})
    assert SampleStore(location).read(0) == (built.table, {"taken": [0]}) and StoreReader(location).trained_in() == {
        "g00000-0.0": 0,
        "g00000-1.0": 0,
    }
    location.probe()
    assert len(location.files()) == 3


def test_a_location_that_nothing_knows_is_refused() -> None:
    with pytest.raises(UserError, match=r"nowhere://x.*names no file system"):
        Location.of("nowhere://x")


GCS = """
import sys
from gcp_storage_emulator.server import create_server

with create_server("127.0.0.1", 0, in_memory=True, default_bucket="data") as server:
    print(server._api._httpd.server_port, flush=True)
    sys.stdin.read()
"""


def test_gs() -> None:
    """pyarrow's own client of Google's storage against a server in a process of its own: Arrow waits for it with Python's lock."""
    built = batch.build_step([[make_rollout(f"g00000-{n}.0", float(n)) for n in range(2)]], Train())
    with subprocess.Popen([sys.executable, "-c", GCS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        port = int(server.stdout.readline())
        uri = f"gs://anonymous@data/runs?endpoint_override=127.0.0.1:{port}&scheme=http&retry_limit_seconds=60"
        location = Location.of(uri, "one")
        assert location.root == "data/runs/one" and StoreReader(location).rollouts() == []
        location.probe()
        stored = store_rollouts(location, "g00000-0.0", "g00000-1.0")
        SampleStore(location).write(0, built.table, {"taken": [0]})
        reader = StoreReader(Location.of(uri, "one"))
        assert list(reader.with_calls()) == stored and reader.calls("g00000-1.0") == stored[1][1]
        assert reader.trained_in() == {"g00000-0.0": 0, "g00000-1.0": 0} and reader.samples(0) == built.table
        assert unfinished(location) == {} and len(location.files()) == 3
        with pytest.raises(StoreError, match="no-bucket"):
            Location.of(uri.replace("data/runs", "no-bucket/runs"), "one").probe()


def test_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's own S3 client against a server in this process."""
    import boto3
    from moto.server import ThreadedMotoServer

    environment: dict[str, Any] = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="data")
        uri = f"s3://data/runs?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        location = Location.of(uri, "one")
        assert location.root == "data/runs/one" and StoreReader(location).rollouts() == []
        stored = store_rollouts(location, "g00000-0.0", "g00000-1.0")
        assert list(StoreReader(Location.of(uri, "one")).with_calls()) == stored
        assert unfinished(location) == {} and len(location.files()) == 2
        location.probe()
        with pytest.raises(StoreError, match="no-bucket"):
            Location.of(uri.replace("data/runs", "no-bucket/runs"), "one").probe()
        with pytest.raises(StoreError, match="no-bucket"):
            store_rollouts(Location.of(uri.replace("data/runs", "no-bucket/runs"), "one"), "g00000-0.0")
    finally:
        server.stop()
