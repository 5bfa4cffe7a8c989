"""The cost of the driver's virtual memory calls by size of chunk, without memsaver: the floor of each transition.

Medians in ms for the whole size. The driver scrubs released memory before it is used again: with --rest the cycles
are some seconds apart, and the memory is clean.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from ctypes import byref, c_int, c_size_t, c_uint64
from typing import Any

import torch

from benchmarks.harness.command import Options, Run, count, not_negative
from benchmarks.harness.machine import GIB, MIB

DEVICES = ("cuda",)
CHUNKS = (2 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB)
PINNED, POSIX_DESCRIPTOR, DEVICE, READ_WRITE = 1, 1, 1, 3  # values of CUmemAllocationProp and CUmemAccessDesc


def options(parser: Options) -> None:
    parser.size("--gib", count, 64, 2, "bytes in each cycle")
    parser.add_argument("--cycles", type=count, default=5, help="after a first one")
    parser.add_argument("--rest", type=not_negative, default=0.0, help="seconds between two cycles")


def measure(run: Run) -> None:
    total, index = run.options.gib * GIB, int(run.device.partition(":")[2])
    torch.zeros(1, device=run.device)  # makes the context
    driver, base = ctypes.CDLL("libcuda.so.1"), c_uint64()
    _call(driver, "cuMemAddressReserve", byref(base), c_size_t(total), c_size_t(0), c_uint64(0), c_uint64(0))
    rows = {}
    for size in CHUNKS:
        cycles = []
        for _ in range(run.options.cycles + 1):
            time.sleep(run.options.rest)
            cycles.append(cycle(driver, index, base.value, total, size))
        steps = {step: statistics.median(each[step] for each in cycles[1:]) for step in cycles[0]}
        rows[f"{size // MIB} MiB"] = {f"{step}, ms": took for step, took in steps.items()}
    run.table(f"{run.options.gib} GiB in chunks of", rows)


def cycle(driver: ctypes.CDLL, index: int, base: int, total: int, size: int) -> dict[str, float]:
    """One life of ``total`` bytes in chunks of ``size``: milliseconds of each step."""
    handles, took = [c_uint64() for _ in range(total // size)], dict[str, float]()
    properties = (c_int * 8)(PINNED, POSIX_DESCRIPTOR, DEVICE, index)  # the rest of the 32 bytes is zero
    access, whole = (c_int * 3)(DEVICE, index, READ_WRITE), (c_uint64(base), c_size_t(total))
    places = [(c_uint64(base + at * size), c_size_t(size)) for at in range(len(handles))]
    steps: dict[str, Any] = {
        "create": ("cuMemCreate", [(byref(each), c_size_t(size), byref(properties), c_uint64(0)) for each in handles]),
        "map": ("cuMemMap", [(*place, c_size_t(0), each, c_uint64(0)) for place, each in zip(places, handles)]),
        "set access": ("cuMemSetAccess", [(*whole, byref(access), c_size_t(1))]),
        "unmap": ("cuMemUnmap", [whole]),
        "release": ("cuMemRelease", [(each,) for each in handles]),
    }
    for step, (name, calls) in steps.items():
        begin = time.perf_counter()
        for arguments in calls:
            _call(driver, name, *arguments)
        took[step] = (time.perf_counter() - begin) * 1e3
    return took


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    if (code := getattr(driver, name)(*arguments)) != 0:
        raise RuntimeError(f"{name} returned {code}, expected 0")
