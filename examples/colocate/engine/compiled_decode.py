"""torch.compile for decode steps of a few batch sizes. No other file of the engine needs this one to be understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BACKEND = "inductor"
DecodeLogits = Callable[[Any, int], Tensor]  # of a runner and a batch size


def compiled(decode_logits: DecodeLogits, sizes: tuple[int, ...]) -> DecodeLogits:
    """The function, compiled anew for each of these sizes when it is first called with it. Torch takes up to 8."""
    fast = torch.compile(decode_logits, backend=BACKEND, fullgraph=True, dynamic=False) if sizes else decode_logits
    return lambda runner, size: (fast if size in sizes else decode_logits)(runner, size)
