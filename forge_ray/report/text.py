"""Token ids as text: a decoder made from a model directory's `tokenizer.json`, and the text of single tokens.

Only the `tokenizers` library is loaded, in milliseconds; a report must not wait for transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forge_ray.report.summary import read_config
from forge_ray.run_dir import RunDir

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens written out."""

_LONGEST_PIECE = 8


def numbers(ids: Sequence[int]) -> str:
    """The decoder of last resort: the ids themselves."""
    return "".join(f"⟨{token}⟩" for token in ids)


def model_directory(run: RunDir) -> Path:
    """The run's initial model: made into `inputs/model`, or where the config says."""
    made = run.inputs / "model"
    if made.is_dir():
        return made
    policy = read_config(run).get("policy")
    model = policy.get("model") if isinstance(policy, dict) else None
    path = model.get("path") if isinstance(model, dict) else model
    return Path(path) if isinstance(path, str) else made


def decoder(model: Path) -> Decode:
    """The decoder of the tokenizer in `model`; `numbers` where there is none that can be read."""
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        return numbers
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exception for a file it cannot read
        return numbers

    def decode(ids: Sequence[int]) -> str:
        try:
            return tokenizer.decode(list(ids), skip_special_tokens=False)
        except (OverflowError, TypeError):  # an id that is no unsigned 32-bit number
            return numbers(ids)

    return decode


def pieces(ids: Sequence[int], decode: Decode) -> Iterator[tuple[str, int, int]]:
    """`(text, first, end)` over `ids`, as few tokens each as give whole characters (a character may be several byte tokens)."""
    first = 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[first:end])
        if text.endswith("�") and end < len(ids) and end - first < _LONGEST_PIECE:
            continue
        yield text, first, end
        first = end
