"""`docs/rollouts.md`: a page whose tables of columns are made from the store's schema."""

from __future__ import annotations

import inspect

import pyarrow as pa

from forge_ray.trajectories import schema as samples
from forge_ray.trajectories import tree_schema
from forge_ray.trajectories.store.schema import TABLES, VERSION, Table

PAGE = """\
# Rollouts as data

<!-- Made by `make docs` from `forge_ray/cli/rollout_docs.py` and `forge_ray/trajectories/store/schema.py`. Change those. -->

Every rollout of a run, of `train`, `eval` and `rollout`, is stored as Parquet below `<run>/data/`:

```
data/rollouts/purpose=train/part-….parquet     a row per rollout: what it came to, and where it came from
data/calls/purpose=train/part-….parquet        a row per model call: the tokens that were given and sampled
data/upstream/purpose=train/part-….parquet     a row per call that another model answered, as text ([upstreams.md](upstreams.md))
data/samples/step=12/batch.parquet             what the weights of step 12 were trained on, in the step called 13; written before
data/rescores/purpose=train/….parquet          verdicts that were made later, on archived workspaces ([rewards.md](rewards.md))
data/ratings/purpose=train/step-000012.parquet what a served teacher says of step 12's tokens ([algorithms.md](algorithms.md#distillation))
```

`store.location: s3://bucket/path` (or `gs://…`, or whatever [pyarrow](https://arrow.apache.org/docs/python/filesystems.html) or fsspec
knows; parameters as in `?region=…&endpoint_override=…`) puts them there, below the run's name. Credentials are those of the environment.
Tested here against local servers of S3 and of Google's storage, and an in-memory file system.

Files are only added, each whole before it can be seen, so any number of readers may look while a run writes. A rollout appears some
`store.flush_s` seconds after it ended. Nothing depends on that: the recording ([recording.md](recording.md)) and
`rollouts/<id>/result.json` are on disk before. A run that was killed leaves the newest rollouts out of the store; the next start of the
run, or the next `forge-ray rollouts` command on it, puts them in, each once. (Killed between its files, it leaves calls without their
rollout. They stay, and the rollout's row joins them; `forge-ray` passes over them until then.)

Not in the store: sessions that left no record (an attempt whose pool died, `forge-ray serve`). They are in the call log.

## Reading

```python
import pandas
rollouts = pandas.read_parquet("/path/of/run/data/rollouts")
rollouts.groupby(["task", "outcome"]).reward.mean()
```

```python
import duckdb
duckdb.sql(\"\"\"
    select r.harness, r.reward, count(*) calls, sum(len(c.ids)) sampled
    from '/path/of/run/data/rollouts/**/*.parquet' r join '/path/of/run/data/calls/**/*.parquet' c using (rollout)
    where r.purpose = 'train' and c.trainable group by all
\"\"\")
```

```python
from forge_ray.trajectories.store.reader import StoreReader
store = StoreReader("/path/of/run/data")           # or s3://bucket/path/run
store.rollouts()                                   # RolloutRecord objects
store.calls("g00012-3.0")                          # Call objects of one rollout, whole prompts included, exactly as recorded
store.upstream("g00012-3.0")                       # its calls that another model answered, whole requests included
store.table("calls", ["rollout", "ids"])           # a pyarrow table; store.dataset("calls"): a pyarrow dataset
store.ray("calls")                                 # a Ray Dataset
```

A prompt is stored as its difference to an earlier call: the first `shared` tokens of the prompt and sample of `parent`, then `new`. So a
rollout takes space for its new tokens only. `forge_ray.trajectories.store.calls.expand(rows)` gives the whole prompts of a table of calls
that holds whole rollouts. In plain DuckDB or pandas the same is three lines:

```python
def prompt(call, calls):                           # calls: {{call id: row}} of the rollout
    if not call["shared"]:
        return list(call["new"])
    parent = calls[call["parent"]]
    return (prompt(parent, calls) + list(parent["ids"]))[: call["shared"]] + list(call["new"])
```

## What it costs

`make bench-ingest` stores 1,000 rollouts of 50 calls, each call with 150 new prompt tokens and a reply of 60, beside JSON lines with the
same fields and the same differences of prompts. On two cores with other work on them: 6,100 calls a second written, synced (JSON lines
8,600); 2.9 bytes per new token (16.2; 124 with whole prompts); read by pyarrow 91,000 calls a second (13,600), as `Call`s with their
whole prompts 17,000. A Ray Dataset of it takes 0.4 s longer to begin. A run writes from one thread beside everything else, about 10 ms
per rollout of this size.

## The command

```
forge-ray rollouts ls RUN --task 'sum-*' --outcome ok --reward '>=0.5'     # also --harness, --purpose, --step; --json
forge-ray rollouts show RUN g00012-3                                       # where it came from, calls, files; --tokens, --json
forge-ray rollouts stats RUN --by task,harness                             # counts, mean reward with 95 % interval, calls, tokens
forge-ray rollouts export RUN --format chat --out sft.jsonl --reward 1     # the same filters
```

`RUN` is a run directory, the name of one in `~/forge-ray-runs`, or a store's location. `--step N` are the rollouts that the step trained
which the terminal and `metrics.jsonl` call N, and the evaluations made with the weights that came of it (0: before the first); exports have
the same number. In `stats` the mean over several tasks is the mean of the tasks' means, and so is its
interval: rollouts of one task are related.

## Exports

| format | out | content |
|---|---|---|
| `chat` | JSON lines | `messages` (role, content) of each conversation, to its end; for `datasets` and TRL's `SFTTrainer` |
| `atif` | a directory | `<rollout>.json`, an ATIF 1.8 trajectory each (Harbor's format), with token ids and logprobs per step |
| `trl` | Parquet | `prompt_ids`, `completion_ids`, `logprobs`, `env_mask`, `advantage`, and `input_ids` with `labels` |
| `verl` | Parquet | `prompts`, `responses`, `response_mask`, `rollout_log_probs`, `advantages`, `token_level_scores`, `uid` |

**Text** (`chat`, `atif`) is the decoded tokens, those that the engine was given and those that it sampled, cut where the policy's own
chat template puts its marks. It needs the tokenizer and the template, so a run directory with its model. Tool definitions stay where the
template wrote them, in the system message; tool calls stay in the policy's own words, but ATIF's `tool_calls` holds those in Hermes' and
Qwen's (`<tool_call>{{json}}</tool_call>`). `exact: true` in a chat line says that the template makes of `messages` exactly the text that
the engine saw. It is false where a template rewrites messages, as those do that drop the reasoning of earlier turns. Bytes that are no
UTF-8 are U+FFFD. The requests as the harness sent them are not exported; with `proxy.keep_bodies` they are in `bodies/`, under
`calls.request_sha256`.

**Images** are not stored, their digests are (`calls.media`). The text has their placeholders where they stood; a chat line with some is not
`exact` and has their digests as `media`, in ATIF the step's `extra` has them. A reply behind an image is not trained (the learner sees
tokens), so `trl` and `verl` hold none.

**Tokens** (`trl`, `verl`) of a rollout that a step trained are the rows of that step's batch, with its advantages. Of one that no step
trained they are made by the `chain` builder, every trainable call with mask 1, without an advantage.

Checked with the real libraries, in environments of their own (`python -m tests.readers` makes them): Harbor 0.26's validator takes each
ATIF file; TRL 1.16 tokenizes chat lines to the recorded ids, its collator gives labels at the masked tokens, and a `GRPOTrainer` whose
`rollout_func` returns the rows trains a step on them; veRL 0.9.1 makes a `DataProto` by the lines below, and its own GRPO advantage over
it is ours.

```python
# veRL
import numpy as np, pyarrow.parquet as pq, torch
from verl import DataProto

rows = pq.read_table(FILE).to_pylist()
left, right = (max(len(row[name]) for row in rows) for name in ("prompts", "responses"))

def padded(name, kind, width, at_left=False):
    out = torch.zeros(len(rows), width, dtype=kind)
    for line, row in zip(out, rows):
        values = torch.tensor(row[name] or [], dtype=kind)
        (line[width - len(values) :] if at_left else line[: len(values)]).copy_(values)
    return out

tensors = {{"prompts": padded("prompts", torch.long, left, at_left=True), "responses": padded("responses", torch.long, right)}}
tensors["response_mask"] = padded("response_mask", torch.long, right)
for name in ("rollout_log_probs", "advantages", "token_level_scores"):
    tensors[name] = padded(name, torch.float32, right)
there = [[0] * (left - len(row["prompts"])) + [1] * (len(row["prompts"]) + len(row["responses"])) for row in rows]
tensors["attention_mask"] = torch.tensor([row + [0] * (left + right - len(row)) for row in there])
tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], 1)
names = ("uid", "data_source", "rollout", "reward")
data = DataProto.from_dict(tensors, {{name: np.array([row[name] for row in rows], dtype=object) for name in names}})
```

## Columns

Version {version} of the schema; each file has it as `forge_ray.store` in its metadata (one of `samples`: as `forge_ray.samples` or
`forge_ray.trees`). A new column that may be null does not change the
version. Whatever changes what a stored value means, or takes a column away, raises it. A reader takes files of its own version and of
older ones, and refuses newer ones by name. `purpose` and `step` are in the path and in every reader's table, not in the file.

{tables}
"""


def page() -> str:
    """The text of the page."""
    parts = [_table(table) for table in TABLES.values()]
    parts += [_documented("samples", samples, "builders `chain` and `per_call`"), _documented("samples", tree_schema, "builder `tree`")]
    return PAGE.format(version=VERSION, tables="\n\n".join(parts)).rstrip() + "\n"


def _table(table: Table) -> str:
    lines = [f"### `{table.name}`", "", "| column | type | |", "|---|---|---|"]
    lines += [
        f"| `{column.name}` | {_type(column.type)}{' or null' * column.nullable} | {_cell(column.text)} |" for column in table.columns
    ]
    return "\n".join([*lines, f"| `{table.partition}` | text | of the path |"])


def _documented(name: str, module: object, builder: str) -> str:
    """The table in the docstring of a schema's module, as it stands there."""
    text = inspect.getdoc(module) or ""
    return f"### `{name}`, {builder}\n\n" + text.split("\n\n", 1)[1].replace("\n    ", "\n\n    ", 1).replace("\n\n\n    ", "\n\n    ")


def _type(kind: pa.DataType) -> str:
    if isinstance(kind, pa.MapType):
        return f"map of {_type(kind.key_type)} to {_type(kind.item_type)}"
    if isinstance(kind, pa.ListType):
        return f"list of {_type(kind.value_type)}"
    if isinstance(kind, pa.StructType):
        return "struct"
    return {"string": "text", "double": "float64", "float": "float32", "bool": "true or false"}.get(str(kind), str(kind))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
