"""`forge-ray check run.yaml`: is this config whole, can this machine run it, and what is missing where.

Every finding says what was looked at and, where something is missing, how to get it (`check_config`, `check_machine`). `require` runs the
same findings before any other command starts anything and turns the first that blocks into a `UserError`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from forge_ray.cli import check_config, check_machine
from forge_ray.cli.common import config_of
from forge_ray.cli.finding import Finding
from forge_ray.config import Config
from forge_ray.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    found = list(findings(config))
    if not arguments.quick and all(finding.ok or not finding.blocking for finding in found):
        found += check_config.template(config)
    if arguments.tasks:
        found += check_config.verifiers(config)
    found += check_config.call_log(config)
    width = max(len(finding.topic) for finding in found)
    for finding in found:
        mark = "ok  " if finding.ok else ("MISS" if finding.blocking else "note")
        print(f"{mark}  {finding.topic:<{width}}  {finding.state}{f'; {finding.fix}' if finding.fix and not finding.ok else ''}")
    blocked = [finding for finding in found if not finding.ok and finding.blocking]
    print(f"run directory: {Path(config.runs) / config.name}")
    if blocked:
        more = f" (and {len(blocked) - 1} more, above)" if len(blocked) > 1 else ""
        raise UserError(f"{blocked[0].state}{more}", where=blocked[0].topic, fix=blocked[0].fix)
    return 0


def require(config: Config, *, without: tuple[str, ...] = (), training: bool = True) -> None:
    """Raise `UserError` for the first finding that blocks a run; topics that begin with one of `without` do not matter, nor without
    `training` what the train workers take."""
    for finding in findings(config, training=training):
        if not finding.ok and finding.blocking and not finding.topic.startswith(without):
            raise UserError(finding.state, where=finding.topic, fix=finding.fix)


def findings(config: Config, *, training: bool = True) -> Iterator[Finding]:
    """Everything that is looked at, in the order in which a person would mend it."""
    yield check_machine.packages()
    yield from check_config.sinks(config)
    if training:
        yield from check_config.learner(config)
    yield check_machine.runs(config)
    yield from check_machine.store(config)
    yield from check_config.sources(config)
    yield from check_config.engine(config)
    yield from check_config.harnesses(config)
    yield from check_config.upstreams(config)
    yield check_machine.sandbox(config)
    yield from check_machine.cluster(config, training)
    if not check_machine.joins(config):
        yield check_machine.port(config)
    yield check_machine.memory()
