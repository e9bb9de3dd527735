"""The whole tree."""

from __future__ import annotations

import fnmatch
from typing import Annotated

from pydantic import Field, model_validator

from forge_ray.config.metrics import Metrics
from forge_ray.config.policy import Policy
from forge_ray.config.proxy import Proxy
from forge_ray.config.rollouts import Harness, Rollouts, Sandbox, Tasks
from forge_ray.config.store import Store
from forge_ray.config.train import Train
from forge_ray.config.values import Count, Section, matching


class Eval(Section):
    """Evaluation on the held-out tasks."""

    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 0
    """Also every so many steps; 0 = never."""
    samples: Count = 8
    """Rollouts per task."""
    max_in_flight: Count | None = None
    """Default: `rollouts.max_in_flight`."""


class Ray(Section):
    address: str | None = None
    """None: inside a job its cluster, else `RAY_ADDRESS`, else a running local cluster, else a new one of this run's own. `local`:
    always a new one."""
    num_cpus: Count | None = None
    """Logical CPUs of a cluster that this run starts; default: the machine's, at least 4."""
    object_store_mb: Annotated[int, Field(ge=75)] = 256
    """Object store of a cluster that this run starts."""
    dashboard: bool = False
    """Start the dashboard with it."""


class Config(Section):
    """A whole run."""

    name: Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "letters, digits and . _ -, at most 64")]
    """Name of the run and of its directory."""
    runs: str = "~/forge-ray-runs"
    """Parent of the run directories; `~` and `$VARIABLES` are expanded. On a cluster: a shared volume."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds the inputs, SFT, the order of tasks and of minibatches (not the engine's sampling)."""
    policy: Policy
    """The model under training."""
    proxy: Proxy = Proxy()
    """The recording proxy."""
    harnesses: Annotated[list[Harness], Field(min_length=1)]
    """Programs under training; groups go round over (task, harness) pairs."""
    tasks: Tasks
    """What the programs are asked to do."""
    sandbox: Sandbox = Sandbox()
    """Where rollouts run."""
    rollouts: Rollouts = Rollouts()
    """How many, how long, what happens to failures."""
    store: Store = Store()
    """Where the rollouts are kept as data."""
    train: Train = Train()
    """The learner."""
    eval: Eval = Eval()
    """Held-out evaluation."""
    metrics: Metrics = Metrics()
    """Where else the run's numbers go."""
    ray: Ray = Ray()
    """The Ray cluster."""

    @property
    def engine_dtype(self) -> str:
        """vLLM's `dtype`."""
        return str(self.policy.engine.get("dtype") or self.train.precision)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.train.group_size < 2 and self.train.steps:
            raise ValueError("train.group_size must be at least 2: a group of one has no baseline")
        if self.train.loss.reduction == "constant" and self.train.loss.constant is None:
            raise ValueError("train.loss.constant is needed by reduction: constant")
        if self.train.sync.backend == "nccl" and not (self.proxy.replica_gpus and self.train.worker_gpus and self.train.lora is None):
            raise ValueError(
                "train.sync.backend: nccl sends whole weights from GPU to GPU: set proxy.replica_gpus, train.worker_gpus, no lora"
            )
        distillation = self.train.loss.distillation
        if distillation is not None and distillation.upstream is not None:
            if self.upstream(distillation.upstream) is None:
                raise ValueError(f"train.loss.distillation.upstream: no name in proxy.upstreams fits {distillation.upstream!r}")
            if self.policy.sampling.temperature != 1.0:
                raise ValueError("train.loss.distillation.upstream: a server rates at temperature 1: policy.sampling.temperature must be 1")
        if self.policy.served_name in self.proxy.upstreams:
            raise ValueError(f"proxy.upstreams: {self.policy.served_name!r} is the policy's own name (policy.served_name)")
        names = [h.name for h in self.harnesses]
        if len(set(names)) != len(names):
            raise ValueError("harnesses: each name once")
        return self

    def upstream(self, model: str) -> str | None:
        """The key in `proxy.upstreams` that a model name falls under, or None: the policy answers. Its own name no pattern takes away."""
        if model.rpartition("/")[2] == self.policy.served_name:
            return None
        return next((name for name in self.proxy.upstreams if fnmatch.fnmatchcase(model, name)), None)

    def taught(self, harness: Harness) -> bool:
        """Whether the harness talks to another model than the policy."""
        return harness.model is not None and self.upstream(harness.model) is not None
