"""A first pause in a new process, and the host memory that the process holds after it."""

from __future__ import annotations

import time
from typing import Any

import torch

import memsaver
from support import host
from support.processes import Sample
from support.work import RETAIN, Contents, Work, milliseconds

WAIT_S = 30.0


def host_held(device: str) -> int:
    held: int = memsaver.stats().devices[device].host_held_bytes
    return held


def wait_for_arena(device: str, nbytes: int) -> None:
    """Until the background has grown pinned memory for so many bytes."""
    deadline = time.monotonic() + WAIT_S
    while host_held(device) < nbytes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{host_held(device)} of {nbytes} bytes are pinned after {WAIT_S:.0f} s")
        time.sleep(0.02)


def segment_bytes(region: Any) -> int | None:
    """Of the segments that torch holds in the region, by torch's own account; None where torch keeps none."""
    if region.device == "cpu":
        return None
    return sum(each["total_size"] for each in torch.cuda.memory_snapshot() if region.owns(each["address"]))


def measure(work: Work, device: str, ahead: bool) -> Sample:
    """``ahead``: the pause comes once the arena has grown in the background, else without growth in the background.

    Then host memory is touched before, since a virtual machine's first touch measures the machine under it.
    """
    sample: Sample = {"bytes": work.total}
    if not ahead:
        sample["touch_s"] = host.touch_once(work.total + work.total // 4)
    memsaver.configure(retain=RETAIN, backup_ahead=ahead)
    region = memsaver.region("work", device=device, backup="host")
    Contents([torch.empty(1, dtype=torch.int64, device=device)])  # torch loads its code for them here
    before = host.status()
    begin = time.perf_counter()
    with region:
        tensors = work.allocate(device)
    contents = Contents(tensors)
    if ahead:
        wait_for_arena(device, region.allocated_bytes)
        sample["growth_s"] = time.perf_counter() - begin
    sample["pause_ms"] = milliseconds(device, region.pause)
    after = host.status()
    sample["host_held_bytes"] = host_held(device)
    sample["allocated_bytes"], sample["segment_bytes"] = region.allocated_bytes, segment_bytes(region)
    for name in ("VmRSS", "VmPin", "VmLck"):
        if name in before:
            sample[f"{name}_growth_bytes"] = after[name] - before[name]
    sample["resume_ms"] = milliseconds(device, region.resume)
    contents.check()
    return sample
