"""Memory that goes from one process to another on one GPU: by the shared pool, the driver, and torch_memory_saver.

Two processes have a region each, as large as the memory that they share. A third one holds all else of the device. In
each turn one side pauses and the other one resumes. With the shared pool both calls are made at the same time, and
the resume takes chunks as the pause returns them, and zeroes the bytes of the other side where no contents cover them,
but not with fill="keep". Otherwise the resume is called when the pause has returned. Times are from the first call to
the last return: medians over turns in both directions, after three turns. Contents with a backup change before each
turn and are compared after it.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from functools import partial
from threading import Barrier
from typing import Any

import torch

from benchmarks.harness import subjects
from benchmarks.harness.command import Options, Run, count, number
from benchmarks.harness.limits import Limit
from benchmarks.harness.machine import GIB, MIB
from benchmarks.harness.pools import full_device, shared_pool
from benchmarks.harness.processes import CONTEXT, Process, ask_all, processes
from benchmarks.harness.work import Contents, Work, median, share, synchronize

DEVICES = ("cuda", "cpu")
POOL, KEPT, DRIVER = "shared pool", 'shared pool, fill="keep"', "driver"
WORKS = {"empty": Work(2, 32 * GIB, backup="none"), "contents": Work(256, 64 * MIB)}
WARM_UP = 3
WAIT_S = 120.0
SPARE = GIB  # of the pool, beyond the need of one side: room for chunks on their way


def options(parser: Options) -> None:
    parser.choice("--only", WORKS, "64 GiB without a backup, or 16 GiB with contents")
    parser.size("--scale", number, 1.0, 0.01, "of the sizes")
    parser.add_argument("--cycles", type=count, default=10, help="turns that count")
    parser.add_argument("--rounds", type=count, default=2, help="each has all subjects in turn")


def measure(run: Run) -> None:
    for name in run.options.only:
        work = WORKS[name].scaled(run.options.scale)
        ways = [POOL, *([KEPT] if work.backup == "none" else []), DRIVER, *subjects.peers(run.device)[1:]]
        samples: dict[str, list[float]] = {way: [] for way in ways}
        with Limit(min(work.total, 4 * GIB), run.device) as limit:
            for _ in range(run.options.rounds):
                limit.measure()
                for way in ways:
                    found = run.attempt(f"{work}, {way}", partial(turns, way, work, run.options.cycles, run.device))
                    samples[way] += found or []
            both = limit.ms("both", work.total)
        rows: dict[str, dict[str, Any]] = {}
        for way, each in samples.items():
            took = median(each)
            rows[way] = {"ms": took, "least": min(each, default=None), "most": max(each, default=None)}
            if work.backup != "none" and took:
                rows[way] |= {"GB/s": 2 * work.total / took / 1e6, "of the limit": share(both, took)}
        if work.backup != "none":
            rows["plain copies both ways at once"] = {"ms": both}
        run.table(f"{work}, from process to process", rows)
        run.keep(**{f"samples of {work}": samples})


def turns(way: str, work: Work, cycles: int, device: str) -> list[float]:
    """Milliseconds of each turn that counts."""
    room = work.total + SPARE
    with full_device(device, room), shared_pool(room, device) if way in (POOL, KEPT) else nullcontext() as pool:
        how: dict[str, Any] = {"way": way, "work": work, "number": WARM_UP + cycles, "device": device}
        how |= {"directory": pool.directory if pool else "", "barrier": CONTEXT.Barrier(2)}
        sides = [Process(side, rank=rank, **how) for rank in range(2)]
        with processes(*sides):
            spans = zip(*ask_all(sides))
    return [1e3 * (max(end for _, end in turn) - min(begin for begin, _ in turn)) for turn in spans][WARM_UP:]


def side(
    way: str, work: Work, number: int, device: str, barrier: Barrier, directory: str, rank: int
) -> list[tuple[float, float]]:
    """Begin and end of this process's call in each turn, by the clock of the machine."""
    os.environ["MEMSAVER_POOL_DIR"] = directory
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.cuda.init()
    subject: subjects.Subject
    if way == subjects.TMS_RETAINED:
        subject = subjects.TorchMemorySaver(device, work.backup, retained=work.backup != "none")
    else:
        how: dict[str, Any] = {
            "pool": "process" if way == DRIVER else "shared",
            "fill": "keep" if way == KEPT else None,
        }
        subject = subjects.Memsaver(device, work.backup, memory_timeout=WAIT_S, **how)
    for owner in range(2):  # one after the other: there is no room for both
        if rank == owner:
            contents = Contents(subject.allocate(work), kept=work.backup != "none")
            subject.pause()
        barrier.wait(WAIT_S)
    if rank == 0:
        subject.resume()
    barrier.wait(WAIT_S)
    spans = []
    for turn in range(number):
        gives = turn % 2 == rank
        if gives:
            contents.change()
        synchronize(device)
        barrier.wait(WAIT_S)
        if not gives and way not in (POOL, KEPT):
            barrier.wait(WAIT_S)  # the other side has paused
        begin = time.perf_counter()
        subject.pause() if gives else subject.resume()
        synchronize(device)
        spans.append((begin, time.perf_counter()))
        if gives and way not in (POOL, KEPT):
            barrier.wait(WAIT_S)
        if not gives:
            contents.check()
        barrier.wait(WAIT_S)
    return spans
