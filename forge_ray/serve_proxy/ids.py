"""Ids of tool calls and items, as they are compared."""

from __future__ import annotations


def plain(name: str) -> str:
    """An id without what some harnesses strip from it."""
    return name.replace("_", "").replace("-", "").replace(".", "")
