"""Attention over a paged KV cache: writing it, decoding from it, and prefill.

Shape suffixes: B sequences, T tokens, H query heads, K key-value heads, G query heads per key-value head, D head
dimension, L tokens of context, N blocks of the cache, P tokens in a block, M blocks of all contexts of a step.

A token's slot is block * P + its place in the block. Slots of block 0 belong to padding (see `block_manager`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, cast

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
    use_kernel: bool = True

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """See `model.Attention`; T is B."""
        k_cache, v_cache = self.kv_caches[layer]
        ops.write_kv(k_cache, v_cache, k_TKD, v_TKD, self.slots_B)
        return paged_decode(q_THD, k_cache, v_cache, self.block_table, self.lengths_B, self.use_kernel)


@dataclass(frozen=True)
class PrefillAttention:
    """Causal attention of chunks laid end to end, each the last tokens of its own context.

    All of a step's K and V are written before any is read: a chunk may share blocks that another of this step fills.
    There may be more tokens than the chunks have: the rest is padding.
    """

    kv_caches: Caches
    slots_T: Tensor  # of padding 0
    queries: Ranges  # the chunks among the tokens
    earlier: PagedContexts | None  # where their contexts are; None if the chunks are all there is
    use_kernel: bool = True

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """See `model.Attention`; [T, H, D] without padding."""
        k_cache, v_cache = self.kv_caches[layer]
        ops.write_kv(k_cache, v_cache, k_TKD, v_TKD, self.slots_T)
        q_THD = q_THD[: self.queries.total]
        if self.earlier is None:
            k_TKD, v_TKD = k_TKD[: self.queries.total], v_TKD[: self.queries.total]
            return varlen_attention(q_THD, k_TKD, v_TKD, self.queries, self.queries)
        return paged_prefill(q_THD, k_cache, v_cache, self.queries, self.earlier, self.use_kernel)


@dataclass(frozen=True)
class PagedContexts:
    """Where K and V of each chunk's context are, its own tokens included."""

    lengths: Ranges  # in tokens
    blocks_M: Tensor  # int32, one context's after the other's, in order
    tables: Ranges  # each context's part of them


class Ranges:
    """Sequences laid end to end: where each begins and ends."""

    bounds_on_device: Tensor  # int32, to be set for CUDA

    def __init__(self, lengths: list[int]) -> None:
        self.bounds = [0, *accumulate(lengths)]
        self.longest, self.total = max(lengths), self.bounds[-1]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[slice]:
        return map(slice, self.bounds, self.bounds[1:])


def varlen_attention(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, queries: Ranges, context: Ranges) -> Tensor:
    """Causal attention of each range of queries over its range of context, whose last tokens they are: [T, H, D].

    One kernel of torch's, Flash Attention, for half precision on CUDA; elsewhere one call for each range.
    """
    if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16):
        bounds = queries.bounds_on_device, context.bounds_on_device
        return _flash(q_THD, k_LKD, v_LKD, *bounds, queries.longest, context.longest)
    out_THD = torch.empty_like(q_THD)
    for part, seen in zip(queries, context):
        out_THD[part] = causal_attention(q_THD[part], k_LKD[seen], v_LKD[seen])
    return out_THD


def _flash(*args: Any) -> Tensor:
    # Imported here: older versions of torch, which the other functions support, lack it.
    from torch.nn.attention.varlen import varlen_attn

    return cast(Tensor, varlen_attn(*args, **_flash_options(varlen_attn)))


@cache
def _flash_options(varlen_attn: Any) -> dict[str, Any]:
    """How this version of torch is told of a causal mask and of grouped queries."""
    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return {**causal, "enable_gqa": True} if "enable_gqa" in known else causal


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


def paged_prefill(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, queries: Ranges, contexts: PagedContexts, use_kernel: bool = True
) -> Tensor:
    """Causal attention of each range of queries over its context in the cache, whose last tokens they are: [T, H, D].

    k_cache and v_cache are [N, P, K, D]. Values in the cache beyond a context are never used, NaN included.
    Triton on CUDA, which reads the blocks where they are. Elsewhere, or if told so, torch, which gathers every context.
    """
    _check_caches(q_THD, k_cache, v_cache)
    if not len(queries) == len(contexts.lengths) == len(contexts.tables):
        raise ValueError(
            f"there are {len(queries)} ranges of queries, {len(contexts.lengths)} contexts and "
            f"{len(contexts.tables)} tables; expected as many of each"
        )
    if use_kernel and ops.in_triton(q_THD):
        # Imported when first needed: without a GPU the engine runs without Triton.
        from .prefill_kernel import paged_prefill_triton

        tables, lengths = contexts.tables.bounds_on_device, contexts.lengths.bounds_on_device
        return paged_prefill_triton(
            q_THD, k_cache, v_cache, contexts.blocks_M, tables, queries.bounds_on_device, lengths, queries.longest
        )
    return paged_prefill_torch(q_THD, k_cache, v_cache, queries, contexts)


def paged_prefill_torch(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, queries: Ranges, contexts: PagedContexts
) -> Tensor:
    """`paged_prefill` in torch: every context is gathered first."""

    def gathered(cache: Tensor) -> Tensor:
        parts = [cache.index_select(0, contexts.blocks_M[table]).flatten(0, 1) for table in contexts.tables]
        lengths = (seen.stop - seen.start for seen in contexts.lengths)
        return torch.cat([part[:length] for part, length in zip(parts, lengths)])

    return varlen_attention(q_THD, gathered(k_cache), gathered(v_cache), queries, contexts.lengths)


def paged_decode(
    q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor, use_kernel: bool = True
) -> Tensor:
    """Each sequence's one query over its cached context; [B, H, D] in q's dtype, computed in fp32.

    k_cache and v_cache are [N, P, K, D]; block_table (int32 [B, M]) names the blocks of each sequence in order;
    lengths_B (int32) counts its tokens. A row of length 0 is padding: its result is zero. Values in the
    cache beyond a sequence's length are never used, NaN included. Triton on CUDA by default; torch elsewhere.
    """
    _check(q_BHD, k_cache, v_cache, block_table, lengths_B)
    if use_kernel and ops.in_triton(q_BHD):
        # Imported when first needed: without a GPU the engine runs without Triton.
        from .paged_kernel import paged_decode_triton

        return paged_decode_triton(q_BHD, k_cache, v_cache, block_table, lengths_B)
    if not q_BHD.is_cuda:
        # Here lengths are cheap to look at, so no more than the longest context is read.
        used = -(-max(1, int(lengths_B.max())) // k_cache.shape[1])
        block_table = block_table[:, :used]
    return paged_decode_torch(q_BHD, k_cache, v_cache, block_table, lengths_B)


def paged_decode_torch(
    q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor
) -> Tensor:
    """`paged_decode` in plain torch: the reference of the kernel's tests, and the CPU's implementation."""
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
    batch = q_BHD.shape[0]
    _check_caches(q_BHD, k_cache, v_cache)
    if block_table.shape[0] != batch or lengths_B.shape != (batch,):
        raise ValueError(
            f"block_table is {tuple(block_table.shape)} and lengths {tuple(lengths_B.shape)}; "
            f"expected [{batch}, blocks] and [{batch}]"
        )


def _check_caches(q_THD: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    _, heads, head_dim = q_THD.shape
    if k_cache.shape != v_cache.shape or k_cache.shape[-1] != head_dim or heads % k_cache.shape[2]:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}; expected two of [blocks, tokens, "
            f"kv heads, {head_dim}] with a number of kv heads that divides {heads}"
        )
