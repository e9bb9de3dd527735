"""Whose turn it is at the engine, and what is told to those who must come again."""

from __future__ import annotations

import asyncio

import pytest

from forge_ray.config import Proxy
from forge_ray.serve_proxy.admission import Admission, Busy, PausedTooLong, SessionClosed, Ticket

FAR = 600.0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Queue:
    """Requests that wait, and the order in which their turns came."""

    def __init__(self, admission: Admission) -> None:
        self.admission, self.order, self.tickets = admission, [], {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        for name in names:
            ticket = self.tickets[name] = self.admission.arrive(name[0])
            self.tasks[name] = asyncio.create_task(self._turn(name, ticket))
        await settle()

    async def _turn(self, name: str, ticket: Ticket) -> None:
        await ticket.turn()
        self.order.append(name)

    async def end(self, name: str) -> None:
        self.tickets[name].leave()
        await settle()


async def test_free_places_go_round_the_sessions() -> None:
    queue = Queue(Admission(1, 100, FAR))
    await queue.ask("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    assert queue.order == ["a1"] and queue.admission.status()["waiting"] == 6
    for number in range(7):
        await queue.end(queue.order[number])
    assert queue.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]  # in each session by arrival
    assert queue.admission.status() == {"running": 0, "waiting": 0, "max_running": 1, "paused": False}


async def test_no_more_run_than_may() -> None:
    queue = Queue(Admission(3, 100, FAR))
    await queue.ask(*(f"{session}{number}" for number in range(4) for session in "abc"))
    assert queue.admission.running == 3 and len(queue.order) == 3
    for number in range(9):
        await queue.end(queue.order[number])
        assert queue.admission.running == 3 and len(queue.order) == number + 4


async def test_too_many_are_told_when_to_come_again() -> None:
    queue = Queue(Admission(1, 2, FAR))
    await queue.ask("a1", "b1", "c1")
    with pytest.raises(Busy) as caught:
        queue.admission.arrive("d")
    assert caught.value.retry_after_s is not None and 1 <= caught.value.retry_after_s <= 60
    await queue.end("a1")
    await queue.ask("d1")
    assert queue.order == ["a1", "b1"]


async def test_who_leaves_the_queue_holds_nobody_up() -> None:
    queue = Queue(Admission(1, 100, FAR))
    await queue.ask("a1", "b1", "b2", "c1")
    queue.tasks["b1"].cancel()
    await queue.end("b1")
    await queue.end("b1")
    await queue.end("a1")
    await queue.end("b2")
    assert queue.order == ["a1", "b2", "c1"]


async def test_a_place_given_to_one_who_is_just_leaving_is_not_lost() -> None:
    queue = Queue(Admission(1, 100, FAR))
    await queue.ask("a1", "b1", "c1")
    queue.tickets["a1"].leave()
    queue.tasks["b1"].cancel()  # its turn has come, but it has not heard of it yet
    await settle()
    assert queue.order == ["a1"]
    await queue.end("b1")
    assert queue.order == ["a1", "c1"]


async def test_a_closed_session_is_dropped_from_the_queue() -> None:
    queue = Queue(Admission(1, 100, FAR))
    await queue.ask("a1", "b1", "b2", "c1")
    queue.admission.drop("b")
    await settle()
    for name in ("b1", "b2"):
        assert isinstance(queue.tasks[name].exception(), SessionClosed)
        await queue.end(name)
    await queue.end("a1")
    assert queue.order == ["a1", "c1"] and queue.admission.waiting == 0


async def test_nobodys_turn_comes_in_a_pause() -> None:
    queue = Queue(Admission(2, 100, FAR))
    await queue.ask("a1")
    with queue.admission.paused():
        await queue.ask("b1", "c1", "d1")
        await queue.end("a1")
        assert queue.order == ["a1"] and queue.admission.status()["paused"]
    await settle()
    assert queue.order == ["a1", "b1", "c1"]


async def test_a_pause_that_takes_too_long_turns_away() -> None:
    queue = Queue(Admission(2, 100, 0.05))
    queue.admission.pause()
    await queue.ask("a1", "b1")
    await asyncio.wait(list(queue.tasks.values()), timeout=60)
    for name in ("a1", "b1"):
        error = queue.tasks[name].exception()
        assert isinstance(error, PausedTooLong) and error.retry_after_s
        await queue.end(name)
    with pytest.raises(PausedTooLong):
        queue.admission.arrive("c")
    queue.admission.resume()
    await queue.ask("d1")
    assert queue.order == ["d1"]


async def test_an_update_that_failed_lets_nobody_through() -> None:
    queue = Queue(Admission(2, 100, FAR))
    with pytest.raises(RuntimeError), queue.admission.paused():
        raise RuntimeError("half of the weights are new")
    await queue.ask("a1")
    assert queue.order == [] and queue.admission.status()["paused"]
    queue.tasks["a1"].cancel()


async def test_who_stands_back_queues_again() -> None:
    queue = Queue(Admission(1, 100, FAR))
    await queue.ask("a1", "b1")
    queue.tickets["a1"].stand_back()
    await settle()
    assert queue.order == ["a1", "b1"]
    again = asyncio.create_task(queue.tickets["a1"].turn())
    await settle()
    assert not again.done()
    await queue.end("b1")
    await again
    await queue.end("a1")
    assert queue.admission.status()["running"] == 0


async def test_the_limit_comes_from_the_engine_or_the_config() -> None:
    assert Admission.of(Proxy(), 256).max_running == 320
    assert Admission.of(Proxy(max_running=7, max_waiting=2, max_pause_s=3), 256).status()["max_running"] == 7
