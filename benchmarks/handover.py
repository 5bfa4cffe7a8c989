"""Memory that goes from one process to another on one GPU: by the shared pool, the driver, and torch_memory_saver.

    python benchmarks/handover.py [--cycles 10] [--rounds 2] [--scale 1] [--only empty contents] [--device cuda]

Two processes, each with a region as large as the memory that they share; all else of the device is taken by a third
party. In each turn one pauses and the other resumes. With the shared pool both calls are made at once, and the resume
takes chunks as the pause gives them; elsewhere it is called when the pause has returned. Times are from the first
call to the last return, medians over turns in both directions after three to get acquainted. Contents, where they are
kept, change before each turn and are compared after it. Prints a table, then one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Barrier
from typing import Any

import torch

import memsaver
from support.arguments import add_device, count, parse, parser_for, positive
from support.broker import broker
from support.environment import environment
from support.host import GIB, MIB
from support.limits import Limit
from support.processes import CONTEXT, Process, Sample, side_by_side
from support.subjects import SLOW, Ours, Subject, TorchMemorySaver, peer_version
from support.switches import free_bytes
from support.work import Contents, Work, size, synchronize

POOL = "shared pool"
POOL_AFTER = "shared pool, one after the other"
DRIVER = "driver"
WARM_UP = 3
WAIT_S = 120.0
CONTEXTS = 4 * GIB  # of the device, left for three processes' contexts
SPARE = GIB  # of the pool, beyond the need of one side: room for chunks on their way


class Pooled(Ours):
    def __init__(self, device: str, backed_up: bool, directory: str) -> None:
        os.environ["MEMSAVER_POOL_DIR"] = directory
        memsaver.configure(pool="shared")
        super().__init__(device, backed_up, retained=False)

    def resume(self) -> None:
        self._region.resume(memory_timeout=WAIT_S)


@dataclass(frozen=True)
class Turns:
    subject: str
    work: Work
    turns: int
    device: str
    directory: str = ""  # of the broker's socket

    def make(self) -> Subject:
        if self.subject in (POOL, POOL_AFTER):
            return Pooled(self.device, self.work.backed_up, self.directory)
        if self.subject == DRIVER:
            return Ours(self.device, self.work.backed_up, retained=False)
        return TorchMemorySaver(self.device, self.work.backed_up, retained=self.work.backed_up)

    @property
    def at_once(self) -> bool:
        return self.subject == POOL


def take_turns(turns: Turns, rank: int, barrier: Barrier) -> Sample:
    """(begin, end) of this process's call in each turn, by the machine's clock."""
    try:
        return {"spans": list(_spans(turns, rank, barrier))}
    except BaseException:
        barrier.abort()  # the other need not wait
        raise


def _spans(turns: Turns, rank: int, barrier: Barrier) -> Iterator[tuple[float, float]]:
    if turns.device != "cpu":
        torch.cuda.set_device(turns.device)
        torch.cuda.init()
    subject = turns.make()
    for owner in range(2):  # one after the other: there is not room for both
        if rank == owner:
            with subject.region():
                tensors = turns.work.allocate(turns.device)
            contents = Contents(tensors, kept=False)  # a copy would not fit: check() below knows them
            if turns.work.backed_up:
                for number, tensor in enumerate(tensors):
                    tensor.fill_(1000 * rank + number)
            synchronize(turns.device)
            subject.pause()
        barrier.wait(WAIT_S)
    if rank == 0:
        subject.resume()
    barrier.wait(WAIT_S)
    for turn in range(turns.turns):
        giving = turn % 2 == rank
        if giving and turns.work.backed_up:
            contents.change()  # so that the backup of an earlier turn is seen through
        synchronize(turns.device)
        barrier.wait(WAIT_S)
        if not giving and not turns.at_once:
            barrier.wait(WAIT_S)
        begin = time.perf_counter()
        subject.pause() if giving else subject.resume()
        synchronize(turns.device)
        yield begin, time.perf_counter()
        if giving and not turns.at_once:
            barrier.wait(WAIT_S)
        if not giving:
            if turns.work.backed_up:
                check(tensors, rank, changes=(turn + 1) // 2)
            else:
                contents.check()
        barrier.wait(WAIT_S)


def check(tensors: list[torch.Tensor], rank: int, changes: int) -> None:
    """Every value is the one it was filled with, plus one for each change."""
    for number, tensor in enumerate(tensors):
        low, high = torch.aminmax(tensor)
        expected = 1000 * rank + number + changes
        if (int(low), int(high)) != (expected, expected):
            raise AssertionError(f"tensor {number} holds {int(low)} to {int(high)}, not {expected}")


def ballast(nbytes: int, device: str, done: Any) -> Sample:
    """A third party that holds memory until it is told."""
    held = torch.empty(nbytes, dtype=torch.uint8, device=device)
    done.wait()
    return {"bytes": held.numel()}


@contextmanager
def full_device(device: str, room: int) -> Iterator[None]:
    """Leaves so much of the device, and room for contexts."""
    if device == "cpu":
        yield
        return
    done = CONTEXT.Event()
    holder = CONTEXT.Process(
        target=ballast, args=(max(free_bytes(device) - room - CONTEXTS, 2 * MIB), device, done), daemon=True
    )
    holder.start()
    try:
        yield
    finally:
        done.set()
        holder.join()


def measure(turns: Turns) -> Sample:
    """Milliseconds of each turn after the first ones."""
    room = turns.work.total + SPARE
    pooled = turns.subject in (POOL, POOL_AFTER)
    with full_device(turns.device, room), broker(turns.device, room) if pooled else nullcontext("") as directory:
        turns = replace(turns, directory=directory)
        barrier = CONTEXT.Barrier(2)
        processes = [Process(take_turns, turns=turns, rank=rank, barrier=barrier) for rank in range(2)]
        samples = side_by_side(processes, barrier.abort)
        for process in processes:
            process.close()
    errors = [sample["error"] for sample in samples if "error" in sample]
    if errors:
        return {"error": "; ".join(errors)}
    spans = list(zip(*(sample["spans"] for sample in samples)))[WARM_UP:]
    return {"ms": [1e3 * (max(end for _, end in turn) - min(begin for begin, _ in turn)) for turn in spans]}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--cycles", type=count, default=10, help="turns that count")
    parser.add_argument("--rounds", type=count, default=2, help="each runs all subjects in turn")
    parser.add_argument("--scale", type=positive, help="of the bytes (default: 1, on the CPU 0.01)")
    parser.add_argument("--only", nargs="+", choices=("empty", "contents"), default=("empty", "contents"))
    add_device(parser, numbered=False)
    options = parse(parser, scale=(1.0, 0.01))
    device = "cpu" if options.device == "cpu" else "cuda:0"
    begin = time.monotonic()
    empty = Work(2, 32 * GIB, backed_up=False).scaled(options.scale)
    contents = Work(256, 64 * MIB, backed_up=True).scaled(options.scale)
    peers = [SLOW] if peer_version() else []
    plan = [(empty, [POOL, DRIVER, *peers])] if "empty" in options.only else []
    plan += [(contents, [POOL, POOL_AFTER, DRIVER, *peers])] if "contents" in options.only else []
    result: dict[str, Any] = {"benchmark": "handover", **environment(device), "peer": peer_version(), "work": []}
    for work, subjects in plan:
        print(
            f"{size(work.total)} {'with' if work.backed_up else 'without'} backup, from process to process", flush=True
        )
        samples: dict[str, list[float]] = {name: [] for name in subjects}
        errors: dict[str, str] = {}
        limit = Limit(min(work.total, 4 * GIB), device) if work.backed_up else None
        for _ in range(options.rounds):
            if limit is not None:
                limit.measure()
            for name in subjects:
                sample = measure(Turns(name, work, WARM_UP + options.cycles, device))
                samples[name] += sample.get("ms", [])
                if "error" in sample:
                    errors[name] = sample["error"]
        row: dict[str, Any] = {"bytes": work.total, "backed_up": work.backed_up, "ms": samples, "errors": errors}
        if limit is not None:
            row["limit_ms"] = {way: limit.milliseconds(way, work.total) for way in ("out", "into", "both")}
            limit.close()
            print(f"  plain copies, both ways at once: {row['limit_ms']['both']:.1f} ms")
        for name, found in samples.items():
            if found:
                rate = f", {2 * work.total / statistics.median(found) / 1e6:.1f} GB/s" if work.backed_up else ""
                print(f"  {name:40} {statistics.median(found):9.2f} ms{rate}   ({min(found):.2f} to {max(found):.2f})")
            if name in errors:
                print(f"  {name:40} {errors[name]}")
        result["work"].append(row)
    print(json.dumps({**result, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
