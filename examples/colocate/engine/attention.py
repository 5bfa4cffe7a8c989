"""Attention over a paged KV cache: writing it, decoding from it, and prefill.

Shape suffixes: B sequences, T tokens, H query heads, K key-value heads, G query heads per key-value head, D head
dimension, L tokens of context, N blocks of the cache, P tokens in a block, M blocks of all contexts of a step.

A token's slot is block * P + its place in the block. Slots of block 0 belong to padding (see `block_manager`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import ops

Caches = list[tuple[Tensor, Tensor]]  # of K and V, each [N, P, K, D], by layer


@dataclass(frozen=True, eq=False)  # torch.compile hashes it before its fields are there
class DecodeAttention:
    """One new token for each sequence. Its slot in the cache and its context are read on the device."""

    kv_caches: Caches
    slots_B: Tensor  # padding points into block 0
    block_table: Tensor  # int32 [B, blocks of the longest sequence]
    lengths_B: Tensor  # int32, the new token included; 0 is padding

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """See `decoder.Attention`; T is B."""
        k_cache, v_cache = self.kv_caches[layer]
        ops.write_kv(k_cache, v_cache, k_TKD, v_TKD, self.slots_B)
        return paged_decode(q_THD, k_cache, v_cache, self.block_table, self.lengths_B)


@dataclass(frozen=True)
class Chunks:
    """Chunks of queries laid end to end, each the last tokens of its own context, and the contexts' blocks.

    The bounds, int32 [B + 1], are where each chunk's queries, context and blocks begin and end.
    """

    query_bounds: Tensor
    context_bounds: Tensor
    table_bounds: Tensor
    blocks_M: Tensor  # int32, one context's after the other's, in order
    total: int  # queries
    longest: int  # queries of the longest chunk
    whole: bool  # no context is longer than its chunk


@dataclass(frozen=True)
class PrefillAttention:
    """Causal attention of a step's chunks.

    All of a step's K and V are written before any is read: a chunk may share blocks that another of this step fills.
    There may be more tokens than the chunks have: the rest is padding.
    """

    kv_caches: Caches
    slots_T: Tensor  # of padding 0
    chunks: Chunks

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """See `decoder.Attention`; [T, H, D] without padding. Whole prompts go through torch's own kernel, on CUDA."""
        k_cache, v_cache = self.kv_caches[layer]
        ops.write_kv(k_cache, v_cache, k_TKD, v_TKD, self.slots_T)
        chunks = self.chunks
        q_THD, k_TKD, v_TKD = (each[: chunks.total] for each in (q_THD, k_TKD, v_TKD))
        if chunks.whole and q_THD.is_cuda and q_THD.dtype != torch.float32 and (flash := _flash_attention()):
            out_THD: Tensor = flash(q_THD, k_TKD, v_TKD, *[chunks.query_bounds] * 2, *[chunks.longest] * 2)
            return out_THD
        return paged_prefill(q_THD, k_cache, v_cache, chunks)


@cache
def _flash_attention() -> Callable[..., Any] | None:
    """Torch's attention of sequences laid end to end, causal and of grouped queries; None in a version without it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters  # they differ between versions
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return partial(varlen_attn, **options)


def paged_prefill(q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: Chunks) -> Tensor:
    """Causal attention of each chunk over its context in the cache: [T, H, D].

    k_cache and v_cache are [N, P, K, D]. Values in the cache beyond a context are never used, NaN included.
    Triton on CUDA, which reads the blocks where they are; elsewhere torch.
    """
    if ops.in_triton(q_THD):
        from .kernels.paged_prefill import paged_prefill_triton

        return paged_prefill_triton(q_THD, k_cache, v_cache, chunks)
    return paged_prefill_torch(q_THD, k_cache, v_cache, chunks)


def paged_prefill_torch(q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: Chunks) -> Tensor:
    """`paged_prefill` in torch, chunk by chunk. Every context is gathered first."""
    out_THD = torch.empty_like(q_THD)
    bounds = (pairwise(each.tolist()) for each in (chunks.query_bounds, chunks.context_bounds, chunks.table_bounds))
    for (begin, end), (first, last), (start, stop) in zip(*bounds):
        blocks, queries, context = chunks.blocks_M[start:stop], end - begin, last - first
        k_LKD, v_LKD = (cache[blocks].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
        seen_TL = torch.ones(queries, context, dtype=torch.bool, device=q_THD.device).tril(context - queries)
        q_HTD, k_KLD, v_KLD = (each.transpose(0, 1)[None] for each in (q_THD[begin:end], k_LKD, v_LKD))
        out = F.scaled_dot_product_attention(q_HTD, k_KLD, v_KLD, attn_mask=seen_TL, enable_gqa=True)
        out_THD[begin:end] = out[0].transpose(0, 1)
    return out_THD


def paged_decode(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor) -> Tensor:
    """Each sequence's one query over its cached context; [B, H, D] in q's dtype, computed in fp32.

    k_cache and v_cache are [N, P, K, D]; block_table (int32 [B, M]) names the blocks of each sequence in order;
    lengths_B (int32) counts its tokens. A row of length 0 is padding: its result is zero. Values in the
    cache beyond a sequence's length are never used, NaN included. Triton on CUDA; torch elsewhere.
    """
    if ops.in_triton(q_BHD):
        from .kernels.paged_decode import paged_decode_triton

        return paged_decode_triton(q_BHD, k_cache, v_cache, block_table, lengths_B)
    return paged_decode_torch(q_BHD, k_cache, v_cache, block_table, lengths_B)


def paged_decode_torch(
    q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor
) -> Tensor:
    """`paged_decode` in plain torch: the reference of the kernel's tests, and the CPU's implementation."""
    batch, heads, head_dim = q_BHD.shape
    block_size, kv_heads = k_cache.shape[1:3]
    # Entries beyond a sequence's length are arbitrary, so they are kept inside the cache and their values hidden.
    table = block_table[:, : -(-max(1, int(lengths_B.max())) // block_size)].long().clamp(0, k_cache.shape[0] - 1)
    k_BLKD, v_BLKD = (cache[table].flatten(1, 2).float() for cache in (k_cache, v_cache))
    seen_BL = torch.arange(k_BLKD.shape[1], device=q_BHD.device) < lengths_B[:, None]
    q_BKGD = q_BHD.float().view(batch, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bkgd,blkd->bkgl", q_BKGD, k_BLKD) * head_dim**-0.5
    weights = scores.masked_fill(~seen_BL[:, None, None], float("-inf")).softmax(dim=-1)
    weights = weights.masked_fill((lengths_B == 0)[:, None, None, None], 0.0)
    # Not only the weights: 0 * NaN is NaN, and memory that was paused without a backup may hold any bits.
    v_BLKD = v_BLKD.masked_fill(~seen_BL[:, :, None, None], 0.0)
    return torch.einsum("bkgl,blkd->bkgd", weights, v_BLKD).reshape(batch, heads, head_dim).to(q_BHD.dtype)
