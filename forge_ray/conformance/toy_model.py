"""The model directory of a policy that is never run: a config, a small tokenizer, a chat template.

The scripted engine needs no weights, but vLLM's front half needs all else. The tokenizer is a byte-level BPE trained on files of Python's
library, so every text has tokens, and words, escapes and emoji are split as real ones split them. The template writes reasoning, text and
tool calls of every turn as a script's `say` spells them, and takes system messages anywhere.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WINDOW = 400_000
"""Tokens."""
VOCABULARY = 2048
ASSISTANT = "<|im_start|>assistant"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEMPLATE = r"""
{%- if tools -%}
<|im_start|>system
Tools, one JSON schema a line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' -%}
{%- set thought = message.reasoning or message.reasoning_content -%}
<|im_start|>assistant
<think>{{ thought or '' }}</think>{{ message.content or '' }}
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
_TEXTS = ("argparse.py", "asyncio/base_events.py", "json/encoder.py", "pathlib.py", "subprocess.py")


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """The tokenizer, made anew (a second); the same at every call on one Python."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library = Path(sysconfig.get_path("stdlib"))
    made.train_from_iterator((library.joinpath(name).read_text() for name in _TEXTS), trainer)
    # Not special: the tool and reasoning parsers must see them in the text.
    made.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def make(directory: Path) -> Path:
    """Write the model to `directory` (a second or two) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    words.save_pretrained(directory)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY + len(MARKUP),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": WINDOW,
        "bos_token_id": None,
        "eos_token_id": words.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": words.convert_tokens_to_ids("<|endoftext|>"),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory
