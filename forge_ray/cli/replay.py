"""`forge-ray replay SESSION [--run RUN]`: what a recorded session asked and was answered, token by token, with masks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from forge_ray.config import Config, load
from forge_ray.errors import UserError
from forge_ray.outcome import Outcome
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir

DEFAULT_RUNS = Config.model_fields["runs"].default
WHERE = "forge-ray replay"
SHOWN = 20
"""Sessions that a message lists."""


def run(arguments: argparse.Namespace) -> int:
    if arguments.overrides:
        raise UserError("replay reads what is recorded: it takes no overrides", where="command line", fix="leave key=value out")
    directory, name = _find(arguments.session, arguments.run)
    from forge_ray.report.replay import replay
    from forge_ray.report.text import decoder, model_directory
    from forge_ray.trajectories import credit
    from forge_ray.trajectories.call_log import CallLogReader

    reader = CallLogReader(directory.calls)
    reader.refresh()
    session = _one(name, reader.sessions(), directory)
    config = load(directory.config)
    calls = reader.session(session)
    if config.proxy.train_grammar_calls:
        for call in calls:
            call.masked_by_grammar = False
    weights = credit.kind_weights(config.train.credit)
    chosen = credit.assign(calls, config.train.credit, truncated=_truncated(directory, session))
    state = reader.state(session)
    other = reader.upstream(session)
    purpose = state.purpose or next((call.purpose for call in other), "no call")
    print(f"session {session} of {directory.root} ({purpose})")
    try:
        for line in replay(calls, chosen, weights, decoder(model_directory(directory)), full=arguments.full, upstream=other):
            print(line)
        ends = [f"limit {state.limit} reached"] * (state.limit is not None) + ["closed"] * state.closed
        trained = sum(len(calls[ordinal].ids) for ordinal in chosen)
        counted = f"{len(calls)} calls{f' and {len(other)} of other models' if other else ''}"
        print(f"\n{counted}, {state.refused} refused requests, {trained} trained tokens{''.join(f', {end}' for end in ends)}")
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _truncated(run: RunDir, session: str) -> bool:
    """Whether a limit ended the rollout; False where it has no record (yet)."""
    file = run.rollouts / session / "result.json"
    return file.is_file() and RolloutRecord.model_validate_json(file.read_bytes()).outcome == Outcome.TRUNCATED


def _find(session: str, run: str | None) -> tuple[RunDir, str]:
    """The run and the (beginning of the) session's id that the arguments name."""
    path = Path(session).expanduser()
    if run is None and path.is_dir():
        if (path / "config.yaml").is_file():
            return RunDir(path.resolve()), ""
        if path.resolve().parent.name == "rollouts":
            return _run(path.resolve().parent.parent), path.resolve().name
    if run is not None:
        return _run(Path(run).expanduser().resolve()), session
    parent = Path(DEFAULT_RUNS).expanduser()
    runs = sorted((config.parent for config in parent.glob("*/config.yaml")), key=lambda found: found.stat().st_mtime, reverse=True)
    for found in map(RunDir, runs):
        if any(found.rollouts.glob(f"{session}*")) or _served(found, session):
            return found, session
    problem = f"no run below {parent} has a rollout or a served session {session!r}"
    raise UserError(problem, where=WHERE, fix="give --run RUN, or <run>/rollouts/<session>")


def _served(run: RunDir, session: str) -> bool:
    """Whether a program talked to `run` without a rollout (`forge-ray serve`), in a session of that name or beginning."""
    if run.rollouts.is_dir() and any(run.rollouts.iterdir()):
        return False  # every session is a rollout there, and its log may be long
    from forge_ray.trajectories.call_log import CallLogReader

    reader = CallLogReader(run.calls)
    reader.refresh()
    return any(name.startswith(session) for name in reader.sessions())


def _run(root: Path) -> RunDir:
    if not (root / "config.yaml").is_file():
        raise UserError(f"{root} is no run directory (no config.yaml in it)", where="--run", fix="give <runs>/<name>")
    return RunDir(root)


def _one(name: str, sessions: list[str], run: RunDir) -> str:
    found = [name] if name in sessions else [session for session in sessions if session.startswith(name)]
    if len(found) == 1:
        return found[0]
    some = ", ".join((found or sessions)[:SHOWN]) + (", …" if len(found or sessions) > SHOWN else "")
    if found:
        problem = f"{len(found)} sessions begin with {name!r}" if name else f"{run.root} has {len(found)} sessions"
        raise UserError(f"{problem}: {some}", where=WHERE, fix="give one of them: forge-ray replay SESSION --run RUN")
    if not sessions:
        raise UserError(f"{run.root} has no recorded call", where=WHERE, fix="wait for the first, or give another run")
    raise UserError(f"{run.root} has no session {name!r}; it has {some}", where=WHERE, fix="give one of them")
