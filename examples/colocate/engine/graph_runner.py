"""Decode steps as CUDA graphs, one for each of a few batch sizes, in one pool inside a memsaver region."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import memsaver

from .memory import EngineMemory
from .sampler import Sampler


class GraphRunner:
    """Runs a step, which works on static tensors alone, by replaying its graph or by calling it.

    Both ways pad the batch to the same size, so both run the same kernels and give the same results. There are no
    graphs on the CPU: every step is called.
    """

    def __init__(
        self,
        step: Callable[[int], None],
        sizes: tuple[int, ...],
        sampler: Sampler,
        memory: EngineMemory,
        device: torch.device,
    ) -> None:
        self.step, self.sizes, self.sampler, self.memory, self.device = step, sizes, sampler, memory, device
        self.graphs: dict[int, Any] = {}
        self.replays = 0

    def padded_size(self, batch: int) -> int:
        """The size that a batch is padded to: the next of `sizes`, or its own where there is none."""
        return next((size for size in self.sizes if size >= batch), batch)

    def can_run(self, batch: int) -> bool:
        """Whether a graph serves a batch of this many sequences."""
        return self.padded_size(batch) in self.graphs

    def run(self, batch: int, use_graphs: bool) -> None:
        """Run the step on the filled inputs of a batch that was padded to `padded_size`."""
        size = self.padded_size(batch)
        if use_graphs and self.can_run(batch):
            self.graphs[size].replay()
            self.replays += 1
        else:
            self.step(size)

    def capture(self) -> None:
        """Capture every size, the largest first: its pool then has room for all others.

        The step's inputs must be padding. If a capture fails its error is raised, and there are no graphs: all steps
        are called, as before.
        """
        if self.device.type != "cuda" or self.graphs:
            return
        try:
            with torch.cuda.device(self.device), _garbage_frozen():
                # One stream for all: cuBLAS keeps a workspace for each stream for good, so the capture's has to be
                # made by the warm-up, outside any region.
                stream = torch.cuda.Stream()
                self.memory.make_graph_region()
                self._warm_up(stream)
                for size in reversed(self.sizes):
                    self._capture_one(size, stream)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Drop the graphs."""
        self.graphs.clear()
        if self.device.type == "cuda":
            self.sampler.renew()

    def _warm_up(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                for _ in range(2):
                    self.step(size)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def _capture_one(self, size: int, stream: torch.cuda.Stream) -> None:
        graph = memsaver.CUDAGraph()
        with self.memory.buffers:
            # The first registration allocates the seed and offset that replays read.
            graph.register_generator_state(self.sampler.generator)
        reason: BaseException | None = None
        try:
            with memsaver.graph(graph, region=self.memory.cuda_graph, needs=self.memory.of_a_step, stream=stream):
                try:
                    self.step(size)
                except BaseException as error:
                    reason = error
                    raise
        except BaseException as error:
            if reason is None or reason is error:
                raise
            raise reason from None  # ending a broken capture failed as well, and says only that
        self.graphs[size] = graph


@contextmanager
def _garbage_frozen() -> Iterator[None]:
    """No collection inside: one in the middle of a capture could free CUDA memory and break it."""
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
