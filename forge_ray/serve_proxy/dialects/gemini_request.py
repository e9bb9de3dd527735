"""From a generateContent request to a chat request, by the published types of `google-genai`.

The types say which fields the API has and of what type they are; a field that none of them knows is left out and named. They are loaded
with this module (some seconds the first time), which nothing imports before the first Gemini request.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from google.genai import types
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from forge_ray.serve_proxy.dialects import gemini_fields
from forge_ray.serve_proxy.dialects.fields import Json, is_set, unsupported
from forge_ray.serve_proxy.dialects.gemini_contents import Invalid, messages
from forge_ray.serve_proxy.dialects.gemini_schema import json_schema
from forge_ray.serve_proxy.dialects.refusal import Refusal


class _Function(types.FunctionDeclaration):
    """Its schemas as they came: the types would refuse keywords that models understand."""

    parameters: Any = None
    response: Any = None


class _Tool(BaseModel):
    """Of a tool only the functions; what else it may hold is hosted."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow")
    function_declarations: list[_Function] | None = None


class _Config(types.GenerationConfig):
    """Its schema as it came, and its thinking config open to new fields."""

    response_schema: Any = None
    thinking_config: dict[str, Any] | None = None


class _Request(BaseModel):
    """Body of generateContent. What is ignored may be of any type."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")
    contents: list[types.Content] = []
    system_instruction: types.Content | None = None
    tools: list[_Tool] | None = None
    tool_config: types.ToolConfig | None = None
    generation_config: _Config | None = None
    cached_content: str | None = None
    safety_settings: Any = None
    labels: Any = None
    store: Any = None
    service_tier: Any = None
    model: Any = None


def chat_request(body: Json, model: str) -> tuple[Json, list[str]] | Refusal:
    """The chat request that asks `model` for what `body` asks for, and what has no effect in it by name (sampling parameters aside)."""
    unknown: dict[str, None] = {}
    plain = _clean(_Request, _system(body), "", unknown)
    try:
        if (refusal := gemini_fields.FIELDS.refuse(plain, None)) is not None:
            return refusal
        request = _Request.model_validate(plain)
        made: Json = {"model": model, "messages": messages(plain.get("systemInstruction"), plain.get("contents") or [])}
        if not plain.get("contents"):
            return Refusal(400, "* GenerateContentRequest.contents: contents is not specified", "contents")
        made |= _config(request.generation_config, plain.get("generationConfig") or {})
        made |= _tools(plain, unknown)
    except Invalid as invalid:
        return invalid.refusal
    except ValidationError as error:
        first = error.errors()[0]
        at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
        return Refusal(400, f"Invalid value at '{at}': {first['msg']}", at)
    except AttributeError:  # the types take the value of an enum for a text
        return Refusal(400, "Invalid value: a name is wanted where something else was given")
    return made, list(dict.fromkeys([*gemini_fields.unheeded(plain), *unknown]))


def _system(body: Json) -> Json:
    """`body` with a system instruction that is text or a list of parts as a content."""
    for name in ("systemInstruction", "system_instruction"):
        value = body.get(name)
        if isinstance(value, str | list):
            parts = [{"text": value}] if isinstance(value, str) else value
            return {**body, name: {"parts": [{"text": part} if isinstance(part, str) else part for part in parts]}}
    return body


def _clean(kind: type[BaseModel], value: Any, where: str, unknown: dict[str, None]) -> Any:
    """`value` with the fields that the type `kind` has, in camel case and without nulls; the names of others go into `unknown`. A single
    object where a list is wanted is a list of it, as the API takes it."""
    if not isinstance(value, dict):
        return value
    fields = _fields(kind)
    cleaned: Json = {}
    for key, item in value.items():
        if key in fields:
            name, inner, many = fields[key]
            if many and isinstance(item, dict):
                item = [item]
            if inner is not None and isinstance(item, dict | list):
                at = f"{where}.{key}" if where else key
                item = [_clean(inner, one, at, unknown) for one in item] if isinstance(item, list) else _clean(inner, item, at, unknown)
            if item is not None:
                cleaned[name] = item
        elif kind.model_config.get("extra") == "allow":
            cleaned[to_camel(key)] = item
        elif is_set(item):
            unknown[f"{where}.{key}" if where else key] = None
    return cleaned


@cache
def _fields(kind: type[BaseModel]) -> dict[str, tuple[str, type[BaseModel] | None, bool]]:
    """Of the fields of a type, by either spelling: the camel case name, the type of the objects in it, whether it is a list."""
    found = {name: (to_camel(name), *_shape(field.annotation)) for name, field in kind.model_fields.items()}
    return found | {described[0]: described for described in found.values()}


def _shape(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if get_origin(annotation) in (Union, UnionType):
        shapes = [_shape(option) for option in get_args(annotation)]
        return next((shape for shape in shapes if shape != (None, False)), (None, False))
    if get_origin(annotation) is list:
        return _shape(get_args(annotation)[0])[0], True
    return (annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None), False


def _config(config: _Config | None, plain: Json) -> Json:
    if config is None:
        return {}
    made: Json = {ours: getattr(config, ours) for ours in gemini_fields.SAMPLING.values() if getattr(config, ours) is not None}
    if "top_k" in made:
        made["top_k"] = int(made["top_k"])
    if config.max_output_tokens is not None:
        if config.max_output_tokens < 1:
            raise Invalid("max_output_tokens must be positive.", "generationConfig.maxOutputTokens")
        made["max_completion_tokens"] = config.max_output_tokens
    if config.stop_sequences:
        made["stop"] = config.stop_sequences
    schema = plain.get("responseJsonSchema")
    schema = json_schema(plain.get("responseSchema")) if schema is None else schema
    if config.response_mime_type not in (None, "text/plain", "application/json", "text/x.enum"):
        raise Invalid("Replies are text, JSON (application/json) or an enum's value (text/x.enum).", "generationConfig.responseMimeType")
    if config.response_mime_type == "text/x.enum":
        if not (isinstance(schema, dict) and isinstance(schema.get("enum"), list)):
            raise Invalid("A response of type text/x.enum needs a schema with an enum.", "generationConfig.responseSchema")
        made["structured_outputs"] = {"choice": [str(value) for value in schema["enum"] if value is not None]}
    elif schema is not None:
        made["response_format"] = {"type": "json_schema", "json_schema": {"name": "response", "schema": schema, "strict": True}}
    elif config.response_mime_type == "application/json":
        made["response_format"] = {"type": "json_object"}
    return made


def _tools(plain: Json, unknown: dict[str, None]) -> Json:
    """`tools` and `tool_choice`. Of several allowed functions only those are offered: chat has no other way to say it."""
    declared = [function for tool in plain.get("tools") or [] for function in tool.get("functionDeclarations") or []]
    calling = (plain.get("toolConfig") or {}).get("functionCallingConfig") or {}
    mode, allowed = str(calling.get("mode") or "AUTO").upper(), calling.get("allowedFunctionNames") or []
    tools = [_function(function) for function in declared]
    if mode != "ANY":
        if allowed:
            unknown["toolConfig.functionCallingConfig.allowedFunctionNames"] = None
        if mode not in ("AUTO", "NONE", "MODE_UNSPECIFIED"):
            unknown["toolConfig.functionCallingConfig.mode"] = None
        return {"tools": tools, "tool_choice": "none" if mode == "NONE" else "auto"} if tools else {}
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        refusal = unsupported(
            "toolConfig.functionCallingConfig.mode", "ANY needs a function declaration; hosted tools do not run here", None
        )
        raise Invalid(refusal.message, refusal.param)
    if missing := [name for name in allowed if name not in names]:
        raise Invalid(f"allowed_function_names holds {missing[0]!r}, which is no declared function.", "toolConfig.functionCallingConfig")
    if len(set(allowed)) == 1:
        return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": allowed[0]}}}
    chosen = [tool for tool in tools if not allowed or tool["function"]["name"] in allowed]
    return {"tools": chosen, "tool_choice": "required"}


def _function(declared: Json) -> Json:
    if not isinstance(declared.get("name"), str) or not declared["name"]:
        raise Invalid("A function declaration has no name.", "tools.functionDeclarations.name")
    schema = declared.get("parametersJsonSchema")
    schema = json_schema(declared.get("parameters")) if schema is None else schema
    if schema is not None and not isinstance(schema, dict):
        raise Invalid(f"The parameters of {declared['name']} are no schema.", "tools.functionDeclarations.parameters")
    function = {
        "name": declared["name"],
        "description": declared.get("description") or "",
        "parameters": schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
