"""The inputs of a prefill: chunks of several sequences laid end to end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import Caches, PrefillAttention, Ranges
from .scheduler import Step
from .sequence import Sequence


@dataclass(frozen=True)
class PrefillBatch:
    """Made anew for each step; T tokens, B sequences that sample."""

    tokens_T: Tensor  # int32
    positions_T: Tensor  # int32
    attention: PrefillAttention
    last_B: Tensor  # int32, the last token of each that samples
    rows_B: Tensor  # int32, see `DecodeBatch`
    temperatures_B: Tensor  # fp32

    @classmethod
    def build(cls, step: Step, size: int, kv_caches: Caches) -> PrefillBatch:
        """Of a step's chunks, padded to `size` tokens, on the caches' device, where they come in one copy."""
        chunks, k_cache = step.chunks, kv_caches[0][0]
        slots = [_slots(chunk.sequence, chunk.stop, k_cache.shape[1]) for chunk in chunks]
        whole = all(chunk.start == 0 for chunk in chunks)
        queries = Ranges([chunk.stop - chunk.start for chunk in chunks])
        context = queries if whole else Ranges([chunk.stop for chunk in chunks])
        tokens_T, positions_T, slots_T, context_slots_L, *bounds, last_B, rows_B, bits_B = _on_device(
            k_cache.device,
            _joined(size, (chunk.sequence.tokens[chunk.start : chunk.stop] for chunk in chunks)),
            _joined(size, (np.arange(chunk.start, chunk.stop) for chunk in chunks)),
            _joined(size, (each[chunk.start :] for chunk, each in zip(chunks, slots))),
            [] if whole else np.concatenate(slots),
            queries.bounds,
            context.bounds,
            [end - 1 for chunk, end in zip(chunks, queries.bounds[1:]) if chunk.samples],
            [sequence.row for sequence in step.sampling],
            np.array([sequence.sampling.temperature for sequence in step.sampling], np.float32).view(np.int32),
        )
        queries.bounds_on_device, context.bounds_on_device = bounds
        attention = PrefillAttention(kv_caches, slots_T, queries, context, None if whole else context_slots_L)
        return cls(tokens_T, positions_T, attention, last_B, rows_B, bits_B.view(torch.float32))


def _on_device(device: torch.device, *parts: Any) -> list[Tensor]:
    """Int32 tensors, in one copy that nobody waits for: torch keeps the pinned memory until it is done.

    Each begins at a multiple of 16 bytes: kernels are compiled anew for addresses that do and that do not.
    """
    starts = [0, *accumulate(-(-len(part) // 4) * 4 for part in parts)]
    packed = torch.zeros(starts[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    for start, part in zip(starts, parts):
        packed.numpy()[start : start + len(part)] = part
    packed = packed.to(device, non_blocking=True)
    return [packed[start : start + len(part)] for start, part in zip(starts, parts)]


def _joined(size: int, rows: Iterable[Any]) -> NDArray[np.int32]:
    """The rows end to end, then zeros."""
    joined, end = np.zeros(size, np.int32), 0
    for row in rows:
        begin, end = end, end + len(row)
        joined[begin:end] = row
    return joined


def _slots(sequence: Sequence, length: int, block_size: int) -> NDArray[Any]:
    """Where K and V of the first tokens are."""
    return np.add.outer(block_size * np.array(sequence.blocks), np.arange(block_size)).ravel()[:length]
