"""Kinds of values, and the base of every section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-6 as text; a person means a number.
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value.strip()):
        return float(value)
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
Proportion = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Beta = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


def matching(pattern: str, meant: str) -> AfterValidator:
    """Refuses text that does not match `pattern` as a whole. The message has `meant`, words in its place: "write …"."""

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"{value!r} is refused; write {meant}")
        return value

    return AfterValidator(check)


Variable = Annotated[str, matching(r"[^=]+", "the name of an environment variable, without =")]
"""Name of an environment variable."""


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any) -> Any:
        # Python takes True for 1, and YAML 1.1 `yes` for True.
        for name, given in value.items() if isinstance(value, Mapping) else ():
            if isinstance(given, bool) and (field := cls.model_fields.get(name)) is not None:
                kinds = _kinds(field.annotation)
                if bool not in kinds and kinds & {int, float}:
                    raise ValueError(f"{name} = {str(given).lower()} is no number")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types that a field may have, at its top."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return set[Any]().union(*(_kinds(one) for one in get_args(annotation)))
    return {annotation}


BUILT_IN_SOURCES = {"builtin:teacher": ("job/teacher.py", "demonstrations")}
"""Sources of this package: name -> file in it, function."""


class Source(Section):
    """A path, or a function of yours that makes what belongs there."""

    path: str
    """A directory or file, or `file.py:function`; relative to the config file."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _plain_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _options_of_something(self) -> Source:
        if self.options and self.function is None:
            raise ValueError(f"options are a function's, and {self.path} is none (file.py:function)")
        return self

    @property
    def function(self) -> tuple[Path, str] | None:
        """`(file, function name)`, or None for a plain path."""
        if self.path in BUILT_IN_SOURCES:
            module, name = BUILT_IN_SOURCES[self.path]
            return Path(__file__).parents[1] / module, name
        file, separator, name = self.path.rpartition(":")
        return (Path(file), name) if separator and file.endswith(".py") else None
