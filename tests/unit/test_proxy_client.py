"""The control plane's patience: whom it waits for, when it asks anew, what it gives up at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forge_ray.serve_proxy import client as module
from forge_ray.serve_proxy.client import ProxyClient, ProxyUnavailable

Answer = dict[str, Any] | Exception | float
"""A float: silence for so many seconds."""


class Result:
    """One replica's."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def get_async(self) -> dict[str, Any]:
        if isinstance(self._answer, float):
            await asyncio.sleep(self._answer)
        if isinstance(self._answer, dict):
            return self._answer
        raise self._answer if isinstance(self._answer, Exception) else AssertionError("nobody waits so long")


class Handle:
    """In the place of Serve's: `answers` gives what each replica says to a broadcast, or nothing at all for a while."""

    def __init__(self, answers: Callable[[], list[Answer] | float]) -> None:
        self._answers, self.asked, self.closed = answers, 0, False

    def broadcast(self, method: str, *arguments: Any) -> Handle:
        self.asked += 1
        return self

    async def _fetch_replica_results_async(self) -> list[Result]:
        answers = self._answers()
        if not isinstance(answers, list):
            await asyncio.sleep(answers)
            return []
        return [Result(answer) for answer in answers]

    async def shutdown_async(self) -> None:
        self.closed = True


class Client(ProxyClient):
    """Takes its handles from a list, the last one again and again."""

    def give(self, *handles: Handle) -> None:
        self.left = list(handles)

    def _make_handle(self) -> Any:
        self._handle = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return self._handle


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(module, "RENEW_S", 0.1)
    return Client("app", "http://127.0.0.1:1", 2)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is taken for no answer soon; not so soon that a busy machine's would be."""
    monkeypatch.setattr(module, "ATTEMPT_S", 1.0)


def lost() -> Exception:
    from ray.exceptions import ActorUnavailableError

    return ActorUnavailableError("Actor is unavailable.", b"a" * 16)


ONE, TWO = {"replica": "one"}, {"replica": "two"}


async def test_a_dead_one_beside_enough_is_no_reason_to_wait(client: Client) -> None:
    handle = Handle(lambda: [lost(), ONE, TWO])
    client.give(handle)
    assert await client.status(timeout_s=60) == [ONE, TWO] and handle.asked == 1


async def test_a_handle_that_is_told_nothing_any_more_is_replaced(client: Client) -> None:
    deaf, good = Handle(lambda: [lost(), ONE]), Handle(lambda: [ONE, TWO])
    client.give(deaf, good)
    assert await client.status(timeout_s=60) == [ONE, TWO]
    assert deaf.asked and deaf.closed and good.asked == 1 and not good.closed


async def test_a_successor_is_waited_for(client: Client) -> None:
    answers: list[list[Answer] | float] = [[lost(), ONE], [ONE], [ONE, ONE], [ONE, TWO]]
    handle = Handle(lambda: answers.pop(0))
    client.give(handle)
    assert await client.status(timeout_s=60) == [ONE, TWO] and handle.asked == 4


async def test_silence_is_no_answer(client: Client, impatient: None) -> None:
    answers: list[list[Answer] | float] = [3600.0, [ONE, TWO]]
    client.give(Handle(lambda: answers.pop(0) if len(answers) > 1 else answers[0]))
    assert await client.status(timeout_s=60) == [ONE, TWO]


async def test_who_answers_is_heard_beside_one_who_does_not(client: Client, impatient: None) -> None:
    client.give(Handle(lambda: [ONE, TWO]))
    await client.status(timeout_s=60)
    client.give(Handle(lambda: [ONE, 3600.0]))
    client._handle = None
    with pytest.raises(ProxyUnavailable, match="1 of 2 replicas answered") as raised:
        await client.status(timeout_s=1.2)
    assert raised.value.late == {"two"}


async def test_what_asking_again_cannot_help_is_raised_at_once(client: Client) -> None:
    handle = Handle(lambda: [ONE, ValueError("misses a tensor")])
    client.give(handle)
    with pytest.raises(ValueError, match="misses a tensor"):
        await client.all("prepare_weights", "1.1", [None], timeout_s=60)
    assert handle.asked == 1


@pytest.mark.parametrize(
    ("answers", "message"), [([ONE, lost()], r"1 of 2 replicas answered \(.*unavailable"), (3600.0, "0 of 2 replicas answered")]
)
async def test_it_gives_up_with_a_reason(client: Client, answers: list[Answer] | float, message: str) -> None:
    client.give(Handle(lambda: answers))
    with pytest.raises(ProxyUnavailable, match=f"status: {message}.* within 0 s"):
        await client.status(timeout_s=0.4)
