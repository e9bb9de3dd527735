"""Calls that share tokens, their forest by the plainest of builders, and what training them one by one gives (nothing of it uses tries)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_ray.config import Loss
from forge_ray.train_loop.losses import LossInputs, Total, policy_loss
from forge_ray.train_loop.part import Passes, Work
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.tree.forest import Forest
from forge_ray.train_loop.tree.tries import Tries

CPU = torch.device("cpu")


@dataclass
class Sampled:
    """One call: T tokens, of which those with `mask` were sampled and are trained."""

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    temperature: np.ndarray
    steps: np.ndarray
    rollout: int
    call: int

    @property
    def positions(self) -> np.ndarray:
        return np.flatnonzero(self.mask)


def sampled(draw: np.random.Generator, ids: Sequence[int], mask: Sequence[bool], rollout: int, call: int, logprob: float = -3.6) -> Sampled:
    """A call with drawn numbers."""
    count = len(ids)
    return Sampled(
        np.asarray(ids, np.int64),
        np.asarray(mask, bool),
        (logprob + draw.normal(0, 0.2, count)).astype(np.float32),
        np.full(count, draw.normal() or 1.0, np.float32),
        draw.choice([0.5, 1.0], count).astype(np.float32),
        np.full(count, draw.choice([0.7, 1.0]), np.float32),
        np.full(count, draw.integers(0, 3), np.int64),
        rollout,
        call,
    )


def random_calls(draw: np.random.Generator, vocabulary: int = 50) -> list[Sampled]:
    """Calls that continue, leave in the middle, repeat or ignore earlier ones of any rollout."""
    calls: list[Sampled] = []
    counts = [0, 0, 0]
    for _ in range(int(draw.integers(1, 12))):
        base = np.zeros(0, np.int64)
        if calls and draw.random() < 0.85:
            base = calls[int(draw.integers(len(calls)))].ids
            base = base[: int(draw.choice([len(base), int(draw.integers(1, len(base) + 1))]))]
        grown = [*base.tolist(), *draw.integers(0, vocabulary, int(draw.integers(0 if len(base) > 1 else 2, 30))).tolist()]
        mask = draw.random(len(grown)) < draw.choice([0.1, 0.5, 1.0])
        mask[: 1 if draw.random() < 0.5 else max(1, len(base))] = False
        rollout = int(draw.integers(3))
        calls.append(sampled(draw, grown, mask.tolist(), rollout, counts[rollout]))
        counts[rollout] += 1
    calls[0].mask[-1] = True
    return calls


def session(draw: np.random.Generator, rollout: int, *, turns: int, strip: bool, vocabulary: int = 50, scale: int = 1) -> list[Sampled]:
    """As a coding agent is recorded: a long system prompt, turns, a sub-agent with its own prompt, a compaction, and, with `strip`, replies
    whose first half is gone from every later prompt."""

    def tokens(count: int) -> list[int]:
        return draw.integers(0, vocabulary, count * scale).tolist()

    calls: list[Sampled] = []

    def agent(prompt: list[int], many: int) -> list[int]:
        for _ in range(many):
            prompt = prompt + tokens(3)
            reply = tokens(4)
            calls.append(sampled(draw, prompt + reply, [False] * len(prompt) + [True] * len(reply), rollout, len(calls)))
            prompt = prompt + (reply[len(reply) // 2 :] if strip else reply)
        return prompt

    system = tokens(20)
    prompt = agent(system, turns)
    agent(system[: 5 * scale] + tokens(4), 3)
    prompt = agent(prompt + tokens(2), 2)
    agent(system + tokens(5), 2)
    return calls


def trie(calls: Sequence[Sampled], rollouts: Sequence[str] = ("a", "b", "c")) -> Forest:
    """Nested dictionaries, then depth first."""
    root: dict[int, Any] = {}
    nodes: list[dict[int, Any]] = []
    of_call: list[list[int]] = []
    for call in calls:
        here, path = root, []
        for token in call.ids.tolist():
            if token not in here:
                nodes.append({})
                here[token] = len(nodes) - 1
            path.append(here[token])
            here = nodes[here[token]]
        of_call.append(path)
    ids: list[int] = []
    ends: list[int] = []
    depths: list[int] = []
    flat: dict[int, int] = {}
    stack: list[tuple[int, int, int] | int] = [(token, node, 0) for token, node in reversed(root.items())]
    while stack:
        item = stack.pop()
        if isinstance(item, int):
            ends[item] = len(ids)
            continue
        token, node, depth = item
        flat[node] = len(ids)
        stack.append(len(ids))
        ids.append(token)
        ends.append(-1)
        depths.append(depth)
        stack += [(after, below, depth + 1) for after, below in reversed(nodes[node].items())]

    def joined(values: Callable[[Sampled, list[int]], Any], kind: type) -> np.ndarray:
        return np.concatenate([np.zeros(0), *(values(call, path) for call, path in zip(calls, of_call, strict=True))]).astype(kind)

    return Forest(
        np.array(ids, np.int64),
        np.array(ends, np.int64),
        np.array(depths, np.int64),
        at=joined(lambda call, path: [flat[path[place - 1]] for place in call.positions], np.int64),
        token=joined(lambda call, _: call.ids[call.mask], np.int64),
        logprobs=joined(lambda call, _: call.logprobs[call.mask], np.float32),
        steps=joined(lambda call, _: call.steps[call.mask], np.int64),
        temperature=joined(lambda call, _: call.temperature[call.mask], np.float32),
        advantage=joined(lambda call, _: call.advantage[call.mask], np.float32),
        weight=joined(lambda call, _: call.weight[call.mask], np.float32),
        owner=joined(lambda call, _: [call.rollout] * int(call.mask.sum()), np.int64),
        call=joined(lambda call, _: [call.call] * int(call.mask.sum()), np.int64),
        rollouts=tuple(rollouts),
    ).select(np.ones(sum(int(call.mask.sum()) for call in calls), bool))


def small_model(kind: str = "qwen3", dtype: torch.dtype = torch.float64, vocabulary: int = 50, seed: int = 0) -> Any:
    """A causal language model of transformers with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 48, "tie_word_embeddings": True, "max_position_embeddings": 8192, "initializer_range": 0.2,
    }  # fmt: skip
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    return model.to(dtype).train()


@contextmanager
def exact_norms() -> Iterator[None]:
    """transformers normalises in float32 whatever the model's type; within, in the model's own."""
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    def forward(self: Any, hidden: Tensor) -> Tensor:
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(hidden.dtype)

    kinds: tuple[Any, ...] = (modeling_qwen3.Qwen3RMSNorm, modeling_llama.LlamaRMSNorm)
    before = [kind.forward for kind in kinds]
    for kind in kinds:
        kind.forward = forward
    try:
        yield
    finally:
        for kind, given in zip(kinds, before, strict=True):
            kind.forward = given


def losses(**loss: Any) -> Loss:
    """A policy loss with an entropy bonus."""
    return Loss.model_validate({"entropy": 0.01, **loss})


def call_by_call(model: Any, calls: Sequence[Sampled], config: Loss, total: Total, reference: Any = None, step: int = 3) -> float:
    """Adds every call's gradients, each computed alone; returns the loss."""
    value = 0.0
    counts = np.bincount([call.rollout for call in calls for _ in call.positions], minlength=4)
    for call in calls:
        if not len(call.positions):
            continue
        temperature = torch.from_numpy(call.temperature[call.mask])
        logprobs, entropy = _alone(model, call)
        known = None
        if reference is not None:
            with torch.no_grad():
                known = _alone(reference, call)[0]
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=torch.from_numpy(call.logprobs[call.mask]),
            advantages=torch.from_numpy(call.advantage[call.mask]),
            weights=torch.from_numpy(call.weight[call.mask]),
            sequence=torch.zeros(len(temperature), dtype=torch.long),
            trajectory=torch.zeros(len(temperature), dtype=torch.long),
            trajectory_tokens=torch.full((len(temperature),), float(counts[call.rollout])),
            position=torch.from_numpy(call.positions),
            staleness=torch.from_numpy(step - call.steps[call.mask]),
            reference_logprobs=known,
        )
        share, _ = policy_loss(config, inputs, total)
        if share.requires_grad:
            share.backward()
        value += float(share.detach())
    return value


def _alone(model: Any, call: Sampled) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=torch.from_numpy(call.ids)[None], use_cache=False).logits[0, call.positions - 1]
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / torch.from_numpy(call.temperature[call.mask])[:, None]
    scores = logits.log_softmax(-1)
    return scores[torch.arange(len(scores)), torch.from_numpy(call.ids[call.positions])], -(scores.exp() * scores).sum(-1)


def by_tree(
    model: Any, part: Tries, config: Loss, total: Total, *, passes: Passes | None = None, backward: Any = None, step: int = 3
) -> float:
    """Adds the part's gradients; returns its share of the loss."""
    value = 0.0

    def loss(inputs: LossInputs) -> Tensor:
        nonlocal value
        share, _ = policy_loss(config, inputs, total)
        value += float(share.detach())
        return share

    part.accumulate(
        Work(
            module=model,
            passes=passes or Passes(CPU, 4096, Ranks()),
            loss=loss,
            backward=backward or (lambda share, last: share.backward()),
            step=step,
            whole_sequences=config.needs_whole_sequences,
            entropy_gradient=config.entropy > 0,
        )
    )
    return value


def taken(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients, which are cleared."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """‖one − other‖ / ‖other‖ over all weights."""
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in other)
    return (apart / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5
