"""The process that a reward function runs in: `python -m forge_ray.rewards.program`, spoken to by `forge_ray.rewards.call`.

stdin has one JSON object, stdout is answered with two lines of JSON, `{"begin": true}` and the answer; what the function prints to stdout
goes to stderr, which is the log. It dies with the process that asked.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import json
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge_ray.errors import ForgeRayError
from forge_ray.reference import Reference, parse
from forge_ray.rewards.combine import number
from forge_ray.rewards.rollout import Call, Decode, Rollout
from forge_ray.tasks.verifier import RewardEmpty, RewardMalformed, VerifierError

_PR_SET_PDEATHSIG = 1
CALLS = "calls"
"""Key of a returned dict with the rewards of single calls."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != asked["parent"]:
        return

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        rollout = prepare(asked)
        answer({"begin": True})
        answer(evaluate(parse(asked["function"], Path.cwd(), "reward"), rollout))
    except ForgeRayError as error:
        answer({"error": str(error)})
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        traceback.print_exc()
        answer({"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})


def prepare(asked: Mapping[str, Any]) -> Rollout:
    """The rollout, with its workspace restored below `asked["place"]`."""
    from forge_ray.run_dir import RunDir
    from forge_ray.sandboxes.archive import restore_tree

    workspace = Path(asked["place"]) / "workspace"
    workspace.mkdir()
    if asked["archive"] is not None:
        restore_tree(Path(asked["archive"]), workspace)
    run = RunDir(Path(asked["run"]))
    decode, say = _decoders(run)
    recorded = recorded_calls(run, asked["rollout"])
    calls = [
        Call(
            call.id, call.kind, call.conversation, call.prompt_ids, call.ids, call.logprobs, call.status, call.delivered,
            call.superseded_by is not None, call.reply, decode,
        )
        for call in recorded
    ]  # fmt: skip
    whole = [call for call in calls if call.status in ("finished", "length") and not call.superseded and call.delivered is not False]
    spoken = [call for call in whole if call.kind == "agent"]
    return Rollout(
        asked["rollout"], asked["task"], Path(asked["task_directory"]), asked["harness"], asked["outcome"], calls,
        say(spoken[-1].ids) if spoken else "", workspace, dict(asked["rewards"]),
    )  # fmt: skip


def recorded_calls(run: Any, rollout: str) -> list[Any]:
    """The rollout's calls by completion."""
    from forge_ray.trajectories.call_log import CallLogReader

    reader = CallLogReader(run.calls)
    reader.refresh()
    return reader.session(rollout)


def _decoders(run: Any) -> tuple[Decode, Decode]:
    """Ids → text with special tokens written out, and without."""
    from tokenizers import Tokenizer

    from forge_ray.report.text import decoder, model_directory

    model = model_directory(run)
    whole = decoder(model)
    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception:  # the library raises plain Exception; `decoder` writes numbers then
        return whole, whole
    return whole, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def evaluate(reference: Reference, rollout: Rollout) -> dict[str, Any]:
    """Call the function; its answer as `call.Scored` has it. Raises `VerifierError`, and whatever the function does."""
    function, root = load(reference)
    value = function(rollout)
    calls: dict[str, float] = {}
    if isinstance(value, Mapping):
        named = dict(value)
        if isinstance(single := named.pop(CALLS, {}), Mapping):
            calls = {_name(key): _number(f"{CALLS}[{key!r}]", entry) for key, entry in single.items()}
        else:
            named[CALLS] = single  # a reward of that name
        if not named:
            raise RewardEmpty("it returned no reward: {}")
        rewards = {_name(key): _number(repr(key), entry) for key, entry in named.items()}
    else:
        rewards = {reference.function: _number("what it returned", value)}
    return {"rewards": rewards, "calls": calls, "digest": digest(root)}


def _name(key: Any) -> str:
    if not isinstance(key, str) or not key or any("\ud800" <= letter <= "\udfff" for letter in key):
        raise RewardMalformed(f"the name {key!r} is no text")
    return key


def _number(what: str, value: Any) -> float:
    if getattr(value, "shape", None) == ():  # one number of numpy or torch, which has truth values of its own
        value = value.item()
    return number(what, float(value) if isinstance(value, numbers.Real) and not isinstance(value, int) else value)


def load(reference: Reference) -> tuple[Callable[[Rollout], Any], Path]:
    """Import the function; also the folder or file that its sources lie in. A file in a package is imported as a part of it."""
    if reference.file is None:
        assert reference.module is not None
        module = importlib.import_module(reference.module)
        top = sys.modules[reference.module.partition(".")[0]]
        file = Path(top.__file__ or module.__file__ or "")
        root = file.parent if file.name == "__init__.py" else file
    else:
        folder, names = reference.file.parent, [] if reference.file.name == "__init__.py" else [reference.file.stem]
        root = folder
        while (folder / "__init__.py").is_file():
            names.insert(0, folder.name)
            root, folder = folder, folder.parent
        sys.path.insert(0, str(folder))
        name = ".".join(names)
        if len(names) == 1 and (name in sys.modules or name in sys.stdlib_module_names):
            # A plain file may be called like something that is already there.
            spec = importlib.util.spec_from_file_location(f"forge_ray_reward_{name}", reference.file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
    function = getattr(module, reference.function, None)
    if not callable(function):
        known = ", ".join(sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_")))
        raise VerifierError(f"there is no function {reference.function!r}; there is {known or 'none'}")
    return function, root


def digest(root: Path) -> str:
    """sha256 over the imported modules' sources at or below `root`, by name."""
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None)) is not None}
    whole = hashlib.sha256()
    others = Path(__file__).parents[1]
    for file in sorted(file for file in files if file == root or root in file.parents):
        installed = "site-packages" in file.parts or others in file.parents
        if file.suffix == ".py" and file.is_file() and not installed:
            name = file.name if file == root else file.relative_to(root).as_posix()
            whole.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


if __name__ == "__main__":
    main()
