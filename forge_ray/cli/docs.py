"""`python -m forge_ray.cli.docs [--check]`: writes the pages of `docs/` that are made from the code, `PAGES` below.

Every key of the config with type, default and the text below its field; every outcome with its text and what the presets do with it; what
the proxy does with each field of a request; each harness with its program and its options. A test compares the files with what this makes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import forge_ray.config
from forge_ray import outcome
from forge_ray.cli import harness_docs, rollout_docs
from forge_ray.cli.dialect_docs import dialect_pages
from forge_ray.config import Config
from forge_ray.outcome import PRESETS, Outcome, Treatment
from forge_ray.run_dir import write_atomic

_GENERATED = "<!-- Made by `make docs` from {source}. Change it there. -->\n"


def type_name(annotation: Any) -> str:
    """A type as a person writes its values in YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin is dict:
        return f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if origin in (list, tuple):
        names = [type_name(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {names[0]}" if origin is list else f"list [{', '.join(names)}]"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "nothing", Any: "anything"}
    if annotation in (Outcome, Treatment):
        return annotation.__name__.lower()
    if annotation in names:
        return names[annotation]
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation.__name__.lower()
    raise TypeError(f"no name for the type {annotation!r}")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, in whatever wrapping."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _model_in(argument))), None)


def _bounds(metadata: Sequence[Any]) -> str:
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
    found = [f"{sign} {getattr(item, name)}" for item in metadata for name, sign in signs if getattr(item, name, None) is not None]
    return ", " + ", ".join(found) if found else ""


def _all_metadata(annotation: Any) -> list[Any]:
    """Constraints of an annotation at any depth: `Annotated[int, Field(ge=1)] | None` hides them below the union."""
    found: list[Any] = []
    if get_origin(annotation) is Annotated:
        for item in get_args(annotation)[1:]:
            found += [item, *getattr(item, "metadata", ())]
    elif get_origin(annotation) in (Union, types.UnionType):
        for argument in get_args(annotation):
            found += _all_metadata(argument)
    return found


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "**required**"
    if value is None:
        return "nothing"
    text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True).strip().removesuffix("\n...")
    return f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None and inner.__name__ != "Source":
            index = {list: "[]", dict: ".<name>"}.get(get_origin(field.annotation), "")
            yield from _sections(inner, f"{prefix}{name}{index}.")


def configuration() -> str:
    """docs/configuration.md"""
    intro = [paragraph for paragraph in inspect.cleandoc(forge_ray.config.__doc__ or "").split("\n\n") if paragraph]
    lines = ["# Configuration", "", _GENERATED.format(source="`forge_ray/config/`"), *("\n\n".join(intro).split("\n")), ""]
    lines += [
        "Single keys are changed on the command line, list items by their index (a path is the config file's there too):",
        "`forge-ray train run.yaml train.steps=5 policy.engine.max_model_len=4096 harnesses.0.options.output_chars=200`.",
        "`forge-ray check run.yaml` validates a file and says what the machine lacks.",
    ]
    for prefix, model in _sections(Config):
        title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
        document = inspect.cleandoc(model.__doc__ or "")
        lines += ["", f"## {title}", "", *([document, ""] if document else []), "| key | value | default | |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            inner = _model_in(field.annotation)
            if inner is not None and inner.__name__ != "Source":
                kinds = {list: "list of sections", dict: "mapping of names to sections"}
                kind, default = kinds.get(get_origin(field.annotation), "section"), "see below"
                if field.is_required():
                    default = "**required**"
                elif field.default is None:
                    default = "nothing"
            else:
                kind = type_name(field.annotation) + _bounds([*field.metadata, *_all_metadata(field.annotation)])
                default = _default(field.default)
            lines.append(f"| `{prefix}{name}` | {_cell(kind)} | {_cell(default)} | {_cell(field.description or '')} |")
    return "\n".join(lines) + "\n"


def _member_texts() -> dict[str, str]:
    """The text below each member of `Outcome` and `Treatment`, by `Class.MEMBER`."""
    texts: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(outcome)).body:
        if isinstance(node, ast.ClassDef):
            for statement, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and isinstance(after, ast.Expr):
                    texts[f"{node.name}.{statement.targets[0].id}"] = str(ast.literal_eval(after.value))
    return texts


def outcomes() -> str:
    """docs/outcomes.md"""
    texts = _member_texts()
    document = re.sub(r"\s*\n\s*", " ", inspect.cleandoc(outcome.__doc__ or "").split("\n\n", 1)[1])
    names = list(PRESETS)
    lines = ["# How a rollout can end", "", _GENERATED.format(source="`forge_ray/outcome.py`"), document, ""]
    lines += ["| outcome | | reward | " + " | ".join(f"`preset: {name}`" for name in names) + " |", "|---|---|---|" + "---|" * len(names)]
    for member in Outcome:
        treatments = " | ".join(f"`{PRESETS[name][member]}`" for name in names)
        rated = "yes" if member in outcome.RATED else "never"
        lines.append(f"| `{member}` | {_cell(texts[f'Outcome.{member.name}'])} | {rated} | {treatments} |")
    lines += ["", "| treatment | |", "|---|---|"]
    lines += [f"| `{member}` | {_cell(texts[f'Treatment.{member.name}'])} |" for member in Treatment]
    lines += [
        "",
        "`preset: paper` does what OpenForgeRL (arXiv 2607.21557) does, which also discards rollouts that ran out of time. The default",
        "keeps them as `truncated`, with the reward that the verifier gives: always dropping them would teach the policy to hang.",
        "`rollouts.on_outcome` changes single classes: `rollouts.on_outcome.truncated=drop`.",
        "",
        "What became of the rollouts is counted: `treatments` of each step and of the summary has the rollouts by treatment (a `retry`",
        "with no attempt left counts as `drop`), `empty_groups` the groups that were dropped or shrank away, `unused_rollouts` the",
        "rollouts that were fit to be trained and were not, because their group was dropped, shrank, grew stale or was replaced.",
        "",
        "What a policy costs, with 5 % of the attempts ended by infrastructure and groups of 8 (`make bench-failures`: the real",
        "scheduler, a seed, 40,000 attempts), as the share of all started rollouts that no step trains: `retry` 0.052, `drop` 0.051 (a",
        "third of the groups are then short of a rollout), `drop_group` 0.34.",
    ]
    return "\n".join(lines) + "\n"


PAGES = {
    "configuration.md": configuration,
    "outcomes.md": outcomes,
    "dialects.md": dialect_pages,
    "harnesses.md": harness_docs.page,
    "rollouts.md": rollout_docs.page,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m forge_ray.cli.docs", description="Write the generated pages of docs/.")
    parser.add_argument("--directory", type=Path, default=Path("docs"))
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    given = parser.parse_args(arguments)
    stale = 0
    for name, make in PAGES.items():
        path, text = given.directory / name, make()
        if path.is_file() and path.read_text() == text:
            continue
        stale += 1
        print(f"{path}: {'out of date; run make docs' if given.check else 'written'}")
        if not given.check:
            write_atomic(path, text)
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
