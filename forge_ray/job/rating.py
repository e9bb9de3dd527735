"""A served teacher rates groups: what `train.loss.distillation.upstream` names is asked for the log-probabilities of the sampled tokens.

    POST <url>/completions  {"prompt": [token id …], "max_tokens": 1, "prompt_logprobs": 0}      (vLLM's)

What answers must show that it rated these very tokens: the reply names the id of each, and what it takes them to spell is compared with the
policy's tokenizer. What is recorded already (`--from-rollouts`) is not asked for again. A server that is away or busy is asked again for
`PATIENCE_S` seconds; one that refuses stops the run, which goes on from there with `--resume`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job.runtime import RunFailed
from forge_ray.serve_proxy.upstream_routes import Keys, Targets

if TYPE_CHECKING:
    from forge_ray.trajectories.batch import Group
    from forge_ray.trajectories.ratings import Asked, Rating
    from forge_ray.trajectories.store.location import Location

AT_ONCE = 16
"""Sequences that the server is asked about at a time."""
PATIENCE_S = 600.0
"""Longest time without an answer."""
WAIT_S = 1.0
"""Before the server is asked again, the first time; then twice as long each time, at most half a minute."""
ALIKE = 0.9
"""Least share of tokens that spell the same on both sides. A few may not: servers print some special tokens otherwise."""
WHERE = "train.loss.distillation.upstream"


class Rater:
    """The teacher of a run. `model`: the policy's directory."""

    def __init__(self, config: Config, model: Path) -> None:
        """Raises `UserError` where the key is not in the environment, or the policy's tokenizer is in no `tokenizer.json`."""
        settings = config.train.loss.distillation
        assert settings is not None and settings.upstream is not None
        self.name = settings.upstream
        key = config.upstream(self.name)
        assert key is not None
        own = config.proxy.model_copy(update={"upstreams": {key: config.proxy.upstreams[key]}})
        target = Targets(alone := config.model_copy(update={"proxy": own}), Keys.of(alone)).find(self.name)
        assert target is not None
        self._config, self._target = config, target
        self.model = target.settings.model or self.name
        """Its name at its server."""
        self._tokenizer = _tokenizer(model)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._client: httpx.AsyncClient | None = None

    async def rate(self, group: Group, known: Mapping[tuple[str, str], Rating] | None = None) -> list[Rating]:
        """The ratings of a group's trained calls; `known`: those that are recorded, by rollout and call id.

        Raises `RunFailed`, and `UserError` for a teacher that cannot rate these tokens."""
        from forge_ray.trajectories import ratings

        asked = await asyncio.to_thread(ratings.sequences, group, self._config.train, known or {})
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=httpx.Timeout(self._target.settings.timeout_s, connect=30))
        answers = await asyncio.gather(*(self._ask(sequence) for sequence in asked))
        found = dict(known or {})
        for sequence, logprobs in zip(asked, answers, strict=True):
            found |= {(rating.rollout, rating.call): rating for rating in sequence.ratings(logprobs)}
        return list(found.values())

    async def close(self) -> None:
        """Let go of the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _ask(self, asked: Asked) -> np.ndarray:
        """float32, (T,): the teacher's log-probability of each token, 0 at the first."""
        assert self._client is not None
        url, headers = self._target.url("completions", ""), self._target.headers({}, "completions")
        ids = asked.ids.tolist()
        async with self._places:
            began, wait = time.monotonic(), WAIT_S
            while True:
                try:
                    reply = await self._client.post(url, headers=headers, json=self.request(self.model, ids))
                    problem = f"status {reply.status_code}: {self._text(reply)}"
                except httpx.HTTPError as error:
                    reply, problem = None, str(error) or type(error).__name__
                if reply is not None and reply.status_code == 200:
                    return await asyncio.to_thread(self.read, reply.content, asked.rollout, ids)
                if reply is not None and reply.status_code < 500 and reply.status_code not in (408, 425, 429):
                    raise RunFailed(f"the teacher {self.name} does not rate rollout {asked.rollout} ({len(ids)} tokens), {problem}")
                if time.monotonic() - began > PATIENCE_S:
                    raise RunFailed(f"the teacher {self.name} at {url} has rated nothing for {PATIENCE_S:.0f} s, {problem}")
                await asyncio.sleep(wait)
                wait = min(2 * wait, 30.0)

    @staticmethod
    def request(model: str, ids: list[int]) -> dict[str, Any]:
        """The body: the prompt's own tokens are rated, and one has to be sampled."""
        return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}

    def read(self, content: bytes, rollout: str, ids: list[int]) -> np.ndarray:
        """float32, (T,): what a reply says of each token, 0 at the first. Raises `UserError` and `RunFailed` where it does not."""
        try:
            places: Any = json.loads(content)["choices"][0]["prompt_logprobs"]
        except (ValueError, LookupError, TypeError):
            places = None
        if not isinstance(places, list) or len(places) != len(ids):
            raise UserError(
                f"{self._target.settings.url} does not rate tokens: its reply has no prompt_logprobs for each of them",
                where=WHERE,
                fix="serve the teacher with vLLM, or give its model directory (teacher)",
            )
        logprobs = np.zeros(len(ids), np.float32)
        compared: dict[int, bool] = {}
        for place, (token, said) in enumerate(zip(ids, places, strict=True)):
            if place == 0:
                continue
            found = said.get(str(token)) if isinstance(said, dict) else None
            entry: dict[str, Any] = found if isinstance(found, dict) else {}
            value = entry.get("logprob")
            if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
                raise RunFailed(f"the teacher {self.name} gives token {token} of rollout {rollout}, place {place}, no log-probability")
            logprobs[place] = value
            if isinstance(text := entry.get("decoded_token"), str) and "\ufffd" not in text and token not in compared:
                compared[token] = text == self._tokenizer.decode([token], skip_special_tokens=False)
        if compared and sum(compared.values()) < ALIKE * len(compared):
            other = next(token for token, same in compared.items() if not same)
            raise UserError(
                f"the model {self.model} has another tokenizer than the policy: token {other} is another text there",
                where=WHERE,
                fix="a teacher must have the policy's tokens",
            )
        return logprobs

    def _text(self, reply: httpx.Response) -> str:
        return " ".join(self._target.without_key(reply.content).decode(errors="replace").split())[:300]


def rater_of(config: Config, model: Path) -> Rater | None:
    """The run's, where its teacher is a served one."""
    settings = config.train.loss.distillation
    return Rater(config, model) if settings is not None and settings.upstream is not None else None


def store_ratings(location: Location, step: int, rater: Rater, rows: list[Rating]) -> None:
    """Put what was said of a step's batch, before the batch. Raises `StoreError`."""
    from forge_ray.trajectories.store import ratings

    ratings.put(location, step, rater.name, rater.model, rows)


def _tokenizer(model: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # the library raises nothing more special
        raise UserError(
            f"{model / 'tokenizer.json'} cannot be read ({error})", where=WHERE, fix="give a model with a tokenizer.json"
        ) from None
