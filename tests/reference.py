"""Logprobs by the book: Hugging Face in fp32, the whole sequence in one forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Reference:
    """The served model in Hugging Face, with copies of it whose weights were changed."""

    def __init__(self, model_dir: Path | str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.directory = Path(model_dir)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def changed(self, seed: int, scale: float = 0.02) -> Reference:
        """A copy with noise of standard deviation `scale` on every weight."""
        copy = Reference(self.directory)
        generator = self.torch.Generator().manual_seed(seed)
        with self.torch.no_grad():
            for parameter in copy.model.parameters():
                parameter.add_(scale * self.torch.randn(parameter.shape, generator=generator))
        return copy

    def adapted(self, seed: int, path: Path) -> Reference:
        """The model on disk with random adapters on every linear layer, merged by peft; they are published at `path` as a trainer does."""
        from forge_ray.config import Lora
        from forge_ray.train_loop import lora, weight_sync

        merged = Reference(self.directory)
        model = lora.attach(merged.model, Lora(rank=4, alpha=8))
        self.torch.manual_seed(seed)
        trained = [(name, value) for name, value in model.base_model.model.named_parameters() if value.requires_grad]
        for _, value in trained:
            self.torch.nn.init.normal_(value, std=0.05)
        tensors, told = lora.published(model.base_model.model, trained)
        weight_sync.write(path, tensors, told)
        merged.model = model.merge_and_unload()
        return merged

    def save(self, path: Path) -> Path:
        """The weights as a trainer publishes them: named parameters, tied ones once."""
        from safetensors.torch import save_file

        save_file({name: p.detach().contiguous() for name, p in self.model.named_parameters()}, path)
        return path

    def logprobs(self, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
        """Natural logs of the probabilities of `ids` after `prompt`, shape (len(ids),)."""
        with self.torch.no_grad():
            logits: torch.Tensor = self.model(self.torch.tensor([prompt + ids])).logits[0]
        logs = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        return [logs[i, token].item() for i, token in enumerate(ids)]

    def differences(self, call, first: int = 0, end: int | None = None) -> float:
        """Largest |recorded − recomputed| over the tokens [first, end) of a recorded call."""
        expected = self.logprobs(call.prompt_ids, call.ids, call.temperature)
        return max(abs(a - b) for a, b in list(zip(call.logprobs, expected, strict=True))[first:end])
