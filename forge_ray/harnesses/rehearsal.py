"""`configure` of a harness of one's own, tried before a run: it is a pure function, so a made-up launch shows most of what is wrong.

Otherwise the first rollouts of the run would tell, minutes later.
"""

from __future__ import annotations

import os
from dataclasses import replace

from forge_ray.harnesses.harness import Command, Harness, Launch

LAUNCH = Launch(
    instruction="Write hello to out.txt",
    workspace="/workspace",
    home="/home/agent",
    base_url="http://127.0.0.1:18700/s/key",
    key="key",
    model="policy",
    context_window=32_768,
)


def problem(harness: Harness, instruction: str | None) -> str | None:
    """One line that says why nothing can be started by what `configure` gives; None if nothing is wrong with it. `instruction`: a task's;
    None: none is at hand. `configure` may read it, so what it raises at a made-up one says nothing."""
    try:
        command: object = harness.configure(LAUNCH if instruction is None else replace(LAUNCH, instruction=instruction))
    except Exception as error:
        return None if instruction is None else f"configure fails ({type(error).__name__}: {error})"
    if not isinstance(command, Command):
        return f"configure gives {command!r}, which is no Command"
    for name in ("argv", "visible"):
        words: object = getattr(command, name)
        if not isinstance(words, (tuple, list)) or not all(isinstance(word, str) for word in words):
            return f"{name} = {words!r} is no tuple of texts (one of a single text ends with a comma)"
    for name in ("env", "home_files", "workspace_files"):
        texts: object = getattr(command, name)
        if not isinstance(texts, dict) or not all(isinstance(text, str) for pair in texts.items() for text in pair):
            return f"{name} = {texts!r} has what is no text"
    if not command.argv:
        return "argv is empty"
    gone = [path for path in command.visible if not os.path.exists(path)]
    return f"{gone[0]} is to be visible and does not exist" if gone else None
