"""`datasets` reads the chat file argv[1] and the TRL file argv[2], TRL takes both with the model argv[3].

`SFTTrainer` tokenizes the chat lines, its collator makes labels of the sequences, and a `GRPOTrainer` trains one step on them instead of
generating. Prints as JSON the token ids of the first, the labels of the second, the batch of the third.
"""

import json
import sys

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

CHAT, ROWS, MODEL, CACHE = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
chat = datasets.load_dataset("json", data_files=CHAT, split="train", cache_dir=CACHE)
sft = SFTTrainer(
    model, args=SFTConfig(output_dir=CACHE, use_cpu=True, report_to=[], max_length=None), train_dataset=chat, processing_class=tokenizer
)
rows = datasets.load_dataset("parquet", data_files=ROWS, split="train", cache_dir=CACHE)
collated = DataCollatorForLanguageModeling(pad_token_id=0)([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
seen = {}


class Trainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"):
            seen[name] = inputs[name].tolist()
        seen["mask"], seen["loss"] = (inputs["completion_mask"] * inputs["tool_mask"]).tolist(), float(loss)
        return loss


def replay(prompts, trainer):
    return {name: list(rows[name]) for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")}


config = GRPOConfig(
    output_dir=CACHE, use_cpu=True, report_to=[], max_steps=1, per_device_train_batch_size=len(rows), num_generations=len(rows), beta=0.0,
    shuffle_dataset=False,
)  # fmt: skip
trainer = Trainer(
    model,
    reward_funcs=lambda reward, **_: reward,
    args=config,
    train_dataset=datasets.Dataset.from_dict({"prompt": ["x"]}),
    processing_class=tokenizer,
    rollout_func=replay,
)
trainer.train()
print("\n" + json.dumps({"chat": [row["input_ids"] for row in sft.train_dataset], "labels": collated["labels"].tolist(), **seen}))
