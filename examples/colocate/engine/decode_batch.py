"""The static tensors of a decode step: a graph reads its inputs and leaves its outputs at these addresses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .sequence import Sequence

# Columns of a row, before the block table.
_TOKEN, _POSITION, _SLOT, _LENGTH, _TEMPERATURE, _BLOCKS = range(6)


class DecodeBatch:
    """Inputs and outputs for up to `max_batch_size` sequences, in a region.

    All inputs of a sequence are one row of int32, so a step's inputs come in one copy, of whole rows:
    token, position, slot, length, temperature (the bits of an fp32), then the blocks.
    """

    def __init__(self, max_batch_size: int, max_blocks: int, buffers: Any, device: torch.device) -> None:
        shape = (max_batch_size, _BLOCKS + max_blocks)
        self.rows: Tensor = buffers.empty(shape, torch.int32)
        self.tokens_out_B: Tensor = buffers.empty((max_batch_size,), torch.int64)
        self.logprobs_out_B: Tensor = buffers.empty((max_batch_size,), torch.float32)
        self.rows.zero_()
        self.tokens_out_B.zero_()
        self.logprobs_out_B.zero_()
        # Pinned for an asynchronous copy; refilled only after the step before has been read back.
        self._staging = torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")

    def fill(self, sequences: list[Sequence], size: int, block_size: int) -> None:
        """Set the first `size` rows: the sequences' last tokens, then padding, which touches no live block."""
        heads: list[tuple[int, int, int, int]] = []
        for sequence in sequences:
            position = len(sequence.tokens) - 1
            slot = sequence.blocks[position // block_size] * block_size + position % block_size
            heads.append((sequence.tokens[-1], position, slot, position + 1))
        heads += [(0, 0, 0, 0)] * (size - len(sequences))
        temperatures = [sequence.sampling.temperature for sequence in sequences] + [0.0] * (size - len(sequences))
        width = max((len(sequence.blocks) for sequence in sequences), default=0)
        tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence in sequences]
        staging = self._staging[:size]
        staging[:, :_TEMPERATURE] = torch.tensor(heads, dtype=torch.int32, device="cpu")
        staging.view(torch.float32)[:, _TEMPERATURE] = torch.tensor(temperatures, dtype=torch.float32, device="cpu")
        if width:
            table = torch.tensor(tables, dtype=torch.int32, device="cpu")
            staging[: len(sequences), _BLOCKS : _BLOCKS + width] = table
        self.rows[:size].copy_(staging, non_blocking=True)

    def tokens(self, size: int) -> Tensor:
        """Int64 [size]."""
        return self.rows[:size, _TOKEN].long()

    def positions(self, size: int) -> Tensor:
        """Int64 [size]."""
        return self.rows[:size, _POSITION].long()

    def slots(self, size: int) -> Tensor:
        """Int64 [size]; 0, of the scratch block, for padding."""
        return self.rows[:size, _SLOT].long()

    def lengths(self, size: int) -> Tensor:
        """Int32 [size], a view; 0 for padding."""
        return self.rows[:size, _LENGTH]

    def temperatures(self, size: int) -> Tensor:
        """Fp32 [size], a view."""
        return self.rows.view(torch.float32)[:size, _TEMPERATURE]

    def block_table(self, size: int) -> Tensor:
        """Int32 [size, max_blocks], a view; entries beyond a sequence's length are stale."""
        return self.rows[:size, _BLOCKS:]

    def addresses(self) -> dict[str, int]:
        """Where the static tensors are."""
        names = ("rows", "tokens_out_B", "logprobs_out_B")
        return {name: getattr(self, name).data_ptr() for name in names}
