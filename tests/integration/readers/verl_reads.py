"""veRL reads the file argv[1] by the lines argv[2] of the documentation; its own GRPO advantage and loss over it, as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage

space: dict[str, Any] = {"FILE": sys.argv[1]}
exec(Path(sys.argv[2]).read_text(), space)
data = space["data"]
batch = data.batch
advantages, _ = compute_grpo_outcome_advantage(batch["token_level_scores"], batch["response_mask"], data.non_tensor_batch["uid"])
print(
    json.dumps(
        {
            "input_ids": batch["input_ids"].tolist(),
            "attention_mask": batch["attention_mask"].tolist(),
            "position_ids": batch["position_ids"].tolist(),
            "response_mask": batch["response_mask"].tolist(),
            "rollout_log_probs": batch["rollout_log_probs"].tolist(),
            "ours": (batch["advantages"] * batch["response_mask"]).tolist(),
            "theirs": (advantages * batch["response_mask"]).tolist(),
            "loss": float(agg_loss(-batch["advantages"], batch["response_mask"], "token-mean")),
            "parts": [len(part) for part in data.chunk(2)],
        }
    )
)
