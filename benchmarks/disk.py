"""Backups on disk, beside a plain sequential writer and reader of as many bytes on the same disk.

    python benchmarks/disk.py [--gib 16] [--rounds 3] [--disk-dir DIR] [--device cuda:0]

Prints seconds and GB/s (medians), then one JSON line. The three take turns: memsaver, in a process of its own, with
256 tensors; one thread that writes blocks of 16 MiB past the page cache (O_DIRECT) to a preallocated file, and reads
them; the same through the cache, with fsync at the end of writing, and the cache dropped before reading. The faster of
the plain ones is the limit, for each direction. Contents are random; those of memsaver change before every pause and
are compared whole after every resume. The directory, by default a temporary one under the current, needs twice the
size; all is gone afterwards. With ``--device cpu`` it runs on the host driver, and measures nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import memsaver
from support.arguments import add_device, count, directory, parse, parser_for, positive
from support.environment import environment
from support.host import GIB, MIB
from support.processes import Process, Sample
from support.work import Contents, Work, milliseconds, size

BLOCK = 16 * MIB
RANDOM = 256 * MIB  # bytes of random data that a plain writer writes again and again
OURS = "memsaver"
WAYS = ("write_ms", "read_ms")
PLAIN = {"plain, past the cache": os.O_DIRECT, "plain, cached, with fsync": 0}


def pauses_and_resumes(work: Work, directory: str, device: str) -> Iterator[Sample]:
    """Ours: one pause and one resume for each sample."""
    memsaver.configure(disk_dir=directory)
    region = memsaver.region("work", device=device, backup="disk")
    with region:
        tensors = work.allocate(device)
    contents = Contents(tensors)
    while True:
        contents.change()
        written = milliseconds(device, region.pause)
        read = milliseconds(device, region.resume)
        contents.check()
        yield {"write_ms": written, "read_ms": read}


def moves(call: Callable[[int, list[memoryview], int], int], file: int, data: memoryview, nbytes: int) -> None:
    """Calls ``preadv`` or ``pwritev`` until all is moved, block by block."""
    for begin in range(0, nbytes, BLOCK):
        at, end = begin, min(begin + BLOCK, nbytes)
        while at < end:
            moved = call(file, [data[at % RANDOM : at % RANDOM + end - at]], at)
            if moved == 0:
                raise OSError(f"the file ends after {at} of {nbytes} bytes")
            at += moved


def plain(directory: str, nbytes: int, flags: int, data: memoryview) -> Sample:
    """One thread, one file, from its first byte to its last."""
    path = os.path.join(directory, "plain")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError as error:
        return {"error": str(error)}
    try:
        os.unlink(path)
        os.posix_fallocate(file, 0, nbytes)

        def write() -> None:
            moves(os.pwritev, file, data, nbytes)
            if not flags:
                os.fsync(file)

        written = milliseconds("cpu", write)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return {"write_ms": written, "read_ms": milliseconds("cpu", partial(moves, os.preadv, file, data, nbytes))}
    except OSError as error:
        return {"error": str(error)}
    finally:
        os.close(file)


def measure(work: Work, rounds: int, directory: str, device: str) -> dict[str, list[Sample]]:
    data = mmap.mmap(-1, RANDOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    torch.frombuffer(data, dtype=torch.int64).random_()
    ours = Process(pauses_and_resumes, work=work, directory=directory, device=device)
    samples: dict[str, list[Sample]] = {name: [] for name in (OURS, *PLAIN)}
    first = ours.ask()
    said = first.get("error") or first
    print(f"{size(work.total)} in {work.tensors} tensors; first pause and resume: {said}", flush=True)
    for _ in range(rounds):
        if "error" not in first:
            samples[OURS].append(ours.ask())
        for name, flags in PLAIN.items():
            samples[name].append(plain(directory, work.total, flags, memoryview(data)))
    ours.close()
    return {"first": [first], **samples}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--gib", type=positive, help="each way (default: 16, on the CPU 0.125)")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--disk-dir", type=directory, default=os.getcwd(), help="on the disk to be measured")
    add_device(parser)
    options = parse(parser, gib=(16.0, 0.125))
    begin = time.monotonic()
    work = Work(256, max(1, int(options.gib * GIB) // 256 // 4096) * 4096, backed_up=True)
    nbytes = work.total
    with tempfile.TemporaryDirectory(prefix="memsaver-disk-", dir=options.disk_dir) as folder:
        samples = measure(work, options.rounds, folder, options.device)
    rows: dict[str, dict[str, float]] = {}
    for name in (OURS, *PLAIN):
        whole = [sample for sample in samples[name] if "error" not in sample]
        if whole:
            rows[name] = {way: statistics.median(each[way] for each in whole) for way in WAYS}
    best = {way: min((rows[name][way] for name in PLAIN if name in rows), default=0.0) for way in WAYS}
    print(f"{'':28} {'write, s':>9}{'GB/s':>7}{'':8}{'read, s':>9}{'GB/s':>7}")
    for name in (OURS, *PLAIN):
        if name in rows:
            cells = (
                f"{took / 1e3:9.2f}{nbytes / took / 1e6:7.2f}{100 * best[way] / took:6.0f} %"
                for way, took in rows[name].items()
            )
            print(f"{name:28} {''.join(cells)}")
        for error in sorted({sample["error"] for sample in samples[name] if "error" in sample}):
            print(f"{name:28} {error}")
    result: dict[str, Any] = {"benchmark": "disk", **environment(options.device), "bytes": nbytes, "median": rows}
    print(json.dumps({**result, "samples": samples, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
