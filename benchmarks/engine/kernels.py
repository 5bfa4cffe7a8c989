"""Paged decode: the bytes of K and V over the time of the kernel, beside a plain copy on the device.

The kernel runs in one CUDA graph for each layer, so that launches do not count. It reads another layer's cache each
time, so that a small batch does not stay in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.harness.command import Run
from benchmarks.harness.machine import GIB
from benchmarks.harness.work import copy_rate

LAYERS = 36
REPLAYS = 10
# Batch, query heads, KV heads, head dimension, tokens of context, and whether lengths run from that to 1.
PAGED = {
    "8b, batch 64, 1024 tokens": (64, 32, 8, 128, 1024, False),
    "8b, batch 64, 1 to 2048 tokens": (64, 32, 8, 128, 2048, True),
    "8b, batch 1, 1024 tokens": (1, 32, 8, 128, 1024, False),
    "8b, batch 1, 16384 tokens": (1, 32, 8, 128, 16384, False),
    "0.6b, batch 128, 512 tokens": (128, 16, 8, 128, 512, False),
}
Calls = list[Callable[[], Any]]


def kernels(run: Run) -> None:
    if run.device == "cpu":
        run.say("\nkernels: not measured, since there is no GPU")
        return
    rate, rows = copy_rate(run.device, GIB) / 1e6, dict[str, dict[str, Any]]()
    for name, shape in PAGED.items():
        calls, nbytes = paged(*shape)
        us = graph_us(calls)
        rows[name] = {"us": us, "MB": nbytes / 1e6, "of the copy": f"{100 * nbytes / us / rate:.0f} %"}
    run.table(f"paged decode; a plain copy moves {rate / 1e3:.0f} GB/s", rows)


def graph_us(calls: Calls) -> float:
    """Microseconds of one of the calls, on the device."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPLAYS / len(calls)


def paged(batch: int, heads: int, kv_heads: int, head_dim: int, length: int, ragged: bool) -> tuple[Calls, int]:
    """A call for each layer, and the bytes of K and V that one reads."""
    from examples.colocate.engine.kernels.paged_decode import paged_decode

    width = -(-length // 16)
    sizes = (LAYERS, 2, batch * width + 1, 16, kv_heads, head_dim)
    caches = [each.unbind() for each in torch.randn(sizes, device="cuda", dtype=torch.bfloat16)]
    table = (torch.randperm(batch * width, device="cuda") + 1).int().view(batch, width)
    lengths = torch.linspace(length, 1 if ragged else length, batch, device="cuda").int()
    q = torch.randn(batch, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    calls: Calls = [partial(paged_decode, q, k, v, table, lengths) for k, v in caches]
    return calls, int(lengths.sum()) * 2 * kv_heads * head_dim * 2
