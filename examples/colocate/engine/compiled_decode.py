"""torch.compile for decode steps of a few batch sizes. No other file of the engine needs this one to be understood."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BACKEND = "inductor"
_MOST = 8  # variants of one function, after which torch.compile gives up


def compiled(decode_logits: Callable[[int], Tensor], sizes: tuple[int, ...]) -> Callable[[int], Tensor]:
    """The function (batch size -> logits), compiled anew for each of these sizes when it is first called with it.

    Raises ValueError for more than 8 sizes.
    """
    if not sizes:
        return decode_logits
    if len(sizes) > _MOST:
        raise ValueError(f"compile_batch_sizes has {len(sizes)} sizes; expected at most {_MOST}")
    fast = torch.compile(decode_logits, backend=BACKEND, fullgraph=True, dynamic=False)
    return lambda size: fast(size) if size in sizes else decode_logits(size)
