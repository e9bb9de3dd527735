"""The three lists of the Gemini dialect (see `fields.py`), in the API's own camel case; snake case means the same."""

from __future__ import annotations

from typing import Any

from forge_ray.serve_proxy.dialects.fields import FORCED, ONE_REPLY, Fields, Json, given, is_set, more_than_one

UNUSABLE_PARTS = {
    "fileData": "files cannot be fetched: send the data inline",
    "executableCode": "code is not executed here",
    "codeExecutionResult": "code is not executed here",
    "toolCall": "hosted tools do not run here",
    "toolResponse": "hosted tools do not run here",
}
"""Parts that are refused, and why."""

SAMPLING = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "seed": "seed",
}
"""Parameters of `generationConfig` that `policy.sampling` replaces -> their names in chat."""

_CONFIG = "generationConfig."
_HOSTED = "no hosted tool runs here: it is not offered to the model"


def _other_than_text(modalities: Any) -> bool:
    return isinstance(modalities, list) and any(str(name).upper() not in ("TEXT", "MODALITY_UNSPECIFIED") for name in modalities)


FIELDS = Fields(
    honoured={
        "contents": "roles user, model, function, tool; parts text, thought, functionCall, functionResponse, inlineData (images, text)",
        "systemInstruction": "a content of any role, or text",
        "tools": "functionDeclarations, with `parameters` or `parametersJsonSchema`",
        "toolConfig": "",
        "toolConfig.functionCallingConfig": "AUTO, NONE, VALIDATED (as AUTO); ANY, with allowedFunctionNames or without: under a grammar",
        "generationConfig": "",
        "generationConfig.maxOutputTokens": "an upper bound: one above the window is cut to it",
        "generationConfig.stopSequences": "ends the reply; the sampled ids keep the token that completed it",
        "generationConfig.responseMimeType": "text/plain; application/json, text/x.enum: under a grammar, and not trained by default",
        "generationConfig.responseSchema": "as responseMimeType",
        "generationConfig.responseJsonSchema": "as responseMimeType",
        "generationConfig.thinkingConfig.includeThoughts": "false leaves the thought parts out of the reply",
        "model": "the model in the path counts",
        "generateContentRequest": "of countTokens",
    },
    sampling={_CONFIG + name: FORCED for name in SAMPLING},
    ignored={
        "safetySettings": "nothing is filtered",
        "labels": "a note of the client's",
        "store": "nothing is stored for later requests",
        "serviceTier": "there is one tier",
        "toolConfig.retrievalConfig": _HOSTED,
        "toolConfig.includeServerSideToolInvocations": _HOSTED,
        "generationConfig.thinkingConfig.thinkingBudget": "how long the policy thinks is its own choice",
        "generationConfig.thinkingConfig.thinkingLevel": "how long the policy thinks is its own choice",
        "generationConfig.mediaResolution": "the model's own resolution is used",
        "generationConfig.speechConfig": "replies are text",
        "generationConfig.imageConfig": "replies are text",
        "generationConfig.audioTimestamp": "there is no audio",
        "generationConfig.enableAffectiveDialog": "replies are text",
        "generationConfig.enableEnhancedCivicAnswers": "nothing is filtered",
        "generationConfig.routingConfig": "there is one model",
        "generationConfig.modelSelectionConfig": "there is one model",
        **{
            f"tools: {name}": _HOSTED
            for name in (
                "googleSearch",
                "googleSearchRetrieval",
                "codeExecution",
                "urlContext",
                "fileSearch",
                "googleMaps",
                "computerUse",
                "enterpriseWebSearch",
                "retrieval",
                "mcpServers",
            )
        },
        "contents.parts.videoMetadata": "there is no video",
        "contents.parts.mediaResolution": "the model's own resolution is used",
        "contents.parts.partMetadata": "a note of the client's",
        "tools.functionDeclarations.response": "the model is told what a function takes",
        "tools.functionDeclarations.responseJsonSchema": "the model is told what a function takes",
        "tools.functionDeclarations.behavior": "calls are blocking",
    },
    refused={
        "cachedContent": (is_set, "there is no stored content; send the whole history"),
        _CONFIG + "candidateCount": (more_than_one, ONE_REPLY),
        _CONFIG + "responseLogprobs": (is_set, "log-probabilities are recorded, not given out"),
        _CONFIG + "logprobs": (given, "log-probabilities are recorded, not given out"),
        _CONFIG + "responseModalities": (_other_than_text, "replies are text"),
        # Within a list, so it is `gemini_contents` that refuses these, with the place of the part.
        **{f"contents.parts.{name}": (is_set, reason) for name, reason in UNUSABLE_PARTS.items()},
    },
)


def unheeded(body: Json) -> list[str]:
    """Names of what has no effect in a request in the API's own spelling (sampling parameters aside)."""
    names = [name for name in FIELDS.ignored if name.startswith(("generationConfig.", "toolConfig.")) or "." not in name]
    found = [name for name in names if is_set(look(body, name))]
    found += [f"tools: {name}" for tool in body.get("tools") or [] for name in tool if name != "functionDeclarations"]
    parts = [part for content in body.get("contents") or [] for part in content.get("parts") or [] if isinstance(part, dict)]
    found += [f"contents.parts.{name}" for name in _NOTES if any(name in part for part in parts)]
    functions = [function for tool in body.get("tools") or [] for function in tool.get("functionDeclarations") or []]
    found += [f"tools.functionDeclarations.{name}" for name in _REPLIES if any(is_set(function.get(name)) for function in functions)]
    return found


_NOTES = ("videoMetadata", "mediaResolution", "partMetadata")
_REPLIES = ("response", "responseJsonSchema", "behavior")


def look(body: Any, name: str) -> Any:
    """The value at a dotted name, or None."""
    for part in name.split("."):
        body = body.get(part) if isinstance(body, dict) else None
    return body
