"""Sequences under the names that TRL uses, as a Parquet file that `datasets.load_dataset("parquet", …)` reads.

`prompt_ids`, `completion_ids`, `logprobs` and `env_mask` are what a `rollout_func` of `GRPOTrainer` gives back (1: the policy's own token,
0: the environment's); `input_ids` and `labels` of the whole sequence (-100: no loss) are what `SFTTrainer` takes. `advantage` is the
trajectory's, as TRL has it: one number per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.export.sequences import Tokens, facts

_I = pa.list_(pa.int32())
NO_LOSS = -100
"""Label of a token that is not trained, for every trainer on Hugging Face's models."""
SCHEMA = pa.schema(
    [
        ("prompt_ids", _I),
        ("completion_ids", _I),
        ("logprobs", pa.list_(pa.float32())),
        ("env_mask", _I),
        ("advantage", pa.float32()),
        ("input_ids", _I),
        ("labels", _I),
        ("reward", pa.float64()),
        *((name, pa.string()) for name in ("rollout", "task", "harness", "outcome", "purpose")),
        ("group", pa.int64()),
        ("step", pa.int32()),
        ("sample", pa.int32()),
        ("samples", pa.int32()),
    ]
)


def row(about: Mapping[str, Any], made: Tokens) -> dict[str, Any]:
    """One row of `SCHEMA`."""
    split = made.prompt
    return facts(about) | {
        "prompt_ids": made.ids[:split],
        "completion_ids": made.ids[split:],
        "logprobs": made.logprobs[split:],
        "env_mask": made.mask[split:].astype("int32"),
        "advantage": made.advantage,
        "input_ids": made.ids,
        "labels": np.where(made.mask, made.ids, NO_LOSS),
        "sample": made.sample,
        "samples": made.samples,
    }
