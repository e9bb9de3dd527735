"""The page `docs/harnesses.md`, made from the adapters: what each says of its program (`About`), its pinned packages, its options, its
module's text, and the example's file as it is. Part of `python -m forge_ray.cli.docs`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from forge_ray.harnesses import harness
from forge_ray.harnesses.harness import Harness, Options
from forge_ray.harnesses.install.npm import machine, node
from forge_ray.harnesses.install.package import INSTALL

EXAMPLE = "examples/pi/harness.py"
"""The adapter of the page's last part, relative to the repository."""

_HEAD = f"""
A harness is the agent program under training. It runs unmodified in a sandbox, is pointed at the proxy by its own settings, and is told
apart there by the URL's prefix `/s/<token>` and by the same token as its API key. An adapter says how one program is installed, configured
and started, and reads its last words. `harnesses: [{{name: codex, options: {{}}}}]` in a run's configuration names them.

```
{INSTALL} codex zeroclaw    # or all
```

gets pinned versions into `~/.cache/forge-ray/harnesses` (`$FORGE_RAY_CACHE`), outside any checkout, and changes nothing else: Node 24
comes along from npm, a Python program has an environment of its own, ZeroClaw is compiled once (some 20 minutes on two cores; Rust 1.96 or
newer). `forge-ray check` says what is missing. Every program is told the policy's real context window and the run's cap on a reply (but
for mini-swe-agent, which knows no window), contacts no host but the proxy (updates, statistics and plugins are off), and has `/dev/null`
as its standard input. Exit codes are no sign of success: several programs exit with 0 on a reply that was cut, OpenCode with 1 after a
finished run. Outcomes come from the recording and the verifier.
"""

_OWN = """
## Add a harness in one file

A subclass of `Harness` in a file of yours, `harnesses: [{name: mine.py:Mine}]`. Only `configure` is a must: it is a pure function from
`Launch` (instruction, paths inside the sandbox, `base_url`, `openai_url`, `gemini_url`, `key`, `model`, `context_window`, `max_output`) to
a `Command` (`argv`, `env`, files of HOME, what the sandbox must show), which `forge-ray check` tries. What to find out about a
program, in this order:

1. Its headless mode, without approvals, and where its settings lie. Keep them in HOME: the verifier sees the workspace.
2. Where a base URL, a key and a model name of one's own go. Any key is good; a custom header is not needed.
3. Where the context window and the cap on a reply go. What it assumes for an unknown name decides when it compacts.
4. What it sends elsewhere: updates, statistics, lists of models. `strace -f -e trace=connect` shows it.
5. What it prints when the model API fails, and its exit code then: `crashed` (the program's own fault) and `no_answer` (the API's).
   `submitted` is for programs whose model ends its work by a tool call.

`policy.script` serves scripted answers in place of the model's, through the real proxy and sandbox: `tests/harness` does so for every
program.
"""


def page() -> str:
    """docs/harnesses.md"""
    lines = [
        "# Harnesses",
        "",
        "<!-- Made by `make docs` from `forge_ray/harnesses/` and `forge_ray/cli/harness_docs.py`. Change those. -->",
    ]
    lines += [*_HEAD.split("\n"), *_table(), ""]
    lines.append(
        f"Sizes are without Node {node().version} ({NODE_MB} MB, shared). Seconds are the best of three, measured on two shared cores: the"
    )
    lines += ["installation, and from the program's start to its first request, which is what a rollout costs beside its model.", ""]
    for name in harness.BUILT_IN:
        lines += _section(name, harness.get(name))
    text = Path(__file__).resolve().parents[2].joinpath(EXAMPLE).read_text()
    lines += [*_OWN.split("\n")]
    lines += [
        f"This is [`{EXAMPLE}`](../{EXAMPLE}), the adapter of a program that is not built in, whole; a test of `tests/harness` runs it:",
        "",
    ]
    lines += ["```python", *text.rstrip("\n").split("\n"), "```", "", "```", f"{INSTALL} {EXAMPLE}:Pi", "```"]
    return "\n".join(lines) + "\n"


NODE_MB = 189
"""Megabytes of Node when installed."""


def _package(adapter: Harness) -> tuple[str, str]:
    """Version and origin of the program itself, the same on every machine."""
    if not adapter.packages():
        return "", "ForgeRay"
    package = adapter.packages()[-1]
    return package.version, f"{package.registry} `{package.name.replace(f'-linux-{machine()}', '-linux-*')}`"


def _table() -> Iterator[str]:
    yield "| name | program | version | from | dialects | streams | key travels as | sub-agents | MB | install s | start s |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for name in harness.BUILT_IN:
        adapter = harness.get(name)
        about = adapter.about
        assert about is not None, f"{name} says nothing of its program"
        numbers = (about.megabytes, about.install_s, about.first_request_s)
        cells = [f"`{name}`", about.program, *_package(adapter), ", ".join(about.dialects), "yes" if about.streams else "no"]
        cells += [about.key, about.subagents, *("" if number is None else str(number) for number in numbers)]
        yield f"| {' | '.join(cells)} |"


def _section(name: str, adapter: Harness) -> Iterator[str]:
    about = adapter.about
    assert about is not None
    document = inspect.cleandoc(sys.modules[type(adapter).__module__].__doc__ or "")
    yield f"## `{name}`"
    yield ""
    yield from document.split("\n")
    yield ""
    if about.traps:
        yield f"In training: {about.traps}"
        yield ""
    own = [(key, field) for key, field in type(adapter).Options.model_fields.items() if key not in Options.model_fields]
    fields = [*own, *Options.model_fields.items()]
    yield "| option | default | |"
    yield "|---|---|---|"
    for key, field in fields:
        default = field.get_default(call_default_factory=True)
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{key}` | {'nothing' if default is None else f'`{default}`'} | {text} |"
    yield ""
