"""Where the engine's tensors live: one memsaver region for each lifetime."""

from __future__ import annotations

from typing import Any

import torch

import memsaver


class EngineMemory:
    """The engine's regions on one device.

    weights    backed up on the host; resumed without restoring when a weight sync is about to overwrite them
    kv_cache   not backed up: after a resume its contents are undefined, and the prefix cache has to be dropped
    buffers    constants and static inputs and outputs; apart from the weights, whose resume may not restore them
    cuda_graph the pool of the captured graphs; made for the first capture, so there is none on the CPU
    """

    def __init__(self, device: torch.device) -> None:
        self.weights: Any = memsaver.region("weights", device=str(device), backup="host")
        self.kv_cache: Any = memsaver.region("kv_cache", device=str(device))
        self.buffers: Any = memsaver.region("buffers", device=str(device), backup="host")
        self.cuda_graph: Any = None
        self._device = str(device)

    def make_graph_region(self) -> Any:
        """The region for captures; backed up, because graphs keep state in their pool between replays."""
        self.cuda_graph = memsaver.region("cuda_graph", device=self._device, backup="host")
        return self.cuda_graph

    @property
    def of_a_step(self) -> list[Any]:
        """The regions that every step touches, a graph's replay included."""
        return [self.weights, self.kv_cache, self.buffers]

    def check_active(self, graphs: bool) -> None:
        """Raise memsaver.RegionPausedError, with its tag, if a region that a step touches is not resident."""
        for region in self.of_a_step + ([self.cuda_graph] if graphs and self.cuda_graph is not None else []):
            region.check_active("serve a step of the engine")
