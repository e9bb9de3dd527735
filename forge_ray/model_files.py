"""Is a Hugging Face model directory whole? Told from names, sizes and headers in milliseconds, before an engine or a trainer is started on
it and fails in a hundred lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_ray.config import Policy

MODEL_FIX = "give a whole Hugging Face model directory (a chat template can also be set by policy.chat_template)"
"""What to do about any of these."""
TEACHER_FIX = "give a whole Hugging Face model directory with the policy's tokenizer"

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "tokenizer_config.json")
MAX_HEADER = 100 << 20
"""Longest header that the safetensors format allows, bytes."""


def policy_problem(policy: Policy, directory: Path) -> str | None:
    """Why `policy` cannot be served from `directory`, as far as can be seen from outside; None if it looks whole."""
    if policy.script is None and (problem := model_problem(directory)) is not None:
        return problem
    if policy.chat_template is not None and (problem := template_problem(Path(policy.chat_template))) is not None:
        return problem
    if "tokenizer" in policy.engine or policy.engine.get("tokenizer_mode", "auto") not in ("auto", "hf", "slow"):
        return None  # kept elsewhere, or in a form with a template of its own
    return tokenizer_problem(directory, template=policy.chat_template is None and "chat_template" not in policy.server)


def model_problem(directory: Path) -> str | None:
    """Why the weights in `directory` cannot be loaded, as far as can be seen from outside; None if they look whole."""
    return next(_model_problems(directory), None)


def tokenizer_problem(directory: Path, *, template: bool) -> str | None:
    """Why no chat can be held with the tokenizer in `directory`; `template`: whether it must bring a chat template."""
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return f"{directory} has no tokenizer (none of {', '.join(TOKENIZER_FILES[:3])}, …)"
    written = directory / "chat_template.jinja"
    if template and written.exists() and (problem := template_problem(written)) is not None:
        return problem
    config, problem = _json(directory / "tokenizer_config.json")
    if problem is not None and (directory / "tokenizer_config.json").exists():
        return problem
    if template and not any((directory / name).exists() for name in TEMPLATE_FILES) and not config.get("chat_template"):
        return f"the tokenizer in {directory} has no chat template"
    inside = config.get("chat_template")
    if template and not written.exists() and isinstance(inside, str):
        return _syntax(inside, f"the chat template in {directory / 'tokenizer_config.json'}")
    return None


def template_problem(file: Path) -> str | None:
    """Why the text in `file` is no Jinja template; None if it is one."""
    try:
        return _syntax(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        return f"{file} cannot be read ({error})"


def _syntax(template: str, where: str) -> str | None:
    import jinja2

    # transformers' own tag around what the model says means nothing to plain Jinja.
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError as error:
        return f"{where} is no Jinja template (line {error.lineno}: {error.message})"
    return None


def safetensors_problem(file: Path) -> str | None:
    """Why `file` is no whole safetensors file; None if its header fits its size."""
    try:
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER:
                return f"{file} is no safetensors file"
            if 8 + length > size:
                return f"{file} is truncated: its header alone has {8 + length} bytes, the file {size}"
            header = json.loads(opened.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except struct.error:
        return f"{file} is truncated: it has no header"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return f"{file} is no safetensors file"
    if 8 + length + end != size:
        return f"{file} is {'truncated' if size < 8 + length + end else 'damaged'}: {size} bytes, {8 + length + end} by its header"
    return None


def _model_problems(directory: Path) -> Iterator[str]:
    if not (directory / "config.json").is_file():
        yield f"{directory} is no model directory (no config.json)"
        return
    _, problem = _json(directory / "config.json")
    if problem is not None:
        yield problem
    named = set(directory.glob("*.safetensors"))
    for index in directory.glob("*.index.json"):
        listed, problem = _json(index)
        if problem is not None:
            yield problem
        shards = listed.get("weight_map")
        for name in sorted(set(shards.values())) if isinstance(shards, dict) else ():
            if not (directory / str(name)).is_file():
                yield f"{directory / str(name)} is missing, which {index.name} names"
    if not named and not any(directory.glob("*.bin")) and not any(directory.glob("*.gguf")):
        yield f"{directory} has no weights (no *.safetensors)"
    for file in sorted(named):
        if (problem := safetensors_problem(file)) is not None:
            yield problem


def _json(file: Path) -> tuple[dict[str, Any], str | None]:
    """The object in `file`, and why there is none."""
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        return {}, f"{file} cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        return {}, f"{file} is not JSON ({error})"
    return (value, None) if isinstance(value, dict) else ({}, f"{file} holds no JSON object")


def vocabulary_problem(directory: Path, other: Path) -> str | None:
    """Why the model in `other` cannot rate the tokens of the one in `directory`: another id for a token, or fewer ids; None if it can.

    Told from `tokenizer.json`, which both must have, and the size in `config.json`.
    """
    known = []
    for folder in (directory, other):
        tokenizer, problem = _json(folder / "tokenizer.json")
        if problem is not None:
            return problem
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {entry[0]: place for place, entry in enumerate(vocabulary)}
        known.append(tokens | {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())})
    if differing := next((token for token, number in known[0].items() if known[1].get(token) != number), None):
        return f"{other} has another tokenizer than {directory}: token {differing!r} is not number {known[0][differing]} there"
    config = _json(other / "config.json")[0]
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if isinstance(size, int) and size <= (most := max(known[0].values(), default=0)):
        return f"{other} has a vocabulary of {size} tokens, and the policy's ids go to {most}"
    return None


def template_sha256(policy: Policy, directory: Path) -> str | None:
    """sha256, hex, of the chat template that holds: `policy.chat_template`'s, else the model directory's; None where neither has one."""
    for file in (Path(policy.chat_template) if policy.chat_template else None, directory / "chat_template.jinja"):
        if file is not None and file.is_file():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    inside = _json(directory / "tokenizer_config.json")[0].get("chat_template")
    if not inside:
        return None
    return hashlib.sha256((inside if isinstance(inside, str) else json.dumps(inside, sort_keys=True)).encode()).hexdigest()


def tokenizer_sha256(directory: Path) -> str | None:
    """sha256, hex, over `<name> <sha256 of the file>` of each tokenizer file, one a line by name; None where there is none."""
    files = sorted(file for name in TOKENIZER_FILES if (file := directory / name).is_file())
    lines = "".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest() if files else None
