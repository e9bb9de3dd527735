"""The teacher's demonstrations: really executed, rendered as recorded, masked to what the teacher says."""

from __future__ import annotations

import json
import random

import pyarrow.parquet as pq
import pytest

from forge_ray.harnesses.react_program import TOOL
from tests.quickstart import module

policy, families, teacher, demonstrations = (module(name) for name in ("policy", "families", "teacher", "demonstrations"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("demonstrations")
    demonstrations.make(out, 5, count=60)
    return pq.read_table(out / "demonstrations.parquet")


def spans(ids, mask) -> list[list[int]]:
    """The runs of masked tokens."""
    found: list[list[int]] = []
    for index, (token, on) in enumerate(zip(ids, mask, strict=True)):
        if on and (index == 0 or not mask[index - 1]):
            found.append([])
        if on:
            found[-1].append(token)
    return found


def test_the_columns(made) -> None:
    assert {field.name: str(field.type) for field in made.schema} == {"ids": "list<element: int32>", "mask": "list<element: bool>"}
    assert made.num_rows == 60


def test_the_mask_covers_what_the_teacher_says_with_its_end_and_nothing_else(made) -> None:
    tokenizer = policy.tokenizer()
    for ids, mask in zip(made["ids"].to_pylist(), made["mask"].to_pylist(), strict=True):
        assert len(ids) == len(mask)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        replies = [part.partition("<|end|>")[0] + "<|end|>" for part in text.split("<|assistant|>")[1:]]
        assert [tokenizer.decode(span, skip_special_tokens=False) for span in spans(ids, mask)] == replies
        assert replies[-1] == "Done<|end|>" and mask[-1]
        for reply in replies[:-1]:
            assert reply.startswith(policy.CALL[0]) and reply.endswith(policy.CALL[1] + "<|end|>")


def test_each_prompt_is_the_template_over_the_messages_so_far() -> None:
    tokenizer = policy.tokenizer()
    conversations = list(teacher.episodes(1, 24, 0.5, 60))
    for conversation, row in zip(conversations, teacher.render(conversations, tokenizer), strict=True):
        said = spans(row.ids, row.mask)
        turns = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
        assert len(said) == len(turns) and 2 <= len(turns) <= 4
        end = 0
        for index, reply in zip(turns, said, strict=True):
            history = [teacher.parsed(message) for message in conversation[:index]]
            prompt = tokenizer.apply_chat_template(history, tools=[TOOL], tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            assert row.ids[: len(ids)] == ids and len(ids) > end
            end = len(ids) + len(reply)
            assert row.ids[len(ids) : end] == reply
        assert end == len(row.ids)


def test_the_commands_are_really_run() -> None:
    task = families.problem("sum", random.Random(3), "train")
    two_steps = task.right[1]
    conversation = teacher.episode(task, (*two_steps, f"cat {task.output}"), 60)
    total = task.expected[task.output]
    shown = [message["content"] for message in conversation if message["role"] == "tool"]
    assert shown == [total, "", total]
    commands = [json.loads(m["tool_calls"][0]["function"]["arguments"])["command"] for m in conversation if m.get("tool_calls")]
    assert commands == [two_steps[0], f"echo {total} > {task.output}", f"cat {task.output}"]
    missing = teacher.episode(task, ("cat nothing.txt", "nosuchcommand"), 20)
    assert [m["content"] for m in missing if m["role"] == "tool"] == ["cat: nothing.txt: No", "nosuchcommand: comma"]


def test_the_same_seed_gives_the_same_demonstrations(made, tmp_path) -> None:
    demonstrations.make(tmp_path / "again", 5, count=60)
    demonstrations.make(tmp_path / "other", 6, count=60)
    assert pq.read_table(tmp_path / "again" / "demonstrations.parquet").equals(made)
    assert not pq.read_table(tmp_path / "other" / "demonstrations.parquet").equals(made)


def test_the_teacher_is_right_as_often_as_asked() -> None:
    rng = random.Random(0)
    task = families.problem("find", rng, "train")
    for asked in (0.0, 0.35, 1.0):
        drawn = [teacher.strategy(task, rng, asked) for _ in range(1000)]
        right = sum(
            any(commands[: len(r)] == r for r in task.right[:1]) or any(families.SHOWN in c for c in commands) for commands in drawn
        )
        assert abs(right / 1000 - asked) < 0.06


def test_a_template_that_rewrites_its_history_is_refused() -> None:
    class Forgetful:
        """Renders only the last two messages, as templates that drop earlier turns do."""

        eos_token = "<|end|>"

        def __init__(self) -> None:
            self.real = policy.tokenizer()

        def apply_chat_template(self, messages, **options):
            return self.real.apply_chat_template(messages[-2:], **options)

        def encode(self, text, **options):
            return self.real.encode(text, **options)

    with pytest.raises(teacher.RenderError, match="does not"):
        list(teacher.render(teacher.episodes(1, 1, 1.0, 60), Forgetful()))


def test_no_held_out_name_or_value_is_demonstrated(made) -> None:
    tokenizer = policy.tokenizer()
    for ids in made["ids"].to_pylist():
        instruction = tokenizer.decode(ids, skip_special_tokens=False).split("<|user|>")[1].partition("<|end|>")[0]
        words = [word for word in instruction.split() if word.endswith(".txt") or word.isdigit()]
        assert words and {families.split_of(word) for word in words} == {"train"}
