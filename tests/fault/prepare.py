"""`python -m tests.fault.prepare DIRECTORY`: the quickstart's policy after a short SFT, made without Ray, for runs that begin with it.

As little SFT as gives groups whose rewards differ, so that every step of a run changes the weights.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.quickstart import module

SEED, DEMONSTRATIONS, STEPS = 0, 2000, 300


def main(directory: Path) -> None:
    import pyarrow.parquet
    import torch
    from transformers import AutoModelForCausalLM

    from forge_ray.config import Sft
    from forge_ray.train_loop import forward, sft
    from forge_ray.train_loop.part import Passes
    from forge_ray.train_loop.ranks import Ranks
    from forge_ray.train_loop.strategies.ddp import Replicated

    torch.set_num_threads(1)  # two share badly when the other core is busy
    torch.manual_seed(SEED)
    initial, demonstrations = directory / "initial", directory / "demonstrations"
    initial.mkdir(parents=True)
    demonstrations.mkdir()
    module("policy").build(initial, SEED)
    module("demonstrations").make(demonstrations, SEED, DEMONSTRATIONS)
    table = pyarrow.parquet.read_table(demonstrations / "demonstrations.parquet", columns=["ids", "mask"])
    model = AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float32).train()
    recipe, device = Sft.model_validate({"demonstrations": str(demonstrations), "steps": STEPS}), torch.device("cpu")
    strategy = Replicated(model, recipe.optimizer, Ranks(), device)
    rows = forward.demonstration_rows(table)
    loss = sft.train(strategy, rows, recipe, SEED, passes=Passes(device, 16384), report=lambda step, loss: None)
    shutil.copytree(initial, directory / "policy", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(directory / "policy")
    shutil.move(demonstrations, directory / "policy" / "demonstrations")
    print(f"loss {loss:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
