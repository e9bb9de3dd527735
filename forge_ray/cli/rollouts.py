"""`forge-ray rollouts ls | show | stats | export | behaviour | rescore`: the stored rollouts of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_ray.report.stored.select import Filter

RUN = "a run's directory or its name, or where a store is (a directory with `rollouts/` in it, s3://…)"
FORMATS = ("chat", "atif", "trl", "verl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The commands below `rollouts`."""
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    texts = {
        "ls": "list rollouts",
        "show": "one rollout: where it came from, what it came to, its calls",
        "stats": "counts, rewards with intervals, calls and tokens by purpose, harness, outcome and task",
        "export": "write rollouts in a format that other programs read",
        "behaviour": "how the policy worked: shell share, tools, self-verification, error recovery; by evaluation and harness",
        "rescore": "judge archived workspaces again, by today's test scripts or another reward function; no model is needed",
    }
    made = {name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".") for name, text in texts.items()}
    for command in made.values():
        command.add_argument("run", metavar="RUN", help=RUN)
    for name in ("ls", "stats", "export", "behaviour", "rescore"):
        command = made[name]
        command.add_argument("--task", metavar="T", help="name of a task, or a pattern: 'sum-*'")
        command.add_argument("--harness", metavar="H", help="name of a harness (of one from a file also its class), or a pattern")
        command.add_argument("--outcome", metavar="O", help="ok, truncated, harness, …: see docs/outcomes.md")
        command.add_argument("--reward", metavar="R", help="a condition: '>=0.5', '<1', 0, none")
        command.add_argument("--step", type=int, metavar="N", help="trained in step N, from 1; of evaluations: made after step N")
        command.add_argument("--purpose", choices=("train", "eval"), help="made for training or for evaluation")
    for name in ("ls", "show", "stats"):
        made[name].add_argument("--json", action="store_true", help="JSON instead of a table: one object a line, with every column")
    made["show"].add_argument("rollout", metavar="ROLLOUT", help="id of a rollout, or its beginning")
    made["show"].add_argument("--tokens", action="store_true", help="its calls token by token, as `forge-ray replay` prints them")
    made["stats"].add_argument(
        "--by", metavar="A,B", help="which tables: of purpose, harness, outcome, task, step (default: the first four)"
    )
    made["rescore"].add_argument("--tasks", metavar="DIR", help="judge by the tasks in DIR, by name (default: each rollout's own)")
    made["rescore"].add_argument("--function", metavar="F", help="a reward function in the place of rollouts.reward: file.py:function")
    made["rescore"].add_argument(
        "--weight", action="append", default=[], metavar="NAME=W", help="a weight; all of them replace rollouts.reward_weights"
    )
    made["rescore"].add_argument("--jobs", type=int, metavar="N", help="sandboxes at a time (default: one per CPU)")
    made["export"].add_argument("--format", required=True, choices=FORMATS, help="see docs/rollouts.md")
    made["export"].add_argument("--out", required=True, metavar="FILE", help="file to write (of atif a directory); must not exist")


def run(arguments: argparse.Namespace) -> int:
    try:
        return ACTIONS[arguments.action](arguments)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _filter(arguments: argparse.Namespace) -> Filter:
    from forge_ray.errors import UserError
    from forge_ray.outcome import Outcome
    from forge_ray.report.stored.select import Filter, bound

    if arguments.outcome is not None and arguments.outcome not in (known := [str(outcome) for outcome in Outcome]):
        raise UserError(f"no outcome {arguments.outcome!r}", where="--outcome", fix=f"it is one of {', '.join(known)}")
    return Filter(
        task=arguments.task,
        harness=arguments.harness,
        outcome=arguments.outcome,
        purpose=arguments.purpose,
        reward=None if arguments.reward is None else bound(arguments.reward),
        step=arguments.step,
    )


def _ls(arguments: argparse.Namespace) -> int:
    from forge_ray.cli.stored_run import stored_run
    from forge_ray.report.stored import listing, select

    found = select.rows(stored_run(arguments.run).reader, _filter(arguments), None if arguments.json else listing.COLUMNS)
    if arguments.json:
        for row in found:
            print(_json(row))
        return 0
    if found:
        _print(listing.table(found))
    print(f"{len(found)} rollout{'s' * (len(found) != 1)}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from forge_ray.cli.stored_run import stored_run
    from forge_ray.report.stored import select, show

    stored = stored_run(arguments.run)
    row = select.one(select.rows(stored.reader), arguments.rollout)
    calls, others = stored.reader.calls(row["rollout"]), stored.reader.upstream(row["rollout"])
    if arguments.json:
        rows = stored.reader.call_rows([row["rollout"]]).to_pylist()
        print(_json(row | {"calls_made": rows, "upstream_calls_made": [dataclasses.asdict(call) for call in others]}))
        return 0
    for line in show.lines(row, calls, stored.run, () if arguments.tokens else others):
        print(line)
    if arguments.tokens:
        from forge_ray.report.replay import replay
        from forge_ray.trajectories import credit

        chosen = credit.assign(calls, stored.config.train.credit) if stored.config is not None else {}
        weights = credit.kind_weights(stored.config.train.credit) if stored.config is not None else {}
        for line in replay(calls, chosen, weights, stored.decode, full=True, upstream=others):
            print(line)
    return 0


def _stats(arguments: argparse.Namespace) -> int:
    from forge_ray.cli.stored_run import stored_run
    from forge_ray.errors import UserError
    from forge_ray.report.stored import select, stats

    columns = [name.strip() for name in arguments.by.split(",")] if arguments.by else stats.BY[:4]
    if unknown := [name for name in columns if name not in stats.BY]:
        raise UserError(f"no column {unknown[0]!r}", where="--by", fix=f"use {', '.join(stats.BY)}")
    found = select.rows(stored_run(arguments.run).reader, _filter(arguments), stats.COLUMNS)
    if arguments.json:
        print(_json({"all": stats.of(found), **{f"by_{name}": stats.by(found, name) for name in columns}}))
        return 0
    _print(stats.table("", {"all": stats.of(found)}))
    for name in columns:
        if found:
            _print(stats.table(name, stats.by(found, name)))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from forge_ray.cli.exports import export

    return export(arguments, _filter(arguments))


def _rescore(arguments: argparse.Namespace) -> int:
    from forge_ray.cli.rescore import rescore

    return rescore(arguments, _filter(arguments))


def _json(value: Any) -> str:
    """One line; NaN and infinities, which JSON has not, as null."""
    from forge_ray.report.metrics import finite

    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def _print(table: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200, soft_wrap=False).print(table)


def _behaviour(arguments: argparse.Namespace) -> int:
    from forge_ray.cli.behaviours import behaviour

    return behaviour(arguments, _filter(arguments))


ACTIONS = {"ls": _ls, "show": _show, "stats": _stats, "export": _export, "behaviour": _behaviour, "rescore": _rescore}
