"""Run as a program: a Ray cluster of two nodes on this machine, the trainer's side on one, the replica on the other. Prints JSON.

`python -m tests.fault.two_nodes RUN PORT SCRIPT`. The nodes see the same files here, so that one update names a file that does not exist:
only the object store can have brought it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


async def updates(client: Any, run: Any, head: str) -> dict[str, Any]:
    import ray
    import ray.experimental

    from forge_ray.config.sync import Sync
    from forge_ray.serve_proxy.parcel import Parcel
    from forge_ray.train_loop import weight_sync
    from tests.tiny_model import tiny_model

    (before,) = await client.status()
    source = next(Path(tiny_model()).glob("*.safetensors"))
    reference = weight_sync._fetch(str(source), head)
    await client.update_weights(Parcel("/nowhere/1.1.safetensors", head, [reference]), "1.1")
    (moved,) = await client.status()
    where = ray.experimental.get_object_locations([reference])[reference]["node_ids"]
    target = run.weights / "1.2.safetensors"
    target.write_bytes(source.read_bytes())
    told = await weight_sync.sync(client, run, str(target), "1.2", Sync(), node=head)
    (after,) = await client.status()
    again = await weight_sync.sync(client, run, str(target), "1.3", Sync(), node=before["node"])
    return {
        "head": head,
        "replica": before["node"],
        "versions": [before["version"], moved["version"], after["version"]],
        "stored on": sorted(where),
        "bytes": [told["bytes"], again["bytes"], source.stat().st_size],
        "current": (weight_sync.current(run) or {}).get("version"),
    }


def main() -> None:
    root, port, script = sys.argv[1:]
    temporary = Path(root) / "ray"
    (temporary / "ray").mkdir(parents=True)
    os.environ |= {"RAY_TMPDIR": str(temporary), "RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": ""}
    os.environ.pop("RAY_ADDRESS", None)
    from forge_ray import ray_env

    ray_env.apply()
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from forge_ray.serve_proxy import deployment
    from tests.integration.conftest import make_config, make_run

    options: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
    try:
        cluster.add_node(num_cpus=4, object_store_memory=100 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": ray_env.worker()})
        # One door: the nodes share the machine's ports.
        serve.start(http_options={"host": "127.0.0.1", "port": int(port), "location": "HeadOnly"})
        run = make_run(Path(root) / "run")
        config = make_config("nodes", int(port), script=script, proxy={"replica_cpus": 1})
        client = deployment.start(config, run, config.policy.model.path, 1)
        print(json.dumps(asyncio.run(updates(client, run, ray.get_runtime_context().get_node_id()))), flush=True)
        deployment.stop(client.app)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
