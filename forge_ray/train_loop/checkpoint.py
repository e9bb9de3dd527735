"""Checkpoints: `checkpoints/step-000012/`, a Hugging Face model directory plus what an exact resume needs.

A checkpoint of step k holds the weights after k updates: the whole model, or, where adapters are trained, the adapters alone, which stand
beside the model of checkpoint 0. Beside them lie the optimizer's state, as the strategy writes it (one file, or a shard per rank), the
random state of every rank, and `trainer.json`. Everything is written under a hidden name and renamed when every byte is on disk: a
directory with the final name is complete, and a crash during a save leaves the previous one in force. What a disk or a copy does to it
later is seen from the sizes that it was written with: a resume takes the newest one that is whole. The data cursor is k itself, since the
batch of a step is fixed once formed (`exchange.py`); accepted rollouts that no step has used yet lie in `rollouts/`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.disk import sync
from forge_ray.errors import ForgeRayError
from forge_ray.model_files import model_problem, safetensors_problem
from forge_ray.run_dir import RunDir
from forge_ray.train_loop import room

if TYPE_CHECKING:
    from forge_ray.train_loop.ranks import Ranks
    from forge_ray.train_loop.strategies import Strategy

NAME = re.compile(r"step-(\d{6,})")
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
"""Files of the initial model that a checkpoint needs to be served."""
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""Files of a checkpoint of adapters."""


class CheckpointError(ForgeRayError):
    """A checkpoint cannot be read or does not belong to this run."""


def path(run: RunDir, step: int) -> Path:
    return run.checkpoints / path_name(step)


def path_name(step: int) -> str:
    return f"step-{step:06d}"


def steps(run: RunDir) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    found = (NAME.fullmatch(entry.name) for entry in run.checkpoints.iterdir()) if run.checkpoints.is_dir() else ()
    return sorted(int(match.group(1)) for match in found if match)


def latest(run: RunDir) -> int | None:
    """Step of the newest checkpoint that is whole. Raises `CheckpointError` where there are some and none is."""
    return newest(run)[0]


def newest(run: RunDir) -> tuple[int | None, list[str]]:
    """`latest`, and for each newer one that is not whole what is wrong with it. Raises `CheckpointError`."""
    wrong: list[str] = []
    for step in reversed(steps(run)):
        if (what := problem(path(run, step))) is None:
            return step, wrong
        wrong.append(what)
    if wrong:
        raise CheckpointError(f"no checkpoint of {run.root} is whole: {'; '.join(wrong)}")
    return None, []


def problem(directory: Path) -> str | None:
    """What is wrong with a checkpoint, as far as can be seen without reading it all; None if it is whole. Names the file."""
    try:
        extra = json.loads((directory / "trainer.json").read_bytes())
        sizes: dict[str, int] = extra.get("files", {})
        for name, size in sizes.items():
            found = (directory / name).stat().st_size
            if found != size:
                return f"{directory / name} has {found} bytes, {size} were written"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except (ValueError, AttributeError, RecursionError) as error:
        return f"{directory / 'trainer.json'} is damaged ({error})"
    wanted = [] if directory.name == path_name(0) or "deepspeed" in extra.get("strategy", "ddp") else ["optimizer.pt"]
    for name in {"rng.pt", *wanted, *(name for name in sizes if name.endswith(".pt"))}:  # torch's files are zip archives
        if not zipfile.is_zipfile(directory / name):
            return f"{directory / name} is {'damaged' if (directory / name).exists() else 'missing'}"
    if not extra.get("lora"):
        return model_problem(directory)
    return next((f"{directory / name} is missing" for name in ADAPTER if not (directory / name).is_file()), None) or safetensors_problem(
        directory / ADAPTER[1]
    )


def sweep(run: RunDir) -> None:
    """Remove what saves and removals that were cut off have left. For whoever writes the checkpoints, before it does."""
    for left in run.checkpoints.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def read(run: RunDir, step: int) -> dict[str, Any]:
    """`trainer.json` of a checkpoint that is whole."""
    return json.loads((path(run, step) / "trainer.json").read_text())


def save(
    run: RunDir, step: int, strategy: Strategy | None, ranks: Ranks, *, model: Any, lora: Any, tokenizer_from: Path, extra: dict[str, Any]
) -> Path:
    """Write the checkpoint of `step` durably; an existing one of the same step is replaced. Collective; complete when it returns.

    Without a `strategy` (nothing is trained yet) the whole of `model` is written. Checkpoint 0 holds no optimizer's state: that of a
    supervised start ends with it. `lora`: peft's model around it, or None. `extra` must be JSON. Raises `DiskFull`.
    """
    target = path(run, step)
    temporary = target.with_name(f".{target.name}.writing")
    with _removed_if_failed(temporary), room.needed(f"the checkpoint of step {step}", run.checkpoints):
        _save(temporary, target, step, strategy, ranks, model, lora, tokenizer_from, extra)
    return target


@contextmanager
def _removed_if_failed(directory: Path) -> Iterator[None]:
    """Half a checkpoint would take the room that the next one needs."""
    try:
        yield
    except Exception:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _save(
    temporary: Path, target: Path, step: int, strategy: Strategy | None, ranks: Ranks, model: Any, lora: Any, tokenizer_from: Path,
    extra: dict[str, Any],
) -> None:  # fmt: skip
    import torch

    if ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    ranks.meet()
    if strategy is not None and step:
        strategy.save(temporary)
    state = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
    torch.save(state, temporary / rng_name(ranks.rank))
    _write_model(temporary, strategy, ranks, model, lora)
    ranks.meet()
    if ranks.rank == 0:
        for name in () if lora is not None else CARRIED:
            if (tokenizer_from / name).is_file() and not (temporary / name).exists():
                shutil.copy2(tokenizer_from / name, temporary / name)
        files = sorted(file for file in temporary.rglob("*") if file.is_file())
        extra = {
            "step": step, "strategy": strategy.name if strategy else "ddp", "world": ranks.world, "lora": lora is not None, **extra,
            "files": {str(file.relative_to(temporary)): file.stat().st_size for file in files},
        }  # fmt: skip
        (temporary / "trainer.json").write_text(json.dumps(extra))
        _make_final(temporary, target)
    ranks.meet()


def rng_name(rank: int) -> str:
    return f"rng-{rank}.pt" if rank else "rng.pt"


def _write_model(directory: Path, strategy: Strategy | None, ranks: Ranks, model: Any, lora: Any) -> None:
    if strategy is None:
        if ranks.rank == 0:
            model.save_pretrained(directory)
        return
    tensors = {}
    for name, value in strategy.tensors():  # collective
        if ranks.rank == 0:
            tensors[name] = value if strategy.lockstep is False else value.to("cpu", copy=True)
    if ranks.rank != 0:
        return
    if lora is not None:
        from forge_ray.train_loop import lora as adapters

        adapters.save(lora, tensors, directory)
        return
    kept = set(model.state_dict())
    buffers = {name: value for name, value in model.named_buffers() if name in kept}
    model.save_pretrained(directory, state_dict=tensors | buffers)


def _make_final(temporary: Path, target: Path) -> None:
    for file in [*temporary.rglob("*"), temporary]:
        sync(file)
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.replace(target, replaced)
    os.replace(temporary, target)
    shutil.rmtree(replaced, ignore_errors=True)
    sync(target.parent)


def restore(run: RunDir, step: int, strategy: Strategy, ranks: Ranks) -> dict[str, Any]:
    """Load optimizer state and random state of the checkpoint of `step`; returns its JSON. A resume that cannot be exact is refused.
    Collective."""
    import torch

    directory = path(run, step)
    try:
        extra = read(run, step)
        wrote = {
            "train.strategy": (extra.get("strategy", strategy.name), strategy.name),
            "train.workers": (extra.get("world"), ranks.world),
        }
        for key, (then, now) in wrote.items():
            if then not in (None, now):
                raise CheckpointError(f"{directory} was written with {key} = {then}, now it is {now}: the resume would not be exact")
        if strategy.name == "ddp" and not (directory / "optimizer.pt").exists():
            raise CheckpointError(f"{directory} has no optimizer.pt: the resume would not be exact")
        strategy.restore(directory)
        state = torch.load(directory / rng_name(ranks.rank), weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # whatever torch makes of a bad file
        raise CheckpointError(f"{directory} cannot be read ({' '.join(str(error).split())[:300]})") from error
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    return extra


def prune(run: RunDir, keep: int, *, upto: int, protect: Collection[int] = ()) -> None:
    """Keep the newest `keep` checkpoints of those `upto` the one that was just written, and those in `protect`. A later one is a damaged
    one that a resume left out: it makes no whole one superfluous."""
    for step in [step for step in steps(run) if step <= upto][:-keep]:
        if step not in protect:
            # Under another name first: half of a checkpoint must not look like one.
            gone = path(run, step).with_name(f".{path_name(step)}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(path(run, step), gone)
            shutil.rmtree(gone, ignore_errors=True)
