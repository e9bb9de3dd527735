"""Rollouts into the store and out again. `python -m benchmarks.ingest`.

1,000 rollouts of 50 calls each, every call going on from the one before with 150 new tokens and a reply of 60, as `Call`s with their whole
prompts (as the run's store thread has them), go through `StoreWriter` onto disk, synced, and are read back as a Ray Dataset, every value of
every row; as pyarrow tables; and as `Call`s again. The baseline, in the same run, is a file of JSON lines with the same fields and the same
differences of prompts, written and read by Python's `json`; beside it the size that lines with whole prompts would have. Token ids follow
Zipf's law over 150,000 ids, logprobs are float32.

Prints a Markdown table; `--json FILE` writes the figures.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from forge_ray import ray_env
from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRecord
from forge_ray.trajectories.call import Call

CALLS, PROMPT, REPLY = 50, 150, 60
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "min_tokens": 0}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ingest", description="The store, written and read.")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="50 rollouts, for trying")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    count = 50 if arguments.quick else arguments.rollouts
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(count, Path(folder))
    print(table(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measure(count: int, folder: Path) -> dict[str, Any]:
    """All figures; rows are calls, tokens are new ones: of prompts after what they share, and sampled."""
    figures: dict[str, Any] = {"rollouts": count, "rows": count * CALLS, "tokens": count * CALLS * (PROMPT + REPLY)}
    written(1, folder / "warm")  # modules are loaded
    store = figures["store"] = written(count, folder / "store")
    lines = figures["json_lines"] = baseline(count, folder / "calls.jsonl")
    whole = whole_prompts()
    for made in (store, lines):
        made["rows_per_s"] = figures["rows"] / made["write_s"]
        made["bytes_per_token"] = made["bytes"] / figures["tokens"]
    figures["json_lines_whole_prompts"] = {"bytes_per_token": whole / (CALLS * (PROMPT + REPLY))}
    store["read"] = {name: figures["rows"] / seconds for name, seconds in read(count, folder / "store").items()}
    lines["read"] = {"python": figures["rows"] / lines["read_s"]}
    return figures


def rollouts(count: int) -> Iterator[tuple[RolloutRecord, list[Call]]]:
    """Rollouts, made one by one from a seed."""
    rng = np.random.default_rng(0)
    for number in range(count):
        name = f"g{number // 8:05d}-{number % 8}.0"
        tokens = np.minimum(rng.zipf(1.2, CALLS * (PROMPT + REPLY)), 150_000).astype(np.int32).tolist()
        logprobs = (-rng.exponential(0.4, CALLS * REPLY)).astype(np.float32).tolist()
        calls: list[Call] = []
        for turn in range(CALLS):
            at = turn * (PROMPT + REPLY)
            before = calls[-1] if calls else None
            shared = before.prompt_ids + before.ids if before else []
            calls.append(
                Call(
                    id=f"{number:016x}{turn:016x}", session=name, purpose="train", replica="1-0", dialect="messages", path="/v1/messages",
                    streamed=True, kind="agent", conversation=f"{number:032x}", prompt_ids=shared + tokens[at : at + PROMPT],
                    sampling=SAMPLING, masked_by_grammar=False, max_tokens=32_000, opened=1.8e9 + turn, ended=1.8e9 + turn + 0.5,
                    parent=before.id if before else None, shared=len(shared), ids=tokens[at + PROMPT : at + PROMPT + REPLY],
                    logprobs=logprobs[turn * REPLY : (turn + 1) * REPLY], spans=[("1.3", 0, REPLY)], version_open="1.3", version_end="1.3",
                    status="finished", finish_reason="stop", delivered=True, reply="tool_calls", splice="exact" if before else "new",
                    request_sha256=rng.bytes(32).hex(), response_sha256=rng.bytes(32).hex(), model="claude-opus",
                    usage={"input_tokens": len(shared) + PROMPT, "output_tokens": REPLY}, issued=[f"toolu_{turn}"],
                )
            )  # fmt: skip
        yield (
            RolloutRecord(
                id=name, key=name.rpartition(".")[0], purpose="train", task="/tasks/t", task_name="t", harness="claude_code",
                group=number // 8, attempt=0, outcome=Outcome.OK, detail="final answer", reward=float(number % 2), calls=CALLS,
                sampled_tokens=CALLS * REPLY, started=1.8e9 + number,
            ),
            calls,
        )  # fmt: skip


def written(count: int, folder: Path) -> dict[str, Any]:
    """Seconds of the writer alone (the rollouts are made in between), and bytes of the dataset `calls` on disk."""
    from forge_ray.trajectories.store.location import Location
    from forge_ray.trajectories.store.rollouts import Origin
    from forge_ray.trajectories.store.writer import StoreWriter

    writer, seconds = StoreWriter(Location.of(folder), Origin("run")), 0.0
    for record, calls in rollouts(count):
        begin = time.perf_counter()
        writer.add(record, calls)
        if writer.full:
            writer.flush()
        seconds += time.perf_counter() - begin
    begin = time.perf_counter()
    writer.flush()
    seconds += time.perf_counter() - begin
    files = list((folder / "calls").rglob("*.parquet"))
    return {"write_s": seconds, "bytes": sum(file.stat().st_size for file in files), "files": len(files)}


def line(call: Call, *, whole: bool) -> str:
    fields = asdict(call)
    prompt = fields.pop("prompt_ids")
    return json.dumps(fields | {"new": prompt if whole else prompt[call.shared :]})


def baseline(count: int, file: Path) -> dict[str, Any]:
    """Seconds to write and to read JSON lines, and their bytes."""
    seconds = 0.0
    with file.open("w") as out:
        for _, calls in rollouts(count):
            # What `asdict` costs is no part of the format.
            fields = [{**vars(call), "prompt_ids": None, "new": call.prompt_ids[call.shared :]} for call in calls]
            begin = time.perf_counter()
            for one in fields:
                out.write(json.dumps(one) + "\n")
            seconds += time.perf_counter() - begin
        out.flush()
    begin = time.perf_counter()
    with file.open() as lines:
        rows = sum(1 for text in lines if len(json.loads(text)["ids"]) == REPLY)
    assert rows == count * CALLS
    return {"write_s": seconds, "bytes": file.stat().st_size, "read_s": time.perf_counter() - begin}


def whole_prompts() -> int:
    """Bytes of one rollout as JSON lines that repeat the history."""
    ((_, calls),) = rollouts(1)
    return sum(len(line(call, whole=True)) + 1 for call in calls)


def read(count: int, folder: Path) -> dict[str, float]:
    """Seconds to read every value of every call: by Ray Data, by pyarrow, and as `Call`s with whole prompts."""
    import ray

    from forge_ray.trajectories.store.reader import StoreReader

    ray_env.apply()
    with tempfile.TemporaryDirectory(prefix="ingest") as temporary:
        ray.init(
            address="local",
            logging_level=logging.ERROR,
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=2**30,
            _temp_dir=temporary,
        )
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.ERROR)
            reader, seconds = StoreReader(str(folder)), {}
            reader.ray("calls", ["rollout"]).count()  # workers come up
            begin = time.perf_counter()
            batches: Iterator[Any] = iter(reader.ray("calls").iter_batches(batch_size=None, batch_format="pyarrow"))
            rows = sum(one.num_rows for one in batches)
            seconds["ray"] = time.perf_counter() - begin
        finally:
            ray.shutdown()
    assert rows == count * CALLS
    begin = time.perf_counter()
    assert StoreReader(str(folder)).table("calls").num_rows == rows
    seconds["pyarrow"] = time.perf_counter() - begin
    begin = time.perf_counter()
    assert sum(len(calls) for _, calls in StoreReader(str(folder)).with_calls()) == rows
    seconds["calls"] = time.perf_counter() - begin
    return seconds


def table(figures: dict[str, Any]) -> str:
    """A Markdown table, ratios against the JSON lines."""
    store, lines = figures["store"], figures["json_lines"]
    whole = figures["json_lines_whole_prompts"]["bytes_per_token"]
    rows = [
        ("written, rows/s", store["rows_per_s"], lines["rows_per_s"], ",.0f"),
        ("bytes per new token", store["bytes_per_token"], lines["bytes_per_token"], ".2f"),
        ("read as a Ray Dataset, rows/s", store["read"]["ray"], lines["read"]["python"], ",.0f"),
        ("read by pyarrow, rows/s", store["read"]["pyarrow"], lines["read"]["python"], ",.0f"),
        ("read as `Call`s with whole prompts, rows/s", store["read"]["calls"], lines["read"]["python"], ",.0f"),
    ]
    head = f"{figures['rollouts']:,} rollouts × {CALLS} calls, {figures['tokens']:,} new tokens, {store['files']} files\n"
    made = [head, "| | store | JSON lines | ratio |", "|---|---|---|---|"]
    made += [f"| {name} | {ours:{form}} | {theirs:{form}} | {ours / theirs:.2f} |" for name, ours, theirs, form in rows]
    made.append(f"| bytes per new token, lines with whole prompts | | {whole:.2f} | |")
    return "\n".join(made)


if __name__ == "__main__":
    raise SystemExit(main())
