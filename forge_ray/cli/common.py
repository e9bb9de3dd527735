"""What several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_ray.config import Config, load

DEFAULT_RUNS = Config.model_fields["runs"].default
"""Where runs are if the config does not say."""


def config_of(arguments: argparse.Namespace) -> Config:
    """The config that `arguments.config` names: a YAML file, or the directory of a run."""
    return load(config_file(arguments), arguments.overrides)


def config_file(arguments: argparse.Namespace) -> Path:
    """The YAML file that `arguments.config` names."""
    path = run_directory(arguments.config)
    return path / "config.yaml" if path.is_dir() else Path(arguments.config)


def run_directory(where: str) -> Path:
    """What a person means by RUN: a path from here, or the name of a run in `~/forge-ray-runs`. It may not be there."""
    path, named = Path(where).expanduser(), Path(DEFAULT_RUNS).expanduser() / where
    return named if not path.exists() and named.is_dir() else path
