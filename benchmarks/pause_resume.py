"""Pause, resume and switch, beside torch_memory_saver and plain pinned copies, in one run.

Subjects take turns, each time in a new process. Tables have medians in ms, and the share of the limit's rate. The
limit is measured before each subject: plain copies between the device and pinned memory. Contents are random, change
before each pause, and are compared whole after each cycle if they have a backup. torch_memory_saver with backups that
it releases has one cycle. Needs 96 GiB of device memory and 80 GiB of host memory, times --scale. Parts:

- table: first and later pauses and resumes of 64 GiB, 16 GiB and 8 GiB.
- first: a first pause, which pins host memory, and the host memory that the process holds then.
- switch: one region out and another one in through the same chunks, on a full device.
- within: 64 GiB from region to region without a backup.
- lazy: two regions of 64 GiB, or less if the device has less, in turns by lazy pauses: both fit, or 10 GiB are lacking.
  Beside it the pause of such a region without a copy and its resume, by retained chunks.
- stale: a resume of 8 GiB without contents with the option stale and without it, and the check of 8 GiB after a write.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

import memsaver
from benchmarks.harness import subjects
from benchmarks.harness.command import Options, Run, count, number
from benchmarks.harness.limits import Limit
from benchmarks.harness.machine import GIB, MIB, anonymous, total_bytes, touch
from benchmarks.harness.pools import free_bytes
from benchmarks.harness.processes import Sample, in_process
from benchmarks.harness.work import Contents, Work, median, share, size, timed

DEVICES = ("cuda", "cpu")
LARGE = Work(2, 32 * GIB, backup="none")
MEDIUM = Work(256, 64 * MIB)
SMALL = Work(4096, 2 * MIB)
ROOM = 8 * GIB  # of a device, for contexts and comparisons
SPARE = 768 * MIB  # of a full device


def options(parser: Options) -> None:
    parser.choice("--only", PARTS, "the parts")
    parser.size("--scale", number, 1.0, 0.01, "of the sizes")
    parser.size("--cycles", count, 5, 2, "of each process, after a first one")
    parser.add_argument("--rounds", type=count, default=1, help="processes of each subject of the table")
    parser.add_argument("--no-peer", action="store_true", help="without torch_memory_saver")


def measure(run: Run) -> None:
    with Limit(MEDIUM.scaled(run.options.scale).total, run.device) as limit:
        run.parts(PARTS, limit)
        run.keep(limit={"bytes": limit.nbytes, "ms": limit.samples})


def table(run: Run, limit: Limit) -> None:
    peers = () if run.options.no_peer else subjects.peers(run.device)
    for full in (LARGE, MEDIUM, SMALL):
        work, since = full.scaled(run.options.scale), len(limit.samples)
        ways = [subjects.MEMSAVER, subjects.RETAINED, *peers]
        if work.backup == "none":
            ways = [way for way in ways if way != subjects.TMS_RETAINED]
        samples: dict[str, list[Sample]] = {way: [] for way in ways}
        for turn in range(run.options.rounds):
            for way in ways:
                pins = way == subjects.TMS and work.backup != "none"  # slow: seconds a cycle
                if pins and turn:
                    continue
                limit.measure()
                how = {"name": way, "work": work, "number": 1 if pins else run.options.cycles, "device": run.device}
                found = run.attempt(f"{work}, {way}", partial(in_process, subjects.cycles_of, **how))
                samples[way] += [found] if found else []
        rows: dict[str, dict[str, Any]] = {way: _row(each, work, limit, since) for way, each in samples.items()}
        out, into = limit.ms("out", work.total, since), limit.ms("into", work.total, since)
        if work.backup != "none":
            rows["plain pinned copies"] = {"pause, ms": out, "resume, ms": into}
        run.table(str(work), rows)
        run.keep(**{f"samples of {work}": samples})


def _row(samples: list[Sample], work: Work, limit: Limit, since: int) -> dict[str, Any]:
    firsts = {f"first {way}, ms": median([each[f"{way}_ms"][0] for each in samples]) for way in ("pause", "resume")}
    row: dict[str, Any] = dict(firsts)
    for way, direction in (("pause", "out"), ("resume", "into")):
        took = median([one for each in samples for one in each[f"{way}_ms"][1:]])
        row[f"{way}, ms"] = took
        if work.backup != "none":
            row[f"{way}: of the limit"] = share(limit.ms(direction, work.total, since), took)
    return row


def first(run: Run, limit: Limit) -> None:
    for full in (MEDIUM, SMALL):
        work, samples = full.scaled(run.options.scale), []
        for _ in range(1 if run.small else 2):
            limit.measure()
            samples.append(in_process(first_pause, work=work, device=run.device))
        row = {name: median([sample[name] for sample in samples]) for name in samples[0]}
        run.table(f"first pause of {work}, in a new process", {"memsaver": row})


def first_pause(work: Work, device: str) -> Sample:
    """Touches as much host memory before, since memory that a virtual machine has not used is slow."""
    sample: Sample = {"touched before, s": touch(anonymous(work.total + work.total // 4))}
    region = memsaver.region("work", device=device, backup="host")
    Contents([torch.empty(1, dtype=torch.int64, device=device)])  # torch loads its code here
    with region:
        tensors = work.allocate(device)
    contents = Contents(tensors)
    sample["pause, ms"] = timed(device, region.pause)
    sample["host memory held, GiB"] = memsaver.stats().devices[device].host_held_bytes / GIB
    sample["contents, GiB"] = region.allocated_bytes / GIB
    sample["resume, ms"] = timed(device, region.resume)
    contents.check()
    return sample


def switch(run: Run, limit: Limit) -> None:
    work, since = MEDIUM.scaled(run.options.scale), len(limit.samples)
    limit.measure()
    sample = in_process(switches, work=work, cycles=run.options.cycles, device=run.device, full=True)
    limit.measure()
    both = limit.ms("both", work.total, since)
    rows: dict[str, dict[str, Any]] = {}
    for way, samples in sample["ms"].items():
        took = median(samples)
        rows[way] = {"ms": took, "GB/s in all": 2 * work.total / took / 1e6 if took else None,
                     "of the limit": share(both, took)}  # fmt: skip
    rows["plain copies both ways at once"] = {"ms": both}
    run.table(f"{size(work.total)} out and in, {size(sample['spare_bytes'])} free on the device", rows)
    run.keep(switch=sample)


def within(run: Run, limit: Limit) -> None:
    work = LARGE.scaled(run.options.scale)
    sample = in_process(switches, work=work, cycles=4 * run.options.cycles, device=run.device, full=False)
    took = {"switch": {"ms": median(sample["ms"]["switch"])}}
    run.table(f"{size(work.total)} from region to region, without a backup", took)


def lazy(run: Run, limit: Limit) -> None:
    most = (total_bytes(run.device) - ROOM) / 2 / LARGE.total if run.device != "cpu" else 1.0
    work = replace(LARGE.scaled(min(run.options.scale, most)), backup="host")
    rows = {"pause without copies, resume, chunks retained": in_process(unmapped, work=work, device=run.device)}
    for lacking in (0, 10 * work.total // 64):
        how: dict[str, Any] = {"work": work, "lacking": lacking, "cycles": 4 * run.options.cycles, "device": run.device}
        rows[f"lazy switch, {size(lacking)} are lacking"] = in_process(lazy_switches, **how)
    run.table(f"two regions of {size(work.total)} with contents", rows)


def unmapped(work: Work, device: str) -> Sample:
    """Of a region with a backup, so that it has as many chunks."""
    memsaver.configure(retain=subjects.RETAIN)
    region = memsaver.region("work", device=device, backup="host")
    with region:
        tensors = work.allocate(device)
    took = []
    for _ in range(6):
        took.append(timed(device, lambda: region.pause(backup="none")) + timed(device, region.resume))
    del tensors
    return {"ms": median(took[1:]), "most, ms": max(took)}


def lazy_switches(work: Work, lacking: int, cycles: int, device: str) -> Sample:
    Contents([torch.empty(8 * MIB, dtype=torch.int64, device=device)])  # torch keeps memory for comparisons
    memsaver.region("none", device=device)  # opens the device
    filler = _taken(device, free_bytes(device) - 2 * work.total + lacking) if lacking else None
    sides = subjects.Sides(work, device, lazy=True)
    moved: list[int] = []

    def act(out: memsaver.Region, into: memsaver.Region) -> None:
        moved.append(memsaver.switch(pause=out.tag, resume=into.tag, lazy=True).copied_bytes)

    took = [sides.turn(act) for _ in range(cycles)]
    del filler
    return {"ms": median(took), "most, ms": max(took), "copied, GiB": max(moved) / GIB}


def stale(run: Run, limit: Limit) -> None:
    work = replace(SMALL.scaled(run.options.scale), backup="none")
    rows = {way: in_process(checked, work=work, device=run.device, stale=way) for way in ("off", "check")}
    gib = work.total / GIB
    added = {name: (took - rows["off"][name]) / gib for name, took in rows["check"].items()}
    run.table(f"stale, {work}", {**rows, "of a GiB": added})


def checked(work: Work, device: str, stale: str) -> Sample:
    memsaver.configure(retain=subjects.RETAIN, stale=stale)
    region = memsaver.region("work", device=device)
    with region:
        tensors = work.allocate(device)
    found: dict[str, list[float]] = {"resume, ms": [], "check, ms": []}
    for _ in range(6):
        region.pause()
        found["resume, ms"].append(timed(device, region.resume))
        torch._foreach_zero_(tensors)
        found["check, ms"].append(timed(device, lambda: memsaver.check_written(region) if stale == "check" else None))
    return {name: median(took[1:]) for name, took in found.items()}


def switches(work: Work, cycles: int, device: str, full: bool) -> Sample:
    """Two regions in turns: by a switch, and on a full device also by a pause and then a resume."""
    memsaver.configure(retain=subjects.RETAIN)
    sides = subjects.Sides(work, device)
    ways = {"switch": subjects.switch, **({"pause, then resume": _one_after_the_other} if full else {})}
    for act in (*ways.values(), *ways.values()):
        sides.turn(act)
    filler = _fill(device) if full else None
    spare = free_bytes(device)
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(cycles):
        for way, act in ways.items():
            samples[way] += [sides.turn(act), sides.turn(act)]
    del filler
    return {"ms": samples, "spare_bytes": spare}


def _one_after_the_other(out: memsaver.Region, into: memsaver.Region) -> None:
    out.pause()
    into.resume()


def _fill(device: str) -> torch.Tensor:
    """Takes all of the device but the spare bytes. On CUDA without memsaver."""
    memsaver.configure(retain=0)  # idle chunks would be room beside the spare bytes
    memsaver.configure(retain=subjects.RETAIN)
    return _taken(device, free_bytes(device) - SPARE)


def _taken(device: str, nbytes: int) -> torch.Tensor:
    if device == "cpu":
        return memsaver.region("filler", device=device).empty((nbytes,), torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


PARTS = {"table": table, "first": first, "switch": switch, "within": within, "lazy": lazy, "stale": stale}
