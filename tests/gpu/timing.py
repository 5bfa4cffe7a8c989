"""The cycles of ``torch.cuda._sleep`` for a time in seconds."""

from __future__ import annotations

import functools

import torch

_CYCLES = 200_000_000


@functools.cache
def cycles_per_second() -> float:
    """Of the device that is current at the first call, at the clock that it has under load."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES)  # the clock rises
    began.record()
    torch.cuda._sleep(_CYCLES)
    ended.record()
    ended.synchronize()
    return _CYCLES / (began.elapsed_time(ended) / 1e3)
