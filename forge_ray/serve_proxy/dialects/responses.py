"""OpenAI responses, as far as a server without stored state can speak it."""

from __future__ import annotations

import json

from forge_ray.serve_proxy.dialects import responses_input
from forge_ray.serve_proxy.dialects.base import Reply, parse_object
from forge_ray.serve_proxy.dialects.chat import OpenAI
from forge_ray.serve_proxy.dialects.fields import (
    BOOKKEEPING,
    ENGINE_FIELDS,
    RENDERING,
    SAMPLING_FIELDS,
    TEMPERATURES,
    TEMPLATE_VARIABLES,
    Fields,
    Json,
    is_set,
)
from forge_ray.serve_proxy.dialects.refusal import Refusal

_STATELESS = "this server keeps no state between requests; send the whole input"
_NOT_TOLD = "this server runs no tools; the model is not told of it"
_INCLUDED = "message.output_text.logprobs"

_FIELDS = Fields(
    honoured=RENDERING
    | {
        "model": "any name is served; another than `policy.served_name` makes the call `aux`",
        "input": "a text, or items: " + ", ".join(f"`{kind}`" for kind in responses_input.ITEMS + responses_input.CONVERTED),
        "instructions": "",
        "chat_template_kwargs": TEMPLATE_VARIABLES,
        "max_output_tokens": "an upper bound: cut to what the window leaves",
        "tools": "`function`, `custom` (a grammar is not kept to), `namespace` of functions; see below for others",
        "tool_choice": "`required` and a named tool are sampled under a grammar",
        "parallel_tool_calls": "false: the reply shows the first call only",
        "reasoning": "`effort` is a variable of the chat template",
        "include_reasoning": "",
        "text": "`format` other than text: the call is flagged as sampled under a grammar",
        "include": f"`{_INCLUDED}`",
        "top_logprobs": "",
        "enable_response_messages": "",
    },
    ignored=BOOKKEEPING
    | {
        "client_metadata": "a note of the client's",
        "context_management": "the history is served as it comes",
        "max_tool_calls": "it bounds tools that this server would run, and it runs none",
        "stream_options": "streams are not padded",
        "moderation": "nothing is moderated",
        "mm_payload": "of another route",
        "return_mm_kwargs": "of another route",
        "reasoning.summary": "reasoning is returned itself",
        "reasoning.generate_summary": "reasoning is returned itself",
        "reasoning.context": "the chat template decides",
        "reasoning.mode": "there is one mode",
        "text.verbosity": "the chat templates have no such wish",
        "include: …": "any but the honoured one: `reasoning.encrypted_content`, results of tools that this server would run",
        "input: encrypted_content": "another server's; readable reasoning beside it is kept",
    }
    | {f"tools: {kind}": _NOT_TOLD for kind in responses_input.HOSTED},
    sampling=TEMPERATURES,
    refused=SAMPLING_FIELDS
    | ENGINE_FIELDS
    | {
        "background": (is_set, _STATELESS),
        "previous_response_id": (is_set, _STATELESS),
        "previous_input_messages": (is_set, _STATELESS),
        "conversation": (is_set, _STATELESS),
        "prompt": (is_set, "there are no stored prompts"),
        "truncation": (lambda value: value not in (None, "disabled"), "a prompt is served whole or refused"),
    },
    removed=frozenset({"service_tier", "request_id", "session_id"}),
)
_ITEM = b'"type":"response.output_item.done"'
_LAST = (b'"type":"response.completed"', b'"type":"response.incomplete"', b'"type":"response.failed"')


class ResponsesReply(Reply):
    def event(self, data: bytes) -> None:
        if _ITEM in data:
            self._item((parse_object(data) or {}).get("item") or {})
        elif any(mark in data for mark in _LAST):
            event = parse_object(data) or {}
            response = event.get("response")
            if event.get("type") in ("response.completed", "response.incomplete") and isinstance(response, dict):
                self.complete = True
                self.body(response)

    def _item(self, item: Json) -> None:
        self.note(item.get("id"), item.get("call_id"))

    def body(self, body: Json) -> None:
        self.usage = body.get("usage")
        for item in body.get("output") or ():
            self._item(item)
        called = any(str(item.get("type", "")).endswith("_call") for item in body.get("output") or ())
        if body.get("status") == "incomplete":
            self.reply = "length"
        elif body.get("status") == "completed":
            self.reply = "tool_calls" if called else "answer"


class Responses(OpenAI):
    """`POST /v1/responses`."""

    name, path, prompt_field = "responses", "/v1/responses", "input"
    caps = ("max_output_tokens",)
    reply = ResponsesReply
    fields = _FIELDS

    def stream_error(self, refusal: Refusal, request_id: str) -> bytes:
        error = {"code": refusal.code or "server_error", "message": refusal.message}
        response = {"id": request_id, "object": "response", "status": "failed", "error": error, "output": []}
        event = {"type": "response.failed", "sequence_number": 0, "response": response}
        return f"event: response.failed\ndata: {json.dumps(event)}\n\n".encode()

    def refuse(self, body: Json) -> Refusal | None:
        return self.fields.refuse(body) or responses_input.refuse(body)

    def unheeded(self, body: Json, *, forced: bool) -> list[str]:
        included = body.get("include")
        included = [f"include: {name}" for name in included if name != _INCLUDED] if isinstance(included, list) else []
        return super().unheeded(body, forced=forced) + included + responses_input.unheeded(body)

    def adapt(self, body: Json) -> bool:
        changed = self.fields.remove(body)
        included = body.get("include")
        if isinstance(included, list) and any(name != _INCLUDED for name in included):
            body["include"], changed = [name for name in included if name == _INCLUDED], True
        return responses_input.adapt(body) or changed
