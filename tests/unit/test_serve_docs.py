"""docs/serve.md shows what `forge-ray serve` prints, and its commands are commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from forge_ray.cli.main import arguments
from forge_ray.config import Config
from forge_ray.job import serving
from tests.unit.making import make_call

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_shows_what_is_printed() -> None:
    (shown,) = (block.splitlines() for block in BLOCKS if block.startswith("model "))
    config = Config.model_validate(
        {"name": "x", "policy": {"model": "x"}, "proxy": {"max_call_tokens": 32}, "harnesses": [{"name": "react"}], "tasks": {"train": "x"}}
    )
    base = "http://127.0.0.1:18700"
    printed = [*serving.properties(config, 256), "", *serving.addresses(base, f"{base}/s/nq3t…", "nq3t…", "policy")]
    assert shown[: len(printed) - 1] == printed[1:]
    # Times and numbers apart.
    call = make_call([1] * 9, [2] * 7, dialect="chat", streamed=True, reply="answer")
    line = serving.told("call 1", call, lambda ids: "one two<|end|>")
    assert re.sub(r"\d+", "0", line) in [re.sub(r"\d+", "0", text) for text in shown], line


def test_its_commands_exist() -> None:
    joined = "".join(BLOCKS).replace("\\\n", " ")
    lines = [line.partition("#")[0].partition("|")[0] for line in joined.splitlines() if line.startswith("forge-ray ")]
    assert len(lines) >= 5
    for line in lines:
        arguments(shlex.split(line)[1:])
