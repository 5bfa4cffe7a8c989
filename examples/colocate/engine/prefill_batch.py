"""The inputs of a prefill: chunks of several sequences laid end to end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .attention import Caches, PrefillAttention, Ranges
from .scheduler import Chunk, Step
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
    def build(cls, step: Step, size: int, kv_caches: Caches, block_size: int) -> PrefillBatch:
        """Of a step's chunks, padded to `size` tokens, on the caches' device, where they come in one copy."""
        chunks = step.chunks
        padding = [0] * (size - count_tokens(chunks))
        whole = all(chunk.start == 0 for chunk in chunks)
        contexts = [_slots(chunk.sequence, chunk.stop, block_size) for chunk in chunks]
        queries = Ranges([chunk.stop - chunk.start for chunk in chunks])
        context = queries if whole else Ranges([chunk.stop for chunk in chunks])
        temperatures = array("f", [sequence.sampling.temperature for sequence in step.sampling])
        parts: list[Iterable[int]] = [
            [token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.stop]] + padding,
            [position for chunk in chunks for position in range(chunk.start, chunk.stop)] + padding,
            [slot for chunk, slots in zip(chunks, contexts) for slot in slots[chunk.start :]] + padding,
            [] if whole else [slot for slots in contexts for slot in slots],
            queries.bounds,
            context.bounds,
            [end - 1 for chunk, end in zip(chunks, queries.bounds[1:]) if chunk.samples],
            [sequence.row for sequence in step.sampling],
            array("i", temperatures.tobytes()),  # their bits
        ]
        tokens_T, positions_T, slots_T, context_slots_L, *bounds, last_B, rows_B, bits_B = _on_device(
            parts, kv_caches[0][0].device
        )
        queries.bounds_on_device, context.bounds_on_device = bounds
        attention = PrefillAttention(
            kv_caches, slots_T, queries, context, context_slots_L=None if whole else context_slots_L
        )
        return cls(tokens_T, positions_T, attention, last_B, rows_B, bits_B.view(torch.float32))


def _on_device(parts: list[Iterable[int]], device: torch.device) -> list[Tensor]:
    """Int32 tensors, in one copy that nobody waits for: torch keeps the pinned memory until it is done.

    Each begins at a multiple of 16 bytes: kernels are compiled anew for addresses that do and that do not.
    """
    arrays = [np.asarray(part, dtype=np.int32) for part in parts]
    starts = [0, *accumulate(-(-len(each) // 4) * 4 for each in arrays)]
    packed = torch.zeros(starts[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    for start, each in zip(starts, arrays):
        packed.numpy()[start : start + len(each)] = each
    packed = packed.to(device, non_blocking=True)
    return [packed[start : start + len(each)] for start, each in zip(starts, arrays)]


def count_tokens(chunks: list[Chunk]) -> int:
    return sum(chunk.stop - chunk.start for chunk in chunks)


def _slots(sequence: Sequence, length: int, block_size: int) -> list[int]:
    """Where K and V of the first tokens are."""
    places = range(block_size)
    slots = [block * block_size + place for block in sequence.blocks for place in places]
    return slots[:length]
