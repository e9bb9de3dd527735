"""Models as the trainer holds them: a Hugging Face causal language model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the libraries below make of a bad file
        words = " ".join(str(error).split())[-300:] or type(error).__name__
        raise ModelError(f"the model in {directory} cannot be loaded ({words})") from error


def prepare(model: PreTrainedModel, train: Train) -> bool:
    """Set the model up for training; returns whether its rows may be packed."""
    model.train()
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed = train.packing and attention.supports(model.config) is None
    if packed:
        attention.use(model)
    return packed
