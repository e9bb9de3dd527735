"""A checkpoint as a Hugging Face model directory that plain transformers and vLLM load: no file of ours is needed to use it.

Weights, config, tokenizer, generation config, and the chat template that the policy was trained with, also where the run's config replaced
the model's own. Adapters are added into the base's weights, or stay adapters in peft's form. The directory is written under a hidden name
and renamed when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from forge_ray.errors import UserError
from forge_ray.run_dir import RunDir
from forge_ray.train_loop import checkpoint

NOT_EXPORTED = ("trainer.json", "optimizer.pt", "deepspeed", "README.md")
"""What a checkpoint holds for a resume alone (and the ranks' `rng*.pt`)."""


def export(run: RunDir, step: int, target: Path, *, chat_template: Path | None = None, adapter: bool = False) -> Path:
    """Write the checkpoint of `step` to `target`, which must not be there, or be empty. `adapter`: of a run that trains adapters only
    these, in peft's form. Raises `UserError`, and `CheckpointError` for a checkpoint that is not whole."""
    source = checkpoint.path(run, step)
    if not source.is_dir():
        known = ", ".join(str(known) for known in checkpoint.steps(run)) or "none"
        raise UserError(f"{run.root} has no checkpoint of step {step}", where="--step", fix=f"there are: {known}")
    if (problem := checkpoint.problem(source)) is not None:
        raise checkpoint.CheckpointError(problem)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists", where="the directory to export to", fix="name one that is not there")
    adapted = is_adapter(source)
    if adapter and not adapted:
        raise UserError("this checkpoint holds no adapters", where="--adapter", fix="leave it out")
    temporary = target.with_name(f".{target.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        problem = f"{target} cannot be made ({error.strerror})"
        raise UserError(problem, where="the directory to export to", fix="name one where you may write") from None
    base = checkpoint.path(run, 0) if adapted else source
    if adapted and not adapter:
        from forge_ray.train_loop import lora

        lora.merged(base, source).save_pretrained(temporary)
    else:
        _copy(source, temporary)
    for name in checkpoint.CARRIED:
        if (base / name).is_file() and not (temporary / name).exists():
            shutil.copy2(base / name, temporary / name)
    if chat_template is not None:
        _replace_template(temporary, chat_template)
    if adapter:
        _name_base(temporary, base)
    if target.exists():
        target.rmdir()
    os.replace(temporary, target)
    return target


def is_adapter(directory: Path) -> bool:
    """Whether a checkpoint's directory holds adapters rather than a whole model."""
    return (directory / checkpoint.ADAPTER[0]).is_file()


def whole(run: RunDir, step: int, chat_template: Path | None = None) -> Path:
    """A directory with the whole model of a checkpoint: its own, or, of adapters, one in which they are added in (made once)."""
    directory = checkpoint.path(run, step)
    if not is_adapter(directory):
        return directory
    target = run.root / "merged" / directory.name
    return target if target.is_dir() else export(run, step, target, chat_template=chat_template)


def _copy(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        if entry.name in NOT_EXPORTED or (entry.name.startswith("rng") and entry.suffix == ".pt"):
            continue
        if entry.is_file():
            shutil.copy2(entry, target / entry.name)


def _replace_template(directory: Path, template: Path) -> None:
    """The directory's chat template becomes the text in `template`; one inside the tokenizer's config would be read in its place."""
    shutil.copyfile(template, directory / "chat_template.jinja")
    file = directory / "tokenizer_config.json"
    if file.is_file():
        settings = json.loads(file.read_text())
        if settings.pop("chat_template", None) is not None:
            file.write_text(json.dumps(settings, indent=2))


def _name_base(directory: Path, base: Path) -> None:
    file = directory / checkpoint.ADAPTER[0]
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "base_model_name_or_path": str(base.resolve())}, indent=2, sort_keys=True))
