"""What several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_ray.config import Config, load


def config_of(arguments: argparse.Namespace) -> Config:
    """The config that `arguments.config` names: a YAML file, or the directory of a run."""
    path = Path(arguments.config)
    return load(path / "config.yaml" if path.is_dir() else path, arguments.overrides)
