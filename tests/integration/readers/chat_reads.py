"""`datasets` reads the chat file argv[1], TRL tokenizes it for SFT with the model argv[2]; prints the token ids of each row as JSON."""

import json
import sys

import datasets  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

rows = datasets.load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
config = SFTConfig(output_dir=sys.argv[3], use_cpu=True, report_to=[], max_length=None)
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(sys.argv[2]),
    args=config,
    train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(sys.argv[2]),
)
print(json.dumps([row["input_ids"] for row in trainer.train_dataset]))
