"""`datasets` reads the TRL file argv[1]; TRL's SFT collator takes it, and a `GRPOTrainer` of the model argv[2] trains one step on its rows
instead of generating. Prints the labels of the one and the batch of the other as JSON."""

import json
import sys

import datasets  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # type: ignore[import-not-found]

rows = datasets.load_dataset("parquet", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
collated = DataCollatorForLanguageModeling(pad_token_id=0)([{name: row[name] for name in ("input_ids", "completion_mask")} for row in rows])
seen = {}


class Trainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"):
            seen[name] = inputs[name].tolist()
        seen["mask"], seen["loss"] = mask.tolist(), float(loss)
        return loss


def replay(prompts, trainer):
    return {name: rows[name] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")}


config = GRPOConfig(
    output_dir=sys.argv[3], use_cpu=True, report_to=[], max_steps=1, per_device_train_batch_size=len(rows), num_generations=len(rows),
    beta=0.0, shuffle_dataset=False,
)  # fmt: skip
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(sys.argv[2]),
    reward_funcs=lambda reward, **_: reward,
    args=config,
    train_dataset=datasets.Dataset.from_dict({"prompt": ["x"]}),
    processing_class=AutoTokenizer.from_pretrained(sys.argv[2]),
    rollout_func=replay,
)
trainer.train()
print("\n" + json.dumps({"labels": collated["labels"].tolist(), **seen}))
