"""The policy's own server answers a teacher's requests with the teacher's replies, and so records them as it would the policy's own calls.

A rollout is one session, its requests come in the order in which the teacher answered them. The prompt is what the server makes of the
request (any dialect, its tools, its template, and splicing); the reply is what the template writes for the teacher's message, with the end
token. A reply that the template cannot write, or that does not fit the window, is left out and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from forge_ray.config import Config
from forge_ray.serve_proxy.inside import Inside
from forge_ray.serve_proxy.template_writer import Writer
from forge_ray.trajectories.teacher import Demonstration, demonstrations, message, request
from forge_ray.trajectories.upstream import UpstreamCall

logger = logging.getLogger(__name__)


class Dictation:
    """Dictates rollouts, one after the other. `left_out` counts replies by the reason for which they are in no demonstration."""

    def __init__(self, server: Inside, config: Config) -> None:
        template = config.policy.chat_template
        self._server, self._model = server, config.policy.served_name
        self._tokenizer = server.engine.tokenizer
        self._writer = Writer(self._tokenizer, Path(template).read_text() if template else None)
        self._sessions = 0
        self.left_out: Counter[str] = Counter()
        self.replies = 0

    async def rollout(self, calls: Sequence[UpstreamCall]) -> list[Demonstration]:
        """The demonstrations of one rollout's calls, given by their end."""
        self._sessions += 1
        session = f"dictated-{self._sessions}"
        said: dict[str, UpstreamCall] = {}
        for call in calls:
            self.replies += 1
            if reason := await self._dictate(session, call, said):
                self.left_out[reason] += 1
        recorded = self._server.recorded(session)
        found = list(demonstrations(recorded, said))
        self._server.forget(session)
        kept = sum(len(one.turns) for one in found)
        if kept < len(said):
            self.left_out["a side call, or asked again"] += len(said) - kept
        return found

    async def _dictate(self, session: str, call: UpstreamCall, said: dict[str, UpstreamCall]) -> str | None:
        text = self._writer.reply(message(call), tools=bool(call.request.get("tools")))
        if text is None:
            return "the template cannot write it"
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        if ids.count(self._tokenizer.eos_token_id) > 1:
            return "it holds the end token's text"
        self._server.say(ids)
        before = {known.id for known in self._server.recorded(session)}
        answer = await self._server.post(session, call.path, request(call, self._model, self._server.window))
        if answer.status_code != 200:
            logger.warning("%s of %s: %s", call.id, call.session, answer.text[:300])
            overflow = "context" in answer.text
            return "it does not fit the window" if overflow else f"the policy's server refuses the request ({answer.status_code})"
        (made,) = [known for known in self._server.recorded(session) if known.id not in before]
        if made.ids != ids:
            return "it does not fit the window"
        said[made.id] = call
        return None
