"""What a weight update costs: from pause to resume, and the in-flight requests' cache apart from it. `python -m benchmarks.sync`.

A model of SmolLM2-135M's shape in a real engine behind Serve, in float32 on CPU (one replica). The trainer's side publishes, then the
replica is brought to the version as the driver does it. Ways: read in place (the trainer's node), through Ray's object store (another
node), adapters alone (rank 16, every linear layer). Of each, after one update that is not counted:

- `publish`: the trainer writes the file and makes it durable; `prepare`: the file is brought to the replica and checked, while calls run;
- `pause`: from the freeze of the running calls to their going on, the new weights loaded;
- `moved`: bytes that go between nodes.

Then requests run during the update: `recompute` is how much longer they wait for their next token than the pause, because their cached keys
and values are computed anew from the new weights (that is what makes a version span exact). Exit code 1 if the pause is 1 s or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.parts.asgi import make_run, token
from benchmarks.parts.processes import free_ports
from benchmarks.parts.served import start_ray
from benchmarks.parts.smol import smol_model
from forge_ray import ray_env
from forge_ray.config import Config, Lora
from forge_ray.train_loop import lora, weight_sync

WAYS = ("in place", "object store", "adapters")
TARGET_S = 1.0
REQUESTS, PROMPT = 4, "def main(argument):\n" * 120
"""In flight during an update: four of about 900 tokens, each with a beginning of its own (a shared one would be computed once)."""


class Bench:
    """The trainer's side of one run."""

    def __init__(self, run: Any, client: Any, model: Any) -> None:
        import ray

        self.run, self.client, self.model = run, client, model
        self.adapted = lora.attach(model, Lora()).base_model.model
        self.node = ray.get_runtime_context().get_node_id()
        self.step = 0

    def publish(self, way: str) -> tuple[str, Path, float]:
        """The next version, its file, and the seconds that writing took."""
        self.step += 1
        version, began = f"1.{self.step}", time.monotonic()
        if way == "adapters":
            trained = [(name, value) for name, value in self.adapted.named_parameters() if value.requires_grad]
            tensors, told = lora.published(self.adapted, trained)
        else:
            named = ((n.replace(".base_layer", ""), v) for n, v in self.adapted.named_parameters() if ".lora_" not in n)
            tensors, told = weight_sync.collect(named), {}
        path = weight_sync.publish(self.run, tensors, version, told)
        return version, path, time.monotonic() - began

    async def update(self, way: str, published: tuple[str, Path, float]) -> dict[str, float]:
        """Bring the replica to it."""
        from forge_ray.serve_proxy.parcel import Parcel

        version, path, wrote = published
        away = way == "object store"
        # As another node's: the replica must not find the file.
        parcel = Parcel("/nowhere", "another", [weight_sync._fetch(str(path), self.node)]) if away else Parcel(str(path), self.node)
        told = await self.client.update_weights(parcel, version, decide=lambda: weight_sync.make_current(self.run, path, version))
        size = path.stat().st_size
        return {
            "publish_s": wrote, "prepare_s": told["prepare_s"], "pause_s": told["paused_s"], "total_s": told["seconds"],
            "moved_mb": size / 1e6 if away else 0.0, "file_mb": size / 1e6,
        }  # fmt: skip

    async def busy(self, way: str) -> dict[str, float]:
        """An update under running requests."""
        gaps: list[Gap] = [Gap() for _ in range(REQUESTS)]
        async with httpx.AsyncClient(timeout=600) as http:
            asked = [asyncio.create_task(gap.read(http, self.client.url(token(f"busy-{self.step}-{n}.0")))) for n, gap in enumerate(gaps)]
            while not all(gap.chunks >= 8 for gap in gaps):
                await asyncio.sleep(0.02)
                for task in asked:
                    if task.done():
                        task.result()
            published = await asyncio.to_thread(self.publish, way)
            (before,) = await self.client.status()
            with marking(gaps):
                found = await self.update(way, published)
            while not all(gap.after for gap in gaps):
                await asyncio.sleep(0.02)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        longest, usual = max(gap.longest for gap in gaps), median(gap.usual for gap in gaps)
        return {**found, "token_s": usual, "gap_s": longest, "recompute_s": longest - found["pause_s"] - usual, "live": before["live"]}


class Gap:
    """When the chunks of one reply came."""

    def __init__(self) -> None:
        self.chunks, self.after, self.longest, self._gaps, self._marked = 0, False, 0.0, [0.0], False
        self._last = time.monotonic()

    @property
    def usual(self) -> float:
        return median(self._gaps[2:] or self._gaps)

    def mark(self, on: bool) -> None:
        self._marked = on

    async def read(self, http: httpx.AsyncClient, url: str) -> None:
        body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": f"{url}\n{PROMPT}"}], "max_tokens": 1000}
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self._take(time.monotonic())

    def _take(self, now: float) -> None:
        gap, self._last, self.chunks = now - self._last, now, self.chunks + 1
        if self._marked:
            self.longest = max(self.longest, gap)
        elif self.longest:  # the first after the update may still have waited for it
            self.longest, self.after = max(self.longest, gap) if not self.after else self.longest, True
        else:
            self._gaps.append(gap)


@contextmanager
def marking(gaps: list[Gap]) -> Iterator[None]:
    """Gaps that begin or end inside are the update's."""
    for gap in gaps:
        gap.mark(True)
        gap.longest = 1e-9
    yield
    for gap in gaps:
        gap.mark(False)


async def measure(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Way -> figures, medians of `rounds`; and `in flight`, of one update under requests."""
    figures: dict[str, dict[str, float]] = {}
    for way in WAYS:
        found = [await bench.update(way, await asyncio.to_thread(bench.publish, way)) for _ in range(rounds + 1)][1:]
        figures[way] = {name: median(row[name] for row in found) for name in found[0]}
        figures[way]["pause_max_s"] = max(row["pause_s"] for row in found)
    figures["in flight"] = await bench.busy("in place")
    return figures


def table(figures: dict[str, dict[str, float]]) -> str:
    """As Markdown."""
    lines = ["| way | file | moved | publish | prepare | pause | longest |", "|---|---|---|---|---|---|---|"]
    for way in WAYS:
        row = figures[way]
        lines.append(
            f"| {way} | {row['file_mb']:.0f} MB | {row['moved_mb']:.0f} MB | {row['publish_s']:.2f} s | {row['prepare_s']:.2f} s | "
            f"{row['pause_s']:.2f} s | {row['pause_max_s']:.2f} s |"
        )
    row = figures["in flight"]
    lines += [
        "",
        f"{row['live']:.0f} requests of about 900 tokens in flight: pause {row['pause_s']:.2f} s, and then {row['recompute_s']:.2f} s to "
        f"compute their caches anew (a token usually takes {row['token_s']:.2f} s)",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description="What a weight update costs.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="the engine's")
    parser.add_argument("--quick", action="store_true", help="two layers, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures by name")
    given = parser.parse_args()
    ray_env.apply()
    root = Path(tempfile.mkdtemp(prefix="fr-sync-"))
    try:
        port = free_ports()[0]
        start_ray(port, str(root / "r"), store_mb=1500)
        import ray

        from forge_ray.serve_proxy import deployment

        model = smol_model(root / "model", **({"num_hidden_layers": 2, "vocab_size": 4096} if given.quick else {}))
        config = Config.model_validate(
            {
                "name": "bench-sync",
                "policy": {"model": str(root / "model"), "engine": {"max_model_len": 4096, "dtype": given.dtype}},
                "proxy": {"port": port},
                "harnesses": [{"name": "react"}],
                "tasks": {"train": "tasks"},
                "eval": {"before": False, "after": False},
            }
        )
        run = make_run(root / "run")
        client = deployment.start(config, run, str(root / "model"), 1)

        async def work() -> dict[str, dict[str, float]]:
            found = await measure(Bench(run, client, model), 1 if given.quick else given.rounds)
            await asyncio.to_thread(deployment.stop, client.app)
            return found

        figures = asyncio.run(work())
        ray.shutdown()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(table(figures))
    pause = max(figures[way]["pause_s"] for way in WAYS)
    print(f"\nlongest median pause: {pause:.2f} s (target: under {TARGET_S:g} s)")
    if given.json:
        given.json.write_text(
            json.dumps({f"sync.{way}.{name}": value for way, row in figures.items() for name, value in row.items()}, indent=2)
        )
    return 0 if pause < TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
