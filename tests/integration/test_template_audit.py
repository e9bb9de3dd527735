"""The audit of `forge-ray check` on templates and parsers that do and do not fit: what it says must be what the recording shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from forge_ray import ray_env
from forge_ray.errors import UserError
from forge_ray.serve_proxy import vllm_names
from forge_ray.serve_proxy.arguments import FIXED
from forge_ray.serve_proxy.template_audit import Found, audit
from tests.integration.conftest import make_config
from tests.integration.edge_rig import STRICT
from tests.tiny_model import TEMPLATE, tiny_model

HERMES = {"tool_call_parser": "hermes"}
REASONING = {**HERMES, "reasoning_parser": "deepseek_r1"}
_PLAIN = "{{ message.content or '' }}"
_THOUGHT = "{% set thought = message.reasoning_content or message.reasoning %}"
THINKING = TEMPLATE.replace(
    f"<|im_start|>assistant\n{_PLAIN}",
    f"<|im_start|>assistant\n{_THOUGHT}{{% if thought %}}<think>\n{{{{ thought }}}}\n</think>\n\n{{% endif %}}{_PLAIN}",
)
STRIPPING = THINKING.replace("{% if thought %}", "{% if thought and loop.last %}")
NO_TOOLS = TEMPLATE.replace("message.tool_calls or []", "[]")
REWRITING = TEMPLATE.replace("{{ opening }}", "{{ opening }}({{ messages | length }} messages)").replace("if opening or tools", "if true")


async def look(directory: Path, template: str, server: dict[str, Any]) -> dict[str, Found]:
    os.environ.update(ray_env.worker())
    (directory / "template.jinja").write_text(template)
    config = make_config("audit", 18739, server=server, chat_template=str(directory / "template.jinja"))
    return {found.topic.removeprefix("template: "): found for found in await audit(config, str(tiny_model()), directory)}


def test_the_names_that_are_known_without_vllm_are_those_of_its_parser() -> None:
    os.environ.update(ray_env.worker())
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from forge_ray.serve_proxy.vllm_internals import parse_arguments

    assert {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions} == vllm_names.NAMES
    for name in FIXED:
        with pytest.raises(UserError, match=f"{name} is set by the proxy itself"):
            parse_arguments(make_config("names", 18739, engine={name: "x"}), str(tiny_model()))


async def test_a_template_and_parsers_that_fit(tmp_path: Path) -> None:
    assert THINKING != TEMPLATE
    found = await look(tmp_path, THINKING, REASONING)
    assert {topic for topic, entry in found.items() if entry.good} == {"turns", "tools", "thinking", "drafts"}
    assert "one sample" in found["turns"].state and "hermes reads calls back" in found["tools"].state
    assert "deepseek_r1 reads reasoning back" in found["thinking"].state
    # The template leaves later system messages out, so that nothing of them reaches the model: the prompt is append-only all the same.
    assert "one sample" in found["reminders"].state or not found["reminders"].good


@pytest.mark.parametrize(
    ("template", "server", "topic", "words"),
    [
        (STRICT, HERMES, "reminders", "reminders"),
        (STRIPPING, REASONING, "thinking", "strips it from earlier turns"),
        (THINKING, HERMES, "thinking", "reasoning_parser is not set"),
        (THINKING, HERMES, "drafts", "touch BAD"),
        (TEMPLATE, {}, "tools", "tool_call_parser is not set"),
        (TEMPLATE, {"tool_call_parser": "pythonic"}, "tools", "does not read the template's tool calls back"),
        (NO_TOOLS, HERMES, "tools", "the template writes no tool calls"),
        (REWRITING, HERMES, "turns", "does not continue the one before"),
    ],
)
async def test_what_does_not_fit_is_named(tmp_path: Path, template: str, server: dict[str, Any], topic: str, words: str) -> None:
    found = (await look(tmp_path, template, server))[topic]
    assert not found.good and words in found.state and found.fix
