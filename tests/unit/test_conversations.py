"""Conversations, kinds and splice of what ten real programs send: one test per program's behaviour, with the right outcome written down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.toy_chat import say
from tests.unit.toy_session import ToySession

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
AGENT = {"type": "function", "function": {"name": "agent", "parameters": {"type": "object", "properties": {"prompt": {"type": "string"}}}}}


def chat(*messages: dict[str, Any], system: str = "You are the agent.", tools: list[Any] | None = None) -> dict[str, Any]:
    opening = [{"role": "system", "content": system}] if system else []
    return {"messages": [*opening, *messages], "tools": [BASH, AGENT] if tools is None else tools}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(name: str, arguments: str, text: str | None = None, id: str = "call_1", **more: Any) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def result(text: str, id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


RUN = say("", ("bash", '{"command": "ls -la"}'))
KEPT = called("bash", '{"command":"ls -la"}')


def test_codex_says_everything_in_headers_and_returns_everything_verbatim() -> None:
    session = ToySession()
    main = {"user-agent": "codex_exec/0.171.0", "thread-id": "t1"}
    opening = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You code."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]},
    ]
    tools = [{"type": "function", "name": "exec_command"}, {"type": "function", "name": "spawn_agent"}]
    spawn = '{"message":"look at the tests"}'
    first = session.ask("responses", {"input": opening, "tools": tools}, say("", ("spawn_agent", spawn)), headers=main)
    sub = {"user-agent": "codex_exec/0.171.0", "thread-id": "t2", "x-openai-subagent": "collab_spawn"}
    task = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look at the tests"}]}
    second = session.ask("responses", {"input": [*opening[:2], task], "tools": tools[:1]}, headers=sub)
    assert (first.kind, first.conversation, first.splice) == ("agent", "t1", "new")
    assert (second.kind, second.conversation, second.splice, second.spawned_by) == ("subagent", "t2", "new", first.call)
    back = [
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "spawn_agent", "arguments": spawn},
        {"type": "function_call_output", "call_id": "call_1", "output": "started"},
    ]
    third = session.ask("responses", {"input": [*opening, *back], "tools": tools}, headers=main)
    assert (third.conversation, third.splice, third.parent) == ("t1", "exact", first.call)
    compact = main | {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
    fourth = session.ask("responses", {"input": [*opening, *back], "tools": []}, "the summary of it all", headers=compact)
    assert (fourth.kind, fourth.conversation, fourth.splice) == ("compaction", "t1", "fork")
    assert fourth.reason is not None and fourth.reason.startswith("no tools are declared any more")
    summary = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the summary of it all"}]}
    fifth = session.ask("responses", {"input": [*opening, summary], "tools": tools}, headers=main)
    assert (fifth.kind, fifth.conversation, fifth.splice) == ("agent", "t1", "fork")
    assert fifth.reason == "the harness compacted its history"


def claude(*messages: dict[str, Any], nonce: str = "36ee5", tools: list[Any] | None = None) -> dict[str, Any]:
    edit = {
        "name": "Edit",
        "input_schema": {
            "type": "object",
            "properties": {
                "replace_all": {"type": "boolean", "default": False},
                "file_path": {"type": "string"},
                "old_string": {"type": "string"},
            },
        },
    }
    agent = {"name": "Agent", "input_schema": {"type": "object", "properties": {"prompt": {"type": "string"}}}}
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.1; cch={nonce};"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
    ]
    return {"system": system, "messages": list(messages), "tools": [edit, agent] if tools is None else tools}


def test_claude_code_moves_cache_marks_reorders_keys_and_adds_defaults() -> None:
    session = ToySession()
    marked = {"type": "text", "text": "do it", "cache_control": {"type": "ephemeral"}}
    said = say("I edit.", ("Edit", '{"old_string": "a", "file_path": "f"}'))
    first = session.ask("messages", claude(user([marked])), said, issued=["toolu_1"])
    given = {"replace_all": False, "file_path": "f", "old_string": "a"}
    later = [
        user("do it"),  # the mark has moved on, and the one block is a string now
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I edit."}, {"type": "tool_use", "id": "toolu_1", "name": "Edit", "input": given}],
        },
        user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": "done", "cache_control": {"type": "ephemeral"}}]),
    ]
    second = session.ask("messages", claude(*later, nonce="0aaa9"))
    assert (second.conversation, second.kind, second.splice, second.parent) == (first.conversation, "agent", "spliced", first.call)


def test_claude_codes_system_messages_inside_the_conversation() -> None:
    session = ToySession()
    listed = {"role": "system", "content": [{"type": "text", "text": "agents: a", "cache_control": {"type": "ephemeral"}}]}
    first = session.ask("messages", claude(user("u1"), listed), "hello")
    plain = {"role": "system", "content": "agents: a"}
    later = [user("u1"), plain, {"role": "assistant", "content": "hello"}, user("u2"), {"role": "system", "content": "reminder 2"}]
    second = session.ask("messages", claude(*later))
    assert (second.conversation, second.splice) == (first.conversation, "exact")


def test_claude_codes_subagent_and_compaction() -> None:
    session = ToySession()
    first = session.ask("messages", claude(user("u1")), say("", ("Agent", '{"prompt": "count the files"}')))
    header = {"x-claude-code-agent-id": "a7"}
    sub = session.ask("messages", claude(user("count the files"), tools=[]), headers=header)
    assert (sub.kind, sub.conversation, sub.spawned_by) == ("subagent", "a7", first.call)
    kept = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Agent", "input": {"prompt": "count the files"}}]}
    request = user([{"type": "tool_result", "tool_use_id": "t", "content": "started"}, {"type": "text", "text": "Summarise."}])
    summary = "<analysis>it went so</analysis><summary>We counted all of the files and there are seven of them.</summary>"
    compaction = session.ask("messages", claude(user("u1"), kept, request), summary)
    assert (compaction.kind, compaction.splice) == ("agent", "exact")  # nothing tells it apart yet
    again = session.ask(
        "messages", claude(user("This goes on from before. Summary:\nWe counted all of the files and there are seven of them."))
    )
    assert session.corrected == {compaction.call: "compaction"}
    assert (again.kind, again.splice, again.spawned_by) == ("agent", "new", None) and again.conversation != first.conversation


def test_opencodes_summary_is_a_request_of_its_own_whose_answer_becomes_a_reply() -> None:
    session = ToySession()
    main = {"user-agent": "opencode/1.18", "x-session-id": "ses_1"}
    title = session.ask("chat", chat(user("do it"), system="You make titles.", tools=[]), "A title", headers=main)
    session.ask("chat", chat(user("do it")), RUN, headers=main)
    text = "We looked at all of the files and there are seven of them."
    whole = user("Here is the conversation so far: do it, ls -la")
    summary = session.ask("chat", chat(whole, system="You summarise.", tools=[]), text, headers=main)
    assert summary.kind == "aux"  # nothing tells it apart yet
    after = chat(user("What did we do so far?"), {"role": "assistant", "content": text}, user("Continue."))
    again = session.ask("chat", after, headers=main)
    assert session.corrected == {summary.call: "compaction"} and title.call not in session.corrected
    assert (again.kind, again.conversation, again.splice) == ("agent", "ses_1", "fork")


def test_opencodes_title_call_comes_first_under_the_same_id() -> None:
    session = ToySession()
    main = {"user-agent": "opencode/1.18", "x-session-id": "ses_1"}
    title = session.ask("chat", chat(user("do it"), system="You make titles.", tools=[]), "A title", headers=main)
    first = session.ask("chat", chat(user("do it")), RUN, headers=main)
    second = session.ask("chat", chat(user("do it"), KEPT, result("files")), headers=main)
    assert [(got.kind, got.conversation) for got in (first, second)] == [("agent", "ses_1"), ("agent", "ses_1")]
    assert (title.kind, first.splice) == ("aux", "new") and title.conversation != "ses_1"  # it is no turn of that conversation
    assert (second.splice, second.parent) == ("spliced", first.call)
    child = session.ask("chat", chat(user("count")), headers=main | {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"})
    assert (child.kind, child.conversation) == ("subagent", "ses_2")
    summary = session.ask("chat", chat(user("do it"), KEPT, result("files"), user("summarise"), tools=[]), headers=main)
    assert (summary.kind, summary.conversation, summary.splice) == ("compaction", "ses_1", "fork")


def test_calls_of_another_model_are_no_turns_of_the_conversation() -> None:
    session = ToySession()
    side = session.ask("chat", chat(user("do it")), side_model=True)
    first = session.ask("chat", chat(user("do it")), RUN)
    other = session.ask("chat", chat(user("do it"), KEPT, result("files"), user("which topic?")), side_model=True)
    second = session.ask("chat", chat(user("do it"), KEPT, result("files")))
    assert [got.kind for got in (side, first, other, second)] == ["aux", "agent", "aux", "agent"]
    assert first.conversation == second.conversation not in (side.conversation, other.conversation)
    assert (first.splice, second.splice) == ("new", "spliced")


def test_a_title_call_without_a_header_is_known_afterwards() -> None:
    session = ToySession()
    title = session.ask("chat", chat(user("do it"), system="You make titles.", tools=[]), "A title")
    assert title.kind == "agent"
    first = session.ask("chat", chat(user("do it")), RUN)
    assert session.corrected == {title.call: "aux"} and first.kind == "agent" and first.conversation != title.conversation
    later = session.ask("chat", chat(user("another"), system="You make titles.", tools=[]))
    assert later.kind == "aux"


def test_kimis_subagent_has_another_system_prompt_and_no_header() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("do it"), user("<reminder>")), say("", ("agent", '{"prompt": "look into the tests"}')))
    sub = session.ask("chat", chat(user("look into the tests"), user("<reminder>"), system="You help.", tools=[BASH]), RUN)
    assert (sub.kind, sub.splice, sub.spawned_by) == ("subagent", "new", first.call)
    more = session.ask(
        "chat", chat(user("look into the tests"), user("<reminder>"), KEPT, result("files"), system="You help.", tools=[BASH])
    )
    assert (more.kind, more.conversation, more.splice, more.spawned_by) == ("subagent", sub.conversation, "spliced", None)


def test_kimi_keeps_the_part_of_a_cut_reply() -> None:
    session = ToySession()
    session.ask("chat", chat(user("do it")), "hello the", status="cancelled", delivered=False)
    kept = session.ask("chat", chat(user("do it"), {"role": "assistant", "content": "hello the"}, user("go on")))
    assert (kept.splice, kept.parent) == ("exact", "c1")  # everything that was sampled came back
    other = ToySession()
    other.ask("chat", chat(user("do it")), "hello there", status="cancelled", delivered=False)
    part = other.ask("chat", chat(user("do it"), {"role": "assistant", "content": "hello"}, user("go on")))
    assert (part.splice, part.reason) == ("fork", "text of the reply differs at character 5: ' there' became nothing")


def test_kimis_compaction_still_declares_tools() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("do it")), RUN)
    answer = "So far the files were listed, and nothing else has been done."
    summary = session.ask("chat", chat(user("do it"), KEPT, result("files"), user("Summarise.")), answer)
    assert (summary.kind, summary.conversation) == ("agent", first.conversation)
    after = session.ask("chat", chat(user(f"Before:\n{answer}\n"), user("do it")))
    assert session.corrected == {summary.call: "compaction"} and after.kind == "agent" and after.splice == "new"


def test_kimi_begins_again_under_its_first_instruction() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("do it"), user("a reminder")), RUN)
    answer = "So far the files were listed, and nothing else has been done."
    summary = session.ask("chat", chat(user("do it"), user("a reminder"), KEPT, result("files"), user("Summarise.")), answer)
    after = session.ask("chat", chat(user("do it"), user(f"The conversation so far:\n{answer}"), user("a reminder")), RUN)
    assert session.corrected == {summary.call: "compaction"}
    assert (after.kind, after.conversation, after.splice) == ("agent", first.conversation, "fork")


def test_qwen_trims_reasoning() -> None:
    session = ToySession()
    session.ask("chat", chat(user("do it")), say("yes", ("bash", '{"command": "ls"}'), thinking="well\n\n"))
    got = session.ask("chat", chat(user("do it"), called("bash", '{"command":"ls"}', "yes", reasoning_content="well"), result("files")))
    assert got.splice == "spliced"


def test_qwen_glues_a_cut_reply_to_the_next() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("do it")), "one two", status="cancelled", delivered=False)
    part = {"role": "assistant", "content": "one two"}
    resumed = session.ask("chat", chat(user("do it"), part, user("The connection dropped, resume.")), " three")
    assert (resumed.conversation, resumed.splice, resumed.parent) == (first.conversation, "exact", first.call)
    glued = session.ask("chat", chat(user("do it"), {"role": "assistant", "content": "one two three"}, user("next")))
    # The cut reply is there, what was sampled after it stands elsewhere than it was sampled.
    assert (glued.conversation, glued.splice) == (first.conversation, "fork")
    assert glued.reason is not None and "item 2" in glued.reason


def test_qwens_summary_call_has_no_tools() -> None:
    session = ToySession()
    agent = {"user-agent": "QwenCode/0.24"}
    first = session.ask("chat", chat(user("do it")), RUN, headers=agent)
    answer = "The files were listed; the rest is still to be done by somebody."
    summary = session.ask("chat", chat(user("do it"), KEPT, result("files"), user("Summarise."), tools=[]), answer, headers=agent)
    assert (summary.kind, summary.conversation) == ("compaction", first.conversation)
    after = session.ask("chat", chat(user(answer)), headers=agent)
    assert (after.kind, after.splice, session.corrected) == ("agent", "new", {summary.call: "compaction"})


def test_qwen_samples_a_cut_reply_again() -> None:
    session = ToySession()
    session.ask("chat", chat(user("do it")), "a long ans", status="length")
    again = session.ask("chat", chat(user("do it")), "a long answer")
    assert (again.splice, again.reason) == ("new", None)
    got = session.ask("chat", chat(user("do it"), {"role": "assistant", "content": "a long answer"}, user("next")))
    assert (got.splice, got.parent) == ("exact", again.call)


def test_gemini_drops_reasoning() -> None:
    session = ToySession()
    session.ask("chat", chat(user("do it")), say("", ("bash", '{"command": "ls"}'), thinking="well"))
    got = session.ask("chat", chat(user("do it"), called("bash", '{"command": "ls"}'), result("files")))
    assert (got.splice, got.reason) == ("fork", "thinking of the reply dropped by the harness")


def test_mini_leaves_a_reply_out() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("do it"), tools=[BASH]), RUN)
    second = session.ask("chat", chat(user("do it"), KEPT, result("files"), tools=[BASH]), "I forgot the tool")
    complaint = user("call a tool")
    third = session.ask("chat", chat(user("do it"), KEPT, result("files"), complaint, tools=[BASH]))
    assert (second.splice, third.conversation, third.splice, third.parent) == ("spliced", first.conversation, "fork", first.call)
    assert third.reason is not None and third.reason.startswith("the reply of the call before is missing from the history")
    # The same at once, before any reply came back.
    session = ToySession()
    session.ask("chat", chat(user("do it"), tools=[BASH]), "I forgot the tool")
    got = session.ask("chat", chat(user("do it"), complaint, tools=[BASH]))
    assert got.splice == "fork" and got.reason is not None and got.reason.startswith("the reply of the call before is missing")


def test_openclaw_ends_each_request_with_a_message_that_vanishes_and_strips_ids() -> None:
    session = ToySession()
    transient = user("<internal context>")
    first = session.ask("chat", chat(user("do it"), transient), RUN, issued=["call_a-b.1"])
    kept = called("bash", '{"command":"ls -la"}', id="callab1")
    second = session.ask("chat", chat(user("do it"), kept, result("files", "callab1"), transient), RUN, issued=["call_2"])
    assert (second.conversation, second.splice) == (first.conversation, "fork")
    assert second.reason is not None and second.reason.startswith("the last message of the call before (item 2) was transient: it is gone")
    third = session.ask(
        "chat",
        chat(
            *(user("do it"), kept, result("files", "callab1")),
            *(called("bash", '{"command":"ls -la"}', id="call2"), result("files", "call2"), transient),
        ),
    )
    assert (third.conversation, third.splice) == (first.conversation, "fork")
    assert third.reason is not None and third.reason.startswith("the last message of the call before (item 4) was transient")


def test_openclaws_retries_rewrite_the_user_message() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("do it")), "hel", status="cancelled", delivered=False)
    again = session.ask("chat", chat(user("do it\n[queued message]")))
    assert (again.conversation, again.kind, again.splice) == (first.conversation, "agent", "fork")
    assert again.reason is not None and again.reason.startswith("user item 1 changed")


def test_browser_use_sends_two_messages_each_time() -> None:
    session = ToySession()
    step = '{"action": "click"}'
    got = [session.ask("chat", chat(user(f"task\nhistory: {'clicked ' * n}page {n}"), tools=[]), step) for n in range(3)]
    assert [(one.kind, one.splice) for one in got] == [("agent", "new")] * 3
    assert len({one.conversation for one in got}) == 3 and session.corrected == {}
    assert got[1].reason is not None and got[1].reason.startswith("user item 1 changed")


def test_zeroclaws_subagent_has_the_same_system_prompt_and_tools() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("[22:41] do it")), say("", ("spawn_subagent", '{"prompt": "count files"}')))
    sub = session.ask("chat", chat(user("[22:42] count files")), "seven")
    assert (sub.kind, sub.spawned_by, sub.splice) == ("subagent", first.call, "new") and sub.conversation != first.conversation
    back = session.ask("chat", chat(user("[22:41] do it"), called("spawn_subagent", '{"prompt":"count files"}'), result("seven")))
    assert (back.kind, back.conversation, back.splice) == ("agent", first.conversation, "spliced")


def test_zeroclaw_sorts_keys_in_the_messages_dialect() -> None:
    session = ToySession()
    session.ask("messages", claude(user("u")), say("", ("Edit", '{"old_string": "a", "file_path": "f"}')))
    block = {"type": "tool_use", "id": "t", "name": "Edit", "input": {"file_path": "f", "old_string": "a"}}
    got = session.ask(
        "messages",
        claude(user("u"), {"role": "assistant", "content": [block]}, user([{"type": "tool_result", "tool_use_id": "t", "content": "x"}])),
    )
    assert got.splice == "spliced"


def test_zeroclaws_loop_detector_edits_the_system_message() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("do it")), RUN)
    got = session.ask("chat", chat(user("do it"), KEPT, result("files"), system="You are the agent. You repeat yourself!"))
    assert (got.conversation, got.kind, got.splice) == (first.conversation, "agent", "fork")
    assert got.reason is not None and got.reason.startswith("the system message changed (token ")
    last = session.ask("chat", chat(user("do it"), KEPT, result("files"), user("Sum up."), tools=[]))
    assert (last.kind, last.conversation) == ("compaction", first.conversation)


@pytest.mark.parametrize("place", ["blocks", "string", "chat"])
def test_the_billing_nonce_changes_nothing(place: str) -> None:
    session, got = ToySession(), []
    for nonce, later in (("36ee5", []), ("0aaa9", [{"role": "assistant", "content": "hello"}, user("u2")])):
        line = f"x-anthropic-billing-header: cc_version=2.1.1; cch={nonce};"
        if place == "chat":
            body = chat(user("u"), *later, system=f"{line}\nYou are.")
            body["messages"][0]["content"] = body["messages"][0]["content"].partition("\n")[2]  # what the edge makes of it
            got.append(session.ask("chat", body, "hello"))
        else:
            body = claude(user("u"), *later, nonce=nonce)
            if place == "string":
                body["system"] = [{"type": "text", "text": "You are Claude Code."}]
            got.append(session.ask("messages", body, "hello"))
    assert got[0].conversation == got[1].conversation and got[1].splice == "exact"


def test_another_programs_nonce_is_a_fork_that_shows_the_token() -> None:
    session = ToySession()
    first = session.ask("chat", chat(user("u"), system="request-id: 7f3a\nYou are."), "hello")
    again = session.ask("chat", chat(user("u"), {"role": "assistant", "content": "hello"}, user("u2"), system="request-id: 0c1b\nYou are."))
    assert (again.conversation, again.splice) == (first.conversation, "fork")
    assert again.reason is not None
    assert again.reason.startswith("the system message changed (token ") and "'7f3a" in again.reason and "'0c1b" in again.reason


def test_a_word_that_is_mentioned_starts_nobody() -> None:
    session = ToySession()
    session.ask("chat", chat(user("do it")), say("", ("bash", '{"command": "/workspace/out.txt"}')))
    text = "Another task, which is quite long and happens to mention /workspace/out.txt somewhere in the middle of it all."
    assert session.ask("chat", chat(user(text))).kind == "agent"


def test_requests_side_by_side() -> None:
    """Two sub-agents and their parent, interleaved: each goes on in its own conversation."""
    session = ToySession()
    two = say("", ("agent", '{"prompt": "first task"}'), ("agent", '{"prompt": "second task"}'))
    main = session.ask("chat", chat(user("do it")), two)
    subs = [session.ask("chat", chat(user(task), system="You help.", tools=[BASH]), RUN) for task in ("first task", "second task")]
    assert [sub.spawned_by for sub in subs] == [main.call, main.call] and len({sub.conversation for sub in subs}) == 2
    for task, sub in (("second task", subs[1]), ("first task", subs[0])):
        got = session.ask("chat", chat(user(task), KEPT, result("files"), system="You help.", tools=[BASH]))
        assert (got.conversation, got.splice, got.parent) == (sub.conversation, "spliced", sub.call)
