"""`proxy`: the recording proxy, its limits, the other models behind it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forge_ray.config.values import Count, NonNegative, Positive, Section, matching


class Limits(Section):
    """Limits per session, enforced by the proxy. Reaching one ends the rollout as `truncated`."""

    calls: Count | None = None
    """Model calls."""
    sampled_tokens: Count | None = None
    """Sampled tokens over all calls."""
    context_tokens: Count | None = None
    """Prompt + sampled tokens of one call; the engine's window always holds."""


class Upstream(Section):
    """Another model behind the proxy (a judge, a teacher): requests for its name go there, and are recorded as text."""

    url: Annotated[str, matching(r"https?://[^/\s?#]+(/[^\s?#]*)?", "http://HOST:PORT/v1 or https://HOST/v1")]
    """Base URL of an OpenAI-compatible API, with its `/v1` where it has one."""
    model: str | None = None
    """Model name there; nothing: the one that the harness asked for."""
    key_env: Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable, not the key")] | None = None
    """Environment variable that holds the API key, where the run is started. The key itself is written nowhere."""
    headers: dict[str, str] = {}
    """Further headers of each request. They are in `config.yaml`: no secrets."""
    dialects: Annotated[list[Literal["chat", "completions", "responses", "messages"]], Field(min_length=1)] = [
        "chat", "completions", "responses",
    ]  # fmt: skip
    """Dialects that it speaks; a request in another one is refused with a 400. `messages` goes to `<url>/messages`."""
    timeout_s: Positive = 600
    """Longest silence of the upstream; above it 504."""
    logprobs: bool = True
    """Ask for the log-probabilities of the reply's tokens, where the dialect has them."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """Also those of so many most likely tokens at each place."""


class Proxy(Section):
    """The recording proxy on Ray Serve."""

    host: str = "127.0.0.1"
    """Bind address. HAProxy mode binds every interface whatever stands here."""
    port: Annotated[int, Field(ge=1, le=65535)] = 18700
    """Port of the proxy."""
    replicas: Count = 1
    """Replicas of the policy, each with an engine of its own."""
    replica_cpus: NonNegative = 0.1
    """Logical CPUs of a replica (its real use is the engine's)."""
    replica_gpus: NonNegative = 0
    """GPUs of a replica."""
    limits: Limits = Limits()
    """Limits per session."""
    max_call_tokens: Count | None = None
    """Upper bound of sampled tokens of one call; a harness's own smaller cap still holds."""
    train_grammar_calls: bool = False
    """Train calls whose sampling a grammar masked (tool_choice=required, JSON schema)."""
    keep_bodies: bool = False
    """Keep request and response bodies under `bodies/`, not only their digests."""
    max_body_bytes: Count = 32 * 2**20
    """Largest request body; above it 413."""
    max_running: Count | None = None
    """Requests that a replica's engine has at once; nothing: 1.25 times its `max_num_seqs`. The others wait, free places go round the
    sessions."""
    max_waiting: Annotated[int, Field(ge=0)] = 4096
    """Requests that may wait in a replica; above it 429 with `retry-after`."""
    max_pause_s: Positive = 300
    """Longest wait for a weight update; above it 503 with `retry-after`."""
    keepalive_s: NonNegative = 10
    """Longest silence of a streamed reply, before the first token too: then a comment (messages: a ping) is sent; 0 = any."""
    drain_s: NonNegative = 60
    """How long a replica that is told to stop (scale-down, a new deployment) may go on with its running calls."""
    upstreams: dict[str, Upstream] = {}
    """Model name, or pattern (`gpt-*`), of models that others serve; the first that fits counts. See docs/upstreams.md."""
    log_segment_mb: Count = 64
    """Size at which a file of the call log is followed by the next one; full ones are compacted into Parquet while the run goes on."""
