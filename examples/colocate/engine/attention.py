"""Attention over a paged KV cache: writing it, decoding from it, and prefill.

Shape suffixes: B sequences, T tokens, H query heads, K key-value heads, G query heads per key-value head, D head
dimension, L tokens of context, N blocks of the cache, P tokens in a block, M blocks of the longest sequence.

A cache of K or V is [N, P, K, D]. A token's slot is block * P + its place in the block; block 0 belongs to padding.
A block table (int32 [B, M]) names the blocks of each sequence in order; entries beyond its length mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import ops

Caches = list[tuple[Tensor, Tensor]]  # of K and V, each [N, P, K, D], by layer


class Chunks(NamedTuple):
    """The queries of a prefill: chunks laid end to end, each the last tokens of its own context."""

    bounds: Tensor  # int32 [B + 1]: where each begins and ends; beyond the last one there is padding
    longest: int


@dataclass(frozen=True, eq=False)  # torch.compile hashes it before its fields are there
class PagedAttention:
    """Causal attention of a step's tokens to their contexts in the cache: one new token of each sequence, or chunks.

    All of a step's K and V are written before any is read: a chunk may share blocks that another of this step fills.
    """

    kv_caches: Caches
    slots_T: Tensor  # of padding 0
    block_table: Tensor
    lengths_B: Tensor  # int32, of contexts, the step's tokens included; 0 is padding
    chunks: Chunks | None = None

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """See `decoder.Attention`."""
        k_cache, v_cache = self.kv_caches[layer]
        ops.write_kv(k_cache, v_cache, k_TKD, v_TKD, self.slots_T)
        if self.chunks is None:
            return paged_decode(q_THD, k_cache, v_cache, self.block_table, self.lengths_B)
        return paged_prefill(q_THD, k_cache, v_cache, self.block_table, self.lengths_B, self.chunks)


@ops.triton_on_cuda("paged_prefill")
def paged_prefill(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor, chunks: Chunks
) -> Tensor:
    """Causal attention of each chunk over its context in the cache: [T, H, D]. Rows of padding mean nothing.

    Values in the cache beyond a context are never used, NaN included.
    """
    out_THD, size = torch.empty_like(q_THD), k_cache.shape[1]
    for (begin, end), blocks, context in zip(pairwise(chunks.bounds.tolist()), block_table, lengths_B.tolist()):
        k_LKD, v_LKD = (cache[blocks[: -(-context // size)]].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
        seen_TL = torch.ones(end - begin, context, dtype=torch.bool, device=q_THD.device).tril(context - end + begin)
        q_HTD, k_KLD, v_KLD = (each.transpose(0, 1)[None] for each in (q_THD[begin:end], k_LKD, v_LKD))
        out = F.scaled_dot_product_attention(q_HTD, k_KLD, v_KLD, attn_mask=seen_TL, enable_gqa=True)
        out_THD[begin:end] = out[0].transpose(0, 1)
    return out_THD


@ops.triton_on_cuda("paged_decode")
def paged_decode(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor) -> Tensor:
    """Each sequence's one query over its cached context; [B, H, D] in q's dtype, computed in fp32.

    A row of length 0 is padding: its result is zero. Values in the cache beyond a sequence's length are never used,
    NaN included.
    """
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
