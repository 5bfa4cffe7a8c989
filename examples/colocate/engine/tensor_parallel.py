"""Tensor parallel, as in Megatron-LM: one process for each rank, all making the same calls with the same arguments.

Column-parallel products give each rank its share of the outputs, row-parallel ones a summand of all outputs; so a layer
needs two all-reduces. Where graphs are paused set NCCL_GRAPH_REGISTER=0 before the process group is made.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Parallel:
    """This process's rank among those that hold one model; by default it is alone, and nothing is sent."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`torch.distributed.group.WORLD`, once that is initialised, or a part of it. None is one rank."""
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place, and returned."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def gather_last(self, x_TV: Tensor) -> Tensor:
        """The ranks' last dimensions one after the other: [T, size * V] on every rank."""
        if self.size == 1:
            return x_TV
        gathered = torch.empty((self.size, *x_TV.shape), dtype=x_TV.dtype, device=x_TV.device)
        # torch 2.13 deprecates the name that is the only one before it.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered.flatten(0, 1), x_TV.contiguous(), group=self.group)
        return gathered.transpose(0, 1).flatten(1)


ONE_RANK = Parallel()
