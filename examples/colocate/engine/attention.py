"""Attention over a paged KV cache: writing it, decoding from it, and prefill.

Shape suffixes: B sequences, T tokens, H query heads, K key-value heads, G query heads per key-value head, D head
dimension, L tokens of context, N blocks of the cache, P tokens in a block.

A token's slot is block * P + its place in the block. Slots of block 0 belong to padding (see `block_manager`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Attention(Protocol):
    """One layer's attention, as the model calls it."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write k and v into the layer's cache, attend, return [T, H, D]."""
        ...


@dataclass(frozen=True)
class DecodeAttention:
    """One new token for each sequence; where it goes and what it sees is read on the device."""

    kv_cache: Tensor  # [layers, 2, N, P, K, D]
    slots_B: Tensor  # int64; padding points into block 0
    block_table: Tensor  # int32 [B, blocks of the longest sequence]
    lengths_B: Tensor  # int32, the new token included; 0 is padding

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """See `Attention`; T is B."""
        k_cache, v_cache = self.kv_cache[layer]
        write_kv(k_cache, v_cache, k_TKD, v_TKD, self.slots_B)
        return paged_decode(q_THD, k_cache, v_cache, self.block_table, self.lengths_B)


@dataclass(frozen=True)
class Span:
    """One sequence's part of a prefill: its tokens are start to stop of the step's, the last ones of its context."""

    start: int
    stop: int
    context_slots_L: Tensor | None  # int64, where K and V of the whole context are; None if the span is all of it


@dataclass(frozen=True)
class PrefillAttention:
    """Causal attention of whole prompts, laid end to end; each sees its own context, the cached prefix included."""

    kv_cache: Tensor  # [layers, 2, N, P, K, D]
    slots_T: Tensor  # int64
    spans: list[Span]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """See `Attention`."""
        k_cache, v_cache = self.kv_cache[layer]
        # All spans are written before any is read: a span may share blocks that another one of this step fills.
        write_kv(k_cache, v_cache, k_TKD, v_TKD, self.slots_T)
        out_THD = torch.empty_like(q_THD)
        for span in self.spans:
            part = slice(span.start, span.stop)
            if span.context_slots_L is None:
                k_LKD, v_LKD = k_TKD[part], v_TKD[part]
            else:
                k_LKD = k_cache.flatten(0, 1)[span.context_slots_L]
                v_LKD = v_cache.flatten(0, 1)[span.context_slots_L]
            out_THD[part] = causal_attention(q_THD[part], k_LKD, v_LKD)
        return out_THD


def write_kv(k_cache: Tensor, v_cache: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """Put k and v into the caches [N, P, K, D] at their slots (int64). Slot 0, or -1, is padding's scratch."""
    slots_T = slots_T.clamp_min(0)
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots_T, k_TKD)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots_T, v_TKD)


def causal_attention(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> Tensor:
    """Torch's attention of the last T of L tokens: query t sees keys 0 to L - T + t. Returns [T, H, D]."""
    length, context = q_THD.shape[0], k_LKD.shape[0]
    group = q_THD.shape[1] // k_LKD.shape[1]
    # Heads are repeated because not every fused kernel takes grouped queries.
    q_HTD, k_HLD, v_HLD = (x.transpose(0, 1)[None] for x in (q_THD, _repeat(k_LKD, group), _repeat(v_LKD, group)))
    if length == context:
        out = F.scaled_dot_product_attention(q_HTD, k_HLD, v_HLD, is_causal=True)
    else:
        seen_TL = torch.ones(length, context, dtype=torch.bool, device=q_THD.device).tril(context - length)
        out = F.scaled_dot_product_attention(q_HTD, k_HLD, v_HLD, attn_mask=seen_TL)
    return out[0].transpose(0, 1)


def paged_decode(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor) -> Tensor:
    """Each sequence's one query over its cached context; [B, H, D] in q's dtype, computed in fp32.

    k_cache and v_cache are [N, P, K, D]; block_table (int32 [B, M]) names the blocks of each sequence in order;
    lengths_B (int32) counts its tokens. A row of length 0 is padding: its result is zero. What lies in the cache
    beyond a sequence's length is never used, whatever its bits. Triton on CUDA, torch elsewhere.
    """
    _check(q_BHD, k_cache, v_cache, block_table, lengths_B)
    if q_BHD.is_cuda:
        # Imported when first needed: without a GPU the engine runs without Triton.
        from .paged_kernel import paged_decode_triton

        return paged_decode_triton(q_BHD, k_cache, v_cache, block_table, lengths_B)
    # Here lengths are cheap to look at, so no more than the longest context is read.
    block_size = k_cache.shape[1]
    used = -(-max(1, int(lengths_B.max())) // block_size)
    return paged_decode_torch(q_BHD, k_cache, v_cache, block_table[:, :used], lengths_B)


def paged_decode_torch(
    q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor
) -> Tensor:
    """`paged_decode` in plain torch: what the kernel is tested against, and the CPU's implementation."""
    batch, heads, head_dim = q_BHD.shape
    kv_heads = k_cache.shape[2]
    # Entries beyond a sequence's length are arbitrary, so they are kept inside the cache and their values hidden.
    table = block_table.long().clamp(0, k_cache.shape[0] - 1)
    k_BLKD, v_BLKD = (cache[table].flatten(1, 2).float() for cache in (k_cache, v_cache))
    seen_BL = torch.arange(k_BLKD.shape[1], device=q_BHD.device) < lengths_B[:, None]
    q_BKGD = q_BHD.float().view(batch, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bkgd,blkd->bkgl", q_BKGD, k_BLKD) * head_dim**-0.5
    weights = scores.masked_fill(~seen_BL[:, None, None], float("-inf")).softmax(dim=-1)
    weights = weights.masked_fill((lengths_B == 0)[:, None, None, None], 0.0)
    # Not only the weights: 0 * NaN is NaN, and memory that was paused without a backup may hold any bits.
    v_BLKD = v_BLKD.masked_fill(~seen_BL[:, :, None, None], 0.0)
    return torch.einsum("bkgl,blkd->bkgd", weights, v_BLKD).reshape(batch, heads, head_dim).to(q_BHD.dtype)


def _repeat(x_LKD: Tensor, group: int) -> Tensor:
    return x_LKD if group == 1 else x_LKD.repeat_interleave(group, dim=1)


def _check(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor) -> None:
    batch, heads, head_dim = q_BHD.shape
    if k_cache.shape != v_cache.shape or k_cache.shape[-1] != head_dim or heads % k_cache.shape[2]:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}; expected two of [blocks, tokens, "
            f"kv heads, {head_dim}] with a number of kv heads that divides {heads}"
        )
    if block_table.shape[0] != batch or lengths_B.shape != (batch,):
        raise ValueError(
            f"block_table is {tuple(block_table.shape)} and lengths {tuple(lengths_B.shape)}; "
            f"expected [{batch}, blocks] and [{batch}]"
        )
