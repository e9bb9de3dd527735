"""vLLM's own API server app over an engine of ours: its arguments, the engine, the app."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, cast

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.serve_proxy import lifeline, semaphores
from forge_ray.serve_proxy.arguments import command_line, given
from forge_ray.serve_proxy.scripted_engine import load_script
from forge_ray.serve_proxy.vllm_internals import file_weights
from forge_ray.serve_proxy.vllm_internals.engines import Engine, RecordingLLM, ScriptedLLM
from forge_ray.serve_proxy.vllm_internals.parsers import check_parsers
from forge_ray.serve_proxy.vllm_internals.repairs import repair
from forge_ray.serve_proxy.vllm_internals.scripted_client import TASKS
from forge_ray.serve_proxy.vllm_internals.tokenizing import reuse_tokens
from forge_ray.serve_proxy.vllm_internals.turns import ServerTurns

REFUSALS: tuple[type[BaseException], ...] = (VLLMClientError, GracefulHTTPError)
"""Exceptions that mean that a request was invalid or not admitted, not that the engine failed."""
BACKENDS = {"file": file_weights.FILE_BACKEND, "nccl": file_weights.NCCL_BACKEND}
"""vLLM's names of what `train.sync.backend` says."""
WORKER_EXTENSION = f"{__package__}.worker.WorkerExtension"


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
        "worker_extension_cls": WORKER_EXTENSION,
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
    line = command_line(known, fixed, default, given(config.policy))

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
