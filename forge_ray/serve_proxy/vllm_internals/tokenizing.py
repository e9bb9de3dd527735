"""vLLM's renderer with `GrowingPrompts`: the prompts of a session are tokenised from where they grew.

Only what the renderer does between a rendered text and its ids is replaced, and only for requests of a session and with a fast tokenizer
that gives the same ids when asked directly. Everything else takes vLLM's own way.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from forge_ray.serve_proxy.growing_prompts import GrowingPrompts, marks
from forge_ray.serve_proxy.identity import current

INLINE = 8192
"""Characters that are encoded at once (about a millisecond); more go to the renderer's thread."""


def reuse_tokens(renderer: Any) -> GrowingPrompts | None:
    """Let `renderer` (a `vllm.renderers.base.BaseRenderer`) reuse what a session has tokenised; None where its tokenizer allows nothing."""
    tokenizer = renderer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend = copy.deepcopy(backend)  # vLLM's own are switched between truncating and not
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str) -> list[int]:
        # Unlike `encode` it lets other threads run meanwhile, the event loop's above all, and computes no offsets.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    found = marks(backend.get_added_tokens_decoder().values(), encode)
    probe = "a\n " + "".join(f"{text} é b\n\n {text}c" for text in found)
    if not found or encode(probe) != list(tokenizer(probe, add_special_tokens=False)["input_ids"]):
        return None
    adds_nothing = backend.num_special_tokens_to_add(False) == 0
    prompts, plain = GrowingPrompts(found), renderer._tokenize_prompt_async

    async def tokenize(prompt: Any, params: Any) -> Any:
        context, options = current.get(), params.get_encode_kwargs()
        adds = options["add_special_tokens"] and not adds_nothing
        if context is None or adds or renderer._wants_offsets(prompt, params):
            return await plain(prompt, params)
        plan = prompts.plan(context.session, prompt["prompt"])
        if len(plan.rest) <= INLINE:
            encoded = encode(plan.rest)
        else:
            encoded = await asyncio.get_running_loop().run_in_executor(renderer._executor, encode, plan.rest)
        ids = prompts.keep(plan, encoded)
        if options["truncation"] and len(ids) > (length := options["max_length"]):
            ids = ids[-length:] if tokenizer.truncation_side == "left" else ids[:length]
        return renderer._build_tokens_prompt(ids, prompt)

    renderer._tokenize_prompt_async = tokenize
    return prompts
