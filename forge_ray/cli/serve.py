"""`forge-ray serve run.yaml`: the recording proxy alone, for any program that is pointed at it."""

from __future__ import annotations

import argparse
import re

from forge_ray.cli.common import config_of
from forge_ray.config import Limits
from forge_ray.errors import UserError

NEEDLESS = ("tasks.", "harness ", "sandbox", "train.")
"""What `check` looks at and serving does without."""
DEFAULT_SESSION = "serve"


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    sessions = list(dict.fromkeys(arguments.session or [DEFAULT_SESSION]))
    for session in sessions:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", session):
            raise UserError(f"{session!r} is no session name", where="--session", fix="use letters, digits, '.', '_' and '-'")
    if not any(override.startswith("proxy.limits") for override in arguments.overrides):
        # They bound a rollout, and would end a session that somebody watches in the midst of it.
        config = config.model_copy(update={"proxy": config.proxy.model_copy(update={"limits": Limits()})})
    from forge_ray.cli.check import require

    require(config, without=NEEDLESS, training=False)
    from forge_ray.job import serving, single

    model = single.checkpoint(config, arguments.checkpoint)
    config, directory = single.side_run(config, "serve")
    try:
        serving.serve(config, directory, model, sessions)
    except KeyboardInterrupt:
        for session in sessions:
            print(f"recorded: forge-ray replay {session} --run {directory.root}")
    return 0
