"""`NcclWeights`: vLLM's own nccl backend, which can read files as well: nobody sends to a replica that starts. Untested on GPUs."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from forge_ray.serve_proxy import weights
from forge_ray.serve_proxy.vllm_internals.file_weights import FileUpdate


class NcclWeights(NCCLWeightTransferEngine):
    """Weights from the trainer's rank 0 by broadcast, or from `weights.WeightFiles`."""

    _begun = False
    """An update was started and not finished."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        self.shutdown()  # the group of an earlier trainer, or of replicas that are gone
        super().init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        if self._begun:
            # Of a transfer that broke off some layers have a part of their weights, which would be mixed with the next ones.
            super().finish_weight_update()
        super().start_weight_update()
        self._begun = True

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._begun = False

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return FileUpdate(**update_dict) if "path" in update_dict else super().parse_update_info(update_dict)

    def receive_weights(self, update_info: Any) -> None:
        if not isinstance(update_info, FileUpdate):
            super().receive_weights(update_info)
            return
        found = weights.WeightFiles(update_info.path, tuple(update_info.base))
        load: Any = self.model.load_weights
        load(weights.tensors(found, str(self.device)))
