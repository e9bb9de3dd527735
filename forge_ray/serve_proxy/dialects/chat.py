"""OpenAI chat completions and (legacy) completions."""

from __future__ import annotations

from typing import Any

from forge_ray.serve_proxy.dialects.base import Dialect, Overflow, Reply, parse_object, without_nonce
from forge_ray.serve_proxy.dialects.fields import (
    BOOKKEEPING,
    ENGINE_FIELDS,
    ONE_REPLY,
    RENDERING,
    SAMPLING_FIELDS,
    TEMPERATURES,
    TEMPLATE_VARIABLES,
    Check,
    Fields,
    Json,
    given,
    is_set,
    objects,
    unsupported,
)
from forge_ray.serve_proxy.dialects.refusal import Refusal

_LEGACY = "declare `tools`"

_REFUSED: dict[str, tuple[Check, str]] = {
    **SAMPLING_FIELDS,
    **ENGINE_FIELDS,
    "prompt_logprobs": (given, "the prompt is not scored"),
    "logprob_token_ids": (is_set, "only sampled tokens are scored"),
    "prompt_embeds": (is_set, "the prompt must be tokens"),
    "echo": (is_set, "a reply is what the model said"),
    "truncate_prompt_tokens": (given, "a prompt is served whole or refused"),
}

_IGNORED = BOOKKEEPING | {
    "truncation_side": "nothing is truncated",
    "length_penalty": "of beam search",
    "early_stopping": "of beam search",
    "routed_experts_prompt_start": "of data that is not returned",
    "return_token_offsets": "of another route",
    "mm_payload": "of another route",
    "return_mm_kwargs": "of another route",
}

_REMOVED = frozenset({"request_id", "session_id", "truncation_side", "return_token_offsets"})

_HONOURED = RENDERING | {
    "model": "any name is served; another than `policy.served_name` makes the call `aux`",
    "max_tokens": "an upper bound: cut to what the window leaves",
    "stream_options": "",
    "logprobs": "of the distribution that was sampled from",
    "response_format": "the call is flagged as sampled under a grammar and not trained by default",
    "spaces_between_special_tokens": "of the text only",
    "add_special_tokens": "",
    "return_tokens_as_token_ids": "",
    "return_token_ids": "",
    "stream_interval": "",
}

CHAT_FIELDS = Fields(
    honoured=_HONOURED
    | {
        "messages": "",
        "chat_template_kwargs": TEMPLATE_VARIABLES,
        "max_completion_tokens": "as `max_tokens`, and holds where both are given",
        "top_logprobs": "",
        "tools": "functions",
        "tool_choice": "`required` and a named function are sampled under a grammar",
        "parallel_tool_calls": "false: the reply shows the first call only",
        "reasoning_effort": "a variable of the chat template",
        "include_reasoning": "",
        "add_generation_prompt": "",
        "continue_final_message": "",
        "documents": "a variable of the chat template",
        "return_prompt_text": "null where sampled tokens took the place of re-rendered ones",
    },
    ignored=_IGNORED
    | {
        "verbosity": "the chat templates have no such wish",
        "prediction": "it speeds up, and changes no answer",
        "web_search_options": "this server runs no tools; the model is not told of any",
        "moderation": "nothing is moderated",
    },
    sampling=TEMPERATURES,
    refused=_REFUSED
    | {
        "functions": (is_set, _LEGACY),
        "function_call": (lambda value: value not in (None, "none", "auto"), _LEGACY),
        "audio": (is_set, "replies are text"),
        "modalities": (lambda value: value not in (None, [], ["text"]), "replies are text"),
        "chat_template": (is_set, "the run's template holds"),
    },
    removed=_REMOVED | {"function_call"},
)

COMPLETION_FIELDS = Fields(
    honoured=_HONOURED | {"prompt": "one text, or one list of token ids; several are refused"},
    ignored=_IGNORED | {"chat_template_kwargs": "a plain prompt goes through no template"},
    sampling=TEMPERATURES,
    refused=_REFUSED | {"suffix": (is_set, "the model continues a text at its end")},
    removed=_REMOVED,
)


class OpenAI(Dialect):
    """Error shape and overflow words that the OpenAI dialects share."""

    prompt_field: str

    def error(self, refusal: Refusal, request_id: str) -> Json:
        kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
        if refusal.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}

    def overflow(self, overflow: Overflow) -> Refusal:
        got = f"your input has {overflow.prompt} tokens" if overflow.prompt else "your input has more"
        message = (
            f"Your input exceeds the context window of this model. This model's maximum context length is {overflow.window} tokens; "
            f"however, {got}. Please reduce the length of the {self.prompt_field}."
        )
        return Refusal(400, message, self.prompt_field, "context_length_exceeded")


class ChatReply(Reply):
    def __init__(self, streamed: bool) -> None:
        super().__init__(streamed)
        self._tools, self._finish = False, None

    def event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.complete = self._finish is not None
            return
        if b'"tool_calls":[{' in data or b'"finish_reason":"' in data or b'"usage":{' in data:
            chunk = parse_object(data) or {}
            for choice in chunk.get("choices") or ():
                self._choice(choice, choice.get("delta") or {})
            self.usage = chunk.get("usage") or self.usage

    def body(self, body: Json) -> None:
        for choice in body.get("choices") or ():
            self._choice(choice, choice.get("message") or {})
        self.usage = body.get("usage")

    def _choice(self, choice: Json, message: Json) -> None:
        self._tools = self._tools or bool(message.get("tool_calls"))
        self.note(*(call.get("id") for call in message.get("tool_calls") or ()))
        self._finish = choice.get("finish_reason") or self._finish
        if self._finish == "length":
            self.reply = "length"
        elif self._finish in ("stop", "tool_calls"):
            self.reply = "tool_calls" if self._tools else "answer"
        elif self._finish is not None:
            self.reply = None


class Chat(OpenAI):
    """`POST /v1/chat/completions`."""

    name, path, prompt_field = "chat", "/v1/chat/completions", "messages"
    caps = ("max_tokens", "max_completion_tokens")
    reply = ChatReply
    fields = CHAT_FIELDS

    def refuse(self, body: Json) -> Refusal | None:
        if body.get("add_generation_prompt") is False and not body.get("continue_final_message"):
            return unsupported("add_generation_prompt", "the model answers as the assistant")
        return self.fields.refuse(body) or _tools(body)

    def adapt(self, body: Json) -> bool:
        changed = self.fields.remove(body)
        # No tools and an empty list of tools are the same request, and no choice is left.
        if not body.get("tools") and body.get("tool_choice") in (None, "auto", "none"):
            changed = bool({"tools", "tool_choice"} & body.keys()) or changed
            body.pop("tools", None)
            body.pop("tool_choice", None)
        messages = body.get("messages")
        first = messages[0] if isinstance(messages, list) and messages else None
        if isinstance(first, dict) and (text := without_nonce(first.get("content"))) is not None:
            first["content"], changed = text, True
        return changed


class Completions(OpenAI):
    """`POST /v1/completions`."""

    name, path, prompt_field = "completions", "/v1/completions", "prompt"
    caps = ("max_tokens",)
    reply = ChatReply
    fields = COMPLETION_FIELDS

    def refuse(self, body: Json) -> Refusal | None:
        several = unsupported("prompt", ONE_REPLY) if _several_prompts(body.get("prompt")) else None
        return several or self.fields.refuse(body)


def _several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)


def _tools(body: Json) -> Refusal | None:
    """Tools that are no functions, and choices of them."""
    for number, tool in enumerate(objects(body.get("tools"))):
        if (kind := tool.get("type", "function")) != "function":
            return unsupported(f"tools[{number}]", f"a tool of type {kind!r} cannot be called in this dialect")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") != "function":
        return unsupported("tool_choice", f"a choice of type {choice.get('type')!r} cannot be kept to")
    return None
