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

from .attention import Caches, PagedContexts, PrefillAttention, Ranges
from .scheduler import Chunk, Step


@dataclass(frozen=True)
class PrefillBatch:
    """Made anew for each step; T tokens, B sequences that sample."""

    tokens_T: Tensor  # int32
    positions_T: Tensor  # int32
    attention: PrefillAttention
    last_B: Tensor  # int32, the last token of each that samples; of padding the first of all
    rows_B: Tensor  # int32, see `DecodeBatch`
    temperatures_B: Tensor  # fp32

    @classmethod
    def build(
        cls, step: Step, size: int, kv_caches: Caches, samples: Padding | None = None, use_kernel: bool = True
    ) -> PrefillBatch:
        """Of a step's chunks, padded to `size` tokens, on the caches' device, where they come in one copy.

        `samples`: the padding for the sequences that sample; None: they are not padded. `use_kernel`: see
        `PrefillAttention`.
        """
        chunks, k_cache = step.chunks, kv_caches[0][0]
        whole = all(chunk.start == 0 for chunk in chunks)
        queries = Ranges([chunk.stop - chunk.start for chunk in chunks])
        lengths = queries if whole else Ranges([chunk.stop for chunk in chunks])
        tables = [_table(chunk, k_cache.shape[1]) for chunk in chunks]
        table_bounds = Ranges([len(table) for table in tables])
        padding = [] if samples is None else [samples.row] * (samples.size - len(step.sampling))
        tokens_T, positions_T, slots_T, blocks_M, *bounds, last_B, rows_B, bits_B = _on_device(
            k_cache.device,
            _joined(size, (chunk.sequence.tokens[chunk.start : chunk.stop] for chunk in chunks)),
            _joined(size, (np.arange(chunk.start, chunk.stop) for chunk in chunks)),
            _joined(size, (_slots(chunk, k_cache.shape[1]) for chunk in chunks)),
            [] if whole else np.concatenate(tables),
            queries.bounds,
            [] if whole else lengths.bounds,
            [] if whole else table_bounds.bounds,
            [end - 1 for chunk, end in zip(chunks, queries.bounds[1:]) if chunk.samples] + [0] * len(padding),
            [sequence.row for sequence in step.sampling] + padding,
            np.array(
                [sequence.sampling.temperature for sequence in step.sampling] + [0.0] * len(padding), np.float32
            ).view(np.int32),
        )
        queries.bounds_on_device = bounds[0]
        earlier = None
        if not whole:
            lengths.bounds_on_device, table_bounds.bounds_on_device = bounds[1:]
            earlier = PagedContexts(lengths, blocks_M, table_bounds)
        attention = PrefillAttention(kv_caches, slots_T, queries, earlier, use_kernel)
        return cls(tokens_T, positions_T, attention, last_B, rows_B, bits_B.view(torch.float32))


@dataclass(frozen=True)
class Padding:
    """So many sequences, those beyond the real ones with this row (see `DecodeBatch`)."""

    size: int
    row: int


def _on_device(device: torch.device, *parts: Any) -> list[Tensor]:
    """Int32 tensors, in one asynchronous copy: torch keeps the pinned memory until it is done.

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


def _slots(chunk: Chunk, block_size: int) -> NDArray[Any]:
    """Where K and V of a chunk's tokens go."""
    at = np.arange(chunk.start, chunk.stop)
    return np.array(chunk.sequence.blocks)[at // block_size] * block_size + at % block_size


def _table(chunk: Chunk, block_size: int) -> list[int]:
    """The blocks of a chunk's context."""
    return chunk.sequence.blocks[: -(-chunk.stop // block_size)]
