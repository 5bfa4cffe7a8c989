"""The cost of many regions, many tensors, many holes, a large trim, and a second GPU with access.

    python benchmarks/scale.py [--only regions tensors holes trim peers] [--regions 1000] [--cycles 5] [--device cuda:0]

- regions: seconds to make and enter regions, each with a small tensor, and to close them; addresses of the process
  before, with, and after them. Beside it, torch's own: a MemPool each. (The host driver: 10,000, without tensors.)
- tensors: pause and resume of 100,000 tensors of 64 KiB in ms, beside one tensor of as many bytes, and beside plain
  pinned copies of them.
- holes: microseconds of an allocation and its free in a region with 150,000 holes, which are too small or just large
  enough, beside the same in a region without.
- trim: 600 tensors of 24 MiB of which every 40th stays; ms, and the mapped bytes before and after. Beside it, torch's
  ``empty_cache()`` in its default pool.
- peers: pause and resume of 16 GiB with access for one GPU, and for two (where there are two).

Prints these lines, then one JSON line. Each part runs in processes of its own; contents are compared after each
resume and trim. ``--small``, and with it ``--device cpu``, the host driver, has smaller numbers of tensors and bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import memsaver
from support.arguments import add_device, add_small, count, parse, parser_for
from support.environment import environment
from support.host import GIB, KIB, MIB, status
from support.limits import Limit
from support.processes import Sample, in_process
from support.work import Contents, Work, milliseconds, size, synchronize

PARTS = ("regions", "tensors", "holes", "trim", "peers")
PAIRS = 2000  # allocations and frees that are timed


def addresses() -> int:
    return status()["VmSize"]


# Regions


def many_regions(number: int, device: str) -> Sample:
    """Ours: regions that are made, entered and closed."""
    on_gpu = device != "cpu"
    torch.empty(1000, device=device)  # the context is not part of the measurement
    with memsaver.region("first", device=device):
        torch.empty(1000, device=device)
    before = addresses()
    regions, tensors = [], []
    begin = time.perf_counter()
    for i in range(number):
        regions.append(memsaver.region(f"region {i}", device=device))
        with regions[-1]:
            if on_gpu:
                tensors.append(torch.full((1000,), float(i), device=device))
    synchronize(device)
    made = time.perf_counter() - begin
    held = addresses()
    tensor: torch.Tensor | None = None
    for i, tensor in enumerate(tensors):
        if float(tensor[-1]) != i or not regions[i].owns(tensor.data_ptr()):
            raise AssertionError(f"tensor {i} is not in its region, or holds something else")
    tensors.clear()
    tensor = None  # the last of them is in a region too
    begin = time.perf_counter()
    for region in regions:
        region.close()
    closed = time.perf_counter() - begin
    regions.clear()
    gc.collect()
    return {"made_s": made, "closed_s": closed, "addresses": [before, held, addresses()]}


def many_pools(number: int, device: str) -> Sample:
    """torch's own: a pool over its default allocator each."""
    torch.cuda.set_device(device)
    torch.empty(1000, device=device)
    before = addresses()
    pools, tensors = [], []
    begin = time.perf_counter()
    for i in range(number):
        pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(pools[-1], device=device):
            tensors.append(torch.full((1000,), float(i), device=device))
    synchronize(device)
    made = time.perf_counter() - begin
    held = addresses()
    tensors.clear()
    begin = time.perf_counter()
    pools.clear()
    torch.cuda.empty_cache()
    return {"made_s": made, "closed_s": time.perf_counter() - begin, "addresses": [before, held, addresses()]}


# Tensors


class Numbered:
    """Tensors that each hold their number, plus the changes: a hundred thousand are changed and compared at once."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.changes = 0
        self._where = [tensor.data_ptr() for tensor in tensors]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)

    def change(self) -> None:
        torch._foreach_add_(self.tensors, 1)
        self.changes += 1

    def check(self) -> None:
        if [tensor.data_ptr() for tensor in self.tensors] != self._where:
            raise AssertionError("addresses changed")
        found = torch.cat(self.tensors).view(len(self.tensors), -1)
        numbers = torch.arange(len(self.tensors), device=found.device) + self.changes
        if not bool((found == numbers[:, None]).all()):
            raise AssertionError("contents differ after a cycle")


def pauses_of(number: int, nbytes: int, device: str, cycles: int) -> Sample:
    """Milliseconds of pauses and resumes of so many tensors, after a first of each."""
    region = memsaver.region("work", device=device, backup="host")
    with region:
        tensors = Work(number, nbytes, backed_up=True).allocate(device)
    contents = Numbered(tensors)
    pauses, resumes = [], []
    for _ in range(cycles + 1):
        contents.change()
        pauses.append(milliseconds(device, region.pause))
        resumes.append(milliseconds(device, region.resume))
        contents.check()
    return {"pause_ms": pauses[1:], "resume_ms": resumes[1:]}


# Holes


def pairs_us(core: Any, nbytes: int) -> float:
    """Median microseconds of an allocation in a region and its free, as torch's segments are made, without torch."""
    took = []
    for _ in range(PAIRS):
        begin = time.perf_counter_ns()
        held = core.allocate_array(nbytes)
        del held
        took.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(took)


def holes(number: int, nbytes: int, device: str) -> Sample:
    """In a region with so many holes of ``nbytes`` each, and in one without."""
    found: Sample = {}
    for name, pieces in (("without holes", 2), ("with holes", 2 * number)):
        core = memsaver.region(name, device=device)._core
        pieces_held = [core.allocate_array(nbytes) for _ in range(pieces)]
        del pieces_held[::2]
        synchronize(device)
        # The small ones come second: their place is no hole until the library has seen its free.
        found[name] = {"larger_us": pairs_us(core, 2 * nbytes), "fitting_us": pairs_us(core, nbytes)}
    return found


# A trim


def trim(number: int, nbytes: int, every: int, device: str) -> Sample:
    region = memsaver.region("trimmed", device=device)
    with region:
        tensors = Work(number, nbytes, backed_up=False).allocate(device)
    tensors = Numbered(tensors).tensors
    kept, where = tensors[::every], [tensor.data_ptr() for tensor in tensors[::every]]
    del tensors
    synchronize(device)
    before = region.mapped_bytes
    took = milliseconds(device, lambda: memsaver.trim("trimmed"))
    for i, tensor in enumerate(kept):
        if tensor.data_ptr() != where[i] or not bool((tensor == i * every).all()):
            raise AssertionError(f"tensor {i * every} has moved, or holds something else")
    return {"ms": took, "before": before, "after": region.mapped_bytes, "live": region.allocated_bytes}


def empty_cache(number: int, nbytes: int, every: int, device: str) -> Sample:
    torch.cuda.set_device(device)
    kept = Work(number, nbytes, backed_up=False).allocate(device)[::every]
    synchronize(device)
    before = torch.cuda.memory_reserved()
    took = milliseconds(device, torch.cuda.empty_cache)
    live = sum(tensor.nbytes for tensor in kept)
    return {"ms": took, "before": before, "after": torch.cuda.memory_reserved(), "live": live}


# A second GPU


def pauses_with_access(work: Work, device: str, peers: list[str], cycles: int) -> Sample:
    for peer in peers:
        torch.zeros(1, device=peer)
    memsaver.configure(peers=peers)
    region = memsaver.region("work", device=device, backup="host")
    with region:
        tensors = work.allocate(device)
    contents = Contents(tensors)
    pauses, resumes = [], []
    for _ in range(cycles + 1):
        contents.change()
        pauses.append(milliseconds(device, region.pause))
        resumes.append(milliseconds(device, region.resume))
        contents.check()
    return {"pause_ms": pauses[1:], "resume_ms": resumes[1:]}


class Run:
    """Each part prints its lines, and returns its part of the JSON line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device: str = options.device
        self.small: bool = options.small

    def measure(self, name: str, function: Callable[..., Sample], text: Callable[[Sample], str], **how: Any) -> Sample:
        sample = in_process(function, device=self.device, **how)
        print(f"  {name:34} {sample['error'] if 'error' in sample else text(sample)}", flush=True)
        return sample

    def regions(self) -> Sample:
        number = self.options.regions

        def text(sample: Sample) -> str:
            before, held, after = (nbytes / GIB for nbytes in sample["addresses"])
            each = (sample[key] for key in ("made_s", "closed_s"))
            seconds = ", ".join(f"{name} {took:.2f} s" for name, took in zip(("made", "closed"), each))
            return f"{seconds}; addresses {before:.0f} GiB before, {held:.0f} with, {after:.0f} after"

        print(f"{number} regions, each entered" + (" with a small tensor" if self.device != "cpu" else ""))
        found = {"memsaver": self.measure("memsaver", many_regions, text, number=number)}
        if self.device != "cpu":
            found["torch"] = self.measure("torch, a MemPool each", many_pools, text, number=number)
        return {"number": number, "samples": found}

    def tensors(self) -> Sample:
        number, nbytes = (2_000 if self.small else 100_000), 64 * KIB
        print(f"{number} tensors of 64 KiB, {size(number * nbytes)}")
        limit = Limit(number * nbytes, self.device)
        limit.measure()
        cycles = self.options.cycles
        rows = {"so many tensors": (number, nbytes), "one tensor": (1, number * nbytes)}
        found = {
            name: self.measure(name, pauses_of, medians, number=rows[name][0], nbytes=rows[name][1], cycles=cycles)
            for name in rows
        }
        limit.measure()
        plain: dict[str, Any] = {way: limit.milliseconds(way, number * nbytes) for way in ("out", "into")}
        limit.close()
        print(f"  {'plain pinned copies':34} {limit.error or 'out {out:.1f} ms, in {into:.1f} ms'.format(**plain)}")
        return {"number": number, "nbytes": nbytes, "samples": found, "plain_ms": plain}

    def holes(self) -> Sample:
        number, nbytes = (20_000 if self.small else 150_000), (4 if self.device == "cpu" else 64) * KIB
        print(f"{number} holes of {nbytes // KIB} KiB: an allocation and its free")
        sample = in_process(holes, device=self.device, number=number, nbytes=nbytes)
        for name in ("without holes", "with holes"):
            what = "larger than a hole {larger_us:.1f} us, as large {fitting_us:.1f} us"
            print(f"  {name:34} {sample['error'] if 'error' in sample else what.format(**sample[name])}", flush=True)
        return {"number": number, "nbytes": nbytes, "samples": sample}

    def trim(self) -> Sample:
        number, nbytes, every = 600, (2 if self.small else 24) * MIB, 40

        def text(sample: Sample) -> str:
            before, after, live = (sample[key] / MIB for key in ("before", "after", "live"))
            return f"{sample['ms']:.1f} ms; {before:.0f} MiB before, {after:.0f} after, {live:.0f} live"

        print(f"{number} tensors of {size(nbytes)}, of which every {every}th stays")
        work = {"number": number, "nbytes": nbytes, "every": every}
        found = {"memsaver": self.measure("memsaver.trim()", trim, text, **work)}
        if self.device != "cpu":
            found["torch"] = self.measure("torch.cuda.empty_cache()", empty_cache, text, **work)
        return {**work, "samples": found}

    def peers(self) -> Sample:
        if self.device == "cpu" or torch.cuda.device_count() < 2:
            print("a second GPU: there is none")
            return {}
        work = Work(256, (1 if self.small else 64) * MIB, backed_up=True)
        other = next(name for name in ("cuda:0", "cuda:1") if name != self.device)
        print(f"{work}")
        return {
            name: self.measure(name, pauses_with_access, medians, work=work, peers=peers, cycles=self.options.cycles)
            for name, peers in {"access for its own GPU": [self.device], "for two": [self.device, other]}.items()
        }


def medians(sample: Sample) -> str:
    pause, resume = (statistics.median(sample[way]) for way in ("pause_ms", "resume_ms"))
    return f"pause {pause:.1f} ms, resume {resume:.1f} ms"


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--regions", type=count, help="(default: 1000, on the CPU 10000)")
    parser.add_argument("--cycles", type=count, default=5, help="after a first")
    add_device(parser)
    add_small(parser)
    options = parse(parser, regions=(1000, 10_000))
    begin = time.monotonic()
    run = Run(options)
    parts = {part: getattr(run, part)() for part in options.only}
    result = {"benchmark": "scale", **environment(options.device), "small": options.small, "parts": parts}
    print(json.dumps({**result, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
