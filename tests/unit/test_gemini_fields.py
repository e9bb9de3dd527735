"""Every field of a Gemini request that the lists name is honoured, named as ignored, or refused, as its list says."""

from __future__ import annotations

from typing import Any

import pytest

from forge_ray.serve_proxy.dialects.gemini import Gemini
from forge_ray.serve_proxy.dialects.gemini_fields import FIELDS
from forge_ray.serve_proxy.dialects.gemini_request import chat_request
from forge_ray.serve_proxy.dialects.refusal import Refusal
from tests.unit.gemini_chat import HI, TOOLS, chat, ignored, refused


def sample(name: str) -> dict[str, Any]:
    """A request that has the listed field `name`."""
    if name.startswith("tools: "):
        return {**HI, "tools": [{name[7:]: {}}]}
    if name.startswith("tools.functionDeclarations."):
        return {**HI, "tools": [{"functionDeclarations": [{"name": "f", name.rpartition(".")[2]: VALUES.get(name, {"type": "STRING"})}]}]}
    if name.startswith("contents.parts."):
        return {"contents": [{"parts": [{"text": "hi"}, {"text": "x", name.rpartition(".")[2]: VALUES.get(name, {})}]}]}
    *outer, last = name.split(".")
    value: Any = {last: VALUES.get(name, {"a": "b"})}
    for key in reversed(outer):
        value = {key: value}
    return {**HI, **value}


VALUES: dict[str, Any] = {
    "tools.functionDeclarations.behavior": "BLOCKING",
    "contents.parts.mediaResolution": {"level": "MEDIA_RESOLUTION_LOW"},
    "contents.parts.partMetadata": {"a": 1},
    "toolConfig.retrievalConfig": {"languageCode": "en"},
    "toolConfig.includeServerSideToolInvocations": True,
    "generationConfig.thinkingConfig.thinkingBudget": 5,
    "generationConfig.thinkingConfig.thinkingLevel": "LOW",
    "generationConfig.thinkingConfig.includeThoughts": False,
    "generationConfig.mediaResolution": "MEDIA_RESOLUTION_LOW",
    "generationConfig.speechConfig": {"languageCode": "en"},
    "generationConfig.imageConfig": {"aspectRatio": "1:1"},
    "generationConfig.audioTimestamp": True,
    "generationConfig.enableAffectiveDialog": True,
    "generationConfig.enableEnhancedCivicAnswers": True,
    "generationConfig.routingConfig": {"autoMode": {}},
    "generationConfig.modelSelectionConfig": {"featureSelectionPreference": "BALANCED"},
    "generationConfig.maxOutputTokens": 5,
    "generationConfig.stopSequences": ["x"],
    "generationConfig.responseMimeType": "application/json",
    "generationConfig.responseSchema": {"type": "STRING"},
    "generationConfig.responseJsonSchema": {"type": "string"},
    "generationConfig.responseModalities": ["AUDIO"],
    "generationConfig.candidateCount": 2,
    "generationConfig.responseLogprobs": True,
    "generationConfig.logprobs": 1,
    "toolConfig.functionCallingConfig": {"mode": "NONE"},
    "toolConfig": {},
    "tools": TOOLS,
    "contents": HI["contents"],
    "systemInstruction": "x",
    "generationConfig": {},
    "cachedContent": "x",
    "model": "models/x",
    **{f"generationConfig.{name}": 1 for name in ("temperature", "topP", "topK", "presencePenalty", "frequencyPenalty", "seed")},
}


@pytest.mark.parametrize("name", [*FIELDS.ignored, *FIELDS.sampling])
def test_each_ignored_field_is_named(name: str) -> None:
    made = chat_request(sample(name), "policy")
    assert not isinstance(made, Refusal), made
    assert [*made[1], *Gemini().unheeded(made[0], forced=True)] == [name]
    assert Gemini().unheeded(made[0], forced=False) == []


@pytest.mark.parametrize("name", [name for name in FIELDS.honoured if name != "generateContentRequest"])
def test_no_honoured_field_is_named(name: str) -> None:
    assert ignored(sample(name)) == []


@pytest.mark.parametrize("name", list(FIELDS.refused))
def test_each_refused_field_is_named(name: str) -> None:
    assert refused(sample(name)).param in (name, f"contents[0].parts[1].{name.rpartition('.')[2]}")


def test_no_field_is_in_two_lists() -> None:
    listed = [*FIELDS.honoured, *FIELDS.ignored, *FIELDS.sampling, *FIELDS.refused]
    assert len(listed) == len(set(listed))


def test_the_lists() -> None:
    config = {
        "mediaResolution": "MEDIA_RESOLUTION_LOW",
        "thinkingConfig": {"thinkingLevel": "HIGH", "includeThoughts": False, "aNewOne": 1},
        "someNewField": 1,
    }
    body = {
        **HI,
        "safetySettings": [{"category": "HARM_NEW", "threshold": "OFF"}],
        "labels": {"a": "b"},
        "generationConfig": config,
        "newer": 1,
    }
    assert sorted(ignored(body)) == [
        "generationConfig.mediaResolution",
        "generationConfig.someNewField",
        "generationConfig.thinkingConfig.thinkingLevel",
        "labels",
        "newer",
        "safetySettings",
    ]
    part = {"contents": [{"parts": [{"text": "a", "odd": 1}, {"text": "b", "odd": 2}]}]}
    assert ignored(part) == ["contents.parts.odd"]
    assert Gemini().unheeded(chat({**HI, "generationConfig": {"topP": 0.5, "seed": 3, "stopSequences": ["x"]}}), forced=True) == [
        "generationConfig.topP",
        "generationConfig.seed",
    ]
