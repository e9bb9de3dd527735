"""An update in two phases: nobody switches before everybody is ready, and after the decision everybody does."""

from __future__ import annotations

from typing import Any

import pytest

from forge_ray.serve_proxy import switch as subject
from forge_ray.serve_proxy.client import ProxyUnavailable
from forge_ray.serve_proxy.weights import WeightMismatch


class Replicas:
    """The client of two replicas: `answers` are what further requests of a method meet, then all goes well."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers, self.told, self.version = answers, [], "1.0"

    async def all(self, method: str, *arguments: Any, timeout_s: float) -> list[dict[str, Any]]:
        self.told.append(method)
        if waiting := self.answers.get(method):
            answer = waiting.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if method == "commit_weights":
            self.version = arguments[0]
        return [{"replica": name, "version": self.version, "paused_s": pause} for name, pause in (("a", 0.25), ("b", 0.5))]

    async def replace(self, replica: str) -> None:
        self.told.append(f"replace {replica}")

    async def update(self, **options: Any) -> dict[str, Any]:
        client: Any = self
        return await subject.switch(client, b"weights", "1.1", timeout_s=1, decide=lambda: self.told.append("decide"), **options)


def late(*replicas: str) -> ProxyUnavailable:
    return ProxyUnavailable("1 of 2 replicas answered", frozenset(replicas))


async def test_the_decision_stands_between_the_phases() -> None:
    replicas = Replicas()
    told = await replicas.update()
    assert replicas.told == ["prepare_weights", "decide", "commit_weights"]
    assert (told["replicas"], told["paused_s"], told["replaced"]) == (2, 0.5, [])


@pytest.mark.parametrize("error", [WeightMismatch("misses norm.weight"), ProxyUnavailable("nobody is there")])
async def test_what_fails_before_the_decision_leaves_everything_as_it_was(error: Exception) -> None:
    replicas = Replicas(prepare_weights=[error])
    with pytest.raises(type(error)):
        await replicas.update()
    assert replicas.told == ["prepare_weights", "discard_weights"] and replicas.version == "1.0"


async def test_a_late_replica_is_replaced_and_its_successor_asked() -> None:
    replicas = Replicas(prepare_weights=[late("b")], commit_weights=[late("a")])
    told = await replicas.update()
    assert replicas.told == ["prepare_weights", "replace b", "prepare_weights", "decide", "commit_weights", "replace a", "commit_weights"]
    assert told["replaced"] == ["b", "a"] and replicas.version == "1.1"


async def test_replicas_that_are_late_again_and_again_end_the_update() -> None:
    replicas = Replicas(prepare_weights=[late("a"), late("b"), late("c")])
    with pytest.raises(ProxyUnavailable):
        await replicas.update()
    assert replicas.told.count("prepare_weights") == 1 + subject.REPLACED and "decide" not in replicas.told


async def test_what_fails_after_the_decision_is_repeated_until_all_serve_the_version() -> None:
    from ray.exceptions import RayTaskError

    old = [{"replica": name, "version": version, "paused_s": None} for name, version in (("a", "1.1"), ("b", "1.0"))]
    replicas = Replicas(commit_weights=[RayTaskError("commit", "the engine broke", RuntimeError("x")), old])
    told = await replicas.update()
    assert replicas.told == ["prepare_weights", "decide", *["commit_weights"] * 3] and told["version"] == replicas.version == "1.1"
