"""A tiny random Qwen3-architecture model with its own BPE tokenizer and a tool-calling chat template, for tests of the real engine.

Made in seconds and cached in the system's temporary directory under a digest of this file. Its weights are large enough that distributions
differ from context to context: a wrong weight, a stale cache or a shifted logprob shows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

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
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY = 2048


def tiny_model(*, tied: bool = True) -> Path:
    """The model's directory (config, safetensors in fp32, tokenizer, template); made at the first call on a machine."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
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

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(out)
    config = Qwen3Config(
        vocab_size=VOCABULARY + len(MARKUP),
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
        pad_token_id=SPECIAL.index("<|endoftext|>"),
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


def _tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    library = Path(sysconfig.get_path("stdlib"))
    texts = [
        (library / name).read_text() for name in ("argparse.py", "asyncio/base_events.py", "json/encoder.py", "pathlib.py", "subprocess.py")
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Not special: they must survive detokenisation, where the tool parser looks for them.
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
