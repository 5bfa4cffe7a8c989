"""Paged decode attention in Triton: grouped queries, split over the context as in Flash-Decoding (Dao et al., 2023).

One kernel attends to a part of the context in each program; where a context has several parts, another joins them. How
many parts there are follows from the batch and the number of heads, never from how long a context is: kernels, grids
and addresses are those a CUDA graph recorded, while lengths and block table are read on the device. A sequence
that is too short for all parts leaves some empty.

A step reads every K and V once, so memory bounds it. The rate needs many bytes in flight: on an H200
about 40 KB on each multiprocessor at all times (4.8 TB/s at a latency near 1 us).
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .fused import pad, row_stride

LOG2_E = 1.4426950408889634
# Chosen by size, then measured on an H100 (docs/log.md). For D = 128, 16 bits, Triton's compiler for sm_90
# uses 96 registers and 37 KB of shared memory, nothing spilled.
_PROGRAMS = 512  # four to each of an H200's 132 multiprocessors; five fit, so all run at once and none comes second
_MAX_SPLITS = 64
_TILE_BYTES = 8192  # of K, and as many of V, in one round of the loop: 32 tokens at D = 128
_STAGES = 3  # two tiles in shared memory, one on its way while the other is used: four programs have 64 KB under way
_WARPS = 4  # fewer would copy with more instructions each, more would wait for each other in sums over a tile


def num_splits(batch: int, kv_heads: int) -> int:
    """Parts to split each context into: the power of two, up to 64, that makes about 512 programs in all."""
    splits = 1
    while splits < _MAX_SPLITS and splits * 2 * batch * kv_heads <= _PROGRAMS:
        splits *= 2
    return splits


def paged_decode(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor) -> Tensor:
    """`attention.paged_decode` on the GPU; shapes as there. The caches have no gaps, nor do rows of q and table."""
    batch, heads, head_dim = q_BHD.shape
    block_size, kv_heads = k_cache.shape[1:3]
    splits = num_splits(batch, kv_heads)
    out_BHD = torch.empty_like(q_BHD)
    # [B, H, splits, D] of the parts' results, then [B, H, splits] of their weights.
    parts = out_BHD if splits == 1 else q_BHD.new_empty(batch * heads * splits * (head_dim + 1), dtype=torch.float32)
    dim_pad = max(16, pad(head_dim))
    _attend_part[(kv_heads, batch, splits)](
        q_BHD, k_cache, v_cache, block_table, lengths_B, parts,
        row_stride(q_BHD, head_dim), block_table.stride(0), lengths_B.stride(0),
        # tl.dot needs 16 rows at least; those beyond the group compute on zeros and are not stored.
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_PAD=max(16, pad(heads // kv_heads)),
        # A constant, since torch.compile passes floats in double precision.
        SCALE_LOG2=head_dim**-0.5 * LOG2_E, DIM=head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size, SPLITS=splits,
        TILE=max(16, _TILE_BYTES // (dim_pad * k_cache.element_size())), STAGES=_STAGES, num_warps=_WARPS,
    )  # fmt: skip
    if splits > 1:
        _join_parts[(batch * heads,)](parts, out_BHD, DIM=head_dim, DIM_PAD=dim_pad, SPLITS=splits, num_warps=4)
    return out_BHD


@triton.jit
def _attend_part(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, parts_ptr, q_stride, table_stride, lengths_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SCALE_LOG2: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One sequence, one key-value head with its group of queries, one part of the context.

    Stores the part's softmax-weighted mean of V, and the base-2 logarithm of its weights' sum; of an empty part, only
    that this is -inf. A context of one part is stored as the result, zero where it is empty.
    """
    # Neighbours share a sequence: the heads of a token lie side by side in memory.
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row * lengths_stride)
    # Whole tiles for each part, so that only the last one that is not empty has a ragged end.
    part = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    start = split * part
    stop = tl.minimum(start + part, length)

    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + group
    q_mask = (group[:, None] < GROUP) & (dim[None, :] < DIM)
    q = tl.load(q_ptr + row * q_stride + head[:, None] * DIM + dim[None, :], mask=q_mask, other=0.0)

    tile = tl.arange(0, TILE)
    table_ptr += row * table_stride
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    # Added up over the tile once, at the end: every sum over it is a wait of all warps for each other.
    totals = tl.zeros([GROUP_PAD, TILE], tl.float32)
    mean = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    # The blocks of a tile are looked up one round ahead, so that its K and V are not a second wait.
    block = tl.load(table_ptr + (start + tile) // BLOCK_SIZE, mask=start + tile < stop, other=0)
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        position = first + tile
        seen = position < stop
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        block = tl.load(table_ptr + (position + TILE) // BLOCK_SIZE, mask=position + TILE < stop, other=0)
        offset = (slot * KV_HEADS + kv_head) * DIM
        kv_mask = seen[:, None] & (dim[None, :] < DIM)
        k = tl.load(k_ptr + offset[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + offset[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE_LOG2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        totals = totals * shrink[:, None] + weights
        mean = mean * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    total = tl.sum(totals, 1)
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    at = row * (KV_HEADS * GROUP) + head
    if SPLITS == 1:
        tl.store(parts_ptr + at[:, None] * DIM + dim[None, :], mean.to(parts_ptr.dtype.element_ty), mask=q_mask)
    else:
        at = at * SPLITS + split
        weights_ptr = parts_ptr + tl.num_programs(1) * (KV_HEADS * GROUP * SPLITS * DIM)
        tl.store(parts_ptr + at[:, None] * DIM + dim[None, :], mean, mask=q_mask & (total[:, None] > 0.0))
        tl.store(weights_ptr + at, peak + tl.log2(total), mask=group < GROUP)


@triton.jit
def _join_parts(parts_ptr, out_ptr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """One query head of one sequence: the mean of its parts, by their weights; zero where all are empty."""
    head = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PAD)
    weights_ptr = parts_ptr + tl.num_programs(0) * (SPLITS * DIM)
    log_weights = tl.load(weights_ptr + head * SPLITS + split)
    peak = tl.max(log_weights, 0)
    # Against the difference of two infinities, which is not a number.
    weights = tl.exp2(log_weights - tl.where(peak == float("-inf"), 0.0, peak))
    mask = (dim[None, :] < DIM) & (weights[:, None] > 0.0)  # empty parts were not stored
    parts = tl.load(parts_ptr + (head * SPLITS + split)[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    mean = tl.sum(weights[:, None] * parts, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + head * DIM + dim, mean.to(out_ptr.dtype.element_ty), mask=dim < DIM)
