"""The time of decode steps by kernel, from some replays."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .engine import Engine
from .verify import fill_with_random_context


@dataclass(frozen=True)
class Kernel:
    """One kernel, or on the CPU one operator."""

    name: str
    calls: float  # in one step
    seconds: float  # in one step


@dataclass(frozen=True)
class Profile:
    """`seconds` is a step's time without the profiler; the kernels' sum is less where the device waits in between."""

    size: int
    by_graph: bool
    seconds: float
    kernels: list[Kernel]  # the longest first

    def table(self, most: int = 12) -> str:
        """The first of the kernels, one a line, after a line for the whole step."""
        how, busy = "graph" if self.by_graph else "eager", sum(kernel.seconds for kernel in self.kernels)
        calls = sum(kernel.calls for kernel in self.kernels)
        rows = [
            f"decode {self.size} ({how}): {1e6 * self.seconds:.1f} us a step, {1e6 * busy:.1f} in {calls:g} kernels"
        ]
        rows += [f"{1e6 * each.seconds:9.1f} us {each.calls:6g}  {each.name[:90]}" for each in self.kernels[:most]]
        return "\n".join(rows)


@torch.no_grad()
def profile_replays(engine: Engine, size: int, replays: int, context: int | None = None) -> Profile:
    """So many decode steps of a captured size, or eager ones of any other, each sequence with `context` tokens.

    Overwrites the KV cache and drops its contents. Raises RuntimeError while requests are running.
    """
    with engine.on_device():
        return _profiled(engine, size, replays, engine.max_model_len - 1 if context is None else context)


def _profiled(engine: Engine, size: int, replays: int, context: int) -> Profile:
    fill_with_random_context(engine, size, context)
    graph = engine.runner.graphs.get(size)
    step = partial(engine.decode_step, size) if graph is None else graph.replay
    on_gpu = engine.device.type == "cuda"

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(replays):
            step()
        if on_gpu:
            torch.cuda.synchronize(engine.device)
        return (time.perf_counter() - begin) / replays

    run()
    seconds = run()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:  # without it torch warns of cycles, here one
        run()
    rows: list[Any] = list(profiler.key_averages())
    spent = [(row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1e6 for row in rows]
    kernels = [Kernel(row.key, row.count / replays, time / replays) for row, time in zip(rows, spent) if time]
    return Profile(size, graph is not None, seconds, sorted(kernels, key=lambda kernel: -kernel.seconds))
