"""Gemini's schemas become JSON Schema."""

from __future__ import annotations

from google.genai import types

from forge_ray.serve_proxy.dialects.gemini_schema import json_schema

SCHEMA = {
    "type": "OBJECT",
    "description": "d",
    "properties": {
        "path": {"type": "STRING", "minLength": "1", "format": "uri", "enum": ["a", "b"]},
        "lines": {"type": "ARRAY", "items": {"type": "INTEGER", "minimum": 0}, "maxItems": "3"},
        "what": {"anyOf": [{"type": "STRING"}, {"type": "BOOLEAN"}]},
    },
    "required": ["path"],
}


def test_schemas_become_what_the_library_makes_of_them() -> None:
    theirs = types.Schema.model_validate(SCHEMA).json_schema.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert json_schema(SCHEMA) == theirs


def test_schemas_keep_what_the_form_does_not_know() -> None:
    schema = {
        "type": "OBJECT",
        "$schema": "x",
        "additionalProperties": {"type": "STRING"},
        "property_ordering": ["b", "gone", "a"],
        "properties": {"a": {"type": "STRING", "nullable": True, "enum": ["x"]}, "b": {"any_of": [{"type": "NUMBER"}], "nullable": True}},
    }
    made = json_schema(schema)
    assert made == {
        "type": "object",
        "$schema": "x",
        "additionalProperties": {"type": "string"},
        "properties": {"a": {"type": ["string", "null"], "enum": ["x", None]}, "b": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
    }
    assert list(made["properties"]) == ["b", "a"]
    assert json_schema(json_schema(SCHEMA)) == json_schema(SCHEMA)
