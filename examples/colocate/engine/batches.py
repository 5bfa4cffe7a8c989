"""The inputs of a step: static tensors for a decode step, fresh ones for a prefill.

A graph of decode reads its inputs and leaves its outputs at the addresses of the static tensors.

The host never needs a sampled token to launch the next step: it stays on the device, in `latest`, at the row that its
sequence owns, and the host reads it back while the next step runs. Transfers alternate between two pinned buffers, so
none is overwritten before the step that it belongs to is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .attention import Caches, Chunks, PrefillAttention
from .scheduler import Step
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

    def __init__(self, max_batch_size: int, max_blocks: int, block_size: int, buffers: Any) -> None:
        self.block_size, self.padding_row = block_size, max_batch_size  # a row that no sequence owns
        self.inputs: Tensor = buffers.empty((max_batch_size, _BLOCKS + max_blocks), torch.int32)
        self.outputs: Tensor = buffers.empty((2, max_batch_size), torch.int32)
        self.latest: Tensor = buffers.empty((max_batch_size + 1,), torch.int64)
        for tensor in (self.inputs, self.outputs, self.latest):
            tensor.zero_()
        self._stagings, self._readbacks = ([_pinned(of) for _ in range(2)] for of in (self.inputs, self.outputs))
        self._tables = np.zeros((max_batch_size + 1, max_blocks), np.int32)  # by the row that a sequence owns

    def start(self, sequences: list[Sequence]) -> None:
        """Take the block tables of sequences that decode next. Blocks that they get later come with `fill`."""
        for sequence in sequences:
            self._tables[sequence.row, : len(sequence.blocks)] = sequence.blocks

    def fill(self, sequences: list[Sequence], size: int) -> None:
        """Set the first `size` rows: the sequences' last tokens, then padding, which touches no live block.

        The copy is queued on the current stream. At most one earlier step may still be in flight.
        """
        self._stagings.reverse()
        staging, count = self._stagings[0], len(sequences)
        host = staging.numpy()
        host[count:size, :_BLOCKS] = self.padding_row, 0, 0, 0, 0
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
        self.inputs[:size].copy_(staging[:size], non_blocking=True)

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


class Columns(NamedTuple):
    """Views of a step's inputs, int32 [B] but for two."""

    rows_B: Tensor  # in `latest`
    positions_B: Tensor
    slots_B: Tensor  # 0, of the scratch block, for padding
    lengths_B: Tensor  # 0 for padding
    temperatures_B: Tensor  # fp32
    block_table: Tensor  # int32 [B, max_blocks]; entries beyond a sequence's length are stale


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
    def build(cls, step: Step, num_tokens: int, num_samples: int, padding_row: int, kv_caches: Caches) -> PrefillBatch:
        """Of a step's chunks, padded to so many tokens and samples, on the caches' device, in one copy."""
        chunks, k_cache = step.chunks, kv_caches[0][0]
        block_size = k_cache.shape[1]
        spans = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
        tables = [np.array(chunk.sequence.blocks[: -(-chunk.stop // block_size)]) for chunk in chunks]
        slots = [table[span // block_size] * block_size + span % block_size for table, span in zip(tables, spans)]
        bounds = [0, *accumulate(map(len, spans))]
        padding = num_samples - len(step.sampling)
        temperatures = np.zeros(num_samples, np.float32)
        temperatures[: len(step.sampling)] = [sequence.sampling.temperature for sequence in step.sampling]
        tail = np.zeros(num_tokens - bounds[-1], np.int64)
        tokens_T, positions_T, slots_T, *paged, last_B, rows_B, bits_B = _on_device(
            k_cache.device,
            np.concatenate((*(chunk.sequence.tokens[chunk.start : chunk.stop] for chunk in chunks), tail)),
            np.concatenate((*spans, tail)),
            np.concatenate((*slots, tail)),
            bounds,
            [0, *accumulate(chunk.stop for chunk in chunks)],
            [0, *accumulate(map(len, tables))],
            np.concatenate(tables),
            [end - 1 for chunk, end in zip(chunks, bounds[1:]) if chunk.samples] + [0] * padding,
            [sequence.row for sequence in step.sampling] + [padding_row] * padding,
            temperatures.view(np.int32),
        )
        query_bounds, context_bounds, table_bounds, blocks_M = paged
        whole, longest = all(chunk.start == 0 for chunk in chunks), max(map(len, spans))
        laid = Chunks(query_bounds, context_bounds, table_bounds, blocks_M, bounds[-1], longest, whole)
        attention = PrefillAttention(kv_caches, slots_T, laid)
        return cls(tokens_T, positions_T, attention, last_B, rows_B, bits_B.view(torch.float32))


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


def _pinned(like: Tensor) -> Tensor:
    """Zeros on the host, for asynchronous copies from a tensor's device or to it."""
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
