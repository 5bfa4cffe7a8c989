"""The static tensors of a decode step: a graph reads its inputs and leaves its outputs at these addresses.

The host never needs a sampled token to launch the next step: it stays on the device, in `latest`, at the row that its
sequence owns, and the host reads it back while the next step runs. Transfers alternate between two pinned buffers, so
none is overwritten before the step that it belongs to is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .sequence import Sequence

# Columns of a row, before the block table.
_ROW, _POSITION, _SLOT, _LENGTH, _TEMPERATURE, _BLOCKS = range(6)
_TOKEN, _LOGPROB = range(2)  # rows of the outputs


class DecodeBatch:
    """Inputs and outputs for up to `max_batch_size` sequences, in a region.

    All inputs of a sequence are one row of int32, so a step's inputs come in one copy, of whole rows: row in `latest`,
    position, slot, length, temperature (the bits of an fp32), then the blocks. Tokens and log-probabilities (the bits
    of an fp32) leave in one copy, too.
    """

    def __init__(
        self, max_batch_size: int, max_blocks: int, block_size: int, buffers: Any, device: torch.device
    ) -> None:
        self.device = device
        self.inputs: Tensor = buffers.empty((max_batch_size, _BLOCKS + max_blocks), torch.int32)
        self.outputs: Tensor = buffers.empty((2, max_batch_size), torch.int32)
        self.latest: Tensor = buffers.empty((max_batch_size + 1,), torch.int64)  # the last one is padding's
        for tensor in (self.inputs, self.outputs, self.latest):
            tensor.zero_()
        self._stagings = [_Staging(self.inputs, block_size, device) for _ in range(2)]
        self._readbacks = [_pinned(self.outputs, device) for _ in range(2)]

    @property
    def padding_row(self) -> int:
        """Of `latest`, which no sequence owns."""
        return len(self.latest) - 1

    def fill(self, sequences: list[Sequence], size: int) -> None:
        """Set the first `size` rows: the sequences' last tokens, then padding, which touches no live block.

        The copy is queued on the current stream. At most one earlier step may still be in flight.
        """
        self._stagings.reverse()
        self.inputs[:size].copy_(self._stagings[0].fill(sequences, size), non_blocking=True)

    def store(self, rows_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor) -> None:
        """Keep the samples (int64 and fp32 [B]) of these rows for the next step, and for the host."""
        count = len(tokens_B)
        self.latest.index_copy_(0, rows_B.long(), tokens_B)
        self.outputs[_TOKEN, :count].copy_(tokens_B)
        self.outputs.view(torch.float32)[_LOGPROB, :count].copy_(logprobs_B)

    def read_back(self) -> Readback:
        """Queue the copy of the outputs to the host. At most one earlier one may be unread."""
        self._readbacks.reverse()
        host = self._readbacks[0]
        host.copy_(self.outputs, non_blocking=True)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return Readback(host, event)

    def tokens(self, size: int) -> Tensor:
        """Int64 [size]."""
        return self.latest.index_select(0, self.rows(size))

    def rows(self, size: int) -> Tensor:
        """Int32 [size], a view, in `latest`."""
        return self.inputs[:size, _ROW]

    def positions(self, size: int) -> Tensor:
        """Int32 [size], a view."""
        return self.inputs[:size, _POSITION]

    def slots(self, size: int) -> Tensor:
        """Int32 [size], a view; 0, of the scratch block, for padding."""
        return self.inputs[:size, _SLOT]

    def lengths(self, size: int) -> Tensor:
        """Int32 [size], a view; 0 for padding."""
        return self.inputs[:size, _LENGTH]

    def temperatures(self, size: int) -> Tensor:
        """Fp32 [size], a view."""
        return self.inputs.view(torch.float32)[:size, _TEMPERATURE]

    def block_table(self, size: int) -> Tensor:
        """Int32 [size, max_blocks], a view; entries beyond a sequence's length are stale."""
        return self.inputs[:size, _BLOCKS:]

    def addresses(self) -> dict[str, int]:
        """Where the static tensors are."""
        return {name: getattr(self, name).data_ptr() for name in ("inputs", "outputs", "latest")}


@dataclass(frozen=True)
class Readback:
    """Outputs on their way to the host."""

    _host: Tensor
    _event: Any

    def wait(self, count: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of the first `count` sequences."""
        if self._event is not None:
            self._event.synchronize()
        return self._host[_TOKEN, :count].tolist(), self._host.view(torch.float32)[_LOGPROB, :count].tolist()


class _Staging:
    """Inputs on the host. Blocks of a row that are there from an earlier step are not written again."""

    def __init__(self, inputs: Tensor, block_size: int, device: torch.device) -> None:
        self._block_size, self._tensor = block_size, _pinned(inputs, device)
        self._rows = self._tensor.numpy()
        self._temperatures = self._rows.view("float32")[:, _TEMPERATURE]
        # Whose blocks a row holds, and how many: a sequence's list only grows, and a new one starts as another list.
        self._held: list[tuple[list[int] | None, int]] = [(None, 0)] * len(inputs)

    def fill(self, sequences: list[Sequence], size: int) -> Tensor:
        block_size, heads = self._block_size, []
        for sequence in sequences:
            position = sequence.num_computed - 1
            slot = sequence.blocks[position // block_size] * block_size + position % block_size
            heads.append((sequence.row, position, slot, position + 1))
        heads += [(len(self._rows), 0, 0, 0)] * (size - len(sequences))
        self._rows[:size, :_TEMPERATURE] = heads
        self._temperatures[: len(sequences)] = [sequence.sampling.temperature for sequence in sequences]
        self._temperatures[len(sequences) : size] = 0.0
        for index, sequence in enumerate(sequences):
            blocks, (held, count) = sequence.blocks, self._held[index]
            if held is not blocks:
                count = 0
            if count < len(blocks):
                self._rows[index, _BLOCKS + count : _BLOCKS + len(blocks)] = blocks[count:]
                self._held[index] = (blocks, len(blocks))
        return self._tensor[:size]


def _pinned(like: Tensor, device: torch.device) -> Tensor:
    """Zeros on the host, for asynchronous copies."""
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu", pin_memory=device.type == "cuda")
