"""`forge-ray serve run.yaml`: the recording proxy alone, for any program that is pointed at it."""

from __future__ import annotations

import argparse
import re

from forge_ray.cli.common import config_of
from forge_ray.errors import UserError

NEEDLESS = ("tasks.", "harness ", "sandbox", "train.")
"""What `check` looks at and serving does without."""


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", arguments.session):
        raise UserError(f"{arguments.session!r} is no session name", where="--session", fix="use letters, digits, '.', '_' and '-'")
    from forge_ray.cli.check import require

    require(config, without=NEEDLESS, training=False)
    from forge_ray.job import serving, single

    model = single.checkpoint(config, arguments.checkpoint)
    config, directory = single.side_run(config, "serve")
    try:
        serving.serve(config, directory, model, arguments.session)
    except KeyboardInterrupt:
        print(f"recorded: forge-ray replay {arguments.session} --run {directory.root}")
    return 0
