"""The inputs and outputs of steps, at fixed addresses, where the graphs of decode steps have them.

The host never needs a sampled token to launch the next step: it stays on the device, in `latest`, at the row that its
sequence owns, and the host reads it back while the next step runs. Each transfer has pinned memory of its own, which
torch keeps until the transfer is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .attention import Chunks
from .scheduler import Chunk
from .sequence import Sequence

# Columns of a row, before the block table.
_ROW, _POSITION, _SLOT, _LENGTH, _TEMPERATURE, _BLOCKS = range(6)
_TOKEN, _LOGPROB = range(2)  # rows of the outputs


class Columns(NamedTuple):
    """Views of a step's inputs, int32 [B] but for two."""

    rows_B: Tensor  # in `latest`
    positions_B: Tensor
    slots_B: Tensor  # 0, of the scratch block, for padding
    lengths_B: Tensor  # 0 for padding
    temperatures_B: Tensor  # fp32
    block_table: Tensor  # int32 [B, max_blocks]; entries beyond a sequence's length mean nothing


class Batch:
    """Inputs and outputs for up to `max_batch_size` sequences, in a region.

    All inputs of a sequence are one row of int32, see `Columns`, so a step's inputs come in one copy of whole rows.
    Temperatures and log-probabilities are the bits of an fp32.
    """

    def __init__(self, max_batch_size: int, max_blocks: int, block_size: int, seed: int, buffers: Any) -> None:
        self.block_size, self.padding_row = block_size, max_batch_size  # a row that no sequence owns
        self.inputs: Tensor = buffers.empty((max_batch_size, _BLOCKS + max_blocks), torch.int32).zero_()
        self.outputs: Tensor = buffers.empty((2, max_batch_size), torch.int32).zero_()
        self.latest: Tensor = buffers.empty((max_batch_size + 1,), torch.int64).zero_()
        # Of sampling: a seed, and a count of calls.
        self.random_state: Tensor = buffers.empty((2,), torch.int64).copy_(torch.tensor([seed, 0]))
        self._tables = np.zeros((max_batch_size + 1, max_blocks), np.int32)  # by the row that a sequence owns

    def start(self, sequences: list[Sequence]) -> None:
        """Take the block tables of sequences. Blocks that they get later come one by one, with `fill`."""
        for sequence in sequences:
            self._tables[sequence.row, : len(sequence.blocks)] = sequence.blocks

    def fill(self, sequences: list[Sequence], size: int) -> None:
        """Set the first `size` rows: of sequences after the step, then padding, which touches no live block."""
        staging, count = self._pinned(size, self.inputs.shape[1]), len(sequences)
        host = staging.numpy()
        host[count:, :_BLOCKS] = self.padding_row, 0, 0, 0, 0
        if count:
            rows = np.array([each.row for each in sequences])
            positions = np.array([each.num_computed - 1 for each in sequences])
            at = positions // self.block_size
            blocks = np.array([each.blocks[index] for each, index in zip(sequences, at.tolist())])
            self._tables[rows, at] = blocks
            slots = blocks * self.block_size + positions % self.block_size
            host[:count, :_TEMPERATURE] = np.stack((rows, positions, slots, positions + 1), axis=1)
            host.view(np.float32)[:count, _TEMPERATURE] = [each.sampling.temperature for each in sequences]
            used = at.max() + 1
            host[:count, _BLOCKS : _BLOCKS + used] = self._tables[rows, :used]
        self.inputs[:size].copy_(staging, non_blocking=True)

    def lay_out(
        self, chunks: list[Chunk], num_tokens: int, num_samples: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Chunks]:
        """The chunks of a prefill end to end, padded to so many tokens and samples. Call it after `start` and `fill`.

        Tokens, positions and slots (int32 [T], zeros for padding), where the last token is of each sequence that
        samples (int32 [B]; the last chunk alone may not sample), and the chunks' bounds.
        """
        starts, stops = np.array([(chunk.start, chunk.stop) for chunk in chunks]).T
        bounds = np.concatenate(([0], (stops - starts).cumsum()))
        owners = np.repeat(np.arange(len(chunks)), stops - starts)
        positions = np.arange(bounds[-1]) + (starts - bounds[:-1])[owners]
        rows = np.array([chunk.sequence.row for chunk in chunks])
        blocks = self._tables[rows[owners], positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        tokens = np.concatenate([chunk.sequence.tokens[chunk.start : chunk.stop] for chunk in chunks])
        # Each row begins at a multiple of 16 bytes: kernels are compiled anew for addresses that do not.
        staging = self._pinned(5, -(-max(num_tokens, num_samples, len(bounds)) // 4) * 4).zero_()
        for row, values in zip(staging.numpy(), (tokens, positions, slots, bounds[1:] - 1, bounds)):
            row[: len(values)] = values
        device = staging.to(self.inputs.device, non_blocking=True)
        laid = Chunks(device[4, : len(bounds)], int((stops - starts).max()))
        tokens_T, positions_T, slots_T = device[:3, :num_tokens]
        return tokens_T, positions_T, slots_T, device[3, :num_samples], laid

    def store(self, rows_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor) -> None:
        """Keep the samples (int64 and fp32 [B]) of these rows for the next step, and for the host."""
        count = len(tokens_B)
        self.latest.index_copy_(0, rows_B.long(), tokens_B)
        self.outputs[_TOKEN, :count].copy_(tokens_B)
        self.outputs.view(torch.float32)[_LOGPROB, :count].copy_(logprobs_B)

    def read_back(self) -> Readback:
        """Queue the copy of the outputs to the host."""
        host = self.outputs.to("cpu", non_blocking=True, copy=True)  # pinned
        event = torch.cuda.Event() if self.outputs.is_cuda else None
        if event is not None:
            event.record()
        return Readback(host, event)

    def columns(self, size: int) -> Columns:
        """The inputs of the first `size` rows."""
        inputs = self.inputs[:size]
        rows_B, positions_B, slots_B, lengths_B = inputs[:, :_TEMPERATURE].unbind(1)
        temperatures_B = inputs.view(torch.float32)[:, _TEMPERATURE]
        return Columns(rows_B, positions_B, slots_B, lengths_B, temperatures_B, inputs[:, _BLOCKS:])

    def _pinned(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=self.inputs.is_cuda)


class Readback(NamedTuple):
    """Outputs on their way to the host."""

    host: Tensor
    event: Any

    def wait(self, count: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of the first `count` sequences."""
        if self.event is not None:
            self.event.synchronize()
        return self.host[_TOKEN, :count].tolist(), self.host.view(torch.float32)[_LOGPROB, :count].tolist()
