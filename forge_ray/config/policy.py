"""`policy`: the model under training, its engine, how calls are sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from forge_ray.config.values import NonNegative, Positive, Section, Share, Source, Variable, matching


class Sampling(Section):
    """Sampling parameters that the proxy forces on training calls, whatever the harness asks for."""

    temperature: Annotated[Positive, Field(ge=0.01)] = 1.0
    """Divides the logits. Below 0.01 the engine would sample with 0.01."""
    top_p: Share = 1.0
    """Nucleus size; below 1 the recorded log-probabilities are those of the cut distribution."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 = off."""


class EvalSampling(Section):
    """Sampling parameters of evaluation calls."""

    mode: Literal["fixed", "harness"] = "fixed"
    """`fixed`: the values below; `harness`: what the harness asked for."""
    temperature: NonNegative = 1.0
    """0 = greedy."""
    top_p: Share = 1.0
    """Nucleus size."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 = off."""


class Policy(Section):
    """The model under training and its engine."""

    model: Source
    """A Hugging Face model directory with its tokenizer."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's template."""
    script: str | None = None
    """A script of answers served in place of the model's (JSON, see `forge_ray.serve_proxy.scripted_engine`): tests a harness
    adapter without a trained model."""
    served_name: Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", "letters, digits and . _ : -, at most 128")] = "policy"
    """Model name given to harnesses; other names are served too."""
    engine: dict[str, Any] = {}
    """Any vLLM engine argument (`max_model_len: 2048`, …). `dtype` is `train.precision` where it is not given, so that the engine samples
    in the precision that is trained in."""
    server: dict[str, Any] = {}
    """Any argument of vLLM's API server (`tool_call_parser: hermes`, `reasoning_parser: qwen3`, …)."""
    environment: dict[Variable, str] = {}
    """Environment variables of the replicas, on top of `cluster/ray.env`."""
    sampling: Sampling = Sampling()
    """Sampling of training calls."""
    eval_sampling: EvalSampling = EvalSampling()
    """Sampling of evaluation calls."""
