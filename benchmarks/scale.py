"""The cost of many regions and many tensors.

- regions: seconds to make regions and enter each with a small tensor, and to close them; addresses of the process
  before, with and after them. On the host driver they have no tensors.
- tensors: a pause and a resume of 100,000 tensors of 64 KiB, beside one tensor of as many bytes.

Each row is from a process of its own. Contents are compared after each resume.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

import memsaver
from benchmarks.harness import subjects
from benchmarks.harness.command import Options, Run, count
from benchmarks.harness.limits import Limit
from benchmarks.harness.machine import GIB, KIB, status
from benchmarks.harness.processes import Sample, in_process
from benchmarks.harness.work import Work, median, size, synchronize

DEVICES = ("cuda", "cpu")


def options(parser: Options) -> None:
    parser.choice("--only", PARTS, "the parts")
    parser.size("--regions", count, 1000, 100, "number of regions")
    parser.size("--tensors", count, 100_000, 500, "number of tensors")
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


PARTS = {"regions": regions, "tensors": tensors}
