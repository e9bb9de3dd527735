"""`forge-ray ablate run.yaml --over credit.scope=all,outermost,last --seeds 5`: one table of what a setting changes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from forge_ray.cli.common import config_file, config_of
from forge_ray.config import load
from forge_ray.errors import UserError
from forge_ray.run_dir import write_atomic, write_json


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds} is no number of seeds", where="--seeds", fix="give at least 1")
    from forge_ray.study import ablation
    from forge_ray.study.cells import Study

    found = ablation.settings(arguments.over)
    for setting in found:  # a wrong value is said before the first run, not after hours
        load(config_file(arguments), [*arguments.overrides, *setting.overrides])
    from forge_ray.cli.check import require

    require(config)
    seeds = range(config.seed, config.seed + arguments.seeds)
    root = Path(config.runs) / f"{config.name}-ablate"
    study = Study(root, str(config_file(arguments).resolve()), arguments.overrides, lambda line: print(line, flush=True))
    study.open(config, {"over": arguments.over})
    print(f"study: {root}, {len(found)} settings × {len(seeds)} seeds", flush=True)
    study.run(setting.cell(seed) for seed in seeds for setting in found)
    rows = ablation.read(root, found, seeds)
    lines = ablation.table(rows, seeds)
    write_atomic(root / "table.md", "\n".join(lines) + "\n")
    write_json(root / "table.json", {"seeds": list(seeds), "rows": [asdict(row) for row in rows]})
    print("\n".join(lines))
    return 0
