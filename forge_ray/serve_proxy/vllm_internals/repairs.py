"""Where vLLM 0.32's server answers what no client expects: put right around its own classes, on the objects of one app.

- A prompt that has closed the reasoning already (a template that switches thinking off by closing it): streamed, vLLM looks at the prompt
  and gives the reply as text; unstreamed it does not, and all of the reply is reasoning.
- Unstreamed messages fail with a 400 when the model called a tool with arguments that are no JSON object. The reply is whole and recorded,
  so the client gets it, with the empty object that vLLM itself makes of such arguments when they come back in the history.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any


def repair(state: Any) -> None:
    """Repair the serving objects in an app's state."""
    places = (("openai_serving_chat", "parser_cls"), ("anthropic_serving_messages", "parser_cls"), ("openai_serving_responses", "parser"))
    for name, attribute in places:
        serving = getattr(state, name, None)
        parser = getattr(serving, attribute, None)
        if parser is not None:
            setattr(serving, attribute, prompt_aware(parser))
    messages = getattr(state, "anthropic_serving_messages", None)
    if messages is not None:
        messages.messages_full_converter = with_objects(messages.messages_full_converter)


@functools.cache
def prompt_aware(parser: type[Any]) -> type[Any]:
    """A parser class that takes nothing for reasoning where the prompt has ended it, unless the reply opens it anew."""
    base: Any = parser  # only known when the server has chosen it

    class PromptAware(base):
        _closed = False

        def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
            super().set_prompt_token_ids(prompt_token_ids)
            self._closed = self.reasoning_parser is not None and self.is_reasoning_end(list(prompt_token_ids))

        def parse(self, model_output: str, request: Any, enable_auto_tools: bool = False, model_output_token_ids: Any = ()) -> Any:
            reasoning, content, calls = super().parse(model_output, request, enable_auto_tools, model_output_token_ids)
            if not self._closed or reasoning is None or content:
                return reasoning, content, calls
            if not calls and hasattr(self, "_extract_tool_calls"):
                calls, content = self._extract_tool_calls(content=model_output, request=request, enable_auto_tools=enable_auto_tools)
                return None, content, calls
            return None, reasoning, calls

    PromptAware.__name__ = PromptAware.__qualname__ = parser.__name__
    return PromptAware


def with_objects(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`convert` (a chat response into a message) for replies whose tool arguments may be anything."""

    def tolerant(reply: Any) -> Any:
        for call in reply.choices[0].message.tool_calls or ():
            try:
                whole = isinstance(json.loads(call.function.arguments), dict)
            except (ValueError, RecursionError):
                whole = False
            if not whole:
                call.function.arguments = "{}"
        return convert(reply)

    return tolerant
