"""Adapters (`train.lora`), by peft: put into a model, taken out again, written and read.

The adapted layers stay inside the Hugging Face model, whose forward pass, head and config are used as before. The base weights never
change: with the adapters off (`without`) the model is the policy as it was before the first step, the reference of the KL term. Adapters
are written in peft's own form; the names in a published file are `<module>.lora_A` and `<module>.lora_B`, its metadata has the scale.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ray.config import Lora
from forge_ray.errors import UserError

WHERE = "train.lora.targets"
ADAPTER = "default"
"""peft's name for the one adapter of a policy."""
PREFIX = "base_model.model."
"""What peft puts before the names of the model's own parameters."""
BASE = ".base.safetensors"
"""Among a run's published weights: the model that the adapters are added to. Hidden, so that it does not age with the others."""


def attach(model: Any, config: Lora, saved: Path | None = None) -> Any:
    """Put adapters into `model`, new ones or those in `saved`; only they require gradients afterwards. Returns peft's model around it."""
    import peft

    if saved is not None:
        return peft.PeftModel.from_pretrained(model, str(saved), adapter_name=ADAPTER, is_trainable=True)
    targets: Any = "all-linear" if config.targets == ["all-linear"] else config.targets
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rank_stabilized,
        target_modules=targets,
        lora_dropout=0.0,  # the engine has none: its log-probabilities would be of another policy
    )
    fix = f"write all-linear, or some of {', '.join(_linear(model))}"
    if targets != "all-linear" and (problem := _unfit(model, targets)) is not None:
        raise UserError(problem, where=WHERE, fix=fix)
    try:
        return peft.get_peft_model(model, settings, adapter_name=ADAPTER)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())[:300], where=WHERE, fix=fix) from error


def _linear(model: Any) -> list[str]:
    """Ends of the names of the model's linear layers but for the output head."""
    head = model.get_output_embeddings()
    found = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in found})


def _unfit(model: Any, targets: list[str]) -> str | None:
    """Which of the targets has no layer (peft asks for one that has), or one that no replica adds adapters to; None if all are well."""
    for target in targets:
        named = [module for name, module in model.named_modules() if name == target or name.endswith(f".{target}")]
        if not named:
            return f"no layer of the model is called {target!r}"
        if not all(isinstance(module, torch.nn.Linear) for module in named):
            return f"{target} is no linear layer"
        if model.config.get_text_config().tie_word_embeddings and any(module is model.get_output_embeddings() for module in named):
            return f"{target} shares its weight with the embeddings"
    return None


def layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name in the model and module of every adapted layer."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


@contextmanager
def without(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block the model is its base."""
    adapted = [module for _, module in layers(model)]
    for module in adapted:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)


def save(peft_model: Any, tensors: dict[str, Tensor], directory: Path) -> None:
    """Write the adapters, `tensors` by the names of the model's own parameters, in peft's form."""
    peft_model.save_pretrained(str(directory), state_dict={f"{PREFIX}{name}": value for name, value in tensors.items()})
    (directory / "README.md").unlink(missing_ok=True)  # peft's empty model card


def published(model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and metadata of the file that is sent to the replicas, of the trained parameters by their names in the model."""
    scales = {name: str(module.scaling[ADAPTER]) for name, module in layers(model)}
    named = {
        name.replace(f".{ADAPTER}.weight", ""): value.detach().to("cpu", torch.float32, copy=True).contiguous() for name, value in tensors
    }
    return named, {"lora": "1", **{f"scale:{name}": scale for name, scale in scales.items()}}


def merged(base: Path, adapter: Path) -> Any:
    """The model in `base` with the adapters in `adapter` added into its weights, in float32."""
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()
    # peft imports DeepSpeed where it is installed, which warns that this machine has no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    import peft

    from forge_ray.train_loop.models import load

    return peft.PeftModel.from_pretrained(load(base), str(adapter)).merge_and_unload()
