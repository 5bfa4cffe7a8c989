"""Decode steps as CUDA graphs, one for each of a few batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .config import padded_to
from .graph_pool import Graph, GraphPool


class GraphRunner:
    """Runs a step, which works on static tensors alone, by replaying its graph or by calling it.

    Both ways pad the batch to the same size, so both run the same kernels and give the same results.
    """

    def __init__(
        self, step: Callable[[int], None], sizes: tuple[int, ...], pool: GraphPool, eager_sizes: tuple[int, ...] = ()
    ) -> None:
        """`sizes` have graphs; `eager_sizes` are larger ones that batches are padded to as well. Both ascend."""
        self.step, self.sizes, self.pool = step, sizes, pool
        self.padded_sizes = sizes + eager_sizes
        self.graphs: dict[int, Graph] = {}
        self.replays = 0

    def padded_size(self, batch: int) -> int:
        """The size that a batch is padded to: the next of `padded_sizes`, or its own where there is none."""
        return padded_to(batch, self.padded_sizes)

    def can_run(self, batch: int) -> bool:
        """Whether a graph serves a batch of this many sequences."""
        return self.padded_size(batch) in self.graphs

    def run(self, size: int, use_graphs: bool) -> None:
        """Run the step on the filled inputs of a batch that was padded to this `padded_size`."""
        if use_graphs and self.can_run(size):
            self.graphs[size].replay()
            self.replays += 1
        else:
            self.step(size)

    def capture(self) -> None:
        """Capture every size, the largest first: its pool then has room for all others.

        The pool is open, and the step's inputs are padding.
        """
        steps = {size: partial(self.step, size) for size in reversed(self.sizes)}
        self.pool.warm_up(list(steps.values()))
        for size, step in steps.items():
            with self.pool.account(f"decode {size}"):
                self.graphs[size], _ = self.pool.capture(step)

    def release(self) -> None:
        """Drop the graphs."""
        self.graphs.clear()
