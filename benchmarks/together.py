"""Several processes, one for each GPU, that switch at the same moment, beside the same copies without memsaver.

In each process a region goes out while another one comes in, both with a backup. In turn with it, plain pinned copies
move as many bytes both ways at once. A barrier holds all processes before each. Contents are random, change before
each switch and are compared whole after it. Each process needs three times --gib of its device, and twice of host
memory, which is touched before: a virtual machine may have to grow first. Prints GB/s, both ways in all: medians over
the cycles, for all processes from the first begin to the last end.

--same: all pause and resume equal contents, with one backup for all (same_as) in turn with a backup for each.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import torch

import memsaver
from benchmarks.harness.command import Options, Run, count, number
from benchmarks.harness.limits import PlainCopies
from benchmarks.harness.machine import GIB, MIB, anonymous, touch, visible_gpus
from benchmarks.harness.processes import CONTEXT, Process, Sample, ask_all, in_process, processes
from benchmarks.harness.subjects import RETAIN, Sides, switch
from benchmarks.harness.work import Contents, Work, size, synchronize

DEVICES = ("cuda", "cpu")
FOOTPRINT = 2 * GIB  # of host memory that the plain copies of one direction go through
WAIT_S = 120.0
WARM_UP = 2
WAYS = ("memsaver", "plain copies")
SAME = ("same_as", "a backup each")
Span = tuple[float, float]  # begin and end, in seconds by the clock of the machine


def options(parser: Options) -> None:
    parser.add_argument("--processes", type=count, help="default: one for each GPU; on the CPU two")
    parser.size("--gib", number, 16.0, 0.125, "out of each process, and as many in")
    parser.add_argument("--cycles", type=count, default=5, help="after two")
    parser.add_argument("--same", action="store_true", help="equal contents with one backup")


def measure(run: Run) -> None:
    gpus = visible_gpus() if run.device != "cpu" else 2
    several = run.options.processes or gpus
    work = Work(max(1, int(run.options.gib * GIB) // (64 * MIB)), min(int(run.options.gib * GIB), 64 * MIB))
    host_bytes = several * 2 * (work.total + min(work.total, FOOTPRINT))
    run.say(f"{several} processes, {size(work.total)} out and in, {size(host_bytes)} of host memory")
    if several > 1:
        run.keep(touched=in_process(touched, nbytes=host_bytes))
    devices = ["cpu" if run.device == "cpu" else f"cuda:{rank % gpus}" for rank in range(several)]
    how = {"work": work, "cycles": run.options.cycles, "barrier": CONTEXT.Barrier(several)}
    act = pausing if run.options.same else switching
    every = [Process(act, device=device, **how) for device in devices]
    with processes(*every):
        samples = ask_all(every)
    if run.options.same:
        run.table("all processes", {way: _pauses([each[way] for each in samples]) for way in SAME})
        run.keep(spans=samples)
        return
    rows: dict[str, dict[str, Any]] = {way: _rates([each[way] for each in samples], work, devices) for way in WAYS}
    rows["memsaver"]["of the plain copies"] = f"{100 * rows['memsaver']['all'] / rows['plain copies']['all']:.0f} %"
    run.table("GB/s", rows)
    run.keep(spans=samples)


def _rates(spans: list[list[Span]], work: Work, devices: list[str]) -> dict[str, Any]:
    nbytes, row = 2 * work.total, dict[str, Any]()
    for rank, (device, mine) in enumerate(zip(devices, spans)):
        row[f"{rank} ({device})"] = statistics.median(nbytes / (end - begin) / 1e9 for begin, end in mine)
    row["all"] = statistics.median(len(devices) * nbytes / seconds / 1e9 for seconds in _lasted(spans))
    return row


def _lasted(spans: list[list[Span]]) -> list[float]:
    """Seconds of each cycle, from the first begin to the last end of all processes."""
    return [max(end for _, end in cycle) - min(begin for begin, _ in cycle) for cycle in zip(*spans)]


def _pauses(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    row = {
        f"{part}, ms": 1e3 * statistics.median(_lasted([each[part] for each in ranks])) for part in ("pause", "resume")
    }
    common = {inode: nbytes for each in ranks for inode, nbytes in each["common"].items()}
    return {**row, "host memory, GiB": (sum(each["own"] for each in ranks) + sum(common.values())) / GIB}


def touched(nbytes: int) -> Sample:
    return {"seconds": touch(anonymous(nbytes))}


def switching(work: Work, cycles: int, device: str, barrier: Barrier) -> Sample:
    """The spans of each switch and of each plain copy."""
    if device != "cpu":
        torch.cuda.set_device(device)
    # The available memory that the system reports may grow with its use.
    memsaver.configure(retain=RETAIN, host_limit=2 * work.total + GIB)
    sides, copies = Sides(work, device), PlainCopies(work.total, device, FOOTPRINT)
    spans: dict[str, list[Span]] = {way: [] for way in WAYS}
    for _ in range(WARM_UP + cycles):
        sides.turn(lambda out, into: spans["memsaver"].append(_span(device, barrier, lambda: switch(out, into))))
        spans["plain copies"].append(_span(device, barrier, lambda: copies.ms("both")))
    return {way: each[WARM_UP:] for way, each in spans.items()}


def _span(device: str, barrier: Barrier, act: Callable[[], object]) -> Span:
    """Of a call that all processes begin together, with the work of the device."""
    synchronize(device)
    barrier.wait(WAIT_S)
    begin = time.perf_counter()
    act()
    synchronize(device)
    return begin, time.perf_counter()


def pausing(work: Work, cycles: int, device: str, barrier: Barrier) -> Sample:
    """The spans of each pause and resume of contents that are the same in all processes."""
    if device != "cpu":
        torch.cuda.set_device(device)
    memsaver.configure(retain=RETAIN, host_limit=2 * work.total + GIB)
    regions = dict(
        zip(SAME, (memsaver.region("same", device, "host", same_as="contents"), memsaver.region("own", device, "host")))
    )
    found = dict[str, Any]()
    for way, region in regions.items():
        torch.manual_seed(0)
        with region:
            contents = Contents(work.allocate(device))
        spans: dict[str, list[Span]] = {"pause": [], "resume": []}
        for _ in range(WARM_UP + cycles):
            contents.change()
            for part, act in (("pause", region.pause), ("resume", region.resume)):
                spans[part].append(_span(device, barrier, act))
            contents.check()
        descriptors = list(Path("/proc/self/fd").iterdir())
        files = [os.stat(path) for path in descriptors if "memfd:same-" in os.path.realpath(path)]
        found[way] = {part: each[WARM_UP:] for part, each in spans.items()}
        found[way]["common"] = {each.st_ino: 512 * each.st_blocks for each in files}
        found[way]["own"] = memsaver.stats().devices[device].host_held_bytes
        del contents
        region.close()
        memsaver.release_host_memory()
    return found
