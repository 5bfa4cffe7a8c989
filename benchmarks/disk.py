"""Backups on disk, beside a plain sequential writer and reader of as many bytes on the same disk.

The two take turns: memsaver in a process of its own, with 256 tensors; and one thread that writes blocks of 16 MiB
past the page cache (O_DIRECT) to a preallocated file, and reads them. Contents are random, change before each pause and
are compared whole after each resume. The directory needs twice the size.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.harness.command import Options, Run, count, directory, number
from benchmarks.harness.machine import GIB, MIB
from benchmarks.harness.processes import Process, Sample, processes
from benchmarks.harness.subjects import Memsaver
from benchmarks.harness.work import Contents, Work, median, share, size, timed

DEVICES = ("cuda", "cpu")
BLOCK = 16 * MIB
RANDOM = 256 * MIB  # bytes of random data that the plain writers write again and again
PLAIN = "plain, past the cache"


def options(parser: Options) -> None:
    parser.size("--gib", number, 16.0, 0.125, "each way")
    parser.add_argument("--rounds", type=count, default=3, help="after a first pause and resume")
    parser.add_argument("--disk-dir", type=directory, default=os.getcwd(), help="on the disk to be measured")


def measure(run: Run) -> None:
    work = Work(256, max(1, int(run.options.gib * GIB) // 256 // 4096) * 4096, backup="disk")
    data = mmap.mmap(-1, RANDOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    torch.frombuffer(data, dtype=torch.int64).random_()
    samples: dict[str, list[Sample]] = {"memsaver": [], PLAIN: []}
    with tempfile.TemporaryDirectory(prefix="memsaver-disk-", dir=run.options.disk_dir) as folder:
        ours = Process(cycles, work=work, folder=folder, device=run.device)
        with processes(ours):
            first = ours.ask()
            for _ in range(run.options.rounds):
                samples["memsaver"].append(ours.ask())
                samples[PLAIN].append(plain(folder, work.total, memoryview(data)))
    took = {name: {way: median([each[way] for each in found]) for way in first} for name, found in samples.items()}
    rows: dict[str, dict[str, Any]] = {"memsaver, first": {f"{way}, s": ms / 1e3 for way, ms in first.items()}}
    for name, ways in took.items():
        row = rows[name] = dict[str, Any]()
        for way, ms in ways.items():
            row |= {f"{way}, s": (ms or 0) / 1e3, f"{way}, GB/s": work.total / (ms or 1) / 1e6}
            row[f"{way}: of the plain one"] = share(took[PLAIN][way], ms)
    run.table(f"{size(work.total)} on disk", rows)
    run.keep(first=first, ms=samples)


def cycles(work: Work, folder: str, device: str) -> Iterator[Sample]:
    """One pause and one resume for each sample, in ms."""
    subject = Memsaver(device, work.backup, disk_dir=folder)
    contents = Contents(subject.allocate(work))
    while True:
        contents.change()
        sample = {"write": timed(device, subject.pause), "read": timed(device, subject.resume)}
        contents.check()
        yield sample


def plain(folder: str, nbytes: int, data: memoryview) -> Sample:
    """One thread, one file, from its first byte to its last."""
    path = os.path.join(folder, "plain")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.unlink(path)
        os.posix_fallocate(file, 0, nbytes)
        calls = {"write": os.pwritev, "read": os.preadv}
        return {way: timed("cpu", partial(_move, call, file, data, nbytes)) for way, call in calls.items()}
    finally:
        os.close(file)


def _move(call: Callable[[int, list[memoryview], int], int], file: int, data: memoryview, nbytes: int) -> None:
    """Calls ``preadv`` or ``pwritev`` until all has moved, block by block."""
    for begin in range(0, nbytes, BLOCK):
        at, end = begin, min(begin + BLOCK, nbytes)
        while at < end:
            moved = call(file, [data[at % RANDOM : at % RANDOM + end - at]], at)
            if moved == 0:
                raise OSError(f"the file ends after {at} of {nbytes} bytes")
            at += moved
