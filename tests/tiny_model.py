"""A tiny random Qwen3-architecture model with its own BPE tokenizer and a tool-calling chat template, for tests of the real engine.

The tokenizer is the conformance suite's. Made in seconds and cached in the system's temporary directory under a digest of both files.
The weights are large enough that distributions differ from context to context: a wrong weight, a stale cache or a shifted logprob shows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from forge_ray.conformance import toy_model

TEMPLATE = r"""
{%- set opening = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if opening or tools -%}
<|im_start|>system
{{ opening }}
{%- if tools %}
Tools, one JSON schema a line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{%- endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call %}
<tool_call>
{"name": "{{ function.name }}", "arguments": {{ function.arguments if function.arguments is string else function.arguments | tojson }}}
</tool_call>
{%- endfor -%}<|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def tiny_model(*, tied: bool = True) -> Path:
    """The model's directory (config, safetensors in fp32, tokenizer, template); made at the first call on a machine."""
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in (__file__, toy_model.__file__))).hexdigest()[:12]
    target = Path(tempfile.gettempdir()) / f"forge-ray-tests-{os.getuid()}" / f"tiny-{digest}-{'tied' if tied else 'untied'}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        _make(work, tied)
        os.rename(work, target)
    except OSError:
        if not target.is_dir():  # another process was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _make(out: Path, tied: bool) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = toy_model.tokenizer(TEMPLATE)
    tokenizer.save_pretrained(out)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=toy_model.SPECIAL.index("<|endoftext|>"),
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    # A model on the hub brings sampling defaults of its own: training must not obey them.
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    model.save_pretrained(out)
