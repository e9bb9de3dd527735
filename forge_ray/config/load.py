"""Reading: YAML, overrides, validation, absolute paths; what is wrong becomes one line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge_ray import yaml_file
from forge_ray.config.keys import first_keys, nearest
from forge_ray.config.run import Config
from forge_ray.config.values import BUILT_IN_SOURCES, Section, Source
from forge_ray.errors import UserError
from forge_ray.reference import parse


def load(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read the YAML file at `path`, apply `key.sub=value` overrides, validate, make paths absolute.

    Raises `UserError` with one line that names the file, the section with its line, and the fix.
    """
    node, tree = yaml_file.read(path)
    for override in overrides or []:
        _override(tree, override)
    if (found := yaml_file.unusable(tree)) is not None:
        raise UserError(found[1], where=f"command line: {yaml_file.dotted(found[0])}", fix="correct the value")
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _user_error(error, str(path), node, overrides or []) from None
    if config.tasks.heldout is None:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"before": False, "after": False, "every": 0})})
    return _absolute(config, Path(path).resolve().parent)


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise UserError(f"{override!r} is no override", where="command line", fix="write key.sub=value, for example train.steps=5")
    parsed = yaml_file.value(value)
    *parents, last = key.split(".")
    here: Any = tree
    for part in parents:
        child = _item(here, part, key)
        if isinstance(child, str):  # a source written as a plain path
            child = {"path": child}
        if child is None:
            child = {}
        _set(here, part, child, key)
        here = child
    _set(here, last, parsed, key)


def _item(here: Any, part: str, key: str) -> Any:
    if isinstance(here, list):
        if not part.isdigit() or int(part) >= len(here):
            raise UserError(f"{part!r} is no index of a list of {len(here)}", where=f"command line: {key}", fix="count from 0")
        return here[int(part)]
    if not isinstance(here, dict):
        raise UserError(f"{part!r} is below a plain value", where=f"command line: {key}", fix="shorten the key")
    return here.get(part)


def _set(here: Any, part: str, value: Any, key: str) -> None:
    if isinstance(here, list):
        _item(here, part, key)
        here[int(part)] = value
    elif isinstance(here, dict):
        here[part] = value
    else:
        raise UserError(f"{part!r} is below a plain value", where=f"command line: {key}", fix="shorten the key")


def _user_error(error: ValidationError, path: str, node: Any, overrides: list[str]) -> UserError:
    first = error.errors()[0]
    location = tuple(part for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-")))
    key = ".".join(str(part) for part in (location[:-2] if location[-1:] == ("[key]",) else location))
    line = yaml_file.line(node, location)
    where = f"{path}:{line}" if line else path
    for changed in (override.partition("=")[0] for override in overrides):
        # What is wrong is in what was given there, or below it, or is the whole that it was put into, or is told of it.
        within = changed.removeprefix(f"{key}.") if key else changed
        told = first["type"] == "value_error" and re.search(rf"(?<![\w.]){re.escape(within)}(?!\w)", first["msg"]) is not None
        if told or (key and (key == changed or key.startswith(f"{changed}.") or (changed.startswith(f"{key}.") and not line))):
            where = f"command line: {changed}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        near = nearest(location)
        fix = f"did you mean {near}?" if near else "see docs/configuration.md for every key"
        return UserError(f"unknown key {key}{more}", where=where, fix=fix)
    if first["type"] == "missing":
        return UserError(f"{key} is missing{more}", where=where, fix="add it")
    problem = first["msg"].removeprefix("Value error, ")
    if location and location[-1] == "[key]":
        return UserError(f"unknown name {first['input']} in {key}: {problem}{more}", where=where, fix="correct it")
    if first["type"] == "value_error":  # of a validator of ours, which says what to do; what it was given may be a whole section
        return UserError(f"{key}: {problem}{more}" if location else f"{problem}{more}", where=where)
    if first["type"] == "model_type":
        fix = f"write its keys ({first_keys(location)}), or {{}} for its defaults"
        return UserError(f"{key} = {first['input']!r} is refused: it is a section{more}", where=where, fix=fix)
    # `off`, `no`, `12` and a date are no text to YAML.
    misread = first["type"] == "string_type" and not isinstance(first["input"], (list, dict, type(None)))
    fix = "write it in quotes" if misread else "correct the value"
    return UserError(f"{key} = {first['input']!r} is refused: {problem}{more}", where=where, fix=fix)


def _absolute(config: Config, base: Path) -> Config:
    def path(value: str) -> str:
        expanded = os.path.expandvars(os.path.expanduser(value))
        return os.path.normpath(os.path.join(base, expanded))

    def walk(value: Any) -> Any:
        if isinstance(value, Source):
            if value.path.startswith("builtin:"):
                if value.path not in BUILT_IN_SOURCES:
                    known = ", ".join(BUILT_IN_SOURCES)
                    raise UserError(f"no source {value.path!r}", where="config", fix=f"use one of {known}, a path, or file.py:function")
                return value
            return value.model_copy(update={"path": path(value.path)})
        if isinstance(value, Section):
            return value.model_copy(update={name: walk(getattr(value, name)) for name in type(value).model_fields})
        return value

    config = walk(config)
    updates: dict[str, Any] = {"runs": path(config.runs)}
    if "$" in updates["runs"]:
        raise UserError(f"runs = {config.runs!r} names an unset variable", where="config", fix="export it or write an absolute path")
    files = {name: path(value) for name in ("chat_template", "script") if (value := getattr(config.policy, name))}
    updates["policy"] = config.policy.model_copy(update=files)
    if config.rollouts.reward is not None:
        reference = parse(config.rollouts.reward, base, "rollouts.reward")
        updates["rollouts"] = config.rollouts.model_copy(update={"reward": str(reference)})
    if config.sandbox.directory:
        updates["sandbox"] = config.sandbox.model_copy(update={"directory": path(config.sandbox.directory)})
    if config.store.location and "://" not in config.store.location:
        updates["store"] = config.store.model_copy(update={"location": path(config.store.location)})
    if config.train.offline is not None:
        runs = [run if "://" in run else path(run) for run in config.train.offline.runs]
        offline = config.train.offline.model_copy(update={"runs": runs})
        updates["train"] = config.train.model_copy(update={"offline": offline})
    harnesses = []
    for harness in config.harnesses:
        file, separator, name = harness.name.rpartition(":")
        harnesses.append(harness.model_copy(update={"name": f"{path(file)}:{name}"}) if separator and file.endswith(".py") else harness)
    updates["harnesses"] = harnesses
    return config.model_copy(update=updates)
