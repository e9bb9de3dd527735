"""The engines: what vLLM's app asks, with the engine tap around `generate`.

`Recording` is the mixin that puts the tap (`recording.Recorder`) there. `RecordingLLM` is AsyncLLM with it, `ScriptedLLM` an engine without
a model that answers from a script.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Literal

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from forge_ray.config import EvalSampling, Sampling
from forge_ray.errors import ForgeRayError
from forge_ray.serve_proxy.admission import NotAdmitted
from forge_ray.serve_proxy.growing_prompts import GrowingPrompts
from forge_ray.serve_proxy.identity import CallContext, current
from forge_ray.serve_proxy.recording import Recorder, forced
from forge_ray.serve_proxy.vllm_internals import file_weights
from forge_ray.serve_proxy.vllm_internals.parameters import masked_by_grammar, recorded_parameters, used_parameters
from forge_ray.serve_proxy.vllm_internals.scripted_client import ScriptedClient
from forge_ray.serve_proxy.vllm_internals.turns import media
from forge_ray.serve_proxy.weights import WeightFiles

PauseMode = Literal["keep", "wait", "abort"]


class EngineBroken(ForgeRayError):
    """A weight update failed half-way: the weights are neither the old nor the new ones, and the replica must be replaced."""


class Recording:
    """Mixin in front of an `EngineClient`: every `generate` is a recorded call of the session in `identity.current`."""

    recorder: Recorder
    sampling: Sampling
    eval_sampling: EvalSampling
    prompts: GrowingPrompts | None = None
    """What sessions have tokenised."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        context = current.get()
        if context is None:
            raise VLLMValidationError("this request carries no session")
        if not isinstance(prompt, dict) or "prompt_token_ids" not in prompt:
            raise VLLMValidationError("only prompts of tokens can be recorded")
        if sampling_params.n != 1:
            raise VLLMValidationError("n must be 1", parameter="n", value=sampling_params.n)
        async with aclosing(self._recorded(context, prompt, sampling_params, options)) as outputs:
            async for output in outputs:
                yield output

    async def _recorded(
        self, context: CallContext, prompt: Any, sampling_params: SamplingParams, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = prompt["prompt_token_ids"]
        params = used_parameters(sampling_params, forced(context.purpose, self.sampling, self.eval_sampling))
        asked = params.max_tokens
        try:
            await self.recorder.turn(context)
            place = self.recorder.find(context, ids, media(prompt))
            params.max_tokens, cap = await self.recorder.admit(context, self.prompt_tokens(place.prompt), asked)
            while place.stale:  # what it goes on from was lost while it waited
                place = self.recorder.find(context, ids, media(prompt))
                params.max_tokens, cap = await self.recorder.admit(context, self.prompt_tokens(place.prompt), asked)
        except NotAdmitted as error:  # the edge answers in the words that belong to it
            raise VLLMValidationError(str(error)) from error
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        if place.prompt is not ids:
            prompt = {**prompt, "prompt_token_ids": place.prompt}
            prompt.pop("prompt", None)  # the text of what was rendered
        call = await self.recorder.open(
            context,
            place,
            max_tokens=params.max_tokens,
            cap=cap,
            sampling=recorded_parameters(params),
            masked_by_grammar=masked_by_grammar(params),
        )
        delta = params.output_kind == RequestOutputKind.DELTA
        engine: Any = super()  # the `EngineClient` that this is mixed into
        inner: AsyncGenerator[RequestOutput, None] = engine.generate(prompt, params, call.id, **options)
        # The outer generator is closed first, so the engine request is aborted before the call is recorded as cancelled.
        async with aclosing(inner) as raw, aclosing(self.recorder.follow(call, raw, delta=delta)) as outputs:
            async for output in outputs:
                yield output

    def prompt_tokens(self, ids: Sequence[int]) -> int:
        """How many tokens a prompt takes of the window."""
        return len(ids)

    async def abort_session(self, session: str, timeout_s: float = 30.0) -> int:
        """Turn away the waiting requests of a session, abort its running calls and wait until each has its end event; how many ran."""
        if self.recorder.admission is not None:
            self.recorder.admission.drop(session)
        calls = self.recorder.calls_of(session)
        if calls:
            engine: Any = self
            await engine.abort([call.id for call in calls])
            ends = [asyncio.ensure_future(call.done.wait()) for call in calls]
            _, late = await asyncio.wait(ends, timeout=timeout_s)
            for task in late:
                task.cancel()
        return len(calls)


class RecordingLLM(Recording, AsyncLLM):
    """AsyncLLM with the engine tap and with weight updates under running calls."""

    broken: str | None = None
    _transfer_ready = False
    _transferring = False
    """A transfer has begun, and has not ended."""

    async def update_policy(self, found: WeightFiles, version: str, *, pause: PauseMode = "keep") -> None:
        """Load the weights in `found` as `version`. Running calls are frozen (`keep`), drained (`wait`) or ended (`abort`). The cached keys
        and values of frozen ones are computed anew from the new weights, so a version span says exactly which weights sampled which token.
        The prefix cache starts empty.

        Raises `EngineBroken`; the engine then stays paused and `check_health` fails.
        """
        try:
            await self._pause(pause)
            transfer = self.vllm_config.weight_transfer_config
            if not self._transfer_ready and transfer is not None and transfer.backend == file_weights.FILE_BACKEND:
                await self.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
                self._transfer_ready = True
            if self._transferring:  # it failed half-way: the weights come by file
                await self.collective_rpc("abandon_weight_update")
                self._transferring = False
            await self.start_weight_update()
            await self.update_weights(WeightTransferUpdateRequest(update_info=asdict(found)))
            await self._finish_update(version)
        except BaseException as error:
            self.broken = f"the update to version {version} failed: {error!r}"
            raise EngineBroken(self.broken) from error

    async def transfer(self, step: str, info: dict[str, Any], version: str | None, *, pause: PauseMode = "keep") -> None:
        """One step of vLLM's weight-transfer protocol, for a trainer that sends through one of vLLM's own backends. Untested (needs
        GPUs)."""
        if step == "init":
            await self.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        elif step == "start":
            await self._pause(pause)
            self._transferring = True
            await self.start_weight_update()
        elif step == "update":
            await self.update_weights(WeightTransferUpdateRequest(update_info=info))
        elif step == "finish" and version is not None:
            await self._finish_update(version)
        else:
            raise ValueError(f"{step!r} is no step of a weight transfer")

    async def _pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self.recorder.give_up()
        await self.pause_generation(mode=mode, clear_cache=True)

    async def _finish_update(self, version: str) -> None:
        await self.finish_weight_update(weight_version=version)
        self._transferring = False
        self.recorder.version = version
        await self.resume_generation()

    async def label(self, version: str) -> None:
        """Name the weights that the engine was started with."""
        await self.update_weight_version(version)
        self.recorder.version = version

    async def check_health(self) -> None:
        if self.broken:
            raise EngineBroken(self.broken)
        await super().check_health()


class ScriptedLLM(Recording, ScriptedClient):
    """The scripted engine with the engine tap. A weight update changes its version label and nothing else."""

    async def update_policy(self, found: WeightFiles, version: str, *, pause: PauseMode = "keep") -> None:
        self.recorder.version = version

    async def transfer(self, step: str, info: dict[str, Any], version: str | None, *, pause: PauseMode = "keep") -> None:
        raise NotImplementedError("the scripted engine has no weights")

    async def label(self, version: str) -> None:
        self.recorder.version = version

    def prompt_tokens(self, ids: Sequence[int]) -> int:
        """Above the window where the script says so."""
        return max(len(ids), self.recorder.engine_window + 1) if self.overflows(ids) else len(ids)


Engine = RecordingLLM | ScriptedLLM
