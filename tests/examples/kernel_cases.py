"""Inputs of the engine's Triton kernels and expected results, for the tests with and without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from examples.colocate.engine import ops
from examples.colocate.engine.attention import Chunks
from examples.colocate.model import ModelConfig
from examples.colocate.model.layers import rotary_tables

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PAGED_CASES: dict[str, tuple[str, int, int, int, int, list[int]]] = {
    # name: dtype, query heads, kv heads, head dimension, tokens in a block, lengths
    "grouped": ("fp32", 4, 2, 32, 16, [0, 1, 16, 17, 56]),
    "one head each": ("fp32", 2, 2, 16, 8, [33, 0, 7]),
    "one kv head": ("fp32", 6, 1, 64, 4, [5, 70]),
    "odd sizes": ("fp32", 3, 1, 24, 5, [1, 12, 0]),
    "long": ("fp32", 2, 1, 16, 16, [530]),
    "fp16": ("fp16", 4, 2, 32, 16, [1, 31, 130]),
}
# How far a result may be off: rounding of the result itself, and of softmax weights to V's dtype before their product.
PAGED_TOLERANCE = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}


def paged_inputs(name: str) -> dict[str, Tensor]:
    """Arguments of `attention.paged_decode`: each sequence has one query, or is padding."""
    found = prefill_inputs(*PAGED_CASES[name][:5], [(1, length) for length in PAGED_CASES[name][5]])
    return {"q_BHD": found.pop("q_THD"), **{key: found[key] for key in ("k_cache", "v_cache", *ROWS)}}


def dense_decode(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor) -> Tensor:
    """Each sequence by itself in fp64; zero for padding."""
    out, lengths = torch.zeros(q_BHD.shape, dtype=torch.float64), lengths_B.tolist()
    for row, length in enumerate(lengths):
        if length:
            out[row] = _dense(q_BHD[row : row + 1], k_cache, v_cache, block_table[row], length)
    return out


PREFILL_CASES: dict[str, tuple[str, int, int, int, int, list[tuple[int, int]]]] = {
    # name: dtype, query heads, kv heads, head dimension, tokens in a block, (new tokens, context) of each chunk
    "whole prompts": ("fp32", 2, 2, 32, 8, [(40, 40), (1, 1), (17, 17)]),
    "ragged": ("fp32", 2, 1, 16, 16, [(1, 100), (33, 34), (16, 48), (3, 3), (20, 97)]),
    "one token each": ("fp32", 2, 1, 16, 4, [(1, 1), (1, 2), (1, 33)]),
    "one kv head": ("fp32", 6, 1, 16, 4, [(10, 50)]),
    "odd sizes": ("fp32", 3, 1, 24, 5, [(7, 33), (12, 12)]),
    "fp16": ("fp16", 4, 2, 32, 8, [(18, 61), (30, 30)]),
}


ROWS = ("block_table", "lengths_B")


def prefill_inputs(
    dtype_name: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    chunks: list[tuple[int, int]],
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of `attention.paged_prefill`: unused slots of the cache are NaN, blocks are in random order.

    As in the engine, queries are a part of a product's rows, lengths and block table of the rows of a step's inputs.
    """
    generator = torch.Generator().manual_seed(len(chunks))
    counts = [-(-context // block_size) for _, context in chunks]
    blocks = iter(torch.randperm(sum(counts), generator=generator) + 1)
    caches = torch.full((2, sum(counts) + 1, block_size, kv_heads, head_dim), float("nan"))
    rows = torch.full((len(chunks), 2 + max(1, *counts)), sum(counts), dtype=torch.int32)
    for row, count, (_, context) in zip(rows, counts, chunks):
        row[1] = context
        row[2 : 2 + count] = torch.tensor([int(next(blocks)) for _ in range(count)])
        slots = (row[2 : 2 + count, None] * block_size + torch.arange(block_size)).flatten()[:context]
        caches.flatten(1, 2)[:, slots] = torch.randn(2, context, kv_heads, head_dim, generator=generator)
    queries = [new for new, _ in chunks]
    q = torch.randn(sum(queries), heads + 1, head_dim, generator=generator).to(device, DTYPES[dtype_name])[:, :heads]
    k_cache, v_cache = caches.to(device, DTYPES[dtype_name])
    rows, bounds = rows.to(device), torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
    paged = {"q_THD": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": rows[:, 2:], "lengths_B": rows[:, 1]}
    return {**paged, "chunks": Chunks(bounds, max(queries))}


def dense_prefill(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor, chunks: Chunks
) -> Tensor:
    """Each chunk by itself in fp64."""
    out = torch.zeros(q_THD.shape, dtype=torch.float64, device=q_THD.device)
    for (begin, end), blocks, length in zip(pairwise(chunks.bounds.tolist()), block_table, lengths_B.tolist()):
        out[begin:end] = _dense(q_THD[begin:end], k_cache, v_cache, blocks, length)
    return out


def _dense(q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Causal attention of the last of `length` tokens, in fp64, from K and V laid out in order."""
    group, count = q_THD.shape[1] // k_cache.shape[2], len(q_THD)
    k, v = (
        cache[blocks.long()].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
    )
    scores = torch.einsum("thd,lhd->htl", q_THD.double(), k) / q_THD.shape[2] ** 0.5
    future = torch.ones(count, length, dtype=torch.bool, device=q_THD.device).triu(length - count + 1)
    return torch.einsum("htl,lhd->thd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


# The kernels of `ops` ------------------------------------------------------------------------------------------------

# Relative, and absolute for values near zero. The order of fp32 sums differs. Values that are rounded twice, such as a
# norm's result and then its product with a weight, may be off by one unit of each.
OPS_TOLERANCE = {"fp32": 4e-6, "fp16": 4e-3, "bf16": 3.2e-2}
# Of half-precision results, those that are not equal bit for bit: only where fp32 values differ next to a boundary of
# rounding. A kernel that rounded at other places than torch would differ in a tenth of them and more.
OPS_DIFFERENT = 0.01

OPS_CASES = {
    "norm": lambda make: ("add_rms_norm", make(5, 64), make(5, 64), make(64), 1e-6),
    "norm of no residual": lambda make: ("add_rms_norm", make(5, 64), None, make(64), 1e-6),
    "norm of an odd size": lambda make: ("add_rms_norm", make(3, 1001), make(3, 1001), make(1001), 1e-5),
    "norm of wider rows": lambda make: ("add_rms_norm", make(4, 100)[:, 7:84], make(4, 90)[:, :77], make(77), 1e-6),
    "norm of nothing": lambda make: ("add_rms_norm", make(0, 64), make(0, 64), make(64), 1e-6),
    "rotate": lambda make: _rotation(make, 3, 4, 2, 32, norm=False),
    "rotate with norms": lambda make: _rotation(make, 2, 10, 2, 16, norm=True),
    "rotate odd sizes": lambda make: _rotation(make, 2, 9, 1, 22, norm=True),
    "rotate one token": lambda make: _rotation(make, 1, 3, 3, 2, norm=True),
    "rotate nothing": lambda make: _rotation(make, 0, 4, 2, 32, norm=True),
    "swiglu": lambda make: ("swiglu", make(5, 64)),
    "swiglu of several parts": lambda make: ("swiglu", 20 * make(2, 4100)),
    "swiglu of rows in wider ones": lambda make: ("swiglu", make(3, 61)[:, 3:59]),
    "swiglu of nothing": lambda make: ("swiglu", make(0, 64)),
    "write": lambda make: _written(make, 4, 2, 16),
    "write odd sizes": lambda make: _written(make, 3, 3, 5),
    "write several parts": lambda make: _written(make, 2, 9, 128),
    "write one": lambda make: _written(make, 1, 1, 8),
    "write nothing": lambda make: _written(make, 0, 2, 16),
}
# Of the size that models have; too slow for the interpreter.
LARGE_OPS_CASES = {
    "large norm": lambda make: ("add_rms_norm", make(64, 4096), make(64, 4096), make(4096), 1e-6),
    "largest norm": lambda make: ("add_rms_norm", make(3, 16384), make(3, 16384), make(16384), 1e-6),
    "large rotate": lambda make: _rotation(make, 64, 32, 8, 128, norm=True),
    "large swiglu": lambda make: ("swiglu", make(64, 24576)),
    "large write": lambda make: _written(make, 64, 8, 128),
}
Make = Callable[..., Tensor]


def _rotation(make: Make, tokens: int, heads: int, kv_heads: int, head_dim: int, norm: bool) -> tuple[Any, ...]:
    """Queries and keys as a part of a product, positions as a column of a table."""
    qk, norms = make(tokens, heads + 2 * kv_heads, head_dim)[:, : heads + kv_heads], (make(head_dim), make(head_dim))
    positions = torch.tensor([[7, 3 * token] for token in range(tokens)], dtype=torch.int64).view(tokens, 2)[:, 1]
    tables = rotary_tables(ModelConfig(1, 1, 1, 1, 1, head_dim, 1, max_position=3 * tokens + 1))
    return "rotate", qk, heads, norms if norm else None, tables, positions, 1e-6


def _written(make: Make, tokens: int, kv_heads: int, head_dim: int) -> tuple[Any, ...]:
    """Keys of their own, values as a part of a product; the first token is padding."""
    k, v = make(tokens, kv_heads, head_dim), make(tokens, 3 * kv_heads, head_dim)[:, 2 * kv_heads :]
    slots = 3 * torch.arange(tokens) + 2
    slots[:1] = 0
    return "write_kv", *make(2, tokens + 1, 4, kv_heads, head_dim), k, v, slots


def check_fused(kernels: Any, case: str, dtype_name: str, device: str) -> None:
    """A kernel's results on a device are those of torch on the CPU."""
    generator = torch.Generator().manual_seed(len(case))

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype_name])

    name, *args = {**OPS_CASES, **LARGE_OPS_CASES}[case](make)
    # Moved before torch's version runs, which may write into them. The strides have to survive.
    moved = [_on_device(arg, device) for arg in args]
    expected = _results(getattr(ops, name)(*args), args)
    found = _results(getattr(kernels, name)(*moved), moved)
    assert name not in ("rotate", "swiglu") or all(x.is_contiguous() for x in found)
    tolerance, different, count = OPS_TOLERANCE[dtype_name], 0, 0
    for mine, theirs in zip((x.cpu() for x in found), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        different, count = different + int((mine != theirs).sum()), count + mine.numel()
    assert dtype_name == "fp32" or different - 1 <= OPS_DIFFERENT * count


def _on_device(x: Any, device: str) -> Any:
    """A copy with the same strides and offset; of a tuple, each of its tensors."""
    if not isinstance(x, Tensor):
        return tuple(_on_device(each, device) for each in x) if isinstance(x, tuple) else x
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device, copy=True)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def _results(returned: Any, args: list[Any]) -> list[Tensor]:
    """The returned tensor, or the two caches that were written."""
    if returned is None:
        return args[:2]
    return [returned] if isinstance(returned, Tensor) else list(returned)
