"""Imported in the engine's worker process, as the home of the class that vLLM is told to extend its worker by.

That registers our weight-transfer backends there (`file_weights`, `nccl_weights`) and ties the worker's life to the replica's.
"""

from __future__ import annotations

from typing import Any

from forge_ray.serve_proxy import lifeline
from forge_ray.serve_proxy.vllm_internals import file_weights

__all__ = ["WorkerExtension", "file_weights"]


class WorkerExtension:
    """Named to vLLM as the worker extension, which the worker then is as well; its module is what the worker needs."""

    def abandon_weight_update(self: Any) -> None:
        """The update that was started gets no more weights and no end; the next one may start."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()


lifeline.follow()
