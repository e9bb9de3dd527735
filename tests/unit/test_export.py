"""Exports: what goes out comes back as it was recorded, whatever is in it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forge_ray.cli.main import main
from forge_ray.config import Config, Train
from forge_ray.report.text import decoder
from forge_ray.run_dir import RunDir
from forge_ray.trajectories import batch
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.export import atif, chat, sequences
from forge_ray.trajectories.export.marks import Marks, ends, joined, messages
from forge_ray.trajectories.export.template import TemplateError, renderer
from forge_ray.trajectories.export.text import Text, leaves
from forge_ray.trajectories.store import calls as call_rows
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.samples import SampleStore
from forge_ray.trajectories.store.writer import StoreWriter
from tests.unit.making import make_call, make_record

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
QWEN = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}"""
STRICT = """\
{{- bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
LONG = 1_000_000
SPECIAL = ("<|im_start|>", "<|im_end|>")


def model(directory: Path) -> Path:
    """A byte-level tokenizer with ChatML's marks: ids 0–255 are bytes, in the tokenizer's own order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    (directory / "chat_template.jinja").write_text(CHATML)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(directory: Path) -> Text:
    return Text.of(decoder(directory), renderer(CHATML, directory))


class Recorder:
    """A rollout of a byte-level policy, told as a conversation."""

    def __init__(self, directory: Path, rollout: str = "g00000-0.0") -> None:
        self.encode = lambda words: Tokenizer.from_file(str(directory / "tokenizer.json")).encode(words).ids
        self.rollout, self.calls = rollout, []

    def ask(self, prompt: str | None, said: str, *, after: Call | None = None, end: str = "<|im_end|>", **changes: Any) -> Call:
        """A call: `prompt` is what stands behind `after`'s reply (or all), without the mark that begins the reply."""
        new = self.encode((prompt or "") + "<|im_start|>assistant\n")
        before = [] if after is None else after.prompt_ids + after.ids
        changes = {"parent": after.id if after else None, "shared": len(before), "conversation": "main"} | changes
        ids = self.encode(said + end)
        call = make_call(before + new, ids, order=len(self.calls), session=self.rollout, **changes)
        self.calls.append(call)
        return call


def message(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def conversation(directory: Path, rollout: str = "g00000-0.0") -> list[Call]:
    """A tool call, its output, an answer; in between a sub-agent; then a compaction that rewrites the history."""
    rig = Recorder(directory, rollout)
    tool_call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    first = rig.ask(message("system", "Tools: bash") + message("user", "List them."), f"I look.\n{tool_call}")
    rig.ask(message("user", "Sub-task."), "Sub-answer.", conversation="sub", kind="subagent", spawned_by=first.id)
    second = rig.ask("\n" + message("tool", "a.txt\nb.txt"), "There are two.", after=first)
    history = message("system", "Tools: bash") + message("user", "Summary: two files.")
    rig.ask(history, "Done.", splice="fork", reason="compaction", parent=second.id, shared=0)
    return rig.calls


def row(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = dict.fromkeys([*chat.FACTS, "run", "task_digest", "detail", "workspace_digest", "policy"])
    return fields | {"rollout": "g00000-0.0", "harness": "react", "policy": "policy", "reward": 1.0, "rewards": {"reward": 1.0}} | changes


# ---- marks ----

_WORDS = st.text(st.characters(codec="utf-8"), max_size=20)


@pytest.mark.parametrize("template", [CHATML, QWEN, STRICT])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_text_is_cut_at_the_template_s_marks_and_joins_to_the_same(template: str, data: st.DataObject, directory: Path) -> None:
    render = renderer(template, directory)
    marks = Marks.of(render)
    roles = {role for _, role in marks.open}
    body = data.draw(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), _WORDS), min_size=1, max_size=5))
    told = [{"role": role, "content": content.strip()} for role, content in body]
    if "system" in roles and data.draw(st.booleans()):
        told = [{"role": "system", "content": data.draw(_WORDS).strip()}, *told]
    try:
        whole = render(told)
    except TemplateError:
        assert template == STRICT
        return
    whole = whole[: len(whole) - data.draw(st.integers(0, 3))]
    head, parts = marks.cut(whole)
    assert joined(head, parts) == whole
    found = messages(parts)
    if not any(mark in content for content in (one["content"] for one in told) for mark in ("<|im", "INST", "</s>")):
        assert [one["role"] for one in found][-len(told) :] == [one["role"] for one in told]
        assert [one["content"] for one in found][-len(told) : -1] == [one["content"] for one in told][:-1]
    for cut in range(0, len(whole), 7):  # no prefix raises, or loses anything
        assert joined(*marks.cut(whole[:cut])) == whole[:cut]


def test_tool_messages_are_told_from_users(directory: Path) -> None:
    render = renderer(QWEN, directory)
    told = [("user", "u"), ("assistant", "a"), ("tool", "one"), ("assistant", "b"), ("user", "v")]
    text = render([{"role": role, "content": content} for role, content in told])
    assert [(part.role, part.content) for part in Marks.of(render).cut(text)[1]] == [("system", "You help."), *told]


def test_templates_without_marks_are_refused(directory: Path) -> None:
    for template, problem in (
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no marks"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ 1", "no chat template"),
    ):
        with pytest.raises(TemplateError, match=problem):
            Marks.of(renderer(template, directory))


# ---- chat and ATIF ----


def test_each_branch_is_one_line_of_messages_that_render_to_what_the_engine_saw(directory: Path, text: Text) -> None:
    calls = conversation(directory)
    lines = list(chat.lines(row(), calls, text))
    assert [call.id for call in leaves(calls)] == [line["call"] for line in lines] == [calls[1].id, calls[2].id, calls[3].id]
    assert all(line["exact"] for line in lines) and [line["kind"] for line in lines] == ["subagent", "agent", "agent"]
    assert [one["role"] for one in lines[1]["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert lines[1]["messages"][3]["content"] == "a.txt\nb.txt" and lines[2]["messages"][-1]["content"] == "Done."


def test_calls_that_nobody_went_on_from_are_no_conversation(directory: Path, text: Text) -> None:
    rig = Recorder(directory)
    rig.ask(message("user", "u"), "first", superseded_by="g00000-0.0/001")
    rig.ask(message("user", "u"), "second")
    rig.ask(message("user", "v"), "cut", status="cancelled", spans=None)
    rig.ask(message("user", "w"), "long", end="", status="length")
    assert [line["messages"][-1]["content"] for line in chat.lines(row(), rig.calls, text)] == ["second", "long"]


def test_atif_has_every_call_with_its_tokens_and_the_shape_of_the_rollout(directory: Path, text: Text) -> None:
    calls = conversation(directory)
    found = atif.document(row(), calls, text)
    assert found is not None
    back = {one["call"]: one for one in atif.calls(json.loads(json.dumps(found)))}
    assert back == {call.id: {"call": call.id, "prompt_ids": call.prompt_ids, "ids": call.ids, "logprobs": call.logprobs} for call in calls}
    shape = [(step["source"], step["message"], bool(step.get("is_copied_context"))) for step in found["steps"]]
    assert shape == [
        ("system", "Tools: bash", False),
        ("user", "List them.", False),
        ("agent", "I look.", False),
        ("agent", "There are two.", False),
        ("system", "Tools: bash", True),
        ("user", "Summary: two files.", True),
        ("agent", "Done.", False),
    ]
    asked = found["steps"][2]
    assert [(call["function_name"], call["arguments"]) for call in asked["tool_calls"]] == [("bash", {"command": "ls"})]
    assert asked["observation"]["results"] == [
        {"content": "a.txt\nb.txt", "source_call_id": asked["tool_calls"][0]["tool_call_id"]},
        {"subagent_trajectory_ref": [{"trajectory_id": "sub"}]},
    ]
    assert [one["trajectory_id"] for one in found["subagent_trajectories"]] == ["sub"]
    assert found["extra"]["reward"] == 1.0 and [step["step_id"] for step in found["steps"]] == list(range(1, 8))


def test_a_reply_that_was_cut_within_a_word_like_a_mark_keeps_it(directory: Path, text: Text) -> None:
    rig = Recorder(directory)
    rig.ask(message("user", "u"), "if a <", end="", status="length")
    assert next(chat.lines(row(), rig.calls, text))["messages"][-1] == {"role": "assistant", "content": "if a <"}
    found = atif.document(row(), rig.calls, text)
    assert found is not None and found["steps"][-1]["message"] == "if a <"
    assert ends("<|im_end|>\n") == ["<|im_end|>\n", "<|im_end|>"] and ends(" </s><s>") == [" </s><s>", "</s><s>", " </s>", "</s>"]


def test_atif_names_each_sub_agent_in_the_step_that_began_it_and_holds_it_there(directory: Path, text: Text) -> None:
    rig = Recorder(directory)
    first = rig.ask(message("user", "u"), "Two of you.")
    left = rig.ask(message("user", "l"), "Left.", conversation="left", kind="subagent", spawned_by=first.id)
    rig.ask(message("user", "r"), "Right.", conversation="right", kind="subagent", spawned_by=first.id)
    rig.ask(message("user", "d"), "Deep.", conversation="deep", kind="subagent", spawned_by=left.id)
    rig.ask(message("user", "t"), "Title.", conversation="title", kind="aux")
    found = atif.document(row(), rig.calls, text)
    assert found is not None and len(list(atif.calls(found))) == 5
    results = found["steps"][-1]["observation"]["results"]
    assert [one["subagent_trajectory_ref"] for one in results] == [[{"trajectory_id": "left"}], [{"trajectory_id": "right"}]]
    inner = {one["trajectory_id"]: one for one in found["subagent_trajectories"]}
    assert list(inner) == ["left", "right", "title"]
    assert [one["trajectory_id"] for one in inner["left"]["subagent_trajectories"]] == ["deep"]
    assert inner["left"]["steps"][-1]["observation"]["results"] == [{"subagent_trajectory_ref": [{"trajectory_id": "deep"}]}]


def looking(directory: Path, rollout: str = "g00000-0.0") -> list[Call]:
    """A question without an image, and one with an image of 64 placeholders, which a screenshot follows."""
    rig = Recorder(directory, rollout)
    first = rig.ask(message("user", "u"), "Show me.")
    second = rig.ask("\n" + message("user", f"See <v>{'#' * 64}</v>."), "A cat.", after=first, media=["image:5f"])
    rig.ask("\n" + message("tool", f"<v>{'#' * 64}</v>"), "Two cats.", after=second, media=["image:5f", "image:60"])
    return rig.calls


def test_images_are_told_by_their_digests_and_placeholders(directory: Path, text: Text) -> None:
    calls = looking(directory)
    (line,) = chat.lines(row(), calls, text)
    assert (line["media"], line["exact"]) == (["image:5f", "image:60"], False), "text is not all that the engine was given"
    assert [one["content"] for one in line["messages"][2:4]] == [f"See <v>{'#' * 64}</v>.", "A cat."]
    found = atif.document(row(), calls, text)
    assert found is not None and [step["extra"].get("media") for step in found["steps"] if "metrics" in step] == [
        None,
        ["image:5f"],
        ["image:5f", "image:60"],
    ]
    assert {one["call"]: one["prompt_ids"] for one in atif.calls(found)} == {call.id: call.prompt_ids for call in calls}
    (made,) = (made for _, made in sequences.of_trajectories(sequences.untrained(call_rows.table(calls)), trained=False))
    assert made.ids.tolist() == calls[0].prompt_ids + calls[0].ids, "no sequence holds a placeholder"


def test_atif_writes_no_number_that_is_none_and_no_tool_call_that_cannot_be_read(directory: Path, text: Text) -> None:
    rig = Recorder(directory)
    rig.ask(message("user", "u"), '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', logprobs=None)
    rig.calls[0].logprobs = [math.nan] * len(rig.calls[0].ids)
    found = atif.document(row(reward=math.nan, rewards={"a": math.inf, "b": 1.0}), rig.calls, text)
    assert found is not None and json.dumps(found, allow_nan=False)
    assert "logprobs" not in found["steps"][1]["metrics"] and "tool_calls" not in found["steps"][1]
    assert found["steps"][1]["message"].startswith("<tool_call>") and found["extra"]["rewards"] == {"b": 1.0}
    assert atif.document(row(), [], text) is None


# ---- token sequences ----


def test_sequences_of_a_rollout_that_no_step_trained_are_its_chains(directory: Path) -> None:
    calls = conversation(directory)
    found = [made for _, made in sequences.of_trajectories(sequences.untrained(call_rows.table(calls)), trained=False)]
    assert sum(int(made.mask.sum()) for made in found) == sum(len(call.ids) for call in calls)
    assert len(found) == 3 and all(made.advantages is None and made.advantage is None for made in found)
    main = next(made for made in found if made.ids.tolist() == calls[2].prompt_ids + calls[2].ids)
    assert main.prompt == len(calls[0].prompt_ids) and main.ids[main.mask].tolist() == calls[0].ids + calls[2].ids
    assert main.logprobs[main.mask].tolist() == calls[0].logprobs + calls[2].logprobs


@pytest.mark.parametrize("builder", ["chain", "per_call", "tree"])
def test_sequences_of_a_trained_rollout_have_its_step_s_advantages(directory: Path, builder: str) -> None:
    group = [(make_record(f"g00000-{n}.0", float(n)), conversation(directory, f"g00000-{n}.0")) for n in range(2)]
    table = batch.build_step([group], Train.model_validate({"builder": builder})).table
    if builder == "tree":
        rows = pa.concat_tables([call_rows.table(calls) for _, calls in group])
        made = list(sequences.of_trajectories(sequences.of_tries(table, rows), trained=True))
    else:
        made = list(sequences.of_batch(table, ["g00000-0.0", "g00000-1.0"]))
    by_rollout = {name: [one for rollout, one in made if rollout == name] for name in ("g00000-0.0", "g00000-1.0")}
    for (record, calls), sign in zip(group, (-1, 1), strict=True):
        found = by_rollout[record.id]
        assert sum(int(one.mask.sum()) for one in found) == sum(len(call.ids) for call in calls)
        assert all((one.advantage or 0) * sign > 0 and one.advantages is not None and not one.advantages[~one.mask].any() for one in found)
    assert list(sequences.of_batch(table, ["nobody"])) == [] if builder != "tree" else True


# ---- the command ----


def stored_run(tmp_path: Path, policy: Path, found: dict[str, list[Call]]) -> RunDir:
    """A run directory with a store and a batch of step 3."""
    settings = Config.model_validate(
        {"name": "run", "runs": str(tmp_path), "policy": {"model": str(policy)}, "harnesses": [{"name": "react"}], "tasks": {"train": "t"}}
    )
    run = RunDir(tmp_path / "run").create()
    run.config.write_text(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
    writer = StoreWriter(Location.of(run.data), Origin("run", policy="policy"))
    group = [(make_record(name, float(number), started=float(number)), calls) for number, (name, calls) in enumerate(found.items())]
    for record, calls in group:
        writer.add(record, calls)
    writer.flush()
    SampleStore(Location.of(run.data)).write(3, batch.build_step([group], Train()).table, {"taken": [0]})
    return run


@pytest.fixture
def run(tmp_path: Path, directory: Path) -> RunDir:
    names = [f"g00000-{number}.0" for number in range(2)]
    return stored_run(tmp_path, directory, {name: conversation(directory, name) for name in names})


def test_exports_are_written_whole_by_the_filters(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def export(form: str, *more: str) -> Path:
        out = tmp_path / f"{form}{len(list(tmp_path.iterdir()))}"
        assert main(["rollouts", "export", str(run.root), "--format", form, "--out", str(out), *more]) == 0
        return out

    lines = [json.loads(line) for line in export("chat", "--reward", ">=0.5").read_text().splitlines()]
    assert len(lines) == 3 and {(line["rollout"], line["step"], line["reward"]) for line in lines} == {("g00000-1.0", 4, 1.0)}
    assert sorted(file.name for file in export("atif").iterdir()) == ["g00000-0.0.json", "g00000-1.0.json"]
    trl = pq.read_table(export("trl", "--step", "4")).to_pylist()
    assert len(trl) == 6 and all(line["prompt_ids"] + line["completion_ids"] == line["input_ids"] for line in trl)
    assert all(len(line["completion_ids"]) == len(line["env_mask"]) == len(line["logprobs"]) for line in trl)
    verl = pq.read_table(export("verl")).to_pylist()
    assert all(line["token_level_scores"] == [0.0] * (len(line["responses"]) - 1) + [line["reward"]] for line in verl)
    assert {line["reward"] for line in verl} == {0.0, 1.0} and {line["uid"] for line in verl} == {"0"}
    assert pq.read_table(export("trl", "--step", "3")).num_rows == 0
    capsys.readouterr()
    assert main(["rollouts", "export", str(run.root), "--format", "chat", "--out", str(run.root)]) == 2
    assert f"{run.root} exists" in capsys.readouterr().err
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_run_with_images_exports_in_every_format(tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"g00000-{number}.0" for number in range(2)]
    run = stored_run(tmp_path, directory, {name: looking(directory, name) for name in names})
    for form in ("chat", "atif", "trl", "verl"):
        assert main(["rollouts", "export", str(run.root), "--format", form, "--out", str(tmp_path / form)]) == 0
    said = capsys.readouterr().out
    assert "2 conversations of 2 rollouts (2 with images, of which the placeholders are there alone)" in said
    for form, whole in (("trl", ("prompt_ids", "completion_ids")), ("verl", ("prompts", "responses"))):
        rows = pq.read_table(tmp_path / form).to_pylist()
        call = looking(directory)[0]
        assert [one[whole[0]] + one[whole[1]] for one in rows] == [call.prompt_ids + call.ids] * 2
    assert main(["rollouts", "show", str(run.root), "g00000-1", "--tokens"]) == 0
    assert "trained: no, its prompt holds images, and the learner sees tokens only" in capsys.readouterr().out


def test_what_is_no_utf8_and_a_line_of_megabytes_survive_every_export(tmp_path: Path, directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    code = {byte: alphabet.index(letter) for byte, letter in zip(range(33, 127), map(chr, range(33, 127)), strict=True)}
    rig = Recorder(directory)
    broken = [*(number for number in range(256) if number not in code.values()), 257]  # bytes of no character, in any order
    first = rig.ask(message("user", "u"), "x")
    first.ids, first.logprobs, first.spans = broken, [-0.5] * len(broken), [("0.3", 0, len(broken))]
    rig.ask("\n" + message("tool", "y" * LONG), "done", after=first, shared=len(first.prompt_ids) + len(broken))
    run = stored_run(tmp_path, directory, {"g00000-0.0": rig.calls, "g00000-1.0": conversation(directory, "g00000-1.0")})
    for form in ("chat", "atif", "trl", "verl"):
        assert main(["rollouts", "export", str(run.root), "--format", form, "--out", str(tmp_path / form)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "chat").read_text().split("\n") if line]
    assert any(len(line["messages"][2]["content"]) == LONG for line in lines if len(line["messages"]) == 4)
    assert main(["rollouts", "show", str(run.root), "g00000-0"]) == 0 and main(["rollouts", "ls", str(run.root)]) == 0
