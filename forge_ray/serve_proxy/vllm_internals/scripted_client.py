"""The scripted engine: vLLM's front half (validation, stop handling, detokenisation) around tokens from a script."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams

from forge_ray.errors import UserError
from forge_ray.serve_proxy.recording import Recorder
from forge_ray.serve_proxy.scripted_engine import Rule, Script, ScriptedFault, logprob

TASKS = ("generate",)


class ScriptedClient(EngineClient):
    """An engine without a model: tokens from a script, everything else as vLLM does it (validation, stop handling, detokenisation)."""

    recorder: Recorder
    """Of what it is mixed into; its version labels the tokens."""

    def __init__(self, vllm_config: Any, rules: list[Rule], chat_template: str | None) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.tokenizer: Any = self.renderer.get_tokenizer()
        self.script = Script(rules)
        self._turn_mark = self._assistant_mark(chat_template)
        self._aborted: dict[str, asyncio.Event] = {}

    is_running = property(lambda self: True)
    is_stopped = property(lambda self: False)
    errored = property(lambda self: False)
    dead_error = property(lambda self: RuntimeError("the scripted engine does not die"))

    async def get_supported_tasks(self) -> Any:
        return TASKS

    def _assistant_mark(self, chat_template: str | None) -> str:
        """What the chat template writes before each assistant message."""
        options = {"tokenize": False, "chat_template": Path(chat_template).read_text() if chat_template else None}
        messages = [{"role": "user", "content": "x"}]
        bare = self.tokenizer.apply_chat_template(messages, add_generation_prompt=False, **options)
        full = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
        lines = full.removeprefix(bare).strip().splitlines()
        if not full.startswith(bare) or not lines:
            raise UserError("the chat template has no generation prompt, so turns cannot be counted", where="policy.chat_template")
        return lines[0]

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request = self.input_processor.process_inputs(request_id, prompt, sampling_params, supported_tasks=TASKS)
        params = request.sampling_params
        assert params is not None and params.max_tokens is not None
        rule = self.script.answer(self._text(prompt["prompt_token_ids"]), self._turn_mark)
        end = params.eos_token_id if params.eos_token_id is not None else self.tokenizer.eos_token_id
        ids = rule.ids if rule.ids is not None else [*self.tokenizer.encode(rule.say or "", add_special_tokens=False), end]
        detokenizer = IncrementalDetokenizer.from_new_request(self.tokenizer, request)
        delta = params.output_kind == RequestOutputKind.DELTA
        starts: list[tuple[str, int]] = []
        entries: list[dict[int, Logprob]] = []
        aborted = self._aborted[request_id] = asyncio.Event()

        def output(reason: str | None, stop: int | str | None, new: list[int]) -> RequestOutput:
            edges = [start for _, start in starts[1:]] + [len(entries)]
            spans = [WeightVersionSpan(version, start, to) for (version, start), to in zip(starts, edges, strict=True)] if starts else None
            shown = new if delta else list(detokenizer.output_token_ids)
            completion = CompletionOutput(
                index=0,
                text=detokenizer.get_next_output_text(reason is not None, delta),
                token_ids=shown,
                cumulative_logprob=None,
                logprobs=entries[len(entries) - len(shown) :],
                finish_reason=reason,
                stop_reason=stop,
                weight_versions=spans if reason else None,
            )
            return RequestOutput(
                request_id, prompt.get("prompt"), prompt["prompt_token_ids"], None, [completion], reason is not None, num_cached_tokens=0
            )

        try:
            for position, token in enumerate([*ids, None]):
                if rule.fault and position >= min(rule.after, len(ids)):
                    await self._fault(rule, aborted)
                await asyncio.sleep(rule.delay_s)
                if aborted.is_set() or token is None:
                    yield output("abort" if aborted.is_set() else "stop", None, [])
                    return
                if not starts or starts[-1][0] != self.recorder.version:
                    starts.append((self.recorder.version, position))
                entries.append({token: Logprob(logprob(position, token))})
                ends = (not params.ignore_eos and token == params.eos_token_id) or token in (params.stop_token_ids or ())
                stop = detokenizer.update([token], ends) or (token if ends and token != params.eos_token_id else None)
                if ends or stop is not None or position == len(ids) - 1:
                    yield output("stop", stop, [token])
                    return
                if position + 1 >= params.max_tokens:
                    yield output("length", None, [token])
                    return
                if delta:
                    yield output(None, None, [token])
        finally:
            self._aborted.pop(request_id, None)

    def overflows(self, ids: Sequence[int]) -> bool:
        """Whether the script wants this prompt refused as too long."""
        return self.script.overflows(self._text(ids), self._turn_mark)

    def _text(self, ids: Sequence[int]) -> str:
        """A prompt for the script: "" where no rule looks at it, as decoding a long one takes longer than all else that is done here."""
        return self.tokenizer.decode(ids) if self.script.reads_prompts else ""

    async def _fault(self, rule: Rule, aborted: asyncio.Event) -> None:
        if rule.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if rule.fault == "fail":
            raise ScriptedFault("the script says that the engine fails here")
        await aborted.wait()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._aborted:
                self._aborted[name].set()

    async def check_health(self) -> None:
        return None

    async def is_tracing_enabled(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()


async def _not_scripted(self: Any, *_: Any, **__: Any) -> Any:
    raise NotImplementedError("the scripted engine has no such operation")


for _name in list(ScriptedClient.__abstractmethods__):
    setattr(ScriptedClient, _name, _not_scripted)
ScriptedClient.__abstractmethods__ = frozenset()
