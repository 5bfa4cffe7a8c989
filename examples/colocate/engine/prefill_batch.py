"""The inputs of a prefill: chunks of several sequences laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Caches, PrefillAttention, Ranges
from .scheduler import Chunk, Step
from .sequence import Sequence


@dataclass(frozen=True)
class PrefillBatch:
    """Made anew for each step; T tokens, B sequences that sample."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64
    attention: PrefillAttention
    last_B: Tensor  # int64, the last token of each that samples
    rows_B: Tensor  # int64, see `DecodeBatch`
    temperatures_B: Tensor  # fp32

    @classmethod
    def build(cls, step: Step, size: int, kv_caches: Caches, block_size: int) -> PrefillBatch:
        """Of a step's chunks, padded to `size` tokens, on the caches' device."""
        device, chunks = kv_caches[0][0].device, step.chunks
        tokens = [token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.stop]]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
        contexts = [_slots(chunk.sequence, chunk.stop, block_size) for chunk in chunks]
        slots = [slot for chunk, context in zip(chunks, contexts) for slot in context[chunk.start :]]
        padding = [0] * (size - len(tokens))
        tokens_T, positions_T, slots_T = torch.tensor(
            [tokens + padding, positions + padding, slots + padding], device=device
        )
        whole = all(chunk.start == 0 for chunk in chunks)
        queries = Ranges([chunk.stop - chunk.start for chunk in chunks], device)
        attention = PrefillAttention(
            kv_caches,
            slots_T,
            queries,
            queries if whole else Ranges([chunk.stop for chunk in chunks], device),
            None if whole else torch.tensor([slot for context in contexts for slot in context], device=device),
        )
        ends = [end for chunk, end in zip(chunks, queries.bounds[1:]) if chunk.samples]
        temperatures = [sequence.sampling.temperature for sequence in step.sampling]
        return cls(
            tokens_T,
            positions_T,
            attention,
            torch.tensor(ends, dtype=torch.int64, device=device) - 1,
            torch.tensor([sequence.row for sequence in step.sampling], dtype=torch.int64, device=device),
            torch.tensor(temperatures, dtype=torch.float32, device=device),
        )


def count_tokens(chunks: list[Chunk]) -> int:
    return sum(chunk.stop - chunk.start for chunk in chunks)


def _slots(sequence: Sequence, length: int, block_size: int) -> list[int]:
    """Where K and V of the first tokens are."""
    places = range(block_size)
    slots = [block * block_size + place for block in sequence.blocks for place in places]
    return slots[:length]
