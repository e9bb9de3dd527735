"""Both sides of the nccl weight transfer, a group in memory in nccl's place: vLLM's own engines, packing, ranks, failures. No GPU, no Ray.

What this does not show: nccl itself, streams, and vLLM's reload of a model on a GPU.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_ray.config import Config

WORKERS, REPLICAS = 2, 2
SIZE = 1 + WORKERS * REPLICAS


class Network:
    """Groups in memory, by port."""

    def __init__(self) -> None:
        self.groups: dict[int, list[queue.Queue[Any]]] = {}
        self.joined: dict[int, set[int]] = {}
        self.ended: list[int] = []
        self.sizes: list[int] = []
        """Bytes of each broadcast."""
        self._lock = threading.Lock()

    def join(self, address: str, port: int, rank: int, size: int, device: Any) -> Endpoint:
        with self._lock:
            queues = self.groups.setdefault(port, [queue.Queue() for _ in range(size)])
            known = self.joined.setdefault(port, set())
            assert size == SIZE == len(queues) and rank not in known, "each rank once"
            known.add(rank)
        return Endpoint(self, port, rank)


class Endpoint:
    """One rank's communicator, as far as a transfer uses it."""

    def __init__(self, network: Network, port: int, rank: int) -> None:
        self.network, self.port, self.rank = network, port, rank
        self.closed = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self.rank == src:
            self.network.sizes.append(tensor.nbytes)
            for rank, box in enumerate(self.network.groups[self.port]):
                if rank != src:
                    box.put(tensor.clone())
            return
        while True:
            try:
                got = self.network.groups[self.port][self.rank].get(timeout=0.05)
            except queue.Empty:
                if self.closed.is_set():
                    raise RuntimeError("the group is closed") from None
                continue
            assert got.shape == tensor.shape and got.dtype == tensor.dtype, "both sides cut the stream alike"
            tensor.copy_(got)
            return

    def destroy(self) -> None:
        self.closed.set()
        self.network.ended.append(self.rank)


class Model(torch.nn.Module):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.got: dict[str, torch.Tensor] = {}

    def load_weights(self, pairs: Any) -> None:
        self.got |= {name: value.clone() for name, value in pairs}


class Replica:
    """A replica's engine with its workers, as `RecordingLLM.transfer` and vLLM's worker drive them."""

    def __init__(self, name: str) -> None:
        from forge_ray.serve_proxy.vllm_internals.nccl_weights import NcclWeights

        self.name, self.steps = name, []
        self.fail_at = ""
        self.hang = threading.Event()
        self.models = [Model() for _ in range(WORKERS)]
        settings: Any = SimpleNamespace()
        self.workers = []
        for rank, model in enumerate(self.models):
            parallel = SimpleNamespace(data_parallel_index=0, world_size=WORKERS, rank=rank)
            config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
            self.workers.append(NcclWeights(settings, config, torch.device("cpu"), model))

    def step(self, step: str, info: dict[str, Any], version: str | None) -> dict[str, Any]:
        self.steps.append((step, version))
        info = dict(info)
        if offsets := info.pop("offsets", None):
            info["rank_offset"] = offsets[self.name]
        if step == self.fail_at:
            raise ValueError(f"{self.name} fails at {step}")
        if step == "update" and self.fail_at == "hang":
            self.hang.wait(60)
            raise ValueError("was hung")
        work = {
            "init": lambda worker: worker.init_transfer_engine(worker.parse_init_info(info)),
            "start": lambda worker: worker.start_weight_update(),
            "update": lambda worker: worker.update_weights(info),
            "finish": lambda worker: worker.finish_weight_update(),
        }[step]
        with ThreadPoolExecutor(WORKERS) as together:
            list(together.map(work, self.workers))
        return {"replica": self.name, "version": version}


class Client:
    """`ProxyClient` as the sender uses it."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas

    async def status(self, timeout_s: float) -> list[dict[str, Any]]:
        return [{"replica": replica.name} for replica in self.replicas]

    async def all(self, method: str, serial: str, *arguments: Any, timeout_s: float) -> list[dict[str, Any]]:
        assert method == "weight_transfer" and len(serial) == 16
        with ThreadPoolExecutor(len(self.replicas)) as together:
            return list(together.map(lambda replica: replica.step(*arguments), self.replicas))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor
    from vllm.model_executor.model_loader import reload

    made = Network()
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", made.join)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, number: [stream] * number)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)
    return made


class Parameters:
    """A strategy's parameters; going through them is collective, so it is counted."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = {"embed": (33, 8), "norm": (7,), "a.weight": (16, 4), "b.weight": (5, 9), "scalar": ()}
        # One type, as a trainer holds them: vLLM's packed stream does not align a longer type behind an odd number of a shorter one.
        self.values = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        self.values["turned"] = torch.randn(6, 10, generator=draw).T  # not contiguous
        self.passed = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.values.items():
            self.passed += 1
            yield name, torch.nn.Parameter(value)


def sender(rank: int, named: Any, client: Client, timeout_s: float = 60.0) -> Any:
    from forge_ray.serve_proxy.vllm_internals.nccl_trainer import NcclSender

    config = Config.model_validate(
        {
            "name": "x", "policy": {"model": "m", "engine": {"tensor_parallel_size": WORKERS}}, "harnesses": [{"name": "react"}],
            "tasks": {"train": "t"}, "proxy": {"replicas": REPLICAS}, "train": {"sync": {"timeout_s": timeout_s}},
        }
    )  # fmt: skip
    made: Any = NcclSender(config, rank, named)
    made._control._client = client
    return made


@pytest.mark.parametrize("buffer", [100, 500, 2**20])
def test_every_worker_of_every_replica_gets_every_weight(network: Network, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    monkeypatch.setattr(NCCLTrainerInitInfo.__init__, "__defaults__", (True, buffer, 2))
    parameters, replicas = Parameters(), [Replica("b"), Replica("a")]
    subject = sender(0, parameters, Client(replicas))
    for version in ("1.1", "1.2"):
        parameters.values = {name: value + 1 for name, value in parameters.values.items()}
        assert subject.send(version)
        for model in (model for replica in replicas for model in replica.models):
            assert list(model.got) == list(parameters.values)
            assert all(torch.equal(model.got[name], value) for name, value in parameters.values.items())
    (joined,) = network.joined.values()
    assert joined == set(range(SIZE)), "one group for both transfers"
    assert len(network.sizes) == 2 * {100: 4, 500: 2, 2**20: 1}[buffer], "broadcasts"
    wanted = [("init", None), *[step for version in ("1.1", "1.2") for step in (("start", None), ("update", None), ("finish", version))]]
    assert all(replica.steps == wanted for replica in replicas)
    assert parameters.passed == 3 * len(parameters.values), "once for names and shapes, once a transfer"


@pytest.mark.parametrize("step", ["init", "start", "update", "finish"])
def test_a_failure_is_told_and_rank_0_still_goes_through_its_parameters(network: Network, step: str) -> None:
    parameters, replicas = Parameters(), [Replica("a"), Replica("b")]
    for replica in replicas:
        replica.fail_at = step
    subject = sender(0, parameters, Client(replicas))
    assert not subject.send("1.1")
    assert parameters.passed == 2 * len(parameters.values), "the other ranks gather as many times"
    # The next time, with a group of its own.
    for replica in replicas:
        replica.fail_at = ""
    assert subject.send("1.2")
    assert all(torch.equal(model.got["embed"], parameters.values["embed"]) for replica in replicas for model in replica.models)
    if step != "init":
        assert len(network.groups) == 2 and set(network.ended) == set(range(SIZE)), "the first group was closed on every side"


def test_a_replica_that_hangs_holds_nobody_longer_than_a_sync_may_take(network: Network) -> None:
    parameters, replicas = Parameters(), [Replica("a"), Replica("b")]
    replicas[1].fail_at = "hang"
    subject = sender(0, parameters, Client(replicas), timeout_s=3.0)
    threading.Timer(4.0, replicas[1].hang.set).start()
    assert not subject.send("1.1")
    assert subject._engine is None and parameters.passed == 2 * len(parameters.values)


def test_the_other_ranks_gather_and_form_no_group(network: Network) -> None:
    parameters = Parameters()
    subject = sender(1, parameters, Client([]))
    assert subject.send("1.1") and subject.send("1.2")
    assert parameters.passed == 3 * len(parameters.values) and not network.groups


def test_a_file_loads_into_the_same_engine(network: Network, tmp_path: Any) -> None:
    from safetensors.torch import save_file

    replica = Replica("a")
    save_file({"embed": torch.ones(3)}, tmp_path / "w.safetensors")
    for step in ("start", "start"):  # the second after a transfer that broke off
        replica.step(step, {}, None)
    replica.step("update", {"path": str(tmp_path / "w.safetensors"), "base": []}, None)
    replica.step("finish", {}, "1.1")
    assert all(torch.equal(model.got["embed"], torch.ones(3)) for model in replica.models)
