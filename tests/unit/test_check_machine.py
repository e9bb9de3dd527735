"""What `check` says of this machine's port, and how a resume waits for it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from forge_ray.cli import check_machine
from forge_ray.config import load

RUN = Path(__file__).parents[2] / "examples" / "quickstart" / "run.yaml"


@pytest.fixture
def holder() -> socket.socket:
    """Somebody listens on a port."""
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made


def test_a_resume_waits_for_the_port_that_the_killed_run_had(holder: socket.socket) -> None:
    config = load(RUN, [f"proxy.port={holder.getsockname()[1]}"])
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        holder.close()

    assert not check_machine.port(config).ok
    check_machine.await_port(config, told)
    assert check_machine.port(config).ok and len(lines) == 1 and "cannot be used" in lines[0]
    check_machine.await_port(config, told)
    assert len(lines) == 1, "a free port is not waited for"


def test_a_port_that_stays_taken_is_not_waited_for_for_ever(holder: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_machine, "ENDING_S", 0.5)
    config = load(RUN, [f"proxy.port={holder.getsockname()[1]}"])
    with holder:
        check_machine.await_port(config, lambda line: None)
        assert not check_machine.port(config).ok, "the check says so then"
