"""Collectives whose name depends on the version of torch."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather_tensor(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather the tensors of all ranks, one after the other along the first dimension of `gathered`."""
    # torch 2.13 deprecates the name that is the only one before it.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(gathered, mine, group=group)
