"""The quickstart's policy: a Qwen3 of 0.4 million parameters with its own tokenizer, made in seconds, loaded by transformers and vLLM.

What makes it learn a shell agent's job in under a minute of CPU time: short episodes (a compact chat template; the fixed text around a tool
call is one token each side; a file name is two tokens, a digit one) and weights drawn four times wider than usual, without which copying
from the prompt appears only after several times the steps.
"""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

from families import ADJECTIVES, FAMILIES, NOUNS, SHOWN, problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE = Path(__file__).resolve().parent / "chat_template.jinja"
PAD, END = "<|pad|>", "<|end|>"
SPECIAL = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CALL = ('<tool_call>{"name": "bash", "arguments": {"command": "', '"}}</tool_call>')
PLAIN = ["<tool_call>", "</tool_call>", *CALL]
"""Tokens of their own that are ordinary text, so that a server's tool parser sees them."""
VOCABULARY = 640
"""Upper bound; training ends earlier, when there is nothing left to merge. The model has a row for every token and none beyond."""
WINDOW = 1024
SPREAD = 0.08
"""Standard deviation of the initial weights."""


def build(out: str | Path, seed: int) -> None:
    """Write model and tokenizer to the directory `out`. The weights depend on `seed`, the tokenizer does not."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    text = tokenizer()
    end, pad = (text.get_vocab()[token] for token in (END, PAD))
    config = Qwen3Config(
        vocab_size=len(text),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        use_cache=True,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, SPREAD, generator=generator)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=True)
    model.save_pretrained(out)
    text.save_pretrained(out)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template: byte-level BPE, so every text survives `decode(encode(text))`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    pieces = Regex(r"-[a-z]+\.txt| ?[A-Za-z]+|\d| ?[^A-Za-z\d\s]+|\s")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    plain = [AddedToken(token, special=False, normalized=False) for token in PLAIN]
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(PLAIN),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_texts(), trainer)
    core.add_tokens(plain)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_max_length=WINDOW,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text(),
    )


def _texts() -> list[str]:
    """What the tokenizer is trained on: instructions, commands, every word of a file name, and what a shell says when it fails."""
    rng = random.Random("tokenizer")
    texts = [f" {a}-{n}.txt {a}-{n}.txt\n{a}-{n}.txt" for a in ADJECTIVES for n in NOUNS]
    for _ in range(100):
        for family in FAMILIES:
            drawn = problem(family, rng, "train")
            strategies = [*drawn.right, *(commands for _, commands in drawn.wrong)]
            texts += [drawn.instruction, *(command.replace(SHOWN, "7") for commands in strategies for command in commands)]
            texts += [f"cat: {drawn.output}: No such file or directory", f"{drawn.output}: command not found", "tool bash(command)", "Done"]
    return texts
