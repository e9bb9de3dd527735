"""Kinds of values, and the base of every section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


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
Variable = Annotated[str, Field(pattern=r"^[^=]+$")]
"""Name of an environment variable."""


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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

    @property
    def function(self) -> tuple[Path, str] | None:
        """`(file, function name)`, or None for a plain path."""
        if self.path in BUILT_IN_SOURCES:
            module, name = BUILT_IN_SOURCES[self.path]
            return Path(__file__).parents[1] / module, name
        file, separator, name = self.path.rpartition(":")
        return (Path(file), name) if separator and file.endswith(".py") else None
