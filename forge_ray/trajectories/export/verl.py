"""Sequences under the names of veRL's `DataProto`, unpadded, as a Parquet file.

`prompts`, `responses`, `response_mask`, `rollout_log_probs`, `advantages`, `token_level_scores` (the terminal reward on the last token) are
its tensors, `uid` (the group), `data_source` (the task) and the rest its non-tensors. docs/rollouts.md has the lines that pad them into a
`DataProto`: prompts on the left, everything else on the right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from forge_ray.trajectories.export.sequences import Tokens, facts

_I, _F = pa.list_(pa.int32()), pa.list_(pa.float32())
SCHEMA = pa.schema(
    [
        ("prompts", _I),
        ("responses", _I),
        ("response_mask", _I),
        ("rollout_log_probs", _F),
        ("advantages", _F),
        ("token_level_scores", _F),
        ("uid", pa.string()),
        ("data_source", pa.string()),
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
    scores = np.zeros(len(made.ids) - split, np.float32)
    if len(scores) and about["reward"] is not None:
        scores[-1] = about["reward"]
    return facts(about) | {
        "prompts": made.ids[:split],
        "responses": made.ids[split:],
        "response_mask": made.mask[split:].astype("int32"),
        "rollout_log_probs": made.logprobs[split:],
        "advantages": None if made.advantages is None else made.advantages[split:],
        "token_level_scores": scores,
        "uid": about["rollout"] if about["group"] is None else str(about["group"]),
        "data_source": about["task"],
        "sample": made.sample,
        "samples": made.samples,
    }
