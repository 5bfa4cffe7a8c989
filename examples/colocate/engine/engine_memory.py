"""The regions of the engine's tensors, one for each lifetime, and captures of CUDA graphs into one of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import memsaver


class EngineMemory:
    """The engine's regions on one device.

    weights    backed up on the host
    kv_cache   not backed up: after a resume its contents are undefined
    buffers    constants and static inputs and outputs; apart from the weights, whose resume may not restore them
    cuda_graph the pool of the captured graphs; none without graphs. It has the temporaries of a step, and is backed up
               since kernels may keep counters or workspaces in it from one replay to the next

    Graphs of one pool never run at the same time, so they share its memory: the largest is captured first.
    """

    def __init__(self, device: torch.device, region: Any = memsaver.region) -> None:
        """`region`: makes one of a tag, a device and a backup. Those of other savers are in `savers.py`."""
        self.device, place = device, str(device)
        self.captures_graphs = device.type == "cuda" and getattr(region, "keeps_addresses", True)
        self.weights: Any = region("weights", device=place, backup="host")
        self.kv_cache: Any = region("kv_cache", device=place)
        self.buffers: Any = region("buffers", device=place, backup="host")
        self.cuda_graph: Any = region("cuda_graph", device=place, backup="host") if self.captures_graphs else None
        self._stream: Any = None

    def check_active(self, graphs: bool) -> None:
        """Raise memsaver.RegionPausedError, with its tag, if a region that a step touches is not resident."""
        pool = [self.cuda_graph] if graphs and self.cuda_graph is not None else []
        for region in (self.weights, self.kv_cache, self.buffers, *pool):
            region.check_active("serve a step of the engine")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around warm-up and captures. If this raises, drop the graphs captured inside."""
        # One stream for all: cuBLAS keeps a workspace for each stream for good, so the capture's has to be made by the
        # warm-up, outside any region.
        self._stream = self._stream or torch.cuda.Stream(self.device)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection in the middle of a capture could free CUDA memory and break it
        try:
            yield
        finally:
            gc.enable()
            gc.unfreeze()

    def warm_up(self, functions: list[Callable[[], object]]) -> None:
        """Run each twice: the first run compiles kernels, loads libraries, and makes allocations that last."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for function in functions:
                function()
                function()
        torch.cuda.synchronize()

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        """Capture the kernels that a function launches. Returns the graph and the result, which each replay overwrites.

        Raises the function's error, or the error that ended the capture.
        """
        reasons: list[BaseException] = []
        graph, context = self.graph()
        try:
            with context:
                try:
                    return graph, function()
                except BaseException as error:
                    reasons.append(error)
                    raise
        except BaseException as end:
            # The end of a broken capture raises as well; the first error is the cause.
            raise (*reasons, end)[0] from None

    def graph(self) -> tuple[Any, AbstractContextManager[Any]]:
        """A graph, and the context that captures it: its memory comes from the region, its replays need all regions."""
        if not isinstance(self.cuda_graph, memsaver.Region):
            found: tuple[Any, AbstractContextManager[Any]] = self.cuda_graph.graph(self._stream)
            return found
        graph, needs = memsaver.CUDAGraph(), [self.weights, self.kv_cache, self.buffers]
        return graph, memsaver.graph(graph, region=self.cuda_graph, needs=needs, stream=self._stream)


def borrowed(tensor: Tensor) -> Tensor:
    """A view of CUDA memory with a storage of its own, which does not keep the memory from being used again."""
    if not tensor.is_cuda:
        return tensor
    width = tensor.element_size()
    strides = tuple(stride * width for stride in tensor.stride())
    interface = {"data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape), "strides": strides}
    owner = SimpleNamespace(__cuda_array_interface__={**interface, "typestr": f"<i{width}", "version": 3})
    return torch.as_tensor(owner, device=tensor.device).view(tensor.dtype)
