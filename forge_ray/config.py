"""The configuration of a run: one tree, read from YAML, changed by dotted overrides, every key documented below its field.

Unknown keys are refused with the nearest known name; a value of the wrong type is refused with file, section and line. Relative
paths are taken from the config file's directory. `load()` is the only way in; the models are frozen.

A *source* (`policy.model`, `tasks.train`, `train.sft.demonstrations` …) is a directory or file, or `file.py:function`: a function of
yours that makes it. The function is called as `function(out, seed=…, **options)` with an empty directory `out`.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from forge_ray import yaml_file
from forge_ray.errors import UserError
from forge_ray.outcome import RATED, Outcome, Treatment


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-6 as text; a person means a number.
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value.strip()):
        return float(value)
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
Beta = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Variable = Annotated[str, Field(pattern=r"^[^=]+$")]
"""Name of an environment variable."""


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


BUILT_IN_SOURCES = {"builtin:teacher": ("job/teacher.py", "demonstrations")}
"""Sources of this package: name -> file in it, function."""


class Source(Section):
    """A path, or a function of yours that makes what belongs there."""

    path: str
    """A directory or file, or `file.py:function`; relative to the config file."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _plain_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @property
    def function(self) -> tuple[Path, str] | None:
        """`(file, function name)`, or None for a plain path."""
        if self.path in BUILT_IN_SOURCES:
            module, name = BUILT_IN_SOURCES[self.path]
            return Path(__file__).parent / module, name
        file, separator, name = self.path.rpartition(":")
        return (Path(file), name) if separator and file.endswith(".py") else None


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
    served_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")] = "policy"
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

    url: Annotated[str, Field(pattern=r"^https?://[^/\s?#]+(/[^\s?#]*)?$")]
    """Base URL of an OpenAI-compatible API, with its `/v1` where it has one."""
    model: str | None = None
    """Model name there; nothing: the one that the harness asked for."""
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
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


class Harness(Section):
    """One program under training."""

    name: str
    """A built-in one ([list](harnesses.md)), or `file.py:Class`."""
    model: str | None = None
    """Model name that it asks for; nothing: `policy.served_name`. A name of `proxy.upstreams` makes it a teacher's harness: it is
    evaluated, and never trained."""
    options: dict[str, Any] = {}
    """Options of the adapter."""


class Tasks(Section):
    """Where tasks come from: directories of Harbor-format task directories."""

    train: Source
    """Tasks that are trained on."""
    heldout: Source | None = None
    """Tasks that are only evaluated; none: nothing is evaluated, whatever `eval` says."""


class Sandbox(Section):
    """Where a rollout runs."""

    backend: Literal["process"] = "process"
    """`process`: a process tree on the pool's node."""
    isolation: Literal["auto", "bubblewrap", "none"] = "auto"
    """File-system isolation of the process sandbox; `auto` uses bubblewrap where it works."""
    directory: str | None = None
    """Parent of the sandboxes; default: a folder of its own in the system's temporary directory."""
    memory_mb: Annotated[Count, Field(le=1073741824)] | None = None
    """Default limit of each process's private writable memory; a task's `memory_mb` wins."""
    cpu_seconds: Annotated[Count, Field(le=2147483648)] | None = None
    """CPU seconds of each process."""
    processes: Annotated[Count, Field(le=4194304)] | None = None
    """Most processes of one rollout; for an ordinary user under bubblewrap threads count too."""
    open_files: Annotated[Count, Field(le=1048576)] | None = None
    """Most open files of each process."""
    file_mb: Annotated[Count, Field(le=1073741824)] | None = None
    """Largest file a rollout may write."""
    log_bytes: Annotated[Count, Field(le=2**30)] = 1_000_000
    """Kept bytes of each log."""


class Rollouts(Section):
    """How many, for how long, and what happens to those that fail."""

    max_in_flight: Count = 16
    """Rollouts that run at the same time."""
    pools: Count = 1
    """RolloutPool actors."""
    deadline_s: Positive = 600
    """Wall-clock limit of the harness; a task's smaller `agent.timeout_sec` wins."""
    verifier_timeout_s: Positive = 60
    """Wall-clock limit of the verifier where the task sets none."""
    retries: Annotated[int, Field(ge=0)] = 2
    """New attempts for an outcome whose treatment is `retry`."""
    preset: Literal["default", "paper"] = "default"
    """Treatment of the outcome classes: see docs/outcomes.md. `paper` discards timeouts as OpenForgeRL does."""
    on_outcome: dict[Outcome, Treatment] = {}
    """Treatment of single outcome classes, over the preset's. `ok` is always trained; what carries no reward never is."""

    @model_validator(mode="after")
    def _sensible(self) -> Rollouts:
        for outcome, treatment in self.on_outcome.items():
            if treatment is Treatment.TRAIN and outcome not in RATED:
                raise ValueError(f"on_outcome.{outcome} = train: a rollout that ended so has no reward to train on")
            if treatment is not Treatment.TRAIN and outcome is Outcome.OK:
                raise ValueError(f"on_outcome.ok = {treatment}: then no rollout that ended well would be trained")
        return self


class Sft(Section):
    """Supervised start: cross entropy on the demonstrations' assistant tokens."""

    demonstrations: Source
    """A Parquet file (or a function that makes `demonstrations.parquet`) with `ids` and `mask`, lists of equal length. `builtin:teacher`
    makes it of a teacher's recorded rollouts, see docs/upstreams.md."""
    steps: Count = 400
    """Optimizer updates."""
    batch_size: Count = 32
    """Demonstrations per update."""
    lr: Positive = 3e-3
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Updates of linear rise."""
    decay_fraction: Annotated[NonNegative, Field(le=1)] = 0.3
    """Share of the steps, at the end, over which the rate falls linearly to 0."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping."""


class Loss(Section):
    """The policy loss. Every name is a pure function in `forge_ray.train_loop.losses`."""

    name: Literal["ppo_clip"] = "ppo_clip"
    """`ppo_clip`: PPO's clipped surrogate with the recorded log-probabilities as the old policy."""
    clip_low: Beta = 0.2
    """The ratio is clipped at 1 − clip_low."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped at 1 + clip_high."""
    kl: NonNegative = 0.0
    """Coefficient of the k3 estimate of KL(policy || reference)."""
    entropy: NonNegative = 0.0
    """Coefficient of the entropy bonus."""
    reduction: Literal["token_mean", "trajectory_mean", "constant"] = "token_mean"
    """Mean over the step's trained tokens, mean of trajectory means, or sum / `constant`."""
    constant: Positive | None = None
    """Divisor of `reduction: constant`."""


class Optimizer(Section):
    lr: Positive = 1e-6
    """AdamW's learning rate at the first step."""
    lr_end: NonNegative | None = None
    """Rate at the last step, reached linearly; None = constant."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping."""
    epochs: Count = 1
    """Passes over each step batch."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    microbatch_tokens: Count = 16384
    """Padded tokens of one forward pass."""


class Train(Section):
    """The GRPO loop."""

    steps: Annotated[int, Field(ge=0)] = 100
    """Step batches, each followed by a weight update in the replicas."""
    groups_per_step: Count = 8
    """Groups in a step batch."""
    group_size: Count = 8
    """Rollouts per group."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Largest allowed (version − version of the oldest trained token) when a batch is consumed."""
    builder: Literal["chain", "per_call"] = "chain"
    """`chain` merges calls that extend one another into one sample; `per_call` makes a sample of each call."""
    gamma: Share = 1.0
    """Eq. 1: the reward of call t is gamma^(T-t) times the terminal reward."""
    kind_weights: dict[Literal["agent", "subagent", "compaction", "aux"], NonNegative] = {}
    """Weight of a kind of call (default 1 each, aux 0)."""
    scope: Literal["all", "outermost", "last"] = "all"
    """Which calls are trained: all, those of the outermost agent, or the last one."""
    normalize_std: bool = True
    """Divide the group-centred reward by the group's standard deviation (ddof 1)."""
    loss: Loss = Loss()
    """The policy loss."""
    optimizer: Optimizer = Optimizer()
    """AdamW and how a step batch is cut."""
    sft: Sft | None = None
    """Supervised start; null = none."""
    workers: Count = 1
    """Data-parallel train workers."""
    worker_cpus: Positive = 1
    """Logical CPUs of a worker."""
    worker_gpus: NonNegative = 0
    """GPUs of a worker."""
    threads: Count | None = None
    """torch threads of a worker; None = torch's default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: forward and backward under autocast; the weights stay float32. Raise `logprob_bound` with it."""
    checkpoint_every: Count = 10
    """Steps between checkpoints; the last step always gets one."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    logprob_bound: Positive = 1e-3
    """The run stops when mean |rollout − trainer logprob|, under the weights that sampled the token, is above this."""


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

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
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
    train: Train = Train()
    """The learner."""
    eval: Eval = Eval()
    """Held-out evaluation."""
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


def load(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read the YAML file at `path`, apply `key.sub=value` overrides, validate, make paths absolute.

    Raises `UserError` with one line that names the file, the section with its line, and the fix.
    """
    node, tree = yaml_file.read(path)
    for override in overrides or []:
        _override(tree, override)
    if (found := yaml_file.unusable(tree)) is not None:
        raise UserError(found[1], where=f"command line: {yaml_file.dotted(found[0])}", fix="correct the value")
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _user_error(error, str(path), node, overrides or []) from None
    if config.tasks.heldout is None:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"before": False, "after": False, "every": 0})})
    return _absolute(config, Path(path).resolve().parent)


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise UserError(f"{override!r} is no override", where="command line", fix="write key.sub=value, for example train.steps=5")
    parsed = yaml_file.value(value)
    *parents, last = key.split(".")
    here: Any = tree
    for part in parents:
        child = _item(here, part, key)
        if isinstance(child, str):  # a source written as a plain path
            child = {"path": child}
        if child is None:
            child = {}
        _set(here, part, child, key)
        here = child
    _set(here, last, parsed, key)


def _item(here: Any, part: str, key: str) -> Any:
    if isinstance(here, list):
        if not part.isdigit() or int(part) >= len(here):
            raise UserError(f"{part!r} is no index of a list of {len(here)}", where=f"command line: {key}", fix="count from 0")
        return here[int(part)]
    if not isinstance(here, dict):
        raise UserError(f"{part!r} is below a plain value", where=f"command line: {key}", fix="shorten the key")
    return here.get(part)


def _set(here: Any, part: str, value: Any, key: str) -> None:
    if isinstance(here, list):
        _item(here, part, key)
        here[int(part)] = value
    elif isinstance(here, dict):
        here[part] = value
    else:
        raise UserError(f"{part!r} is below a plain value", where=f"command line: {key}", fix="shorten the key")


def _sections(model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], type[BaseModel]]:
    found: dict[tuple[str, ...], type[BaseModel]] = {prefix: model}
    for name, field in model.model_fields.items():
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found.update(_sections(candidate, (*prefix, name)))
    return found


def known_keys() -> dict[str, str]:
    """Every dotted key with its documentation."""
    keys: dict[str, str] = {}
    for prefix, model in _sections().items():
        for name, field in model.model_fields.items():
            keys[".".join((*prefix, name))] = field.description or ""
    return keys


def _user_error(error: ValidationError, path: str, node: Any, overrides: list[str]) -> UserError:
    first = error.errors()[0]
    location = tuple(part for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-")))
    key = ".".join(str(part) for part in location)
    line = yaml_file.line(node, location)
    where = f"{path}:{line}" if line else path
    for changed in (override.partition("=")[0] for override in overrides):
        # What is wrong is in what was given there, or below it, or is the whole that it was put into.
        if key and (key == changed or key.startswith(f"{changed}.") or (changed.startswith(f"{key}.") and not line)):
            where = f"command line: {changed}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        keys = known_keys()
        generic = ".".join(str(part) for part in location if not isinstance(part, int))
        wanted = str(location[-1]).replace("-", "_")
        same_name = [k for k in keys if k.rpartition(".")[2] == wanted]
        siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == generic.rpartition(".")[0]}
        near = siblings.get(wanted)
        if near is None:
            close = difflib.get_close_matches(wanted, siblings, n=1, cutoff=0.6)
            near = siblings[close[0]] if close else (same_name[0] if same_name else None)
        if near is None:
            close = difflib.get_close_matches(generic, keys, n=1, cutoff=0.0)
            near = close[0]
        return UserError(f"unknown key {key}{more}", where=where, fix=f"did you mean {near}?")
    if first["type"] == "missing":
        return UserError(f"{key} is missing{more}", where=where, fix="add it")
    if not location:
        return UserError(f"{first['msg'].removeprefix('Value error, ')}{more}", where=where)
    return UserError(
        f"{key} = {first['input']!r} is refused: {first['msg'].removeprefix('Value error, ')}{more}", where=where, fix="correct the value"
    )


def _absolute(config: Config, base: Path) -> Config:
    def path(value: str) -> str:
        expanded = os.path.expandvars(os.path.expanduser(value))
        return os.path.normpath(os.path.join(base, expanded))

    def walk(value: Any) -> Any:
        if isinstance(value, Source):
            if value.path.startswith("builtin:"):
                if value.path not in BUILT_IN_SOURCES:
                    known = ", ".join(BUILT_IN_SOURCES)
                    raise UserError(f"no source {value.path!r}", where="config", fix=f"use one of {known}, a path, or file.py:function")
                return value
            return value.model_copy(update={"path": path(value.path)})
        if isinstance(value, Section):
            return value.model_copy(update={name: walk(getattr(value, name)) for name in type(value).model_fields})
        return value

    config = walk(config)
    updates: dict[str, Any] = {"runs": path(config.runs)}
    if "$" in updates["runs"]:
        raise UserError(f"runs = {config.runs!r} names an unset variable", where="config", fix="export it or write an absolute path")
    files = {name: path(value) for name in ("chat_template", "script") if (value := getattr(config.policy, name))}
    updates["policy"] = config.policy.model_copy(update=files)
    if config.sandbox.directory:
        updates["sandbox"] = config.sandbox.model_copy(update={"directory": path(config.sandbox.directory)})
    harnesses = []
    for harness in config.harnesses:
        file, separator, name = harness.name.rpartition(":")
        harnesses.append(harness.model_copy(update={"name": f"{path(file)}:{name}"}) if separator and file.endswith(".py") else harness)
    updates["harnesses"] = harnesses
    return config.model_copy(update=updates)
