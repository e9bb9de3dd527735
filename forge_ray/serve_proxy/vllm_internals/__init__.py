"""Everything that touches vLLM's internals, so that an upgrade of vLLM touches one package. Written against vLLM 0.32.

- `parse_arguments`, `make_engine` and `make_app` make vLLM's own API server app over an engine of ours.
- `Recording` is the mixin that puts the engine tap (`recording.Recorder`) around `generate`. `RecordingLLM` is AsyncLLM with it,
  `ScriptedLLM` an engine without a model that answers from a script.

In the engine's worker process this module is imported as the home of `WorkerExtension`: that registers our weight-transfer backends there
(`file_weights`, `nccl_weights`) and ties the worker's life to the replica's.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Literal, cast

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from forge_ray.config import Config, EvalSampling, Sampling
from forge_ray.errors import ForgeRayError, UserError
from forge_ray.serve_proxy import lifeline, semaphores
from forge_ray.serve_proxy.admission import NotAdmitted
from forge_ray.serve_proxy.arguments import command_line
from forge_ray.serve_proxy.growing_prompts import GrowingPrompts
from forge_ray.serve_proxy.identity import CallContext, current
from forge_ray.serve_proxy.recording import Recorder, forced
from forge_ray.serve_proxy.scripted_engine import load_script
from forge_ray.serve_proxy.vllm_internals import file_weights
from forge_ray.serve_proxy.vllm_internals.parsers import check_parsers
from forge_ray.serve_proxy.vllm_internals.repairs import repair
from forge_ray.serve_proxy.vllm_internals.scripted_client import TASKS, ScriptedClient
from forge_ray.serve_proxy.vllm_internals.tokenizing import reuse_tokens
from forge_ray.serve_proxy.vllm_internals.turns import ServerTurns, media
from forge_ray.serve_proxy.weights import WeightFiles

REFUSALS: tuple[type[BaseException], ...] = (VLLMClientError, GracefulHTTPError)
"""Exceptions that mean that a request was invalid or not admitted, not that the engine failed."""
KEPT = (
    "max_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
    "stream_interval",
    "prompt_logprobs",
    "structured_outputs",
)
"""Fields of the request's sampling parameters that stay: where the output ends, how it is rendered, and the grammar (which is recorded)."""
RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)


BACKENDS = {"file": file_weights.FILE_BACKEND, "nccl": file_weights.NCCL_BACKEND}
"""vLLM's names of what `train.sync.backend` says."""
PauseMode = Literal["keep", "wait", "abort"]


class EngineBroken(ForgeRayError):
    """A weight update failed half-way: the weights are neither the old nor the new ones, and the replica must be replaced."""


def used_parameters(params: SamplingParams, force: dict[str, Any] | None) -> SamplingParams:
    """The parameters to sample with. Whatever is not in `KEPT` takes vLLM's neutral default or the forced value, so a field that a request,
    a model's generation_config or a later vLLM brings along cannot change the distribution unseen."""
    if force is None:
        used = params.clone()
        used.logprobs = max(used.logprobs or 0, 0)
        return used
    kept = {name: getattr(params, name) for name in KEPT}
    # An engine's watermark biases the sampling unless a request says no.
    return SamplingParams(n=1, logprobs=max(params.logprobs or 0, 0), watermarking=False, **kept, **force)


def recorded_parameters(params: SamplingParams) -> dict[str, Any]:
    """The call log's `sampling`: everything that shapes the distribution or the end of the output."""
    return {name: getattr(params, name) for name in RECORDED}


def masked_by_grammar(params: SamplingParams) -> bool:
    return params.structured_outputs is not None and not params.structured_outputs.all_constraints_none()


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


# ---- building ----


def parse_arguments(config: Config, model_dir: str, seed: int = 0) -> Namespace:
    """vLLM's server arguments for the run; `seed` of the sampler, unless the config gives one. Raises `UserError` for an argument that vLLM
    does not know or refuses."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    fixed: dict[str, Any] = {
        "model": model_dir,
        "served_model_name": config.policy.served_name,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{__name__}.{WorkerExtension.__qualname__}",
    }
    gpu = config.proxy.replica_gpus > 0
    default: dict[str, Any] = {
        "weight_transfer_config": {"backend": BACKENDS[config.train.sync.backend]},
        "enforce_eager": not gpu,
        # vLLM's own default would compute a float32 checkpoint in less, and no token would be trained as it was sampled.
        "dtype": config.engine_dtype,
        # Usage numbers say what came from the prefix cache, in the words of each dialect.
        "enable_prompt_tokens_details": True,
        "seed": seed,
        "disable_fastapi_docs": True,
    }
    if config.policy.chat_template:
        default["chat_template"] = config.policy.chat_template
    if "tool_call_parser" in config.policy.server:
        default["enable_auto_tool_choice"] = True
    known = {action.dest for action in parser._actions}
    line = command_line(known, fixed, default, {"policy.engine": config.policy.engine, "policy.server": config.policy.server})

    def refuse(message: str) -> None:
        raise UserError(message, where="policy.engine/policy.server", fix="see vLLM's serve arguments")

    vars(parser)["error"] = refuse
    args = parser.parse_args(line)
    assert args is not None
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise UserError(str(error), where="policy.engine/policy.server", fix="correct the value") from None
    check_parsers(args)
    return args


def make_engine(config: Config, args: Namespace) -> Engine:
    """Start the engine (some seconds: it loads the model) in the running event loop. It must get its `recorder` before it is used."""
    arguments = AsyncEngineArgs.from_cli_args(args)
    try:
        if config.policy.script:
            rules = load_script(config.policy.script)
            scripted: Any = ScriptedLLM  # its abstract methods were filled in above, which a type checker does not see
            engine: Engine = scripted(arguments.create_engine_config(), rules, config.policy.chat_template)
        else:
            lifeline.hold()
            engine = cast(RecordingLLM, RecordingLLM.from_engine_args(arguments))
            semaphores.unname()
    except ValueError as error:  # vLLM's and pydantic's validation of a model or an argument
        raise UserError(str(error), where="policy", fix="correct policy.model or policy.engine") from error
    engine.sampling, engine.eval_sampling = config.policy.sampling, config.policy.eval_sampling
    return engine


async def make_app(engine: Engine, args: Namespace) -> Any:
    """vLLM's API server app (ASGI) over `engine`, which must have its recorder. Any model name in a request is served."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    app = build_app(args, TASKS, engine.model_config)
    client: Any = engine
    await init_app_state(client, app.state, args, TASKS)
    models = app.state.openai_serving_models
    models.is_base_model = models.registry.is_base_model = lambda name: True
    repair(app.state)
    engine.recorder.index.reader = ServerTurns(app.state.openai_serving_chat)
    engine.prompts = reuse_tokens(engine.renderer)
    return app


# ---- in the engine's worker process ----


class WorkerExtension:
    """Named to vLLM as the worker extension, which the worker then is as well; its module is what the worker needs."""

    def abandon_weight_update(self: Any) -> None:
        """The update that was started gets no more weights and no end; the next one may start."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()


lifeline.follow()
