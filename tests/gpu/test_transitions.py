"""Pauses and resumes on a real device: work in flight, a neighbour, several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memsaver
from tests import controls
from tests.gpu.fixtures import Make
from tests.support import MIB

pytestmark = pytest.mark.gpu


def test_a_pause_waits_for_work_in_flight_on_every_stream(fresh: Make) -> None:
    region = fresh("flight", "host")
    with region:
        first, second = torch.zeros(16 * MIB, device="cuda"), torch.zeros(16 * MIB, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda._sleep(400_000_000)
    first.add_(1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        second.add_(2)
    region.pause()
    torch.cuda.synchronize()  # a lost context would raise here
    region.resume()
    assert bool((first == 1).all()) and bool((second == 2).all())


def test_a_freed_segment_rests_until_its_work_is_done(fresh: Make) -> None:
    region = fresh()
    with region:
        tensor = torch.zeros(64 * MIB, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        tensor.add_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
    del tensor
    adapter: Any = memsaver._adapter.adapter()
    pools = adapter._pools[region]
    pools.retire_idle().clear()  # torch frees the segment now, with the work still running
    assert region.allocated_bytes == 0 and region.mapped_bytes > 0
    torch.cuda.synchronize()
    memsaver.trim(region.tag)
    assert region.mapped_bytes == 0


def test_a_fault_at_every_driver_call_loses_nothing(fresh: Make, driver_free: Callable[[], int]) -> None:
    out, into = fresh("out", "host"), fresh("in", "host")
    first, second = out.empty((40 * MIB,)).fill_(1), into.empty((70 * MIB,)).fill_(2)
    into.pause()
    controls.with_cuda()
    moves = {
        "pause": (lambda: out.pause(), lambda: out.resume()),
        "switch": (
            lambda: memsaver.switch(pause=out.tag, resume=into.tag),
            lambda: memsaver.switch(pause=into.tag, resume=out.tag),
        ),
    }
    for move, back in moves.values():
        controls.disarm()
        move()
        calls = controls.calls()
        back()
        for kind in ("error", "memory"):
            for nth in range(1, calls + 1):
                controls.arm(nth, kind)
                try:
                    move()
                except memsaver.Error:
                    controls.disarm()
                    move()
                finally:
                    controls.disarm()
                back()
                assert bool((first == 1).all()), (kind, nth)
    into.resume()
    assert bool((second == 2).all())
    free, lost = driver_free(), memsaver._core.unreleased_bytes()  # by faults of releases, which are not repeated
    memsaver.pause([out.tag, into.tag])
    assert out.mapped_bytes == into.mapped_bytes == 0
    assert driver_free() >= free + 440 * MIB
    assert memsaver._core.unreleased_bytes() == lost
