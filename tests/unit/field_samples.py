"""A value of every field that a dialect lists, as a client would send it; a test checks that none is missing.

`HONOURED` and `IGNORED` map a listed name to fields of a request, `REFUSED` to a value that changes the meaning.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
USER: list[Json] = [{"role": "user", "content": "say one"}]
SCHEMA: Json = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
CHAT_TOOL: Json = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": SCHEMA}}
RESPONSES_TOOL: Json = {"type": "function", "name": "bash", "description": "d", "parameters": SCHEMA}
MESSAGES_TOOL: Json = {"name": "bash", "description": "d", "input_schema": SCHEMA}
FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}

BODIES: dict[str, Json] = {
    "chat": {"model": "policy", "messages": USER},
    "completions": {"model": "policy", "prompt": "say one", "max_tokens": 4},
    "responses": {"model": "policy", "input": "say one"},
    "messages": {"model": "policy", "messages": USER, "max_tokens": 64},
}

_TEMPERATURES: Json = {
    "temperature": {"temperature": 0.2},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "seed": {"seed": 3},
}
_NOTES: Json = {
    "metadata": {"metadata": {"run": "7"}},
    "user": {"user": "u1"},
    "safety_identifier": {"safety_identifier": "s1"},
    "store": {"store": True},
    "service_tier": {"service_tier": "a tier that nobody knows"},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "session_id": {"session_id": "s"},
    "request_id": {"request_id": "r"},
    "mm_payload": {"mm_payload": "none"},
    "return_mm_kwargs": {"return_mm_kwargs": False},
}
_OPENAI_IGNORED: Json = _NOTES | {
    "truncation_side": {"truncation_side": "left"},
    "length_penalty": {"length_penalty": 1.5},
    "early_stopping": {"early_stopping": True},
    "routed_experts_prompt_start": {"routed_experts_prompt_start": 1},
    "return_token_offsets": {"return_token_offsets": True},
}
_SAMPLED: Json = {
    "n": 2,
    "best_of": 3,
    "beam": True,
    "beam_width": 4,
    "use_beam_search": True,
    "logits_processors": ["x"],
    "logit_bias": {"5": -100},
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "min_tokens": 5,
    "ignore_eos": True,
    "thinking_token_budget": 10,
    "repetition_detection": {"window_size": 10},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= 'a'",
}
_ENGINE: Json = {
    "kv_transfer_params": {"do_remote_decode": True},
    "ec_transfer_params": {"x": 1},
    "vllm_xargs": {"x": 1},
    "watermarking": True,
    "priority": 1,
    "mm_processor_kwargs": {"x": 1},
    "media_io_kwargs": {"image": {"x": 1}},
}
_OPENAI_REFUSED: Json = (
    _SAMPLED
    | _ENGINE
    | {"prompt_logprobs": 0, "logprob_token_ids": [5], "prompt_embeds": "AAAA", "echo": True, "truncate_prompt_tokens": 5}
)
_RENDERED: Json = {
    "stop": {"stop": ["zzz"]},
    "stop_token_ids": {"stop_token_ids": [7]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "stream": {"stream": False},
    "structured_outputs": {"structured_outputs": {"regex": "one"}},
    "cache_salt": {"cache_salt": "salt"},
    "model": {"model": "another-model"},
}
_VARIABLES: Json = {"chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}}}
_OPENAI_RENDERED: Json = _RENDERED | {
    "max_tokens": {"max_tokens": 3},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "response_format": {"response_format": FORMAT},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "add_special_tokens": {"add_special_tokens": True},
    "return_tokens_as_token_ids": {"logprobs": True, "return_tokens_as_token_ids": True},
    "return_token_ids": {"return_token_ids": True},
    "stream_interval": {"stream_interval": 2},
}

HONOURED: dict[str, Json] = {
    "chat": _OPENAI_RENDERED
    | _VARIABLES
    | {
        "logprobs": {"logprobs": True},
        "messages": {},
        "max_completion_tokens": {"max_completion_tokens": 3},
        "top_logprobs": {"logprobs": True, "top_logprobs": 1},
        "tools": {"tools": [CHAT_TOOL]},
        "tool_choice": {"tools": [CHAT_TOOL], "tool_choice": "none"},
        "parallel_tool_calls": {"tools": [CHAT_TOOL], "parallel_tool_calls": False},
        "reasoning_effort": {"reasoning_effort": "low"},
        "include_reasoning": {"include_reasoning": False},
        "add_generation_prompt": {"add_generation_prompt": True},
        "continue_final_message": {
            "messages": [*USER, {"role": "assistant", "content": "on"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "documents": {"documents": [{"title": "t", "text": "x"}]},
        "return_prompt_text": {"return_prompt_text": True},
    },
    "completions": _OPENAI_RENDERED
    | {"prompt": {}, "logprobs": {"logprobs": 1}, "return_tokens_as_token_ids": {"logprobs": 1, "return_tokens_as_token_ids": True}},
    "responses": _RENDERED
    | _VARIABLES
    | {
        "input": {},
        "instructions": {"instructions": "be brief"},
        "max_output_tokens": {"max_output_tokens": 3},
        "tools": {"tools": [RESPONSES_TOOL]},
        "tool_choice": {"tools": [RESPONSES_TOOL], "tool_choice": "none"},
        "parallel_tool_calls": {"tools": [RESPONSES_TOOL], "parallel_tool_calls": False},
        "reasoning": {"reasoning": {"effort": "low"}},
        "include_reasoning": {"include_reasoning": False},
        "text": {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
        "include": {"include": ["message.output_text.logprobs"]},
        "top_logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        "enable_response_messages": {"enable_response_messages": True},
    },
    "messages": {
        "stream": {"stream": False},
        "chat_template_kwargs": _VARIABLES["chat_template_kwargs"],
        "cache_salt": _RENDERED["cache_salt"],
        "model": {"model": "claude-x"},
        "messages": {"messages": [*USER, {"role": "system", "content": "reminder"}]},
        "system": {"system": [{"type": "text", "text": "be brief"}]},
        "max_tokens": {"max_tokens": 3},
        "stop_sequences": {"stop_sequences": ["zzz"]},
        "tools": {"tools": [MESSAGES_TOOL]},
        "tool_choice": {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "thinking": {"thinking": {"type": "disabled"}},
        "output_config": {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
    },
}

IGNORED: dict[str, Json] = {
    "chat": _OPENAI_IGNORED
    | _TEMPERATURES
    | {
        "verbosity": {"verbosity": "low"},
        "prediction": {"prediction": {"type": "content", "content": "one"}},
        "web_search_options": {"web_search_options": {}},
        "moderation": {"moderation": {"model": "m"}},
        "a_field_of_tomorrow": {"a_field_of_tomorrow": {"x": 1}},
    },
    "completions": _OPENAI_IGNORED | _TEMPERATURES | _VARIABLES | {"a_field_of_tomorrow": {"a_field_of_tomorrow": 1}},
    "responses": _NOTES
    | _TEMPERATURES
    | {
        "client_metadata": {"client_metadata": {"x": "y"}},
        "context_management": {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        "max_tool_calls": {"max_tool_calls": 3},
        "stream_options": {"stream": True, "stream_options": {"include_obfuscation": True}},
        "moderation": {"moderation": {"model": "m"}},
        "reasoning.summary": {"reasoning": {"summary": "auto"}},
        "reasoning.generate_summary": {"reasoning": {"generate_summary": "auto"}},
        "reasoning.context": {"reasoning": {"context": "all_turns"}},
        "reasoning.mode": {"reasoning": {"mode": "pro"}},
        "text.verbosity": {"text": {"verbosity": "low"}},
        "include: reasoning.encrypted_content": {"include": ["reasoning.encrypted_content"]},
        "include: web_search_call.action.sources": {"include": ["web_search_call.action.sources"]},
        "input: encrypted_content": {
            "input": [
                *USER,
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "I think"}, {"type": "summary_text", "text": "therefore"}],
                    "encrypted_content": "gAAAA",
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]},
                *USER,
            ]
        },
        "tools: web_search": {"tools": [{"type": "web_search", "external_web_access": False}]},
        "tools: web_search_preview": {"tools": [RESPONSES_TOOL, {"type": "web_search_preview"}]},
        "tools: file_search": {"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]},
        "tools: tool_search": {"tools": [{"type": "tool_search", "execution": "client", "parameters": SCHEMA}]},
        "tools: code_interpreter": {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
        "tools: image_generation": {"tools": [{"type": "image_generation"}]},
        "tools: mcp": {"tools": [{"type": "mcp", "server_label": "s", "server_url": "http://x.invalid"}]},
        "tools: programmatic_tool_calling": {"tools": [{"type": "programmatic_tool_calling"}]},
        "a_field_of_tomorrow": {"a_field_of_tomorrow": "x"},
    },
    "messages": {
        "metadata": {"metadata": {"user_id": "{}"}},
        "context_management": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        "service_tier": {"service_tier": "auto"},
        "inference_geo": {"inference_geo": "eu"},
        "speed": {"speed": "fast"},
        "betas": {"betas": ["x"]},
        "cache_control": {"cache_control": {"type": "ephemeral"}},
        "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": 31999}},
        "thinking.display": {"thinking": {"type": "adaptive", "display": "a display of tomorrow"}},
        "output_config.task_budget": {"output_config": {"task_budget": {"type": "tokens", "total": 1000}}},
        "mm_payload": _NOTES["mm_payload"],
        "return_mm_kwargs": _NOTES["return_mm_kwargs"],
        "tools: web_search_20250305": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools: web_fetch_20250910": {"tools": [MESSAGES_TOOL, {"type": "web_fetch_20250910", "name": "web_fetch"}]},
        "tools: code_execution_20250825": {"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]},
        "tools: tool_search_tool_regex_20251119": {"tools": [{"type": "tool_search_tool_regex_20251119", "name": "tool_search"}]},
        "tools: mcp_toolset": {"tools": [{"type": "mcp_toolset", "mcp_server_name": "s"}]},
        "tools: advisor_20260301": {"tools": [{"type": "advisor_20260301", "name": "advisor"}]},
        "a_field_of_tomorrow": {"a_field_of_tomorrow": []},
    }
    | {name: _TEMPERATURES[name] for name in ("temperature", "top_p", "top_k")},
}

REFUSED: dict[str, Json] = {
    "chat": _OPENAI_REFUSED
    | {
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "audio": {"voice": "x"},
        "modalities": ["text", "audio"],
        "chat_template": "{{ x }}",
    },
    "completions": _OPENAI_REFUSED | {"suffix": "x"},
    "responses": _SAMPLED
    | _ENGINE
    | {
        "background": True,
        "previous_response_id": "resp_1",
        "previous_input_messages": [{}],
        "conversation": "conv_1",
        "prompt": {"id": "p"},
        "truncation": "auto",
    },
    "messages": _ENGINE | {"mcp_servers": [{"url": "u"}], "container": {"skills": []}, "fallbacks": [{"model": "m"}]},
}

REFUSED_PARTS: list[tuple[str, str, Json]] = [
    ("chat", "add_generation_prompt", {"add_generation_prompt": False}),
    ("chat", "tools[1]", {"tools": [CHAT_TOOL, {"type": "custom", "custom": {"name": "c"}}]}),
    (
        "chat",
        "tool_choice",
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
    ),
    ("completions", "prompt", {"prompt": ["a", "b"]}),
    ("responses", "tools[1]", {"tools": [RESPONSES_TOOL, {"type": "local_shell"}]}),
    ("responses", "tools[0].tools[0]", {"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "custom"}]}]}),
    ("responses", "tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
    ("responses", "tool_choice", {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("responses", "input[1]", {"input": [*USER, {"type": "item_reference", "id": "i"}]}),
    ("responses", "input[0]", {"input": [{"type": "compaction", "encrypted_content": "x"}]}),
    ("responses", "input[1]", {"input": [*USER, "text"]}),
    ("responses", "input[1].tools[0]", {"input": [*USER, {"type": "additional_tools", "role": "developer", "tools": [{"type": "shell"}]}]}),
    ("messages", "tools[1]", {"tools": [MESSAGES_TOOL, {"type": "bash_20250124", "name": "bash"}]}),
    (
        "messages",
        "tool_choice",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "tool", "name": "web_search"}},
    ),
]
"""Dialect, the name that the error must give, and the fields."""
