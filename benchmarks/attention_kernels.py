"""The engine's Triton kernels on a GPU: bytes they must move over their time, beside a plain copy on the device.

    python benchmarks/attention_kernels.py [--sweep] [--only-prefill]

Each kernel runs many times in one CUDA graph, so that launches do not count; ``host us`` is the time of a launch on a
caller without graphs. Paged decode reads another layer's cache each time, so that a small batch does not stay in the
L2 cache. ``--sweep`` tries other tiles, stages, warps and numbers of programs for it, one line each.

Prefill attention to a paged context is bound by operations. Its kernel stands beside torch's Flash Attention over K
and V that lie in order, and beside the same with the gathering before it. ``--sweep`` tries other tilings for it too.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from support.arguments import parse, parser_for  # noqa: E402
from support.engine_loads import copy_bandwidth  # noqa: E402
from support.environment import environment  # noqa: E402
from support.host import GIB  # noqa: E402

LAYERS = 36
REPEATS = 20  # of a kernel in a graph
TUNED = ("_TILE_BYTES", "_STAGES", "_WARPS", "_PROGRAMS")
TRIED = [
    (8192, 2, 4, 512),
    (8192, 4, 4, 512),
    (8192, 3, 2, 512),
    (8192, 4, 2, 512),
    (8192, 3, 1, 512),
    (16384, 3, 4, 512),
    (16384, 3, 8, 512),
    (4096, 5, 4, 512),
    (8192, 3, 4, 256),
    (8192, 3, 4, 1024),
]
# name: batch, query heads, kv heads, head dimension, tokens of context, whether lengths run from 1 to that
PAGED = {
    "8b, batch 64, 1024 tokens": (64, 32, 8, 128, 1024, False),
    "8b, batch 64, 1 to 2048 tokens": (64, 32, 8, 128, 2048, True),
    "8b, batch 1, 1024 tokens": (1, 32, 8, 128, 1024, False),
    "8b, batch 1, 16384 tokens": (1, 32, 8, 128, 16384, False),
    "0.6b, batch 128, 512 tokens": (128, 16, 8, 128, 512, False),
    "gpt2, batch 64, 512 tokens": (64, 12, 12, 64, 512, False),
}
# name: query heads, kv heads, head dimension, new tokens, tokens of context with them
PREFILLS = {
    "0.6b, 4096 of 32768 tokens": (16, 8, 128, 4096, 32768),
    "0.6b, 4096 of 8192 tokens": (16, 8, 128, 4096, 8192),
    "8b, 4096 of 32768 tokens": (32, 8, 128, 4096, 32768),
    "8b, 512 of 1024 tokens": (32, 8, 128, 512, 1024),
    "gpt2, 512 of 1024 tokens": (12, 12, 64, 512, 1024),
}
TILINGS = [(128, 64, 2, 8), (128, 64, 4, 8), (128, 128, 2, 8), (128, 32, 4, 8), (64, 64, 3, 4), (64, 128, 2, 4)]
Row = dict[str, Any]


def graph_us(calls: list[Callable[[], Any]], replays: int = 10) -> float:
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
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays / len(calls)


def host_us(call: Callable[[], Any], count: int = 300) -> float:
    """Microseconds until a call returns."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / count * 1e6


def paged(shape: tuple[int, int, int, int, int, bool]) -> tuple[list[Callable[[], Any]], int]:
    """A call for each layer, and the bytes of K and V that one reads."""
    from examples.colocate.engine import paged_kernel

    batch, heads, kv_heads, head_dim, length, ragged = shape
    width = -(-length // 16)
    sizes = (LAYERS, 2, batch * width + 1, 16, kv_heads, head_dim)
    caches = [each.unbind() for each in torch.randn(sizes, device="cuda", dtype=torch.bfloat16)]
    table = (torch.randperm(batch * width, device="cuda") + 1).int().view(batch, width)
    lengths = torch.linspace(1 if ragged else length, length, batch, device="cuda").int()
    q = torch.randn(batch, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    calls: list[Callable[[], Any]] = [
        partial(paged_kernel.paged_decode_triton, q, k_cache, v_cache, table, lengths) for k_cache, v_cache in caches
    ]
    return calls, int(lengths.sum()) * 2 * kv_heads * head_dim * 2


def fused(tokens: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """A call of each of the other kernels, in the shapes of Qwen3-8B, and the bytes that it moves."""
    from examples.colocate.engine import fused_kernels, sampling_kernel

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, residual, weight, norm = draw(tokens, 4096), draw(tokens, 4096), draw(4096), draw(128)
    q, k, v = draw(tokens, 48, 128).split((32, 8, 8), dim=1)
    keys, gate_up = k.contiguous(), draw(tokens, 24576)
    angles, positions = torch.randn(8192, 64, device="cuda"), torch.arange(tokens, device="cuda", dtype=torch.int32)
    k_cache, v_cache = draw(2, tokens // 16 + 2, 16, 8, 128).unbind()
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "add_rms_norm": (lambda: fused_kernels.add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes),
        "rotate": (
            lambda: fused_kernels.rotate(q, k, norm, norm, 1e-6, angles, angles, positions),
            2 * tokens * 40 * 256,
        ),
        "write_kv": (lambda: fused_kernels.write_kv(k_cache, v_cache, keys, v, positions), 4 * keys.nbytes),
        "swiglu": (lambda: fused_kernels.swiglu(gate_up), gate_up.nbytes * 3 // 2),
    }
    if tokens <= 128:
        logits, temperatures = draw(tokens, 151936), torch.ones(tokens, device="cuda")
        state = torch.zeros(2, dtype=torch.int64, device="cuda")
        calls["sample"] = lambda: sampling_kernel.sample(logits, temperatures, state), logits.nbytes
    return calls


def prefill(shape: tuple[int, int, int, int, int]) -> tuple[dict[str, Callable[[], Any]], float]:
    """A call of each way to attend, and the operations that it makes."""
    from examples.colocate.engine import attention

    heads, kv_heads, head_dim, new, context = shape
    count = -(-context // 16)
    caches = torch.randn((2, count + 1, 16, kv_heads, head_dim), device="cuda", dtype=torch.bfloat16)
    blocks = (torch.randperm(count, device="cuda") + 1).int()
    queries, lengths, tables = (attention.Ranges([each]) for each in (new, context, count))
    for ranges in (queries, lengths, tables):
        ranges.bounds_on_device = torch.tensor(ranges.bounds, dtype=torch.int32, device="cuda")
    k_cache, v_cache = caches
    contexts = attention.PagedContexts(lengths, blocks, tables)
    q = torch.randn(new, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = caches[:, 1:].flatten(1, 2)[:, :context].contiguous()
    calls: dict[str, Callable[[], Any]] = {
        "paged": lambda: attention.paged_prefill(q, k_cache, v_cache, queries, contexts),
        "gathered, then flash": partial(
            attention.paged_prefill, q, k_cache, v_cache, queries, contexts, use_kernel=False
        ),
        "flash alone": lambda: attention.varlen_attention(q, k, v, queries, lengths),
    }
    return calls, 4.0 * heads * head_dim * new * (context - (new - 1) / 2)


def prefills(sweep: bool) -> list[Row]:
    from examples.colocate.engine import prefill_kernel

    rows: list[Row] = []

    def show(name: str, way: str, call: Callable[[], Any], operations: float) -> None:
        us = graph_us([call] * 3, replays=5)
        rows.append({"prefill": name, "way": way, "us": us, "tflops": operations / us / 1e6})
        print(f"{name:30}{way:32}{us:10.1f} us {operations / us / 1e6:7.1f} TFLOP/s", flush=True)

    chosen = dict(prefill_kernel.TILINGS)
    for name, shape in PREFILLS.items():
        calls, operations = prefill(shape)
        for way, call in calls.items():
            show(name, way, call, operations)
        for tried in TILINGS if sweep else ():
            prefill_kernel.TILINGS.update(dict.fromkeys(chosen, prefill_kernel.Tiling(*tried)))
            try:
                show(name, f"paged, {tried}", calls["paged"], operations)
            except Exception as error:  # more shared memory than there is, such as
                print(f"  {tried}: {type(error).__name__}: {str(error)[:80]}")
        prefill_kernel.TILINGS.update(chosen)
        del calls
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other settings of paged attention")
    parser.add_argument("--only-prefill", action="store_true", help="prefill attention alone")
    options = parse(parser)
    from examples.colocate.engine import paged_kernel

    begin = time.monotonic()
    rate = copy_bandwidth("cuda", GIB) / 1e6  # bytes read and written in a microsecond
    print(f"plain copy: {rate / 1e3:.0f} GB/s read and written")
    rows: list[Row] = []

    def show(name: str, nbytes: int, us: float, host: float | None, **more: Any) -> None:
        rows.append({"kernel": name, "bytes": nbytes, "us": us, "of_copy": nbytes / us / rate, "host_us": host, **more})
        figures = f"{nbytes / 1e6:9.2f} MB {us:9.2f} us {nbytes / us / rate:6.0%} of the copy"
        print(f"{name:45} {figures}" + (f" {host:7.1f} host us" if host is not None else ""), flush=True)

    def tune(values: tuple[int, ...]) -> None:
        for name, value in zip(TUNED, values):
            setattr(paged_kernel, name, value)

    of_prefill = prefills(options.sweep)
    chosen = tuple(getattr(paged_kernel, name) for name in TUNED)
    for name, shape in PAGED.items() if not options.only_prefill else ():
        calls, nbytes = paged(shape)
        show(name, nbytes, graph_us(calls), host_us(calls[0]))
        for tried in TRIED if options.sweep else ():
            tune(tried)
            try:
                show(f"  {tried}", nbytes, graph_us(calls, replays=5), None, shape=name, tried=tried)
            except Exception as error:  # more shared memory than there is, such as
                print(f"  {tried}: {type(error).__name__}: {str(error)[:80]}")
        tune(chosen)
        del calls
        torch.cuda.empty_cache()
    for tokens in (1, 64, 4096) if not options.only_prefill else ():
        for name, (call, nbytes) in fused(tokens).items():
            show(f"{name}, {tokens} tokens", nbytes, graph_us([call] * REPEATS), host_us(call))
    measured = {"copy_gb_per_s": rate / 1e3, "rows": rows, "prefill": of_prefill}
    result = {"benchmark": "attention_kernels", **environment(), **measured}
    print(json.dumps({**result, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
