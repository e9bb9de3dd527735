"""What the proxy does with each field of a request, as data: the pages of `docs/dialects.md` are made from it, and the tests go through it.

A dialect has three lists. *Honoured*: the field means here what the protocol says. *Ignored*: leaving it without effect is harmless; its
name goes into the call's record. The sampling parameters are a part of this list, since the run's policy replaces them (an evaluation in
`mode: harness` obeys them). *Refused*: the answer would mean something else without it, so the request gets a 400 that names it. A field
in none of the lists is ignored and named.

A name with a dot (`reasoning.summary`) is a field of the object before it; `tools: web_search` stands for what a value says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_ray.serve_proxy.dialects.refusal import Refusal

Json = dict[str, Any]
Check = Callable[[Any], bool]
"""Whether a value asks for something that is refused."""


def is_set(value: Any) -> bool:
    """Neither absent, null, false, zero nor empty."""
    return value not in (None, False, 0, "", [], {})


def given(value: Any) -> bool:
    """Neither absent nor null."""
    return value is not None


def more_than_one(value: Any) -> bool:
    return value is not None and value != 1


def objects(value: Any) -> list[Json]:
    """`value` as a list of objects; what is none is left to vLLM's validation and reads as an empty object here."""
    return [item if isinstance(item, dict) else {} for item in value] if isinstance(value, list) else []


@dataclass(frozen=True)
class Fields:
    """The lists of one dialect: name -> what is done with it, or why not."""

    honoured: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, str] = field(default_factory=dict)
    """Ignored where the policy's own values are forced."""
    refused: Mapping[str, tuple[Check, str]] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    """Ignored fields (without a dot) that are taken out of the request, because vLLM's app would check or obey them."""

    def refuse(self, body: Json, code: str | None = "unsupported_parameter") -> Refusal | None:
        """The first refused field that `body` asks for, as a 400."""
        for name, (check, reason) in self.refused.items():
            value, there = _look(body, name)
            if there and check(value):
                return unsupported(name, reason, code)
        return None

    def unheeded(self, body: Json, *, forced: bool) -> list[str]:
        """Names of the fields in `body` that have no effect here. `forced`: the policy's sampling parameters replace the request's."""
        return list(self._unheeded(body, forced))

    def _unheeded(self, body: Json, forced: bool) -> Iterator[str]:
        for name, value in body.items():
            if value is None or name in self.honoured or name in self.refused or (name in self.sampling and not forced):
                continue
            yield name
        for name in self.ignored:
            if "." in name and _look(body, name)[0] is not None:
                yield name

    def remove(self, body: Json) -> bool:
        """Take the fields out of `body` that vLLM's app must not see; whether there was one."""
        found = self.removed & body.keys()
        for name in found:
            del body[name]
        return bool(found)


def unsupported(name: str, reason: str, code: str | None = "unsupported_parameter") -> Refusal:
    """A 400 that names a field."""
    return Refusal(400, f"Unsupported parameter: '{name}' is not supported by this server: {reason}.", name, code)


def _look(body: Json, name: str) -> tuple[Any, bool]:
    """The value at a dotted name, and whether it is there."""
    value: Any = body
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None, False
        value = value[part]
    return value, True


ONE_REPLY = "a call has exactly one reply"
CHANGES_SAMPLING = "it changes the distribution that tokens are sampled from"
"""Why a field is refused: what was trained would not be the policy."""
FORCED = "the policy's own value is used and recorded"

ENGINE_FIELDS: dict[str, tuple[Check, str]] = {
    "kv_transfer_params": (is_set, "it is internal to the serving engine"),
    "ec_transfer_params": (is_set, "it is internal to the serving engine"),
    "vllm_xargs": (is_set, CHANGES_SAMPLING),
    "watermarking": (is_set, CHANGES_SAMPLING),
    "priority": (is_set, "every session is served alike"),
    "mm_processor_kwargs": (is_set, "the server's processing of images holds"),
    "media_io_kwargs": (is_set, "the server's processing of images holds"),
}
"""Extensions of vLLM's server that every dialect takes and that are refused in all of them."""

SAMPLING_FIELDS: dict[str, tuple[Check, str]] = {
    "n": (more_than_one, ONE_REPLY),
    "best_of": (more_than_one, ONE_REPLY),
    "beam": (is_set, "beam search does not sample"),
    "beam_width": (is_set, "beam search does not sample"),
    "use_beam_search": (is_set, "beam search does not sample"),
    "logits_processors": (is_set, CHANGES_SAMPLING),
    "logit_bias": (is_set, CHANGES_SAMPLING),
    "allowed_token_ids": (is_set, CHANGES_SAMPLING),
    "bad_words": (is_set, CHANGES_SAMPLING),
    "min_tokens": (is_set, CHANGES_SAMPLING),
    "ignore_eos": (is_set, CHANGES_SAMPLING),
    "thinking_token_budget": (is_set, "it forces tokens that the model did not choose"),
    "repetition_detection": (is_set, "it ends replies that the model did not end"),
    **{
        name: (is_set, "vLLM no longer knows it, so nothing would be constrained: use structured_outputs")
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
    },
}
"""Fields of vLLM's OpenAI servers, of today or yesterday, that change what is sampled."""

TEMPERATURES: dict[str, str] = {
    name: FORCED
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
}
"""Parameters that `policy.sampling` replaces."""

BOOKKEEPING: dict[str, str] = {
    "metadata": "a note of the client's",
    "user": "a note of the client's",
    "safety_identifier": "a note of the client's",
    "store": "nothing is stored for later requests",
    "service_tier": "there is one tier",
    "prompt_cache_key": "the prefix cache finds prefixes itself",
    "prompt_cache_retention": "the prefix cache finds prefixes itself",
    "session_id": "the session is in the URL or the key",
    "request_id": "the proxy gives its own",
}
"""Fields of the OpenAI dialects that say nothing about the answer."""

RENDERING: dict[str, str] = {
    "stop": "ends the reply; the sampled ids keep the token that completed it",
    "stop_token_ids": "as `stop`",
    "include_stop_str_in_output": "of the text only",
    "skip_special_tokens": "of the text only",
    "stream": "",
    "structured_outputs": "the call is flagged as sampled under a grammar and not trained by default",
    "cache_salt": "separates prefix caches",
}
"""vLLM's extensions that shape the text, never the distribution."""

TEMPLATE_VARIABLES = "variables of the chat template"
