"""Starting a local Ray on a machine that is too busy for it at first, and finding what it has left."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from forge_ray.config import Config
from forge_ray.job import cluster, guard

CONFIG = Config.model_validate(
    {"name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t", "heldout": "h"}}
)


def failing(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> list[str]:
    """`ray.init` raises `errors` one after another, then works; the calls that were made."""
    calls: list[str] = []

    def init(**_: Any) -> Any:
        calls.append("init")
        if errors:
            raise errors.pop(0)
        return SimpleNamespace(address_info={"session_dir": "s"})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    return calls


def test_a_node_that_was_too_slow_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(monkeypatch, [Exception("The current node timed out during startup. This could happen")])
    assert cluster._start(CONFIG, {}).address_info == {"session_dir": "s"}
    assert calls == ["init", "shutdown", "init"]


def test_it_is_not_tried_for_ever_and_not_for_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Exception("The current node timed out during startup.")
    calls = failing(monkeypatch, [slow] * cluster.STARTS)
    with pytest.raises(Exception, match="timed out during startup"):
        cluster._start(CONFIG, {})
    assert calls.count("init") == cluster.STARTS
    calls = failing(monkeypatch, [ValueError("object store too large")])
    with pytest.raises(ValueError, match="object store"):
        cluster._start(CONFIG, {})
    assert calls == ["init"]


def test_a_process_that_closes_files_while_it_is_looked_at_belongs_to_the_session_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readlink, looks = os.readlink, []

    def closing(path: str) -> str:
        looks.append(path)
        if len(looks) == 1:
            raise FileNotFoundError(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", closing)
    with (tmp_path / "log").open("w"):
        assert guard._belongs(f"/proc/{os.getpid()}", b"NO=mark", f"{tmp_path}/")
    assert not guard._belongs(f"/proc/{os.getpid()}", b"NO=mark", f"{tmp_path}/")
