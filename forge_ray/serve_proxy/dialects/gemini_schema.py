"""From the schema form of Gemini's `parameters` and `responseSchema` (OpenAPI 3.0 with upper-case type names) to JSON Schema.

Only what JSON Schema spells differently is changed. Keywords that the form does not have stay as they are: what the program says about its
tool reaches the model.
"""

from __future__ import annotations

from typing import Any

from forge_ray.serve_proxy.dialects.fields import Json

_CAMEL: dict[str, str] = {
    "any_of": "anyOf",
    "prefix_items": "prefixItems",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "additional_properties": "additionalProperties",
    "property_ordering": "propertyOrdering",
}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""64-bit integers, which JSON made from protocol buffers writes as text."""
_ONE = ("items", "additionalProperties", "not")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def json_schema(schema: Any) -> Any:
    """`schema` as JSON Schema; a value that is no object stays. `propertyOrdering` goes into the order of `properties`."""
    if not isinstance(schema, dict):
        return schema
    found: Json = {}
    for name, value in schema.items():
        if value is not None:
            found[_CAMEL.get(name) or name] = value
    order, nullable = found.pop("propertyOrdering", None), found.pop("nullable", None)
    made: Json = {}
    for name, value in found.items():
        if name == "type":
            value = _type(value)
            if value is None:
                continue
        elif name in _ONE:
            value = json_schema(value)
        elif name in _LIST and isinstance(value, list):
            value = [json_schema(item) for item in value]
        elif name in _NAMED and isinstance(value, dict):
            value = {key: json_schema(item) for key, item in value.items()}
        elif name in _COUNTS and isinstance(value, str) and value.isdecimal():
            value = int(value)
        made[name] = value
    if isinstance(order, list) and isinstance(made.get("properties"), dict):
        properties = made["properties"]
        first = {name: properties[name] for name in order if isinstance(name, str) and name in properties}
        made["properties"] = {**first, **properties}
    return _nullable(made) if nullable is True else made


def _type(value: Any) -> Any:
    if isinstance(value, list):
        return [_type(item) for item in value]
    if not isinstance(value, str):
        return value
    return None if value.upper() == "TYPE_UNSPECIFIED" else value.lower()


def _nullable(schema: Json) -> Json:
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
        if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
            schema["enum"] = [*schema["enum"], None]
    elif isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return schema
