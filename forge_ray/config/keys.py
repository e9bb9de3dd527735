"""Every key with its documentation, and the nearest known one to a mistake."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

from forge_ray.config.run import Config


def _sections(model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], type[BaseModel]]:
    found: dict[tuple[str, ...], type[BaseModel]] = {prefix: model}
    for name, field in model.model_fields.items():
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found.update(_sections(candidate, (*prefix, name)))
    return found


def known_keys() -> dict[str, str]:
    """Every dotted key with its documentation."""
    keys: dict[str, str] = {}
    for prefix, model in _sections().items():
        for name, field in model.model_fields.items():
            keys[".".join((*prefix, name))] = field.description or ""
    return keys


def nearest(location: tuple[Any, ...]) -> str | None:
    """The known key that an unknown one (its path; list indices are numbers) was most likely meant to be; None if none is like it."""
    keys = known_keys()
    generic = ".".join(str(part) for part in location if not isinstance(part, int))
    wanted = str(location[-1]).replace("-", "_")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == generic.rpartition(".")[0]}
    if wanted in siblings:
        return siblings[wanted]
    if same_name := [key for key in keys if key.rpartition(".")[2] == wanted]:
        return same_name[0]
    close = difflib.get_close_matches(wanted, siblings, n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    anywhere = difflib.get_close_matches(generic, keys, n=1, cutoff=0.8)
    return anywhere[0] if anywhere else None


def first_keys(location: tuple[Any, ...]) -> str:
    """Some keys of the section at `location`."""
    generic = tuple(part for part in location if isinstance(part, str))
    found = list(_sections()[generic].model_fields) if generic in _sections() else []
    return ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
