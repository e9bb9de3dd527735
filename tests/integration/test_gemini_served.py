"""The Gemini dialect through Ray Serve with the real engine on the tiny model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.integration.conftest import LONG_TEXT, Served

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_streamed_and_not_with_real_usage(served: Served, http: httpx.Client) -> None:
    session, base = served.session("gemini")
    body: dict[str, Any] = {
        "contents": [{"role": "user", "parts": [{"text": LONG_TEXT}]}],
        "generationConfig": {"maxOutputTokens": 8, "temperature": 0.1, "topK": 1},
    }
    usages = []
    for method in ("generateContent", "streamGenerateContent?alt=sse"):
        answer = http.post(f"{base}/v1beta/models/policy:{method}", json=body, headers={"x-goog-api-key": "dummy"})
        assert answer.status_code == 200, answer.text
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")] or [answer.json()]
        usages.append(chunks[-1]["usageMetadata"])
    await served.client.close_session(session)  # waits for what is written once a reply is over
    one, two = served.calls(session)
    for call, usage in zip((one, two), usages, strict=True):
        assert (call.dialect, call.status, call.reply) in (("gemini", "length", "length"), ("gemini", "finished", "answer"))
        assert usage["promptTokenCount"] == len(call.prompt_ids) and usage["candidatesTokenCount"] == len(call.ids) <= 8
        assert call.sampling["temperature"] == 1.0 and call.delivered and call.usage == usage
        assert {"generationConfig.temperature", "generationConfig.topK"} <= set(call.ignored)
    # The second prompt was in the prefix cache, whole blocks of it.
    assert 0 < usages[1]["cachedContentTokenCount"] <= len(two.prompt_ids)
