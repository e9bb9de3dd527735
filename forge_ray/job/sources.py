"""Sources: directories of the user's, or what a function of the user's makes.

A function runs in a process of its own (`python -m forge_ray.job.sources`), so that it may import torch without the driver paying
for it and a crash of it is one clear line. What it made is renamed into `inputs/` only when it is complete: a second start finds
it or makes it again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import shutil
import sys
from pathlib import Path

from forge_ray.config import Sft, Source
from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir


def gone() -> str:
    """What may have become of a file that is missing: the end of a sentence, "" where the files did not travel."""
    travelled = "_ray_pkg_" in os.getcwd()  # the copy that a submitted job runs in
    return "; files named by a .gitignore do not travel with ray job submit" if travelled else ""


DEMONSTRATIONS_FIX = "give a Parquet file with lists of integers `ids` and of booleans `mask`"
PASSED = ("seed", "run")
"""Keywords that a function is given beside its options, `run` where it names it."""


class SourceError(UserError):
    """The user's function failed; the message holds its last line and where the full output lies, which is to be kept."""


async def resolve(source: Source, field: str, name: str, run: RunDir, seed: int, environment: dict[str, str] | None = None) -> Path:
    """The path of `source`: its own, or `inputs/<name>` after its function has filled it.

    Raises `UserError` for a missing file or function, `SourceError` when the function fails.
    """
    if source.function is None:
        path = Path(source.path)
        if not path.exists():
            raise UserError(f"{path} does not exist", where=field, fix=f"correct the path{gone()}")
        return path
    file, function = source.function
    if not file.is_file():
        raise UserError(f"{file} does not exist", where=field, fix=f"correct the path{gone()}")
    target = run.inputs / name
    if target.exists():
        return target
    building = run.inputs / f".{name}.building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    log = run.inputs / f"{name}.log"
    arguments = json.dumps({"out": str(building), "seed": seed, "run": str(run.root), **source.options})
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "forge_ray.job.sources",
            str(file),
            function,
            arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
    if code == 2:
        raise UserError(_last_line(log), where=field)
    if code != 0:
        raise SourceError(f"{file.name}:{function} failed ({_last_line(log)})", where=field, fix=f"its output is in {log}")
    os.replace(building, target)
    return target


async def demonstrations(recipe: Sft, run: RunDir, seed: int) -> Path:
    """The Parquet file of `train.sft.demonstrations`. Raises `UserError` for what is none of demonstrations, and as `resolve`."""
    field = "train.sft.demonstrations"
    path = await resolve(recipe.demonstrations, field, "demonstrations", run, seed)
    if (problem := await asyncio.to_thread(demonstrations_problem, path)) is not None:
        raise UserError(problem, where=field, fix=DEMONSTRATIONS_FIX)
    return path


def demonstrations_problem(path: Path) -> str | None:
    """Why there are no demonstrations in the Parquet file, or in the directory's, as far as its schema tells; None if there are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = path / "demonstrations.parquet" if path.is_dir() else path
    try:
        found = pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        why = f"cannot be read ({' '.join(str(error).split())[:200]})" if file.exists() else "does not exist"
        return f"{file} {why}"
    with found:
        schema, rows = found.schema_arrow, found.metadata.num_rows
    for name in ("ids", "mask"):
        if name not in schema.names:
            return f"{file} has no column {name!r}"
        kind = schema.field(name).type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            return f"column {name!r} of {file} holds no lists"
        if not (pa.types.is_integer(kind.value_type) or (name == "mask" and pa.types.is_boolean(kind.value_type))):
            return f"column {name!r} of {file} holds lists of {kind.value_type}"
    return None if rows else f"{file} has no rows"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"


def call(file: str, function: str, arguments: dict) -> None:
    """Import `file` and call its `function(out, seed=…, …)`; `run` (the run directory) is passed to functions that name it."""
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    target = getattr(module, function, None)
    if not callable(target):
        known = ", ".join(sorted(name for name, value in vars(module).items() if inspect.isfunction(value)))
        raise UserError(f"{path.name} has no function {function!r}; it has {known}")
    keywords = dict(arguments)
    out = Path(keywords.pop("out"))
    if "run" not in inspect.signature(target).parameters:
        keywords.pop("run", None)
    target(out, **keywords)


if __name__ == "__main__":
    try:
        call(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    except UserError as problem:
        print(problem)
        sys.exit(2)
