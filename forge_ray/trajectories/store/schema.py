"""The columns of the datasets but `samples`, their texts (docs/rollouts.md is made of them), and the schema's version.

`samples` has the columns of `forge_ray.trajectories.schema`, which are also the samples' form on the wire.

Rules of the version (metadata key `forge_ray.store` of every file): a new column that may be null keeps it; anything that changes what
a stored value means, or takes a column away, raises it. A reader takes files of its own version and of older ones and refuses newer ones
by name. `purpose` (and `step` of samples) is no column of a file but of its path, hive style: `calls/purpose=train/part-….parquet`.

No type follows from the data: a file whose `group` is null in each row has the same schema as any other. Times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from forge_ray.errors import ForgeRayError

VERSION = 1
VERSION_KEY = b"forge_ray.store"

_S, _F, _I, _L, _B = pa.string(), pa.float64(), pa.int32(), pa.int64(), pa.bool_()
_IDS = pa.list_(pa.field("element", _I, nullable=False))
_LOGPROBS = pa.list_(pa.field("element", pa.float32(), nullable=False))
_TEXTS = pa.list_(pa.field("element", _S, nullable=False))
_NUMBERS = pa.map_(_S, pa.field("value", _F, nullable=False))
SPANS = pa.list_(
    pa.field(
        "element",
        pa.struct([pa.field("version", _S, nullable=False), pa.field("first", _I, nullable=False), pa.field("end", _I, nullable=False)]),
        nullable=False,
    )
)


class StoreError(ForgeRayError):
    """A file or a location that is no store of this version, or cannot be read or written; the message names it."""


@dataclass(frozen=True)
class Column:
    """One column and what it holds."""

    name: str
    type: pa.DataType
    text: str
    """Unit, shape, meaning, where it comes from."""
    nullable: bool = False


@dataclass(frozen=True)
class Table:
    """One dataset."""

    name: str
    columns: tuple[Column, ...]
    partition: str
    """The column that is in the path."""

    @property
    def schema(self) -> pa.Schema:
        """Of its files."""
        fields = [pa.field(column.name, column.type, nullable=column.nullable) for column in self.columns]
        return pa.schema(fields, metadata={VERSION_KEY: str(VERSION).encode()})


CALLS = Table(
    "calls",
    (
        Column("rollout", _S, "rollout id = session id at the proxy"),
        Column("call", _S, "call id, unique in the run"),
        Column("ordinal", _I, "place in the rollout's calls by completion (those that never ended come last), from 0"),
        Column("parent", _S, "call whose prompt + sampled ids this prompt begins with; it is in the same rollout; null: none", True),
        Column("shared", _I, "tokens of it that the prompt begins with; 0 without a parent"),
        Column("new", _IDS, "token ids, (n,): the rest of the prompt. The whole one: `forge_ray.trajectories.store.calls.expand`"),
        Column("prompt_tokens", _I, "length of the whole prompt = shared + length of `new`"),
        Column("ids", _IDS, "sampled token ids with the end token, (m,), as the engine emitted them"),
        Column("logprobs", _LOGPROBS, "nats, (m,): under the distribution that was sampled from (after temperature)"),
        Column("spans", SPANS, "weight versions of sampled tokens: {version, first, end} over `ids`, end exclusive; null: unknown", True),
        Column("version_open", _S, "weight version before the first token"),
        Column("version_end", _S, "weight version after the last token; empty: the call never ended"),
        Column("status", _S, "finished, length, cancelled, failed; open: it never ended"),
        Column("delivered", _B, "whether the reply reached the harness whole; null: nobody knows", True),
        Column("superseded_by", _S, "call that a repeat of the same request made; null: none", True),
        Column("masked_by_grammar", _B, "a grammar changed the distribution (tool_choice=required, a JSON schema)"),
        Column("quarantined", _B, "something in the log of its session is wrong"),
        Column("trainable", _B, "whole, delivered, not superseded, no grammar, no `media`, versions known, no quarantine, some token"),
        Column("kind", _S, "agent, subagent, compaction, aux"),
        Column("conversation", _S, "id of the call that began its conversation, or the harness's own id of it"),
        Column("spawned_by", _S, "call whose tool call began the conversation; null: none", True),
        Column("splice", _S, "how the prompt continues its conversation: new, exact, spliced, fork"),
        Column("reason", _S, "why it was spliced or forked, one line", True),
        Column("rerendered", _IDS, "token ids that the prompt had, as rendered, where sampled ones were put back", True),
        Column("overlap", _I, "tokens at the end of the parent's prompt that `rerendered` holds in another form"),
        Column("media", _TEXTS, "digests of the images and the like in the prompt, whose tokens there are placeholders; null: none", True),
        Column("temperature", _F, "of the sampling (`sampling` has it too); 1 where it has none"),
        Column("sampling", _S, "JSON: the sampling parameters really used"),
        Column("max_tokens", _I, "bound of the sampled tokens that really held"),
        Column("model", _S, "model name that the harness asked for", True),
        Column("ignored", _TEXTS, "fields of the request that had no effect"),
        Column("dialect", _S, "chat, completions, responses, messages, gemini"),
        Column("path", _S, "of the request"),
        Column("streamed", _B, "the reply was streamed"),
        Column("replica", _S, "replica that served it"),
        Column("opened", _F, "Unix seconds: the engine was given the prompt"),
        Column("ended", _F, "Unix seconds: the last token was sampled; null: never", True),
        Column("finish_reason", _S, "the engine's", True),
        Column("stop_reason", _S, "JSON: the text or the token id that stopped it", True),
        Column("error", _S, "what failed", True),
        Column("reply", _S, "what the harness was given: answer (no tool call), tool_calls, length", True),
        Column("issued", _TEXTS, "ids that the reply gave to its tool calls and items"),
        Column("usage", _S, "JSON: the numbers that the harness was told", True),
        Column("request_sha256", _S, "of the request's body, hex; with `proxy.keep_bodies` its name in `bodies/`"),
        Column("response_sha256", _S, "of the response's body, hex"),
    ),
    "purpose",
)

UPSTREAM = Table(
    "upstream",
    (
        Column("rollout", _S, "rollout id = session id at the proxy"),
        Column("call", _S, "call id, unique in the run"),
        Column("ordinal", _I, "place in the rollout's upstream calls by their end, from 0"),
        Column("upstream", _S, "key in `proxy.upstreams` that the asked name matched"),
        Column("model", _S, "model name that the harness asked for"),
        Column("parent", _S, "call of the same rollout whose request this one goes on from; null: `request` is whole", True),
        Column("shared", _I, "items of its list (`messages`, or `input` of the responses dialect) that this request begins with"),
        Column("dropped", _TEXTS, "its top-level fields that this request lacks"),
        Column("request", _S, "JSON: the body as the harness sent it, without what it has from `parent`"),
        Column("reply", _S, "JSON: `text`, `reasoning`, `tool_calls`, `finish_reason`, as far as the reply came"),
        Column("others", _S, "JSON: a list of further choices, where several were asked for", True),
        Column("logprobs", _S, "JSON: of the reply's tokens as the upstream cut them: `tokens`, `logprobs` (nats), `top`, `bytes`", True),
        Column("usage", _S, "JSON: the upstream's numbers", True),
        Column("status", _S, "finished, length, failed, cancelled"),
        Column("http_status", _I, "what the upstream answered; 502 or 504: it did not"),
        Column("error", _S, "what failed", True),
        Column("delivered", _B, "whether the reply reached the harness whole; null: nobody knows", True),
        Column("kind", _S, "agent, subagent, compaction, aux"),
        Column("conversation", _S, "the harness's own id of it; null: it gave none", True),
        Column("dialect", _S, "chat, completions, responses, messages"),
        Column("path", _S, "of the request"),
        Column("streamed", _B, "the reply was streamed"),
        Column("replica", _S, "replica that passed it on"),
        Column("opened", _F, "Unix seconds: the request came"),
        Column("ended", _F, "Unix seconds: the reply was over"),
        Column("request_sha256", _S, "of the request's body, hex"),
        Column("response_sha256", _S, "of the response's body, hex"),
    ),
    "purpose",
)

ROLLOUTS = Table(
    "rollouts",
    (
        Column("rollout", _S, "`<key>.<attempt>`: session id of its calls, directory name below `rollouts/`"),
        Column("key", _S, "what was asked for, `g00012-3` or `eval-after-007-2`"),
        Column("attempt", _I, "attempt at `key`"),
        Column("group", _L, "training group; null in evaluation. The step that trained it is in `samples`", True),
        Column("run", _S, "name of the run"),
        Column("task", _S, "task name"),
        Column("task_path", _S, "task directory when it ran"),
        Column("task_digest", _S, "`sha256:…` of the task's files as Harbor counts it; null: not known", True),
        Column("image_digest", _S, "`sha256:…` of what its image is built from, the task's `environment/`; null: unknown", True),
        Column("image_base", _S, "image that its Dockerfile begins with, as named there; a process sandbox does not run it", True),
        Column("harness", _S, "its name in the config"),
        Column("harness_version", _S, "the program's version; of a file of one's own its sha256; null: not known", True),
        Column("harness_options", _S, "JSON: its options in the config"),
        Column("policy", _S, "name under which the policy is served"),
        Column("template_sha256", _S, "of the chat template, hex; null: the model directory has none", True),
        Column("tokenizer_sha256", _S, "of the tokenizer's files, hex; null: the model directory has none", True),
        Column("versions", pa.map_(_S, pa.field("value", _L, nullable=False)), "weight version -> tokens that it sampled"),
        Column("sampling", _TEXTS, "JSON: each set of sampling parameters that its calls used, the most frequent first"),
        Column("outcome", _S, "ok, truncated, or who failed: see docs/outcomes.md"),
        Column("detail", _S, "one line for a person"),
        Column("reward", _F, "terminal reward; null unless the outcome is ok or truncated", True),
        Column("rewards", _NUMBERS, "each named number of the verifier"),
        Column("call_rewards", pa.map_(_S, pa.field("value", _F, nullable=False)), "rewards of single calls, by call id or place", True),
        Column("reward_digest", _S, "sha256, hex, of the reward function's sources; null: none was asked", True),
        Column("ended", _S, "how the harness had ended before it was judged; null: it was not", True),
        Column("exit_code", _I, "the harness's", True),
        Column("verifier_log", _S, "the verifier's output: its two ends if long, U+FFFD for what is no UTF-8; null: it did not run", True),
        Column("verifier_log_bytes", _L, "size of the whole log in `rollouts/<rollout>/verifier.log`"),
        Column("workspace_digest", _S, "sha256, hex: `rollouts/archive/<digest>.tar.gz` is the workspace before verification", True),
        Column("calls", _I, "calls that finished"),
        Column("upstream_calls", _I, "calls that another model answered: rows of `upstream`"),
        Column("prompt_tokens", _L, "sum over all calls' whole prompts"),
        Column("sampled_tokens", _L, "sum over all calls"),
        Column("trainable_tokens", _L, "sampled tokens of trainable calls"),
        Column("started", _F, "Unix seconds"),
        Column("seconds", _NUMBERS, "wall seconds by phase: create, harness, close, archive, verify, total"),
        Column("extra", _S, "JSON: what a newer record has and no column yet; null: nothing", True),
    ),
    "purpose",
)

RESCORES = Table(
    "rescores",
    (
        Column("rescore", _S, "id of the command that made it; ids sort by time"),
        Column("rollout", _S, "the rollout"),
        Column("task", _S, "its task's name"),
        Column("harness", _S, "its harness"),
        Column("workspace_digest", _S, "the archived workspace that was judged"),
        Column("at", _F, "Unix seconds"),
        Column("by", _S, "user@host"),
        Column("outcome_before", _S, "the recorded outcome"),
        Column("reward_before", _F, "the recorded reward", True),
        Column("outcome", _S, "of the new verdict: ok, truncated, verifier; task, sandbox: there is none, the rollout stays as it was"),
        Column("detail", _S, "one line for a person"),
        Column("reward", _F, "the new terminal reward; null unless the outcome is ok or truncated", True),
        Column("rewards", _NUMBERS, "each named number of the verifier and the reward function"),
        Column("call_rewards", _NUMBERS, "rewards of single calls"),
        Column("verifier_digest", _S, "`sha256:…` of the task that judged, as Harbor counts it", True),
        Column("reward_digest", _S, "sha256, hex, of the reward function's sources; null: none was asked", True),
        Column("weights", _NUMBERS, "`rollouts.reward_weights` of the verdict"),
    ),
    "purpose",
)

RATINGS = Table(
    "ratings",
    (
        Column("teacher", _S, "name that `train.loss.distillation.upstream` gives"),
        Column("model", _S, "the model's name at the teacher's server"),
        Column("rollout", _S, "the rollout"),
        Column("call", _S, "call id"),
        Column("ordinal", _I, "the call's place in the rollout's calls by completion, as in `calls`"),
        Column("logprobs", _LOGPROBS, "nats, (m,): of the call's sampled `ids` under the teacher, in the call's context, at temperature 1"),
    ),
    "purpose",
)

TABLES = {table.name: table for table in (CALLS, UPSTREAM, ROLLOUTS, RESCORES, RATINGS)}


def check_version(schema: pa.Schema, where: str) -> None:
    """Raise `StoreError` where the schema of the file `where` is of no version that this reader knows."""
    text = (schema.metadata or {}).get(VERSION_KEY, b"").decode(errors="replace")
    if not text.isdigit() or not 1 <= int(text) <= VERSION:
        known = f"up to {VERSION}" if VERSION > 1 else "1"
        raise StoreError(f"{where} is of store version {text or 'none'}; this ForgeRay reads version {known}")
