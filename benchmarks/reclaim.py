"""Memory that a trainer caches goes to an engine that waits for it.

    python benchmarks/reclaim.py [--gib 20] [--work 2] [--rounds 3]

Two processes share a pool that has room for little more than one of them. The trainer has `--gib` in free blocks of
torch's pool over a region, and queues `--work` seconds of kernels that end with writes to all of these blocks. Then its
main thread waits without the GIL, and the engine resumes a region of `--gib`. Times are from the end of the queued
work, by the device's clock, to the return of the resume. Negative: the memory came before it, which would be a fault.
After each round the engine pauses, and the trainer makes its next step, whose values are compared. Prints a line for
each round, then one JSON line. It fails if a resume takes longer than `--limit` milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import torch

import memsaver
from support.arguments import count, parse, parser_for, positive
from support.broker import broker
from support.environment import environment
from support.host import GIB
from support.processes import CONTEXT, Process, Sample, side_by_side

DEVICE = "cuda:0"
WAIT_S = 120.0
SPARE = 2 * GIB  # bytes of the pool that neither side needs
PART = GIB  # of each block


@dataclass(frozen=True)
class Plan:
    directory: str  # of the broker's socket
    gib: int
    work_s: float
    rounds: int

    def join(self, tag: str) -> memsaver.Region:
        os.environ["MEMSAVER_POOL_DIR"] = self.directory
        torch.cuda.set_device(DEVICE)
        torch.cuda.init()
        memsaver.configure(pool="shared")
        return memsaver.region(tag, device=DEVICE)


def rounds(plan: Plan, role: str, barrier: Barrier) -> Sample:
    """One row for each round: times by the machine's clock."""
    try:
        return {"rows": list({"trainer": train, "engine": serve}[role](plan, barrier))}
    except BaseException:
        barrier.abort()  # the other need not wait
        raise


def train(plan: Plan, barrier: Barrier) -> Iterator[Sample]:
    region = plan.join("trainer")
    cycles = cycles_of(1.0)
    barrier.wait(WAIT_S)  # the engine has paused: there is not room for both

    def step(value: int, check: bool) -> None:
        with region:
            blocks = [torch.empty(PART, dtype=torch.uint8, device=DEVICE) for _ in range(plan.gib * GIB // PART)]
            for block in blocks:
                block.fill_(value)
            if check and not all(bool((block[:: 1 << 20] == value).all()) for block in blocks):
                raise AssertionError(f"a block does not hold {value}")

    for number in range(plan.rounds):
        step(number + 1, check=True)
        torch.cuda.synchronize()
        cached = region.mapped_bytes
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        began.synchronize()
        began_at = time.monotonic()
        torch.cuda._sleep(int(cycles * plan.work_s))
        step(number + 1, check=False)
        ended.record()
        barrier.wait(WAIT_S)  # the engine resumes
        barrier.wait(WAIT_S)  # the engine has resumed, and paused again
        ended.synchronize()
        yield {
            "ended_at": began_at + began.elapsed_time(ended) / 1e3,
            "cached_bytes": cached,
            "left_bytes": region.mapped_bytes,
        }
        step(number + 100, check=True)
        barrier.wait(WAIT_S)


def serve(plan: Plan, barrier: Barrier) -> Iterator[Sample]:
    region = plan.join("engine")
    with region:
        tensors = [torch.empty(PART, dtype=torch.uint8, device=DEVICE) for _ in range(plan.gib * GIB // PART)]
    torch.cuda.synchronize()
    region.pause()
    barrier.wait(WAIT_S)
    for _ in range(plan.rounds):
        barrier.wait(WAIT_S)
        called_at = time.monotonic()
        region.resume(memory_timeout=WAIT_S)
        came_at = time.monotonic()
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        if [int(tensor.max()) for tensor in tensors] != list(range(len(tensors))):
            raise AssertionError("the engine's memory does not hold what was written to it")
        region.pause()
        yield {"called_at": called_at, "came_at": came_at}
        barrier.wait(WAIT_S)
        barrier.wait(WAIT_S)


def cycles_of(seconds: float) -> float:
    """The argument of torch.cuda._sleep() for so many seconds."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1000)
    began.record()
    torch.cuda._sleep(100_000_000)
    ended.record()
    ended.synchronize()
    return 1e8 * seconds * 1e3 / began.elapsed_time(ended)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--gib", type=count, default=20, help="that the trainer caches, and the engine needs")
    parser.add_argument("--work", type=positive, default=2.0, help="seconds of queued kernels")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--limit", type=positive, default=100.0, help="milliseconds")
    options = parse(parser)
    begin = time.monotonic()
    with broker(DEVICE, options.gib * GIB + SPARE) as directory:
        plan = Plan(directory, options.gib, options.work, options.rounds)
        barrier = CONTEXT.Barrier(2)
        processes = [Process(rounds, 600.0, plan=plan, role=role, barrier=barrier) for role in ("trainer", "engine")]
        samples = side_by_side(processes, barrier.abort)
        for process in processes:
            process.close()
    errors = [sample["error"] for sample in samples if "error" in sample]
    if errors:
        sys.exit("; ".join(errors))
    rows: list[dict[str, Any]] = []
    for trainer, engine in zip(*(sample["rows"] for sample in samples)):
        rows.append({
            "after_work_ms": 1e3 * (engine["came_at"] - trainer["ended_at"]),
            "waited_ms": 1e3 * (engine["came_at"] - engine["called_at"]),
            **{name: trainer[name] for name in ("cached_bytes", "left_bytes")},
        })  # fmt: skip
        print(f"the memory came {rows[-1]['after_work_ms']:.1f} ms after the queued work", flush=True)
    print(json.dumps({
        "benchmark": "reclaim", **environment(DEVICE), "gib": options.gib, "work_s": options.work, "rows": rows,
        "seconds": time.monotonic() - begin,
    }))  # fmt: skip
    late = [row["after_work_ms"] for row in rows if not 0 <= row["after_work_ms"] <= options.limit]
    if late:
        sys.exit(f"{len(late)} of {len(rows)} resumes took {min(late):.1f} to {max(late):.1f} ms, expected 0 to "
                 f"{options.limit:g} ms")  # fmt: skip


if __name__ == "__main__":
    main()
