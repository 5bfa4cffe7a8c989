"""Paged prefill attention in Triton: the last tokens of each context over K and V where the cache has them.

As in FlashAttention-2 (Dao, 2023), a program keeps a tile of queries of one head and reads the context tile by tile. It
looks up the blocks as it reads them, so no context is copied first.

Grids depend on the numbers of chunks and tokens, the compiled kernel on shapes of the model and of the cache alone.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..attention import Chunks
from .fused import pad, row_stride
from .paged_decode import LOG2_E


def tiling(head_dim: int, element_size: int) -> tuple[int, int, int, int]:
    """Queries of a program, keys in a round of its loop, rounds under way at once, and its warps."""
    if element_size > 2:  # products are no matter of tensor cores, which round otherwise; larger tiles spill registers
        return 16, 16, 2, 4
    # Chosen by size, then measured on an H100 (docs/log.md).
    return (64, 64, 3, 4) if head_dim <= 128 else (64, 32, 2, 4)


def paged_prefill(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor, chunks: Chunks
) -> Tensor:
    """`attention.paged_prefill` on the GPU; shapes as there. The caches have no gaps, nor do rows of q and table."""
    tokens, heads, head_dim = q_THD.shape
    block_size, kv_heads = k_cache.shape[1:3]
    out_THD = q_THD.new_empty((tokens, heads, head_dim))
    queries, keys, stages, warps = tiling(head_dim, k_cache.element_size())
    _attend_chunk[(-(-chunks.longest // queries), heads, len(chunks.bounds) - 1)](
        q_THD, k_cache, v_cache, block_table, lengths_B, chunks.bounds, out_THD,
        row_stride(q_THD, head_dim), block_table.stride(0), lengths_B.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, SCALE_LOG2=head_dim**-0.5 * LOG2_E, DIM=head_dim,
        DIM_PAD=max(16, pad(head_dim)), BLOCK_SIZE=block_size, QUERIES=queries, KEYS=keys,
        STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out_THD


@triton.jit
def _attend_chunk(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, bounds_ptr, out_ptr, q_stride, table_stride, lengths_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SCALE_LOG2: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk, one query head, QUERIES of the chunk's tokens."""
    # Neighbours share a head, so that programs that run together read the same K and V.
    tile = tl.program_id(0)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    begin = tl.load(bounds_ptr + chunk)
    count = tl.load(bounds_ptr + chunk + 1) - begin
    # The last queries attend to most keys: they go first, so that the shortest programs run at the end.
    first_query = (tl.cdiv(count, QUERIES) - 1 - tile) * QUERIES
    if first_query < 0:
        return
    context = tl.load(lengths_ptr + chunk * lengths_stride)
    blocks_ptr = table_ptr + chunk * table_stride

    query = first_query + tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM_PAD)
    row = (begin + query).to(tl.int64)
    q_mask = (query[:, None] < count) & (dim[None, :] < DIM)
    q = tl.load(q_ptr + row[:, None] * q_stride + head * DIM + dim[None, :], mask=q_mask, other=0.0)

    position = context - count + query
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    stop = tl.minimum(context - count + first_query + QUERIES, context)  # no query sees a key from here on
    key = tl.arange(0, KEYS)
    # The blocks of a tile are looked up one round ahead, so that its K and V are not a second wait.
    block = tl.load(blocks_ptr + key // BLOCK_SIZE, mask=key < stop, other=0)
    for first in tl.range(0, stop, KEYS, num_stages=STAGES):
        at = first + key
        slot = block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        block = tl.load(blocks_ptr + (at + KEYS) // BLOCK_SIZE, mask=at + KEYS < stop, other=0)
        offset = ((slot * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
        kv_mask = (at[:, None] < stop) & (dim[None, :] < DIM)
        k = tl.load(k_ptr + offset, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + offset, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where((at[None, :] <= position[:, None]) & (at[None, :] < stop), scores, float("-inf"))
        # Scaled here, where it is one operation with the difference.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * SCALE_LOG2)
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores * SCALE_LOG2 - new_peak[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mean = tl.dot(weights.to(v.dtype), v, mean * shrink[:, None], input_precision="ieee")
        peak = new_peak
    # Every query sees the first key at least, also one beyond the chunk, so no sum is zero.
    mean = mean / total[:, None]
    out = out_ptr + row[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    tl.store(out, mean.to(out_ptr.dtype.element_ty), mask=q_mask)
