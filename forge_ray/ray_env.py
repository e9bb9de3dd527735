"""Environment variables that Ray and vLLM need, in one place.

`CLUSTER` must be set where Ray starts (`ray start`, a pod's env): HAProxy mode and the drain period are read by Serve's controller and
proxies. `cluster/ray.env` is this table as a file for people who start Ray themselves; a test keeps both equal. A cluster that a
run starts for itself gets it from `apply`. `WORKER` goes to this job's own workers through the runtime environment.
"""

from __future__ import annotations

import os

CLUSTER: dict[str, str] = {
    # Serve through HAProxy, the handler in the replica: 10-20 times less CPU per streamed chunk than Serve's default proxy.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # /s/<session>/… sticks to one replica. The second line, which Serve has no variable for, follows `balance` in HAProxy's defaults: with
    # splice(2) HAProxy 2.8 does not notice that a client left whose request came in two packets, so its call would run to the end.
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "uri depth 2\n    no option splice-request",
    # A replica change must not cut a call: longer than the longest generation.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    # A busy laptop answers late; Serve would kill the proxy for it, and every call with it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120",
    # Ray 2.60 turns token authentication on by itself in some processes only; say which.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # train.report waits for the controller's poll: 2 s by default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # The new Parquet reader starts 32 actors per call.
    "RAY_DATA_USE_DATASOURCE_V2": "0",
    # Time for a stopped job to end its sandboxes and its Serve app.
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
}

WORKER: dict[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # With tools and `parallel_tool_calls: false` (Codex), or a `strict` tool, vLLM masks the model's every call by a grammar: such calls
    # are not on-policy. Off: the model is free, and vLLM cuts surplus tool calls from the reply.
    "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_DATA_USE_DATASOURCE_V2": "0",
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
}


def apply(environment: dict[str, str] | None = None) -> None:
    """Set the `CLUSTER` variables that the user has not set, in `environment` (default: this process). Before Ray is imported."""
    target = os.environ if environment is None else environment
    for name, value in CLUSTER.items():
        target.setdefault(name, value)


def worker() -> dict[str, str]:
    """The variables of this job's workers: the user's own value wins."""
    return {name: os.environ.get(name, value) for name, value in WORKER.items()}


def haproxy() -> bool:
    """Whether Serve's HAProxy mode is on in this process's environment."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
