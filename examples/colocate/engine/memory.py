"""The regions of the engine's tensors: one for each lifetime."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import memsaver


class EngineMemory:
    """The engine's regions on one device.

    weights    backed up on the host. A pause with backup="none" and a resume with restore=False skip the copies
               of weights that a sync overwrites
    kv_cache   not backed up: after a resume its contents are undefined
    buffers    constants and static inputs and outputs; apart from the weights, whose resume may not restore them
    cuda_graph the pool of the captured graphs; made for the first capture, so there is none on the CPU

    With `use_regions` False all of it is torch's own memory, for comparison.
    """

    def __init__(self, device: torch.device, use_regions: bool = True) -> None:
        self.device, self.use_regions = device, use_regions
        self.weights = self._region("weights", backup="host")
        self.kv_cache = self._region("kv_cache")
        self.buffers = self._region("buffers", backup="host")
        self.cuda_graph: Any = None
        self.of_a_step = [
            self.weights,
            self.kv_cache,
            self.buffers,
        ]  # each step needs these, also a replay

    def make_graph_region(self) -> None:
        """The region for captures; backed up, because graphs keep state in their pool between replays."""
        self.cuda_graph = self._region("cuda_graph", backup="host")

    def check_active(self, graphs: bool) -> None:
        """Raise memsaver.RegionPausedError, with its tag, if a region that a step touches is not resident."""
        for region in self.of_a_step:
            region.check_active("serve a step of the engine")
        if graphs and self.cuda_graph is not None:
            self.cuda_graph.check_active("serve a step of the engine")

    def _region(self, tag: str, **policy: Any) -> Any:
        return memsaver.region(tag, device=str(self.device), **policy) if self.use_regions else Unmanaged(self.device)


class Unmanaged:
    """Torch's own memory, with the methods of a region that the engine uses."""

    residence = 1  # constant

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def check_active(self, purpose: str) -> None:
        """No check: this memory is always active."""


class _Borrowed:
    """A tensor's memory under CUDA's array interface, without the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        width = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * width for stride in tensor.stride()),
            "typestr": f"<i{width}",
            "version": 3,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """A view of CUDA memory with a storage of its own, which does not keep the memory from being used again."""
    if not tensor.is_cuda:
        return tensor
    return torch.as_tensor(_Borrowed(tensor), device=tensor.device).view(tensor.dtype)
