"""Can a model be trained as `train` says? Asked before anything is started, of the model without its weights (torch's meta device).

What only its arithmetic shows, the train workers ask once more when they hold it (`tree/model.py`).
"""

from __future__ import annotations

from pathlib import Path

from forge_ray.config import Train


def needed(train: Train) -> bool:
    """Whether `train` asks for something that not every model can."""
    return train.lora is not None or _tries(train)


def refuse(directory: Path, train: Train) -> None:
    """Raise `UserError` where the model in `directory` has not the layers that adapters are for, or no attention for tree training;
    `ModelError` for what is no model of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from forge_ray.train_loop.models import ModelError, without_dropout

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(without_dropout(AutoConfig.from_pretrained(directory)))
    except Exception as error:  # whatever the libraries below make of a bad config
        words = " ".join(str(error).split())[-300:] or type(error).__name__
        raise ModelError(f"the model in {directory} cannot be made ({words})") from error
    if _tries(train):
        from forge_ray.train_loop.tree import model as tree_model

        tree_model.check_kind(model)
    if train.lora is not None:
        from forge_ray.train_loop import lora

        lora.attach(model, train.lora)


def _tries(train: Train) -> bool:
    return train.builder == "tree" or (train.sft is not None and train.sft.builder == "tree")
