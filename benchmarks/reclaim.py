"""Memory that a trainer caches goes to an engine that waits for it.

Two processes share a pool that has room for little more than one of them. The trainer has --gib in free blocks of
torch in a region, and queues --work seconds of kernels that end with writes to all of these blocks. Then its main
thread waits without the GIL, and the engine resumes a region of --gib. Times are from the end of the queued work, by
the device's clock, to the return of the resume; a negative one would be a fault. After each round the engine pauses,
and the values of the trainer's next step are compared. A resume of more than --limit ms fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from threading import Barrier
from typing import Any

import torch

import memsaver
from benchmarks.harness.command import Options, Run, count, number
from benchmarks.harness.machine import GIB
from benchmarks.harness.pools import shared_pool
from benchmarks.harness.processes import CONTEXT, Process, Sample, ask_all, processes
from benchmarks.harness.work import timed

DEVICES = ("cuda",)
WAIT_S = 120.0
SPARE = 2 * GIB  # of the pool, which neither side needs
PART = GIB  # of each block


def options(parser: Options) -> None:
    parser.size("--gib", count, 20, 2, "that the trainer caches, and the engine needs")
    parser.add_argument("--work", type=number, default=2.0, help="seconds of queued kernels")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--limit", type=number, default=100.0, help="milliseconds")


def measure(run: Run) -> None:
    gib, rounds = run.options.gib, run.options.rounds
    with shared_pool(gib * GIB + SPARE, run.device) as pool:
        how: dict[str, Any] = {"directory": pool.directory, "device": run.device, "parts": gib * GIB // PART}
        how |= {"work_s": run.options.work, "rounds": rounds, "barrier": CONTEXT.Barrier(2), "timeout_s": 600.0}
        sides = [Process(side, role=role, **how) for role in ("trainer", "engine")]
        with processes(*sides):
            trained, served = ask_all(sides)
    rows: dict[str, dict[str, Any]] = {}
    for at, (trainer, engine) in enumerate(zip(trained, served)):
        after = 1e3 * (engine["came_at"] - trainer["ended_at"])
        rows[f"round {at + 1}"] = {
            "after the work, ms": after,
            "cached, GiB": trainer["cached_bytes"] / GIB,
            "left, GiB": trainer["left_bytes"] / GIB,
        }
    run.table(f"{gib} GiB from the trainer's free blocks to the engine", rows)
    took = [row["after the work, ms"] for row in rows.values()]
    fine = min(took) >= 0 and max(took) <= run.options.limit
    run.check(f"each resume took 0 to {run.options.limit:g} ms", fine, max(took))


def side(
    directory: str, device: str, parts: int, work_s: float, rounds: int, barrier: Barrier, role: str
) -> list[Sample]:
    """A row for each round: times by the clock of the machine."""
    os.environ["MEMSAVER_POOL_DIR"] = directory
    torch.cuda.set_device(device)
    torch.cuda.init()
    memsaver.configure(pool="shared")
    region = memsaver.region(role, device=device)
    if role == "trainer":
        return list(_train(region, parts, work_s, rounds, barrier))
    return list(_serve(region, parts, rounds, barrier))


def _train(region: memsaver.Region, parts: int, work_s: float, rounds: int, barrier: Barrier) -> Iterator[Sample]:
    cycles = _cycles_of(work_s)
    barrier.wait(WAIT_S)  # the engine has paused: there is no room for both

    def step(value: int, check: bool) -> None:
        with region:
            blocks = [torch.empty(PART, dtype=torch.uint8, device=region.device) for _ in range(parts)]
            for block in blocks:
                block.fill_(value)
            if check and not all(bool((block[:: 1 << 20] == value).all()) for block in blocks):
                raise AssertionError(f"a block does not hold {value}")

    for at in range(rounds):
        step(at + 1, check=True)
        torch.cuda.synchronize()
        cached = region.mapped_bytes
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        began.synchronize()
        began_at = time.monotonic()
        torch.cuda._sleep(cycles)
        step(at + 1, check=False)
        ended.record()
        barrier.wait(WAIT_S)  # the engine resumes
        barrier.wait(WAIT_S)  # the engine has resumed, and has paused again
        ended.synchronize()
        ended_at = began_at + began.elapsed_time(ended) / 1e3
        yield {"ended_at": ended_at, "cached_bytes": cached, "left_bytes": region.mapped_bytes}
        step(at + 100, check=True)
        barrier.wait(WAIT_S)


def _serve(region: memsaver.Region, parts: int, rounds: int, barrier: Barrier) -> Iterator[Sample]:
    with region:
        tensors = [torch.empty(PART, dtype=torch.uint8, device=region.device) for _ in range(parts)]
    torch.cuda.synchronize()
    region.pause()
    barrier.wait(WAIT_S)
    for _ in range(rounds):
        barrier.wait(WAIT_S)
        region.resume(memory_timeout=WAIT_S)
        came_at = time.monotonic()
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
        if [int(tensor.max()) for tensor in tensors] != list(range(len(tensors))):
            raise AssertionError("the engine's memory does not hold what was written to it")
        region.pause()
        yield {"came_at": came_at}
        barrier.wait(WAIT_S)
        barrier.wait(WAIT_S)


def _cycles_of(seconds: float) -> int:
    """The argument of torch.cuda._sleep() for so many seconds."""
    took = [timed("cuda", lambda: torch.cuda._sleep(100_000_000)) for _ in range(2)]
    return int(1e8 * seconds * 1e3 / took[-1])
