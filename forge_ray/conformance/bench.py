"""What stands between a program and the script: the proxy under test, as the suite sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from forge_ray.conformance.door import Door
from forge_ray.conformance.plan import Plan
from forge_ray.conformance.recording import Reader
from forge_ray.conformance.upstream import Upstream
from forge_ray.serve_proxy.scripted_engine import Rule, Script


def script_of(plans: list[Plan]) -> Script:
    """One script for all plans; their marks tell them apart."""
    return Script([Rule.model_validate(rule) for plan in plans for rule in plan.rules])


@dataclass(frozen=True)
class Address:
    """Where a program is pointed at."""

    target: str
    """URL of the proxy without path."""
    prefix: str
    """Path that its base URL begins with, "" or "/…"."""
    key: str
    model: str


class Bench(Protocol):
    """A proxy that is up."""

    faults_in_front: bool
    """Faults happen between program and proxy; else between proxy and upstream."""
    script: Script

    @property
    def reader(self) -> Reader | None:
        """What reads the proxy's recording."""
        ...

    async def address(self, session: str) -> Address:
        """What the program of `session` is given."""
        ...

    async def settle(self, session: str) -> None:
        """The program has ended: wait until all that it caused is recorded."""
        ...

    def said(self, plan: Plan) -> list[str] | None:
        """Names of the rules that answered the program, where the script is spoken outside the proxy; else None."""
        ...


class Foreign:
    """Any proxy, in front of the scripted upstream that this bench serves on `port`.

    `url`: the proxy's URL; `{session}` in it or in `key` stands for the session. None: no proxy, the programs talk to the upstream itself.
    """

    faults_in_front = False

    def __init__(
        self, plans: list[Plan], *, url: str | None, key: str, model: str, port: int, reader: Reader | None, settle_s: float
    ) -> None:
        self.script, self.reader = script_of(plans), reader
        self.upstream = Upstream(self.script, model)
        self.door = Door(self.upstream, [fault for plan in plans for fault in plan.faults], port)
        self._url, self._key, self._model, self._settle_s = url, key, model, settle_s

    async def start(self) -> Foreign:
        await self.door.start()
        return self

    async def stop(self) -> None:
        await self.door.stop()

    async def address(self, session: str) -> Address:
        url = (self._url or self.door.url).replace("{session}", session).rstrip("/")
        scheme, _, rest = url.partition("://")
        host, slash, path = rest.partition("/")
        return Address(f"{scheme}://{host}", slash + path, self._key.replace("{session}", session), self._model)

    async def settle(self, session: str) -> None:
        if self.reader is not None:
            await asyncio.sleep(self._settle_s)

    def said(self, plan: Plan) -> list[str]:
        marks = {rule["of"] for rule in plan.rules if rule.get("of")}
        return [name for mark, names in self.upstream.said.items() for name in names if mark in marks or plan.line(name) != "?"]
