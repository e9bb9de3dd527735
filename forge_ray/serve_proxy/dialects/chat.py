"""OpenAI chat completions and (legacy) completions."""

from __future__ import annotations

from typing import Any

from forge_ray.serve_proxy.dialects.base import (
    CHANGES_SAMPLING,
    VLLM_FIELDS,
    Check,
    Dialect,
    Json,
    Overflow,
    Refusal,
    Reply,
    first_refused,
    is_set,
    more_than_one,
    parse_object,
    without_nonce,
)

_ONE_REPLY = "a call has exactly one reply"

SAMPLING_FIELDS: dict[str, tuple[Check, str]] = {
    "n": (more_than_one, _ONE_REPLY),
    "best_of": (more_than_one, _ONE_REPLY),
    "use_beam_search": (is_set, "beam search does not sample"),
    "logits_processors": (is_set, CHANGES_SAMPLING),
    "logit_bias": (is_set, CHANGES_SAMPLING),
    "allowed_token_ids": (is_set, CHANGES_SAMPLING),
    "bad_words": (is_set, CHANGES_SAMPLING),
    "min_tokens": (is_set, CHANGES_SAMPLING),
    "ignore_eos": (is_set, CHANGES_SAMPLING),
    "thinking_token_budget": (is_set, "it forces tokens that the model did not choose"),
    "repetition_detection": (is_set, "it ends replies that the model did not end"),
}
"""Fields of vLLM's OpenAI servers that change what is sampled."""

_FIELDS: dict[str, tuple[Check, str]] = {
    **SAMPLING_FIELDS,
    **VLLM_FIELDS,
    "prompt_logprobs": (lambda value: value is not None, "the prompt is not scored"),
    "prompt_embeds": (is_set, "the prompt must be tokens"),
    "echo": (is_set, "a reply is what the model said"),
    "truncate_prompt_tokens": (lambda value: value is not None, "a prompt is served whole or refused"),
}


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

    def refuse(self, body: Json) -> Refusal | None:
        if body.get("add_generation_prompt") is False and not body.get("continue_final_message"):
            return first_refused(body, {"add_generation_prompt": (lambda _: True, "the model answers as the assistant")})
        return first_refused(body, _FIELDS)

    def adapt(self, body: Json) -> bool:
        changed = False
        # No tools and an empty list of tools are the same request.
        if body.get("tools") == [] and body.get("tool_choice") in (None, "auto", "none"):
            del body["tools"]
            body.pop("tool_choice", None)
            changed = True
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

    def refuse(self, body: Json) -> Refusal | None:
        several = {"prompt": (_several_prompts, _ONE_REPLY), "suffix": (is_set, "the model continues a text at its end")}
        return first_refused(body, {**_FIELDS, **several})


def _several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)
