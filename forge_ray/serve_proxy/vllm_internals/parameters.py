"""Sampling parameters: what of a request's own stays, what is forced, what the call log gets."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams

KEPT = (
    "max_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
    "stream_interval",
    "prompt_logprobs",
    "structured_outputs",
)
"""Fields of the request's sampling parameters that stay: where the output ends, how it is rendered, and the grammar (which is recorded)."""
RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)


def used_parameters(params: SamplingParams, force: dict[str, Any] | None) -> SamplingParams:
    """The parameters to sample with. Whatever is not in `KEPT` takes vLLM's neutral default or the forced value, so a field that a request,
    a model's generation_config or a later vLLM brings along cannot change the distribution unseen."""
    if force is None:
        used = params.clone()
        used.logprobs = max(used.logprobs or 0, 0)
        return used
    kept = {name: getattr(params, name) for name in KEPT}
    # An engine's watermark biases the sampling unless a request says no.
    return SamplingParams(n=1, logprobs=max(params.logprobs or 0, 0), watermarking=False, **kept, **force)


def recorded_parameters(params: SamplingParams) -> dict[str, Any]:
    """The call log's `sampling`: everything that shapes the distribution or the end of the output."""
    return {name: getattr(params, name) for name in RECORDED}


def masked_by_grammar(params: SamplingParams) -> bool:
    return params.structured_outputs is not None and not params.structured_outputs.all_constraints_none()
