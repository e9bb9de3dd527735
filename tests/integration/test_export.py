"""An exported policy is loaded by plain transformers and by plain vLLM, and both compute the learner's log-probabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from forge_ray.cli.main import main
from forge_ray.train_loop.rows import Rows
from tests.tiny_model import tiny_model
from tests.unit import learning

IDS = [5, 17, 3, 29, 8, 11, 36, 2, 30]

VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

found = {}
for name, directory in json.loads(sys.argv[1]).items():
    llm = LLM(directory, dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**26)
    prompt = TokensPrompt(prompt_token_ids=json.loads(sys.argv[2]))
    output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    logprobs = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    found[name] = {"logprobs": logprobs, "text": text}
    del llm
print(json.dumps(found))
"""


@pytest.mark.timeout(300)
def test_transformers_and_vllm_load_what_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}<<{{ message.content }}>>{% endfor %}")
    exported, wanted = {}, {}
    for name, own in {"whole": {}, "merged": {"lora": {"rank": 4}}}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model").symlink_to(tiny_model())
        settings = learning.config(optimizer={"lr": 1e-2}, **own)
        learner = learning.learner_of(settings, folder)
        learner.train(learning.sampled(learner, learning.rollouts(0)))
        learner.save(None)
        tree = settings.model_dump(mode="json")
        tree["policy"]["chat_template"] = str(template)
        learner.run.config.write_text(yaml.safe_dump(tree))
        assert main(["export", str(learner.run.root), str(tmp_path / f"{name}-exported")]) == 0
        assert "step 1: " in capsys.readouterr().out
        exported[name] = tmp_path / f"{name}-exported"
        row = learning.rollouts(0)[0]
        ids, ones = np.array(IDS), np.ones(len(IDS) - 1, np.float32)
        row = type(row)("r", ids, np.arange(1, len(IDS)), ones, ones, ones, ones, np.zeros(len(ones), int), len(ones))
        wanted[name] = Rows([row]).score(learner.strategy.module, learner.passes)
        model = AutoModelForCausalLM.from_pretrained(exported[name])
        np.testing.assert_allclose(Rows([row]).score(model, learning.plain_passes()), wanted[name], atol=1e-5)
        messages = [{"role": "user", "content": "hello"}]
        assert AutoTokenizer.from_pretrained(exported[name]).apply_chat_template(messages, tokenize=False) == "<<hello>>"
        assert (exported[name] / "generation_config.json").is_file()
    assert np.abs(wanted["whole"] - wanted["merged"]).max() > 1e-3
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    directories = json.dumps({name: str(path) for name, path in exported.items()})
    done = subprocess.run([sys.executable, "-c", VLLM, directories, json.dumps(IDS)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for name in exported:
        np.testing.assert_allclose(found[name]["logprobs"], wanted[name], atol=1e-4)
        assert found[name]["text"] == "<<hello>>"
