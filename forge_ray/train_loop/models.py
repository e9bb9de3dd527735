"""Models as the trainer holds them: a Hugging Face causal language model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ray.errors import ForgeRayError
from forge_ray.train_loop import attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forge_ray.config import Train


class ModelError(ForgeRayError):
    """A model directory that cannot be loaded; trying again would not help."""


def load(directory: Path) -> PreTrainedModel:
    """The model in `directory`, in float32, on the CPU. Raises `ModelError`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = without_dropout(AutoConfig.from_pretrained(directory))
        return AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the libraries below make of a bad file
        words = " ".join(str(error).split())[-300:] or type(error).__name__
        raise ModelError(f"the model in {directory} cannot be loaded ({words})") from error


def without_dropout(config: Any) -> Any:
    """`config` with every dropout turned off: the engine has none, so with it the log-probabilities would be of another policy than the
    one that sampled."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def prepare(model: PreTrainedModel, train: Train) -> bool:
    """Set the model up for training; returns whether its rows may be packed."""
    model.train()
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return pack(model, train)


def pack(model: PreTrainedModel, train: Train) -> bool:
    """Let the model attend to packed rows, where `train.packing` asks for it and its attention can be cut so; whether it does."""
    packed = train.packing and attention.supports(model.config) is None
    if packed:
        attention.use(model)
    return packed
