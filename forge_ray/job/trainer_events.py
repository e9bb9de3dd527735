"""The trainer's events, in order: all that it posts while it lives, and what is left when it has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from forge_ray.config import Train
from forge_ray.errors import UserError
from forge_ray.job import retention
from forge_ray.job.runtime import RunFailed
from forge_ray.run_dir import RunDir

if TYPE_CHECKING:
    from forge_ray.report.progress import Progress
    from forge_ray.train_loop.trainer import TrainerThread

log = logging.getLogger(__name__)


class TrainerEvents:
    """Follows a trainer. What differs between runs is what becomes of new weights."""

    def __init__(
        self, run: RunDir, train: Train, exchange: Any, trainer: TrainerThread, progress: Progress,
        *, weights: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._run, self._train, self._exchange, self._trainer, self._progress = run, train, exchange, trainer, progress
        self._weights = weights

    async def follow(self) -> None:
        """Until the trainer has ended. Raises `RunFailed` with its words (`UserError` for bad input that only the workers saw),
        `TrainingFailed` where its workers gave up."""
        number, ended = 0, False
        while True:
            events = await self._exchange.events.remote(number, 0.1 if ended else 1.0)
            for event in events:
                number += 1
                await self._handle(event)
            if ended and not events:
                break
            ended = self._trainer.done()
        self._trainer.check()

    async def _handle(self, event: dict[str, Any]) -> None:
        if event["kind"] == "progress":
            self._progress.phase(event["phase"], event["detail"])
        elif event["kind"] == "note":
            log.warning("trainer: %s", event["text"])
            self._progress.note(event["text"])
        elif event["kind"] == "checkpoint":
            await self._exchange.forget_before.remote(event["step"])
            await asyncio.to_thread(retention.prune, self._run, self._train, event["step"])
        elif event["kind"] == "weights":
            await self._weights(event)
        elif event["kind"] == "failed":
            raise UserError(event["error"]) if event.get("input") else RunFailed(event["error"])
        else:
            raise RunFailed(f"unknown trainer event {event['kind']!r}")
