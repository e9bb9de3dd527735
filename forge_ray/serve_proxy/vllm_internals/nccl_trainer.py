"""Weights from GPU to GPU by vLLM's nccl weight transfer (`train.sync.backend: nccl`). Untested on GPUs: the tests put a group in memory
in nccl's place.

The trainer's rank 0 and the engines' workers of all replicas form one group, in which rank 0 broadcasts. vLLM's trainer side drives its
protocol (init, start, update, finish) through `ServeControl`, which asks every replica. It only brings the weights sooner: the file is
published all the same, for replicas that start, and the driver's sync afterwards finds every replica at the version, or brings those that
are not there by the file. So what fails here does not stop a run, but for a transfer that not even its group's end ends.

The group belongs to the replicas that made it: when one was replaced, it is made anew before the next transfer. Invariants: a transfer
takes at most `train.sync.timeout_s` (a replica that dies in it would hold a broadcast for ever: the group is closed then); whatever fails
on rank 0, it goes through all of its parameters, since the other ranks are gathering them with it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from forge_ray.config import Config
from forge_ray.errors import ForgeRayError
from forge_ray.serve_proxy.client import ProxyClient

log = logging.getLogger(__name__)

Named = Callable[[], Iterator[tuple[str, Tensor]]]
"""Gives the names and whole values of the parameters; collective."""


class ServeControl:
    """vLLM's `VLLMWeightSyncClient` for the replicas of the policy. `workers`: GPUs of a replica's engine."""

    def __init__(self, client: ProxyClient, workers: int, timeout_s: float) -> None:
        self._client, self._workers, self._timeout_s = client, workers, timeout_s
        self.version = ""
        """What the weights that are sent next are called."""

    def members(self) -> list[str]:
        """The replicas that answer now, by id; the group's ranks are in this order."""
        return sorted(status["replica"] for status in asyncio.run(self._client.status(timeout_s=self._timeout_s)))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        first = int(init_info["rank_offset"])
        offsets = {replica: first + place * self._workers for place, replica in enumerate(self.members())}
        self._step("init", {**init_info, "offsets": offsets})

    def start_weight_update(self) -> None:
        self._step("start", {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._step("update", dict(update_info) if isinstance(update_info, dict) else update_info[0])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._step("finish", {}, weight_version or self.version)

    def _step(self, step: str, info: dict[str, Any], version: str | None = None) -> None:
        asyncio.run(self._client.all("weight_transfer", secrets.token_hex(8), step, info, version, timeout_s=self._timeout_s))


class Gathered(WeightSource):
    """What a strategy holds, as vLLM wants it; names and shapes are learned by going through it once. Gone through once per `begin`."""

    def __init__(self, named: Named) -> None:
        self._named = named
        self._known: list[ParamMeta] | None = None
        self._left: Iterator[tuple[str, Tensor]] = iter(())

    def begin(self) -> None:
        """A transfer begins: every rank will go through the parameters once."""
        self._left = self._named()

    def go_through(self) -> None:
        """What is left of that, after the transfer failed on this rank."""
        self.metadata()
        for _ in self._left:
            pass

    def metadata(self) -> list[ParamMeta]:
        if self._known is None:
            self._known = [ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in self._named()]
        return self._known

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._left:
            yield name, value.detach()


class TransferHung(ForgeRayError):
    """Not even closing the group has ended a transfer: this process is of no use any more."""


class NcclSender:
    """Sends the weights of a worker group; made and called on every rank."""

    def __init__(self, config: Config, rank: int, named: Named) -> None:
        workers = int(config.policy.engine.get("tensor_parallel_size", 1)) * int(config.policy.engine.get("pipeline_parallel_size", 1))
        client = ProxyClient(app=f"forge-{config.name}", base_url="", replicas=config.proxy.replicas)
        self._control, self._timeout_s = ServeControl(client, workers, config.train.sync.timeout_s), config.train.sync.timeout_s
        self._rank, self._size = rank, 1 + workers * config.proxy.replicas
        self._source = Gathered(named)
        self._engine: Any = None
        self._members: list[str] = []

    def send(self, version: str) -> bool:
        """Bring every replica to `version`; whether that worked. Collective. One rank's trouble is every rank's: the group is made anew."""
        self._control.version = version
        self._source.begin()
        if self._rank:
            self._join([])
            self._engine.send_weights()
            return True
        ended: list[Exception | None] = []
        # A thread of its own, because only the group's end gets a broadcast to an end whose receivers are gone.
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        work = threading.Thread(target=self._send, args=(device, ended), name="forge-ray nccl", daemon=True)
        work.start()
        work.join(self._timeout_s)
        if work.is_alive():
            self._close()
            work.join(self._timeout_s)
        if not ended:
            raise TransferHung(f"the transfer of version {version} by nccl did not end within {2 * self._timeout_s:.0f} s")
        if ended[0] is not None:
            log.warning("nccl did not bring version %s, the file will: %r", version, ended[0])
            self._close()
            return False
        return True

    def _send(self, device: int | None, ended: list[Exception | None]) -> None:
        """Rank 0's transfer; `ended` gets what went wrong, or None."""
        if device is not None:
            torch.cuda.set_device(device)
        try:
            self._join(self._control.members())
            self._engine.send_weights()
        except Exception as error:
            self._source.go_through()
            ended.append(error)
        else:
            ended.append(None)

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _join(self, members: list[str]) -> None:
        """Form the group with the replicas of now, `members`, unless it is formed. On other ranks than 0 there is nothing to form."""
        if self._engine is not None and members == self._members:
            return
        self._close()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        import ray

        address = ray.util.get_node_ip_address()
        info = NCCLTrainerInitInfo(rank=self._rank, master_address=address, master_port=port, world_size=self._size)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._control, source=self._source)
        self._members = members
