"""Captures parts of a step as CUDA graphs, all in one pool of memory inside a region, and accounts for them."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

import memsaver

from .memory import EngineMemory

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Graph(Protocol):
    """A captured graph. A replay runs it again on the same addresses."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class Capture:
    """The cost of the graphs of one size.

    `nbytes` is the growth of the pool: the temporaries of a step. Graphs of one pool never run at the same time, so
    they share them. The largest graph is captured first. A later one adds the part that does not fit.
    """

    name: str
    graphs: int
    nbytes: int
    seconds: float


class GraphPool:
    """One pool and one stream for all captures. There are no graphs on the CPU."""

    def __init__(self, memory: EngineMemory, device: torch.device, freeze_gc: bool = True) -> None:
        self.memory, self.device, self.freeze_gc = memory, device, freeze_gc
        self.captures: list[Capture] = []
        self._stream: Any = None
        self._plain_pool: Any = None  # without regions
        self._graphs = 0

    @property
    def available(self) -> bool:
        return self.device.type == "cuda"

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around warm-up and captures. If this raises, drop the graphs captured inside."""
        with torch.cuda.device(self.device), _garbage_frozen(self.freeze_gc):
            # One stream for all: cuBLAS keeps a workspace for each stream for good, so the capture's has to be made by
            # the warm-up, outside any region.
            self._stream = self._stream or torch.cuda.Stream()
            self.memory.make_graph_region()
            yield

    def warm_up(self, functions: list[Callable[[], object]]) -> None:
        """Run each twice: the first run compiles kernels, loads libraries, and makes allocations that last."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for function in functions:
                function()
                function()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as a capture does when it begins: it would count against the first one's account

    @contextmanager
    def account(self, name: str) -> Iterator[None]:
        """Around the captures of one size."""
        begin, held, graphs = time.perf_counter(), self._held_bytes(), self._graphs
        yield
        done = Capture(name, self._graphs - graphs, self._held_bytes() - held, time.perf_counter() - begin)
        self.captures.append(done)
        log.info("captured %s: %d graphs, %d bytes, %.3f s", done.name, done.graphs, done.nbytes, done.seconds)

    def capture(self, function: Callable[[], _T]) -> tuple[Graph, _T]:
        """Capture the kernels that a function launches. Returns the graph and the result, which each replay overwrites.

        Raises the function's error, or the error that ended the capture.
        """
        self._graphs += 1
        reason: BaseException | None = None
        graph: Any = memsaver.CUDAGraph() if self.memory.use_regions else torch.cuda.CUDAGraph()
        try:
            with self._capturing(graph):
                try:
                    outputs = function()
                except BaseException as error:
                    reason = error
                    raise
        except BaseException as error:
            if reason is None or reason is error:
                raise
            raise reason from None  # the end of a broken capture raised as well; the first error is the cause
        return graph, outputs

    def table(self) -> str:
        """The captures, one a line, and their sum."""
        sums = [sum(getattr(row, name) for row in self.captures) for name in ("graphs", "nbytes", "seconds")]
        rows = [*self.captures, Capture("all", *sums)]
        lines = [f"{row.name:>14} {row.graphs:>6} {row.nbytes / (1 << 20):>10.1f} {row.seconds:>8.3f}" for row in rows]
        return "\n".join([f"{'captured':>14} {'graphs':>6} {'pool MiB':>10} {'s':>8}", *lines])

    def _capturing(self, graph: Any) -> Any:
        if not self.memory.use_regions:
            self._plain_pool = self._plain_pool or torch.cuda.graph_pool_handle()
            return torch.cuda.graph(graph, pool=self._plain_pool, stream=self._stream)
        return memsaver.graph(graph, region=self.memory.cuda_graph, needs=self.memory.of_a_step, stream=self._stream)

    def _held_bytes(self) -> int:
        if not self.memory.use_regions:
            return torch.cuda.memory_reserved(self.device)
        return int(self.memory.cuda_graph.allocated_bytes)


@contextmanager
def _garbage_frozen(freeze: bool) -> Iterator[None]:
    """No collection inside: one in the middle of a capture could free CUDA memory and break it."""
    if not freeze:
        yield
        return
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
