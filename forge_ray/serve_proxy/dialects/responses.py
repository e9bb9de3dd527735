"""OpenAI responses, as far as a server without stored state can speak it."""

from __future__ import annotations

from forge_ray.serve_proxy.dialects.base import VLLM_FIELDS, Check, Json, Refusal, Reply, first_refused, is_set, parse_object
from forge_ray.serve_proxy.dialects.chat import SAMPLING_FIELDS, OpenAI

_STATELESS = "this server keeps no state between requests; send the whole input"

_FIELDS: dict[str, tuple[Check, str]] = {
    **SAMPLING_FIELDS,
    **VLLM_FIELDS,
    "background": (is_set, _STATELESS),
    "previous_response_id": (is_set, _STATELESS),
    "previous_input_messages": (is_set, _STATELESS),
    "conversation": (is_set, _STATELESS),
    "prompt": (is_set, "there are no stored prompts"),
    "truncation": (lambda value: value not in (None, "disabled"), "a prompt is served whole or refused"),
}
_LAST = (b'"type":"response.completed"', b'"type":"response.incomplete"', b'"type":"response.failed"')


class ResponsesReply(Reply):
    def event(self, data: bytes) -> None:
        if any(mark in data for mark in _LAST):
            event = parse_object(data) or {}
            response = event.get("response")
            if event.get("type") in ("response.completed", "response.incomplete") and isinstance(response, dict):
                self.complete = True
                self.body(response)

    def body(self, body: Json) -> None:
        self.usage = body.get("usage")
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

    def refuse(self, body: Json) -> Refusal | None:
        return first_refused(body, _FIELDS)

    def adapt(self, body: Json) -> bool:
        return any([_assistant_items(body), _free_form_tools(body)])


def _assistant_items(body: Json) -> bool:
    """Clients return assistant items without `type`, or with an empty `content`, which adds nothing."""
    items = body.get("input")
    if not isinstance(items, list):
        return False
    kept, changed = [], False
    for item in items:
        if isinstance(item, dict) and item.get("role") == "assistant" and item.get("type", "message") == "message":
            if item.get("content") == []:
                changed = True
                continue
            if "type" not in item and isinstance(item.get("content"), list):
                item, changed = {"type": "message", **item}, True
        kept.append(item)
    body["input"] = kept
    return changed


def _free_form_tools(body: Json) -> bool:
    """A custom tool with a grammar is declared as free text: the grammar would mask the model's own choice, and vLLM refuses it."""
    changed = False
    for tool in body.get("tools") or ():
        form = tool.get("format") if isinstance(tool, dict) and tool.get("type") == "custom" else None
        if isinstance(form, dict) and form.get("type") == "grammar":
            tool["format"], changed = {"type": "text"}, True
    return changed
