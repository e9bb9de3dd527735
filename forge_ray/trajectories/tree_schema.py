"""The Arrow schema of tries: one row is the trie of one rollout, of a step, or of a set of demonstrations (builder `tree`).

A trie holds each token that calls share once. Its tokens lie depth first, so that the tokens below a token are the ones right after it:
token j is visible to token i iff `j <= i < sub_end[j]`, and the tokens visible to i, in order, are exactly the sequence that the engine
saw. A row may be a forest (several tokens of position 0), where two prompts begin differently.

What is trained are *emissions*: tokens that a call sampled. They are counted apart from the tokens of the trie: two rollouts that sampled
the same token at the same place are two emissions of one trie token, each with its own logprob, advantage and weight.

Columns (U = unique tokens of the row, E = emissions, R = rollouts; lists of one letter are of equal length):

    column       type           unit, shape                  from
    ids          list<int32>    token ids, (U,)              prompts and sampled ids of the calls that are trained
    sub_end      list<int32>    flat index, (U,)             one past the last token of the token's subtree
    position     list<int32>    (U,)                         depth: the token's place in every sequence that it is part of
    at           list<int32>    flat index, (E,)             the token whose logits predict the emission (position - 1 of its own)
    token        list<int32>    token ids, (E,)              Call.ids
    logprobs     list<float32>  nats, (E,)                   Call.logprobs
    steps        list<int32>    weight updates, (E,)         Call.spans; -1 in a demonstration
    temperature  list<float32>  (E,)                         Call.sampling
    advantage    list<float32>  (E,)                         as in `schema`
    weight       list<float32>  (E,)                         as in `schema`; 0: not in the loss
    owner        list<int32>    index, (E,)                  into the R columns: whose emission it is
    call         list<int32>    ordinal by completion, (E,)  of the sampling call in its rollout
    rollouts     list<string>   rollout ids, (R,)            RolloutRecord.id
    groups       list<int64>    (R,)                         RolloutRecord.group; -1 without one
    tasks        list<string>   task names, (R,)             RolloutRecord.task_name
    harnesses    list<string>   harness names, (R,)          RolloutRecord.harness
    rewards      list<float64>  terminal reward r_T, (R,)    RolloutRecord.reward; NaN without one

Emissions lie by owner, call and place. The rollouts lie in trie order: by the place of their first emission in the flat order, so that
neighbours share most. (owner, call) names the sequence of an emission, owner its trajectory. No list holds a null.
"""

from __future__ import annotations

import pyarrow as pa

PER_TOKEN = ("ids", "sub_end", "position")
PER_EMISSION = ("at", "token", "logprobs", "steps", "temperature", "advantage", "weight", "owner", "call")
PER_ROLLOUT = ("rollouts", "groups", "tasks", "harnesses", "rewards")


def _lists(name: str, of: pa.DataType) -> pa.Field:
    return pa.field(name, pa.list_(of), nullable=False)


TREE_SCHEMA = pa.schema(
    [
        _lists("ids", pa.int32()),
        _lists("sub_end", pa.int32()),
        _lists("position", pa.int32()),
        _lists("at", pa.int32()),
        _lists("token", pa.int32()),
        _lists("logprobs", pa.float32()),
        _lists("steps", pa.int32()),
        _lists("temperature", pa.float32()),
        _lists("advantage", pa.float32()),
        _lists("weight", pa.float32()),
        _lists("owner", pa.int32()),
        _lists("call", pa.int32()),
        _lists("rollouts", pa.string()),
        _lists("groups", pa.int64()),
        _lists("tasks", pa.string()),
        _lists("harnesses", pa.string()),
        _lists("rewards", pa.float64()),
    ],
    metadata={"forge_ray.trees": "1"},
)
"""Version 1. A change of meaning raises the number in the metadata."""


def is_tree(table: pa.Table) -> bool:
    """Whether a step's table holds tries; else it holds samples."""
    return "sub_end" in table.column_names
