"""A chat template, rendered as Hugging Face renders it, without loading transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forge_ray.errors import ForgeRayError

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Messages -> text, without a prompt for the next reply. Raises `TemplateError`."""


class TemplateError(ForgeRayError):
    """A chat template is missing, or refuses some messages."""


def read(model: Path, file: Path | None = None) -> str:
    """The template in `file`, else of the model directory. Raises `TemplateError`."""
    for path in (file, model / "chat_template.jinja"):
        if path is not None and path.is_file():
            return path.read_text()
    inside = _settings(model).get("chat_template")
    if isinstance(inside, list):  # several by name
        inside = next((one.get("template") for one in inside if one.get("name") == "default"), None)
    if not isinstance(inside, str):
        raise TemplateError(f"no chat template in {model}")
    return inside


def renderer(template: str, model: Path) -> Render:
    """Renders `template` with the special tokens of the tokenizer in `model`. Raises `TemplateError` for what is no template."""

    def refuse(message: str) -> str:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise TemplateError(f"no chat template: {error}") from None
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = _settings(model).get(name)
        tokens[name] = value.get("content", "") if isinstance(value, dict) else value or ""

    def render(messages: Sequence[Message]) -> str:
        try:
            return compiled.render(messages=list(messages), add_generation_prompt=False, tools=None, **tokens)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from None

    return render


def _settings(model: Path) -> dict[str, Any]:
    try:
        found = json.loads((model / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
