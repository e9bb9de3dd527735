"""Run as a program: what goes wrong in a weight update without our care, measured in an engine of this process. Prints one JSON object.

Each number is the largest |engine − Hugging Face| logprob in nats of 24 sampled tokens after a prompt of more than two cache blocks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from forge_ray.config import Config
from forge_ray.job.rating import Rater
from forge_ray.serve_proxy.vllm_internals.file_weights import FileWeights
from tests.reference import Reference


class Careless(FileWeights):
    """Without the head's own step."""

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)


def rating(engine: LLM, ids: list[int], reference: Reference) -> float:
    """The largest difference of what the engine, as a served teacher, says of `ids`."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponseChoice

    request = CompletionRequest.model_validate(Rater.request("teacher", ids))
    output = engine.generate({"prompt_token_ids": ids}, request.to_sampling_params(1, {}), use_tqdm=False)[0]
    logprobs: Any = output.prompt_logprobs
    choice = CompletionResponseChoice(index=0, text="", finish_reason="length", prompt_logprobs=logprobs)
    config = Config.model_validate(
        {
            "name": "x", "policy": {"model": str(reference.directory)}, "harnesses": [{"name": "react"}], "tasks": {"train": "t"},
            "proxy": {"upstreams": {"teacher": {"url": "http://unused"}}},
            "train": {"loss": {"name": "distillation", "distillation": {"upstream": "teacher"}}},
        }
    )  # fmt: skip
    said = Rater(config, reference.directory).read(json.dumps({"choices": [choice.model_dump(mode="json")]}).encode(), "a rollout", ids)
    return max(abs(float(a) - b) for a, b in zip(said[1:], reference.logprobs(ids[:1], ids[1:], 1.0), strict=True))


def main(model_dir: str, work: str) -> None:
    WeightTransferEngineFactory.register_engine("careless", Careless)
    reference = Reference(model_dir)
    text = reference.tokenizer.apply_chat_template(
        [{"role": "user", "content": "def main(argument):\n" * 60}], add_generation_prompt=True, tokenize=False
    )
    prompt = reference.tokenizer.encode(text, add_special_tokens=False)
    found: dict[str, float] = {"prompt_tokens": len(prompt)}
    versions = {number: reference.changed(number) for number in (1, 2, 3)}
    paths = {number: str(version.save(Path(work) / f"{number}.safetensors")) for number, version in versions.items()}
    for backend in ("careless", "forge_ray_file"):
        engine = LLM(
            model=model_dir, dtype="float32", max_model_len=1024, enforce_eager=True, logprobs_mode="processed_logprobs",
            weight_transfer_config={"backend": backend},
        )  # fmt: skip

        def difference(against: Reference, engine: Any = engine) -> float:
            parameters = SamplingParams(temperature=1.0, max_tokens=24, logprobs=0, ignore_eos=True)
            output = engine.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)[0].outputs[0]
            recorded = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
            expected = against.logprobs(prompt, list(output.token_ids), 1.0)
            return max(abs(a - b) for a, b in zip(recorded, expected, strict=True))

        def update(number: int, engine: Any = engine) -> None:
            engine.start_weight_update()
            engine.update_weights(WeightTransferUpdateRequest(update_info={"path": paths[number]}))
            engine.finish_weight_update()

        found[f"{backend}/before"] = difference(reference)
        found[f"{backend}/rating"] = rating(engine, prompt, reference)
        engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        update(1)
        if backend == "careless":
            engine.reset_prefix_cache()
            found["careless/stale head"] = difference(versions[1])
            engine.llm_engine.engine_core.shutdown()
            continue
        found[f"{backend}/stale prefix cache"] = difference(versions[1])
        engine.reset_prefix_cache()
        for number in (1, 2, 3):
            update(number)
            engine.reset_prefix_cache()
            found[f"{backend}/after {number}"] = difference(versions[number])
        # Adapters, twice: the second must not stand on the first.
        for number in (4, 5):
            merged = reference.adapted(number, path := Path(work) / f"{number}.safetensors")
            engine.start_weight_update()
            base = sorted(str(file) for file in Path(model_dir).glob("*.safetensors"))
            engine.update_weights(WeightTransferUpdateRequest(update_info={"path": str(path), "base": base}))
            engine.finish_weight_update()
            engine.reset_prefix_cache()
            found[f"{backend}/adapters {number}"] = difference(merged)
            found[f"{backend}/not adapted {number}"] = difference(reference)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
