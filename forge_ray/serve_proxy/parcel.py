"""Parcel: published weights on their way to the replicas, by the shortest way from where they were written.

On the node where the file was written it is read in place: its pages are in the kernel's cache, which is shared memory. To other nodes its
bytes go through Ray's object store, one copy per node. Without either the path is tried: the run directory may be on a shared file system.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parcel:
    """A safetensors file."""

    path: str
    node: str
    """Ray's id of the node that wrote it."""
    content: Any = None
    """Ray reference to its bytes, in a list of one (a reference that is an argument of its own would be resolved on the way)."""

    async def open(self, node: str) -> Any:
        """A path or bytes, for a replica on `node`."""
        if self.content is None or (node == self.node and os.path.exists(self.path)):
            return self.path
        return await self.content[0]
