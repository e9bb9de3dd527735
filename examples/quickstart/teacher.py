"""A teacher that is often wrong: episodes of really executed commands, rendered as the proxy would record them.

The messages are built by the harness's own functions and rendered by the policy's own chat template, turn by turn: the prompt of a turn is
the template over the messages so far, the reply is what the template makes of the teacher's message up to the end token. That each prompt
begins with the tokens of the one before and its reply is checked for every turn of every episode; where it holds, the sequence equals the
chain that a rollout of the same commands would give.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import FAMILIES, SHOWN, Problem, problem

from forge_ray.errors import ForgeRayError
from forge_ray.harnesses.react_program import TOOL, assistant_message, tool_message, tool_text, user_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOK = 0.3
"""Probability that an episode, right or wrong, ends with a look at the file it was to write."""
FINAL = "Done"
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


class RenderError(ForgeRayError):
    """The chat template does not continue its own earlier prompt, so no demonstration equals a recording."""


@dataclass(frozen=True)
class Demonstration:
    """One training sequence."""

    ids: list[int]
    mask: list[bool]
    """True where the teacher speaks, end tokens included."""


def strategy(task: Problem, rng: random.Random, p_right: float) -> tuple[str, ...]:
    """The commands of one episode: a right strategy with probability `p_right`, else a wrong one, by weight."""
    weights, wrong = zip(*task.wrong, strict=True)
    commands = rng.choice(task.right) if rng.random() < p_right else rng.choices(wrong, weights)[0]
    return (*commands, f"cat {task.output}") if rng.random() < LOOK else commands


def episode(task: Problem, commands: Iterable[str], output_chars: int) -> list[dict[str, Any]]:
    """Run the commands in a fresh workspace, each in its own bash as the harness does; the messages of the whole conversation."""
    messages = [user_message(task.instruction)]
    shown = ""
    with tempfile.TemporaryDirectory(prefix="forge-teacher-") as workspace:
        for name, text in task.files.items():
            Path(workspace, name).write_text(text + "\n")
        for turn, command in enumerate(commands):
            command = command.replace(SHOWN, shown)
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=workspace,
                env=ENVIRONMENT | {"HOME": workspace},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=60,
            )
            shown = tool_text(done.stdout.decode("utf-8", "replace"), output_chars)
            call = {"id": f"call-{turn}", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
            messages += [assistant_message({"content": None, "tool_calls": [call]}), tool_message(call["id"], shown)]
    return [*messages, assistant_message({"content": FINAL})]


def episodes(seed: int, count: int, p_right: float, output_chars: int) -> Iterator[list[dict[str, Any]]]:
    """`count` episodes on fresh problems of the training split, in turn over the families; the same arguments give the same episodes."""
    families = list(FAMILIES)

    def one(index: int) -> list[dict[str, Any]]:
        rng = random.Random(f"teacher {seed} {index}")
        task = problem(families[index % len(families)], rng, "train")
        return episode(task, strategy(task, rng, p_right), output_chars)

    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(one, range(count))


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a server hands it to the template: arguments as an object."""
    if "tool_calls" not in message:
        return message
    calls = [{**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}} for c in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def render(conversations: Iterable[list[dict[str, Any]]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Demonstration]:
    """Tokenise conversations call by call. Raises `RenderError` where a prompt does not continue the call before."""
    end = tokenizer.eos_token
    if not isinstance(end, str):
        raise RenderError("the tokenizer names no end token")

    def text(messages: list[dict[str, Any]], **options: Any) -> str:
        rendered = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, **options)
        assert isinstance(rendered, str)
        return rendered

    for conversation in conversations:
        messages = [parsed(message) for message in conversation]
        ids: list[int] = []
        mask: list[bool] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = text(messages[:index], add_generation_prompt=True)
            whole = text(messages[: index + 1])
            if not whole.startswith(prompt):
                raise RenderError(f"reply {index} does not follow its prompt: {whole[:200]!r}")
            reply, found, _ = whole[len(prompt) :].partition(end)
            if not found:
                raise RenderError(f"reply {index} has no {end!r}: {whole[len(prompt) :][:200]!r}")
            prompt_ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
            reply_ids: list[int] = tokenizer.encode(reply + end, add_special_tokens=False)
            if prompt_ids[: len(ids)] != ids:
                raise RenderError(f"the prompt of message {index} does not continue the call before: {prompt[:200]!r}")
            mask += [False] * (len(prompt_ids) - len(ids)) + [True] * len(reply_ids)
            ids = prompt_ids + reply_ids
        yield Demonstration(ids, mask)


def write(out: Path, demonstrations: Iterable[Demonstration]) -> None:
    """Write `out/demonstrations.parquet` with the columns `ids` (list<int32>) and `mask` (list<bool>)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(demonstrations)
    table = pa.table(
        {
            "ids": pa.array([row.ids for row in rows], pa.list_(pa.int32())),
            "mask": pa.array([row.mask for row in rows], pa.list_(pa.bool_())),
        }
    )
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out / "demonstrations.parquet")
