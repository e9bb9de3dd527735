"""`FileWeights`: the weight-transfer backend that reads safetensors files, for machines where none of vLLM's own runs. Imported in the
engine's worker process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from forge_ray.serve_proxy import weights

FILE_BACKEND, NCCL_BACKEND = "forge_ray_file", "forge_ray_nccl"


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to agree upon."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """`weights.WeightFiles`, as vLLM sends it."""

    path: str
    base: list[str] = field(default_factory=list)


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):
    """Weights from safetensors files through vLLM's layerwise reload, which repacks what the platform packs. Adapters are added to their
    base on the way: the engine always holds whole weights."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        return None

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises the accelerator, which raises where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        found = weights.WeightFiles(update_info.path, tuple(update_info.base))
        load: Any = self.model.load_weights
        load(weights.tensors(found, str(self.device)))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            return
        # On CPU a head that is tied to the embedding multiplies with a packed copy, which the reload leaves as it was.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        return None


if FILE_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(FILE_BACKEND, FileWeights)
    WeightTransferEngineFactory.register_engine(NCCL_BACKEND, f"{__package__}.nccl_weights", "NcclWeights")
