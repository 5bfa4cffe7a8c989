"""Sampling in Triton: one pass over the logits, which are the largest tensor of a decode step after the weights.

The first kernel takes a part of a row each, the second joins a row's parts. Random numbers are those of Philox4x32-10
(Salmon et al., 2011): its key is the seed, its counter the logit's group of four, the row, and the count of calls.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .fused import pad

_PART = 4096  # logits of a program: 64 rows of 150,000 make over two thousand programs, one row still 37


def sample(logits_BV: Tensor, temperature_B: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.sample` on the GPU."""
    batch, vocab = logits_BV.shape
    parts = -(-vocab // _PART)
    # Of each part: the best score, its logit, the largest logit, and the sum of exponentials.
    found = logits_BV.new_empty((4, batch, parts), dtype=torch.float32)
    columns = logits_BV.new_empty((batch, parts), dtype=torch.int32)
    tokens_B = logits_BV.new_empty((batch,), dtype=torch.int64)
    logprobs_B = logits_BV.new_empty((batch,), dtype=torch.float32)
    _sample_part[(parts, batch)](
        logits_BV, temperature_B, state, found, columns, logits_BV.stride(0), temperature_B.stride(0),
        VOCAB=vocab, PART=_PART, num_warps=8,
    )  # fmt: skip
    _sample_joined[(batch,)](
        found, columns, temperature_B, tokens_B, logprobs_B, temperature_B.stride(0),
        PARTS=parts, PARTS_PAD=pad(parts), num_warps=1,
    )  # fmt: skip
    state[1:].add_(1)
    return tokens_B, logprobs_B


@triton.jit
def _sample_part(
    logits_ptr, temperature_ptr, state_ptr, found_ptr, columns_ptr, logits_stride, temperature_stride,
    VOCAB: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    mask = column < VOCAB
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + column, mask=mask, other=float("-inf"))
    logits = logits.to(tl.float32)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    scores = logits  # -inf beyond the vocabulary
    if temperature > 0.0:
        seed = tl.load(state_ptr)
        calls = tl.load(state_ptr + 1)
        # Philox makes four numbers at a time. It is most of the work of this kernel.
        group = part * (PART // 4) + tl.arange(0, PART // 4)
        low, high = (calls & 0xFFFFFFFF).to(tl.uint32), ((calls >> 32) & 0xFFFFFFFF).to(tl.uint32)
        first, second, third, fourth = tl.philox(seed, group.to(tl.uint32), row.to(tl.uint32), low, high)
        drawn = tl.join(tl.join(first, second), tl.join(third, fourth)).reshape(PART)
        uniform = tl.uint_to_uniform_float(drawn)
        # -log(1 - u), exact also where u is so small that 1 - u is 1; and never zero, whose logarithm is not finite.
        noise = tl.where(uniform < 1e-3, uniform + 0.5 * uniform * uniform, -tl.log(1.0 - uniform))
        scores -= temperature * tl.log(tl.maximum(noise, 1e-10))
    best = tl.max(scores, 0)
    # Inside the vocabulary also where logits are NaN, and nothing is the best.
    chosen = tl.min(tl.where((scores == best) & mask, column, VOCAB - 1), 0)
    peak = tl.max(logits, 0)
    at = row * tl.num_programs(0) + part
    plane = tl.num_programs(0) * tl.num_programs(1)
    tl.store(columns_ptr + at, chosen)
    tl.store(found_ptr + at, best)
    tl.store(found_ptr + plane + at, tl.sum(tl.where(column == chosen, logits, 0.0), 0))
    tl.store(found_ptr + 2 * plane + at, peak)
    # Differences to the peak are divided, not logits: a low temperature makes those large.
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    tl.store(found_ptr + 3 * plane + at, tl.sum(tl.exp((logits - peak) / divisor), 0))


@triton.jit
def _sample_joined(
    found_ptr, columns_ptr, temperature_ptr, tokens_ptr, logprobs_ptr, temperature_stride,
    PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.arange(0, PARTS_PAD)
    mask = part < PARTS
    at = row * PARTS + part
    plane = tl.num_programs(0) * PARTS
    scores = tl.load(found_ptr + at, mask=mask, other=float("-inf"))
    logits = tl.load(found_ptr + plane + at, mask=mask, other=0.0)
    peaks = tl.load(found_ptr + 2 * plane + at, mask=mask, other=float("-inf"))
    totals = tl.load(found_ptr + 3 * plane + at, mask=mask, other=0.0)
    # The first of equals, as torch.argmax takes.
    winner = tl.min(tl.where((scores == tl.max(scores, 0)) & mask, part, PARTS - 1), 0)
    logit = tl.sum(tl.where(part == winner, logits, 0.0), 0)
    peak = tl.max(peaks, 0)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    total = tl.sum(totals * tl.exp((peaks - peak) / divisor), 0)
    tl.store(tokens_ptr + row, tl.load(columns_ptr + row * PARTS + winner).to(tl.int64))
    tl.store(logprobs_ptr + row, (logit - peak) / divisor - tl.log(total))
