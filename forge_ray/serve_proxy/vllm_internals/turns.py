"""Replies as vLLM's own server reads them: its tokenizer, its tool parser, its reasoning parser.

The serving class of the chat dialect makes a parser per request from the classes that the server was configured with; so does this. The
other dialects' servers use the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from forge_ray.serve_proxy.canonical_json import Schema
from forge_ray.serve_proxy.turns import Turn


def media(prompt: Mapping[str, Any]) -> tuple[str, ...]:
    """Digests of the images, sounds and videos in an engine prompt, by modality and place; empty for a prompt of tokens only."""
    hashes = prompt.get("mm_hashes") or {}
    return tuple(f"{kind}:{value}" for kind, values in sorted(hashes.items()) for value in values)


class ServerTurns:
    """A `turns.TurnReader` over a server's chat serving object."""

    def __init__(self, serving: Any) -> None:
        self._serving = serving
        self._tokenizer = serving.renderer.get_tokenizer()
        self._options: dict[str, Any] = {"skip_special_tokens": False}
        if hasattr(self._tokenizer, "clean_up_tokenization_spaces"):
            self._options["clean_up_tokenization_spaces"] = False
        self.ends = _ends(serving.model_config, self._tokenizer)
        self._request: tuple[Mapping[str, Schema], ChatCompletionRequest] | None = None

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), **self._options) if len(ids) else ""

    def parse(self, text: str, ids: Sequence[int], tools: Mapping[str, Schema]) -> Turn:
        serving = self._serving
        if serving.parser_cls is None:
            return Turn(text=text)
        request = self._for(tools)
        parser = serving.parser_cls(
            self._tokenizer, request.tools, chat_template_kwargs=serving.default_chat_template_kwargs, model_config=serving.model_config
        )
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=serving.enable_auto_tools, model_output_token_ids=list(ids)
        )
        return Turn(reasoning or "", content or "", tuple((call.name, call.arguments) for call in calls or ()))

    def _for(self, tools: Mapping[str, Schema]) -> ChatCompletionRequest:
        """The request that a parser is told of: its tools, nothing else. Both sides of a comparison share it."""
        if self._request is None or self._request[0] != tools:
            declared = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools.items()]
            body = {"messages": [], "tools": declared, "tool_choice": "auto"} if declared else {"messages": []}
            self._request = tools, ChatCompletionRequest.model_validate(body)
        return self._request[1]


def _ends(model_config: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a reply: the tokenizer's, and those of the model's generation config."""
    configured = (model_config.try_get_generation_config() or {}).get("eos_token_id")
    known = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in [tokenizer.eos_token_id, *known] if token is not None)
