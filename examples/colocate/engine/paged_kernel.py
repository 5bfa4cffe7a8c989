"""Paged decode attention in Triton: grouped queries, split over the context as in Flash-Decoding (Dao et al., 2023).

Two kernels: one attends to a part of the context each, the other joins the parts. How many parts there are follows
from the batch and the number of heads, never from how long a context is: grids and addresses are those a CUDA graph
recorded, while lengths and block table are read on the device. What is too short for all parts leaves some empty.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_LOG2_E = 1.4426950408889634
_PROGRAMS = 512  # about four to a multiprocessor of a large GPU: enough to keep its memory busy
_MAX_SPLITS = 64


def num_splits(batch: int, kv_heads: int) -> int:
    """Parts to split each context into: the power of two, up to 64, that makes about 512 programs in all."""
    splits = 1
    while splits < _MAX_SPLITS and splits * 2 * batch * kv_heads <= _PROGRAMS:
        splits *= 2
    return splits


def paged_decode_triton(
    q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor
) -> Tensor:
    """`attention.paged_decode` on the GPU; shapes as there. Caches are contiguous in their last two dimensions."""
    batch, heads, head_dim = q_BHD.shape
    block_size, kv_heads = k_cache.shape[1:3]
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or block_table.stride(1) != 1:
        raise ValueError("k_cache, v_cache or a row of block_table has gaps; expected contiguous ones")
    splits = num_splits(batch, kv_heads)
    q_BHD = q_BHD.contiguous()
    parts_BHSD = torch.empty(batch, heads, splits, head_dim, dtype=torch.float32, device=q_BHD.device)
    weights_BHS = torch.empty(batch, heads, splits, dtype=torch.float32, device=q_BHD.device)
    out_BHD = torch.empty_like(q_BHD)
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    _attend_part[(batch, kv_heads, splits)](
        q_BHD,
        k_cache,
        v_cache,
        block_table,
        lengths_B,
        parts_BHSD,
        weights_BHS,
        head_dim**-0.5 * _LOG2_E,
        block_table.stride(0),
        lengths_B.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        # tl.dot wants 16 rows at least; those beyond the group compute on zeros and are not stored.
        GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        SPLITS=splits,
        TILE=32 if q_BHD.dtype == torch.float32 or dim_pad > 128 else 64,
    )
    _join_parts[(batch, heads)](
        parts_BHSD, weights_BHS, out_BHD, HEADS=heads, DIM=head_dim, DIM_PAD=dim_pad, SPLITS=splits
    )
    return out_BHD


@triton.jit
def _attend_part(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    parts_ptr,
    weights_ptr,
    scale_log2,
    table_stride,
    lengths_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One sequence, one key-value head with its group of queries, one part of the context.

    Stores the part's softmax-weighted mean of V, and the base-2 logarithm of its weights' sum (-inf if empty).
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row * lengths_stride)
    # Whole tiles for each part, so that only the last one that is not empty has a ragged end.
    part = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    start = split * part
    stop = tl.minimum(start + part, length)

    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    head = row * HEADS + kv_head * GROUP + group
    q_mask = (group[:, None] < GROUP) & (dim[None, :] < DIM)
    q = tl.load(q_ptr + head[:, None] * DIM + dim[None, :], mask=q_mask, other=0.0)

    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mean = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for first in range(start, stop, TILE):
        position = first + tl.arange(0, TILE)
        seen = position < stop
        block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = (slot * KV_HEADS + kv_head) * DIM
        kv_mask = seen[:, None] & (dim[None, :] < DIM)
        k = tl.load(k_ptr + offset[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + offset[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mean = mean * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    out = head * SPLITS + split
    tl.store(parts_ptr + out[:, None] * DIM + dim[None, :], mean / divisor[:, None], mask=q_mask)
    log_weight = tl.where(empty, float("-inf"), peak + tl.log2(divisor))
    tl.store(weights_ptr + out, log_weight, mask=group < GROUP)


@triton.jit
def _join_parts(
    parts_ptr,
    weights_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One query head of one sequence: the mean of its parts, by their weights; zero where all are empty."""
    head = tl.program_id(0) * HEADS + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PAD)
    log_weights = tl.load(weights_ptr + head * SPLITS + split)
    peak = tl.max(log_weights, 0)
    # Against the difference of two infinities, which is not a number.
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(log_weights - peak)
    mask = (dim[None, :] < DIM) & (split[:, None] < SPLITS)
    parts = tl.load(parts_ptr + (head * SPLITS + split)[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    mean = tl.sum(weights[:, None] * parts, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + head * DIM + dim, mean.to(out_ptr.dtype.element_ty), mask=dim < DIM)
