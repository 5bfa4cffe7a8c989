"""Small operations: an allocation, a pause and a resume of 1 MiB.

One line for each figure, for a comparison of two commits on one machine: copy benchmarks/ to the other checkout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory

import torch

import memsaver
from benchmarks.harness.command import Options, Run, count
from benchmarks.harness.machine import MIB
from benchmarks.harness.processes import Sample, in_process
from benchmarks.harness.work import Contents, synchronize

DEVICES = ("cuda", "cpu")
WARM_UP = 20
BLOCK = 50  # cycles


def options(parser: Options) -> None:
    parser.add_argument("--cycles", type=count, default=300, help="after 20")
    parser.add_argument("--rounds", type=count, default=3, help="processes that measure")


def measure(run: Run) -> None:
    found = [in_process(figures, device=run.device, cycles=run.options.cycles) for _ in range(run.options.rounds)]
    rows = {name: _row([took for each in found for took in each[name]]) for name in found[0]}
    run.table("us", rows)


def _row(took: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(took), "least": min(took), "p99": statistics.quantiles(took, n=100)[-1]}


def figures(device: str, cycles: int) -> Sample:
    """Microseconds of each call."""
    found: Sample = {}
    region = memsaver.region("allocated", device=device)
    found["allocation of 1 MiB and its free"] = _timed(lambda: region.empty((MIB,), torch.uint8), cycles)
    region.close()
    for backup in ("none", "host"):
        region = memsaver.region(f"backup {backup}", device=device, backup=backup)
        contents = Contents([region.empty((MIB // 8,), torch.int64)], kept=backup != "none")
        synchronize(device)
        with TemporaryDirectory() as folder:
            for block in range(2 * -(-cycles // BLOCK)):  # one without a trace, one with it, in turn
                traced = f"{folder}/trace.json" if block % 2 else None
                memsaver.configure(trace=traced)
                pauses: list[float] = []
                resumes: list[float] = []
                for _ in range(WARM_UP + BLOCK):
                    pauses += _timed(region.pause, 1, warm_up=0)
                    resumes += _timed(region.resume, 1, warm_up=0)
                for name, took in (("pause", pauses), ("resume", resumes)):
                    row = f"{name} of 1 MiB, backup {backup}{', with a trace' if traced else ''}"
                    found.setdefault(row, []).extend(took[WARM_UP:])
            memsaver.configure(trace=None)
        contents.check()
    return found


def _timed(call: Callable[[], object], number: int, warm_up: int = WARM_UP) -> list[float]:
    took = []
    for _ in range(warm_up + number):
        begin = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - begin) / 1e3)
    return took[warm_up:]
