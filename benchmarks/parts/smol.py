"""A model of SmolLM2-135M's shape with random weights, and a tokenizer that knows every one of its tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.tiny_model import tiny_model

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
}  # fmt: skip


def smol_model(out: Path, **changes: Any) -> Any:
    """Write it into `out` (float32, 538 MB) and return it. `changes` to its shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPE, **changes}
    source = tiny_model()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    known = len(tokenizer["model"]["vocab"]) + sum(t["id"] >= len(tokenizer["model"]["vocab"]) for t in tokenizer["added_tokens"])
    for number in range(known, shape["vocab_size"]):
        tokenizer["model"]["vocab"][f"filler{number}"] = number
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    eos = tokenizer["model"]["vocab"]["<|im_end|>"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=eos, pad_token_id=0, dtype=torch.float32))
    model.save_pretrained(out)
    return model
