"""What several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_ray.config import Config, load


def config_of(arguments: argparse.Namespace) -> Config:
    """The config that `arguments.config` names: a YAML file, or the directory of a run."""
    return load(config_file(arguments), arguments.overrides)


def config_file(arguments: argparse.Namespace) -> Path:
    """The YAML file that `arguments.config` names."""
    path = Path(arguments.config)
    return path / "config.yaml" if path.is_dir() else path
