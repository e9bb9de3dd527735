"""What a run reserves against what its cluster has."""

from __future__ import annotations

from typing import Any

import pytest

from forge_ray.config import Config
from forge_ray.job import resources


def config(**sections: Any) -> Config:
    tree = {"name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t"}}
    return Config.model_validate({**tree, **sections})


@pytest.mark.parametrize(
    ("sections", "have", "words"),
    [
        ({}, {"CPU": 4.0}, None),
        ({"train": {"workers": 3}}, {"CPU": 4.0}, None),
        ({"train": {"workers": 8}}, {"CPU": 4.0}, "train.workers: train.workers=8 × train.worker_cpus=1 take 8 CPUs, 8.1 with"),
        ({"train": {"workers": 4}}, {"CPU": 4.0}, "4.1 with what else the run reserves, and the run's own cluster has 4"),
        ({"train": {"worker_cpus": 6}}, {"CPU": 4.0}, "train.worker_cpus: train.workers=1 × train.worker_cpus=6"),
        ({"proxy": {"replica_gpus": 1}}, {"CPU": 4.0}, "proxy.replica_gpus: proxy.replicas=1 × proxy.replica_gpus=1 take 1 GPUs, and"),
        ({"proxy": {"replica_gpus": 1}, "train": {"worker_gpus": 1}}, {"CPU": 4.0, "GPU": 2.0}, None),
        ({"proxy": {"replica_gpus": 0.5}, "train": {"worker_gpus": 1}}, {"CPU": 4.0, "GPU": 1.0}, "train.worker_gpus"),
    ],
)
def test_what_can_never_be_had_is_named_with_its_key(sections: dict[str, Any], have: dict[str, float], words: str | None) -> None:
    found = resources.shortage(config(**sections), have, training=True)
    assert (found is None) == (words is None)
    if words is not None:
        assert words in str(found) and "ask for less" in str(found)


def test_a_command_that_does_not_train_needs_no_train_workers() -> None:
    assert resources.shortage(config(train={"workers": 8}), {"CPU": 4.0}, training=False) is None


def test_hidden_gpus_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resources.own(config(ray={"num_cpus": 2})) == {"CPU": 2, "GPU": 0}
