"""`forge-ray ablate run.yaml --over credit.scope=all,outermost,last --seeds 5`: one table of what a setting changes."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from forge_ray.cli.common import config_file, config_of
from forge_ray.config import load
from forge_ray.errors import UserError
from forge_ray.run_dir import write_json


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds} is no number of seeds", where="--seeds", fix="give at least 1")
    from forge_ray.cli.check import require
    from forge_ray.cli.train import NOT_OFFLINE
    from forge_ray.study import ablation
    from forge_ray.study.study import Study

    began, found = time.monotonic(), ablation.settings(arguments.over)
    # What is wrong with a value is said before the first run, not after hours.
    configs = [load(config_file(arguments), [*arguments.overrides, *setting.overrides]) for setting in found]
    root = Path(config.runs) / f"{config.name}-ablate"
    seeds = range(config.seed, config.seed + arguments.seeds)
    with Study(root, lambda line: print(line, flush=True)) as study:
        study.open(config, {"over": arguments.over, "seeds": list(seeds)}, free=["seed"])
        for one in configs:
            require(one, without=NOT_OFFLINE if one.train.offline is not None else ())
        shared = ", one start for each seed" if ablation.shared_start(config, found) else ""
        print(f"study: {root}, {len(found)} settings × {len(seeds)} seeds{shared}", flush=True)
        study.run(ablation.cells(config, found, seeds))
        rows = ablation.read(root, config, found, seeds)
        write_json(root / "table.json", {"seeds": list(seeds), "rows": [asdict(row) for row in rows]})
        return study.end(ablation.table(rows, seeds), began)
