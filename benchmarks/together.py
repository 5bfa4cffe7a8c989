"""Several processes, one for each GPU, that switch at the same moment, beside the same copies without memsaver.

    python benchmarks/together.py [--processes N] [--gib 16] [--cycles 5] [--device cuda]

Prints GB/s of each process and of all (medians), then one JSON line. In each process a region goes out while another
comes in, both backed up; in turn with it, plain pinned copies move as many bytes both ways at once. Before each a
barrier holds all processes. Contents are random, change before every switch, and are compared whole after it. Each
process needs three times ``--gib`` of its device, and twice of the host's memory, which is touched before: a virtual
machine may have to get it first. With ``--device cpu`` it runs on the host driver, and measures nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from threading import Barrier
from typing import Any

import torch

import memsaver
from support import host
from support.arguments import add_device, count, parse, parser_for, positive
from support.environment import environment
from support.host import GIB, MIB
from support.limits import PlainCopies
from support.processes import CONTEXT, Process, Sample, in_process, side_by_side
from support.switches import Sides, switch
from support.work import RETAIN, Work, size, synchronize

FOOTPRINT = 2 * GIB  # of host memory that the plain copies of one direction go through
WAIT_S = 120.0
WARM_UP = 2
WAYS = ("memsaver", "plain copies")


def touch(nbytes: int) -> Sample:
    return {"seconds": host.touch_once(nbytes)}


def take_turns(work: Work, cycles: int, device: str, barrier: Barrier) -> Sample:
    """Begin and end of every switch and of every plain copy, in seconds by the machine's clock."""
    try:
        if device != "cpu":
            torch.cuda.set_device(device)
        memsaver.configure(retain=RETAIN, host_limit=2 * work.total + GIB)  # the system's available memory may grow
        sides = Sides(work, device)
        copies = PlainCopies(work.total, device, FOOTPRINT)
        spans: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}

        def timed_switch(out: Any, into: Any) -> None:
            barrier.wait(WAIT_S)
            begin = time.perf_counter()
            switch(out, into)
            synchronize(device)
            spans["memsaver"].append((begin, time.perf_counter()))

        for _ in range(WARM_UP + cycles):
            sides.turn(timed_switch)
            synchronize(device)
            barrier.wait(WAIT_S)
            begin = time.perf_counter()
            copies.both()
            spans["plain copies"].append((begin, time.perf_counter()))
        return {"bytes": 2 * work.total, "spans": {way: each[WARM_UP:] for way, each in spans.items()}}
    except BaseException:
        barrier.abort()  # the others need not wait
        raise


def rates(samples: list[Sample], way: str) -> tuple[list[float], float]:
    """GB/s of each process and of all together, from the first to begin to the last to end; medians over cycles."""
    spans = [sample["spans"][way] for sample in samples]
    nbytes = samples[0]["bytes"]
    each = [statistics.median(nbytes / (end - begin) / 1e9 for begin, end in one) for one in spans]
    lasted = [max(end for _, end in cycle) - min(begin for begin, _ in cycle) for cycle in zip(*spans)]
    return each, statistics.median(len(spans) * nbytes / seconds / 1e9 for seconds in lasted)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--processes", type=count, help="by default one for each GPU; on the CPU two")
    parser.add_argument("--gib", type=positive, help="out of each, and as many in (default: 16, on the CPU 0.125)")
    parser.add_argument("--cycles", type=count, default=5, help="after two to warm up")
    add_device(parser, numbered=False)
    options = parse(parser, gib=(16.0, 0.125))
    begin = time.monotonic()
    gpus = torch.cuda.device_count() if options.device != "cpu" else 2
    number = options.processes or gpus
    work = Work(max(1, int(options.gib * GIB) // (64 * MIB)), 64 * MIB, backed_up=True)
    host_bytes = number * (2 * work.total + 2 * min(work.total, FOOTPRINT))
    print(f"{number} processes, {size(work.total)} out and as many in; host memory: {size(host_bytes)}", flush=True)
    touched = in_process(touch, nbytes=host_bytes) if number > 1 else {"seconds": 0.0}
    print(f"touched first: {touched}", flush=True)

    barrier = CONTEXT.Barrier(number)
    devices = ["cpu" if options.device == "cpu" else f"cuda:{i % gpus}" for i in range(number)]
    arguments = {"work": work, "cycles": options.cycles, "barrier": barrier}
    processes = [Process(take_turns, device=device, **arguments) for device in devices]
    samples = side_by_side(processes, barrier.abort)
    for process in processes:
        process.close()

    result: dict[str, Any] = {
        "benchmark": "together",
        **environment(options.device),
        "processes": number,
        "gb_per_s": {},
    }
    errors = [f"{device}: {sample['error']}" for device, sample in zip(devices, samples) if "error" in sample]
    if errors:
        print("\n".join(errors))
    else:
        print(f"{'GB/s':14}" + "".join(f"{device:>9}" for device in devices) + f"{'all':>9}")
        for way in WAYS:
            each, together = rates(samples, way)
            result["gb_per_s"][way] = {"each": each, "all": together}
            print(f"{way:14}" + "".join(f"{rate:9.1f}" for rate in (*each, together)))
        ours, plain = (result["gb_per_s"][way]["all"] for way in WAYS)
        print(f"memsaver's part of the plain copies: {100 * ours / plain:.0f} %")
    print(json.dumps({**result, "touched": touched, "samples": samples, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
