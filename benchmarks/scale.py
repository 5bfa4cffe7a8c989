"""The cost of many regions, many tensors, many holes, and a large trim.

- regions: seconds to make regions and enter each with a small tensor, and to close them; addresses of the process
  before, with and after them. On the host driver they have no tensors.
- tensors: a pause and a resume of 100,000 tensors of 64 KiB, beside one tensor of as many bytes.
- holes: an allocation and its free in a region with 150,000 holes, which are too small or just large enough, beside
  the same in a region without holes. On the host driver: the choice of a hole does not depend on the device.
- trim: 600 tensors of 24 MiB, of which every 40th stays; mapped bytes before and after.

Each row is from a process of its own. Contents are compared after each resume and after the trim.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

import memsaver
from benchmarks.harness import subjects
from benchmarks.harness.command import Options, Run, count
from benchmarks.harness.limits import Limit
from benchmarks.harness.machine import GIB, KIB, MIB, status
from benchmarks.harness.processes import Sample, in_process
from benchmarks.harness.work import Contents, Work, median, size, synchronize, timed

DEVICES = ("cuda", "cpu")
PAIRS = 2000  # allocations and frees that are timed
EVERY = 40  # of the trim's tensors, one stays


def options(parser: Options) -> None:
    parser.choice("--only", PARTS, "the parts")
    parser.size("--regions", count, 1000, 100, "number of regions")
    parser.size("--tensors", count, 100_000, 500, "number of tensors")
    parser.size("--holes", count, 150_000, 5_000, "number of holes")
    parser.add_argument("--cycles", type=count, default=5, help="of pauses and resumes, after a first one")


def measure(run: Run) -> None:
    run.parts(PARTS)


def regions(run: Run) -> None:
    found = in_process(many_regions, number=run.options.regions, device=run.device)
    run.table(f"{run.options.regions} regions, made and entered, and closed", {"": found})


def many_regions(number: int, device: str) -> Sample:
    with memsaver.region("first", device=device):
        torch.empty(1000, device=device)  # the context is no part of the measurement
    tensors, before, begin = [], status()["VmSize"], time.perf_counter()
    every = [memsaver.region(f"region {at}", device=device) for at in range(number)]
    for at, region in enumerate(every):
        with region:
            if device != "cpu":  # regions of the host driver have none, since a chunk there is real memory
                tensors.append(torch.full((1000,), float(at), device=device))
    synchronize(device)
    made_s, held = time.perf_counter() - begin, status()["VmSize"]
    if [float(tensor[-1]) for tensor in tensors] != [float(at) for at in range(len(tensors))]:
        raise AssertionError("a tensor does not hold what was written to it")
    tensors.clear()
    begin = time.perf_counter()
    for region in every:
        region.close()
    found = {"made, s": made_s, "closed, s": time.perf_counter() - begin}
    every.clear()
    gc.collect()
    sizes = {"before": before, "with": held, "after": status()["VmSize"]}
    return found | {f"addresses {when}, GiB": nbytes / GIB for when, nbytes in sizes.items()}


def tensors(run: Run) -> None:
    several = Work(run.options.tensors, 64 * KIB)
    rows: dict[str, dict[str, Any]] = {}
    with Limit(several.total, run.device) as limit:
        limit.measure()
        for work in (several, Work(1, several.total)):
            how = {"name": subjects.MEMSAVER, "work": work, "number": run.options.cycles, "device": run.device}
            found = in_process(subjects.cycles_of, **how)
            rows[f"{work.tensors} tensors"] = {
                f"{way}, ms": median(found[f"{way}_ms"][1:]) for way in ("pause", "resume")
            }
        limit.measure()
        plain = {"pause, ms": limit.ms("out", several.total), "resume, ms": limit.ms("into", several.total)}
    run.table(f"{size(several.total)} in tensors", {**rows, "plain pinned copies": plain})


def holes(run: Run) -> None:
    number, nbytes = run.options.holes, 4 * KIB
    rows = in_process(pairs, number=number, nbytes=nbytes)
    run.table(f"an allocation and its free, us; {number} holes of {nbytes} bytes", rows)


def pairs(number: int, nbytes: int) -> Sample:
    found: Sample = {}
    for name, pieces in (("without holes", 2), ("with holes", 2 * number)):
        region = memsaver.region(name, device="cpu")
        held = [region.empty((nbytes,), torch.uint8) for _ in range(pieces)]
        del held[::2]
        # The smaller ones come second: the place of a tensor is no hole before the library has seen its free.
        found[name] = {"larger than a hole": _pair_us(region, 2 * nbytes), "as large": _pair_us(region, nbytes)}
    return found


def _pair_us(region: memsaver.Region, nbytes: int) -> float:
    took = []
    for _ in range(PAIRS):
        begin = time.perf_counter_ns()
        tensor = region.empty((nbytes,), torch.uint8)
        del tensor
        took.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(took)


def trim(run: Run) -> None:
    work = Work(600, (2 if run.small else 24) * MIB, backup="none")
    found = in_process(trimmed, work=work, device=run.device)
    run.table(f"{work.tensors} tensors of {size(work.nbytes)}, every {EVERY}th stays", {"memsaver.trim()": found})


def trimmed(work: Work, device: str) -> Sample:
    region = memsaver.region("trimmed", device=device)
    with region:
        every = work.allocate(device)
    kept = Contents(every[::EVERY])
    every.clear()
    synchronize(device)
    before = region.mapped_bytes
    took = timed(device, lambda: memsaver.trim(region.tag))
    kept.check()
    live = sum(tensor.nbytes for tensor in kept.tensors)
    return {"ms": took, "before, MiB": before / MIB, "after, MiB": region.mapped_bytes / MIB, "live, MiB": live / MIB}


PARTS = {"regions": regions, "tensors": tensors, "holes": holes, "trim": trim}
